"""The report in a real browser: drawings in both colours and at any width, on paper, without a script, as a file."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from web_campus import PASSWORD, Campus, corpus, stored
from web_pages import SHOTS, Pages

pytestmark = pytest.mark.browser

LEAST_TEXT_PX = 9.0  # of a chart's labels on a telephone


@pytest.fixture
def report(campus: Campus, pages: Pages) -> str:
    """Ada reads her report of a file that was measured on a GPU; returns its path."""
    return _open(campus, pages, "ok-raw-strides")


def _open(campus: Campus, pages: Pages, name: str) -> str:
    campus.person("ada", password=PASSWORD)
    path = f"/submissions/{campus.graded('ada', stored(name), corpus(name))}"
    pages.log_in("ada", PASSWORD)
    pages.open(path)
    campus.draw()
    pages.open(path)
    return path


def _fills(pages: Pages) -> list[str]:
    """What the marks of the student's own numbers look like."""
    script = "return [...document.querySelectorAll(arguments[0])].map((mark) => getComputedStyle(mark).fill)"
    found: list[str] = pages.driver.execute_script(script, '.drawing [fill="var(--chart-own)"]')
    return found


def test_drawings_follow_the_readers_colours(report: str, pages: Pages) -> None:
    pages.appear(width=1280, dark=False)
    light = _fills(pages)
    pages.appear(width=1280, dark=True)
    dark = _fills(pages)
    assert len(light) == len(dark) > 8
    assert set(light) == {"rgb(11, 63, 120)"}
    assert set(dark) == {"rgb(79, 140, 255)"}


@pytest.mark.parametrize("width", [360, 768, 1600])
def test_a_drawings_text_is_text_that_can_be_read(report: str, pages: Pages, width: int) -> None:
    pages.appear(width=width)
    sizes = pages.driver.execute_script(
        """return [...document.querySelectorAll(".drawing text")].map((text) => {
             const svg = text.ownerSVGElement;
             const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
             return [text.textContent, parseFloat(getComputedStyle(text).fontSize) * scale];
           })"""
    )
    assert len(sizes) > 20
    assert min(size for _, size in sizes) >= LEAST_TEXT_PX
    assert max(size for _, size in sizes) <= 18
    assert {"yours: 6.19×", "12×", "500 TFLOP/s"} <= {text for text, _ in sizes}
    assert pages.overflow() == 0


@pytest.mark.parametrize("width", [360, 1280])
def test_no_word_of_a_drawing_is_cut_off_or_lies_on_another(report: str, pages: Pages, width: int) -> None:
    pages.appear(width=width)
    cut, on_another = pages.driver.execute_script(
        """const cut = [], onAnother = [];
           for (const svg of document.querySelectorAll(".drawing svg")) {
             const frame = svg.closest(".card").getBoundingClientRect();
             const texts = [...svg.querySelectorAll("text")];
             const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
             for (const [words, box] of boxes)
               if (box.left < frame.left || box.right > frame.right) cut.push(words);
             boxes.forEach(([words, a], i) => boxes.slice(i + 1).forEach(([others, b]) => {
               if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom && b.top + 2 < a.bottom)
                 onAnother.push(`${words} / ${others}`);
             }));
             const held = '[fill="var(--chart-limit)"], line[stroke="var(--chart-limit)"]';
             for (const mark of svg.querySelectorAll(held)) {
               const a = mark.getBoundingClientRect();
               for (const [words, b] of boxes)
                 if (a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom)
                   onAnother.push(`${words} / a mark`);
             }
           }
           return [cut, onAnother];"""
    )
    assert cut == []
    assert on_another == []


def test_a_line_of_a_traceback_leads_to_the_marked_line_of_the_source(campus: Campus, pages: Pages) -> None:
    _open(campus, pages, "compile-error")
    link = pages.driver.find_element(By.LINK_TEXT, "line 42")
    ground = pages.find("#L42").value_of_css_property("background-color")
    pages.driver.execute_script("arguments[0].click()", link)
    assert pages.driver.current_url.endswith("#L42")
    assert pages.find("#L42").value_of_css_property("background-color") != ground
    assert pages.find("#L42").is_displayed()


def test_the_report_reads_the_same_without_a_script(report: str, pages: Pages) -> None:
    with_script = pages.find("#report").text
    pages.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        pages.open(report)
        assert pages.find("#report").text == with_script
        assert len(pages.driver.find_elements(By.CSS_SELECTOR, ".drawing svg")) >= 6
    finally:
        pages.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_on_paper_there_is_the_report_and_nothing_to_press(report: str, pages: Pages) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    pages.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    try:
        for css in (".top", ".foot", ".crumbs", ".head-acts"):
            assert not any(found.is_displayed() for found in pages.driver.find_elements(By.CSS_SELECTOR, css)), css
        assert set(_fills(pages)) == {"rgb(11, 63, 120)"}, "paper is light, whatever the reader prefers"
        assert pages.find(".card").value_of_css_property("background-color") == "rgba(255, 255, 255, 1)"
        clipped = """return [...document.querySelectorAll('.scroll, .said, .source')].filter((box) =>
            getComputedStyle(box).overflowX !== 'visible' && box.scrollWidth > box.clientWidth).length"""
        assert pages.driver.execute_script(clipped) == 0
        narrowest = "return Math.min(...[...document.querySelectorAll('td.is-aside')].map((one) => one.clientWidth))"
        assert pages.driver.execute_script(narrowest) >= 120, "what a probe tries is no column of single words"
    finally:
        pages.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    paper = pages.driver.execute_cdp_cmd(
        "Page.printToPDF", {"printBackground": True, "paperWidth": 8.27, "paperHeight": 11.69}
    )
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS / "report.pdf").write_bytes(base64.b64decode(paper["data"]))
    assert (SHOTS / "report.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["ok-raw-strides", "no-rescale-output", "markup"])
def test_the_file_to_keep_opens_from_disk_without_a_network(
    campus: Campus, pages: Pages, tmp_path: Path, name: str
) -> None:
    campus.person("ada", password=PASSWORD)
    submission_id = campus.graded("ada", stored(name), corpus(name))
    answer = campus.client("ada").get(f"/submissions/{submission_id}/report.html")
    kept = tmp_path / "report.html"
    kept.write_bytes(answer.data)
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    pages.driver.execute_cdp_cmd("Network.enable", {})
    pages.driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    try:
        pages.driver.get(kept.as_uri())
        fetched = pages.driver.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")
        assert fetched == []
        assert [entry["message"] for entry in pages.driver.get_log("browser")] == []
        assert "points" in pages.find(".verdict").text
        drawings = pages.driver.find_elements(By.CSS_SELECTOR, ".drawing svg")
        assert bool(drawings) is (name != "markup"), "which fails before anything can be drawn"
        assert all(drawing.size["height"] > 20 for drawing in drawings)
        assert set(_fills(pages)) == ({"rgb(11, 63, 120)"} if drawings else set()), "the style is in the file"
        assert pages.driver.find_elements(By.CSS_SELECTOR, "script, img, main [onerror]") == []
        pages.shot(f"report-file-{name}", width=900)
        assert pages.overflow() == 0
        pages.driver.get(kept.as_uri() + "#L3")
        assert pages.find("#L3").is_displayed()
    finally:
        pages.driver.execute_cdp_cmd(
            "Network.emulateNetworkConditions",
            offline | {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1},
        )
        pages.driver.execute_cdp_cmd("Network.disable", {})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ok-raw-strides", "no-rescale-output", "stored-scores", "compile-error"])
def test_pictures_of_reports_are_kept(campus: Campus, pages: Pages, name: str) -> None:
    _open(campus, pages, name)
    for width in (360, 1600):
        for dark in (False, True):
            assert pages.shot(f"report-{name}", width=width, dark=dark).stat().st_size > 0
