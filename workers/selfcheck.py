"""Whether this host holds what a student's file must not do: tried, in real sandboxes, at every worker start.

`check_sandbox` puts workers/prober.py into sandboxes built exactly as a candidate's and has it try each wall;
`check_pools` starts one candidate of every kind that a device needs. A `Check` says what was tried, what was found and,
when it failed, what to do. A worker whose check fails takes no work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grader import assignment
from workers import processes
from workers.isolation import (
    FIRST_SLOT_UID,
    OWN_PROCESSES,
    SLOTS,
    Limits,
    SandboxUnavailable,
    hidden_paths,
    may_use_slots,
)
from workers.protocol import PeerGoneError, ProtocolError, TimedOutError
from workers.sandbox import Ending, Sandbox, SandboxPool
from workers.seccomp import SeccompError, candidate_filter

# small, so that reaching them takes a moment; the walls are those of every candidate
LIMITS = Limits(memory_bytes=256 << 20, processes=32, output_total_bytes=1 << 20, scratch_bytes=16 << 20)
_MOST_MIB = 1024
_MOST_PROCESSES = 4 * LIMITS.processes
_ANSWER_S = 20.0
_POOL_S = 120.0
_SPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
# refused to every candidate; by name, since numbers differ between architectures
_FORBIDDEN = """
acct add_key bpf chroot fanotify_init finit_module init_module kcmp kexec_load keyctl mount mq_open msgget
open_by_handle_at perf_event_open personality pivot_root process_vm_readv process_vm_writev ptrace quotactl request_key
semget setns setuid shmget swapon umount2 unshare userfaultfd
"""
# newer than some libraries have names for; one number everywhere
_FORBIDDEN_NEW = {
    "io_uring_setup": 425, "open_tree": 428, "move_mount": 429, "fsopen": 430, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "landlock_create_ruleset": 444, "memfd_secret": 447,
}  # fmt: skip
_SECRET_PATHS = ("/etc/shadow", "/root", "/home", "/run/secrets", "/var/run/docker.sock")
_READ_ONLY = ("/", "/usr", "/usr/lib", "/etc", "/app", "/app/workers", "/dev", "/proc", "/sys")
_AS_ROOT = (
    "Start the worker as root, so that it can give each candidate a user and a control group of its own. In a "
    "container: the options of docker/README.md."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was tried."""

    name: str
    ok: bool
    tried: str
    found: str
    remedy: str = ""  # what to do, when it is not ok
    needed: bool = True  # False: work is done without it, and every report says so


def why_not(checks: Sequence[Check]) -> str:
    """Why a worker may take no work, a line for each wall, for the staff; empty when it may."""
    return "\n".join(f"{one.name}: {one.found}. {one.remedy}".strip() for one in checks if one.needed and not one.ok)


def check_sandbox(*, gpu: bool, allow_reduced: bool, hidden: Sequence[str] = ()) -> list[Check]:
    """Try every wall of the sandbox from inside.

    Args:
        gpu: with the devices and system calls of a GPU's candidate.
        allow_reduced: a wall that only some hosts can build may be missing; the check then is not `needed`.
        hidden: further files and folders that no candidate may read.
    """
    checker = _Checker(gpu=gpu, allow_reduced=allow_reduced, hidden=hidden)
    tried: list[Check] = []
    try:
        with checker.pool():
            for step in checker.steps:
                tried += step()
    except (SandboxUnavailable, OSError) as exc:
        found, remedy = "none could be had", str(exc)
        if isinstance(exc, OSError):  # a right of the worker's own is missing, such as to end others' processes
            found, remedy = f"it could not be handled: {exc}", _AS_ROOT
        what = "started a process in a sandbox" + (" with the GPU's devices" if gpu else "")
        tried.append(Check(name="sandbox", ok=False, tried=what, found=found, remedy=remedy))
    return tried


def check_pools(pools: Mapping[str, Callable[[], contextlib.AbstractContextManager[SandboxPool]]]) -> list[Check]:
    """Start one candidate of each pool and wait until it is ready.

    Args:
        pools: by what they are for; each is opened, asked for one candidate, and closed.
    """
    found = []
    for name, open_pool in pools.items():
        began = time.monotonic()
        tried = "started a candidate with everything that it imports"
        try:
            with open_pool() as pool:
                pool.take(_POOL_S).kill()
        except SandboxUnavailable as exc:
            found.append(
                Check(name=f"pool {name}", ok=False, tried=tried, found="it does not get ready", remedy=str(exc))
            )
        else:
            seconds = f"ready after {time.monotonic() - began:.1f} s"
            found.append(Check(name=f"pool {name}", ok=True, tried=tried, found=seconds))
    return found


def pools_of(
    device: str, limits: assignment.Limits
) -> dict[str, Callable[[], contextlib.AbstractContextManager[SandboxPool]]]:
    """The pools that a worker of that device keeps, one candidate each."""
    from workers.ahead import ahead_pool
    from workers.compiling import compile_pool
    from workers.devices.cpu import interpreter_pool

    found: dict[str, Callable[[], contextlib.AbstractContextManager[SandboxPool]]] = {
        "interpreter": lambda: interpreter_pool(limits, size=1, refill=False)
    }
    if device == "cpu":
        return found | {"compiler": lambda: compile_pool(limits, size=1, refill=False)}
    from workers.devices.cuda import cuda_pool

    return found | {
        "compiler": lambda: ahead_pool(limits, size=1, refill=False),
        "gpu": lambda: cuda_pool(limits, size=1, refill=False),
    }


class _Checker:
    """One pool of probers, and what is asked of them."""

    def __init__(self, *, gpu: bool, allow_reduced: bool, hidden: Sequence[str]) -> None:
        self._gpu, self._reduced_needed, self._hidden = gpu, not allow_reduced, hidden
        self._token = secrets.token_hex(16)
        self.steps = (
            self._who, self._system_calls, self._network, self._secrets, self._read_only,
            self._memory, self._processes, self._hostile,
        )  # fmt: skip

    @contextlib.contextmanager
    def pool(self) -> Iterator[None]:
        # set before the pool starts anything: an environment that leaked would show it
        os.environ[_TOKEN] = self._token
        try:
            self._pool = SandboxPool(
                argv_env={}, arena_bytes=1 << 20, limits=LIMITS, size=2, refill=True, gpu=self._gpu,
                program=Path(__file__).with_name("prober.py"),
            )  # fmt: skip
            with contextlib.closing(self._pool):
                yield
        finally:
            del os.environ[_TOKEN]

    @contextlib.contextmanager
    def _sandbox(self) -> Iterator[Sandbox]:
        sandbox = self._pool.take(_ANSWER_S)
        try:
            yield sandbox
        finally:
            sandbox.kill()

    def _ask(self, op: str, **told: Any) -> dict[str, Any]:
        with self._sandbox() as sandbox:
            return _ask(sandbox, op, **told)

    def _check(
        self, name: str, *, ok: bool, tried: str, found: str, remedy: str = "", reducible: bool = False
    ) -> Check:
        needed = self._reduced_needed or not reducible
        if needed and reducible:
            remedy += " Or set TILEGRADE_ALLOW_REDUCED_SANDBOX=1, and trust every student."
        return Check(
            name=f"{name} (gpu)" if self._gpu else name,
            ok=ok,
            tried=tried,
            found=found,
            remedy="" if ok else remedy,
            needed=needed,
        )

    # -- walls -------------------------------------------------------------------------------------------------------

    def _who(self) -> Iterator[Check]:
        with self._sandbox() as sandbox:
            said = _ask(sandbox, "who")
            outside = sorted({uid for pid in processes.tree(sandbox.pid) if (uid := _uid(pid)) is not None})
        ours = {path.name: path.stat().st_ino for path in Path("/proc/self/ns").iterdir()}
        shared = [name for name in _SPACES if said["namespaces"].get(name) == ours.get(name)]
        yield self._check(
            "namespaces",
            ok=not shared,
            tried=f"compared {', '.join(_SPACES)} with the worker's own",
            found=f"shared with the worker: {', '.join(shared)}" if shared else "each is its own",
            remedy="bubblewrap did not unshare them; install an unmodified bubblewrap 0.8 or newer.",
        )
        status = said["status"]
        capabilities = [name for name in ("CapEff", "CapPrm", "CapBnd") if int(status[name][0], 16)]
        strong = capabilities or status["NoNewPrivs"] != ["1"]
        yield self._check(
            "privileges",
            ok=not strong,
            tried="looked for capabilities and for ways to gain some",
            found=f"it holds {', '.join(capabilities) or 'the way to gain privileges'}" if strong else "none",
            remedy="bubblewrap did not drop them; install an unmodified bubblewrap 0.8 or newer.",
        )
        slots = range(FIRST_SLOT_UID, FIRST_SLOT_UID + SLOTS)
        users = [uid for uid in outside if uid != os.geteuid()]
        own = may_use_slots() and bool(users) and all(uid in slots for uid in users)
        yield self._check(
            "user",
            ok=own,
            tried="looked at the candidate's processes from outside",
            found=f"they run as user {', '.join(map(str, users))}" if users else "they run as the worker's own user",
            remedy=_AS_ROOT,
            reducible=True,
        )

    def _system_calls(self) -> Iterator[Check]:
        tried = "made forbidden system calls"
        try:
            candidate_filter(gpu=self._gpu)
        except SeccompError as exc:
            yield self._check(
                "system calls", ok=False, tried=tried, found="there is no filter", remedy=f"{exc}.", reducible=True
            )
            return
        numbers = _numbers()
        clone = {"clone": numbers.pop("clone")} if "clone" in numbers else {}
        with self._sandbox() as sandbox:
            mode = _ask(sandbox, "who")["status"]["Seccomp"]
            went = _ask(sandbox, "calls", numbers=numbers, terminal=not self._gpu, **clone)["went"]
        listed = ", ".join(f"{name} ({how})" for name, how in sorted(went.items()))
        ok = mode == ["2"] and not went
        yield self._check(
            "system calls",
            ok=ok,
            tried=f"{tried}, {len(numbers) + len(clone) + 1 + (not self._gpu)} of them",
            found="all were refused" if ok else f"not refused: {listed or 'no filter is in force'}",
            remedy="Check that libseccomp and pyseccomp are the versions that constraints-*.txt name.",
        )

    def _network(self) -> Iterator[Check]:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(_open_folder())
            tcp, named, by_path = (
                stack.enter_context(socket.socket(family)) for family in (socket.AF_INET, *[socket.AF_UNIX] * 2)
            )
            tcp.bind(("127.0.0.1", 0))
            named.bind(f"\0tilegrade-{self._token}")
            by_path.bind(f"{folder}/socket")
            Path(folder, "socket").chmod(0o777)
            for listener in (tcp, named, by_path):
                listener.listen()
            said = self._ask(
                "reach", port=tcp.getsockname()[1], abstract=f"tilegrade-{self._token}", path=f"{folder}/socket"
            )
        others = [name for name in said["interfaces"] if name != "lo"]
        leaks = [*said["reached"], *others]
        yield self._check(
            "network",
            ok=not leaks,
            tried="called listeners of this host by TCP and Unix sockets, and asked for netlink, vsock and raw ones",
            found=f"reached {', '.join(leaks)}"
            if leaks
            else "nothing answers, and there is no interface but a lo of its own",
            remedy="bubblewrap did not unshare the network; install an unmodified bubblewrap 0.8 or newer.",
        )

    def _secrets(self) -> Iterator[Check]:
        with _open_folder() as folder:
            file = Path(folder, "secret")
            file.write_text(self._token)
            file.chmod(0o644)  # readable by everybody who can see it
            fd = os.open(file, os.O_RDONLY)
            os.set_inheritable(fd, True)
            try:
                # a candidate that is started now, with that descriptor at hand
                with contextlib.closing(_SecondPool(self._gpu)) as pool:
                    sandbox = pool.take(_ANSWER_S)
                    paths = _without_runtime([*_SECRET_PATHS, *hidden_paths(), *self._hidden, *_environ_files()])
                    said = _ask(sandbox, "secrets", token=self._token, files=[str(file)], paths=paths)
                    sandbox.kill()
            finally:
                os.close(fd)
        foreign = [name for name in said["environ"] if name.startswith("TILEGRADE_")]
        allowed = ("/dev/null", "pipe:", "socket:", "/memfd:arena", "/dev/nvidia", "anon_inode:")
        descriptors = [link for link in said["descriptors"].values() if not link.startswith(allowed)]
        leaks = [*said["seen"], *said["opened"], *foreign, *descriptors]
        yield self._check(
            "secrets",
            ok=not leaks,
            tried=f"looked for a planted secret in environments, descriptors and files, and opened {len(paths)} paths",
            found=f"it can read {', '.join(leaks)}" if leaks else "it sees none",
            remedy="Keep the project, its data and other secrets out of the folders of the Python runtime.",
        )

    def _read_only(self) -> Iterator[Check]:
        folders = [*_READ_ONLY, sys.prefix, str(Path(sys.executable).parent)]
        written = self._ask("write", folders=folders)["written"]
        yield self._check(
            "read-only",
            ok=not written,
            tried=f"made files in {len(folders)} folders outside its scratch",
            found=f"it can write to {', '.join(written)}" if written else "every one is read-only",
            remedy="bubblewrap did not make them read-only; install an unmodified bubblewrap 0.8 or newer.",
        )

    # -- limits ------------------------------------------------------------------------------------------------------

    def _memory(self) -> Iterator[Check]:
        limit = LIMITS.memory_bytes >> 20
        tried = f"filled memory beyond a limit of {limit} MiB"
        with self._sandbox() as sandbox:
            said, ending = _ask_to_the_end(sandbox, "fill", most_mib=_MOST_MIB)
        if ending.cause == "memory-limit":
            yield self._check("memory", ok=True, tried=tried, found="its control group killed it there")
            return
        refused = said is not None and said["refused"] and said["mib"] <= limit
        fall_back = "no control group; the fall-back holds each process to it, not all of them together"
        yield self._check(
            "memory",
            ok=False,
            tried=tried,
            found=fall_back if refused else f"nothing stopped it ({ending.cause}, {said})",
            remedy=f"{_AS_ROOT} Without root: `systemd-run --user --scope -p Delegate=yes tilegrade worker`.",
            reducible=refused,
        )

    def _processes(self) -> Iterator[Check]:
        started = self._ask("multiply", most=_MOST_PROCESSES)["started"]
        ok = started <= LIMITS.processes + OWN_PROCESSES
        yield self._check(
            "processes",
            ok=ok,
            tried=f"started processes beyond a limit of {LIMITS.processes}",
            found=f"refused after {started}" if started < _MOST_PROCESSES else f"{started} were started",
            remedy=_AS_ROOT,
        )

    def _hostile(self) -> Iterator[Check]:
        with self._sandbox() as sandbox:
            _, flooded = _ask_to_the_end(sandbox, "flood")
        with self._sandbox() as sandbox:
            _ask(sandbox, "run-away")
            began = time.monotonic()
            ending = sandbox.kill()
            took_ms = (time.monotonic() - began) * 1e3
        faults = [
            *([] if flooded.cause == "output-limit" else [f"a flood of output ended as {flooded.cause}"]),
            *([f"{ending.processes_left} processes outlived the kill"] if ending.processes_left else []),
        ]
        yield self._check(
            "hostile sample",
            ok=not faults,
            tried="printed without end, and left daemons that ignore signals and burn a core",
            found="; ".join(faults) or f"cut off at its limit; all of it was gone {took_ms:.0f} ms after the kill",
            remedy="Look for stuck processes of users 61000-61999: `ps -eo uid,pid,stat,cmd`. Start the host anew.",
        )


_TOKEN = "TILEGRADE_SELF_CHECK"  # noqa: S105 - a variable's name


class _SecondPool(SandboxPool):
    """A pool of one, so that its candidate is started after the secrets were planted."""

    def __init__(self, gpu: bool) -> None:
        super().__init__(
            argv_env={}, arena_bytes=1 << 20, limits=LIMITS, size=1, refill=False, gpu=gpu,
            program=Path(__file__).with_name("prober.py"),
        )  # fmt: skip


def _ask(sandbox: Sandbox, op: str, **told: Any) -> dict[str, Any]:
    try:
        sandbox.channel.send({"op": op} | told)
        return sandbox.channel.receive(_ANSWER_S)
    except (PeerGoneError, ProtocolError, TimedOutError) as exc:
        ending = sandbox.kill()
        said = ending.stderr[-1000:].decode(errors="replace").strip()
        raise SandboxUnavailable(f"The check itself failed at {op!r}: {exc or type(exc).__name__}. {said}") from None


def _ask_to_the_end(sandbox: Sandbox, op: str, **told: Any) -> tuple[dict[str, Any] | None, Ending]:
    """Ask for something that should be the end of it; its answer, when it lived to give one."""
    sandbox.channel.send({"op": op} | told)
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until and not sandbox.over_limit():
        with contextlib.suppress(TimedOutError):
            try:
                return sandbox.channel.receive(0.02), sandbox.kill()
            except (PeerGoneError, ProtocolError):
                break
    return None, sandbox.kill()


def _numbers() -> dict[str, int]:
    """Numbers of the forbidden calls here, by name; those that this architecture has."""
    import pyseccomp

    by_name = {name: pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in (*_FORBIDDEN.split(), "clone")}
    return {name: number for name, number in by_name.items() if number >= 0} | _FORBIDDEN_NEW


def _without_runtime(paths: Sequence[str]) -> list[str]:
    """Those that are not a folder above the interpreter, which shows as an empty path to it."""
    runtime = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)] + [Path(sys.prefix)]
    return [path for path in paths if not any(folder.is_relative_to(path) for folder in runtime)]


def _uid(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


def _environ_files() -> list[str]:
    """Environments of this host's processes, as they would be seen by number if its /proc showed through."""
    return [f"/proc/{pid}/environ" for pid in {os.getpid(), os.getppid()} if pid > 2]


@contextlib.contextmanager
def _open_folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="check-") as name:
        Path(name).chmod(0o755)
        yield name


def to_json(checks: Sequence[Check]) -> dict[str, Any]:
    """The checks as plain values, and whether work may be done."""
    return {"ok": not why_not(checks), "host": platform.node(), "checks": [dataclasses.asdict(one) for one in checks]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a check in a process of its own came to."""

    why_not: str  # why no work may be taken; empty when it may
    note: str  # what is missing that work is done without


def in_a_process(*flags: str, environ: Mapping[str, str] | None = None, limit_s: float = 180.0) -> Outcome:
    """Run `python -m workers check` with these flags: a driver that hangs or crashes takes that process with it."""
    command = [sys.executable, "-m", "workers", "check", *flags]
    with subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        try:
            said, complained = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return Outcome(why_not=f"the check did not end within {limit_s:.0f} s: the host or its GPU hangs", note="")
    try:
        answer = json.loads(said)
        checks = [Check(**one) for one in answer["checks"]]
    except (ValueError, KeyError, TypeError):
        reason = complained.strip()[-1500:] or said[-1500:] or f"exit status {process.returncode}"
        return Outcome(why_not=f"the check itself failed: {reason}", note="")
    missing = (f"{one.name}: {one.found}. {one.remedy}" for one in checks if not one.ok and not one.needed)
    return Outcome(why_not=why_not(checks), note="\n".join(missing))
