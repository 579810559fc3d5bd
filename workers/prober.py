"""PROGRAM, runs in a sandbox in the place of a candidate: tries what a student's file must not be able to do.

It is ours, so what it says is believed; workers/selfcheck.py asks it and judges the answers. Like a candidate it is
handed a socket and the arena, and has no module of ours but the protocol's.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workers.protocol import Channel

Message = dict[str, Any]

_NEWUSER = 0x10000000
_TIOCSTI = 0x5412  # types a character into a terminal: of the host's, once
_MOST_READ_BYTES = 1 << 20


def main(ctl_fd: int, _arena_fd: int, _arena_bytes: int) -> int:
    """Answer requests until the socket closes."""
    channel = Channel(socket.socket(fileno=ctl_fd))
    channel.send({"op": "ready"})
    while True:
        message = channel.receive()
        channel.send({"op": "found"} | _ACTS[message["op"]](message))


def _who(_message: Message) -> Message:
    """Namespaces by inode, and what the kernel says of this process."""
    spaces = {path.name: path.stat().st_ino for path in Path("/proc/self/ns").iterdir()}
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    wanted = ("Uid", "Gid", "CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")
    return {"namespaces": spaces, "status": {name: value.split() for name, _, value in lines if name in wanted}}


def _calls(message: Message) -> Message:
    """Make system calls by number, with zeros. Answers those that were carried out or failed other than refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    went: dict[str, str] = {}

    def note(name: str, result: int) -> None:
        number = ctypes.get_errno() if result < 0 else 0
        if result >= 0 or number not in (errno.EPERM, errno.ENOSYS):
            went[name] = "carried out" if result >= 0 else errno.errorcode.get(number, str(number))

    for name, number in message["numbers"].items():
        note(name, libc.syscall(ctypes.c_long(number), *[ctypes.c_long(0)] * 6))
    if "clone" in message:
        child = libc.syscall(ctypes.c_long(message["clone"]), ctypes.c_long(_NEWUSER | signal.SIGCHLD), 0, 0, 0, 0)
        if child == 0:
            os._exit(0)
        note("clone of a user namespace", child)
    note("prctl(PR_SET_DUMPABLE)", libc.prctl(4, 1, 0, 0, 0))
    if message["terminal"]:
        note("ioctl(TIOCSTI)", libc.ioctl(0, _TIOCSTI, b"x"))
    return {"went": went}


def _reach(message: Message) -> Message:
    """Network interfaces, and whether listeners of the host's answer."""
    reached: list[str] = []

    def attempt(name: str, family: int, address: Any) -> None:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                sock.settimeout(1.0)
                sock.connect(address)
        except OSError:
            return
        reached.append(name)

    attempt("tcp", socket.AF_INET, ("127.0.0.1", message["port"]))
    attempt("a Unix socket by name", socket.AF_UNIX, "\0" + message["abstract"])
    attempt("a Unix socket by path", socket.AF_UNIX, message["path"])
    for name, family in (("netlink", socket.AF_NETLINK), ("vsock", socket.AF_VSOCK), ("packet", socket.AF_PACKET)):
        try:
            socket.socket(family, socket.SOCK_RAW if name != "vsock" else socket.SOCK_STREAM).close()
        except OSError:
            continue
        reached.append(name)
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return {"reached": reached, "interfaces": [line.partition(":")[0].strip() for line in lines]}


def _secrets(message: Message) -> Message:
    """Where the token is to be seen, which of the paths open, and what else this process was handed."""
    token = message["token"].encode()
    seen = []
    for path in (*Path("/proc").glob("[0-9]*/environ"), *Path("/proc").glob("[0-9]*/cmdline"), *message["files"]):
        if token in _head(Path(path)):
            seen.append(str(path))
    opened = [path for path in message["paths"] if _opens(Path(path))]
    links = {}
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not files
        try:
            links[number] = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - may name no path
        except OSError:
            continue  # that of the listing itself
    return {"seen": seen, "opened": opened, "environ": sorted(os.environ), "descriptors": links}


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_READ_BYTES)
    except OSError:
        return b""


def _opens(path: Path) -> bool:
    """Whether anything of it can be read: a covered folder is empty, a covered file is /dev/null."""
    try:
        return any(path.iterdir()) if path.is_dir() else bool(path.open("rb").read(1))
    except OSError:
        return False


def _write(message: Message) -> Message:
    """Folders in which a file can be made."""
    written = []
    for folder in message["folders"]:
        try:
            fd = os.open(f"{folder}/tilegrade-probe", os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError:
            continue
        os.close(fd)
        written.append(folder)
    return {"written": written}


def _fill(message: Message) -> Message:
    """Touch memory until it is refused. With a control group this never answers."""
    held: list[bytearray] = []
    try:
        while len(held) < message["most_mib"]:
            held.append(bytearray(b"\1") * (1 << 20))
    except MemoryError:
        return {"mib": len(held), "refused": True}
    return {"mib": len(held), "refused": False}


def _multiply(message: Message) -> Message:
    """Start processes until one is refused; ends them."""
    children: list[int] = []
    try:
        while len(children) < message["most"]:
            child = os.fork()
            if child == 0:
                time.sleep(30)
                os._exit(0)
            children.append(child)
    except OSError:
        pass
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {"started": len(children)}


def _flood(_message: Message) -> Message:
    """Print without end."""
    while True:
        os.write(1, b"A" * 65536)


def _run_away(_message: Message) -> Message:
    """Leave processes behind that ignore signals, have sessions of their own, and burn a core."""
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU):
                signal.signal(number, signal.SIG_IGN)
            if os.fork() == 0:
                while True:
                    pass
            while True:
                time.sleep(1)
    return {}


_ACTS: dict[str, Callable[[Message], Message]] = {
    "who": _who,
    "calls": _calls,
    "reach": _reach,
    "secrets": _secrets,
    "write": _write,
    "fill": _fill,
    "multiply": _multiply,
    "flood": _flood,
    "run-away": _run_away,
}
