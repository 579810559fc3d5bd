"""Every page for people who see differently or use no mouse: axe-core's rules, and the keyboard alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium_axe_python import Axe
from web_campus import COURSE, PASSWORD, SLUG, Campus, stored
from web_pages import Pages, Tour, visit
from werkzeug.exceptions import HTTPException

pytestmark = pytest.mark.browser
SERIOUS = ("serious", "critical")
# downloads, what only scripts ask for, and what a browser never draws
NO_PAGES = {"static", "health", "submissions.events", "submissions.status", "submissions.report", "submissions.source"}
NO_PAGES |= {"assignments.starter", "boards.export", "courses.grades", "submissions.facts", "submissions.report_file"}
MOST_TABS = 200


# colours and what scrolls differ between light and dark, narrow and wide; everything else is the same in all four
WAYS = {(360, False): None, (1600, True): None, (360, True): ["color-contrast"], (1600, False): ["color-contrast"]}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("person", ["", "ada", "grace"])
def test_axe_finds_nothing_serious_on_any_page(pages: Pages, tour: Tour, person: str) -> None:
    found: list[str] = []
    for name in visit(pages, {person: tour[person]}):
        found += [f"{name}, {one}" for one in _looked_at(pages)]
    assert found == []


@pytest.mark.slow
def test_axe_finds_nothing_serious_in_a_report_that_was_downloaded(
    campus: Campus, pages: Pages, tmp_path: Path
) -> None:
    number = campus.graded("ada", stored("no-rescale-output"))
    report = tmp_path / "report.html"
    report.write_bytes(campus.client("ada").get(f"/submissions/{number}/report.html").data)
    pages.driver.get(report.as_uri())
    assert "Wrong result" in pages.text()
    assert _looked_at(pages) == []


def _looked_at(pages: Pages) -> list[str]:
    """What is serious about the page that is open, in every way of looking at it."""
    axe = Axe(pages.driver)
    axe.inject()
    found = []
    for (width, dark), rules in WAYS.items():
        pages.appear(width=width, dark=dark)
        options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
        found += [f"{width} px, {'dark' if dark else 'light'}: {one}" for one in _serious(axe.run(options=options))]
    pages.appear(width=1280)
    return found


def _serious(results: dict[str, list[dict[str, Any]]]) -> list[str]:
    return [
        f"{rule['id']} ({rule['help']}) at {' '.join(map(str, node['target']))}: {node['html'][:160]}"
        for rule in results["violations"]
        if rule["impact"] in SERIOUS
        for node in rule["nodes"]
    ]


def test_the_tour_visits_every_page_that_there_is(campus: Campus, tour: Tour) -> None:
    adapter = campus.app.url_map.bind("127.0.0.1")
    seen = set()
    for paths in tour.values():
        for path in paths.values():
            try:
                seen.add(adapter.match(path.partition("?")[0])[0])
            except HTTPException:
                continue  # the page that says there is none
    rules = campus.app.url_map.iter_rules()
    pages = {rule.endpoint for rule in rules if "GET" in (rule.methods or ())} - NO_PAGES
    assert pages - seen == set()


def test_axe_itself_finds_what_is_wrong(pages: Pages) -> None:
    """Otherwise the tests above could pass for lack of looking."""
    pages.appear(width=1280)
    pages.open("/log-in")
    pages.driver.execute_script("document.querySelector('label[for=name]').remove()")
    pages.driver.execute_script("document.querySelector('h1').style.color = '#ddd'")
    axe = Axe(pages.driver)
    axe.inject()
    found = _serious(axe.run())
    assert any(one.startswith("label ") for one in found)
    assert any(one.startswith("color-contrast ") for one in found)


def test_the_keyboard_alone_goes_from_log_in_to_a_report(campus: Campus, pages: Pages) -> None:
    campus.person("ada", password=PASSWORD)
    keyboard = Keyboard(pages)
    pages.open("/log-in")
    keyboard.type("ada", Keys.TAB, PASSWORD, Keys.ENTER)
    pages.wait_for(".who")
    keyboard.tab_to("FlashAttention, forward")
    keyboard.type(Keys.ENTER)
    pages.wait_for("#hand-in")
    keyboard.tab_to("Or paste it")
    keyboard.type(Keys.ENTER)
    keyboard.tab_to("Source")
    keyboard.type("import torch")
    keyboard.tab_to("Hand in")
    keyboard.type(Keys.ENTER)
    pages.wait_for("[data-live-line]")
    campus.record(campus.claim(), stored("no-rescale-output"))
    pages.wait_for_report()
    keyboard.tab_to("Download")


@pytest.mark.parametrize("path", ["/", f"/c/{COURSE}/{SLUG}", "/submissions/1", "/lesson/memory"])
@pytest.mark.parametrize("width", [360, 1600])
def test_focus_is_seen_wherever_it_is_and_comes_in_reading_order(
    campus: Campus, pages: Pages, path: str, width: int
) -> None:
    campus.person("ada", password=PASSWORD)
    campus.graded("ada", stored("no-rescale-output"))
    pages.log_in("ada", PASSWORD)
    pages.appear(width=width)
    pages.open(path)
    keyboard = Keyboard(pages)
    stops = keyboard.walk()
    assert len(stops) > 5
    assert [stop["name"] for stop in stops if not stop["seen"]] == []
    assert [stop["place"] for stop in stops] == sorted(stop["place"] for stop in stops)
    assert stops[0]["name"] == "Skip to the content"


class Keyboard:
    """Somebody who only types."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages

    def type(self, *keys: str) -> None:
        # keys, not an element's send_keys, which a chooser of files takes for the path of a file
        ActionChains(self.pages.driver).send_keys(*keys).perform()

    def tab_to(self, name: str) -> None:
        """Press the tabulator until the focus is on what is called so."""
        reached = []
        for _ in range(MOST_TABS):
            self.type(Keys.TAB)
            stop = self.stop()
            if stop["name"] == name:
                return
            reached.append(stop["name"])
        raise AssertionError(f"the keyboard never reaches {name!r}, only {sorted(set(reached))}")

    def walk(self) -> list[dict[str, Any]]:
        """Every place that the tabulator stops at, once round the page."""
        stops = []
        for _ in range(MOST_TABS):
            self.type(Keys.TAB)
            stop = self.stop()
            if stop["place"] < 0 or any(stop["place"] == earlier["place"] for earlier in stops):
                break
            stops.append(stop)
        return stops

    def stop(self) -> dict[str, Any]:
        """What has the focus: its name, its place in the document, and whether one sees that it has it."""
        found: dict[str, Any] = self.pages.driver.execute_script(STOP)
        return found


STOP = """
const here = document.activeElement;
const label = here.labels && here.labels.length ? here.labels[0] : here;
const style = getComputedStyle(here);
const box = here.getBoundingClientRect();
return {
  name: (here.getAttribute('aria-label') || label.textContent).trim().replace(/\\s+/g, ' ').slice(0, 80),
  place: here === document.body ? -1 : [...document.querySelectorAll('*')].indexOf(here),
  seen: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2 && box.width > 1 && box.height > 1
    && box.bottom > 0 && box.right > 0 && box.left < innerWidth,
};
"""
