"""Every page in a real browser: it fits, it obeys its own content policy, and pictures of it can be looked at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from web_campus import COURSE, PASSWORD, SLUG, Campus, corpus, stored
from web_pages import Pages

from grader import submissions
from grader.models import Role, WorkerStatus

pytestmark = pytest.mark.browser


@pytest.fixture
def tour(campus: Campus) -> dict[str, dict[str, str]]:
    """Somebody in every state; the pages to visit, by the person who visits them."""
    campus.person("ada", password=PASSWORD, nickname="teal-owl-12")
    campus.person("grace", Role.INSTRUCTOR, password=PASSWORD)
    full = campus.graded("ada", stored("ok-block-pointers"), corpus("ok-block-pointers"))
    partial = campus.graded("ben", stored("stored-scores"), corpus("stored-scores"))
    wrong = campus.graded("ada", stored("no-rescale-output"), corpus("no-rescale-output"))
    hostile = campus.graded("eve", stored("markup"), corpus("markup"))
    error = campus.graded("ada", stored("compile-error"), corpus("compile-error"))
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
            "leaderboard": f"/c/{COURSE}/{SLUG}/leaderboard",
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


def _visit(pages: Pages, tour: dict[str, dict[str, str]]) -> Iterator[str]:
    """Opens page after page; yields the name of the one that is open."""
    for person, paths in tour.items():
        if person:
            pages.log_in(person, PASSWORD)
        for name, path in paths.items():
            pages.open(path)
            yield name
        pages.open("/")
        if person:
            pages.log_out()


def test_every_page_fits_every_width_and_breaks_no_policy(pages: Pages, tour: dict[str, dict[str, str]]) -> None:
    too_wide, complaints = [], []
    for name in _visit(pages, tour):
        for width in (360, 390, 768, 1280, 1600):
            pages.appear(width=width)
            if pages.overflow() > 0:
                too_wide.append(f"{name} at {width} px: {pages.overflow()} px too wide")
        complaints += [f"{name}: {one}" for one in pages.complaints() if not (name == "missing" and "404" in one)]
    assert too_wide == []
    assert complaints == []


def test_what_a_student_wrote_runs_nowhere(campus: Campus, pages: Pages) -> None:
    campus.person("grace", Role.INSTRUCTOR, password=PASSWORD)
    submission_id = campus.graded("eve", stored("markup"), corpus("markup"))
    pages.log_in("grace", PASSWORD)
    pages.open(f"/submissions/{submission_id}")
    for css in ("main script", "main img", "main [onerror]", "main [onmouseover]", "main a[href^='javascript']"):
        assert pages.driver.find_elements(By.CSS_SELECTOR, css) == []
    assert "<script>alert('kernel')</script>" in pages.text()
    assert pages.driver.title.endswith("Tilegrade")


def test_the_keyboard_reaches_the_content_at_once(campus: Campus, pages: Pages) -> None:
    campus.person("ada", password=PASSWORD)
    pages.log_in("ada", PASSWORD)
    pages.find("body").send_keys(Keys.TAB)
    skip = pages.driver.switch_to.active_element
    assert skip.text == "Skip to the content"
    skip.send_keys(Keys.ENTER)
    assert pages.driver.switch_to.active_element.get_attribute("id") == "main"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pictures_of_every_page_are_kept(pages: Pages, tour: dict[str, dict[str, str]]) -> None:
    for name in _visit(pages, tour):
        for width in (390, 1280):
            for dark in (False, True):
                assert pages.shot(name, width=width, dark=dark).stat().st_size > 0
