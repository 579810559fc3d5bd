"""Every form survives a second click, a reload and an ended session, and what was handed in is never lost."""

from __future__ import annotations

import io
import re
from collections.abc import Callable

import pytest
from flask.testing import FlaskClient
from web_campus import COURSE, PASSWORD, SLUG, Campus, field_of
from werkzeug.test import TestResponse

PAGE = f"/c/{COURSE}/{SLUG}"
PASTED = "precious = '</textarea><script>alert(1)</script>'\n"
SHOWN = "precious = &#39;&lt;/textarea&gt;&lt;script&gt;alert(1)&lt;/script&gt;&#39;\n"
Token = Callable[[FlaskClient], str]


def end_session(client: FlaskClient) -> None:
    with client.session_transaction() as session:
        for key in ("user", "epoch", "since", "seen"):
            session.pop(key, None)


def form_of(client: FlaskClient, path: str = PAGE) -> dict[str, str]:
    html = client.get(path).text
    return {name: field_of(html, name) for name in ("csrf_token", "key")}


def hidden_fields(html: str) -> dict[str, str]:
    """What the page's log-in form would send along."""
    form = html[html.index('action="/log-in"') :]
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', form))


def log_in_again(client: FlaskClient, asked: TestResponse, *, name: str = "ada", **fields: str) -> TestResponse:
    return client.post(
        "/log-in", data={**hidden_fields(asked.text), "name": name, "password": PASSWORD, "source": PASTED, **fields}
    )


@pytest.fixture
def ada(campus: Campus) -> FlaskClient:
    campus.person("ada", password=PASSWORD)
    return campus.client("ada")


@pytest.mark.parametrize("way", ["paste", "upload"])
def test_an_ended_session_gives_back_what_was_handed_in(campus: Campus, ada: FlaskClient, way: str) -> None:
    fields: dict[str, object] = {**form_of(ada)}
    fields |= {"source": PASTED} if way == "paste" else {"file": (io.BytesIO(PASTED.encode()), "k.py")}
    end_session(ada)
    asked = ada.post(f"{PAGE}/submissions", data=fields, content_type="multipart/form-data")
    assert asked.status_code == 401
    assert SHOWN in asked.text
    assert campus.rung == []
    back = log_in_again(ada, asked)
    assert back.status_code == 200
    assert SHOWN in back.text
    assert "You are logged in again" in back.text
    again = ada.post(
        f"{PAGE}/submissions",
        data={"csrf_token": field_of(back.text, "csrf_token"), "key": field_of(back.text, "key"), "source": PASTED},
    )
    assert again.status_code == 303
    assert ada.get(again.headers["Location"] + "/source.py").text == PASTED
    assert field_of(back.text, "key") == fields["key"]  # the same form: a click that got through would not count twice


def test_a_wrong_password_on_the_way_loses_nothing(campus: Campus, ada: FlaskClient) -> None:
    fields = form_of(ada)
    end_session(ada)
    asked = ada.post(f"{PAGE}/submissions", data={**fields, "source": PASTED})
    wrong = log_in_again(ada, asked, password="not this one")
    assert wrong.status_code == 401
    assert SHOWN in wrong.text
    assert SHOWN in log_in_again(ada, wrong).text


def test_reloading_the_page_after_the_log_in_gives_the_text_back_once_more(campus: Campus, ada: FlaskClient) -> None:
    fields = form_of(ada)
    end_session(ada)
    asked = ada.post(f"{PAGE}/submissions", data={**fields, "source": PASTED})
    assert log_in_again(ada, asked).status_code == 200
    reloaded = log_in_again(ada, asked)  # its token went with the log-in
    assert reloaded.status_code == 200
    assert SHOWN in reloaded.text


def test_somebody_who_is_not_in_that_course_gets_the_text_all_the_same(campus: Campus, ada: FlaskClient) -> None:
    campus.person("eve", None, password=PASSWORD)
    fields = form_of(ada)
    end_session(ada)
    asked = ada.post(f"{PAGE}/submissions", data={**fields, "source": PASTED})
    answer = log_in_again(ada, asked, name="eve")
    assert answer.status_code == 404
    assert SHOWN in answer.text


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("https://evil.example/", "/"),
        ("//evil.example", "/"),
        ("/queue", "/queue"),
        ("/c/no/such/page", "/c/no/such/page"),
        ("", "/"),
    ],
)
def test_the_text_goes_to_no_other_page(campus: Campus, ada: FlaskClient, target: str, place: str) -> None:
    end_session(ada)
    token = field_of(ada.get("/log-in").text, "csrf_token")
    data = {"csrf_token": token, "name": "ada", "password": PASSWORD, "next": target, "source": PASTED}
    answer = ada.post("/log-in", data=data)
    assert (answer.status_code, answer.headers["Location"]) == (303, place)


def test_a_form_older_than_the_log_in_comes_back_filled_and_works_the_second_time(
    campus: Campus, ada: FlaskClient
) -> None:
    fields = form_of(ada) | {"csrf_token": "from before", "source": PASTED}
    answer = ada.post(f"{PAGE}/submissions", data=fields)
    assert answer.status_code == 400
    assert "This form is too old" in answer.text
    assert SHOWN in answer.text
    fields["csrf_token"] = field_of(answer.text, "csrf_token")
    assert ada.post(f"{PAGE}/submissions", data=fields).status_code == 303
    assert campus.rung == ["cpu"]


def test_a_second_click_on_log_in_and_on_log_out_ends_where_the_first_did(campus: Campus) -> None:
    campus.person("ada", password=PASSWORD)
    client = campus.app.test_client()
    token = field_of(client.get("/log-in").text, "csrf_token")
    data = {"csrf_token": token, "name": "ada", "password": PASSWORD}
    assert [client.post("/log-in", data=data).status_code for _ in range(2)] == [303, 303]
    token = field_of(client.get("/").text, "csrf_token")
    answers = [client.post("/log-out", data={"csrf_token": token}) for _ in range(2)]
    assert [answer.headers["Location"] for answer in answers] == ["/log-in", "/log-in"]


def test_a_hand_in_sent_again_by_a_reload_is_the_same_submission(campus: Campus, ada: FlaskClient) -> None:
    fields = form_of(ada) | {"source": PASTED}
    places = {ada.post(f"{PAGE}/submissions", data=fields).headers["Location"] for _ in range(3)}
    assert len(places) == 1
    assert campus.rung == ["cpu"]


def test_acts_of_staff_may_be_clicked_twice(campus: Campus, ada: FlaskClient, token_of: Token) -> None:
    path = f"/submissions/{campus.hand_in('ada')}"
    for _ in range(2):
        answer = ada.post(f"{path}/cancel", data={"csrf_token": token_of(ada)})
        assert answer.status_code == 303
