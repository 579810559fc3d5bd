"""The whole examination on a real GPU. `pytest -m gpu tests/gpu` on a host that has one."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from grader.assignment import load_assignment
from grader.measurement import FailureKind, ProbeFailed, ReplayOutcome
from workers.sanitizer import find_sanitizer

sys.path.append(str(Path(__file__).parents[1] / "hostile"))

import hostile_cases  # the table of hostile files, which is no package

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROJECT = Path(__file__).parents[2]
CORPUS = PROJECT / "tests" / "corpus"
MISSING = [name for name in ("cuda.bindings", "pynvml") if importlib.util.find_spec(name.split(".")[0]) is None]
NEEDS = "an NVIDIA GPU with torch built for CUDA, cuda-bindings and nvidia-ml-py"


FORWARD = "flash-attention-forward"


@pytest.fixture(scope="module")
def warm():
    """One GPU with its pools and baselines for all tests: to start them anew for each takes most of the time."""
    if MISSING or not torch.cuda.is_available():
        why = f"{', '.join(MISSING)} not installed" if MISSING else "torch.cuda.is_available() says no"
        pytest.skip(f"needs {NEEDS}; here {why}")
    from workers.gpu_examination import WarmGpu

    made = WarmGpu(lanes=1)
    yield made
    made.close()


@pytest.fixture
def examine(warm):
    limits = load_assignment(PROJECT / "assignments" / FORWARD).limits  # each other set of them has pools of its own

    def run(source, *, slug=FORWARD, probes=None, speed=False, memory=True, replay="never", call_s=None):
        whole = load_assignment(PROJECT / "assignments" / slug)
        cases = tuple(case for case in whole.cases if probes is None or case.name in probes)
        return warm(
            dataclasses.replace(
                whole,
                cases=cases,
                memory=whole.memory if memory else None,
                speed=dataclasses.replace(whole.speed, sizes=whole.speed.sizes[:1], replay=replay) if speed else None,
                limits=dataclasses.replace(limits, call_s=call_s or limits.call_s),
            ),
            source,
            lambda _stage, _fraction: None,
        )

    return run


def hostile(name):
    """A file of tests/hostile, behind the honest one that it is built on."""
    return next(case.source() for case in hostile_cases.hostile() if case.name == name)


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
    assert [timing.ratio > 1.0 for timing in found.timings] == [True]
    # what the report's roofline and provenance rest on
    assert found.gpu.memory_bytes > 1 << 30
    assert found.timings[0].dtype in found.gpu.ceilings.flops_per_s
    assert min(found.timings[0].flops, found.timings[0].least_bytes, found.timings[0].eager_bytes) > 0
    assert len(found.timings[0].student_events_ms) == len(found.timings[0].student_times_ms)
    assert found.gpu.after.sm_clock_mhz > 0


@pytest.mark.parametrize("name", ["memoised", "late_kernel"])
def test_an_attack_on_the_clock_gets_no_time(examine, name):
    found = examine(hostile(name), speed=True, memory=False)
    assert not found.timings
    assert found.evidence


def test_memory_held_before_the_largest_call_is_a_sign(examine):
    found = examine(hostile("held_scratch"))
    assert [sign.kind for sign in found.evidence] == ["memory-held"]
    assert found.memory[0].peak_bytes > 4 << 30


@pytest.mark.parametrize("name", ["scores_in_arena", "scores_on_host"])
def test_scores_kept_elsewhere_are_seen(examine, name):
    found = examine(hostile(name))
    # a host that is slow to give 4 GiB ends the call at its limit
    assert found.too_slow or found.memory[-1].failure or found.memory[-1].peak_bytes > 1 << 30
    assert not found.evidence


def test_library_attention_at_timed_sizes_alone_is_seen(examine):
    found = examine(hostile("library_at_timed_sizes"), probes=("random", "causal"), speed=True, memory=False)
    assert any("flash_attention" in call.op for call in found.large_library_calls)


def test_a_slow_pilot_buys_no_short_windows(examine):
    source = hostile("slow_pilot")
    sources = source, source.replace(b"time.sleep(0.1)", b"pass")
    dawdling, honest = (examine(one, speed=True, memory=False).timings[0].ratio for one in sources)
    assert dawdling == pytest.approx(honest, rel=0.03)


def test_what_is_wrong_at_full_size_alone_is_wrong_and_not_held(examine):
    found = examine(hostile("far_keys"), speed=True, memory=False)
    assert [(call.output, call.failure) for call in found.large_calls] == [("o", None)]
    assert found.large_calls[0].rel_error > found.large_calls[0].limit
    assert not found.timings
    assert not found.evidence


def wild(axis_size):
    """A correct kernel that stores far outside lse where there are so many queries; the source and the line of it."""
    source = hostile("far_keys").decode()
    store = "tl.store(lse_ptr + at,"
    assert source.count(store) == 1
    line = source[: source.index(store)].count("\n") + 1
    return source.replace(store, f"tl.store(lse_ptr + at + (n_queries == {axis_size}) * (1 << 40),").encode(), line


def test_a_wild_store_is_named_with_its_line_and_later_probes_still_run(examine):
    source, line = wild(300)
    found = examine(source, memory=False)
    failed = [run for run in found.probes if isinstance(run, ProbeFailed)]
    assert failed
    assert all("CUDA error: an illegal memory access" in run.failure.message for run in failed)
    assert len(failed) < len(found.probes)
    if find_sanitizer() is None:
        pytest.skip("compute-sanitizer is not installed, so nothing names the line")
    assert found.device_fault.line == line
    assert found.device_fault.kernel == "attend"
    assert "write of size 4" in found.device_fault.what


def test_a_kernel_that_never_ends_is_stopped_and_the_next_file_is_graded(examine):
    endless = (CORPUS / "online-softmax" / "infinite-loop.py").read_bytes()
    found = examine(endless, slug="online-softmax", call_s=3.0)
    kinds = {run.failure.kind for run in found.probes if isinstance(run, ProbeFailed)}
    assert kinds == {FailureKind.TIME_LIMIT}
    after = examine((CORPUS / "online-softmax" / "ok-row-block.py").read_bytes(), slug="online-softmax")
    assert all(one.rel_error <= one.limit for run in after.probes for one in run.outputs)


def test_how_much_shared_memory_was_asked_for_is_known(examine):
    source = (CORPUS / FORWARD / "needs-bigger-shared-memory.py").read_bytes()
    found = examine(source, probes=("random", "head-dim-64"), memory=False)
    said = [run.failure.message for run in found.probes if isinstance(run, ProbeFailed)]
    assert said
    assert all("Required: 245760, Hardware limit: 232448" in one for one in said)


@pytest.mark.parametrize(
    ("slug", "name"),
    [
        ("flash-attention-forward", "ok-raw-strides"),
        ("flash-attention-forward", "ok-base2-class"),
        ("flash-attention", "ok-three-kernels"),
        ("fused-bias-dropout-layernorm", "ok-single-block"),
        ("online-softmax", "ok-base2-autotune"),
    ],
)
def test_the_kernels_of_a_correct_file_do_the_work_without_its_python(examine, slug, name):
    source = (CORPUS / slug / f"{name}.py").read_bytes()
    found = examine(source, slug=slug, probes=("random", "causal", "long"), speed=True, memory=False, replay="always")
    assert found.replay.outcome is ReplayOutcome.AGREES, found.replay.detail
    assert found.replay.ratio == pytest.approx(found.timings[0].ratio, rel=0.1)
    assert not found.evidence


def test_a_kernel_that_only_carries_torchs_answer_does_not(examine):
    probes = ("random", "causal")
    found = examine(hostile("copies_torch"), probes=probes, speed=True, memory=False, replay="always")
    assert found.replay.outcome is ReplayOutcome.DIFFERS
    assert "replay-differs" in {sign.kind for sign in found.evidence}
