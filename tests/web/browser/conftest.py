"""One browser for the session, and a server for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from web_campus import COURSE, PASSWORD, SLUG, Campus, corpus, make_campus, stored
from web_pages import Pages, Tour, serve

from grader import submissions
from grader.db import Database
from grader.models import Role, WorkerStatus

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser for the session; each test begins without cookies."""
    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # the path is given, so that selenium looks for nothing to download
    driver = Chrome(options=options, service=Service(str(DRIVER)))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def campus(sqlite_database: Database, tmp_path: Path) -> Campus:
    """The browser sees no difference between the databases, so one is enough."""
    return make_campus(sqlite_database, tmp_path / "data")


@pytest.fixture
def pages(chrome: Chrome, campus: Campus) -> Iterator[Pages]:
    with serve(campus.app) as base:
        chrome.delete_all_cookies()
        yield Pages(driver=chrome, base=base)
        chrome.get("about:blank")  # ends streams, so that the server can close
        chrome.get_log("browser")


@pytest.fixture
def tour(campus: Campus) -> Tour:
    """Somebody in every state; the pages to visit, by the person who visits them."""
    campus.person("ada", password=PASSWORD, nickname="teal-owl-12")
    campus.person("grace", Role.INSTRUCTOR, password=PASSWORD)
    full = campus.graded("ada", stored("ok-block-pointers"), corpus("ok-block-pointers"))
    partial = campus.graded("ben", stored("stored-scores"), corpus("stored-scores"))
    wrong = campus.graded("ada", stored("no-rescale-output"), corpus("no-rescale-output"))
    hostile = campus.graded("eve", stored("markup"), corpus("markup"))
    error = campus.graded("ada", stored("compile-error"), corpus("compile-error"))
    gpu = campus.graded("ada", stored("ok-raw-strides"), corpus("ok-raw-strides"))
    running = campus.hand_in("ada", corpus("missing-scale"))
    campus.progress(campus.claim(), "numerics", 0.4)
    campus.hand_in("ben", corpus("wrong-scale"))
    with campus.database.write() as db:
        submissions.report_worker(
            db, name="cpu-0@host-1", device="cpu", status=WorkerStatus.GRADING, now=campus.now, submission_id=running
        )
    return {
        "": {"log-in": "/log-in"},
        "ada": {
            "home": "/",
            "assignment": f"/c/{COURSE}/{SLUG}",
            "running": f"/submissions/{running}",
            "full": f"/submissions/{full}",
            "wrong": f"/submissions/{wrong}",
            "error": f"/submissions/{error}",
            "gpu": f"/submissions/{gpu}",
            "leaderboard": f"/c/{COURSE}/{SLUG}/leaderboard",
            "lesson": "/lesson/memory",
            "lesson-traffic": "/lesson/memory?mode=traffic&heads=1&batch=1&head_dim=32&dtype=float32",
            "missing": "/nowhere",
        },
        "grace": {
            "staff-home": "/",
            "staff-all": f"/c/{COURSE}/submissions",
            "staff-partial": f"/submissions/{partial}",
            "staff-hostile": f"/submissions/{hostile}",
            "staff-queue": "/queue",
            "staff-workers": "/workers",
            "staff-leaderboard": f"/c/{COURSE}/{SLUG}/leaderboard",
        },
    }
