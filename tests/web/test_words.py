"""The row of steps and the sentence above it, for a submission on its way."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
from web_campus import ROOT, SLUG

from grader.assignment import load_assignment
from grader.models import State, Submission
from grader.submissions import Outlook
from grader.web.words import STEPS, live_line, steps

ASSIGNMENT = load_assignment(ROOT / "assignments" / SLUG)
BUSY = Outlook(n_waiting=5, n_running=1, n_workers=2, typical_s=60.0)


def a_submission(
    stages: str | None = None, *, state: State = State.RUNNING, device: str = "cpu", attempt: int = 1
) -> Submission:
    return Submission(id=1, state=state, stages=stages, device=device, attempt=attempt)


def shown(submission: Submission) -> dict[str, str]:
    """Every step with its status, and how much is done where that is said."""
    return {
        step.label: step.status + (f" {step.percent}" if step.percent is not None else "")
        for step in steps(submission, ASSIGNMENT)
    }


def test_stages_that_go_on_side_by_side_are_all_shown() -> None:
    found = shown(a_submission("preflight=100% numerics=40% memory=67% audit=100% compile=0%"))
    assert found == {
        "Queue": "done",
        "Load": "done",
        "Compile": "now",
        "Numerics": "now 40",
        "Structure": "done",
        "Memory": "now 67",
        "Report": "later",
    }


@pytest.mark.parametrize(
    ("stages", "now"),
    [
        pytest.param(None, ["Load"], id="just-claimed"),
        pytest.param("preflight=0%", ["Load"], id="loading"),
        pytest.param("compile=0%", ["Compile"], id="compiling-is-not-the-audit"),
        pytest.param("numerics=100% diagnosis=0%", ["Report"], id="the-report-is-written"),
        pytest.param("something-new=10%", [], id="a-stage-of-a-newer-worker"),
    ],
)
def test_what_a_worker_says_becomes_a_step_with_a_name_for_people(stages: str | None, now: list[str]) -> None:
    row = a_submission(stages)
    assert [step.label for step in steps(row, ASSIGNMENT) if step.status == "now"] == now
    line = live_line(row, None, assignment=ASSIGNMENT)
    assert line == (f"Grading: {now[0].lower()}." if now else "Grading.")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:h200"])
@pytest.mark.parametrize("axis", ["memory", "speed"])
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not-asked"])
def test_only_what_the_examination_has_is_a_step(device: str, axis: str, asked: bool) -> None:
    rules = ASSIGNMENT if asked else dataclasses.replace(ASSIGNMENT, **{axis: None})
    found = STEPS[axis] in [step.label for step in steps(a_submission(device=device), rules)]
    assert found == (asked and (axis == "memory" or device != "cpu"))


def test_every_step_is_shown_where_the_examination_has_them_all() -> None:
    assert list(shown(a_submission(device="cuda:h200"))) == list(STEPS.values())


def test_a_step_made_of_several_stages_is_not_done_before_the_last_of_them() -> None:
    assert shown(a_submission("rivals=100%", device="cuda"))["Speed"] == "now 99"
    assert shown(a_submission("rivals=100% speed=50%", device="cuda"))["Speed"] == "now 50"


@pytest.mark.parametrize("state", [state for state in State if state is not State.RUNNING])
def test_what_is_not_examined_is_all_done_or_all_to_come(state: State) -> None:
    found = set(shown(a_submission(state=state)).values())
    assert found == ({"done"} if state is State.DONE else {"now", "later"})


@pytest.mark.parametrize(
    ("place", "outlook", "line"),
    [
        (1, BUSY, "Queued. Yours is next, graded in about 1 minute."),
        (4, BUSY, "Queued. Yours is number 4 in line, graded in about 3 minutes."),
        (4, dataclasses.replace(BUSY, typical_s=None), "Queued. Yours is number 4 in line."),
        (1, dataclasses.replace(BUSY, n_workers=0), "Queued. No worker is running just now; it will be"),
        (None, BUSY, "Queued."),
    ],
)
def test_a_place_in_the_queue_comes_with_an_estimate(place: int | None, outlook: Outlook, line: str) -> None:
    assert live_line(a_submission(state=State.QUEUED), place, outlook).startswith(line)


def test_a_worker_that_was_lost_is_told_while_nobody_has_it_and_when_it_is_tried_again() -> None:
    now = datetime(2026, 11, 30, tzinfo=UTC)
    silent = a_submission("numerics=40%")
    silent.lease_until = now - timedelta(seconds=1)
    assert live_line(silent, None, now=now).startswith("Its worker stopped before it was done. It is tried again")
    assert live_line(silent, None, now=now - timedelta(seconds=2)) == "Grading: numerics 40 %."
    waiting = a_submission(state=State.QUEUED, attempt=1)
    waiting.lost_attempts = 1
    assert live_line(waiting, 1, BUSY).startswith("Its worker stopped before it was done. It is tried again")
    assert live_line(waiting, 1, BUSY).endswith("Queued. Yours is next, graded in about 1 minute.")
    again = a_submission("numerics=40%", attempt=2)
    again.lost_attempts = 1
    said = "Grading: numerics 40 %. This is attempt 2: a worker stopped before it was done."
    assert live_line(again, None, now=now) == said


def test_the_line_says_how_far_each_stage_is_and_which_attempt_it_is() -> None:
    row = a_submission("numerics=40% memory=0%", attempt=2)
    assert live_line(row, None) == "Grading: numerics 40 %, memory. This is attempt 2."
