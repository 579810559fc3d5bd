"""Warm, single-use processes in which a student's file may run, and the facts about how they ended.

A `SandboxPool` keeps a few candidates started ahead of need: bubblewrap, a uid of their own, every namespace, no
network, a system-call filter, a cgroup. Each waits for one job and is thrown away after it. Where the host cannot do
all of that, `Isolation` says what is missing. docs/decisions/0002-sandbox.md has the reasons.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import itertools
import logging
import mmap
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from workers import gate, processes
from workers.cgroups import Cgroup, CgroupError, name_for, owner_of, sweep_cgroups
from workers.isolation import (
    FIRST_SLOT_UID,
    NO_ISOLATION,
    OWN_PROCESSES,
    SLOTS,
    Limits,
    Recipe,
    SandboxUnavailable,
    host_isolation,
    launch,
    may_use_slots,
)
from workers.processes import Owner
from workers.protocol import Channel, PeerGoneError, ProtocolError, TimedOutError

_LOCKS = Path("/run/tilegrade/slots")
_WARM_LIMIT_S = 120.0
_FAILED_STARTS = 3
_FREEZE_LIMIT_S = 2.0
_LOOK_S = 0.02
_END_LIMIT_S = 5.0
log = logging.getLogger("tilegrade.sandbox")

_GATE_LIMIT_S = 3.0  # a context takes a tenth of it
_OWN_END_LIMIT_S = 1.0  # freeing gigabytes or thousands of files takes most of it on a busy host

__all__ = [
    "Ending",
    "Limits",
    "NotFrozenError",
    "Sandbox",
    "SandboxPool",
    "SandboxUnavailable",
    "host_isolation",
    "sweep_leftovers",
]

Cause = Literal["exited", "signal", "memory-limit", "output-limit", "cpu-limit", "killed"]


class NotFrozenError(Exception):
    """A process tree went on running when told to stop: nothing it may still write can be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a candidate ended, as the kernel tells it.

    Only `exit_code` and `signal` can be forged: bubblewrap's own process in there runs as the candidate's user.
    """

    cause: Cause
    exit_code: int | None  # when it ended by itself
    signal: int | None  # likewise; bubblewrap tells exit code 128 + n and signal n apart as little as a shell does
    memory_peak_bytes: int | None  # None where nothing counts it
    output_bytes_total: int
    stdout: bytes
    stderr: bytes
    processes_left: int  # alive although killed: 0, or the host needs looking at


class Sandbox:
    """One process tree for one job. Made by a pool; `kill` ends it, and must be called."""

    def __init__(
        self,
        *,
        process: subprocess.Popen[bytes],
        sock: socket.socket,
        outputs: tuple[int, int],
        arena: mmap.mmap,
        cgroup: Cgroup,
        limits: Limits,
        on_end: Callable[[Sandbox], None],
    ) -> None:
        self.channel = Channel(sock)
        self.arena = arena  # shared with the candidate; stays readable after its end
        self.pid = process.pid
        self._process = process
        self._sock = sock
        self._cgroup = cgroup
        self._limits = limits
        self._on_end = on_end
        self._started = time.monotonic()
        self._ending: Ending | None = None
        self._lock = threading.RLock()
        self._flooded = False
        self._outputs = outputs
        self._heads = (bytearray(), bytearray())
        self._output_bytes_total = 0
        self._n_own = 0  # processes of its tree before anything of a student's ran
        self._stop_reading = os.eventfd(0, os.EFD_CLOEXEC)
        self._reader = threading.Thread(target=self._read_outputs, name=f"sandbox-{self.pid}", daemon=True)
        self._reader.start()

    def freeze(self) -> None:
        """Stop every thread of the tree; returns once none runs.

        Raises:
            NotFrozenError: some still did after two seconds. Kill it and believe nothing it wrote.
        """
        try:
            if self._cgroup.can_freeze:
                self._cgroup.freeze(_FREEZE_LIMIT_S)
            else:
                processes.stop(self._below, _FREEZE_LIMIT_S)
        except (CgroupError, processes.StillRunningError) as exc:
            raise NotFrozenError(str(exc)) from exc
        except FileNotFoundError:
            pass  # killed meanwhile, so nothing runs

    def thaw(self) -> None:
        """Let it run on."""
        if self._cgroup.can_freeze:
            with contextlib.suppress(FileNotFoundError):
                self._cgroup.thaw()
        else:
            for pid in self._below():
                processes.send(pid, signal.SIGCONT)

    def hurry(self) -> None:
        """Give it the share of the processor it has while it works, after that with which it got ready."""
        if self._limits.start_nice:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            processes.set_nice(self._tree(), min(19, own + self._limits.nice))

    def over_limit(self) -> Literal["output-limit", "memory-limit"] | None:
        """The limit it ran into, as soon as that is known; the examiner need not wait any longer."""
        if self._flooded:
            return "output-limit"
        return "memory-limit" if self._cgroup.oom_kills() else None

    def n_started_processes(self) -> int:
        """How many processes there are beyond those it had when it was ready."""
        return max(0, len(processes.alive(self._tree())) - self._n_own) if self._is_alive() else 0

    def memory_peak_bytes(self) -> int | None:
        """Highest memory of the whole tree since the last reset; None where nothing counts it."""
        return self._cgroup.memory_peak_bytes()

    def reset_memory_peak(self) -> None:
        """Start counting the peak anew."""
        self._cgroup.reset_memory_peak()

    def kill(self) -> Ending:
        """End the whole tree and say how it ended. When this returns nothing of it is left. May be called again."""
        with self._lock:
            if self._ending is None:
                self._ending = self._end()
                self._on_end(self)
            return self._ending

    def finish(self, timeout_s: float) -> Ending:
        """Let it end by itself, so that what it prints at its end is read too; kill it when it does not in time."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)  # a candidate that finds no more requests leaves
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.kill()

    def wait_ready(self, timeout_s: float) -> None:
        """Wait for its first frame. Raises what Channel.receive does, and ProtocolError for another frame."""
        message = self.channel.receive(timeout_s)
        if message["op"] != "ready":
            raise ProtocolError(f"first frame was {message['op']!r}")
        if message.get("note"):  # from code of ours: no file is there yet
            log.warning("a candidate got ready, but: %s", str(message["note"])[:500])
        if self._has_hung_up() or not self._is_alive():
            raise PeerGoneError("ended after it was ready")
        self._n_own = len(processes.alive(self._tree()))

    def warm_time_left_s(self) -> float:
        """How much longer it may take to get ready."""
        return self._started + _WARM_LIMIT_S - time.monotonic()

    def _is_alive(self) -> bool:
        return self._process.poll() is None

    def _end(self) -> Ending:
        self._await_own_end()
        by_us = self._is_alive()
        tree = self._tree()
        deadline = time.monotonic() + _END_LIMIT_S
        while self._is_alive() and time.monotonic() < deadline:
            self._signal_kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.005)
        self._process.kill()  # only if it is still there: it reaps the tree, so it goes last
        self._process.wait()
        left = self._cgroup.pids() | processes.alive(tree)
        self._finish_reading()
        oom_kills = self._cgroup.oom_kills()
        peak = self._cgroup.memory_peak_bytes()
        self._cgroup.remove(max(0.1, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes an examiner that waits on it in another thread
        self._sock.close()
        exit_code, number = (None, None) if by_us else _read_status(self._process.returncode)
        return Ending(
            cause=self._cause(by_us, oom_kills, number),
            exit_code=exit_code,
            signal=number,
            memory_peak_bytes=peak,
            output_bytes_total=self._output_bytes_total,
            stdout=bytes(self._heads[0]),
            stderr=bytes(self._heads[1]),
            processes_left=len(left),
        )

    def _cause(self, by_us: bool, oom_kills: int, number: int | None) -> Cause:
        if self._flooded:
            return "output-limit"
        if oom_kills:
            return "memory-limit"
        if by_us:
            return "killed"
        if number == signal.SIGXCPU:
            return "cpu-limit"
        return "exited" if number is None else "signal"

    def _await_own_end(self) -> None:
        """A candidate that closed its socket is ending; its status, a moment later, says more than our SIGKILL."""
        if self._is_alive() and self._has_hung_up():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_OWN_END_LIMIT_S)

    def _has_hung_up(self) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        return bool(poller.poll(0))

    def _below(self) -> set[int]:
        """The tree, without the process of ours at its root that reaps it."""
        return processes.tree(self.pid) - {self.pid} if self._is_alive() else set()

    def _tree(self) -> set[int]:
        return self._cgroup.pids() if self._cgroup.folders else self._below()

    def _signal_kill(self) -> None:
        if self._cgroup.folders:
            self._cgroup.signal_kill()
            return
        below = self._below()
        # all stopped before the first dies: those not reached yet would start more
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in below:
                processes.send(pid, number)

    def _read_outputs(self) -> None:
        """Drain both pipes to their end, so that a full one never blocks the candidate, and keep their heads."""
        heads = dict(zip(self._outputs, self._heads, strict=True))
        poller = select.poll()
        for fd in (*self._outputs, self._stop_reading):
            poller.register(fd, select.POLLIN)
        waiting = set(self._outputs)
        while waiting:
            for fd, _ in poller.poll():
                if fd == self._stop_reading:
                    return
                chunk = os.read(fd, 65536)
                if not chunk:
                    poller.unregister(fd)
                    waiting.remove(fd)
                    continue
                self._output_bytes_total += len(chunk)
                head = heads[fd]
                head += chunk[: self._limits.output_bytes - len(head)]
                if not self._flooded and self._output_bytes_total > self._limits.output_total_bytes:
                    self._flooded = True
                    self._signal_kill()

    def _finish_reading(self) -> None:
        self._reader.join(0.5)
        if self._reader.is_alive():  # without isolation a process may have got away with the pipe
            os.eventfd_write(self._stop_reading, 1)
            self._reader.join()
        for fd in (*self._outputs, self._stop_reading):
            os.close(fd)


class SandboxPool:
    """Keeps `size` candidates warm and hands each out once.

    Args:
        argv_env: environment variables beside the usual ones, such as TRITON_INTERPRET.
        arena_bytes: size of the memory each candidate shares with us.
        refill: start another as soon as one was taken; without it, more than `size` are started only for who waits.
        isolation: "auto" for the best this host can do, "none" for a plain process with resource limits.
        slots: the slots (uid 61000 + slot) to use, as root; None takes any that no other worker on this host uses.
        gpu: give access to the NVIDIA devices, and allow the system calls that CUDA makes.
        program: a file to run in place of workers/candidate.py.
        under: a command that starts the candidate, given its own as arguments: path and options.
    """

    def __init__(
        self,
        *,
        argv_env: Mapping[str, str],
        arena_bytes: int,
        limits: Limits,
        size: int,
        refill: bool = True,
        isolation: Literal["auto", "none"] = "auto",
        slots: Sequence[int] | None = None,
        gpu: bool = False,
        program: Path | None = None,
        under: Sequence[str] = (),
    ) -> None:
        self.isolation = host_isolation() if isolation == "auto" else NO_ISOLATION
        self._limits = limits
        self._arena_bytes = arena_bytes
        self._size = size
        self._refill = refill
        self._n_started = self._n_waiting = 0
        self._recipe = Recipe(
            isolated=isolation == "auto", limits=limits, env=argv_env, gpu=gpu, program=program, under=under
        )
        self._slots = _Slots(slots) if self._recipe.isolated and may_use_slots() else None
        self._slot: int | None = None  # taken for the candidate that is started next
        self._owner = Owner.myself()
        self.tag = f"{id(self):x}"  # in the names of its cgroups
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._started: deque[Sandbox | Exception] = deque()
        self._live: dict[int, tuple[int | None, Path | None]] = {}
        self._sandboxes: set[Sandbox] = set()
        self._failed_in_a_row = 0
        self._closed = False
        self._n_holds = 0
        # every candidate is the child of this one thread: a parent's death means the thread's, not the process's
        self._spawner = threading.Thread(target=self._keep_warm, name="sandbox-spawner", daemon=True)
        self._spawner.start()
        atexit.register(self.close)

    def take(self, timeout_s: float) -> Sandbox:
        """Hand out a warm candidate: it has said that it is ready and waits for its job.

        Raises:
            SandboxUnavailable: none got ready in time, or three in a row failed to start.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            sandbox = self._next_started(deadline)
            left_s = deadline - time.monotonic()
            try:
                sandbox.wait_ready(min(left_s, sandbox.warm_time_left_s()))
            except TimedOutError:
                if sandbox.warm_time_left_s() > 0:
                    self._put_back(sandbox)
                    raise SandboxUnavailable(f"no candidate was ready within {timeout_s:.1f} s") from None
                self._count_failure(f"not ready after {_WARM_LIMIT_S:.0f} s", sandbox.kill())
            except (PeerGoneError, ProtocolError) as exc:
                self._count_failure(str(exc), sandbox.kill())
            else:
                self._failed_in_a_row = 0
                sandbox.hurry()
                return sandbox

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep candidates that get ready from a device meanwhile; waits for those that are at it just now.

        Held by several, or twice, they wait until the last lets go.
        """
        with self._changed:
            self._n_holds += 1
            arenas = self._gates()
            for arena in arenas:
                gate.close(arena)
        gate.await_idle(arenas, _GATE_LIMIT_S)
        try:
            yield
        finally:
            with self._changed:
                self._n_holds -= 1
                for arena in self._gates() if not self._n_holds else []:
                    gate.open_again(arena)

    def await_gate(self, timeout_s: float) -> None:
        """While they are held: wait until those started have done all that needs no device, or for so long."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._changed:
                arenas = self._gates()
            if arenas and all(map(gate.waits, arenas)):
                return
            time.sleep(_LOOK_S)

    def _gates(self) -> list[mmap.mmap]:
        return [one.arena for one in self._started if isinstance(one, Sandbox)]

    def close(self) -> None:
        """End every candidate of this pool, those handed out too. May be called again."""
        with self._changed:
            self._closed = True
            self._started.clear()
            self._changed.notify_all()
        while self._spawner.is_alive():  # it may be starting one just now
            with self._changed:
                sandboxes = list(self._sandboxes)
            for sandbox in sandboxes:
                sandbox.kill()
            self._spawner.join(0.01)
        atexit.unregister(self.close)

    def _next_started(self, deadline: float) -> Sandbox:
        with self._changed:
            while not self._started:
                if self._closed:
                    raise SandboxUnavailable("the pool is closed")
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise SandboxUnavailable("no candidate could be started in time: every slot is in use")
                self._wait_for_one(left_s)
            found = self._started.popleft()
            if isinstance(found, Sandbox):
                gate.open_again(found.arena)  # whoever waits for it holds nothing
            self._changed.notify_all()
        if isinstance(found, Exception):
            raise SandboxUnavailable(f"a sandbox could not be started: {found}") from found
        return found

    def _wait_for_one(self, left_s: float) -> None:
        self._n_waiting += 1
        self._changed.notify_all()
        try:
            self._changed.wait(left_s)
        finally:
            self._n_waiting -= 1

    def _put_back(self, sandbox: Sandbox) -> None:
        with self._changed:
            self._started.appendleft(sandbox)
            self._changed.notify_all()

    def _count_failure(self, why: str, ending: Ending) -> None:
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= _FAILED_STARTS:
            self._failed_in_a_row = 0
            tail = ending.stderr[-2000:].decode(errors="replace").strip()
            raise SandboxUnavailable(
                f"{_FAILED_STARTS} candidates in a row failed to start ({why}; {ending.cause}, exit code "
                f"{ending.exit_code}, signal {ending.signal}). The last one wrote: {tail or 'nothing'}"
            )

    def _keep_warm(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not (self._wants_another() and self._take_slot()):
                    self._changed.wait()
                if self._closed:
                    while self._sandboxes:  # they die with this thread, and would leave zombies
                        self._changed.wait()
                    return
                slot, self._slot = self._slot, None
            started: Sandbox | Exception
            try:
                started = self._start(slot)
            except (OSError, RuntimeError) as exc:  # RuntimeError: no more threads on a host that is full
                self._release_slot(slot)
                started = exc
            with self._changed:
                self._started.append(started)
                self._n_started += 1
                if isinstance(started, Sandbox):
                    self._sandboxes.add(started)
                    if self._n_holds:
                        gate.close(started.arena)
                self._changed.notify_all()

    def _wants_another(self) -> bool:
        if self._refill or self._n_started < self._size:
            return len(self._started) < self._size
        return len(self._started) < self._n_waiting

    def _take_slot(self) -> bool:
        """Keep a free slot in `_slot`, where slots are used; False when there is none."""
        if self._slots is None:
            return True
        try:
            self._slot = self._slots.acquire()
        except OSError as exc:  # a folder for the locks that cannot be written to: whoever waits must hear of it
            self._started.append(exc)
            self._n_started += 1
            self._changed.notify_all()
            return False
        return self._slot is not None

    def _release_slot(self, slot: int | None) -> None:
        if self._slots is not None and slot is not None:
            self._slots.release(slot)

    def _start(self, slot: int | None) -> Sandbox:
        name = name_for(self._owner, f"{self.tag}.{next(self._numbers)}")
        limits = self._limits
        isolated = self._recipe.isolated
        cgroup = (
            Cgroup.create(name, memory_bytes=limits.memory_bytes, processes=limits.processes + OWN_PROCESSES)
            if isolated
            else Cgroup()
        )
        folder = None if isolated else Path(tempfile.mkdtemp(prefix=f"{name}."))
        with contextlib.ExitStack() as cleanup, contextlib.ExitStack() as on_failure:
            on_failure.callback(cgroup.remove, 1.0)
            if folder is not None:
                on_failure.callback(shutil.rmtree, folder, ignore_errors=True)
            ours, theirs = socket.socketpair()
            on_failure.callback(ours.close)
            cleanup.callback(theirs.close)
            arena_fd, arena = _make_arena(self._arena_bytes)
            cleanup.callback(os.close, arena_fd)
            pipes = (os.pipe(), os.pipe())
            for reading, writing in pipes:
                on_failure.callback(os.close, reading)
                cleanup.callback(os.close, writing)
            plan = self._recipe.plan(
                uid=None if slot is None else FIRST_SLOT_UID + slot,
                cgroup=cgroup,
                folder=folder,
                arguments=(theirs.fileno(), arena_fd, self._arena_bytes),
            )
            process = launch(plan, stdout=pipes[0][1], stderr=pipes[1][1], pass_fds=(theirs.fileno(), arena_fd))
            on_failure.callback(_stop, process)
            sandbox = Sandbox(
                process=process,
                sock=ours,
                outputs=(pipes[0][0], pipes[1][0]),
                arena=arena,
                cgroup=cgroup,
                limits=limits,
                on_end=self._ended,
            )
            on_failure.pop_all()
        self._live[process.pid] = (slot, folder)
        return sandbox

    def _ended(self, sandbox: Sandbox) -> None:
        slot, folder = self._live.pop(sandbox.pid)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        with self._changed:
            self._sandboxes.discard(sandbox)
            self._release_slot(slot)
            self._changed.notify_all()


def sweep_leftovers() -> list[str]:
    """Remove what workers left behind that were killed: cgroups and temporary folders. Says what it removed.

    Things of workers still alive are told apart by process number and start time, and left alone; so are those of
    other containers. Mounts need no sweeping: they are private to processes that died with their worker.
    """
    removed = sweep_cgroups()
    for folder in Path(tempfile.gettempdir()).glob("tilegrade-*"):
        owner = owner_of(folder.name)
        if owner is not None and owner.is_dead():
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                removed.append(str(folder))
    return removed


class _Slots:
    """Uids for candidates, each locked against other workers of this host for as long as it is used."""

    def __init__(self, slots: Sequence[int] | None) -> None:
        self._slots = range(SLOTS - 1) if slots is None else slots  # the last is host_isolation's
        self._held: dict[int, int] = {}
        _LOCKS.mkdir(mode=0o700, parents=True, exist_ok=True)

    def acquire(self) -> int | None:
        for slot in self._slots:
            if slot in self._held:
                continue
            fd = os.open(_LOCKS / str(slot), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            self._held[slot] = fd
            return slot
        return None

    def release(self, slot: int) -> None:
        os.close(self._held.pop(slot))


def _make_arena(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Memory shared with a candidate, sealed so that it can neither shrink under our feet (SIGBUS) nor grow."""
    fd = os.memfd_create("arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return fd, mmap.mmap(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _read_status(returncode: int) -> tuple[int | None, int | None]:
    """(exit code, signal) of the candidate from the exit code that launch.py and bubblewrap hand up."""
    if 128 < returncode <= 128 + signal.NSIG:
        return None, returncode - 128
    return returncode, None
