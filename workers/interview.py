"""Asking one candidate questions, with a deadline for each, and saying why it did not answer."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from grader.assignment import Assignment
from grader.errors import GraderFault
from grader.measurement import Evidence, Failure, FailureKind
from reference.operation import Operation
from workers import claims
from workers.protocol import Channel, PeerGoneError, ProtocolError, TimedOutError
from workers.sandbox import Ending, Sandbox

# how often a waiting examiner looks whether the sandbox ran into a limit
_LOOK_S = 0.2


def load_request(assignment: Assignment, operation: Operation, length: int, offset: int = 0) -> dict[str, Any]:
    """Ask a candidate to load the source, `length` bytes at `offset` of its arena, and to find the entry point."""
    return {
        "op": "load",
        "offset": offset,
        "length": length,
        "entry": assignment.entry,
        "entry_kind": assignment.entry_kind,
        "signature": assignment.signature,
        "n_arguments": len(operation.inputs) + len(operation.options),
    }


class CandidateFailedError(Exception):
    """The candidate gave no result. `dead` says that the process is gone and another one is needed."""

    def __init__(self, failure: Failure, *, dead: bool) -> None:
        super().__init__(failure.message)
        self.failure, self.dead = failure, dead


class Allowance:
    """Seconds that the candidates of a hand-in are waited for, all of them together; what we do meanwhile is free."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self.left_s = seconds


class Interview:
    """One candidate process and the questions put to it, one at a time.

    Args:
        allowance: bounds all waits together, beside the limit that each has; None for candidates of ours.
    """

    def __init__(self, sandbox: Sandbox, allowance: Allowance | None = None) -> None:
        self.sandbox = sandbox
        self._allowance = allowance
        self.ending: Ending | None = None
        self.evidence: list[Evidence] = []
        self._channel: Channel = sandbox.channel
        self._stage = "load"
        self._request = 0
        self._answered = False

    def ask(self, message: dict[str, Any], *, stage: str) -> None:
        """Send one request; `answer` waits for what comes back.

        Answers carry its number. Nobody can guess that, so nothing sent before the request was read answers it, and a
        candidate that stopped reading cannot make us fill the socket until we wait for it.
        """
        self._stage = stage
        self._answered = False
        self._request = secrets.randbits(62)
        try:
            self._channel.send(message | {"request": self._request})
        except PeerGoneError:
            raise self._died() from None

    def spin(self, timeout_s: float) -> None:
        """Wait for an answer without sleeping, so that whoever reads a clock afterwards was not woken late."""
        with self._waiting(timeout_s) as most_s:
            deadline = time.monotonic() + most_s
            while not self._channel.has_input() and time.monotonic() < deadline:
                pass

    def answer(self, timeout_s: float) -> Mapping[str, Any]:
        """The candidate's answer. Raises CandidateFailedError when there is none, or when it says that it failed."""
        with self._waiting(timeout_s) as most_s:
            message = self._receive(most_s, timeout_s)
        if message.get("request") != self._request:
            raise self.broke_protocol("it answers another request")
        self._answered = True
        self._note_replaced(message)
        if message["op"] == "failed":
            try:
                failure = claims.failure(message, self._stage)
            except claims.ClaimError as exc:
                raise self.broke_protocol(str(exc)) from None
            raise CandidateFailedError(failure, dead=False)
        return message

    @contextlib.contextmanager
    def _waiting(self, timeout_s: float) -> Iterator[float]:
        """The seconds that may be waited now; those that were are taken from the allowance."""
        began = time.monotonic()
        try:
            yield timeout_s if self._allowance is None else min(timeout_s, max(0.0, self._allowance.left_s))
        finally:
            if self._allowance is not None:
                self._allowance.left_s -= time.monotonic() - began

    def _receive(self, most_s: float, limit_s: float) -> Mapping[str, Any]:
        deadline = time.monotonic() + most_s
        while True:
            try:
                return self._channel.receive(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
            except TimedOutError:
                if self.sandbox.over_limit():
                    raise self._died() from None
                if time.monotonic() >= deadline:
                    raise self._too_slow(most_s, limit_s) from None
            except PeerGoneError:
                raise self._died() from None
            except ProtocolError as exc:
                raise self.broke_protocol(str(exc)) from None

    def end(self) -> Ending:
        """Stop the whole process tree. Safe to call twice."""
        if self.ending is None:
            # a candidate at rest has no compiler at work: what runs beside it, the file left there
            left = self.sandbox.n_started_processes() if self._answered else 0
            if left:
                message = f"the file had started {left} more, which still ran when it had answered everything"
                self.evidence.append(Evidence(kind="processes-left", message=message))
            self.ending = self.sandbox.kill()
            if self.ending.processes_left:
                raise GraderFault(f"{self.ending.processes_left} processes of a candidate outlived their kill")
        return self.ending

    def _note_replaced(self, message: Mapping[str, Any]) -> None:
        """A claim that can only count against who makes it."""
        said = message.get("replaced", [])
        names = [str(name)[:80] for name in said[:20]] if isinstance(said, list) else ["something unreadable"]
        if names and not any(one.kind == "functions-replaced" for one in self.evidence):
            text = f"the file put something of its own in place of {', '.join(names)}"
            self.evidence.append(Evidence(kind="functions-replaced", message=text))

    def broke_protocol(self, detail: str) -> CandidateFailedError:
        """End a candidate whose answer cannot be read, and note it; the error is for the caller to raise."""
        self.end()
        self.evidence.append(Evidence(kind="broken-protocol", message=f"an answer was not one of ours: {detail}"))
        message = "the process that ran the file sent an answer that the grader cannot read"
        return CandidateFailedError(Failure(kind=FailureKind.NOT_OURS, message=message, stage=self._stage), dead=True)

    def _died(self) -> CandidateFailedError:
        ending = self.end()
        kind, message = _why(ending)
        return CandidateFailedError(Failure(kind=kind, message=message, stage=self._stage), dead=True)

    def _too_slow(self, waited_s: float, limit_s: float) -> CandidateFailedError:
        self.end()
        message = f"still running after {limit_s:.0f} s, the limit for one call"
        if self._allowance is not None and waited_s < limit_s:
            message = f"its calls took {self._allowance.seconds:.0f} s, the limit for all of them together"
        return CandidateFailedError(Failure(kind=FailureKind.TIME_LIMIT, message=message, stage=self._stage), dead=True)


def _why(ending: Ending) -> tuple[FailureKind, str]:
    """Failure kind and one sentence from how the process ended: facts of the kernel's, not claims."""
    match ending.cause:
        case "memory-limit":
            return FailureKind.MEMORY_LIMIT, "used more memory than a hand-in may"
        case "output-limit":
            return FailureKind.OUTPUT_LIMIT, f"printed {ending.output_bytes_total:,} bytes, more than a hand-in may"
        case "cpu-limit":
            return FailureKind.TIME_LIMIT, "used more processor time than a hand-in may"
        case "exited":
            return FailureKind.PYTHON_EXIT, f"the process left with status {ending.exit_code} before it gave a result"
        case _:
            return FailureKind.CRASHED, f"the process was ended by signal {ending.signal}"
