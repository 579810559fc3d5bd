"""Kernels run in the interpreter here: Triton reads the variable when it is imported, so it is set before that."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from workers.interpreter import prepare_interpreter


@pytest.fixture(autouse=True, scope="session")
def _mended_interpreter() -> None:
    torch.set_num_threads(1)
    prepare_interpreter()
