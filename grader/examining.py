"""How a command examines a file: it starts `python -m workers` and reads its JSON, because the service has no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grader import measurement
from grader.errors import AssignmentError, GraderFault, UserError
from grader.measurement import Examination
from grader.settings import Settings, check_flags

MAX_ANSWER_BYTES = 64 << 20
Progress = Callable[[str, float], None]


def examine_file(
    file: Path,
    folder: Path,
    *,
    device: str = "cpu",
    sandboxed: bool = True,
    replay: bool = False,
    on_progress: Progress = lambda _stage, _fraction: None,
) -> Examination:
    """Examine one file against the assignment in `folder`, in a process of its own. `device` is "cpu" or "cuda".

    Args:
        replay: run its compiled kernels without its Python too, whatever the assignment says; on a GPU.

    Raises:
        UserError: the file or this machine does not allow it; the text says what to do.
        AssignmentError: the folder is wrong.
        GraderFault: the examiner failed.
    """
    flags = ["--device", device, *([] if sandboxed else ["--no-sandbox"]), *(["--replay"] if replay else [])]
    answer = ask_workers("grade", str(file), "--assignment", str(folder), *flags, on_progress=on_progress)
    return measurement.from_json(Examination, answer["examination"])


def reference_source(operation: str) -> str:
    """The reference kernel of an operation, as a file that could be handed in."""
    return str(ask_workers("reference", operation)["source"])


def known_mistakes(operation: str) -> list[dict[str, str]]:
    """The bank of an operation: `label`, `step` and `hint` of each."""
    return list(ask_workers("mistakes", operation)["mistakes"])


def check_host(settings: Settings) -> dict[str, Any]:
    """Try whether this host may grade, as a worker with these settings does at its start, and its pools beside.

    Returns:
        `ok`, `host`, and `checks`: of each `name`, `ok`, `tried`, `found`, `remedy` and `needed`.
    """
    folders = sorted(path.parent for path in settings.assignments_dir.glob("*/assignment.toml"))
    return ask_workers(
        "check",
        *check_flags(settings),
        *(["--pools", str(folders[0])] if folders else []),
    )


def gpus() -> list[str]:
    """Names of this host's GPUs. Raises UserError where none can be found; the text says why."""
    return [str(card["name"]) for card in ask_workers("gpus")["gpus"]]


def ask_workers(*arguments: str, on_progress: Progress = lambda _stage, _fraction: None) -> dict[str, Any]:
    """Run one command of `python -m workers` and return the JSON object that it prints."""
    said: list[str] = []

    def listen(lines: Iterable[str]) -> None:
        for line in lines:
            try:
                found = json.loads(line)
                on_progress(str(found["stage"]), float(found["fraction"]))
            except (ValueError, KeyError, TypeError):
                said.append(line)

    with tempfile.TemporaryFile() as output:  # not a pipe: it may be megabytes long, and nobody reads it meanwhile
        process = subprocess.Popen(
            [sys.executable, "-m", "workers", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        assert process.stderr is not None
        listener = threading.Thread(target=listen, args=(process.stderr,), daemon=True)
        listener.start()
        try:
            status = process.wait()
        except BaseException:  # Ctrl-C: its sandboxes die with it
            process.kill()
            process.wait()
            raise
        finally:
            listener.join(1.0)
            process.stderr.close()
        output.seek(0)
        text = output.read(MAX_ANSWER_BYTES)
    return _answer(text, status, "".join(said))


def _answer(text: bytes, status: int, said: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        if "No module named 'torch'" in said or "No module named 'triton'" in said:
            raise UserError("Grading needs torch and triton: `make setup` in Tilegrade's folder installs them.")
        raise GraderFault(f"the examiner ended with status {status} and no answer; it said:\n{said[-4000:].strip()}")
    if "error" in answer:
        kinds = {kind.__name__: kind for kind in (AssignmentError, GraderFault)}
        raise kinds.get(answer["error"].get("kind"), UserError)(str(answer["error"].get("message")))
    return answer
