"""A student's whole way in a real browser: log in, drop a file, watch, read, look back, compare, stand on the board."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import sqlalchemy as sa
from selenium.webdriver.common.by import By
from web_campus import COURSE, PASSWORD, SLUG, Campus, corpus, stored
from web_pages import Pages

from grader import boards, course
from grader.models import Result, Role

pytestmark = pytest.mark.browser
PAGE = f"/c/{COURSE}/{SLUG}"
# what the operating system does when somebody lets a file go over the page
DROP = """
const [name, text, target, kind] = arguments;
const carried = new DataTransfer();
carried.items.add(new File([text], name, { type: "text/x-python" }));
const event = (type) => new DragEvent(type, { dataTransfer: carried, bubbles: true, cancelable: true });
const where = document.querySelector(target);
for (const type of kind) where.dispatchEvent(event(type));
"""


def drop(pages: Pages, name: str, text: str, *, on: str = "article", kind: tuple[str, ...] = ("dragenter", "drop")):
    pages.driver.execute_script(DROP, name, text, on, list(kind))


def entry_of(campus: Campus, db):
    found = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
    assert found is not None
    return found


@pytest.fixture
def term(campus: Campus) -> Campus:
    """A course in full swing: a deadline with late days, an extension, and classmates on the board."""
    ada = campus.person("ada", password=PASSWORD, nickname="teal-owl-12")
    campus.person("grace", Role.INSTRUCTOR, password=PASSWORD)
    with campus.database.write() as db:
        entry = course.set_assignment(
            db,
            course_id=entry_of(campus, db).course_id,
            slug=SLUG,
            deadline=campus.now + timedelta(days=2),
            late_days=3,
            late_percent=10.0,
            now=campus.now,
        )
        course.grant_extension(
            db,
            entry=entry,
            assignment=campus.catalog.load(entry.slug),
            user=ada,
            until=campus.now + timedelta(days=5),
            actor_id=None,
            now=campus.now,
        )
    for i, name in enumerate(("ben", "cleo", "dan", "eve", "finn")):
        campus.graded(name, stored("ok-block-pointers" if i < 3 else "stored-scores"))
    return campus


def timed(campus: Campus, submission_id: int, speedup: float, share: float, gpu: str = "NVIDIA H200") -> None:
    """As if a GPU had measured it."""
    with campus.database.write() as db:
        values = {"speedup": speedup, "speedup_low": speedup * 0.99, "speedup_high": speedup * 1.01}
        values |= {"gpu": gpu, "limit_share": share, "points": 70 + 3 * speedup, "out_of": 100.0, "provisional": False}
        db.execute(sa.update(Result).where(Result.submission_id == submission_id).values(**values))


def test_from_log_in_to_the_board(term: Campus, pages: Pages) -> None:
    """One journey, each step with pictures in artifacts/screenshots."""

    def pictures(name: str) -> None:
        for width in (360, 1600):
            for dark in (False, True):
                pages.shot(f"student-{name}", width=width, dark=dark)
        pages.appear(width=360)
        assert pages.overflow() == 0, f"{name} is too wide for a telephone"
        pages.appear(width=1280)

    pages.log_in("ada", PASSWORD)
    assert "in about 5 days" in pages.text()
    assert "(extended)" in pages.text()
    pictures("home-at-first")

    pages.open(PAGE)
    assert "your own extension" in pages.text()
    assert "3 late days: each begun day takes 10 % off the points." in pages.text()
    pictures("assignment-at-first")
    drop(pages, "wrong.py", corpus("no-rescale-output"), kind=("dragenter", "dragover"))
    assert "dragging" in str(pages.find("#hand-in form").get_attribute("class"))
    pages.shot("student-dragging")
    drop(pages, "wrong.py", corpus("no-rescale-output"), kind=("drop",))
    assert "wrong.py, " in pages.find("[data-drop-said]").text
    assert "dragging" not in str(pages.find("#hand-in form").get_attribute("class"))
    pages.find("#hand-in button.main").click()
    pages.wait_for_text("No worker is running just now")
    pages.wait_for_text("wrong.py")
    pictures("queued")

    job = term.claim()
    term.progress(job, {"preflight": 1.0, "compile": 0.0, "audit": 1.0, "numerics": 0.4, "memory": 0.67})
    pages.wait_for_text("Grading: compile, numerics 40 %, memory 67 %.")
    pictures("grading")
    term.record(job, stored("no-rescale-output"))
    pages.wait_for_report()
    pages.wait_for_text("Wrong result")

    pages.open(f"{PAGE}#hand-in")
    pages.find("#hand-in summary").click()
    pages.driver.execute_script(
        "const area = document.querySelector('#source'); area.value = arguments[0];"
        "area.dispatchEvent(new Event('input', { bubbles: true }));",
        corpus("ok-block-pointers"),
    )
    pages.find("#hand-in button.main").click()
    pages.wait_for("[data-live-line]")
    better = term.claim()
    term.record(better, stored("ok-block-pointers"))
    pages.wait_for_report()
    pages.wait_for_text("Full marks")
    timed(term, better.submission_id, 7.5, 0.62)
    timed(term, 1, 8.2, 0.68)
    timed(term, 2, 7.52, 0.62)
    timed(term, 3, 4.0, 0.33, gpu="NVIDIA A100-SXM4-80GB")
    third = term.graded("ada", stored("stored-scores"), corpus("stored-scores"))
    timed(term, third, 6.0, 0.5)

    pages.open(PAGE)
    counted = pages.find("#history + form li.counts")
    assert f"#{better.submission_id}" in counted.text
    assert "counts" in counted.text
    pictures("assignment-later")
    for box in pages.driver.find_elements(By.CSS_SELECTOR, "input[name=pick]")[1:3]:
        box.click()
    pages.find("#history + form button").click()
    pages.wait_for(".diff")
    assert pages.driver.find_elements(By.CSS_SELECTOR, ".diff tr.same")
    assert pages.driver.find_elements(By.CSS_SELECTOR, ".diff ins")
    assert pages.driver.find_elements(By.CSS_SELECTOR, ".diff del")
    pictures("compare")

    with term.database.write() as db:
        entry = entry_of(term, db)
        boards.freeze(db, entry, term.catalog.load(SLUG), title="Week 3", actor_id=None, now=term.now)
    pages.open(f"{PAGE}/leaderboard")
    assert pages.find("tr.own th").text.startswith("teal-owl-12")
    pages.wait_for("#trend-2 .drawing svg")  # the page did not wait for it, and nobody loads it again
    pictures("leaderboard")
    name = pages.find("#nickname")
    name.clear()
    name.send_keys("violet heron")
    pages.find("[aria-labelledby=name] button").click()
    pages.wait_for_text("Every board of this course now shows you as “violet heron”.")
    pages.find("a[href*='frozen=']").click()
    pages.wait_for_text("Official")
    assert pages.find("tr.own th").text.startswith("violet heron")
    pictures("official")
    pages.find("[name=anonymous]").click()
    pages.find("[aria-labelledby=name] button").click()
    pages.wait_for_text("now shows you as “Anonymous”")
    assert pages.find("tr.own th").text.startswith("Anonymous")
    pages.open("/")
    assert f"#{third}" in pages.text()
    pictures("home-later")
    assert pages.complaints() == []

    pages.log_out()
    pages.log_in("grace", PASSWORD)
    pages.open(f"{PAGE}/leaderboard?who=1")
    pictures("staff-leaderboard")


def test_pasted_text_outlives_a_reload_and_is_forgotten_once_it_is_taken(term: Campus, pages: Pages) -> None:
    pages.log_in("ada", PASSWORD)
    pages.open(PAGE)
    pages.find("#hand-in summary").click()
    pages.find("#source").send_keys("precious = 1")
    pages.open(PAGE)
    assert pages.find("#source").get_attribute("value") == "precious = 1"
    assert pages.find("#source").is_displayed()
    pages.find("#hand-in button.main").click()
    pages.wait_for("[data-live-line]")
    pages.open(PAGE)
    assert pages.find("#source").get_attribute("value") == ""


def test_an_ended_session_asks_for_the_password_and_gives_the_text_back(term: Campus, pages: Pages) -> None:
    pages.log_in("ada", PASSWORD)
    pages.open(PAGE)
    pages.find("#hand-in summary").click()
    pages.find("#source").send_keys("precious = '<b>'")
    pages.driver.delete_all_cookies()
    pages.find("#hand-in button.main").click()
    pages.wait_for("#password")
    assert "Your session has ended" in pages.text()
    pages.find("#name").send_keys("ada")
    pages.find("#password").send_keys("wrong")
    pages.find("main form button").click()
    pages.wait_for_text("do not fit")
    pages.find("#password").send_keys(PASSWORD)
    pages.find("main form button").click()
    pages.wait_for_text("You are logged in again.")
    assert pages.find("#source").get_attribute("value") == "precious = '<b>'"
    pages.find("#hand-in button.main").click()
    pages.wait_for("[data-live-line]")
    assert "precious = '<b>'" in pages.find("#source ~ *, .source").text or "precious" in pages.text()


def test_two_files_at_once_are_one_too_many(term: Campus, pages: Pages) -> None:
    pages.log_in("ada", PASSWORD)
    pages.open(PAGE)
    script = DROP.replace("carried.items.add", "carried.items.add(new File(['x'], 'second.py')); carried.items.add")
    pages.driver.execute_script(script, "first.py", "x = 1", "body", ["drop"])
    assert pages.find("[data-drop-said]").text == "One file at a time, please."
    assert (
        json.loads(pages.driver.execute_script("return JSON.stringify([...document.querySelector('#file').files])"))
        == []
    )
