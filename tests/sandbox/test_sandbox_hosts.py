"""Other hosts than a good one: no root, no bubblewrap, a runtime out of reach, a worker that was killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_jobs import HERE, LIGHT_CANDIDATE, LIMITS, cgroups_of, needs_root, start, watch

from workers import cgroups, isolation, processes
from workers.cgroups import name_for, owner_of
from workers.launch import Plan, bwrap_arguments
from workers.processes import Owner
from workers.sandbox import SandboxPool, SandboxUnavailable, host_isolation, sweep_leftovers
from workers.seccomp import SeccompError

PROJECT = HERE.parent.parent
ANYONE = 64321  # a uid that no host knows

# A worker in small: runs the jobs it is given, prints what it saw as one line of JSON, and waits to be killed.
WORKER = """
import json, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests/sandbox"]
from sandbox_jobs import LIGHT_CANDIDATE, LIMITS, start, watch
from workers.sandbox import SandboxPool
task = json.loads(sys.argv[2])
pool = SandboxPool(
    argv_env={}, arena_bytes=1 << 20, limits=LIMITS, size=1, program=LIGHT_CANDIDATE, isolation=task["isolation"]
)
seen = {"level": pool.isolation.level, "notes": pool.isolation.notes, "jobs": []}
for source, seconds in task["jobs"]:
    sandbox = pool.take(20)
    start(sandbox, source)
    job = watch(sandbox, seconds)
    seen["jobs"].append({"cause": job.ending.cause, "left": job.ending.processes_left, "text": job.text})
if "hold" in task:
    sandbox = pool.take(20)
    start(sandbox, "channel.send({'op': 'looping'})\\nwhile True: pass")
    sandbox.channel.receive(10)
    if task["hold"] == "frozen":
        sandbox.freeze()
    print(json.dumps(seen), flush=True)
    time.sleep(60)
pool.close()
print(json.dumps(seen), flush=True)
"""


def run_worker(project: Path, task: dict[str, Any], *, python: str = sys.executable, **settings: Any) -> dict[str, Any]:
    command = [python, "-B", "-c", WORKER, str(project), json.dumps({"isolation": "auto", **task})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/", **settings)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def copy_of_project(folder: Path) -> Path:
    """As much of the project as the sandbox and its tests need."""
    for name in ("grader", "workers", "tests/sandbox"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@needs_root
def test_ordinary_user_gets_a_reduced_sandbox_that_still_contains(open_folder):
    project = copy_of_project(open_folder)
    as_anyone = {"user": ANYONE, "group": ANYONE, "extra_groups": [], "env": {"PATH": os.environ["PATH"]}}
    probe = subprocess.run([sys.executable, "-c", "import pytest"], capture_output=True, cwd="/", **as_anyone)
    if probe.returncode != 0:
        pytest.skip("the interpreter of these tests is not readable for other users")
    # a memory bomb meets the limit of its own process, as a MemoryError
    ends = {
        "fork_bomb": "killed", "memory_bomb": "exited", "stdout_flood": "output-limit", "kill_others": "exited",
        "raw_syscalls": "exited", "thread_bomb": "exited", "infinite_loop": "killed",
    }  # fmt: skip
    jobs = [
        [(HERE.parent / "hostile" / "programs" / f"{name}.py").read_text(), 0.5 if cause == "killed" else 20]
        for name, cause in ends.items()
    ]
    seen = run_worker(project, {"jobs": jobs}, **as_anyone)
    assert seen["level"] == "reduced"
    assert any("as your own user" in note for note in seen["notes"])
    assert any("Delegate=yes" in note for note in seen["notes"])
    for (name, cause), job in zip(ends.items(), seen["jobs"], strict=True):
        assert job["cause"] == cause, (name, job)
        assert job["left"] == 0
        assert "BAD" not in job["text"], (name, job["text"])
    assert "MemoryError" in seen["jobs"][1]["text"]
    assert list(processes_of_user(ANYONE)) == []


def processes_of_user(uid: int) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid == uid and processes.alive({int(entry.name)}):
                yield int(entry.name)
        except OSError:
            continue


@needs_root
def test_runtime_and_checkout_may_lie_where_no_other_user_can_look():
    import pyseccomp

    with tempfile.TemporaryDirectory() as name:  # mode 0700
        home = Path(name)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home / "venv")], check=True)
        packages = next((home / "venv" / "lib").glob("python*/site-packages"))
        shutil.copy(pyseccomp.__file__, packages)
        (packages / "sandbox_jobs.py").write_text(JOBS_WITHOUT_PYTEST)
        shutil.copy(LIGHT_CANDIDATE, packages)
        copy_of_project(home)
        shutil.rmtree(home / "tests")
        (home / "grades.db").write_text("secret")
        job = (
            "import os, sys\nprint(sys.prefix, os.getuid(), os.listdir(os.path.dirname(sys.prefix)))\n"
            f"print(os.path.exists({str(home / 'grades.db')!r}))"
        )
        seen = run_worker(home, {"jobs": [[job, 1.0]]}, python=str(home / "venv" / "bin" / "python"))
    assert seen["jobs"][0]["text"].split("\n")[0].startswith(f"{home}/venv 61")
    assert seen["jobs"][0]["text"].endswith("['venv']\nFalse\n")


JOBS_WITHOUT_PYTEST = """
from pathlib import Path
from types import SimpleNamespace
from workers.sandbox import Limits
LIGHT_CANDIDATE = Path(__file__).with_name("light_candidate.py")
LIMITS = Limits(memory_bytes=256 << 20)
def start(sandbox, source):
    sandbox.channel.send({"op": "run", "source": source, "told": {}})
def watch(sandbox, seconds):
    import time
    time.sleep(seconds)
    ending = sandbox.kill()
    return SimpleNamespace(ending=ending, text=(ending.stdout + ending.stderr).decode())
"""


@pytest.mark.parametrize("state", ["running", "frozen"])
@pytest.mark.parametrize("isolated", ["auto", "none"])
def test_killed_worker_takes_its_candidates_along_and_the_janitor_the_rest(state, isolated):
    task = json.dumps({"isolation": isolated, "jobs": [], "hold": state})
    with subprocess.Popen(
        [sys.executable, "-B", "-c", WORKER, str(PROJECT), task], stdout=subprocess.PIPE, text=True, cwd="/"
    ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        tree = processes.tree(worker.pid)
        assert len(tree) > 3
        worker.kill()
    left_folders = folders_of(worker.pid)
    deadline = time.monotonic() + 5
    if not (state == "frozen" and isolated == "auto" and cgroups.own_hierarchies().v2 is None):
        while processes.alive(tree) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert processes.alive(tree) == set()
    removed = sweep_leftovers()
    assert folders_of(worker.pid) == []
    assert processes.alive(tree) == set()
    assert set(map(str, left_folders)) <= set(removed)
    if isolated == "none":
        assert left_folders != []


def folders_of(pid: int) -> list[Path]:
    where = cgroups.own_hierarchies()
    roots = {Path(tempfile.gettempdir()), *where.v1.values(), *([where.v2] if where.v2 else [])}
    return [path for root in roots for path in root.glob(f"tilegrade-*-{pid}-*")]


@needs_root
def test_janitor_ends_what_v1_keeps_frozen(monkeypatch):
    """A task frozen by v1's freezer cannot die with its worker."""
    where = cgroups.own_hierarchies()
    if "freezer" not in where.v1:
        pytest.skip("no v1 freezer on this host")
    dead = Owner(pid_namespace=Owner.myself().pid_namespace, pid=2**22 - 1, started=1)
    group = cgroups.Cgroup.create(
        name_for(dead, "x.0"), memory_bytes=1 << 28, processes=8,
        hierarchies=cgroups.Hierarchies(v1=where.v1, v2=None, v2_controllers=frozenset()),
    )  # fmt: skip
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        for path in group.procs_files():
            Path(path).write_text(str(sleeper.pid))
        group.freeze(2)
        sleeper.kill()
        time.sleep(0.05)
        assert sleeper.poll() is None
        sweep_leftovers()
        assert sleeper.wait(5) == -signal.SIGKILL
    assert not any(folder.exists() for folder in group.folders.values())


def test_janitor_leaves_alone_what_is_in_use_or_not_ours_to_judge(make_pool):
    me = Owner.myself()
    elsewhere = Owner(pid_namespace=me.pid_namespace + 1, pid=2**22 - 1, started=1)
    dead = Owner(pid_namespace=me.pid_namespace, pid=me.pid, started=me.started + 1)  # a later process, our number
    pool = make_pool()
    sandbox = pool.take(20)
    before = cgroups_of(pool)
    folders = {owner: Path(tempfile.gettempdir(), name_for(owner, "t.0")) for owner in (me, elsewhere, dead)}
    for folder in folders.values():
        folder.mkdir()
    removed = sweep_leftovers()
    assert str(folders[dead]) in removed
    assert [folder.exists() for folder in folders.values()] == [True, True, False]
    folders[me].rmdir()
    folders[elsewhere].rmdir()
    assert set(before) <= set(cgroups_of(pool))
    start(sandbox, "channel.send({'op': 'well'})")
    assert sandbox.channel.receive(5) == {"op": "well"}
    sandbox.kill()


def test_names_say_whose_a_thing_is():
    owner = Owner(pid_namespace=4026531836, pid=12, started=345)
    assert owner_of(name_for(owner, "7f1a.3")) == owner
    assert owner_of("tilegrade-main") is None


def test_good_host_isolates_fully_or_says_what_is_missing():
    found = host_isolation()
    if os.geteuid() == 0:
        assert (found.level, found.notes) == ("full", ())
    else:
        assert found.level == "reduced"
        assert found.notes != ()


def test_host_without_bubblewrap_is_told_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        host_isolation()


@pytest.mark.parametrize(
    ("says", "advice"),
    [
        pytest.param("bwrap: Unknown option --disable-userns", "bubblewrap 0.8 or newer", id="too-old"),
        pytest.param("bwrap: Creating new namespace failed: Operation not permitted", "Docker", id="forbidden"),
        pytest.param("bwrap: execvp /x/bin/python: Permission denied", "readable by every user", id="unreadable"),
    ],
)
def test_host_that_refuses_is_told_what_to_change(says, advice, monkeypatch, open_folder):
    fake = open_folder / "bwrap"
    fake.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{open_folder}:/usr/bin:/bin")
    with pytest.raises(SandboxUnavailable) as told:
        host_isolation()
    assert says in str(told.value)
    assert advice in str(told.value)


def test_host_without_the_filter_library_is_reduced(monkeypatch):
    def missing(*, gpu: bool, fifos: bool = False) -> bytes:
        raise SeccompError("no system-call filter: install it")

    monkeypatch.setattr(isolation, "candidate_filter", missing)
    found = host_isolation()
    assert found.level == "reduced"
    assert "Candidates have no system-call filter: install it." in found.notes


def test_host_without_cgroups_is_reduced(monkeypatch):
    nothing = cgroups.Hierarchies(v1={}, v2=None, v2_controllers=frozenset())
    monkeypatch.setattr(cgroups, "own_hierarchies", lambda: nothing)
    found = host_isolation()
    assert found.level == "reduced"
    assert any("Memory is limited for each process" in note for note in found.notes)


def a_plan(**changes: Any) -> Plan:
    plan = Plan(
        parent_pid=1, bwrap="/usr/bin/bwrap", uid=None, cgroup_procs=[], rlimits={}, runtime=["/opt/venv"], hidden=[],
        files={}, devices=[], scratch_bytes=1 << 20, nice=0, seccomp=None, env={"HOME": "/w"}, workdir="/w",
        command=["true"],
    )  # fmt: skip
    plan.update(changes)  # type: ignore[typeddict-item]
    return plan


def test_what_is_covered_is_covered_after_it_was_bound():
    plan = a_plan(runtime=["/opt/app"], hidden=["/opt/app"])
    args = bwrap_arguments(plan, sources={"/opt/app": "/mnt/0"}, file_fds={}, seccomp_fd=None)
    bound = args.index("/mnt/0")
    assert "/dev/null" in args[bound:]


def test_gpu_sandbox_gets_the_devices_and_sys():
    plan = a_plan(devices=["/dev/nvidia0", "/dev/nvidiactl"])
    args = " ".join(bwrap_arguments(plan, sources={"/opt/venv": "/opt/venv"}, file_fds={}, seccomp_fd=None))
    assert "--dev-bind /dev/nvidia0 /dev/nvidia0" in args
    assert "--ro-bind /sys /sys" in args
    assert args.index("--dev-bind") < args.index("--remount-ro /dev")


def test_no_isolation_needs_no_bubblewrap(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    pool = SandboxPool(
        argv_env={}, arena_bytes=1 << 20, limits=LIMITS, size=1, program=LIGHT_CANDIDATE, isolation="none"
    )  # fmt: skip
    try:
        sandbox = pool.take(20)
        start(sandbox, "print('ran')")
        assert watch(sandbox, 5).ending.stdout == b"ran\n"
    finally:
        pool.close()
