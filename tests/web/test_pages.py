"""What the pages say and do: handing in, following, reading, and the staff's lists."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from web_campus import COURSE, SLUG, Campus, field_of, make_campus, stored
from werkzeug.test import TestResponse

from grader import course, submissions
from grader.db import Database
from grader.measurement import Evidence
from grader.models import Role, State, WorkerStatus
from grader.web import submissions as submission_pages

PAGE = f"/c/{COURSE}/{SLUG}"


def hand_in(client: FlaskClient, *, upload: bytes | None = None, name: str = "k.py", **fields: str) -> TestResponse:
    """Fill in the form of the assignment's page and send it."""
    html = client.get(PAGE).text
    data: dict[str, object] = {"csrf_token": field_of(html, "csrf_token"), "key": field_of(html, "key"), **fields}
    if upload is not None:
        data["file"] = (io.BytesIO(upload), name)
    return client.post(f"{PAGE}/submissions", data=data, content_type="multipart/form-data")


def test_the_home_page_says_what_is_due_and_where_one_stands(campus: Campus) -> None:
    client = campus.client("ada")
    assert "Not handed in" in client.get("/").text
    campus.hand_in("ada")
    assert "Being graded" in client.get("/").text
    campus.record(campus.claim(), stored("ok-block-pointers"))
    home = client.get("/").text
    assert "Full marks" in home
    assert "70" in home
    assert "All submissions" not in home


def test_the_home_page_tells_what_opens_later_from_what_is_closed(campus: Campus) -> None:
    client = campus.client("ada")
    with campus.database.write() as db:
        found = course.find_course(db, COURSE)
        assert found is not None
        opens_at = campus.now + timedelta(days=4)
        entry = course.set_assignment(db, course_id=found.id, slug=SLUG, opens_at=opens_at, now=campus.now)
    html = client.get("/").text
    assert f'Opens <time datetime="{opens_at:%Y-%m-%dT%H:%M:%SZ}"' in html
    assert ">Closed<" not in html
    with campus.database.write() as db:
        course.close_assignment(db, entry=db.merge(entry), reason="broken", actor_id=None, now=campus.now)
    html = client.get("/").text
    assert "Opens <time" not in html
    assert ">Closed<" in html


def test_the_home_page_lists_what_is_due_and_the_last_reports(campus: Campus) -> None:
    ada = campus.person("ada")
    with campus.database.write() as db:
        found = course.find_course(db, COURSE)
        assert found is not None
        for slug, days in ((SLUG, 4), ("online-softmax", 2), ("flash-attention", -1)):
            set_to = {"deadline": campus.now + timedelta(days=days), "late_days": 3}
            entry = course.set_assignment(db, course_id=found.id, slug=slug, **set_to, now=campus.now)
        course.set_assignment(db, course_id=found.id, slug="flash-attention", late_days=0, now=campus.now)
        course.grant_extension(
            db,
            entry=entry,
            assignment=campus.catalog.load(entry.slug),
            user=ada,
            until=campus.now + timedelta(days=1),
            actor_id=None,
            now=campus.now,
        )
    client = campus.client("ada")
    due = client.get("/").text.split("Due next")[1].split("</section>")[0]
    places = [due.index(f'/{slug}"') for slug in ("flash-attention", "online-softmax", SLUG)]
    assert places == sorted(places)
    assert "(extended)" in due
    assert "in about 24 hours" in due
    assert 'flash-attention"' not in campus.client("ben").get("/").text.split("Due next")[1].split("</section>")[0]
    assert "My last reports" not in client.get("/").text
    submission_id = campus.graded("ada", stored("ok-block-pointers"))
    campus.hand_in("ada")
    home = client.get("/").text
    reports = home.split("My last reports")[1].split("</section>")[0]
    assert reports.count("<li>") == 1
    assert f"#{submission_id} " in reports
    assert f'/{SLUG}"' not in home.split("Due next")[1].split("</section>")[0]  # full marks: nothing left to do


def test_what_being_late_takes_off_is_said_wherever_the_points_are(campus: Campus) -> None:
    with campus.database.write() as db:
        found = course.find_course(db, COURSE)
        assert found is not None
        due = campus.now - timedelta(hours=1)
        entry = course.set_assignment(
            db, course_id=found.id, slug=SLUG, deadline=due, late_days=3, late_percent=20.0, now=campus.now
        )
    late = campus.graded("ada", stored("ok-block-pointers"))
    ada, grace = campus.client("ada"), campus.client("grace", Role.INSTRUCTOR)
    places = (f"/submissions/{late}", f"/submissions/{late}/report", f"/submissions/{late}/report.html", PAGE, "/")
    said = "56 after 20 % for 1 late day"
    assert {path for path in places if ada.get(path).text.count(said) != 1} == set()
    everything = f"/c/{COURSE}/submissions"
    assert grace.get(everything).text.count(said) == grace.get(places[0]).text.count(said) == 1
    with campus.database.write() as db:  # the student's own deadline makes it in time, also on what was kept
        until = campus.now + timedelta(days=1)
        rules, ada_user = campus.catalog.load(SLUG), campus.person("ada")
        course.grant_extension(
            db, entry=entry, assignment=rules, user=ada_user, until=until, actor_id=None, now=campus.now
        )
    assert {path for path in places if " after 20 % for " in ada.get(path).text} == set()
    assert said not in grace.get(everything).text


def test_the_page_says_how_many_attempts_are_left_and_when_the_next_is_taken(
    sqlite_database: Database, tmp_path: Path
) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", HAND_INS_PER_MINUTE="2")
    client = campus.client("ada")
    assert "as many as you like" in client.get(PAGE).text
    for i in range(2):
        hand_in(client, source=f"x = {i}")
    html = client.get(PAGE).text
    assert "You have handed in 2 files within the last minute." in html
    assert re.search(r"The next one is taken at <time datetime=", html)
    assert 'type="file"' in html  # one may get ready meanwhile


def test_the_page_says_how_busy_the_queue_is(campus: Campus) -> None:
    client = campus.client("ada")
    assert "no worker is running just now" in client.get(PAGE).text
    with campus.database.write() as db:
        submissions.report_worker(db, name="w", device="cpu", status=WorkerStatus.IDLE, now=campus.now)
    assert "<dt>Queue</dt><dd>empty" in client.get(PAGE).text
    campus.graded("ben", stored("ok-block-pointers"))
    for _ in range(2):
        campus.hand_in("ben")
    campus.claim()
    html = client.get(PAGE).text
    assert "1 waiting, 1 being graded" in html
    assert "a report takes less than a minute" in html


def test_history_marks_the_one_that_counts(campus: Campus) -> None:
    best = campus.graded("ada", stored("ok-block-pointers"))
    campus.graded("ada", stored("no-rescale-output"))  # later, and worse
    html = campus.client("ada").get(PAGE).text
    marked = re.findall(r'<li class="counts">(.*?)</li>', html, re.DOTALL)
    assert len(marked) == 1
    assert f"#{best}<" in marked[0]
    assert "counts" in marked[0]


def test_staff_see_how_it_is_handled_in_the_open_page_and_others_do_not(campus: Campus) -> None:
    path = f"/submissions/{campus.hand_in('ada')}"
    grace = campus.client("grace", Role.INSTRUCTOR)
    assert f'data-facts="{path}/facts"' in grace.get(path).text
    assert "/run-again" not in grace.get(f"{path}/facts").text
    campus.record(campus.claim(), stored("ok-block-pointers"))
    facts = grace.get(f"{path}/facts").text
    assert "host-1" in facts
    assert "/run-again" in facts
    assert campus.client("ada").get(f"{path}/facts").status_code == 404
    assert "data-facts" not in campus.client("ada").get(path).text
    assert campus.app.test_client().get(f"{path}/facts").status_code == 401


def test_a_deadline_is_shown_with_its_moment_and_an_extension_of_ones_own(campus: Campus) -> None:
    ada = campus.person("ada")
    later = campus.now + timedelta(days=3)
    with campus.database.write() as db:
        entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
        assert entry is not None
        entry.deadline = campus.now - timedelta(hours=1)
        course.grant_extension(
            db,
            entry=entry,
            assignment=campus.catalog.load(entry.slug),
            user=ada,
            until=later,
            actor_id=None,
            now=campus.now,
        )
    mine, theirs = campus.client("ada").get(PAGE).text, campus.client("ben").get(PAGE).text
    assert f'<time datetime="{later:%Y-%m-%dT%H:%M:%SZ}" data-local>' in mine
    assert "your own extension" in mine
    assert 'type="file"' in mine
    assert (
        f'The deadline was <time datetime="{campus.now - timedelta(hours=1):%Y-%m-%dT%H:%M}:00Z" data-local>' in theirs
    )
    assert 'type="file"' not in theirs
    assert "Closed" in campus.client("ben").get("/").text


def test_the_assignment_page_shows_the_handout_and_gives_the_starter(campus: Campus) -> None:
    client = campus.client("ada")
    html = client.get(PAGE).text
    assert "<math" in html
    assert '<span class="k">def</span>' in html
    starter = client.get(f"{PAGE}/starter.py")
    assert starter.text == campus.catalog.load(SLUG).starter
    assert starter.headers["Content-Disposition"] == f'attachment; filename="{SLUG}.py"'


def test_the_arrow_of_a_signature_is_never_broken(campus: Campus) -> None:
    html = campus.client("ada").get(PAGE).text
    assert 'is_causal=False) <span class="nowrap">-&gt;</span> (o, lse)</code>' in html


def test_an_assignment_whose_folder_is_broken_says_so_to_staff_alone(sqlite_database: Database, tmp_path: Path) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data")
    with campus.database.write() as db:
        made = course.find_course(db, COURSE)
        assert made is not None
        course.set_assignment(db, course_id=made.id, slug="not-there", now=campus.now)
    student, staff = campus.client("ada"), campus.client("grace", Role.INSTRUCTOR)
    assert student.get("/").status_code == 200
    assert "assignment.toml" not in student.get("/").text
    assert "assignment.toml" in staff.get("/").text
    answer = student.get(f"/c/{COURSE}/not-there")
    assert answer.status_code == 503
    assert "cannot be loaded" in answer.text
    assert "assignment.toml" not in answer.text


@pytest.mark.parametrize("way", ["upload", "paste"])
def test_a_file_is_handed_in_and_the_bell_rings_after_it(campus: Campus, way: str) -> None:
    client = campus.client("ada")
    source = "# ünïcode\nimport torch\n"
    answer = hand_in(client, upload=source.encode()) if way == "upload" else hand_in(client, source=source)
    assert (answer.status_code, campus.rung) == (303, ["cpu"])
    download = client.get(answer.headers["Location"] + "/source.py")
    assert download.text == source
    assert download.headers["Content-Disposition"].startswith("attachment")


def test_a_double_click_is_one_submission(campus: Campus) -> None:
    client = campus.client("ada")
    html = client.get(PAGE).text
    fields = {name: field_of(html, name) for name in ("csrf_token", "key")} | {"source": "import torch\n"}
    answers = [client.post(f"{PAGE}/submissions", data=fields) for _ in range(2)]
    assert answers[0].headers["Location"] == answers[1].headers["Location"]
    assert campus.rung == ["cpu"]
    assert "a moment ago" in client.get(answers[1].headers["Location"]).text


@pytest.mark.parametrize(
    ("upload", "said"),
    [
        pytest.param(b"", "Your file is empty", id="empty"),
        pytest.param(b" \r\n\t ", "Your file is empty", id="blank"),
        pytest.param(b"#" * 300 * 1024, "Your file is 300 KiB and the limit is 256 KiB", id="300-KiB"),
        pytest.param(b"\x89PNG\r\n\x1a\n" + bytes(99), "Your file is a PNG image", id="png"),
        pytest.param("# größe\n".encode("latin-1"), "Your file is not UTF-8: line 1 holds the byte 0xf6", id="latin-1"),
        pytest.param(b"import torch\nx = '\0'\n", "Your file has a NUL byte on line 2", id="nul"),
    ],
)
def test_a_file_that_cannot_be_graded_is_refused_in_one_sentence(campus: Campus, upload: bytes, said: str) -> None:
    answer = hand_in(campus.client("ada"), upload=upload)
    assert answer.status_code == 400
    assert answer.text.count('role="alert"') == 1
    assert said in answer.text
    assert campus.rung == []


def test_a_form_without_a_file_says_that_there_is_none(campus: Campus) -> None:
    answer = hand_in(campus.client("ada"), source="")
    assert answer.status_code == 400
    assert "You gave no file." in answer.text
    assert campus.rung == []


def test_line_ends_of_a_pasted_file_are_as_they_were_typed(campus: Campus) -> None:
    client = campus.client("ada")
    location = hand_in(client, source="a = 1\r\nb = 2\r\n").headers["Location"]
    assert client.get(location + "/source.py").data == b"a = 1\nb = 2\n"


def test_a_request_too_large_for_any_file_gets_a_page_that_says_the_limit(campus: Campus) -> None:
    answer = hand_in(campus.client("ada"), upload=b"#" * 420 * 1024)
    assert answer.status_code == 413
    assert "The limit is 256 KiB" in answer.text


def test_a_refused_hand_in_keeps_what_was_pasted(campus: Campus) -> None:
    pasted = "x = '</textarea><script>alert(1)</script>'\0\n"
    answer = hand_in(campus.client("ada"), source=pasted)
    assert answer.status_code == 400
    assert "x = &#39;&lt;/textarea&gt;&lt;script&gt;" in answer.text
    assert "<details open>" in answer.text


@pytest.mark.parametrize("ended", ["session", "token"])
def test_an_ended_session_does_not_cost_what_was_pasted(campus: Campus, ended: str) -> None:
    client = campus.client("ada")
    token = field_of(client.get(PAGE).text, "csrf_token")
    if ended == "session":
        with client.session_transaction() as session:
            for key in ("user", "epoch", "since", "seen"):
                del session[key]
    data = {"csrf_token": token if ended == "session" else "old", "source": "precious = '<b>'\n"}
    answer = client.post(f"{PAGE}/submissions", data=data)
    assert answer.status_code == (401 if ended == "session" else 400)
    assert "precious = &#39;&lt;b&gt;&#39;" in answer.text


def test_handing_in_too_fast_is_refused(sqlite_database: Database, tmp_path: Path) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", HAND_INS_PER_MINUTE="2")
    client = campus.client("ada")
    answers = [hand_in(client, source=f"x = {i}\n") for i in range(3)]
    assert [answer.status_code for answer in answers] == [303, 303, 400]
    assert len(campus.rung) == 2
    assert "You have handed in 2 files within the last minute." in answers[2].text
    assert "x = 2\n</textarea>" in answers[2].text


def test_a_deadline_that_passes_over_an_open_form_is_said_and_keeps_what_was_pasted(campus: Campus) -> None:
    client = campus.client("ada")
    html = client.get(PAGE).text
    fields = {name: field_of(html, name) for name in ("csrf_token", "key")} | {"source": "precious = 1\n"}
    with campus.database.write() as db:
        entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
        assert entry is not None
        entry.deadline = campus.now - timedelta(hours=1)
    answer = client.post(f"{PAGE}/submissions", data=fields)
    assert answer.status_code == 400
    assert '<div class="flash bad" role="alert"><p>The deadline was <time' in answer.text
    assert "precious = 1\n</textarea>" in answer.text
    assert 'type="file"' not in answer.text
    assert campus.rung == []
    assert "The first try is the best way" in html  # what is closed invites to nothing
    assert "You have handed in nothing." in answer.text
    assert "The first try" not in answer.text


def test_the_page_follows_a_submission_to_its_report(campus: Campus) -> None:
    client = campus.client("ada")
    first, second = campus.hand_in("ben"), campus.hand_in("ada")
    path = f"/submissions/{second}"

    def news() -> dict[str, object]:
        found: dict[str, object] = json.loads(client.get(f"{path}/status").text)
        return found

    with campus.database.write() as db:
        submissions.report_worker(db, name="w", device="cpu", status=WorkerStatus.IDLE, now=campus.now)
    assert news()["line"] == "Queued. Yours is number 2 in line."
    ben = campus.claim()
    assert ben.submission_id == first
    assert news()["line"] == "Queued. Yours is next."
    job = campus.claim()
    assert news()["line"] == "Grading: load."
    campus.progress(job, {"numerics": 0.5})
    assert news()["line"] == "Grading: numerics 50 %."
    assert 'data-events="' in client.get(path).text
    campus.record(job, stored("ok-block-pointers"))
    assert news()["done"] is True
    page = client.get(path).text
    assert "data-events" not in page
    assert client.get(f"{path}/report").text.strip()[:200] in page
    # what the script puts into the open page offers the file to keep, as the page does that is loaded anew
    for html in (client.get(f"{path}/report").text, page):
        assert html.count(f'href="{path}/report.html"') == 1


def test_a_stream_tells_each_change_once_and_ends_with_the_report(
    campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_pages, "LOOK_EVERY_S", 0.01)
    client = campus.client("ada")
    submission_id = campus.hand_in("ada")
    job = campus.claim()
    with client.get(f"/submissions/{submission_id}/events", buffered=False) as answer:
        told = iter(answer.response)
        assert next(told) == b"retry: 1000\n\n"
        assert b"Grading: load." in next(told)
        campus.progress(job, {"memory": 0.0})
        assert b"Grading: memory." in next(told)
        campus.record(job, stored("ok-block-pointers"))
        assert b'"done": true' in next(told)
        assert list(told) == []


def test_a_stream_ends_by_itself_and_is_not_given_to_everybody(
    sqlite_campus: Campus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission_pages, "STREAM_S", 0.0)
    client = sqlite_campus.client("ada")
    path = f"/submissions/{sqlite_campus.hand_in('ada')}/events"
    streams = sqlite_campus.app.extensions["tilegrade"].streams
    for _ in range(20):  # each gives its place back
        with client.get(path) as answer:
            assert answer.text == "retry: 1000\n\n"
    taken = 0
    while streams.acquire(blocking=False):
        taken += 1
    assert taken == 8
    assert client.get(path).status_code == 503


def test_a_stream_holds_no_connection_while_it_waits(campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr(
        submission_pages.time, "sleep", lambda _s: held.append(campus.database.engine.pool.checkedout())
    )
    monkeypatch.setattr(submission_pages, "STREAM_S", 0.05)
    client = campus.client("ada")
    with client.get(f"/submissions/{campus.hand_in('ada')}/events") as answer:
        assert answer.status_code == 200
        assert b"retry" in answer.data
    assert held
    assert set(held) == {0}


def test_hidden_probes_seed_and_evidence_are_for_staff_alone(campus: Campus) -> None:
    hidden = [case.name for case in campus.catalog.load(SLUG).cases if case.hidden]
    assert hidden
    found = dataclasses.replace(
        stored("ok-block-pointers"), seed=123454321, evidence=(Evidence(kind="clock", message="it went back"),)
    )
    path = f"/submissions/{campus.graded('ada', found)}"
    mine, theirs = campus.client("ada").get(path).text, campus.client("grace", Role.INSTRUCTOR).get(path).text
    for secret in (*hidden, "123454321", "it went back", "Judge again", "host-1"):
        assert secret not in mine
        assert secret in theirs
    assert "Being checked" in mine
    assert "hidden 1" in mine


def test_a_held_grade_is_published_by_an_instructor(campus: Campus, token_of: Callable[[FlaskClient], str]) -> None:
    found = dataclasses.replace(stored("ok-block-pointers"), evidence=(Evidence(kind="clock", message="odd"),))
    path = f"/submissions/{campus.graded('ada', found)}"
    board = f"{PAGE}/leaderboard"
    ada, grace = campus.client("ada"), campus.client("grace", Role.INSTRUCTOR)
    assert "Nobody is here yet" in ada.get(board).text
    assert "This grade is held" in grace.get(path).text
    notice = f'<a href="/c/{COURSE}/submissions?what=held">1 grade</a> is held until you decide'
    for page in ("/", f"/c/{COURSE}"):
        assert notice in grace.get(page).text
    assert "until you decide" not in ada.get("/").text
    said = {"csrf_token": token_of(grace), "reason": "I read it, and it is <b>fine</b>."}
    assert grace.post(f"{path}/release", data=said).status_code == 303
    assert "Full marks" in ada.get(path).text
    assert "Full marks" in ada.get(board).text
    assert "it is &lt;b&gt;fine&lt;/b&gt;." in grace.get(path).text
    for page in ("/", f"/c/{COURSE}"):
        assert "until you decide" not in grace.get(page).text


def test_a_held_grade_that_does_not_count_tells_the_student_why(
    campus: Campus, token_of: Callable[[FlaskClient], str]
) -> None:
    found = dataclasses.replace(
        stored("ok-block-pointers"), evidence=(Evidence(kind="decoy", message="odd in its own way"),)
    )
    path = f"/submissions/{campus.graded('ada', found)}"
    ada, grace = campus.client("ada"), campus.client("grace", Role.INSTRUCTOR)
    before = ada.get(path).text
    assert "A person looks at this grade before it counts." in before
    for word in ("odd in its own way", "decoy", "interfered", "cheat", "suspic"):
        assert word not in before.lower()
    assert "odd in its own way" in grace.get(path).text
    assert "Until you decide" in grace.get(path).text
    said = {"csrf_token": token_of(grace), "reason": "It hands out <i>stored</i> answers."}
    assert grace.post(f"{path}/confirm", data=said).status_code == 303
    after = ada.get(path).text
    assert "It hands out &lt;i&gt;stored&lt;/i&gt; answers." in after
    assert "decided that it does not count" in after
    assert "odd in its own way" not in after
    card = after.split('class="card verdict')[1].split("</section>")[0]
    assert "Does not count" in card
    assert not [word for word in ("rule", "refused", "wrong") if word in card.lower()]
    # what holds before a decision alone is said before it alone
    assert "Until you decide" not in grace.get(path).text


def test_a_decision_needs_a_reason(campus: Campus, token_of: Callable[[FlaskClient], str]) -> None:
    found = dataclasses.replace(stored("ok-block-pointers"), evidence=(Evidence(kind="clock", message="odd"),))
    path = f"/submissions/{campus.graded('ada', found)}"
    grace = campus.client("grace", Role.INSTRUCTOR)
    answer = grace.post(f"{path}/confirm", data={"csrf_token": token_of(grace), "reason": " "})
    assert answer.status_code == 400
    assert "Say why, in a sentence that the student reads." in answer.text


def test_judging_again_tells_what_changed(campus: Campus, token_of: Callable[[FlaskClient], str]) -> None:
    path = f"/submissions/{campus.graded('ada', stored('ok-block-pointers'))}"
    grace = campus.client("grace", Role.INSTRUCTOR)
    grace.post(f"{path}/re-judge", data={"csrf_token": token_of(grace)})
    assert "Judged again: still full, 70 points." in grace.get(path).text


def test_judging_what_was_never_measured_says_why_not(campus: Campus, token_of: Callable[[FlaskClient], str]) -> None:
    path = f"/submissions/{campus.hand_in('ada')}"
    grace = campus.client("grace", Role.INSTRUCTOR)
    answer = grace.post(f"{path}/re-judge", data={"csrf_token": token_of(grace)})
    assert answer.status_code == 400
    assert "was not graded yet" in answer.text


def test_a_submission_that_we_could_not_grade_says_that_it_is_our_fault(campus: Campus) -> None:
    submission_id = campus.hand_in("ada")
    with campus.database.write() as db:
        row = submissions.find(db, submission_id)
        assert row is not None
        row.state, row.fault_note = State.FAULTED, "the sandbox did not start on host-1"
    ada, grace = campus.client("ada"), campus.client("grace", Role.INSTRUCTOR)
    mine = ada.get(f"/submissions/{submission_id}").text
    assert "costs you neither points nor an attempt" in mine
    assert "host-1" not in mine
    assert "the sandbox did not start" in grace.get(f"/submissions/{submission_id}").text
    assert "the sandbox did not start" in grace.get("/queue").text


def test_a_grade_is_shown_while_its_file_is_measured_again_and_when_nothing_comes_of_it(
    campus: Campus, token_of: Callable[[FlaskClient], str]
) -> None:
    submission_id = campus.graded("ada", stored("ok-block-pointers"))
    path = f"/submissions/{submission_id}"
    ada, grace = campus.client("ada"), campus.client("grace", Role.INSTRUCTOR)
    assert grace.post(f"{path}/run-again", data={"csrf_token": token_of(grace)}).status_code == 303
    assert campus.rung == ["cpu"]

    def shown(page: str) -> None:
        """The student's pages say what they said before."""
        for where in (path, f"{path}/report", PAGE, "/", f"{PAGE}/leaderboard"):
            html = ada.get(where).text
            assert "Full marks" in html, where
            assert ">70<" in html, where
        assert "/cancel" not in page

    def measured_again() -> str:
        page = ada.get(path).text
        shown(page)
        assert "The grade below stands until the new one is there." in page
        assert "data-events" in page
        assert "measured again" in ada.get(PAGE).text
        assert "measured again" in grace.get(f"/c/{COURSE}/submissions?what=full").text
        return page

    assert "Queued." in measured_again()
    ada.post(f"{path}/cancel", data={"csrf_token": token_of(ada)})  # as from a page that was open before
    assert "Too late to withdraw it" in measured_again()
    job = campus.claim()
    assert "Grading" in measured_again()
    assert "Stop measuring again" in grace.get(path).text
    with campus.database.write() as db:
        submissions.give_up(db, job, note="host-1 broke <b>", now=campus.now, final=True)
    page = ada.get(path).text
    shown(page)
    assert "measured again" not in page + ada.get(PAGE).text
    assert "host-1" not in page
    facts = grace.get(path).text
    assert "<dt>Not measured again</dt><dd>host-1 broke &lt;b&gt;</dd>" in facts
    trail = re.findall(r"</time>, <b>([^<]+)</b>: ([a-z ]+)<", facts)
    assert set(trail) == {("a command or the service", "given up"), ("grace", "sent to be measured again")}
    assert "What was done" not in page
    grace.post(f"{path}/run-again", data={"csrf_token": token_of(grace)})
    grace.post(f"{path}/cancel", data={"csrf_token": token_of(grace)})
    assert "It is not measured again. Its grade stands." in grace.get(path).text
    shown(ada.get(path).text)


def test_a_student_withdraws_what_waits(campus: Campus, token_of: Callable[[FlaskClient], str]) -> None:
    client = campus.client("ada")
    path = f"/submissions/{campus.hand_in('ada')}"
    for _ in range(2):  # a second click changes nothing, and reads the same
        client.post(f"{path}/cancel", data={"csrf_token": token_of(client)})
        assert "Withdrawn. It does not count." in client.get(path).text
    assert ">Withdrawn</span>" in client.get(PAGE).text
    graded = f"/submissions/{campus.graded('ada', stored('ok-block-pointers'))}"
    client.post(f"{graded}/cancel", data={"csrf_token": token_of(client)})
    assert "Too late to withdraw it" in client.get(graded).text


def test_the_leaderboard_shows_nicknames_and_to_staff_also_names(campus: Campus) -> None:
    campus.person("ada", nickname="teal-owl-12")
    campus.person("ben", nickname="ruby-kite-34")
    campus.graded("ada", stored("ok-block-pointers"))
    campus.graded("ada", stored("no-rescale-output"))  # a later, worse one never replaces the best
    campus.graded("ben", stored("stored-scores"))
    mine = campus.client("ada").get(f"{PAGE}/leaderboard").text
    grace = campus.client("grace", Role.INSTRUCTOR)
    projected, theirs = grace.get(f"{PAGE}/leaderboard").text, grace.get(f"{PAGE}/leaderboard?who=1").text
    assert mine.index("teal-owl-12") < mine.index("ruby-kite-34")
    assert mine.count(">you<") == 1
    assert ">ben<" not in mine
    assert ">ben<" not in projected  # a lecture may see this screen
    assert ">ben<" in theirs
    assert ">ben<" not in campus.client("ada").get(f"{PAGE}/leaderboard?who=1").text


def test_the_history_beside_a_handout_is_ones_own_and_the_latest_first(campus: Campus) -> None:
    mine, theirs = campus.graded("ada", stored("ok-block-pointers")), campus.hand_in("ben")
    latest = campus.hand_in("ada", "x = 2\n")
    page = campus.client("ada").get(PAGE).text
    assert page.index(f">#{latest}</a>") < page.index(f">#{mine}</a>")
    assert f">#{theirs}</a>" not in page


def test_the_staffs_list_is_paged_and_filtered(campus: Campus) -> None:
    for i in range(30):
        campus.hand_in("ada" if i % 3 else "ben", f"x = {i}\n")
    client = campus.client("grace", Role.INSTRUCTOR)
    first = client.get(f"/c/{COURSE}/submissions").text
    assert "30 submissions" in first
    assert "Page 1 of 2" in first
    assert client.get(f"/c/{COURSE}/submissions?page=2").text.count('class="link"') == 5
    assert client.get(f"/c/{COURSE}/submissions?page=999").text.count('class="link"') == 5
    assert client.get(f"/c/{COURSE}/submissions?page=-1").text.count('class="link"') == 25
    assert "10 submissions" in client.get(f"/c/{COURSE}/submissions?student=BE").text
    states = re.findall(r'<option value="(?:queued|running|faulted|cancelled)">([^<]+)<', first)
    assert states == ["Queued", "Grading", "Not graded yet", "Withdrawn"]  # as the rows call them
    assert "0 submissions" in client.get(f"/c/{COURSE}/submissions?student=%25").text
    assert "30 submissions" in client.get(f"/c/{COURSE}/submissions?what=queued&assignment={SLUG}").text
    assert "0 submissions" in client.get(f"/c/{COURSE}/submissions?what=full").text
    assert "0 submissions" in client.get(f"/c/{COURSE}/submissions?assignment=another").text


def test_the_queue_names_the_stages_as_the_students_page_does(campus: Campus) -> None:
    campus.hand_in("ada")
    job = campus.claim()
    client = campus.client("grace", Role.INSTRUCTOR)
    assert "load on" in client.get("/queue").text
    campus.progress(job, {"compile": 0.0, "audit": 0.5})
    assert "compile, structure 50 % on" in client.get("/queue").text


def test_an_instructor_sees_of_other_courses_only_how_much_waits(campus: Campus) -> None:
    submission_id = campus.hand_in("ada")
    alan = campus.person("alan", None)
    with campus.database.write() as db:
        other = course.create_course(db, slug="other", title="Other", now=campus.now)
        course.enrol(db, course_id=other.id, user_id=alan.id, role=Role.INSTRUCTOR, now=campus.now)
    queue = campus.client("alan").get("/queue").text
    assert "0 submissions of your courses, 1 of others" in queue
    assert f"#{submission_id}<" not in queue


@pytest.mark.parametrize(
    ("path", "most"),
    [
        pytest.param("/", 10, id="home"),
        pytest.param(PAGE, 11, id="assignment"),
        pytest.param(f"{PAGE}/leaderboard", 11, id="leaderboard"),
        pytest.param(f"/c/{COURSE}/submissions", 8, id="all"),
        pytest.param("/queue", 6, id="queue"),
        pytest.param("/submissions/1", 5, id="submission"),
        pytest.param("/submissions/1/status", 5, id="status"),
    ],
)
def test_the_number_of_queries_does_not_grow_with_the_rows(campus: Campus, path: str, most: int) -> None:
    client = campus.client("grace", Role.INSTRUCTOR)
    counts = []
    for batch in range(2):
        for i in range(1 + 5 * batch):
            campus.graded(f"student-{batch}-{i}", stored("ok-block-pointers"))
            campus.hand_in(f"student-{batch}-{i}", f"x = {i}\n")
        for _ in range(2 * batch):
            campus.claim()
        # a report that was read before, with its charts drawn, is not read again
        for once in ("/submissions/1", path):
            client.get(once)
        campus.draw()
        client.get(path)
        with campus.counted_queries() as sent:
            assert client.get(path).status_code == 200
        counts.append(len([one for one in sent if one.startswith("SELECT")]))
    assert counts[0] == counts[1]
    assert counts[1] <= most


def test_an_error_of_ours_says_sorry_and_tells_nothing(sqlite_campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    client = sqlite_campus.client("ada")
    monkeypatch.setattr("grader.web.lists.home", lambda *_a, **_k: 1 / 0)
    answer = client.get("/")
    assert answer.status_code == 500
    assert "Something of ours broke" in answer.text
    assert "ZeroDivisionError" not in answer.text


def test_the_health_page_needs_no_log_in(campus: Campus) -> None:
    assert campus.app.test_client().get("/health").json["status"] == "ok"  # type: ignore[index]


def test_staff_see_why_a_worker_is_in_quarantine_and_what_waits_for_nobody(campus: Campus) -> None:
    client = campus.client("grace", Role.INSTRUCTOR)
    campus.hand_in("ada")
    why = "gpu errors: <b>2</b> uncorrected errors. Reset it.\nmemory: nothing stopped it."
    with campus.database.write() as db:
        submissions.report_worker(
            db, name="g:cuda:0", device="cuda", status=WorkerStatus.QUARANTINED, now=campus.now, note=why
        )
    page = client.get("/workers").text
    assert "Quarantined" in page
    assert "gpu errors: &lt;b&gt;2&lt;/b&gt; uncorrected errors. Reset it.</div>" in page
    assert "<div>memory: nothing stopped it.</div>" in page
    assert "No worker is running" in client.get("/queue").text
    with campus.database.write() as db:
        submissions.report_worker(db, name="g:cuda:1", device="cuda", status=WorkerStatus.IDLE, now=campus.now)
    page = client.get("/queue").text
    assert "1 worker running" in page
    assert "What is for <code>cpu</code> waits, and no worker grades it." in page
    with campus.database.write() as db:
        submissions.report_worker(db, name="c:cpu:0", device="cpu", status=WorkerStatus.IDLE, now=campus.now)
    assert "no worker grades it" not in client.get("/queue").text
