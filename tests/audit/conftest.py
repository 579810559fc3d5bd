"""Triton reads this when functions are decorated, so it is set before any test module imports Triton."""

import os

os.environ["TRITON_INTERPRET"] = "1"
