"""The lesson's sliders in a real browser: what moves is answered in place, and without a script by the button."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from web_campus import PASSWORD, Campus
from web_pages import WAIT_S, Pages

pytestmark = pytest.mark.browser

DRAWING = "#lesson-curves svg"


@pytest.fixture
def lesson(campus: Campus, pages: Pages) -> Pages:
    campus.person("ada", password=PASSWORD)
    pages.log_in("ada", PASSWORD)
    pages.open("/lesson/memory")
    return pages


def test_moving_a_slider_changes_words_curves_and_address_but_not_the_page(lesson: Pages) -> None:
    lesson.driver.execute_script("window.tilegradeTestMark = 1")
    before = lesson.wait_for(DRAWING).get_attribute("outerHTML")
    assert not lesson.find("[data-show]").is_displayed()
    batch = lesson.find("#batch")
    batch.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert lesson.find("output[for=batch]").text == "4"
    # half as many rows: T grows by the square root of two
    lesson.wait_for_text("Naive crosses the 80 GB line at T = 17,677")
    assert lesson.wait_for(DRAWING).get_attribute("outerHTML") != before
    assert "batch=4" in lesson.driver.current_url
    assert lesson.driver.execute_script("return document.activeElement.id") == "batch"
    lesson.find("#log2_t").send_keys(Keys.ARROW_RIGHT)
    lesson.wait_for_text("At T = 16,384 the score matrix is")
    lesson.find("input[value=traffic]").click()
    lesson.wait_for_text("Above T = 128, the head dim")
    assert lesson.driver.execute_script("return window.tilegradeTestMark") == 1
    assert lesson.complaints() == []


def test_a_drawing_that_is_late_comes_after_the_slider_moved(lesson: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    lesson.wait_for(DRAWING)
    monkeypatch.setattr("grader.web.DRAWING_WAIT_S", 0.0)
    for _ in range(2):  # the second time too, when the page has looked for late drawings before
        lesson.find("#batch").send_keys(Keys.ARROW_LEFT)
        lesson.wait_for("[data-undrawn]")
        late = lesson.wait_for(DRAWING)
    assert late.is_displayed()
    assert lesson.driver.find_elements(By.CSS_SELECTOR, "[data-undrawn]") == []


def test_an_opened_table_stays_open_while_the_sliders_move(lesson: Pages) -> None:
    lesson.find("#lesson-curves summary").click()
    lesson.find("#heads").send_keys(Keys.ARROW_LEFT)
    lesson.wait_for_text("31 heads")
    assert lesson.find("#lesson-curves table").is_displayed()


def test_without_a_script_the_button_asks(campus: Campus, lesson: Pages) -> None:
    lesson.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        lesson.open("/lesson/memory")
        lesson.find("#batch").send_keys(Keys.HOME)
        lesson.find("[data-show]").click()
        WebDriverWait(lesson.driver, WAIT_S).until(lambda driver: "batch=1" in driver.current_url)
        assert "Naive crosses the 80 GB line at T = 35,355" in lesson.text()
        campus.draw()
        lesson.driver.refresh()
        assert lesson.find(DRAWING).is_displayed()
    finally:
        lesson.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
