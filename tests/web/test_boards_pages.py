"""The leaderboard's pages: names by choice, frozen editions, exports, and who may do what."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from datetime import timedelta

import pytest
import sqlalchemy as sa
from flask.testing import FlaskClient
from web_campus import COURSE, SLUG, Campus, field_of, stored

from grader import boards, course, submissions
from grader.models import AuditEvent, Board, Result, Role

BOARD = f"/c/{COURSE}/{SLUG}/leaderboard"
Token = Callable[[FlaskClient], str]


@pytest.fixture
def filled(campus: Campus) -> Campus:
    campus.person("ada", nickname="teal-owl-12")
    campus.person("ben", nickname="ruby-kite-34")
    campus.graded("ada", stored("ok-block-pointers"))
    campus.graded("ben", stored("stored-scores"))
    return campus


def freeze(client: FlaskClient, token_of: Token, title: str = "Week 3", **fields: str) -> str:
    answer = client.post(f"{BOARD}/freeze", data={"csrf_token": token_of(client), "title": title, **fields})
    assert answer.status_code == 303
    return str(answer.headers["Location"])


def set_result(campus: Campus, submission_id: int, **values: object) -> None:
    with campus.database.write() as db:
        db.execute(sa.update(Result).where(Result.submission_id == submission_id).values(**values))


def test_a_nickname_is_chosen_and_every_board_follows_at_once(filled: Campus, token_of: Token) -> None:
    grace = filled.client("grace", Role.INSTRUCTOR)
    frozen = freeze(grace, token_of)
    ada, ben = filled.client("ada"), filled.client("ben")
    answer = ada.post(f"{BOARD}/name", data={"csrf_token": token_of(ada), "nickname": " violet  heron "})
    assert answer.status_code == 303
    for client in (ada, ben, grace):
        for page in (BOARD, frozen, BOARD + ".csv", f"{BOARD}.csv{frozen[len(BOARD) :]}"):
            text = client.get(page).text
            assert "violet heron" in text
            assert "teal-owl-12" not in text


@pytest.mark.parametrize("which", ["live", "frozen"])
@pytest.mark.parametrize("who", ["ben", "grace"])
def test_the_export_of_a_board_tells_no_name_that_the_board_does_not_show(
    filled: Campus, token_of: Token, which: str, who: str
) -> None:
    """Instructors hand exports on, so theirs holds no more than a student's."""
    frozen = freeze(filled.client("grace", Role.INSTRUCTOR), token_of)
    ada = filled.client("ada")
    ada.post(f"{BOARD}/name", data={"csrf_token": token_of(ada), "nickname": "", "anonymous": "1"})
    query = frozen[len(BOARD) :] if which == "frozen" else "?page=1"
    answer = filled.client(who, Role.INSTRUCTOR if who == "grace" else Role.STUDENT).get(f"{BOARD}.csv{query}&who=1")
    assert answer.mimetype == "text/csv"
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [row["name"] for row in rows] == ["Anonymous", "ruby-kite-34"]
    cells = {cell for row in rows for cell in row.values()}
    assert not cells & {"ada", "ben", "teal-owl-12"}
    assert {"name", "rank", "points"} <= set(rows[0])
    assert not {"user", "user_name", "user_id", "submission_id"} & set(rows[0])


def test_who_is_anonymous_finds_their_own_row_and_the_way_back(filled: Campus, token_of: Token) -> None:
    ada, ben = filled.client("ada"), filled.client("ben")
    ada.post(f"{BOARD}/name", data={"csrf_token": token_of(ada), "nickname": "teal-owl-12", "anonymous": "1"})
    mine, theirs = ada.get(BOARD).text, ben.get(BOARD).text
    assert ">you<" in mine
    assert 'value="teal-owl-12"' in mine
    assert "checked" in mine
    assert "teal-owl-12" not in theirs
    assert "Anonymous" in theirs
    ada.post(f"{BOARD}/name", data={"csrf_token": token_of(ada), "nickname": "teal-owl-12"})
    assert "teal-owl-12" in ben.get(BOARD).text


@pytest.mark.parametrize(
    ("nickname", "said"),
    [
        pytest.param("ruby-kite-34", "is taken in this course", id="taken"),
        pytest.param("x" * 41, "1 to 40 printable characters", id="long"),
        pytest.param("Anonymous", "tick that instead", id="as-if-anonymous"),
        pytest.param("", "Type a nickname, or tick", id="blank"),
    ],
)
def test_a_refused_nickname_says_why_and_is_still_in_the_form(
    filled: Campus, token_of: Token, nickname: str, said: str
) -> None:
    ada = filled.client("ada")
    answer = ada.post(f"{BOARD}/name", data={"csrf_token": token_of(ada), "nickname": nickname})
    assert answer.status_code == 400
    assert said in answer.text
    assert f'value="{nickname or "teal-owl-12"}"' in answer.text
    assert "teal-owl-12" in filled.client("ben").get(BOARD).text


def test_a_nickname_typed_while_the_box_is_ticked_is_saved_and_said_not_to_be_shown(
    filled: Campus, token_of: Token
) -> None:
    ada = filled.client("ada")
    said = "untick “Show no name at all” to show it"
    for nickname, told in (("teal-owl-12", False), ("blue-wren-7", True)):
        ada.post(f"{BOARD}/name", data={"csrf_token": token_of(ada), "nickname": nickname, "anonymous": "1"})
        assert (said in ada.get(BOARD).text) is told
    assert "blue-wren-7" not in filled.client("ben").get(BOARD).text


def test_whoever_stands_on_no_board_has_no_name_to_choose(filled: Campus, token_of: Token) -> None:
    grace = filled.client("grace", Role.INSTRUCTOR)
    assert "My name on boards" not in grace.get(BOARD).text
    answer = grace.post(f"{BOARD}/name", data={"csrf_token": token_of(grace), "nickname": "boss"})
    assert answer.status_code == 404


def test_a_frozen_board_stays_through_a_re_judge_and_a_better_hand_in(filled: Campus, token_of: Token) -> None:
    grace = filled.client("grace", Role.INSTRUCTOR)
    frozen = freeze(grace, token_of)
    before = grace.get(f"{BOARD}.csv{frozen[len(BOARD) :]}").text
    filled.graded("ben", stored("ok-block-pointers"))
    set_result(filled, 1, points=1.0)
    with filled.database.write() as db:
        submissions.run_again(db, 1, actor_id=None, now=filled.now)
    assert grace.get(f"{BOARD}.csv{frozen[len(BOARD) :]}").text == before
    assert "Official" in filled.client("ada").get(frozen).text
    assert "Official: Week 3" in filled.client("ada").get(BOARD).text
    with filled.database.read() as db:
        event = db.scalars(sa.select(AuditEvent).where(AuditEvent.action == "freeze-board")).one()
    assert event.actor_id == filled.people["grace"].id


def test_a_double_click_freezes_once(filled: Campus, token_of: Token) -> None:
    grace = filled.client("grace", Role.INSTRUCTOR)
    key = field_of(grace.get(BOARD).text, "key")
    assert freeze(grace, token_of, key=key) == freeze(grace, token_of, key=key)
    with filled.database.read() as db:
        assert db.scalar(sa.select(sa.func.count(Board.id))) == 1


def test_a_withdrawn_board_is_gone_and_withdrawing_twice_says_so(filled: Campus, token_of: Token) -> None:
    grace = filled.client("grace", Role.INSTRUCTOR)
    frozen = freeze(grace, token_of)
    for said in ("no longer shown", "withdrawn before"):
        answer = grace.post(f"{BOARD}/1/withdraw", data={"csrf_token": token_of(grace)}, follow_redirects=True)
        assert said in answer.text
    assert grace.get(frozen).status_code == 404


def test_what_cannot_be_frozen_says_why_and_keeps_the_title(campus: Campus, token_of: Token) -> None:
    grace = campus.client("grace", Role.INSTRUCTOR)
    answer = grace.post(f"{BOARD}/freeze", data={"csrf_token": token_of(grace), "title": "Week 3"})
    assert answer.status_code == 400
    assert "Nobody is on this board yet" in answer.text


@pytest.mark.parametrize("act", ["freeze", "1/withdraw"])
def test_only_instructors_freeze_and_withdraw(filled: Campus, token_of: Token, act: str) -> None:
    freeze(filled.client("grace", Role.INSTRUCTOR), token_of)
    ada = filled.client("ada")
    assert "Freeze this board" not in ada.get(BOARD).text
    assert ada.post(f"{BOARD}/{act}", data={"csrf_token": token_of(ada), "title": "x"}).status_code == 404


def test_a_board_of_another_assignment_is_not_shown_here(filled: Campus, token_of: Token) -> None:
    freeze(filled.client("grace", Role.INSTRUCTOR), token_of)
    with filled.database.write() as db:
        found = course.find_course(db, COURSE)
        assert found is not None
        course.set_assignment(db, course_id=found.id, slug="online-softmax", now=filled.now)
    elsewhere = f"/c/{COURSE}/online-softmax/leaderboard"
    grace = filled.client("grace", Role.INSTRUCTOR)
    assert grace.get(f"{elsewhere}?frozen=1").status_code == 404
    assert grace.post(f"{elsewhere}/1/withdraw", data={"csrf_token": token_of(grace)}).status_code == 404


def test_each_gpu_has_its_board_with_the_share_of_its_limit(filled: Campus) -> None:
    speed = {"speedup_low": 3.9, "speedup_high": 4.1, "out_of": 100.0}
    set_result(filled, 1, speedup=4.0, gpu="NVIDIA H200", limit_share=0.62, **speed)
    set_result(filled, 2, speedup=4.0, gpu="NVIDIA A100", limit_share=None, **speed)
    client = filled.client("ada")
    everything = client.get(BOARD).text
    assert "62 %" in everything
    assert "H200" in everything
    on_one = client.get(f"{BOARD}?gpu=NVIDIA A100").text
    assert "ruby-kite-34" in on_one
    assert "teal-owl-12" not in on_one.split("My name on boards")[0]
    assert "Nobody is here yet" in client.get(f"{BOARD}?gpu=<script>").text


def test_late_days_are_taken_off_on_the_board_on_the_page_and_in_the_history(campus: Campus) -> None:
    with campus.database.write() as db:
        found = course.find_course(db, COURSE)
        assert found is not None
        course.set_assignment(
            db,
            course_id=found.id,
            slug=SLUG,
            deadline=campus.now - timedelta(hours=1),
            late_days=2,
            late_percent=10.0,
            now=campus.now,
        )
    client = campus.client("ada")
    page = client.get(f"/c/{COURSE}/{SLUG}").text
    assert "1 day late: it counts 90 % of its points." in page
    assert 'type="file"' in page
    submission_id = campus.graded("ada", stored("ok-block-pointers"))
    with campus.database.read() as db:
        points = db.get_one(Result, submission_id).points
    assert points == 70
    assert ">63<" in client.get(BOARD).text
    assert "1 day late" in client.get(BOARD).text
    assert "1 day late: it counts 90 % of its points." in client.get(f"/c/{COURSE}/{SLUG}").text
    assert ">63<" in client.get("/").text


def test_ones_own_hand_ins_are_told_as_charts_and_as_a_table(filled: Campus) -> None:
    filled.graded("ada", stored("stored-scores"))
    html = filled.client("ada").get(BOARD).text
    assert "My points, hand-in by hand-in" in html
    assert "#1 70" in html or "#1: 70" in html  # the sentence that says what the chart shows
    assert '<caption class="hidden-text">My graded hand-ins' in html
    assert "How mine went" not in filled.client("cleo").get(BOARD).text


def test_boards_count_what_the_use_case_counts(filled: Campus) -> None:
    with filled.database.read() as db:
        entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
        assert entry is not None
        rows = boards.best_of_each(db, entry, filled.catalog.load(SLUG))
    text = filled.client("ada").get(BOARD + ".csv").text
    assert text == boards.board_csv(rows)
