"""What the sandbox tests share: a light candidate, its limits, and the examiner's part in small."""

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from workers import cgroups
from workers.protocol import PeerGoneError, ProtocolError, TimedOutError
from workers.sandbox import Ending, Limits, Sandbox, SandboxPool

HERE = Path(__file__).parent
LIGHT_CANDIDATE = HERE / "light_candidate.py"
LIMITS = Limits(memory_bytes=512 << 20, scratch_bytes=16 << 20, file_bytes=32 << 20)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: users and cgroups of its own for each candidate")


@dataclass
class Seen:
    """What the examiner's side saw of one job."""

    ending: Ending
    frames: list[dict[str, Any]] = field(default_factory=list)
    refused: str | None = None  # why a frame was no frame

    @property
    def text(self) -> str:
        return self.ending.stdout.decode(errors="replace") + self.ending.stderr.decode(errors="replace")


def start(sandbox: Sandbox, source: str, told: dict[str, Any] | None = None) -> None:
    sandbox.channel.send({"op": "run", "source": source, "told": told or {}})


def watch(sandbox: Sandbox, seconds: float) -> Seen:
    """Wait as the examiner does: for frames, until it is gone, over a limit, out of protocol or out of time."""
    frames: list[dict[str, Any]] = []
    refused = None
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not sandbox.over_limit():
        try:
            frames.append(sandbox.channel.receive(0.02))
        except TimedOutError:
            continue
        except PeerGoneError:
            break
        except ProtocolError as exc:
            refused = str(exc)
            break
    return Seen(ending=sandbox.kill(), frames=frames, refused=refused)


def cgroups_of(pool: SandboxPool) -> list[Path]:
    """Folders of this pool's sandboxes, in every hierarchy."""
    where = cgroups.own_hierarchies()
    roots = {*where.v1.values(), *([where.v2] if where.v2 else [])}
    return [path for root in roots for path in root.glob(f"tilegrade-*-{os.getpid()}-*-{pool.tag}.*")]


def processes_of(pool: SandboxPool) -> list[int]:
    """Processes in this pool's sandboxes, zombies too, by the cgroup that each says it is in."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        with contextlib.suppress(OSError):
            if f"-{os.getpid()}-" in (text := path.read_text()) and f"-{pool.tag}." in text:
                found.append(int(path.parent.name))
    return found
