"""The engine that draws charts, in a process of its own.

It holds Python's lock for all of a drawing, which takes some ten milliseconds: in the server's own process every other
page would stand still for so long, chart after chart. As a program this file reads one specification a line, answers
each with a line, and ends when its input does.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading

VEGA_LITE = "6.4"
NICE = 5  # whoever waits for a page comes before whoever waits for its charts


class Engine:
    """The process that draws, started when it is first needed and again when it died. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # who started it; after a fork that is somebody else
        atexit.register(self.close)

    def draw(self, asked: str) -> str:
        """The SVG of a Vega-Lite specification in JSON.

        Raises:
            ValueError: the engine refuses it, or died over it; another drawing is worth a try.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(asked + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            if not line:
                self._stop()
                raise ValueError("the process that draws charts ended")
        answer: dict[str, str] = json.loads(line)
        if "refused" in answer:
            raise ValueError(answer["refused"])
        return answer["svg"]

    def close(self) -> None:
        """End the process. The next drawing starts another."""
        with self._lock:
            self._stop()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._owner != os.getpid():
            # isolated: the folder of this file must not be searched for modules
            command = [sys.executable, "-I", __file__]
            # a session of its own: Ctrl-C in a terminal is for the server, which ends this one
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            self._owner = os.getpid()
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()  # it keeps nothing
        with process:
            pass


def _serve() -> None:
    import vl_convert

    os.nice(NICE)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the engine prints is no answer
    for asked in sys.stdin:
        try:
            answer = {"svg": vl_convert.vegalite_to_svg(asked, vl_version=VEGA_LITE, allowed_base_urls=[])}
        except ValueError as exc:
            answer = {"refused": str(exc)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
