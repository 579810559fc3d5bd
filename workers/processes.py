"""Trees of processes seen through /proc: who is below whom, who is stopped, and who owns what was left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


class StillRunningError(Exception):
    """A tree of processes could not be stopped in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One process, told apart from a later one with the same number, and from one of another pid namespace."""

    pid_namespace: int
    pid: int
    started: int  # in clock ticks after boot

    @classmethod
    def myself(cls) -> Owner:
        started = _stat(_PROC / "self/stat")
        assert started is not None
        return cls(pid_namespace=_own_namespace(), pid=os.getpid(), started=int(started[19]))

    def is_dead(self) -> bool:
        """False for one alive, and for one of another pid namespace, whose processes we cannot see."""
        if self.pid_namespace != _own_namespace():
            return False
        fields = _stat(_PROC / str(self.pid) / "stat")
        return fields is None or int(fields[19]) != self.started or fields[0] in "ZX"


def tree(root_pid: int) -> set[int]:
    """A process and everything below it, as one pass over /proc saw them."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat(entry / "stat")
            if fields is not None and fields[0] not in "ZX":
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [root_pid]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found if _stat(_PROC / str(root_pid) / "stat") else found - {root_pid}


def stop(find: Callable[[], set[int]], timeout_s: float) -> None:
    """Send SIGSTOP until every process that `find` finds is stopped and none is new.

    A stopped process may be continued by one not stopped yet, so one pass over all of them must see nothing run.
    """
    deadline = time.monotonic() + timeout_s
    seen: set[int] = set()
    while True:
        found = find()
        for pid in found:
            send(pid, signal.SIGSTOP)
        if found == seen and all(_is_stopped(pid) for pid in found):
            return
        seen = found
        if time.monotonic() > deadline:
            raise StillRunningError(f"{len(found)} processes not stopped within {timeout_s} s")
        time.sleep(0.0002)


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone, or become another user's."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def set_nice(pids: Iterable[int], nice: int) -> None:
    """Give every thread of these processes that niceness. Making it smaller needs root."""
    for pid in pids:
        with contextlib.suppress(OSError):  # gone
            for task in list((_PROC / str(pid) / "task").iterdir()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.setpriority(os.PRIO_PROCESS, int(task.name), nice)


def alive(pids: Iterable[int]) -> set[int]:
    """Those of `pids` that exist and are no zombies."""
    return {pid for pid in pids if (fields := _stat(_PROC / str(pid) / "stat")) is not None and fields[0] not in "ZX"}


def threads_of_user(uid: int) -> int:
    """How many tasks a user has on this host, as far as /proc shows them."""
    count = 0
    for entry in _PROC.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                count += sum(1 for _ in (entry / "task").iterdir())
    return count


def _is_stopped(pid: int) -> bool:
    try:
        tasks = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return True  # gone
    states = (fields[0] for task in tasks if (fields := _stat(task / "stat")) is not None)
    return all(state in "TtZX" for state in states)


def _stat(path: Path) -> list[str] | None:
    """Fields of a stat file from the third on: [0] state, [1] parent, [19] start time. None when it is gone."""
    try:
        # the second field is the name, which may hold spaces and brackets
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _own_namespace() -> int:
    return (_PROC / "self/ns/pid").stat().st_ino
