"""One browser for the session, and a server for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from web_campus import COURSE, PASSWORD, SLUG, Campus, corpus, make_campus, stored
from web_pages import CHROMIUM, DRIVER, Pages, Tour, serve, start_chromium

from grader import boards, course, submissions
from grader.db import Database
from grader.models import Role, WorkerStatus

OTHERS = ("flash-attention", "fused-bias-dropout-layernorm")  # whose handouts have the widest formulas and tables


@pytest.fixture(scope="session")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser for the session; each test begins without cookies."""
    if not (CHROMIUM.exists() and DRIVER.exists()):
        pytest.skip("Chromium is not installed: apt-get install chromium chromium-driver")
    driver = start_chromium(tmp_path_factory.mktemp("chromium"))
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
    with campus.database.write() as db:
        found = course.find_course(db, COURSE)
        assert found is not None
        for slug in OTHERS:
            course.set_assignment(db, course_id=found.id, slug=slug, now=campus.now)
    campus.person("ada", password=PASSWORD, nickname="teal-owl-12")
    campus.person("grace", Role.INSTRUCTOR, password=PASSWORD)
    full = campus.graded("ada", stored("ok-block-pointers"), corpus("ok-block-pointers"))
    partial = campus.graded("ben", stored("stored-scores"), corpus("stored-scores"))
    wrong = campus.graded("ada", stored("no-rescale-output"), corpus("no-rescale-output"))
    hostile = campus.graded("eve", stored("markup"), corpus("markup"))
    error = campus.graded("ada", stored("compile-error"), corpus("compile-error"))
    gpu = campus.graded("ada", stored("ok-raw-strides"), corpus("ok-raw-strides"))
    running = campus.hand_in("ada", corpus("missing-scale"))
    campus.progress(campus.claim(), {"numerics": 0.4})
    campus.hand_in("ben", corpus("wrong-scale"))
    with campus.database.write() as db:
        submissions.report_worker(
            db, name="cpu-0@host-1", device="cpu", status=WorkerStatus.GRADING, now=campus.now, submission_id=running
        )
        entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
        assert entry is not None
        rules = campus.catalog.load(SLUG)
        board = boards.freeze(db, entry, rules, title="Week 3", actor_id=None, now=campus.now)
    return {
        "": {"log-in": "/log-in"},
        "ada": {
            "home": "/",
            "assignment": f"/c/{COURSE}/{SLUG}",
            **{f"handout-{slug}": f"/c/{COURSE}/{slug}" for slug in OTHERS},
            "running": f"/submissions/{running}",
            "full": f"/submissions/{full}",
            "wrong": f"/submissions/{wrong}",
            "error": f"/submissions/{error}",
            "gpu": f"/submissions/{gpu}",
            "compare": f"/c/{COURSE}/{SLUG}/compare?pick={full}&pick={wrong}",
            "leaderboard": f"/c/{COURSE}/{SLUG}/leaderboard",
            "official": f"/c/{COURSE}/{SLUG}/leaderboard?frozen={board.id}",
            "official-boards": f"/c/{COURSE}/{SLUG}/leaderboard/official",
            "lesson": "/lesson/memory",
            "lesson-traffic": "/lesson/memory?mode=traffic&heads=1&batch=1&head_dim=32&dtype=float32",
            "missing": "/nowhere",
            "password": "/password",
        },
        "grace": {
            "staff-home": "/",
            "staff-course": f"/c/{COURSE}",
            "staff-all": f"/c/{COURSE}/submissions",
            "staff-partial": f"/submissions/{partial}",
            "staff-hostile": f"/submissions/{hostile}",
            "staff-queue": "/queue",
            "staff-workers": "/workers",
            "staff-leaderboard": f"/c/{COURSE}/{SLUG}/leaderboard",
            "staff-official": f"/c/{COURSE}/{SLUG}/leaderboard?frozen={board.id}&who=1",
        },
    }
