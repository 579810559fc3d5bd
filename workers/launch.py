"""PROGRAM, trusted: turns itself into the sandbox that a plan on its standard input describes.

The pool starts it with `python -I -S -B launch.py`. Its child joins the cgroup and lowers the limits; as root it also
binds the runtime to a place that the slot's uid can reach, in a mount namespace of its own, and drops to that uid; then
it becomes bubblewrap. This process stays outside, to reap: what bubblewrap leaves behind would otherwise be a zombie,
counted against its uid, until the host's first process gets to it (in a container often never). It exits with the
child's exit code, 128 + n for signal n. A program and not a function between fork and exec: the pool has threads.
Standard library only, and nothing of ours: it runs by path.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import itertools
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypedDict

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# any folder that every host has and that bubblewrap does not use itself (it builds its new root on /tmp)
_STAGES = ("/mnt", "/media", "/srv", "/run")
_SCRATCH = ("/w", "/tmp", "/dev/shm")  # noqa: S108 - paths in the sandbox, each a tmpfs of its own
_SCRATCH_INODES = 16384  # 200,000 empty folders take half a second to tear down, and a kill has to wait for that
# what programs beyond the runtime need: libc, the loader's cache, a compiler found through alternatives
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/alternatives")


class Plan(TypedDict):
    """Everything about one sandbox, as JSON. Sizes in bytes."""

    parent_pid: int
    bwrap: str | None  # None: no isolation, exec the command itself
    uid: int | None  # the slot's uid, when we are root; None keeps our own
    cgroup_procs: list[str]  # files to write ourselves into
    rlimits: dict[str, int]  # "RLIMIT_CPU": seconds, ...
    runtime: list[str]  # folders bound read-only at their own path
    hidden: list[str]  # files and folders covered, because a bound folder contains them
    files: dict[str, str]  # path in the sandbox -> base64 content, read-only
    devices: list[str]  # device nodes bound with access
    scratch_bytes: int  # for each of /w, /tmp, /dev/shm
    nice: int
    seccomp: str | None  # base64 of the BPF program
    env: dict[str, str]
    workdir: str
    command: list[str]


def bwrap_arguments(
    plan: Plan, *, sources: Mapping[str, str], file_fds: Mapping[str, int], seccomp_fd: int | None
) -> list[str]:
    """Spell a plan as bubblewrap options, without the command.

    Args:
        sources: for each runtime folder of the plan, where to bind it from; for each scratch folder, where a bounded
            file system for it is mounted, or nothing to have bubblewrap mount one, which cannot bound inodes.
        file_fds: for each file of the plan, a descriptor to read it from.
    """
    steps = [
        ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"],
        ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"],
        *map(_bind_system, _SYSTEM),
        ["--proc", "/proc", "--dev", "/dev", "--ro-bind", "/dev/null", "/proc/cmdline"],
        # scratch before the runtime: a runtime below /tmp would otherwise be covered
        *(_scratch(path, plan["scratch_bytes"], sources.get(path)) for path in _SCRATCH),
        *(["--dev-bind", path, path] for path in plan["devices"]),
        ["--ro-bind", "/sys", "/sys"] if plan["devices"] else [],
        *(["--ro-bind", sources[path], path] for path in plan["runtime"]),
        *map(_cover, plan["hidden"]),
        *(["--ro-bind-data", str(file_fds[path]), path] for path in plan["files"]),
        # without these two, / and /dev are writable tmpfs without a size
        ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", plan["workdir"]],
        *(["--setenv", name, value] for name, value in plan["env"].items()),
        [] if seccomp_fd is None else ["--seccomp", str(seccomp_fd)],
    ]
    return list(itertools.chain.from_iterable(steps))


def main() -> None:
    """Read the plan, start the sandbox, and exit as it does."""
    plan: Plan = json.load(sys.stdin.buffer)
    _die_with(plan["parent_pid"])
    _check(_libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
    me = os.getpid()
    child = os.fork()
    if child:
        os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # or the socket and the pipes would never be seen to close
        os._exit(_reap(child, isolated=plan["bwrap"] is not None))
    try:
        _become_sandbox(plan, me)
    except OSError as exc:
        os.write(2, f"launch: {exc}\n".encode())
    os._exit(1)


def _reap(child: int, *, isolated: bool) -> int:
    """Wait for the child and whatever it leaves; answers the child's exit code."""
    code = 1
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return code
        if pid == child:
            exit_code = os.waitstatus_to_exitcode(status)
            code = exit_code if exit_code >= 0 else 128 - exit_code
            child = 0
        if not child and not isolated:  # an isolated tree dies with its first process; this one may have left daemons
            for orphan in _children():
                with contextlib.suppress(OSError):
                    os.kill(orphan, signal.SIGKILL)


def _children() -> list[int]:
    me = str(os.getpid())
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if path.read_text(errors="replace").rpartition(")")[2].split()[1] == me:
                found.append(int(path.parent.name))
    return found


def _become_sandbox(plan: Plan, parent_pid: int) -> NoReturn:
    null = os.open("/dev/null", os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _die_with(parent_pid)
    for path in plan["cgroup_procs"]:
        Path(path).write_text("0")
    bwrap = plan["bwrap"]
    sources = {path: path for path in plan["runtime"]}
    if bwrap is not None and plan["uid"] is not None:
        sources = _stage(plan["runtime"], uid=plan["uid"], scratch_bytes=plan["scratch_bytes"])
    for name, value in plan["rlimits"].items():
        number = getattr(resource, name)
        # SIGXCPU at the soft limit says what happened; SIGKILL a second later for those who ignore it
        hard = value + 1 if number == resource.RLIMIT_CPU else value
        resource.setrlimit(number, (value, hard))
    os.nice(plan["nice"])
    os.umask(0o077)
    if plan["uid"] is not None:
        os.setgroups([])
        os.setresgid(plan["uid"], plan["uid"], plan["uid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
        _die_with(parent_pid)  # changing the uid cleared it
    if bwrap is None:
        os.chdir(plan["workdir"])
        os.execve(plan["command"][0], plan["command"], plan["env"])  # noqa: S606
    file_fds = {path: _memory_file(base64.b64decode(text)) for path, text in plan["files"].items()}
    seccomp_fd = None if plan["seccomp"] is None else _memory_file(base64.b64decode(plan["seccomp"]))
    args = bwrap_arguments(plan, sources=sources, file_fds=file_fds, seccomp_fd=seccomp_fd)
    # through a descriptor, because the command line of the sandbox's first process can be read inside it
    args_fd = _memory_file(b"\0".join(os.fsencode(arg) for arg in args) + b"\0")
    os.execve(bwrap, [bwrap, "--args", str(args_fd), "--", *plan["command"]], {})  # noqa: S606


def _bind_system(path: str) -> list[str]:
    if Path(path).is_symlink():
        return ["--symlink", str(Path(path).readlink()), path]
    return ["--ro-bind-try", path, path]


def _scratch(path: str, size_bytes: int, source: str | None) -> list[str]:
    if source is not None:
        return ["--bind", source, path]
    return ["--size", str(size_bytes), "--tmpfs", path]


def _cover(path: str) -> list[str]:
    if Path(path).is_dir():
        return ["--tmpfs", path, "--remount-ro", path]
    return ["--ro-bind", "/dev/null", path]


def _stage(folders: Sequence[str], *, uid: int, scratch_bytes: int) -> dict[str, str]:
    """Bind folders, and mount scratch ones, below a world-readable one; says where each went.

    All of it is in a mount namespace of our own, and gone with the last process in it.
    """
    _check(_libc().unshare(_CLONE_NEWNS), "unshare")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    # opened before the stage covers anything: a runtime may itself lie below it
    opened = {folder: os.open(folder, os.O_PATH) for folder in folders}
    stage = next(path for path in _STAGES if Path(path).is_dir())
    _mount("tmpfs", stage, "tmpfs", 0, "mode=0755,size=1m")
    places = {path: f"{stage}/{number}" for number, path in enumerate((*folders, *_SCRATCH))}
    for place in places.values():
        Path(place).mkdir()
    for folder, fd in opened.items():
        _mount(f"/proc/self/fd/{fd}", places[folder], None, _MS_BIND | _MS_REC)
        os.close(fd)
    for path in _SCRATCH:
        options = f"mode=0700,uid={uid},gid={uid},size={scratch_bytes},nr_inodes={_SCRATCH_INODES}"
        _mount("tmpfs", places[path], "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    return places


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = (None if text is None else os.fsencode(text) for text in (source, target, kind, options))
    source_b, target_b, kind_b, options_b = encoded
    _check(_libc().mount(source_b, target_b, kind_b, flags, options_b), f"mount {target}")


def _die_with(parent_pid: int) -> None:
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    if os.getppid() != parent_pid:  # it was gone before the line above
        os._exit(1)


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("plan", 0)  # inheritable: bubblewrap reads and closes it
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_ulong,
        ctypes.c_char_p,
    )
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    return libc


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        main()
    except OSError as exc:
        sys.exit(f"launch: {exc}")
