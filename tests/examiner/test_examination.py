"""One examination, end to end, with files that are wrong in ways that only the order of things can catch."""

import dataclasses
import time

import pytest

from grader.measurement import FailureKind, ProbeFailed, ProbeMeasured, dumps, loads

SOFTMAX = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, y_ptr, lse_ptr, s0, s1, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    m, l = float("-inf"), 0.0
    for j in range(0, T, BLOCK):
        x = tl.load(x_ptr + row * s0 + (j + cols) * s1, mask=j + cols < T, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        l = l * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
        m = m_new
    for j in range(0, T, BLOCK):
        x = tl.load(x_ptr + row * s0 + (j + cols) * s1, mask=j + cols < T, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + row * T + j + cols, (tl.exp(x - m) / l).to(y_ptr.dtype.element_ty), mask=j + cols < T)
    tl.store(lse_ptr + row, m + tl.log(l))

def online_softmax(x):
    rows, T = x.shape
    y = torch.empty((rows, T), dtype=x.dtype, device=x.device)
    lse = torch.empty((rows,), dtype=torch.float32, device=x.device)
    kernel[(rows,)](x, y, lse, x.stride(0), x.stride(1), T, BLOCK=64)
    return y, lse
"""
SLUG = "online-softmax"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def good(grade_source):
    return grade_source(SOFTMAX.encode(), SLUG)


def test_a_right_file_gets_every_point_the_device_can_measure(good):
    examination, grade = good
    assert (grade["verdict"], grade["score"]["points"]) == ("full", grade["score"]["out_of"])
    assert all(isinstance(probe, ProbeMeasured) for probe in examination.probes)


def test_an_examination_survives_json(good):
    assert loads(dumps(good[0])) == good[0]


def test_the_same_seed_asks_the_same_questions(assignment_named, sandboxes):
    from workers.examination import examine

    runs = [examine(assignment_named(SLUG), SOFTMAX.encode(), sandboxes=sandboxes, seed=7) for _ in range(2)]
    errors = [[[out.rel_error for out in probe.outputs] for probe in run.probes] for run in runs]
    assert errors[0] == errors[1]


def test_fresh_examinations_ask_different_questions(good, grade_source):
    again, _ = grade_source(SOFTMAX.encode(), SLUG)
    assert again.seed != good[0].seed
    assert again.probes[0].outputs[0].rel_error != good[0].probes[0].outputs[0].rel_error


def test_a_file_that_dies_in_one_probe_still_shows_the_others(grade_source):
    source = SOFTMAX.replace(
        "    rows, T = x.shape\n", "    rows, T = x.shape\n    if T == 1:\n        import os; os._exit(3)\n"
    )
    examination, grade = grade_source(source.encode(), SLUG)
    failed = [probe for probe in examination.probes if isinstance(probe, ProbeFailed)]
    assert [(probe.name, probe.failure.kind) for probe in failed] == [("one-column", FailureKind.PYTHON_EXIT)]
    assert (grade["verdict"], grade["fault"]) == ("error", "python-exit")
    assert "status 3" in failed[0].failure.message


def test_a_loop_without_end_costs_its_own_limit_and_no_more(assignment_named, sandboxes):
    from workers.examination import examine

    assignment = assignment_named(SLUG)
    quick = dataclasses.replace(assignment, limits=dataclasses.replace(assignment.limits, call_s=1.0, total_s=30.0))
    started = time.monotonic()
    examination = examine(quick, b"def online_softmax(x):\n    while True: pass\n", sandboxes=sandboxes)
    assert time.monotonic() - started < 15
    (probe,) = examination.probes
    assert probe.failure.kind is FailureKind.TIME_LIMIT


def test_a_result_that_is_filled_in_later_is_wrong(grade_source):
    late = SOFTMAX.replace("def online_softmax", "def honest") + (
        "\nimport threading, time\n"
        "def online_softmax(x):\n"
        "    y, lse = torch.zeros_like(x), torch.zeros(x.shape[0])\n"
        "    x = x.clone()\n"
        "    def fill():\n"
        "        time.sleep(0.05)\n"
        "        a, b = honest(x); y.copy_(a); lse.copy_(b)\n"
        "    threading.Thread(target=fill, daemon=True).start()\n"
        "    return y, lse\n"
    )
    _, grade = grade_source(late.encode(), SLUG)
    assert grade["verdict"] == "wrong"
    assert grade["score"]["points"] == 0


def test_nothing_of_the_reference_can_be_seen(grade_source):
    spy = (
        "import os, sys\n"
        "found = [p for p in ('reference', 'grader', 'assignments', 'tests') for d in sys.path"
        " if os.path.exists(os.path.join(d, p))]\n"
        "found += [m for m in sys.modules if m.split('.')[0] in ('reference', 'grader')]\n"
        "print('SEEN', found, sorted(os.environ), os.listdir('/'))\n"
    )
    examination, _ = grade_source((spy + SOFTMAX).encode(), SLUG)
    assert "SEEN []" in examination.stdout
    assert "TILEGRADE" not in examination.stdout


def test_a_softmax_that_holds_whole_rows_keeps_its_numbers_and_loses_structure(grade_source):
    source = SOFTMAX.replace("BLOCK=64", "BLOCK=triton.next_power_of_2(T)")
    _, grade = grade_source(source.encode(), SLUG)
    assert (grade["verdict"], grade["fault"]) == ("partial", "row-in-one-tile")
    assert grade["axes"]["numerics"]["verdict"] == "pass"
    assert grade["axes"]["structure"]["failed"] == ["tile"]


def test_a_wide_tile_does_not_hide_a_missing_rescale(grade_source):
    source = SOFTMAX.replace("l = l * tl.exp(m - m_new)", "l = l").replace("BLOCK=64", "BLOCK=4096")
    _, grade = grade_source(source.encode(), SLUG)
    assert (grade["verdict"], grade["fault"]) == ("wrong", "no-rescale-denominator")
    assert grade["score"]["points"] == 0
