"""The report of a submission: the page, the part that a script puts into it, and the file to keep."""

from __future__ import annotations

import dataclasses
import gzip
import re
import threading
import zlib
from html.parser import HTMLParser
from typing import Any

import pytest
from markupsafe import Markup
from web_campus import COURSE, SLUG, Campus, corpus, stored

from grader.measurement import CompileReport, Failure, FailureKind, ProbeFailed
from grader.models import Result, Role
from grader.sections import Report, Section, Table
from grader.web import charts
from grader.web import reports as report_pages
from grader.web.shelf import Shelf
from grader.web.text import count_lines, source_lines

MOST_KB = 300  # compressed, of a report with its charts


def whole(campus: Campus, name: str, submission_id: int) -> str:
    """The page once its charts are drawn."""
    client = campus.client(name)
    assert client.get(f"/submissions/{submission_id}").status_code == 200
    campus.draw()
    return client.get(f"/submissions/{submission_id}").text


def test_the_report_shows_verdict_axes_probes_and_charts(campus: Campus) -> None:
    html = whole(campus, "ada", campus.graded("ada", stored("no-rescale-output"), corpus("no-rescale-output")))
    for wanted in ("Wrong result", "Numerics", "Memory", "Structure", "Speed", "Not measured", "rising-max"):
        assert wanted in html
    assert html.count('class="chart map"') == 3
    assert html.count('<div class="drawing" role="img"') == html.count("<figure") >= 6
    assert "peak above the inputs against" in html
    assert 'id="L12"' in html


def test_a_wrong_probe_shows_its_first_wrong_element(sqlite_campus: Campus) -> None:
    html = whole(sqlite_campus, "ada", sqlite_campus.graded("ada", stored("no-rescale-output")))
    assert "o[0, 37, 0]: -0.2471, not -0.2243" in html


def test_every_axis_says_what_was_measured_against_what_was_asked(sqlite_campus: Campus) -> None:
    html = whole(sqlite_campus, "ada", sqlite_campus.graded("ada", stored("stored-scores")))
    cards = html[html.index('<ul class="axes">') : html.index("</ul>", html.index('<ul class="axes">'))]
    assert cards.count("<dt>Asked</dt>") == 4
    assert "<dd>grows like T^1.80</dd>" in cards
    assert "at most T^1.25, and every size fits" in cards


def test_a_card_that_passes_and_earns_nothing_says_why(sqlite_campus: Campus) -> None:
    html = whole(sqlite_campus, "ada", sqlite_campus.graded("ada", stored("no-rescale-output")))
    cards = html[html.index('<ul class="axes">') : html.index("</ul>", html.index('<ul class="axes">'))].split("<li")
    passing = [card for card in cards if ">Pass<" in card and ">0 of" in card]
    assert passing
    assert all("Nothing is earned before the required probes pass." in card for card in passing)


def test_a_table_of_nothing_is_left_out(sqlite_campus: Campus) -> None:
    nothing = CompileReport(target="sm_90", kernels=(), finished=False)
    found = dataclasses.replace(stored("ok-raw-strides"), compile_report=nothing)
    html = whole(sqlite_campus, "ada", sqlite_campus.graded("ada", found))
    assert "Compiled for the GPU</h2>" in html
    assert "<caption>Kernels</caption>" not in html
    assert re.findall(r"<tbody>\s*</tbody>", html) == []


def test_a_named_mistake_comes_with_its_step_and_hint(sqlite_campus: Campus) -> None:
    html = whole(sqlite_campus, "ada", sqlite_campus.graded("ada", stored("no-rescale-output")))
    assert "no-rescale-output</code>" in html
    assert "The step to look at" in html
    assert "<b>Hint:</b> Rows whose maximum grows" in html
    place = f"/c/{COURSE}/{SLUG}#handout-the-recurrence"
    assert f'<a href="{place}">“The recurrence”</a>' in html
    assert 'id="handout-the-recurrence"' in sqlite_campus.client("ada").get(place).text


def test_how_a_cell_is_shown_does_not_hang_on_the_words_above_it(
    sqlite_campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shape(html: str) -> list[int]:
        signs = (
            'class="chip wrap',
            'href="#L',
            'class="wraps"',
            'class="lines"',
            "is-number",
            "is-aside",
            'class="step"',
        )
        return [html.count(sign) for sign in signs]

    submission_id = sqlite_campus.graded("ada", stored("no-rescale-output"), corpus("no-rescale-output"))
    part = f"/submissions/{submission_id}/report"
    before = shape(sqlite_campus.client("ada").get(part).text)
    assert min(before) > 0
    real = report_pages.report

    def reworded(*args: Any, **how: Any) -> Report:
        found = real(*args, **how)
        return dataclasses.replace(found, sections=tuple(_other_words(section) for section in found.sections))

    monkeypatch.setattr(report_pages, "report", reworded)
    again = sqlite_campus.client("ada").get(part).text
    assert "What it attempts" in again
    assert shape(again) == before


def _other_words(section: Section) -> Section:
    blocks = [
        dataclasses.replace(
            block, columns=tuple(dataclasses.replace(one, name="What it attempts") for one in block.columns)
        )
        if isinstance(block, Table)
        else block
        for block in section.blocks
    ]
    return dataclasses.replace(section, sentences=("Said otherwise.",) * len(section.sentences), blocks=tuple(blocks))


def test_lines_of_the_file_link_to_the_source(sqlite_campus: Campus) -> None:
    html = whole(sqlite_campus, "ada", sqlite_campus.graded("ada", stored("compile-error"), corpus("compile-error")))
    assert '<a href="#L42">line 42</a>' in html, "beside the message"
    assert 'File &#34;submission.py&#34;, <a href="#L68">line 68</a>' in html, "in the traceback"
    assert "File &#34;jit.py&#34;, line 370" in html, "which is no line of the student's"
    for line in (42, 68):
        assert f'id="L{line}"' in html


def test_a_strangers_traceback_makes_links_to_lines_and_nothing_else(sqlite_campus: Campus) -> None:
    evil = 'File "submission.py", line 1"><script>alert(1)</script>\nFile "submission.py", line 99999999999\n'
    failure = Failure(kind=FailureKind.RAISES, message=evil, traceback=evil, line=1, stage="random")
    found = dataclasses.replace(
        stored("compile-error"),
        probes=tuple(ProbeFailed(name=run.name, failure=failure) for run in stored("compile-error").probes),
    )
    html = whole(sqlite_campus, "ada", sqlite_campus.graded("ada", found))
    assert '<a href="#L1">line 1</a>&#34;&gt;&lt;script&gt;' in html
    assert "<script>alert" not in html
    assert "#L9999" not in html


def test_a_page_waits_for_no_drawing_and_says_the_same_in_words(
    sqlite_campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on = threading.Event()
    real = charts._draw

    def slow(text: str) -> str:
        may_go_on.wait(30)
        return real(text)

    monkeypatch.setattr(charts, "_draw", slow)
    monkeypatch.setattr(report_pages, "PAGE_WAIT_S", 0.01)
    submission_id = sqlite_campus.graded("ada", stored("ok-block-pointers"))
    html = sqlite_campus.client("ada").get(f"/submissions/{submission_id}").text
    assert 'class="drawing"' not in html
    assert html.count("This chart is still being drawn") == html.count("<figure") == 3
    assert "In words: peak above the inputs against T. yours, like T^1.00:" in html
    again = '<noscript><meta http-equiv="refresh"'  # with a script the charts alone are fetched
    assert again in html
    may_go_on.set()
    assert again not in whole(sqlite_campus, "ada", submission_id)
    assert whole(sqlite_campus, "ada", submission_id).count('class="drawing"') == 3


def test_no_connection_is_held_while_charts_are_waited_for(campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    real = charts._draw

    def noting(text: str) -> str:
        held.append(campus.database.engine.pool.checkedout())
        return real(text)

    monkeypatch.setattr(charts, "_draw", noting)
    submission_id = campus.graded("ada", stored("ok-block-pointers"))
    for path in ("report", "report.html"):
        assert campus.client("ada").get(f"/submissions/{submission_id}/{path}").status_code == 200
    assert set(held) == {0}


@pytest.mark.parametrize("name", ["no-rescale-output", "ok-block-pointers"])
def test_a_report_is_small_and_asks_the_database_little(campus: Campus, name: str) -> None:
    submission_id = campus.graded("ada", stored(name), corpus(name))
    html = whole(campus, "ada", submission_id)
    assert len(gzip.compress(html.encode())) < MOST_KB * 1000 / 4, "half of the limit is for the style and the script"
    client = campus.client("ada")
    with campus.counted_queries() as sent:
        client.get(f"/submissions/{submission_id}")
    assert len(sent) <= 6, sent


# -- the file to keep --------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """Everything in a page that a browser would fetch, run, or go to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.found += [(tag, name, value or "") for name, value in attrs if name in ("href", "src", "action", "data")]
        self.found += [(tag, name, value or "") for name, value in attrs if name.startswith("on") or name == "style"]


def kept_file(campus: Campus, name: str, submission_id: int, role: Role = Role.STUDENT) -> str:
    answer = campus.client(name, role).get(f"/submissions/{submission_id}/report.html")
    assert answer.status_code == 200
    assert answer.headers["Content-Disposition"] == f'attachment; filename="report-{submission_id}.html"'
    return answer.text


def test_the_file_to_keep_holds_everything_and_fetches_nothing(campus: Campus) -> None:
    submission_id = campus.graded("ada", stored("no-rescale-output"), corpus("no-rescale-output"))
    html = kept_file(campus, "ada", submission_id)
    links = Links()
    links.feed(html)
    assert not links.tags & {"script", "link", "img", "iframe", "form", "button", "object"}
    assert all(tag == "a" and value.startswith("#") for tag, _, value in links.found), links.found
    assert "url(" not in html
    assert "@import" not in html
    assert html.count('class="drawing"') == html.count("<figure") >= 6, "charts are waited for"
    assert "--chart-own: " in html
    assert "rising-max" in html
    assert "Submission #" in html
    for link in {value for _, _, value in links.found}:
        assert f'id="{link[1:]}"' in html, f"{link} leads nowhere"


def test_the_file_to_keep_tells_a_student_no_more_than_the_page(sqlite_campus: Campus) -> None:
    hidden = [case.name for case in sqlite_campus.catalog.load(SLUG).cases if case.hidden]
    found = dataclasses.replace(stored("ok-block-pointers"), seed=123454321)
    submission_id = sqlite_campus.graded("ada", found)
    mine = kept_file(sqlite_campus, "ada", submission_id)
    theirs = kept_file(sqlite_campus, "grace", submission_id, Role.INSTRUCTOR)
    for secret in (*hidden, "123454321"):
        assert secret not in mine
        assert secret in theirs
    assert sqlite_campus.client("bob").get(f"/submissions/{submission_id}/report.html").status_code == 404


def test_there_is_no_file_before_there_is_a_report(sqlite_campus: Campus) -> None:
    submission_id = sqlite_campus.hand_in("ada")
    client = sqlite_campus.client("ada")
    assert client.get(f"/submissions/{submission_id}/report.html").status_code == 404
    assert "Download report" not in client.get(f"/submissions/{submission_id}").text


def test_every_tone_and_key_that_a_report_uses_is_in_the_style_sheet(sqlite_campus: Campus) -> None:
    html = kept_file(sqlite_campus, "ada", sqlite_campus.graded("ada", stored("no-rescale-output")))
    body = html[html.index("<body>") :]
    for name in {name for names in re.findall(r'class="([^"]+)"', body) for name in names.split()}:
        if name.startswith(("key-", "heat-", "chart", "axis", "drawing", "verdict")) or name in ("key", "map", "step"):
            assert f".{name}" in report_pages.style_sheet(), name


# -- kept on the shelf ------------------------------------------------------------------------------------------------


def test_a_report_that_was_made_is_not_made_again_until_something_changes(campus: Campus) -> None:
    first = campus.graded("ada", stored("stored-scores"))
    student, staff = campus.client("ada"), campus.client("grace", Role.INSTRUCTOR)
    before = whole(campus, "ada", first)
    with campus.counted_queries() as sent:
        again = student.get(f"/submissions/{first}").text
    assert not any("examination" in one for one in sent)
    assert without_token(again) == without_token(before)
    assert "Seed" not in again
    assert "Seed" in staff.get(f"/submissions/{first}").text  # what staff read is another report
    with campus.database.write() as db:
        db.get_one(Result, first).verdict = "held"
    assert without_token(student.get(f"/submissions/{first}").text) != without_token(before)


def without_token(html: str) -> str:
    return re.sub(r'name="csrf_token" value="[^"]*"', "", html)


def test_the_shelf_keeps_what_was_read_of_late_and_no_more_than_fits() -> None:
    part = Markup("<p>") + Markup("".join(f"{i:x}" for i in range(4000)))
    shelf = Shelf(most_bytes=3 * len(zlib.compress(part.encode(), 1)) + 10)
    for key in "abc":
        shelf.put(key, part)
    assert shelf.get("a") == part
    shelf.put("d", part)  # b was read longest ago
    assert [key for key in "abcd" if shelf.get(key) is not None] == ["a", "c", "d"]
    shelf.put("a", part)
    assert [key for key in "abcd" if shelf.get(key) is not None] == ["a", "c", "d"]
    assert isinstance(shelf.get("a"), Markup)


@pytest.mark.parametrize("source", ["", "a", "a\n", "a\r\nb", "a\rb\n", "a\n\n", "\n", "a\x0bb"])
def test_lines_are_counted_as_they_are_shown(source: str) -> None:
    assert count_lines(source) == len(source_lines(source))
