"""The word and the tone of every state and verdict. The tone is a class of the style sheet, never the only sign."""

from __future__ import annotations

from dataclasses import dataclass

from grader.models import Result, State, Submission

# what the pages call the worker's stages, in their order
STEPS = (
    ("queued", "Queue"),
    ("preflight", "Preflight"),
    ("numerics", "Numerics"),
    ("memory", "Memory"),
    ("audit", "Audit"),
    ("done", "Report"),
)
# stages that have no step of their own, and the step they belong to
_WITHIN = {"starting": "preflight", "compile": "audit", "timing": "audit", "diagnosis": "audit"}


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
    State.CANCELLED: Word("mute", "Cancelled", "This submission was withdrawn before it was graded."),
}


def verdict_of(verdict: str) -> Word:
    return _VERDICTS.get(verdict, Word("mute", verdict))


def axis_of(verdict: str) -> Word:
    return _AXES.get(verdict, Word("mute", verdict))


def state_of(submission: Submission, result: Result | None) -> Word:
    """Where a submission stands, in one word: its verdict once it has one."""
    if submission.state is State.DONE and result is not None:
        return verdict_of(result.verdict)
    return _STATES.get(submission.state, Word("busy", "Grading"))


@dataclass(frozen=True, slots=True)
class Step:
    label: str
    status: str  # done | now | later


def steps(submission: Submission) -> tuple[Step, ...]:
    """The journey of a submission, for the row of steps on its page."""
    names = [name for name, _ in STEPS]
    if submission.state is State.DONE:
        at = len(names)
    elif submission.state is State.RUNNING:
        stage = submission.stage or "starting"
        stage = _WITHIN.get(stage, stage)
        at = names.index(stage) if stage in names else 1
    else:
        at = 0
    return tuple(Step(label, "done" if i < at else "now" if i == at else "later") for i, (_, label) in enumerate(STEPS))


def live_line(submission: Submission, place: int | None, n_workers: int | None = None) -> str:
    """One sentence about a submission that is on its way."""
    if submission.state is State.QUEUED:
        if n_workers == 0:
            return "Queued. No worker is running just now; it will be graded as soon as one is."
        if place == 1:
            return "Queued. Yours is the next to be graded."
        return f"Queued. Yours is number {place} in line." if place else "Queued."
    if submission.state is State.RUNNING:
        label = next((step.label for step in steps(submission) if step.status == "now"), "")
        part = f", {submission.fraction:.0%} of this step" if submission.fraction else ""
        again = f" This is attempt {submission.attempt}." if submission.attempt > 1 else ""
        return f"Grading: {label.lower()}{part}.{again}"
    word = _STATES.get(submission.state)
    return word.sentence if word else "Graded. The report is below."
