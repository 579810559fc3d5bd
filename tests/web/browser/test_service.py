"""The whole way, with nothing replaced: `tilegrade up`, its worker, the sandbox, and a browser."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import Chrome
from web_campus import ROOT
from web_pages import Pages

CORPUS = ROOT / "tests" / "corpus" / "flash-attention-forward"
SLUG = "flash-attention-forward"

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Service:
    base: str
    passwords: dict[str, str]
    folder: Path
    pid: int


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """`tilegrade up` on a free port with data of its own."""
    folder = Path(tempfile.mkdtemp(prefix="tg", dir="/tmp"))  # the broker's socket lies here: a short name
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "PATH": os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "TILEGRADE_DATA": str(folder / "data"),
        "TILEGRADE_PORT": str(port),
    }
    output = folder / "up.out"
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "grader.cli", "up"], cwd=ROOT, env=environment, stdin=subprocess.DEVNULL,
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while "runs at http" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        passwords = dict(re.findall(r"user (\w+), password (\S+)", output.read_text()))
        yield Service(f"http://127.0.0.1:{port}", passwords, folder, process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        process.kill()
        shutil.rmtree(folder)


@pytest.fixture
def pages(chrome: Chrome, service: Service) -> Iterator[Pages]:
    found = Pages(driver=chrome, base=service.base)
    found.start_over()
    yield found
    chrome.get("about:blank")
    chrome.get_log("browser")


def worker_pid(service: Service) -> int:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == service.pid and b"workers.tasks" in stat.with_name("cmdline").read_bytes():
                return int(stat.parent.name)
    raise AssertionError("no worker among the children of the service")


def a_student_hands_in_watches_and_reads_a_full_report(pages: Pages, service: Service) -> None:
    pages.log_in("student", service.passwords["student"])
    number = pages.hand_in_file(CORPUS / "ok-base2-class.py", course="demo", slug=SLUG)
    seen = set()
    deadline = time.monotonic() + 180
    while not pages.driver.find_elements("css selector", "#report .verdict"):
        assert time.monotonic() < deadline, pages.text()
        with contextlib.suppress(WebDriverException):  # the page changes itself meanwhile
            seen.add(pages.find("[data-live-line]").text)
        time.sleep(0.05)
    assert any("numerics" in line and "," in line for line in seen), seen  # stages that go on side by side
    assert "Full marks" in pages.wait_for_report().text
    assert "of 70 points" in pages.text()
    assert pages.driver.current_url.endswith(f"/submissions/{number}")  # nothing was reloaded
    for width in (390, 1280):
        for dark in (False, True):
            pages.shot("service-full-report", width=width, dark=dark)
    assert pages.overflow() == 0
    assert pages.complaints() == []


def a_wrong_file_gets_its_mistake_named(pages: Pages, service: Service) -> None:
    pages.log_in("student", service.passwords["student"])
    pages.hand_in_file(CORPUS / "no-rescale-output.py", course="demo", slug=SLUG)
    assert "Wrong result" in pages.wait_for_report(180).text
    text = pages.text().replace("-", " ")
    assert "no rescale output" in text
    pages.shot("service-wrong-report", width=390)
    pages.shot("service-wrong-report", width=1280)


def a_killed_worker_costs_the_student_nothing(pages: Pages, service: Service) -> None:
    pages.log_in("student", service.passwords["student"])
    pages.hand_in_file(CORPUS / "ok-raw-strides.py", course="demo", slug=SLUG)
    pages.wait_for_text("numerics", 60)
    os.kill(worker_pid(service), signal.SIGKILL)
    assert "Full marks" in pages.wait_for_report(240).text
    pages.log_out()
    pages.log_in("instructor", service.passwords["instructor"])
    pages.open("/c/demo/submissions")
    pages.find("table a[href^='/submissions/']").click()
    pages.wait_for_report()
    assert re.search(r"[Aa]ttempt\D{0,12}2", pages.text())


def the_leaderboard_has_the_full_file_first_and_staff_see_everything(pages: Pages, service: Service) -> None:
    pages.log_in("student", service.passwords["student"])
    pages.open(f"/c/demo/{SLUG}/leaderboard")
    assert "70" in pages.find("table tbody tr").text
    pages.shot("service-leaderboard")
    pages.log_out()
    pages.log_in("instructor", service.passwords["instructor"])
    pages.open("/c/demo/submissions")
    assert len(pages.driver.find_elements("css selector", "table tbody tr")) == 3
    for path, name in (("/queue", "queue"), ("/workers", "workers")):
        pages.open(path)
        pages.shot(f"service-{name}")
    assert pages.find("td[data-label='Device']").text == "cpu"


def test_the_whole_way(pages: Pages, service: Service) -> None:
    steps = [
        a_student_hands_in_watches_and_reads_a_full_report,
        a_wrong_file_gets_its_mistake_named,
        a_killed_worker_costs_the_student_nothing,
        the_leaderboard_has_the_full_file_first_and_staff_see_everything,
    ]
    for step in steps:
        step(pages, service)
        pages.start_over()
