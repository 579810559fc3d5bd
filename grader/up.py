"""`tilegrade up`: the whole service on one machine. One process that starts the others and keeps them running."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from grader.errors import UserError
from grader.settings import Settings

STOP_GRACE_S = 15.0  # a worker takes up to 5 s to hand back what it grades
HEALTHY_AFTER_S = 60.0  # a child that lived so long starts with a clean slate
MAX_RESTART_DELAY_S = 60.0
MAX_LOG_BYTES = 5 << 20
READY_WITHIN_S = 60.0
LISTEN_BACKLOG = 1024
_PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """One process of the service, started again whenever it ends."""

    name: str
    arguments: list[str]
    log: Path | None = None  # None: writes where we do
    inherits: tuple[int, ...] = ()  # open files of ours that it keeps, by number
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # monotonic
    start_at: float = 0.0  # monotonic; not before
    deaths: int = 0  # in a row

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass
class Supervisor:
    """Starts children in their order, restarts those that end, and stops them in the reverse order."""

    children: list[Child]
    say: Callable[[str], None]
    stopping: bool = False
    _libc: ctypes.CDLL = field(default_factory=lambda: ctypes.CDLL(None))

    def look_after(self) -> None:
        """Start what is due and notice what ended. Call it several times a second."""
        now = time.monotonic()
        for child in self.children:
            if child.is_running:
                continue
            if child.process is not None:
                self._ended(child, now)
            if not self.stopping and now >= child.start_at:
                self._start(child, now)

    def stop(self) -> None:
        """End every child: ask, wait, and kill what does not listen."""
        self.stopping = True
        # those of one kind, such as worker-0 and worker-1, at the same time
        for _, kind in itertools.groupby(reversed(self.children), key=lambda child: child.name.partition("-")[0]):
            running = {child.name: child.process for child in kind if child.process and child.is_running}
            for process in running.values():
                process.terminate()
            until = time.monotonic() + STOP_GRACE_S
            for name, process in running.items():
                try:
                    process.wait(max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self.say(f"{name} does not stop; killing it")
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _start(self, child: Child, now: float) -> None:
        if child.log is not None:
            _trim(child.log)
        with child.log.open("ab") if child.log is not None else contextlib.nullcontext() as log:
            child.process = subprocess.Popen(
                child.arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                pass_fds=child.inherits,
                start_new_session=True,  # Ctrl-C is for us; we tell them in order
                preexec_fn=self._die_with_parent,  # safe: this process has one thread
            )
        child.started_at = now

    def _ended(self, child: Child, now: float) -> None:
        assert child.process is not None
        status = child.process.returncode
        child.process = None
        child.deaths = 1 if now - child.started_at > HEALTHY_AFTER_S else child.deaths + 1
        delay_s = restart_delay_s(child.deaths)
        child.start_at = now + delay_s
        if not self.stopping:
            end = f"; {child.log} ends: {_last_line(child.log)}" if child.log is not None else ""
            self.say(f"{child.name} ended with status {status}, again in {delay_s:g} s{end}")

    def _die_with_parent(self) -> None:
        # whatever happens to us, nothing of ours keeps the port or the socket
        self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def restart_delay_s(deaths: int) -> float:
    """Seconds before the next start, after so many deaths in a row: 0.5, 1, 2, 4, ... up to a minute."""
    return min(0.5 * 2.0 ** min(deaths - 1, 10), MAX_RESTART_DELAY_S)


def worker_commands(settings: Settings, gpus: Sequence[str]) -> dict[str, list[str]]:
    """One worker for each GPU, by name; one alone on CPUs, where none was found, or for the slot that was set."""
    command = [sys.executable, "-m", "workers.tasks", "--device", settings.device]
    if settings.device == "cpu" or settings.slot is not None:
        return {"worker": command}
    return {f"worker-{slot}": [*command, "--slot", str(slot)] for slot in range(max(1, len(gpus)))}


def service_children(settings: Settings, gpus: Sequence[str] = ()) -> list[Child]:
    """The processes of the embedded service, in the order in which they are started. `gpus`: names of those found."""
    log_dir = settings.data_dir / "log"
    log_dir.mkdir(mode=0o700, exist_ok=True)
    tilegrade = [sys.executable, "-m", "grader.cli"]
    commands = {
        "web": [*tilegrade, "web"],
        **worker_commands(settings, gpus),
        "beat": [*tilegrade, "beat"],
    }
    if settings.embedded_broker:
        commands = {"broker": [*tilegrade, "broker"]} | commands
    return [Child(name=name, arguments=arguments, log=log_dir / f"{name}.log") for name, arguments in commands.items()]


def run(
    settings: Settings, *, gpus: Sequence[str] = (), say: Callable[[str], None], on_ready: Callable[[], None]
) -> None:
    """Run the service until TERM, INT or HUP, within `only_one`. The database is migrated already."""
    ready, give_up_at = False, time.monotonic() + READY_WITHIN_S

    def look_at_the_web() -> None:
        nonlocal ready, give_up_at
        if not ready and _answers(settings):
            ready = True
            on_ready()
        elif not ready and time.monotonic() > give_up_at:
            give_up_at = float("inf")
            say(f"the web server does not answer yet; see {settings.data_dir / 'log' / 'web.log'}")

    keep_running(service_children(settings, gpus), say=say, meanwhile=look_at_the_web)


def run_workers(settings: Settings, gpus: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Run one worker for each GPU, and nothing else, until TERM, INT or HUP. They write where we do."""
    commands = worker_commands(settings, gpus)
    keep_running([Child(name=name, arguments=arguments) for name, arguments in commands.items()], say=say)


def run_web(settings: Settings, *, say: Callable[[str], None]) -> None:
    """Serve the pages by `settings.web_processes` processes that share one port, until TERM, INT or HUP.

    Python runs one thread of a process at a time, so one process serves pages with one processor.
    """
    with listen(settings) as listener:
        command = [sys.executable, "-m", "grader.cli", "web", "--listener", str(listener.fileno())]
        names = [f"web-{number}" for number in range(settings.web_processes)]
        keep_running([Child(name=name, arguments=command, inherits=(listener.fileno(),)) for name in names], say=say)


def keep_running(
    children: list[Child], *, say: Callable[[str], None], meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Start processes, and start again those that end, until TERM, INT or HUP. Calls `meanwhile` often."""
    supervisor = Supervisor(children=children, say=say)
    stop = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        while not stop:
            supervisor.look_after()
            meanwhile()
            time.sleep(0.2)
        say("stopping")
    finally:
        supervisor.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def only_one(settings: Settings) -> Iterator[None]:
    """Hold the data folder for this process.

    Raises:
        UserError: another one runs from this folder, it cannot be written to, or the port is taken.
    """
    settings.make_data_dir()
    try:
        file = (settings.data_dir / "up.lock").open("w")
    except OSError as exc:
        raise UserError(f"The folder {settings.data_dir} cannot be written to ({exc.strerror}).") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"Tilegrade runs from {settings.data_dir} already. Stop it, or set TILEGRADE_DATA to another folder."
            ) from None
        listen(settings).close()  # rather a word now than in the web server's log
        yield


def listen(settings: Settings) -> socket.socket:
    """The socket that the pages are served on.

    Raises:
        UserError: the port is taken, or the address is not this machine's.
    """
    host, port = settings.host, settings.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as exc:
        # a name that is no address has a negative number, of getaddrinfo's
        if exc.errno is None or exc.errno < 0 or exc.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            remedy = "Set TILEGRADE_HOST to an address of this machine, e.g. 127.0.0.1, or 0.0.0.0 for every one."
        else:
            free = port + 1 if 1024 <= port < 65535 else 8000
            remedy = f"Set TILEGRADE_PORT to a free port, e.g. TILEGRADE_PORT={free}."
        why = str(exc.strerror).partition(" (while")[0]  # the address stands before it already
        raise UserError(f"Cannot listen on {host}:{port}: {why}. {remedy}") from None


def _answers(settings: Settings) -> bool:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)  # noqa: S104
    try:
        # ours, by http, whatever the environment says about proxies
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{host}:{settings.port}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _trim(log: Path) -> None:
    """Start a log anew when it has grown large, keeping the old one once."""
    if log.exists() and log.stat().st_size > MAX_LOG_BYTES:
        log.replace(log.with_suffix(".old.log"))


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "(nothing)")
