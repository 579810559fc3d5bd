"""A copy of the project to add assignments to, and its commands."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are decorated, so before any test module imports Triton

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("grader", "workers", "reference", "assignments", "migrations")

Tilegrade = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A copy of what `tilegrade` is made of."""
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / "project" / part, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "project"


@pytest.fixture
def tilegrade(project: Path) -> Tilegrade:
    """Runs a command of the copy, from within it."""

    def run(*arguments: str, status: int | None = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "grader.cli", *arguments],
            cwd=project,
            env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "TILEGRADE_DATA": str(project / "var")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert status is None or done.returncode == status, done.stdout + done.stderr
        return done

    return run
