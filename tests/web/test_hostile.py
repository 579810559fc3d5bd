"""Whatever a student writes is text: in a file, a name, a print, an exception, a kernel's name or a nickname."""

from __future__ import annotations

import dataclasses
import html as html_module
import io
import re
from html.parser import HTMLParser

import pytest
from web_campus import COURSE, SLUG, Campus, corpus, field_of, stored

from grader.measurement import Evidence, Examination, Failure, FailureKind, Finding, ProbeFailed
from grader.models import Role
from grader.web.handout import render_handout
from grader.web.text import source_lines

EVIL = (
    "</pre></textarea></title><script>alert('x')</script><img src=x onerror=alert(1)>{{7*7}}\"'&"
    "\x1b[31m\x07\u202e\u200b\ud800"
)


class Active(HTMLParser):
    """Collects what a browser would run or fetch, beside our own files."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        ours = any(name in ("src", "href") and (value or "").startswith("/static/") for name, value in attrs)
        if tag in ("script", "style", "iframe", "object", "embed", "img", "base", "link") and not ours:
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            if name.startswith("on") or name == "style" or (value or "").lower().startswith(("javascript:", "data:")):
                self.found.append(f"{name}={value}")


def poisoned() -> Examination:
    """An examination in which every text that can come from a student's file is hostile."""
    found = stored("ok-block-pointers")
    assert found.audit is not None
    failure = Failure(kind=FailureKind.RAISES, message=EVIL, line=3, traceback=EVIL, stage="random")
    launches = tuple(dataclasses.replace(launch, kernel=EVIL) for launch in found.audit.launches)
    findings = (Finding(kind=EVIL, message=EVIL, arg=EVIL, line=2, probe="random"),)
    return dataclasses.replace(
        found,
        entry=EVIL,
        audit=dataclasses.replace(found.audit, launches=launches, findings=findings),
        probes=(ProbeFailed(name="random", failure=failure), *found.probes[1:]),
        versions={**found.versions, EVIL: EVIL},
        evidence=(Evidence(kind=EVIL, message=EVIL),),
        stdout=EVIL,
        stderr=EVIL,
    )


def test_hostile_text_is_shown_and_never_obeyed(campus: Campus) -> None:
    campus.person("ada", nickname=None)
    source = EVIL.replace("\ud800", "") + "\nimport torch\n"
    submission_id = campus.hand_in("ada", source, filename=EVIL[:150].replace("\ud800", ""))
    campus.record(campus.claim(), poisoned())
    client = campus.client("grace", Role.INSTRUCTOR)
    for path in (
        f"/submissions/{submission_id}",
        f"/submissions/{submission_id}/report",
        f"/c/{COURSE}/submissions",
        f"/c/{COURSE}/submissions?student={EVIL[:40]}",
        "/queue",
        f"/c/{COURSE}/{SLUG}/leaderboard",
    ):
        page = client.get(path)
        assert page.status_code == 200, path
        assert Active(page.text).found == [], path
        assert "{{7*7}}" in page.text or "7*7" not in page.text, path
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", page.text.replace("\r", "")), path
    shown = html_module.unescape(client.get(f"/submissions/{submission_id}").text)
    assert r"\x1b[31m\x07\u202e\u200b\ud800" in shown


def test_a_course_a_nickname_and_a_user_name_are_text_too(campus: Campus) -> None:
    evil = "<script>alert('x')</script>"
    campus.person(evil, nickname="<img src=x>")
    campus.graded(evil, stored("ok-block-pointers"))
    campus.hand_in(evil)
    client = campus.client("grace", Role.INSTRUCTOR)
    for path in ("/queue", f"/c/{COURSE}/submissions", f"/c/{COURSE}/{SLUG}/leaderboard?who=1", "/submissions/1"):
        page = client.get(path).text
        assert evil not in page
        assert "<img" not in page
        assert "&lt;script&gt;alert" in page


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/submissions/99999999999999999999", id="beyond-64-bits"),
        pytest.param("/submissions/2147483648/status", id="beyond-32-bits"),
        pytest.param("/c/%00/submissions", id="nul-in-a-course"),
        pytest.param(f"/c/{COURSE}/x%00", id="nul-in-an-assignment"),
        pytest.param(f"/c/{COURSE}/submissions?student=%00", id="nul-in-a-filter"),
    ],
)
def test_an_address_that_no_row_can_have_is_not_there(campus: Campus, path: str) -> None:
    assert campus.client("grace", Role.INSTRUCTOR).get(path).status_code == 404


def test_a_name_with_a_nul_breaks_no_database(campus: Campus) -> None:
    client = campus.client("ada")
    page = f"/c/{COURSE}/{SLUG}"
    form = {name: field_of(client.get(page).text, name) for name in ("csrf_token", "key")}
    upload = form | {"file": (io.BytesIO(b"import torch\n"), "ker\0nel.py")}
    answer = client.post(f"{page}/submissions", data=upload, content_type="multipart/form-data")
    assert answer.status_code == 303
    assert "kernel.py" in client.get(answer.headers["Location"]).text
    stranger = campus.app.test_client()
    token = field_of(stranger.get("/log-in").text, "csrf_token")
    refused = stranger.post("/log-in", data={"csrf_token": token, "name": "no\0body", "password": "x" * 12})
    assert refused.status_code == 401


def test_a_flood_of_text_is_cut(campus: Campus) -> None:
    found = dataclasses.replace(stored("markup"), stdout="A" * 900_000, stderr="B" * 900_000)
    client = campus.client("grace", Role.INSTRUCTOR)
    page = client.get(f"/submissions/{campus.graded('ada', found)}")
    assert len(page.data) < 300_000
    assert "characters more were cut" in page.text


def test_the_largest_file_is_shown_whole_and_soon(sqlite_campus: Campus) -> None:
    source = "x = '" + "\u202e" * 10 + "'\n" + "pass\n" * 52_000
    submission_id = sqlite_campus.hand_in("ada", source)
    page = sqlite_campus.client("ada").get(f"/submissions/{submission_id}").text
    assert 'id="L52001"' in page
    assert r"\u202e" in page


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("a = 1\nb = 2\n", id="lf"),
        pytest.param("a = 1\r\nb = 2\r\n", id="crlf"),
        pytest.param("a = 1\rb = 2", id="cr"),
        pytest.param("'''a\n\x0c\x85\u2028b'''\n", id="not-line-ends-to-python"),
        pytest.param("'''never closed\n\n", id="unclosed"),
        pytest.param("\n\n\n", id="blank"),
    ],
)
def test_lines_are_numbered_as_python_numbers_them(source: str) -> None:
    as_python = re.sub("\r\n|\r", "\n", source)
    assert len(source_lines(source)) == as_python.count("\n") + (not as_python.endswith("\n"))


@pytest.mark.parametrize("name", ["ok-block-pointers", "markup", "no-rescale-output"])
def test_highlighting_changes_no_character(name: str) -> None:
    source = corpus(name)
    plain = [html_module.unescape(re.sub("<[^>]+>", "", line)) for line in source_lines(source)]
    assert plain == source.removesuffix("\n").split("\n")


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "[x](javascript:alert(1))",
        "[x](data:text/html,<script>)",
        "![x](x.png 'a\" onerror=\"alert(1)')",
        "<img src=x onerror=alert(1)>",
        r"$\text{<img src=x onerror=alert(1)>}$",
        r"$\href{javascript:alert(1)}{x}$",
        "```html\n<script>alert(1)</script>\n```",
        "```<script>\nx\n```",
        '<div style="position:fixed">x</div>',
    ],
)
def test_a_handout_holds_nothing_active(text: str) -> None:
    # an image of this service's own is allowed, and all that is
    assert [one for one in Active(render_handout(text)).found if one != "<img>"] == []


def test_a_handout_shows_formulas_tables_and_code() -> None:
    page = render_handout(
        "# Title\n\n## Part\n\n$a < b$ and $$x_i^2$$\n\n| a |\n|---|\n| 1 |\n\n```python\nx = 1\n```\n", "Title"
    )
    assert "Title" not in page
    assert '<h3 id="handout-part">Part</h3>' in page
    assert page.count("<math") == 2
    assert "<mo>&lt;</mo>" in page
    assert "<td>1</td>" in page
    assert '<span class="mi">1</span>' in page


@pytest.mark.parametrize("text", ["$n$ is not 0", "| a |\n|---|\n| $n$ is not 0 |", "- $n$ ends in \\\\"])
def test_a_formula_that_begins_a_text_is_one_whatever_the_text_ends_with(text: str) -> None:
    assert "<math" in render_handout(text)


def test_a_formula_that_cannot_be_read_is_shown_as_it_was_written() -> None:
    assert '<code class="tex">\\frac{</code>' in render_handout(r"$\frac{$")
