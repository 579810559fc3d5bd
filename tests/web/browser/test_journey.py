"""From log-in to a report, in a real browser; the worker's part is played by the use cases that a worker calls."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.keys import Keys
from web_campus import COURSE, PASSWORD, ROOT, SLUG, Campus, stored
from web_pages import Pages

from grader.models import Role

pytestmark = pytest.mark.browser
FILES = ROOT / "tests" / "corpus" / SLUG
MARK = "window.tilegradeTestMark"


@pytest.fixture
def ada(campus: Campus) -> str:
    campus.person("ada", password=PASSWORD, nickname="teal-owl-12")
    return "ada"


def test_a_file_is_uploaded_followed_and_its_report_appears_without_reloading(
    campus: Campus, pages: Pages, ada: str
) -> None:
    pages.log_in(ada, PASSWORD)
    pages.hand_in_file(FILES / "ok-block-pointers.py")
    assert campus.rung == ["cpu"]
    pages.driver.execute_script(f"{MARK} = 1")  # a reload would forget it
    pages.wait_for_text("No worker is running just now")
    assert pages.buttons() == ["Withdraw"]
    job = campus.claim()
    for stage, fraction, said in (
        ("", 0.0, "Grading: load."),
        ("numerics", 0.25, "Grading: numerics 25 %."),
        ("memory", 0.0, "Grading: memory."),
        ("audit", 0.0, "Grading: structure."),
    ):
        if stage:
            campus.progress(job, {stage: fraction})
        pages.wait_for_text(said)
    campus.record(job, stored("ok-block-pointers"))
    pages.wait_for_report()
    pages.wait_for_text("Everything that was asked is there.")
    assert pages.driver.execute_script(f"return {MARK}") == 1
    assert pages.driver.title.startswith("#1 Full marks · ")
    assert pages.buttons() == []
    assert pages.complaints() == []

    pages.open(f"/c/{COURSE}/{SLUG}/leaderboard")
    assert pages.find("tbody tr.own th").text.startswith("teal-owl-12")


def test_a_wrong_file_is_pasted_and_its_report_says_where(campus: Campus, pages: Pages, ada: str) -> None:
    pages.log_in(ada, PASSWORD)
    pages.open(f"/c/{COURSE}/{SLUG}")
    pages.find("#hand-in summary").click()
    pages.find("#source").send_keys("import torch  # pasted")
    pages.find("#hand-in button.main").click()
    pages.wait_for("[data-live-line]")
    campus.record(campus.claim(), stored("no-rescale-output"))
    pages.wait_for_report()
    pages.wait_for_text("Wrong result")
    pages.wait_for("#report .chart.map svg")


def test_staff_who_watch_may_act_as_soon_as_it_is_graded(campus: Campus, pages: Pages) -> None:
    campus.person("grace", Role.INSTRUCTOR, password=PASSWORD)
    submission_id = campus.hand_in("ada")
    pages.log_in("grace", PASSWORD)
    pages.open(f"/submissions/{submission_id}")
    assert "Measure again" not in pages.buttons()
    campus.record(campus.claim(), stored("ok-block-pointers"))
    pages.wait_for_report()
    assert pages.buttons() == ["Judge again", "Measure again"]


def test_without_a_stream_to_spare_the_page_asks_again_and_again(campus: Campus, pages: Pages, ada: str) -> None:
    for _ in range(8):
        assert campus.app.extensions["tilegrade"].streams.acquire(blocking=False)
    pages.log_in(ada, PASSWORD)
    pages.hand_in_file(FILES / "ok-block-pointers.py")
    campus.progress(campus.claim(), {"memory": 0.0})
    pages.wait_for_text("Grading: memory.")


def test_a_refused_paste_is_still_there(campus: Campus, pages: Pages, ada: str) -> None:
    pages.log_in(ada, PASSWORD)
    pages.open(f"/c/{COURSE}/{SLUG}")
    pages.find("#hand-in summary").click()
    pages.find("#source").send_keys("   " + Keys.ENTER)
    pages.find("#hand-in button.main").click()
    pages.wait_for(".flash.bad")
    assert "Your file is empty" in pages.find(".flash.bad").text
    assert pages.find("#source").is_displayed()


def test_times_are_the_readers_own(campus: Campus, pages: Pages, ada: str) -> None:
    submission_id = campus.hand_in(ada)
    pages.log_in(ada, PASSWORD)
    pages.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": "Asia/Kolkata"})
    try:
        pages.open(f"/submissions/{submission_id}")
        time = pages.find("main time")
        minutes = (campus.now.minute + 30) % 60
        assert f":{minutes:02d}" in time.text
        assert time.get_attribute("title").endswith("UTC")
    finally:
        pages.driver.execute_cdp_cmd("Emulation.setTimezoneOverride", {"timezoneId": ""})


def test_the_whole_way_works_without_scripts(campus: Campus, pages: Pages, ada: str) -> None:
    pages.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        pages.log_in(ada, PASSWORD)
        pages.hand_in_file(FILES / "ok-block-pointers.py")
        assert "UTC" in pages.find("main time").text
        campus.record(campus.claim(), stored("ok-block-pointers"))
        pages.wait_for_report(20)  # the page asks for itself every few seconds
    finally:
        pages.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
