"""scripts/install-system-packages: what it finds missing. It is never let install anything."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"


def missing(*options: str, python: Path | str = sys.executable, path: str | None = None) -> set[str]:
    done = subprocess.run(
        ["/bin/bash", ROOT / "scripts" / "install-system-packages", "--list", *options],
        env={"PATH": path or os.environ["PATH"], "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


@pytest.fixture
def python_with_headers_in(tmp_path: Path):
    """This Python, whose C headers would lie in another folder."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sysconfig\nsysconfig.get_path = lambda name: {str(tmp_path / 'include')!r}\n"
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python, tmp_path / "include"


def test_a_gpus_worker_needs_the_headers_of_the_python_that_is_used(python_with_headers_in) -> None:
    python, headers = python_with_headers_in
    assert f"{PYTHON}-dev" in missing("--for-gpu", python=python)
    assert f"{PYTHON}-dev" not in missing(python=python), "only a GPU's launcher is compiled"
    headers.mkdir()
    (headers / "Python.h").touch()
    assert f"{PYTHON}-dev" not in missing("--for-gpu", python=python)


def test_a_gpus_worker_needs_the_headers_of_the_c_library() -> None:
    assert ("libc6-dev" in missing("--for-gpu")) == (not Path("/usr/include/stdio.h").exists())


def test_a_command_that_is_not_there_is_missing_by_its_packages_name(tmp_path: Path) -> None:
    assert {"bubblewrap", "gcc"} <= missing(path=str(tmp_path))
    assert {"chromium", "chromium-driver", "redis-server"} <= missing("--for-tests", path=str(tmp_path))
    for name in ("bwrap", "gcc"):
        (tmp_path / name).symlink_to(sys.executable)
    assert not {"bubblewrap", "gcc"} & missing(path=str(tmp_path))


def test_images_of_gpu_workers_have_what_the_script_installs() -> None:
    installed = (ROOT / "docker" / "worker-gpu.Dockerfile").read_text().split()
    assert {"bubblewrap", "libseccomp2", "gcc", "libc6-dev", "python3-dev", "python3-venv"} <= set(installed)


def test_make_asks_for_what_the_gpu_needs_where_there_is_one() -> None:
    for device, asked in (("gpu", True), ("cpu", False)):
        said = subprocess.run(
            ["make", "-n", "system", f"DEVICE={device}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert ("--for-gpu" in said) is asked
