"""One cgroup per sandbox, v1 or v2 or the mixture of both, always below the cgroup this process is in.

A host with v1 controllers often has an empty v2 hierarchy beside them. Its `cgroup.freeze` and `cgroup.kill` need no
controller and are better than v1's freezer (a task frozen there cannot be killed), so they are used where they exist.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from workers.processes import Owner

_NAME = re.compile(r"tilegrade-(\d+)-(\d+)-(\d+)-[\w.]+")
_SUPERVISOR = "tilegrade-main"  # where this process moves on v2, because only an empty cgroup can limit its children
_POLL_S = 0.0002


class CgroupError(Exception):
    """A cgroup did not do what was asked of it within its time."""


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where this process may make cgroups: its own folder in every hierarchy."""

    v1: dict[str, Path]  # controller -> folder
    v2: Path | None
    v2_controllers: frozenset[str]


def own_hierarchies() -> Hierarchies:
    """Find this process's own folder in every mounted hierarchy."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    v1: dict[str, Path] = {}
    v2: Path | None = None
    for root, mount, kind, options in _mounts():
        if kind == "cgroup2" and v2 is None and "" in own:
            v2 = _below(mount, root, own[""])
        elif kind == "cgroup":
            for controller in options.split(","):
                if controller in own and controller not in v1:
                    v1[controller] = _below(mount, root, own[controller])
    if v2 is not None and v2.name == _SUPERVISOR:
        v2 = v2.parent
    available: frozenset[str] = frozenset()
    if v2 is not None:
        with contextlib.suppress(OSError):
            available = frozenset((v2 / "cgroup.controllers").read_text().split())
    return Hierarchies(v1=v1, v2=v2, v2_controllers=available)


@dataclass(slots=True)
class Cgroup:
    """The folders of one sandbox. `folders` maps "memory", "pids", "freezer" (v1) and "v2" to those that exist."""

    folders: dict[str, Path] = field(default_factory=dict)
    _peak_fd: int | None = None
    _peak_at_failed_reset: int | None = None

    @classmethod
    def create(cls, name: str, *, memory_bytes: int, processes: int, hierarchies: Hierarchies | None = None) -> Cgroup:
        """Make what this host allows; `bounds_memory` and the like say what that was. Never raises for a refusal."""
        where = own_hierarchies() if hierarchies is None else hierarchies
        group = cls()
        if where.v2 is not None:
            if where.v2_controllers & {"memory", "pids"}:
                _enable_controllers(where.v2, where.v2_controllers & {"memory", "pids"})
            group._make("v2", where.v2 / name)
        for controller in ("memory", "pids", "freezer"):
            if controller in where.v1:
                group._make(controller, where.v1[controller] / name)
        group._limit(memory_bytes, processes)
        return group

    @property
    def bounds_memory(self) -> bool:
        return "memory" in self.folders or self._v2_has("memory.max")

    @property
    def bounds_processes(self) -> bool:
        return "pids" in self.folders or self._v2_has("pids.max")

    @property
    def can_freeze(self) -> bool:
        return "freezer" in self.folders or self._v2_has("cgroup.freeze")

    def procs_files(self) -> list[str]:
        """The files into which a process writes itself to join."""
        return [str(folder / "cgroup.procs") for folder in self.folders.values()]

    def pids(self) -> set[int]:
        """Processes in any of the folders, by their number here."""
        found: set[int] = set()
        for folder in self.folders.values():
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in (folder / "cgroup.procs").read_text().split())
        return found - {0}  # 0: a process of another pid namespace

    def freeze(self, timeout_s: float) -> None:
        """Stop every thread; returns once none runs. Raises CgroupError when that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        if self._v2_has("cgroup.freeze"):
            (self.folders["v2"] / "cgroup.freeze").write_text("1")
            events, frozen = self.folders["v2"] / "cgroup.events", "frozen 1"
        else:
            events, frozen = self.folders["freezer"] / "freezer.state", "FROZEN"
            events.write_text("FROZEN")
        while frozen not in events.read_text():
            if time.monotonic() > deadline:
                raise CgroupError(f"not frozen within {timeout_s} s")
            time.sleep(_POLL_S)

    def thaw(self) -> None:
        """Let the threads run again."""
        if self._v2_has("cgroup.freeze"):
            (self.folders["v2"] / "cgroup.freeze").write_text("0")
        elif "freezer" in self.folders:
            (self.folders["freezer"] / "freezer.state").write_text("THAWED")

    def signal_kill(self) -> None:
        """Send SIGKILL to every process once, frozen or not."""
        if self._v2_has("cgroup.kill"):
            with contextlib.suppress(OSError):
                (self.folders["v2"] / "cgroup.kill").write_text("1")
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # v1 keeps a frozen task from dying; with the signal pending, it dies before it runs a line
        with contextlib.suppress(OSError):
            self.thaw()

    def memory_peak_bytes(self) -> int | None:
        """Highest use since the last reset; None where it is not counted or could not be reset."""
        try:
            if "memory" in self.folders:
                peak = int((self.folders["memory"] / "memory.max_usage_in_bytes").read_text())
            elif self._peak_fd is not None:
                peak = int(os.pread(self._peak_fd, 64, 0))
            else:
                return None
        except (OSError, ValueError):
            return None
        return None if peak == self._peak_at_failed_reset else peak

    def reset_memory_peak(self) -> None:
        """Start counting the peak anew. Before Linux 6.12, v2 cannot; only a higher peak is then reported."""
        self._peak_at_failed_reset = None
        try:
            if "memory" in self.folders:
                (self.folders["memory"] / "memory.max_usage_in_bytes").write_text("0")
            elif self._peak_fd is not None:
                os.pwrite(self._peak_fd, b"reset", 0)  # resets what this descriptor reads, not the file
        except OSError:
            self._peak_at_failed_reset = self.memory_peak_bytes()

    def oom_kills(self) -> int:
        """How many processes the kernel ended here because of the memory limit."""
        for kind, name in (("memory", "memory.oom_control"), ("v2", "memory.events")):
            if kind in self.folders:
                with contextlib.suppress(OSError):
                    found = re.search(r"^oom_kill (\d+)$", (self.folders[kind] / name).read_text(), re.MULTILINE)
                    if found:
                        return int(found[1])
        return 0

    def remove(self, timeout_s: float) -> bool:
        """Kill what is left and remove the folders; False when some could not be removed in time."""
        deadline = time.monotonic() + timeout_s
        if self._peak_fd is not None:
            os.close(self._peak_fd)
            self._peak_fd = None
        while self.folders:
            if self.pids():
                self.signal_kill()
            for kind, folder in list(self.folders.items()):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    del self.folders[kind]
                except OSError:
                    continue  # busy for as long as a process is exiting
                else:
                    del self.folders[kind]
            if self.folders and time.monotonic() > deadline:
                return False
            if self.folders:
                time.sleep(_POLL_S)
        return True

    def _make(self, kind: str, folder: Path) -> None:
        try:
            folder.mkdir()
        except OSError:
            return
        if os.access(folder / "cgroup.procs", os.W_OK):
            self.folders[kind] = folder
        else:
            folder.rmdir()

    def _limit(self, memory_bytes: int, processes: int) -> None:
        if "memory" in self.folders:
            folder = self.folders["memory"]
            (folder / "memory.limit_in_bytes").write_text(str(memory_bytes))
            # memory and swap together, where the kernel counts swap
            with contextlib.suppress(OSError):
                (folder / "memory.memsw.limit_in_bytes").write_text(str(memory_bytes))
        elif self._v2_has("memory.max"):
            folder = self.folders["v2"]
            (folder / "memory.max").write_text(str(memory_bytes))
            for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                with contextlib.suppress(OSError):
                    (folder / name).write_text(value)
            with contextlib.suppress(OSError):
                self._peak_fd = os.open(folder / "memory.peak", os.O_RDWR | os.O_CLOEXEC)
            if self._peak_fd is None:
                with contextlib.suppress(OSError):
                    self._peak_fd = os.open(folder / "memory.peak", os.O_RDONLY | os.O_CLOEXEC)
        if "pids" in self.folders:
            (self.folders["pids"] / "pids.max").write_text(str(processes))
        elif self._v2_has("pids.max"):
            (self.folders["v2"] / "pids.max").write_text(str(processes))

    def _v2_has(self, name: str) -> bool:
        return "v2" in self.folders and (self.folders["v2"] / name).exists()


def sweep_cgroups() -> list[str]:
    """Remove the cgroups of owners that are dead, in every mounted hierarchy; returns their folders."""
    by_name: dict[str, list[Path]] = {}
    for _, mount, kind, _ in _mounts():
        if kind in ("cgroup", "cgroup2"):
            for parent, names, _ in os.walk(mount):
                for name in names:
                    by_name.setdefault(name, []).append(Path(parent, name))
    removed: list[str] = []
    for name, folders in by_name.items():
        owner = owner_of(name)
        if owner is None or not owner.is_dead():
            continue
        kinds = {_kind(folder): folder for folder in folders}
        if Cgroup(folders=kinds).remove(timeout_s=2.0):
            removed += [str(folder) for folder in folders]
    return removed


def name_for(owner: Owner, tag: str) -> str:
    """A name that says whose the thing is, so that the janitor can tell a dead owner's from a live one's."""
    return f"tilegrade-{owner.pid_namespace}-{owner.pid}-{owner.started}-{tag}"


def owner_of(name: str) -> Owner | None:
    """Read a name that `name_for` made; None when it is not one."""
    found = _NAME.fullmatch(name)
    return Owner(pid_namespace=int(found[1]), pid=int(found[2]), started=int(found[3])) if found else None


def _kind(folder: Path) -> str:
    for kind, name in (("freezer", "freezer.state"), ("memory", "memory.oom_control"), ("v2", "cgroup.type")):
        if (folder / name).exists():
            return kind
    return "pids"


def _mounts() -> list[tuple[str, Path, str, str]]:
    """(root within the file system, mount point, type, super options) of every mount."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        fields = left.split(" ")
        found.append((fields[3], Path(fields[4]), kind, options))
    return found


def _below(mount: Path, root: str, own: str) -> Path:
    """A process's folder under a mount that shows only the part of the hierarchy below `root`."""
    inside = own[len(root) :] if root != "/" and own.startswith(root) else own
    return mount / inside.lstrip("/")


def _enable_controllers(folder: Path, wanted: frozenset[str]) -> None:
    """Let children of `folder` be limited. v2 wants it empty of processes first, so they move to a child of it."""
    control = folder / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        missing = wanted - set(control.read_text().split())
        if not missing:
            return
        request = " ".join(f"+{name}" for name in sorted(missing))
        try:
            control.write_text(request)
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
            main = folder / _SUPERVISOR
            main.mkdir(exist_ok=True)
            for _ in range(3):  # processes may be born meanwhile
                for pid in (folder / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (main / "cgroup.procs").write_text(pid)
            control.write_text(request)
