"""Every page in a real browser: it fits, it obeys its own content policy, and pictures of it can be looked at."""

from __future__ import annotations

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from web_campus import PASSWORD, Campus, corpus, stored
from web_pages import Pages, Tour, visit

from grader.models import Role

pytestmark = pytest.mark.browser

# what a handout has to show and one would have to push sideways to read
CUT = """return [...document.querySelectorAll(".prose table, .prose .math, .prose .math math")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).display !== "inline")
  .map((one) => one.textContent.slice(0, 40))"""


def test_every_page_fits_every_width_and_breaks_no_policy(pages: Pages, tour: Tour) -> None:
    too_wide, complaints = [], []
    for name in visit(pages, tour):
        for width in (360, 390, 768, 1280, 1600):
            pages.appear(width=width)
            if pages.overflow() > 0:
                too_wide.append(f"{name} at {width} px: {pages.overflow()} px too wide")
            too_wide += [f"{name} at {width} px: {words!r} is cut" for words in pages.driver.execute_script(CUT)]
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
def test_pictures_of_every_page_are_kept(pages: Pages, tour: Tour) -> None:
    for name in visit(pages, tour):
        for width in (390, 1280):
            for dark in (False, True):
                assert pages.shot(name, width=width, dark=dark).stat().st_size > 0
