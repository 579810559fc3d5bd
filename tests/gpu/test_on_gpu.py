"""The whole examination on a real GPU. `pytest -m gpu tests/gpu` on a host that has one."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch

from grader.assignment import load_assignment
from grader.measurement import ProbeFailed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROJECT = Path(__file__).parents[2]
CORPUS = PROJECT / "tests" / "corpus"
MISSING = [name for name in ("cuda.bindings", "pynvml") if importlib.util.find_spec(name.split(".")[0]) is None]
NEEDS = "an NVIDIA GPU with torch built for CUDA, cuda-bindings and nvidia-ml-py"


@pytest.fixture
def examine():
    if MISSING or not torch.cuda.is_available():
        why = f"{', '.join(MISSING)} not installed" if MISSING else "torch.cuda.is_available() says no"
        pytest.skip(f"needs {NEEDS}; here {why}")
    from workers.gpu_examination import examine_once

    assignment = load_assignment(PROJECT / "assignments" / "flash-attention-forward")

    def run(source, *, speed=False):
        return examine_once(assignment if speed else dataclasses.replace(assignment, speed=None), source)

    return run


def test_a_correct_file_passes_every_probe_and_grows_with_t(examine):
    found = examine((CORPUS / "flash-attention-forward" / "ok-raw-strides.py").read_bytes())
    assert not found.evidence
    assert all(one.rel_error <= one.limit for run in found.probes for one in run.outputs)
    assert [point.failure for point in found.memory] == [None] * 3
    assert found.memory[-1].peak_bytes < 4 * found.memory[-1].reference_bytes


def test_stored_scores_do_not_fit_beside_the_ballast(examine):
    found = examine((CORPUS / "flash-attention-forward" / "stored-scores.py").read_bytes())
    assert "out of memory" in found.memory[-1].failure.message


def test_the_time_of_a_correct_file_is_measured_by_the_outside_clock(examine):
    found = examine((CORPUS / "flash-attention-forward" / "ok-raw-strides.py").read_bytes(), speed=True)
    assert found.timings[0].ratio > 1.0
    assert len(found.timings) == 2


@pytest.mark.parametrize("name", ["memoised", "far_keys", "late_kernel"])
def test_an_attack_on_the_clock_gets_no_time(examine, name):
    found = examine((PROJECT / "tests" / "hostile" / "files" / f"{name}.py").read_bytes(), speed=True)
    assert not found.timings
    assert found.evidence


def test_a_wild_store_is_named_and_later_probes_still_run(examine):
    source = (PROJECT / "tests" / "hostile" / "files" / "far_keys.py").read_text()
    wild = source.replace("tl.store(lse_ptr + at,", "tl.store(lse_ptr + at + (n_queries == 300) * (1 << 40),")
    assert wild != source
    found = examine(wild.encode())
    failed = [run for run in found.probes if isinstance(run, ProbeFailed)]
    assert failed
    assert all("CUDA error" in run.failure.message for run in failed)
    assert len(failed) < len(found.probes)
