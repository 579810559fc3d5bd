"""The check at a worker's start: a good host passes, and each wall that is missing is named with what to do."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_jobs import HERE, needs_root

from workers import cgroups, isolation, selfcheck
from workers.isolation import host_isolation
from workers.sandbox import SandboxPool, SandboxUnavailable
from workers.seccomp import SeccompError

PROJECT = HERE.parent.parent
WALLS = [
    "namespaces", "privileges", "user", "system calls", "network", "secrets", "read-only", "memory", "processes",
    "hostile sample",
]  # fmt: skip

# a bubblewrap that leaves something out: what it is told is changed on its way to the real one
LEAKY_BWRAP = """#!{python}
import os, sys
with os.fdopen(int(sys.argv[2]), "rb") as file:
    args = file.read().decode().split("\\0")[:-1]
def before_read_only(*more):
    at = args.index("--remount-ro")
    args[at:at] = more
{leak}
fd = os.memfd_create("args", 0)
os.write(fd, b"\\0".join(arg.encode() for arg in args) + b"\\0")
os.lseek(fd, 0, 0)
os.execve({bwrap!r}, [{bwrap!r}, "--args", str(fd), *sys.argv[3:]], {{}})
"""


@pytest.fixture
def leak(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Puts a bubblewrap on the path that changes its arguments."""
    bwrap = shutil.which("bwrap")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)

        def install(how: str) -> None:
            fake = folder / "bwrap"
            fake.write_text(LEAKY_BWRAP.format(python=os.path.realpath(sys.executable), leak=how, bwrap=bwrap))
            fake.chmod(0o755)
            monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

        yield install


def failed(checks: list[selfcheck.Check]) -> set[str]:
    for one in checks:
        assert bool(one.remedy) is not one.ok, f"{one.name}: a remedy for what fails, and for nothing else"
        assert one.tried
        assert one.found
    return {one.name for one in checks if not one.ok}


def try_walls(*, gpu: bool = False, allow_reduced: bool = False, hidden: tuple[str, ...] = ()) -> list[selfcheck.Check]:
    return selfcheck.check_sandbox(gpu=gpu, allow_reduced=allow_reduced, hidden=hidden)


@needs_root
@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "with-a-gpus-system-calls"])
def test_a_good_host_passes_every_wall(gpu):
    checks = try_walls(gpu=gpu)
    assert [one.name.removesuffix(" (gpu)") for one in checks] == WALLS
    assert failed(checks) == set()
    assert selfcheck.why_not(checks) == ""


NO_NET = (
    "at = args.index('--unshare-all')\n"
    "args[at : at + 1] = ['--unshare-ipc', '--unshare-pid', '--unshare-uts', '--unshare-cgroup']"
)
NO_FILTER = "at = args.index('--seccomp')\nos.close(int(args[at + 1]))\ndel args[at : at + 2]"
WRITABLE = (
    "at = args.index('--remount-ro') + 2\nassert args[at : at + 2] == ['--remount-ro', '/']\ndel args[at : at + 2]"
)


@needs_root
@pytest.mark.parametrize(
    ("how", "walls"),
    [
        pytest.param(NO_NET, {"namespaces", "network"}, id="the-hosts-network"),
        pytest.param(NO_FILTER, {"system calls", "network"}, id="no-filter"),
        pytest.param(WRITABLE, {"read-only"}, id="a-writable-root"),
        pytest.param(
            f"before_read_only('--ro-bind', '{PROJECT}/grader', '{PROJECT}/grader')", {"secrets"}, id="the-project"
        ),
        pytest.param("args += ['--setenv', 'TILEGRADE_DATABASE_URL', 'x']", {"secrets"}, id="a-variable-of-ours"),
        pytest.param(
            "at = args.index('--cap-drop')\nargs[at : at + 2] = ['--cap-add', 'ALL']", {"privileges"}, id="capabilities"
        ),
        pytest.param("before_read_only('--bind', '/tmp', '/tmp')", {"secrets"}, id="the-hosts-scratch"),
    ],
)
def test_a_wall_that_is_missing_is_named(leak, how, walls):
    leak(how)
    assert failed(try_walls()) == walls


@needs_root
def test_a_folder_that_somebody_names_is_tried(leak):
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        (Path(name) / "grades.db").write_text("secret")
        (Path(name) / "grades.db").chmod(0o644)
        assert failed(try_walls(hidden=(name,))) == set()
        leak(f"before_read_only('--ro-bind', '{name}', '{name}')")
        checks = try_walls(hidden=(name,))
    assert failed(checks) == {"secrets"}
    assert name in selfcheck.why_not(checks)


@pytest.mark.parametrize("allow_reduced", [False, True])
def test_without_cgroups_memory_falls_back_to_each_process(monkeypatch, allow_reduced):
    nothing = cgroups.Hierarchies(v1={}, v2=None, v2_controllers=frozenset())
    monkeypatch.setattr(cgroups, "own_hierarchies", lambda: nothing)
    checks = try_walls(allow_reduced=allow_reduced)
    (memory,) = (one for one in checks if one.name == "memory")
    assert "fall-back holds each process to it" in memory.found
    assert (memory.ok, memory.needed) == (False, not allow_reduced)
    assert ("memory" in selfcheck.why_not(checks)) is not allow_reduced
    assert ("TILEGRADE_ALLOW_REDUCED_SANDBOX" in memory.remedy) is not allow_reduced


def test_no_limit_at_all_is_never_good_enough(monkeypatch):
    nothing = cgroups.Hierarchies(v1={}, v2=None, v2_controllers=frozenset())
    monkeypatch.setattr(cgroups, "own_hierarchies", lambda: nothing)
    monkeypatch.setattr(isolation.Recipe, "_rlimits", lambda *_: ({}, 0))
    why = selfcheck.why_not(try_walls(allow_reduced=True))
    assert "memory: nothing stopped it" in why
    assert "processes: 128 were started" in why


@needs_root
@pytest.mark.parametrize("allow_reduced", [False, True])
def test_without_users_of_its_own_a_candidate_is_as_mighty_as_the_worker(monkeypatch, allow_reduced):
    for module in (isolation, selfcheck):
        monkeypatch.setattr(module, "may_use_slots", lambda: False)
    monkeypatch.setattr("workers.sandbox.may_use_slots", lambda: False)
    checks = try_walls(allow_reduced=allow_reduced)
    assert "user" in failed(checks)
    assert ("user: " in selfcheck.why_not(checks)) is not allow_reduced


@pytest.mark.parametrize("allow_reduced", [False, True])
def test_without_the_filters_library_system_calls_are_open(monkeypatch, allow_reduced):
    def missing(**_: bool) -> bytes:
        raise SeccompError("no system-call filter: install it")

    for module in (isolation, selfcheck):
        monkeypatch.setattr(module, "candidate_filter", missing)
    checks = try_walls(allow_reduced=allow_reduced)
    (calls,) = (one for one in checks if one.name == "system calls")
    assert calls.remedy.startswith("no system-call filter: install it.")
    assert (calls.ok, calls.needed) == (False, not allow_reduced)


@needs_root
def test_a_flood_that_is_not_cut_off_is_named(monkeypatch):
    endless = dataclasses.replace(selfcheck.LIMITS, output_total_bytes=1 << 50)
    monkeypatch.setattr(selfcheck, "LIMITS", endless)
    monkeypatch.setattr(selfcheck, "_ANSWER_S", 3.0)
    assert "hostile sample" in failed(try_walls())


def test_a_host_without_bubblewrap_fails_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    checks = try_walls(allow_reduced=True)
    assert [(one.name, one.ok) for one in checks] == [("sandbox", False)]
    assert "apt-get install bubblewrap" in selfcheck.why_not(checks)


def test_the_environment_is_as_it_was_after_a_check():
    before = dict(os.environ)
    try_walls(allow_reduced=True)
    assert dict(os.environ) == before


def test_a_pool_that_gets_nothing_ready_is_named():
    def broken() -> SandboxPool:
        raise SandboxUnavailable("torch is not installed")

    (check,) = selfcheck.check_pools({"interpreter": broken})
    assert (check.name, check.ok, check.remedy) == ("pool interpreter", False, "torch is not installed")


# -- in a process of its own --------------------------------------------------------------------------------------


def test_a_check_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: _popen(["/bin/sleep", "60"], **more))
    assert "did not end within 1 s" in selfcheck.in_a_process(limit_s=1.0).why_not


_popen = subprocess.Popen


def test_a_check_that_crashes_says_what_it_said(monkeypatch):
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **more: _popen(["/bin/sh", "-c", "echo driver gone >&2; exit 9"], **more)
    )
    assert selfcheck.in_a_process().why_not == "the check itself failed: driver gone"


@pytest.mark.slow
def test_the_command_tells_a_program_what_it_found():
    done = subprocess.run(
        [sys.executable, "-m", "workers", "check", "--allow-reduced", "--pools", "assignments/online-softmax"],
        cwd=PROJECT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    found = json.loads(done.stdout)
    assert found["ok"] is True, found
    assert [one["name"] for one in found["checks"]] == [*WALLS, "pool interpreter", "pool compiler"]
    if host_isolation().level == "full":
        assert all(one["ok"] for one in found["checks"])
