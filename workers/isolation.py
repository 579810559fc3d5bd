"""What a candidate is started with, and how much of it this host can give.

A `Recipe` turns limits and the project's own files into the plans that workers/launch.py carries out; `host_isolation`
tries one and says what is missing.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grader.measurement import Isolation
from workers.cgroups import Cgroup, name_for
from workers.launch import Plan
from workers.processes import Owner, threads_of_user
from workers.seccomp import SeccompError, candidate_filter

FIRST_SLOT_UID = 61000
SLOTS = 1000  # uids 61000-61999: above Debian's users, below those systemd and containers hand out

# Everything of ours that the candidate sees. Nothing here may know an expected output.
APP_FILES = (
    "__init__.py",
    "audit.py",
    "candidate.py",
    "devices/__init__.py",
    "devices/cpu_candidate.py",
    "devices/cuda_candidate.py",
    "devices/replaying.py",
    "entry.py",
    "gate.py",
    "interpreter.py",
    "protocol.py",
    "record.py",
    "storages.py",
)

_NVIDIA = Path("/proc/driver/nvidia")
_CAP_SYS_NICE = 23
BACKGROUND_NICE = 10  # of what works beside a measurement
_HERE = Path(__file__).resolve().parent
_PROJECT = _HERE.parent
# covered where a folder that the candidate needs (a venv, /usr) happens to contain the project
_HIDDEN = (
    ".env", ".git", "assignments", "benchmarks", "docs", "grader", "migrations", "reference", "tests", "var", "workers",
)  # fmt: skip
OWN_PROCESSES = 3  # bubblewrap outside, its first process inside, and one that is just exiting
_INSTALL_BWRAP = "Grading needs bubblewrap 0.8 or newer: `apt-get install bubblewrap`."

_RUN = """\
import os, resource, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
processes = {processes}
if processes:
    resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
from workers.candidate import main
sys.exit(main(*map(int, sys.argv[1:4])))
"""


class SandboxUnavailable(Exception):  # noqa: N818 - says a state, not a mistake
    """No sandbox can be had here; the text says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one candidate may use."""

    memory_bytes: int = 3 << 30  # with swap, and with what it writes to its scratch folders
    processes: int = 64  # threads count
    scratch_bytes: int = 64 << 20  # each of /w, /tmp and /dev/shm
    file_bytes: int = 64 << 20
    output_bytes: int = 256 << 10  # kept of each stream, from its beginning
    output_total_bytes: int = 4 << 20  # both streams; a candidate that prints more is killed
    cpu_s: int | None = 120  # of each process; None for one of ours that outlives many examinations
    open_files: int = 256
    nice: int = 0  # how much more readily than we it leaves the processor to others, 0 to 19
    start_nice: int = 0  # the same while it gets ready; where we may not take it back, it is not given


def host_isolation() -> Isolation:
    """Find out what this host can do by doing it once.

    Raises:
        SandboxUnavailable: no sandbox can be had at all; the text says what to install or to change.
    """
    notes: list[str] = []
    if not may_use_slots():
        notes.append("Candidates run as your own user: start the worker as root to give each a user of its own.")
    owner = Owner.myself()
    cgroup = Cgroup.create(name_for(owner, f"probe.{time.monotonic_ns()}"), memory_bytes=1 << 30, processes=64)
    try:
        if not cgroup.bounds_memory:
            notes.append(
                "Memory is limited for each process, not for all of them together: start the worker as root, or below "
                "`systemd-run --user --scope -p Delegate=yes`, so that it may make cgroups."
            )
        if not cgroup.bounds_processes and not _counts_processes_by_namespace():
            notes.append("Processes are counted with all of your own: Linux 5.14 or a delegated cgroup counts apart.")
        try:
            candidate_filter(gpu=False)
        except SeccompError as exc:
            notes.append(f"Candidates have {exc}.")
        recipe = Recipe(isolated=True, limits=Limits(), env={}, gpu=False, program=None)
        uid = FIRST_SLOT_UID + SLOTS - 1 if may_use_slots() else None
        plan = recipe.plan(uid=uid, cgroup=cgroup, folder=None, arguments=())
        plan["command"] = [sys.executable, "-I", "-S", "-c", "pass"]
        process = launch(plan, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, pass_fds=())
        _, stderr = process.communicate(timeout=30)
    finally:
        cgroup.remove(2.0)
    if process.returncode != 0:
        raise SandboxUnavailable(_explain_refusal(stderr.decode(errors="replace").strip()))
    return Isolation(level="reduced" if notes else "full", notes=tuple(notes))


class Recipe:
    """What all candidates of one pool have in common."""

    def __init__(
        self,
        *,
        isolated: bool,
        limits: Limits,
        env: Mapping[str, str],
        gpu: bool,
        program: Path | None,
        under: Sequence[str] = (),
    ) -> None:
        self.isolated = isolated
        self._limits = limits
        self._gpu = gpu
        self._under = list(under)
        self._env = dict(env)
        self._files = _app_files(program)
        self._runtime = _runtime_folders(under)
        self._bwrap = _find_bwrap() if isolated else None
        self._filter: bytes | None = None
        if isolated:
            with contextlib.suppress(SeccompError):
                self._filter = candidate_filter(gpu=gpu, fifos=bool(under))

    def plan(self, *, uid: int | None, cgroup: Cgroup, folder: Path | None, arguments: Sequence[int]) -> Plan:
        """Describe one candidate.

        Args:
            folder: where to put its files and its scratch when it is not isolated.
        """
        rlimits, processes_inside = self._rlimits(uid, cgroup)
        files = {**self._files, "run.py": _RUN.format(processes=processes_inside).encode()}
        app, work = Path("/app"), "/w"
        if folder is not None:
            app, work = folder / "app", str(folder / "w")
            Path(work).mkdir()
            for name, content in files.items():
                (app / name).parent.mkdir(parents=True, exist_ok=True)
                (app / name).write_bytes(content)
        return Plan(
            parent_pid=os.getpid(),
            bwrap=self._bwrap,
            uid=uid,
            cgroup_procs=cgroup.procs_files(),
            rlimits=rlimits,
            runtime=self._runtime if self.isolated else [],
            hidden=_hidden_paths(self._runtime) if self.isolated else [],
            files={f"{app}/{name}": base64.b64encode(content).decode() for name, content in files.items()},
            devices=_nvidia_devices(self._env.get("CUDA_VISIBLE_DEVICES")) if self._gpu else [],
            scratch_bytes=self._limits.scratch_bytes,
            nice=max(self._limits.nice, self._limits.start_nice if _may_lower_nice() else 0),
            seccomp=None if self._filter is None else base64.b64encode(self._filter).decode(),
            env=self._environment(work),
            workdir=work,
            command=[*self._under, sys.executable, "-I", "-B", f"{app}/run.py", *map(str, arguments)],
        )

    def _rlimits(self, uid: int | None, cgroup: Cgroup) -> tuple[dict[str, int], int]:
        """Limits to set outside, and the number of processes to be set inside (0: none)."""
        limits = self._limits
        found = {
            "RLIMIT_CORE": 0,
            "RLIMIT_FSIZE": limits.file_bytes,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_NOFILE": limits.open_files,
        }
        if limits.cpu_s is not None:
            found["RLIMIT_CPU"] = limits.cpu_s
        if not cgroup.bounds_memory and not self._gpu:
            found["RLIMIT_DATA"] = limits.memory_bytes  # CUDA reserves far more than it uses
        processes_inside = 0
        if uid is not None:
            found["RLIMIT_NPROC"] = limits.processes + OWN_PROCESSES
        elif self.isolated and _counts_processes_by_namespace():
            processes_inside = limits.processes + OWN_PROCESSES
        else:
            found["RLIMIT_NPROC"] = threads_of_user(os.getuid()) + limits.processes + OWN_PROCESSES
        return found, processes_inside

    def _environment(self, work: str) -> dict[str, str]:
        env = {
            "HOME": work,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": work,
            "TORCHINDUCTOR_CACHE_DIR": f"{work}/inductor",
            "TRITON_CACHE_DIR": f"{work}/triton",
            "USER": "student",
        }
        if self._gpu and (libcuda := _libcuda_folder()) is not None:
            env["TRITON_LIBCUDA_PATH"] = libcuda
        return env | self._env


def launch(plan: Plan, *, stdout: int, stderr: int, pass_fds: tuple[int, ...]) -> subprocess.Popen[bytes]:
    plan_fd = os.memfd_create("plan", os.MFD_CLOEXEC)
    try:
        with open(plan_fd, "wb", closefd=False) as file:
            file.write(json.dumps(plan).encode())
        os.lseek(plan_fd, 0, os.SEEK_SET)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_HERE / "launch.py")],
            stdin=plan_fd,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            env={},
            cwd="/",
            start_new_session=True,  # Ctrl-C on our terminal is for us
        )
    finally:
        os.close(plan_fd)


NO_ISOLATION = Isolation(
    level="none", notes=("The file ran as an ordinary process of yours: it could read your files and use the network.",)
)


def _app_files(program: Path | None) -> dict[str, bytes]:
    """Files below /app, read now: a candidate started later runs the same code as one started today."""
    files = {f"workers/{name}": path.read_bytes() for name in APP_FILES if (path := _HERE / name).exists()}
    files.setdefault("workers/devices/__init__.py", b"")
    files["workers/__init__.py"] = b""
    if program is not None:
        files["workers/candidate.py"] = program.read_bytes()
    return files


def _runtime_folders(under: Sequence[str]) -> list[str]:
    """Folders of the interpreter, its packages and the program it runs under, less what every sandbox binds anyway."""
    wanted = {sys.prefix, sys.base_prefix, str(Path(sys.base_prefix).resolve())}
    wanted |= {str(Path(program).parent) for program in under[:1]}
    wanted.add(str(Path(sys.executable).resolve().parent.parent))
    folders: list[str] = []
    for folder in sorted(wanted):  # parents first
        if not any(_is_below(folder, parent) for parent in ("/usr", *folders)):
            folders.append(folder)
    return folders


def _hidden_paths(runtime: Sequence[str]) -> list[str]:
    bound = ("/usr", *runtime)
    paths = (_PROJECT / name for name in _HIDDEN)
    return [str(path) for path in paths if path.exists() and any(_is_below(str(path), folder) for folder in bound)]


def hidden_paths() -> list[str]:
    """What of the project no candidate may see, wherever it lies."""
    return [str(path) for name in _HIDDEN if (path := _PROJECT / name).exists()]


def _is_below(path: str, folder: str) -> bool:
    return Path(path).is_relative_to(folder)


def _find_bwrap() -> str:
    found = shutil.which("bwrap")
    if found is None:
        raise SandboxUnavailable(_INSTALL_BWRAP)
    return found


def _explain_refusal(stderr: str) -> str:
    tail = stderr[-1500:]
    if "disable-userns" in stderr:
        return f"{_INSTALL_BWRAP} The one here says: {tail}"
    if re.search(r"launch: .*exec|execvp|No such file|Permission denied", stderr) and "namespace" not in stderr:
        hint = (
            f"The interpreter {sys.executable} and its packages must be readable by every user (`chmod -R o+rX` on "
            "their folder), and on Ubuntu 24.04 `sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` must let "
            "bubblewrap make user namespaces."
        )
    else:
        hint = (
            "This host forbids user namespaces. Outside a container: `sysctl -w kernel.unprivileged_userns_clone=1` "
            "(Debian 10 and older), `sysctl -w user.max_user_namespaces=10000`, or on Ubuntu 24.04 `sysctl -w "
            "kernel.apparmor_restrict_unprivileged_userns=0`. In Docker: `--security-opt systempaths=unconfined` and "
            "a seccomp profile that allows unshare, clone, mount, umount2 and pivot_root."
        )
    return f"bubblewrap could not start a sandbox: {tail or 'it said nothing'}. {hint}"


def _may_lower_nice() -> bool:
    """Whether what was given with `nice` can be taken back: CAP_SYS_NICE, which containers mostly lack."""
    status = Path("/proc/self/status").read_text()
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_SYS_NICE & 1)


def may_use_slots() -> bool:
    """Root, and not one of a user namespace that has no such uids."""
    if os.geteuid() != 0:
        return False
    last = FIRST_SLOT_UID + SLOTS - 1
    ranges = (map(int, line.split()) for line in Path("/proc/self/uid_map").read_text().splitlines())
    return any(first <= FIRST_SLOT_UID and last < first + count for first, _, count in ranges)


def _counts_processes_by_namespace() -> bool:
    """Since Linux 5.14 RLIMIT_NPROC counts in each user namespace apart, so it can be set inside."""
    major, minor = re.findall(r"\d+", platform.release())[:2]
    return (int(major), int(minor)) >= (5, 14)


def _nvidia_devices(visible: str | None) -> list[str]:
    """Device nodes of the GPU whose UUID is `visible`, without those of other GPUs; of all where that tells none."""
    names = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
    cards = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    for path in _NVIDIA.glob("gpus/*/information"):
        told = path.read_text(errors="replace")
        minor = re.search(r"Device Minor:\s*(\d+)", told)
        if visible and visible in told.split() and minor and f"nvidia{minor[1]}" in cards:
            cards = [f"nvidia{minor[1]}"]
    return [f"/dev/{name}" for name in (*cards, *names) if Path("/dev", name).exists()]


def _libcuda_folder() -> str | None:
    """Where the driver's library lies; Triton would otherwise run ldconfig to find it."""
    with contextlib.suppress(OSError):
        listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
        if found := re.search(r"libcuda\.so\.1 .*=> (\S+)/libcuda\.so\.1", listed):
            return found[1]
    return None
