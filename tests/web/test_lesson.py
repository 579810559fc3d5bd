"""The lesson's widget: a form that works without a script, curves with their numbers, and one's own measurements."""

from __future__ import annotations

import re

import pytest
from web_campus import COURSE, SLUG, Campus, stored

from grader import course
from grader.models import Role

PAGE = "/lesson/memory"


def text_of(html: str) -> str:
    """What is read: without tags, every run of white space one space."""
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


def test_it_opens_on_the_lessons_example_and_names_the_crossing_point(sqlite_campus: Campus) -> None:
    page = text_of(sqlite_campus.client("ada").get(PAGE).text)
    assert "Naive crosses the 80 GB line at T = 12,500" in page
    assert "16,384 137 GB 1.09 GB 126 only Flash fits" in page
    assert "Nothing yet." in page


def test_the_form_asks_for_any_shape_and_keeps_what_was_chosen(sqlite_campus: Campus) -> None:
    chosen = {"log2_t": 12, "batch": 1, "heads": 16, "head_dim": 64, "gb": 24, "dtype": "float32", "mode": "capacity"}
    html = sqlite_campus.client("ada").get(PAGE, query_string=chosen).text
    # the square root of 24 GB / (16 heads * 4 bytes)
    assert "Naive crosses the 24 GB line at T = 19,364" in text_of(html)
    for name, value in chosen.items():
        field = re.search(rf'name="{name}"[^>]*value="{value}"([^>]*)>', html)
        assert field is not None, name
        assert name not in ("dtype", "mode") or "checked" in field[1]


@pytest.mark.parametrize(
    "query",
    [
        "log2_t=abc&batch=&heads=-5&head_dim=1e9&gb=99999999999",
        "dtype=%3Cscript%3E&mode=evil",
        "log2_t=99&head_dim=17",
        "log2_t=٣",
    ],
)
def test_whatever_stands_in_the_address_there_is_a_page(sqlite_campus: Campus, query: str) -> None:
    answer = sqlite_campus.client("ada").get(f"{PAGE}?{query}")
    assert answer.status_code == 200
    assert "<script>" not in answer.text
    for field in re.finditer(r'min="(\d+)" max="(\d+)" step="(\d+)" value="(\d+)"', answer.text):
        low, high, step, value = map(int, field.groups())
        assert low <= value <= high
        assert (value - low) % step == 0


def test_traffic_counts_what_is_moved(sqlite_campus: Campus) -> None:
    page = text_of(sqlite_campus.client("ada").get(f"{PAGE}?mode=traffic").text)
    assert "Above T = 128, the head dim, most of what a naive forward moves is the score matrix" in page
    assert "8,192 140 GB 2.16 GB 64.7" in page
    assert "only Flash fits" not in page


def test_ones_own_measurements_lie_beside_the_curves_and_nobody_elses(campus: Campus) -> None:
    first = campus.graded("ada", stored("stored-scores"))
    second = campus.graded("ada", stored("ok-block-pointers"))
    other = campus.graded("ben", stored("ok-block-pointers"))
    swept = "batch=2&heads=1&head_dim=64&dtype=float32"
    html = campus.client("ada").get(f"{PAGE}?{swept}").text
    page = text_of(html)
    # measured, at this many heads, naive, Flash: a right file lies on Flash's curve to the byte
    assert f"#{second} 2 heads, head dim 64, float32 96 49.9 kB 49.9 kB 73.7 kB 49.9 kB" in page
    assert f"#{first} 2 heads" in page
    assert f"#{other} " not in page
    assert "yours, measured" in html
    # four times as many heads need four times as much
    page = text_of(campus.client("ada").get(f"{PAGE}?batch=8&heads=1&head_dim=64&dtype=float32").text)
    assert f"#{second} 2 heads, head dim 64, float32 96 49.9 kB 200 kB 295 kB 200 kB" in page
    audited = text_of(campus.client("ada").get(f"{PAGE}?mode=traffic&batch=1&heads=1&head_dim=32&dtype=float32").text)
    assert f"#{second} 1 head, head dim 32, float32 192 99.1 kB 99.1 kB 688 kB 99.1 kB" in audited


def test_assignments_about_attention_lead_here(sqlite_campus: Campus) -> None:
    with sqlite_campus.database.write() as db:
        course.set_assignment(db, course_id=1, slug="online-softmax", now=sqlite_campus.now)
    client = sqlite_campus.client("ada")
    link = f'<a href="{PAGE}">Memory against T</a>: '
    assert link in client.get(f"/c/{COURSE}/{SLUG}").text
    assert link not in client.get(f"/c/{COURSE}/online-softmax").text


def test_only_the_latest_hand_ins_that_were_measured_are_shown(campus: Campus) -> None:
    numbers = [campus.graded("ada", stored("ok-block-pointers"), f"x = {i}\n") for i in range(4)]
    campus.graded("ada", stored("compile-error"))
    campus.hand_in("ada", "waiting = 1\n")
    page = campus.client("ada").get(PAGE).text
    shown = [number for number in numbers if f">#{number}</a>" in page]
    assert shown == numbers[-2:]


def test_the_page_asks_for_log_in_and_every_role_may_read_it(sqlite_campus: Campus) -> None:
    assert sqlite_campus.app.test_client().get(PAGE).status_code == 302
    assert sqlite_campus.client("grace", Role.INSTRUCTOR).get(PAGE).status_code == 200
    assert sqlite_campus.client("eve", None).get(PAGE).status_code == 200


def test_what_is_asked_in_a_million_ways_fills_no_disk(sqlite_campus: Campus) -> None:
    client = sqlite_campus.client("ada")
    for batch in range(1, 5):
        assert "<svg viewBox" in client.get(f"{PAGE}?batch={batch}").text
    assert list(sqlite_campus.settings.data_dir.glob("charts/**/*.svgz")) == []
