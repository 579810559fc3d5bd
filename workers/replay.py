"""Proof that a hand-in's kernels do the work: the examiner's side of a replay.

The student's process writes down what one call does at the headline size. Another process, which never saw the file,
launches those kernels on fresh inputs in windows like any other: its outputs must be right, and the time that was
graded must not be less than the kernels need. What cannot be replayed counts against nobody, but for torch operations
that the audit did not see: then something was hidden from it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from statistics import median

from grader.assignment import Assignment
from grader.judging import allowed_op, speed_fraction, speed_steps
from grader.measurement import Audit, Evidence, FailureKind, Replay, ReplayOutcome, Timing
from workers import claims, record
from workers.devices.gpu import TimedGpu
from workers.gpu_timing import Rival, Size, Stopwatch, VoidError, WrongRowsError
from workers.interview import CandidateFailedError, Interview
from workers.record import Record, RecordError
from workers.storages import is_copy, is_fill

# Of the ratio to naive. Windows of one file by two processes lie within 1 % of each other; the rest is for kernels of
# some ten microseconds, where the launches of the two processes take their time too.
BAND = 0.10
BUDGET_S = 0.8
RECORD_S = 20.0


def is_wanted(assignment: Assignment, timing: Timing, gpu: str) -> bool:
    """Whether the assignment asks for a replay of a file with this headline time."""
    speed = assignment.speed
    if speed is None or speed.replay == "never":
        return False
    return speed.replay == "always" or speed_fraction(speed_steps(speed, gpu), timing.ratio) >= 1.0


def replay(
    stopwatch: Stopwatch,
    size: Size,
    graded: Timing,
    student: Rival,
    others: Sequence[Rival],
    *,
    begin: Callable[[], Interview],
    gpu: TimedGpu,
    assignment: Assignment,
    clock: Callable[[], float] = time.perf_counter,
) -> Replay:
    """Record one call of the student's at this size, and time what was recorded.

    The student's process may have ended afterwards.

    Args:
        graded: the time of the student's file at this size.
        student: prepared for windows of this size.
        begin: starts a candidate that has the arena open and no file loaded.
    """
    found = Replay(outcome=ReplayOutcome.NOT_REPLAYABLE, axes=dict(size.axes))
    try:
        whole = record.parse(_recorded(student))
    except CandidateFailedError as exc:
        if exc.failure.kind is FailureKind.CRASHED:
            student.interview.end()  # what recording broke must not be asked again, and be held against the file
        return dataclasses.replace(found, detail=exc.failure.message[:300])
    except (RecordError, claims.ClaimError) as exc:
        return dataclasses.replace(found, detail=f"the record cannot be read: {exc}")
    kept, left_out = permitted(whole, assignment)
    found = dataclasses.replace(
        found,
        n_launches=kept.n_launches,
        torch_ops=tuple(sorted({one.base for steps in kept.operations.values() for one in steps})),
        left_out=tuple(sorted(left_out)),
    )
    if kept.reasons:
        return dataclasses.replace(found, detail="; ".join(kept.reasons)[:300])
    interview = begin()
    rival = Rival("student", interview, gpu, clock=clock)
    try:
        return _timed(stopwatch, size, graded, kept, rival, others, found)
    finally:
        interview.end()
        rival.close()


def conclude(found: Replay, audit: Audit | None) -> tuple[Replay, list[Evidence]]:
    """What follows from a replay, now that the audit is known too.

    A file that openly has torch do part of the work cannot be replayed whole; one that the audit saw nothing of the
    kind in did something else there than on the GPU.
    """
    if found.outcome not in (ReplayOutcome.DIFFERS, ReplayOutcome.SLOWER):
        return found, []
    seen = {_base(op.op) for op in audit.torch_ops} if audit is not None else set()
    hidden = [name for name in found.left_out if name not in seen]
    if found.left_out and not hidden:
        detail = f"the assignment does not allow {', '.join(found.left_out)}, and the file does it openly"
        return dataclasses.replace(found, outcome=ReplayOutcome.NOT_REPLAYABLE, detail=detail), []
    if hidden:
        detail = f"{found.detail}; torch did {', '.join(hidden)} there, and not in the audit"
        found = dataclasses.replace(found, detail=detail[:400])
    return found, [Evidence(kind=f"replay-{found.outcome.value}", message=found.detail)]


def permitted(whole: Record, assignment: Assignment) -> tuple[Record, set[str]]:
    """The record with those torch operations alone that the assignment allows, and the names of the others.

    What is listed for gradients that need no kernel of one's own is allowed in the backward alone.
    """
    listed = assignment.structure.torch_ops
    free_gradients = any(output.gradient and not output.own_kernel for output in assignment.outputs)
    left_out: set[str] = set()
    for phase, operations in whole.operations.items():
        allowed = listed if phase == "backward" or not free_gradients else ()
        strange = {
            one.base
            for one in operations
            if not (allowed_op(one.base, allowed) or is_fill(one.base) or is_copy(one.base))
        }
        left_out |= strange
        whole = whole.without(phase, strange)
    return whole, left_out


def _base(op: str) -> str:
    return op.removeprefix("aten::").removeprefix("aten.").split(".")[0]


def _recorded(student: Rival) -> bytes:
    interview = student.interview
    interview.sandbox.thaw()
    interview.ask({"op": "record", "most_bytes": record.MOST_BYTES}, stage="replay")
    try:
        length = claims.count(interview.answer(RECORD_S), "length")
        data = bytes(interview.sandbox.arena[: min(length, record.MOST_BYTES)])
        # the memory of its windows is needed for those of the replay; it must be unmapped here before it is freed there
        student.close()
        interview.ask({"op": "trim"}, stage="replay")
        interview.answer(RECORD_S)
    finally:
        interview.sandbox.freeze()
    return data


def _timed(
    stopwatch: Stopwatch,
    size: Size,
    graded: Timing,
    kept: Record,
    rival: Rival,
    others: Sequence[Rival],
    found: Replay,
) -> Replay:
    """Windows of a process that has the record alone, against the baselines, as those of the student's file were."""
    interview = rival.interview
    try:
        data = record.dump(kept)
        interview.sandbox.arena[: len(data)] = data
        interview.ask({"op": "replay", "length": len(data)}, stage="replay")
        interview.answer(RECORD_S)
        race = stopwatch.race(size, rival, others, budget_s=BUDGET_S, headline=False)
        timing = stopwatch.timing(size, race)
    except WrongRowsError as exc:
        detail = f"{exc.evidence.message}, with the recorded kernels alone"
        return dataclasses.replace(found, outcome=ReplayOutcome.DIFFERS, detail=detail)
    except CandidateFailedError as exc:
        # an address that was passed as a number, say: the record was no whole one
        return dataclasses.replace(found, detail=f"the recorded kernels do not run: {exc.failure.message[:200]}")
    except (claims.ClaimError, VoidError) as exc:
        return dataclasses.replace(found, detail=f"the replay said nothing: {exc}")
    replayed_ms, graded_ms = median(timing.student_times_ms), median(graded.student_times_ms)
    found = dataclasses.replace(found, time_ms=replayed_ms, ratio=timing.ratio)
    if not graded.ratio <= timing.ratio * (1 + BAND):
        detail = f"the recorded kernels take {replayed_ms:.4f} ms a call; the time that was graded is {graded_ms:.4f}"
        return dataclasses.replace(found, outcome=ReplayOutcome.SLOWER, detail=detail)
    return dataclasses.replace(found, outcome=ReplayOutcome.AGREES)
