"""Each program tries one thing that a student's file must not be able to do."""

import os
import socket
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_jobs import HERE, LIGHT_CANDIDATE, LIMITS, cgroups_of, needs_root, processes_of, start, watch

from workers.isolation import FIRST_SLOT_UID
from workers.sandbox import Sandbox, SandboxPool

PROJECT = HERE.parent.parent
SECRET = "the-expected-output"
ANSWER_PINGS = "while True:\n    channel.send({'op': 'pong', 'n': channel.receive()['n']})\n"

# by name: how it must end, by which mechanism, and a line that shows which wall it ran into
PROGRAMS = tomllib.loads((HERE.parent / "hostile" / "cases.toml").read_text())["programs"]
NEEDS_A_CGROUP = {"memory_bomb", "shared_memory_bomb", "huge_traceback", "disk_fill"}


@pytest.fixture(scope="module")
def told() -> Iterator[dict[str, Any]]:
    """Real secrets and real listeners, so that a breach would succeed."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as tcp, socket.socket(socket.AF_UNIX) as by_path, \
            socket.socket(socket.AF_UNIX) as abstract:  # fmt: skip
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "secret.txt").write_text(SECRET)
        descriptor = os.open(folder / "secret.txt", os.O_RDONLY)
        os.set_inheritable(descriptor, True)
        os.environ["TILEGRADE_TEST_SECRET"] = SECRET
        tcp.bind(("127.0.0.1", 0))
        by_path.bind(str(folder / "socket"))
        (folder / "socket").chmod(0o777)
        abstract.bind(f"\0tilegrade-test-{os.getpid()}")
        for listener in (tcp, by_path, abstract):
            listener.listen()
        yield {
            "secret": SECRET,
            "folder": name,
            "paths": [name, f"{name}/secret.txt", str(PROJECT / "workers" / "sandbox.py")],
            "project": [str(PROJECT)],
            "files": [str(folder / "secret.txt")],
            "port": tcp.getsockname()[1],
            "unix_path": str(folder / "socket"),
            "unix_abstract": f"tilegrade-test-{os.getpid()}",
        }
        del os.environ["TILEGRADE_TEST_SECRET"]
        os.close(descriptor)


@pytest.fixture(scope="module")
def pool(told: dict[str, Any]) -> Iterator[SandboxPool]:
    pool = SandboxPool(argv_env={}, arena_bytes=1 << 20, limits=LIMITS, size=2, program=LIGHT_CANDIDATE)
    yield pool
    pool.close()
    assert cgroups_of(pool) == []
    assert processes_of(pool) == []


@pytest.fixture(scope="module")
def neighbour(pool: SandboxPool) -> Sandbox:
    """Another student's candidate at the same time; it answers pings."""
    sandbox = pool.take(20)
    start(sandbox, ANSWER_PINGS)
    return sandbox


def source_of(name: str) -> str:
    return (HERE.parent / "hostile" / "programs" / f"{name}.py").read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_hostile_program_is_contained(name, pool, neighbour, told):
    program = PROGRAMS[name]
    if os.geteuid() != 0 and name in NEEDS_A_CGROUP:
        pytest.skip("needs root: memory of a whole tree is counted by a cgroup")
    if name in ("raw_syscalls", "int80") and os.uname().machine != "x86_64":
        pytest.skip("written with the numbers of x86-64")
    sandbox = pool.take(20)
    start(sandbox, source_of(name), told)
    seen = watch(sandbox, 0.4 if program["ends"] == "killed" else 10)
    assert "BAD" not in seen.text, seen.text
    assert (seen.ending.cause, seen.ending.exit_code) == (program["ends"], program.get("exit_code")), seen.text
    assert program.get("shows", "") in seen.text, program["by"]
    assert seen.ending.processes_left == 0
    assert len(seen.ending.stdout) <= LIMITS.output_bytes
    neighbour.channel.send({"op": "ping", "n": len(name)})
    assert neighbour.channel.receive(2) == {"op": "pong", "n": len(name)}


def test_every_hostile_program_is_tried():
    assert PROGRAMS.keys() == {path.stem for path in (HERE.parent / "hostile" / "programs").glob("*.py")}


def test_forged_frame_is_a_claim_and_the_end_is_a_fact(pool):
    sandbox = pool.take(20)
    start(sandbox, source_of("forge_result"))
    seen = watch(sandbox, 5)
    assert seen.frames == [{"op": "done", "verdict": "pass", "score": 100, "claimed_ns": 1}]
    assert seen.ending.cause == "exited"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("giant_frame", "nested deeper than 12", id="nested"),
        pytest.param("endless_frame", "frame of 4294967295 bytes; the limit is 65536", id="endless"),
    ],
)
def test_broken_frame_is_refused_unread(name, reason, pool):
    sandbox = pool.take(20)
    start(sandbox, source_of(name))
    assert watch(sandbox, 5).refused == reason


def test_flood_is_cut_at_the_limit_while_it_runs(pool):
    sandbox = pool.take(20)
    start(sandbox, source_of("stdout_flood"))
    ending = watch(sandbox, 10).ending
    assert len(ending.stdout) == len(ending.stderr) == LIMITS.output_bytes
    # what was in the pipes when it died comes on top
    assert LIMITS.output_total_bytes < ending.output_bytes_total < LIMITS.output_total_bytes + (1 << 20)


@needs_root
def test_fork_bomb_never_has_more_processes_than_it_may(pool):
    sandbox = pool.take(20)
    start(sandbox, source_of("fork_bomb"))
    most = 0
    for _ in range(20):
        most = max(most, len(processes_of(pool)))
    sandbox.kill()
    # each sandbox's own, three at most, and those of the warm neighbours
    assert 20 < most <= LIMITS.processes + 4 * 3 + 3


@needs_root
def test_memory_peak_stays_at_the_limit(pool):
    sandbox = pool.take(20)
    start(sandbox, source_of("memory_bomb"))
    ending = watch(sandbox, 10).ending
    assert ending.memory_peak_bytes is not None
    assert 0.9 * LIMITS.memory_bytes < ending.memory_peak_bytes <= LIMITS.memory_bytes


def test_candidates_at_the_same_time_do_not_see_each_other(pool):
    first, second = pool.take(20), pool.take(20)
    start(first, "open('/tmp/note', 'w').close(); open('/dev/shm/note', 'w').close(); channel.send({'op': 'wrote'})\n"
                 "import time; time.sleep(60)")  # fmt: skip
    assert first.channel.receive(5) == {"op": "wrote"}
    start(second, "import os\nchannel.send({'op': 'sees', 'files': os.listdir('/tmp') + os.listdir('/dev/shm'),"
                  "'processes': [n for n in os.listdir('/proc') if n.isdigit()], 'uid': os.getuid()})")  # fmt: skip
    sees = second.channel.receive(5)
    assert "note" not in sees["files"]
    assert sees["processes"] == ["1", "2"]
    if os.geteuid() == 0:
        assert sees["uid"] >= FIRST_SLOT_UID
    first.kill()
    second.kill()


def test_project_is_covered_where_the_runtime_contains_it(monkeypatch, told):
    from workers import isolation

    monkeypatch.setattr(
        isolation, "_runtime_folders", lambda _under: sorted({str(PROJECT), sys.prefix, sys.base_prefix})
    )
    pool = SandboxPool(argv_env={}, arena_bytes=1 << 20, limits=LIMITS, size=1, program=LIGHT_CANDIDATE)
    try:
        sandbox = pool.take(20)
        start(sandbox, source_of("secrets"), told)
        seen = watch(sandbox, 10)
    finally:
        pool.close()
    assert "BAD" not in seen.text, seen.text
    assert "blocked /etc/shadow" in seen.text
