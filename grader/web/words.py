"""The word and the tone of every state and verdict. The tone is a class of the style sheet, never the only sign."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from grader.assignment import Assignment
from grader.models import Result, State, Submission
from grader.submissions import Outlook, stages_of
from grader.wording import about

# what the pages call the worker's stages, in the order in which they begin; several go on side by side
STEPS = {
    "queued": "Queue",
    "preflight": "Load",
    "compile": "Compile",
    "numerics": "Numerics",
    "audit": "Structure",
    "memory": "Memory",
    "speed": "Speed",
    "report": "Report",
}
# stages that have no step of their own, and the step they belong to
_WITHIN = {
    "starting": "preflight",
    "scrub": "numerics",
    "rivals": "speed",
    "load": "speed",
    "timing": "speed",
    "plain-calls": "speed",
    "replay": "speed",
    "second-look": "numerics",
    "diagnosis": "report",
}


@dataclass(frozen=True, slots=True)
class Word:
    """How something is shown: a class for its colour and sign, a word, and a sentence where one helps."""

    tone: str
    text: str
    sentence: str = ""


_VERDICTS = {
    "full": Word("good", "Full marks"),
    "partial": Word("warn", "Partial"),
    "wrong": Word("bad", "Wrong result"),
    "error": Word("bad", "Error"),
    "limit": Word("bad", "Over a limit"),
    "refused": Word("bad", "Refused"),
    "held": Word("mute", "Being checked"),
    "not_counted": Word("mute", "Does not count"),
}
_AXES = {
    "pass": Word("good", "Pass"),
    "partial": Word("warn", "Partial"),
    "fail": Word("bad", "Fail"),
    "error": Word("bad", "Error"),
    "limit": Word("bad", "Over a limit"),
    "not_measured": Word("mute", "Not measured"),
    "not_run": Word("mute", "Not run"),
}
_STATES = {
    State.QUEUED: Word("busy", "Queued", "Waiting in the queue."),
    State.RUNNING: Word("busy", "Grading", "A worker is grading it."),
    State.FAULTED: Word(
        "mute",
        "Not graded yet",
        "Something of ours failed, and we are on it. It costs you neither points nor an attempt.",
    ),
    State.CANCELLED: Word("mute", "Withdrawn", "This submission was withdrawn before it was graded."),
}


# what is written down of a submission
_ACTS = {
    "cancel": "withdrawn or stopped",
    "confirm": "decided that it does not count",
    "give-up": "given up",
    "rejudge": "judged again",
    "release": "published",
    "run-again": "sent to be measured again",
}


def act_of(action: str) -> str:
    return _ACTS.get(action, action)


def verdict_of(verdict: str) -> Word:
    return _VERDICTS.get(verdict, Word("mute", verdict))


def axis_of(verdict: str) -> Word:
    return _AXES.get(verdict, Word("mute", verdict))


def state_of(submission: Submission, result: Result | None) -> Word:
    """Where a submission stands, in one word: its verdict once it has one, also while it is measured again."""
    if result is not None:
        return verdict_of(result.verdict)
    return _STATES.get(submission.state, Word("busy", "Grading"))


def ungraded_of(state: str) -> Word:
    """A state of what has no verdict yet."""
    return _STATES[State(state)]


@dataclass(frozen=True, slots=True)
class Step:
    label: str
    status: str  # done | now | later
    share: float | None = None  # of it that is done, where that is known and it is under way

    @property
    def percent(self) -> int | None:
        return None if self.share is None else round(self.share * 100)


def steps(submission: Submission, assignment: Assignment | None = None) -> tuple[Step, ...]:
    """The journey of a submission, for the row of steps on its page: only what its examination has.

    Args:
        assignment: None where its folder does not load.
    """
    left_out = set()
    if assignment and assignment.memory is None:
        left_out.add("memory")
    if not submission.device.startswith("cuda") or (assignment and assignment.speed is None):
        left_out.add("speed")
    names = [name for name in STEPS if name not in left_out]
    if submission.state is State.DONE:
        return tuple(Step(STEPS[name], "done") for name in names)
    if submission.state is not State.RUNNING:
        return tuple(Step(STEPS[name], "now" if name == "queued" else "later") for name in names)
    shares = {"queued": 1.0}
    for stage, share in stages_of(submission).items():
        name = _WITHIN.get(stage, stage)
        # of two stages within one step nobody knows which is longer: the step is not done before the next begins
        shares[name] = share if stage == name else min(share, 0.99)
    if len(shares) == 1:
        shares["preflight"] = 0.0
    elif set(shares) - {"queued", "preflight"}:
        shares["preflight"] = 1.0
    if "report" in shares:  # it begins when all others have ended
        shares |= {name: 1.0 for name in shares if name != "report"}
    return tuple(_step(name, shares.get(name)) for name in names)


def _step(name: str, share: float | None) -> Step:
    if share is None:
        return Step(STEPS[name], "later")
    return Step(STEPS[name], "done") if share >= 1 else Step(STEPS[name], "now", share or None)


def under_way(submission: Submission, assignment: Assignment | None = None) -> str:
    """The steps that go on now, each with how far it is; empty when none of ours is named."""
    going = [step for step in steps(submission, assignment) if step.status == "now"]
    return ", ".join(step.label.lower() + (f" {step.percent} %" if step.share else "") for step in going)


def live_line(
    submission: Submission,
    place: int | None,
    outlook: Outlook | None = None,
    assignment: Assignment | None = None,
    *,
    now: datetime | None = None,
) -> str:
    """One sentence or two about a submission that is on its way.

    Args:
        place: 1 for the next to be taken.
        outlook: how busy its queue is; only for one that waits.
        now: to notice that its worker no longer says anything.
    """
    if submission.state is State.QUEUED and submission.lost_attempts:
        return f"{_LOST} {_in_line(place, outlook)}"
    if submission.state is State.QUEUED:
        return _in_line(place, outlook)
    if submission.state is State.RUNNING:
        if now is not None and submission.lease_until is not None and submission.lease_until < now:
            return f"{_LOST} Nothing for you to do."
        parts = under_way(submission, assignment)
        again = f" This is attempt {submission.attempt}" if submission.attempt > 1 else ""
        if again:
            again += ": a worker stopped before it was done." if submission.lost_attempts else "."
        return f"Grading: {parts}.{again}" if parts else f"Grading.{again}"
    word = _STATES.get(submission.state)
    return word.sentence if word else "Graded. The report is below."


_LOST = "Its worker stopped before it was done. It is tried again, and costs you neither points nor an attempt."


def _in_line(place: int | None, outlook: Outlook | None) -> str:
    if outlook is not None and not outlook.n_workers:
        return "Queued. No worker is running just now; it will be graded as soon as one is."
    wait_s = outlook.wait_s(place - 1) if outlook is not None and place else None
    when = f", graded in {about(wait_s)}" if wait_s is not None else ""
    if place == 1:
        return f"Queued. Yours is next{when}."
    return f"Queued. Yours is number {place} in line{when}." if place else "Queued."
