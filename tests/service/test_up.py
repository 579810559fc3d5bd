"""`tilegrade up`: starts, restarts, stops."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from grader.errors import UserError
from grader.settings import Settings
from grader.up import Child, Supervisor, listen, restart_delay_s, worker_commands

ROOT = Path(__file__).parents[2]


def test_restarts_come_ever_slower():
    assert [restart_delay_s(deaths) for deaths in (1, 2, 3, 4, 8, 50)] == [0.5, 1.0, 2.0, 4.0, 60.0, 60.0]


@pytest.mark.parametrize(
    ("host", "said"),
    [
        pytest.param("127.0.0.1", r"Address already in use\. Set TILEGRADE_PORT .* TILEGRADE_PORT=\d+\.", id="port"),
        pytest.param("192.0.2.1", r"Cannot assign .*\. Set TILEGRADE_HOST to an address of this machine", id="address"),
        pytest.param("name with spaces", r": .*\. Set TILEGRADE_HOST to an address of this machine", id="name"),
        pytest.param("2001:db8::1", r"Set TILEGRADE_HOST to an address of this machine", id="address-6"),
    ],
)
def test_where_nobody_can_listen_the_right_setting_is_named(host, said):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings.from_env({"TILEGRADE_HOST": host, "TILEGRADE_PORT": str(taken.getsockname()[1])})
        with pytest.raises(UserError, match=said):
            listen(settings)


@pytest.fixture
def supervise(tmp_path):
    made = []

    def make(program):
        said = []
        child = Child(name="child", arguments=[sys.executable, "-c", program], log=tmp_path / "child.log")
        supervisor = Supervisor(children=[child], say=said.append)
        made.append(supervisor)
        return supervisor, child, said

    yield make
    for supervisor in made:
        supervisor.stop()


def test_a_child_that_ends_is_started_again_and_its_last_words_are_told(supervise):
    supervisor, child, said = supervise("print('no such table'); raise SystemExit(3)")
    deadline = time.monotonic() + 20
    while child.deaths < 2:
        supervisor.look_after()
        time.sleep(0.05)
        assert time.monotonic() < deadline
    assert re.match(r"child ended with status 3, again in 0\.5 s; .*child\.log ends: no such table", said[0])


def test_a_child_that_does_not_listen_is_killed(supervise, monkeypatch):
    monkeypatch.setattr("grader.up.STOP_GRACE_S", 0.5)
    supervisor, child, said = supervise(
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    supervisor.look_after()
    deadline = time.monotonic() + 20
    while "deaf" not in child.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    supervisor.stop()
    assert child.process.returncode == -signal.SIGKILL
    assert said == ["child does not stop; killing it"]


def test_children_of_one_kind_are_stopped_together(tmp_path):
    slow = (
        "import signal, sys, time\n"
        "def leave(*_): time.sleep(1); sys.exit()\n"
        "signal.signal(signal.SIGTERM, leave); print('up', flush=True); time.sleep(60)"
    )
    children = [
        Child(name=f"worker-{n}", arguments=[sys.executable, "-c", slow], log=tmp_path / f"{n}.log") for n in range(4)
    ]
    supervisor = Supervisor(children=children, say=print)
    supervisor.look_after()
    deadline = time.monotonic() + 20
    while not all("up" in child.log.read_text() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    supervisor.stop()
    assert time.monotonic() - began < 3
    assert {child.process.returncode for child in children} == {0}


@pytest.mark.parametrize(
    ("device", "slot", "gpus", "slots"),
    [
        pytest.param("cpu", None, [], {"worker": None}, id="cpu"),
        pytest.param("cuda", None, ["A", "B"], {"worker-0": "0", "worker-1": "1"}, id="one-for-each-gpu"),
        pytest.param("cuda", 1, ["A", "B"], {"worker": None}, id="the-slot-that-was-set"),
        pytest.param("cuda", None, [], {"worker-0": "0"}, id="none-found-so-that-staff-hear-why"),
    ],
)
def test_each_gpu_gets_a_worker(device, slot, gpus, slots, tmp_path):
    settings = dataclasses.replace(Settings.from_env({"TILEGRADE_DATA": str(tmp_path)}), device=device, slot=slot)
    commands = worker_commands(settings, gpus)
    given = {name: words[words.index("--slot") + 1] if "--slot" in words else None for name, words in commands.items()}
    assert given == slots
    assert all(["--device", device] == words[3:5] for words in commands.values())


@pytest.fixture
def folder():
    path = Path(tempfile.mkdtemp(prefix="tg", dir="/tmp"))  # the broker's socket lies here: a short name
    yield path
    shutil.rmtree(path)


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start_up(folder, port):
    started = []

    def start():
        output = (folder / f"up{len(started)}.out").open("w+")
        process = subprocess.Popen(
            [sys.executable, "-m", "grader.cli", "up"],
            cwd=ROOT,
            env={
                "PATH": os.environ["PATH"],
                "OMP_NUM_THREADS": "1",
                "TILEGRADE_DATA": str(folder / "data"),
                "TILEGRADE_PORT": str(port),
                "TILEGRADE_WEB_PROCESSES": "2",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        started.append((process, output))

        def said():
            output.seek(0)
            return output.read()

        return process, said

    yield start
    for process, output in started:
        if process.poll() is None:
            process.kill()
            process.wait()
        output.close()


def children_of(pid):
    """(words of its command, pid) of each."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append((stat.with_name("cmdline").read_text().split("\0"), int(stat.parent.name)))
    return found


def parts_of(pid):
    # python -m workers.tasks --device cpu, or python -m grader.cli web
    return {words[3] if words[2] == "grader.cli" else words[2]: child for words, child in children_of(pid)}


def servers_of(pid):
    return {child for words, child in children_of(pid) if "--listener" in words}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_command_runs_the_service_and_ctrl_c_ends_all_of_it(start_up, port, wait_until, folder):
    def answers():
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    process, said = start_up()
    wait_until(lambda: "runs at http" in said(), 60, "the first line of the service")
    assert len(re.findall(r"demo (student|instructor): user \1, password \S{23}\n", said())) == 2
    assert answers()
    children = parts_of(process.pid)
    assert set(children) == {"broker", "web", "workers.tasks", "beat"}

    second, second_said = start_up()
    assert second.wait(60) == 2
    assert "runs from" in second_said()

    one, other = servers_of(children["web"])
    os.kill(one, signal.SIGKILL)
    assert all(answers() for _ in range(5))  # the other one serves alone,
    wait_until(lambda: len(servers_of(children["web"]) - {one}) == 2, 20, "another one in its place")
    assert other in servers_of(children["web"])

    os.kill(children["web"], signal.SIGKILL)
    wait_until(lambda: "web ended with status -9" in said(), 20, "news of the death")
    wait_until(answers, 30, "the web server's return")

    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*children.values(), other])
    assert not answers()

    # its data stays, and nobody's password is printed again
    third, third_said = start_up()
    wait_until(lambda: "runs at http" in third_said(), 60, "the second start")
    assert "password" not in third_said()
    # even killed outright, it leaves nobody behind who holds the port
    children = parts_of(third.pid)
    third.kill()
    third.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children.values()), 30, "the children's end")
    fourth, fourth_said = start_up()
    wait_until(lambda: "runs at http" in fourth_said(), 60, "a start after a kill")
    fourth.send_signal(signal.SIGTERM)
    assert fourth.wait(60) == 0
