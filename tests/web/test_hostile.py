"""Whatever a student writes is text: in a file, a name, a print, an exception, a kernel's name or a nickname."""

from __future__ import annotations

import dataclasses
import html as html_module
import io
import json
import re
from urllib.parse import quote

import pytest
from sqlalchemy import update
from web_campus import COURSE, PASSWORD, SLUG, Active, Campus, addresses, corpus, field_of, stored

from grader import boards, course, submissions
from grader.measurement import Evidence, Examination, Failure, FailureKind, Finding, ProbeFailed
from grader.models import Result, Role, Submission, User, WorkerStatus
from grader.web.handout import render_handout
from grader.web.text import source_lines

EVIL = (
    "</pre></textarea></title><script>alert('x')</script><img src=x onerror=alert(1)>{{7*7}}\"'&"
    "\x1b[31m\x07\u202e\u200b\ud800"
)


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


EVIL_NAME = "<script>alert('n')</script><img src=x onerror=alert(1)>\"'&"


@pytest.fixture
def poisoned_campus(sqlite_campus: Campus) -> Campus:
    """Every text that a stranger's file, a worker or a person may give is hostile, in every state of a submission."""
    campus = sqlite_campus
    written = EVIL.replace("\ud800", "")
    ada = campus.person("ada", nickname=EVIL_NAME[:40])
    done = [campus.hand_in("ada", f"{written}\n# {i}\n", filename=written[:150]) for i in range(2)]
    for examination in (poisoned(), stored("markup")):
        campus.record(campus.claim(), examination)
    campus.hand_in("ada", written, filename=written[:150])
    campus.claim()
    campus.hand_in("ada", written, filename=written[:150])
    with campus.database.write() as db:
        entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
        assert entry is not None
        boards.freeze(db, entry, campus.catalog.load(SLUG), title=written, actor_id=None, now=campus.now)
        db.execute(update(User).where(User.id == ada.id).values(name=EVIL_NAME))
        db.execute(update(Submission).values(worker=written[:120], fault_note=written))
        db.execute(update(Submission).where(Submission.id == 3).values(stages=written[:240]))
        db.execute(
            update(Result)
            .where(Result.submission_id == done[1])
            .values(decision_reason=written, released=True, gpu=written[:120], fault=written[:64], speedup=2.0)
        )
        submissions.report_worker(
            db, name=EVIL_NAME, device="cpu", status=WorkerStatus.QUARANTINED, now=campus.now, note=written
        )
    return campus


@pytest.mark.parametrize("submission_id", [1, 2, 3, 4], ids=["held", "graded", "running", "waiting"])
def test_no_page_obeys_what_a_stranger_wrote(poisoned_campus: Campus, submission_id: int) -> None:
    """Every route that answers a GET, as the student and as the instructor see it."""
    known = {"course_slug": COURSE, "slug": SLUG, "board_id": 1, "filename": "tilegrade.css"}
    found = addresses(poisoned_campus.app, "GET", submission_id=submission_id, **known)
    found |= {
        "compare two": f"{found['assignments.compare']}?pick=1&pick=2",
        "board": f"{found['boards.show']}?who=1", "frozen board": f"{found['boards.show']}?frozen=1",
        "gpu": f"{found['boards.show']}?gpu={EVIL_NAME[:30]}",
        "searched": f"{found['staff.all_submissions']}?student={EVIL_NAME[:30]}&what={EVIL_NAME[:30]}",
        "back to": f"/log-in?next=/{EVIL_NAME}", "lost": f"/{EVIL_NAME}",
    }  # fmt: skip
    shown = set()
    for person, role in (("ada", Role.STUDENT), ("grace", Role.INSTRUCTOR)):
        client = poisoned_campus.client(person, role)
        for endpoint, address in found.items():
            if endpoint in ("static", "submissions.events"):
                continue
            answer = client.get(address)
            assert answer.status_code in (200, 302, 404), (endpoint, answer.status_code)
            text = answer.text
            if answer.mimetype == "application/json" and endpoint != "health":
                text = answer.json["steps"]  # type: ignore[index]  # the rest becomes text, never markup
                assert set(answer.json) == {"line", "steps", "headline", "stamp", "done"}  # type: ignore[arg-type]
            elif answer.mimetype != "text/html":
                assert endpoint == "health" or "attachment" in answer.headers["Content-Disposition"], endpoint
                continue
            allowed = ["<style>"] if endpoint == "submissions.report_file" and answer.status_code == 200 else []
            assert Active(text).found == allowed, endpoint
            assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e\u200b]", text.replace("\r", "")), endpoint
            shown |= {endpoint} if "&lt;script&gt;alert" in text else set()
    # it was there to be obeyed
    assert {"submissions.show", "assignments.compare", "staff.all_submissions", "staff.workers", "board"} <= shown


def test_the_stream_carries_hostile_text_as_one_line_of_json(
    poisoned_campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grader.web.submissions.STREAM_S", 0.1)
    answer = poisoned_campus.client("ada").get("/submissions/3/events")
    assert answer.mimetype == "text/event-stream"
    lines = [line for line in answer.text.splitlines() if line]
    assert [line.partition(":")[0] for line in lines] == ["retry", "event", "data"]
    assert Active(json.loads(lines[2].partition(":")[2])["steps"]).found == []


LINE_ENDS = "x\r\nSet-Cookie: stolen=1\r\n\r\n<script>alert(1)</script>"


@pytest.mark.parametrize(
    ("path", "form"),
    [
        pytest.param("/log-in?next=/{0}", None, id="next"),
        pytest.param("/{0}", None, id="address"),
        pytest.param("/c/{0}/x", None, id="course"),
        pytest.param("/queue?page={0}", None, id="page"),
        pytest.param("/c/demo/submissions?student={0}&what={0}&assignment={0}", None, id="search"),
        pytest.param(f"/c/demo/{SLUG}/leaderboard?gpu={{0}}", None, id="gpu"),
        pytest.param(f"/c/demo/{SLUG}/leaderboard.csv?gpu={{0}}", None, id="csv"),
        pytest.param("/log-in", {"name": LINE_ENDS, "password": LINE_ENDS, "next": LINE_ENDS}, id="log-in"),
        pytest.param(f"/c/demo/{SLUG}/leaderboard/name", {"nickname": LINE_ENDS}, id="nickname"),
        pytest.param(f"/c/demo/{SLUG}/leaderboard/freeze", {"title": LINE_ENDS, "gpu": LINE_ENDS}, id="title"),
        pytest.param("/submissions/1/confirm", {"reason": LINE_ENDS}, id="reason"),
    ],
)
@pytest.mark.parametrize("who", ["nobody", "ada", "grace"])
def test_line_ends_become_no_header(sqlite_campus: Campus, path: str, form: dict[str, str] | None, who: str) -> None:
    campus = sqlite_campus
    campus.graded("ada", stored("markup"))
    role = Role.INSTRUCTOR if who == "grace" else Role.STUDENT
    client = campus.app.test_client() if who == "nobody" else campus.client(who, role)
    address = path.format(quote(LINE_ENDS))
    if form is None:
        answer = client.get(address)
    else:
        token = field_of(client.get("/log-in", follow_redirects=True).text, "csrf_token")
        answer = client.post(address, data=form | {"csrf_token": token})
    assert answer.status_code < 500
    assert "stolen=1" not in " ".join(answer.headers.getlist("Set-Cookie"))
    assert all("\r" not in value and "\n" not in value for _, value in answer.headers)
    assert Active(answer.text).found == []


def test_a_file_name_with_line_ends_is_no_header_of_a_download(campus: Campus) -> None:
    client = campus.client("ada")
    page = f"/c/{COURSE}/{SLUG}"
    form = {name: field_of(client.get(page).text, name) for name in ("csrf_token", "key")}
    name = 'k"; filename*=x\u2028.html\nSet-Cookie: stolen=1'
    upload = form | {"file": (io.BytesIO(b"import torch\n"), name)}
    answer = client.post(f"{page}/submissions", data=upload, content_type="multipart/form-data")
    assert answer.status_code in (303, 400)
    submission_id = campus.hand_in("ada", filename=name)
    download = client.get(f"/submissions/{submission_id}/source.py")
    assert download.headers["Content-Disposition"] == f'attachment; filename="submission-{submission_id}.py"'
    assert Active(client.get(f"/submissions/{submission_id}").text).found == []


def test_a_path_writes_no_line_into_the_log(
    sqlite_campus: Campus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = sqlite_campus.client("grace", Role.INSTRUCTOR)
    monkeypatch.setattr("grader.course.find_course", lambda *_a, **_k: 1 / 0)
    assert client.get("/c/x%0D%0AERROR%20forged%1B[2J/submissions").status_code == 500
    said = [record.getMessage() for record in caplog.records if record.name == "grader.web.errors"]
    assert said == ["GET /c/x ERROR forged\\x1b[2J/submissions"]


@pytest.mark.parametrize("text", ["' OR '1'='1", "x'); DROP TABLE submission; --", "%", "_", "\\", "ada' --", "1=1"])
def test_a_search_is_never_a_statement(campus: Campus, text: str) -> None:
    """What is searched for stands in no name, so nothing is found, and everything is still there."""
    campus.graded("ada", stored("markup"))
    grace = campus.client("grace", Role.INSTRUCTOR)
    for field in ("student", "assignment", "what"):
        page = grace.get(f"/c/{COURSE}/submissions", query_string={field: text})
        assert page.status_code == 200
        assert "/submissions/1" not in page.text, field
    assert "/submissions/1" in grace.get(f"/c/{COURSE}/submissions").text
    stranger = campus.app.test_client()
    form = {"csrf_token": field_of(stranger.get("/log-in").text, "csrf_token"), "name": text, "password": text}
    assert stranger.post("/log-in", data=form).status_code == 401


NUL_FORMS = {
    "/log-in": ("name", "password", "next", "source", "key"),
    f"/c/{COURSE}/{SLUG}/submissions": ("source", "key"),
    f"/c/{COURSE}/{SLUG}/leaderboard/name": ("nickname", "anonymous"),
    f"/c/{COURSE}/{SLUG}/leaderboard/freeze": ("title", "gpu", "key"),
    "/submissions/1/release": ("reason",),
    "/submissions/1/confirm": ("reason",),
}


@pytest.mark.parametrize("path", NUL_FORMS)
def test_a_nul_in_any_field_is_no_fault_of_ours(campus: Campus, path: str) -> None:
    """PostgreSQL refuses it in any text."""
    campus.person("ada", password=PASSWORD)
    sign = Evidence(kind="clock", message="odd")
    campus.graded("ada", dataclasses.replace(stored("ok-block-pointers"), evidence=(sign,)))
    campus.graded("ben", stored("ok-block-pointers"))
    good = {"name": "ada", "source": "x = 1\n", "title": "Week 1", "reason": "I read it.", "nickname": "teal owl"}
    for field in NUL_FORMS[path]:
        client = campus.app.test_client() if path == "/log-in" else campus.client("grace", Role.INSTRUCTOR)
        if path.endswith("/name"):
            client = campus.client("ada")
        token = field_of(client.get("/log-in", follow_redirects=True).text, "csrf_token")
        form = {name: good[name] for name in NUL_FORMS[path] if name in good} | {field: "n\0n"}
        assert client.post(path, data=form | {"csrf_token": token}).status_code < 500, field


def test_hostile_text_is_shown_and_never_obeyed(campus: Campus) -> None:
    campus.person("ada")
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
    assert [one for one in Active(render_handout(text)).found if one not in ("<img>", "src=x.png")] == []


def test_infinity_stands_close_to_its_sign() -> None:
    page = render_handout(r"$m = -\infty$ and $$e^{-\infty - (-\infty)}$$")
    assert page.count("<mi>∞</mi>") == 3
    assert "<mo>∞</mo>" not in page


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
