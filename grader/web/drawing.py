"""The engine that draws charts, in a process of its own.

It holds Python's lock for all of a drawing, which takes some ten milliseconds: in the server's own process every other
page would stand still for so long, chart after chart. As a program this file says whether it can draw at all, then
reads one specification a line, answers each with a line, and ends when its input does.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

VEGA_LITE = "6.4"
NICE = 10  # whoever waits for a page comes before whoever waits for its charts
_TRIAL = '{"mark": "point", "data": {"values": [{}]}}'
_log = logging.getLogger(__name__)


class NoDrawingError(ValueError):
    """There is no drawing of this, however often it is asked for."""


class Engine:
    """The process that draws, started when it is first needed and again when it died. Safe to share between threads."""

    def __init__(self) -> None:
        self.unable = ""  # why it draws nothing at all; found out when it starts
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # who started it; after a fork that is somebody else
        atexit.register(self.close)

    def draw(self, asked: str) -> str:
        """The SVG of a Vega-Lite specification in JSON.

        Raises:
            NoDrawingError: the engine takes no such specification, or none at all: see `unable`.
            ValueError: it died over it; another drawing is worth a try.
        """
        with self._lock:
            if self.unable:
                raise NoDrawingError(self.unable)
            process = self._running()
            answer = self._ask(process, asked + "\n")
        if "refused" in answer:
            raise NoDrawingError(answer["refused"])
        return answer["svg"]

    def close(self) -> None:
        """End the process. The next drawing starts another."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._owner != os.getpid():
            self._process = subprocess.Popen(
                # isolated: the folder of this file must not be searched for modules
                [sys.executable, "-I", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # Ctrl-C in a terminal is for the server, which ends this one. No session of its own: Linux may share
                # the processor out among sessions first (sched_autogroup), and niceness counts only within one
                process_group=0,
            )
            self._owner = os.getpid()
            self.unable = self._ask(self._process).get("unable", "")
            if self.unable:
                self._stop()
                _log.error(
                    "no chart is drawn, reports and boards say in words what they show: %s; "
                    "pip install 'tilegrade[web]' and start again",
                    self.unable,
                )
                raise NoDrawingError(self.unable)
        return self._process

    def _ask(self, process: subprocess.Popen[str], asked: str = "") -> dict[str, str]:
        """The process's next answer. Raises ValueError when it has ended."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(asked)
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            self._stop()
            raise ValueError("the process that draws charts ended")
        answer: dict[str, str] = json.loads(line)
        return answer

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()  # it keeps nothing
        process.wait()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(OSError):  # what it was asked and never read is still to be written
            process.stdin.close()


def _serve() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the engine prints is no answer

    def answer(**said: str) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    try:
        import vl_convert

        vl_convert.vegalite_to_svg(_TRIAL, vl_version=VEGA_LITE, allowed_base_urls=[])
    except Exception as exc:  # not installed, broken, without this Vega-Lite or with another interface
        answer(unable=f"{type(exc).__name__}: {exc}".splitlines()[0])
        return
    for thread in Path("/proc/self/task").iterdir():  # niceness is each thread's own, and the engine has started some
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), NICE)
    answer()
    for asked in sys.stdin:
        try:
            svg = vl_convert.vegalite_to_svg(asked, vl_version=VEGA_LITE, allowed_base_urls=[])
        except ValueError as exc:
            answer(refused=str(exc))
        else:
            answer(svg=svg)


if __name__ == "__main__":
    _serve()
