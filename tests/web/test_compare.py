"""Two files line by line: numbering, what is left out, hostile texts, and whose files one may see."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web_campus import COURSE, SLUG, Campus, corpus

from grader.models import Role
from grader.web.compare import MOST_LINES, TIMEOUT_S, compare
from grader.web.text import source_lines

PAGE = f"/c/{COURSE}/{SLUG}/compare"


def text_of(html: object) -> str:
    return re.sub(r"<[^>]*>", "", str(html)).replace("&#39;", "'").replace("&quot;", '"')


def test_each_line_has_its_numbers_before_and_after() -> None:
    found = compare("a\nb\nc\n", "a\nB\nc\nd\n")
    assert [(line.kind, line.old, line.new, text_of(line.html)) for line in found.lines] == [
        ("same", 1, 1, "a"),
        ("old", 2, None, "b"),
        ("new", None, 2, "B"),
        ("same", 3, 3, "c"),
        ("new", None, 4, "d"),
    ]
    assert (found.n_old, found.n_new, found.equal) == (1, 2, False)


def test_what_did_not_change_is_left_out_but_for_three_lines_around() -> None:
    lines = [f"x{i} = {i}" for i in range(20)]
    found = compare("\n".join(lines), "\n".join([*lines[:10], "new = 1", *lines[10:]]))
    assert [line.kind for line in found.lines] == ["gap", *["same"] * 3, "new", *["same"] * 3, "gap"]
    assert [line.n_left_out for line in found.lines if line.kind == "gap"] == [7, 7]


@pytest.mark.parametrize(("n_between", "shown"), [(6, "same"), (7, "same"), (8, "gap")])
def test_one_line_is_never_left_out_alone(n_between: int, shown: str) -> None:
    between = [f"x{i} = {i}" for i in range(n_between)]
    found = compare("\n".join(["a", *between, "b"]), "\n".join(["A", *between, "B"]))
    assert found.lines[2 + 3].kind == shown
    assert [line.n_left_out for line in found.lines if line.kind == "gap"] == ([2] if shown == "gap" else [])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("a\n", "a\n", id="same"),
        pytest.param("a\r\nb\r", "a\nb\n", id="line-ends"),
        pytest.param("a", "a\n", id="no-last-line-end"),
        pytest.param("", "", id="empty"),
    ],
)
def test_files_with_the_same_lines_are_equal(old: str, new: str) -> None:
    found = compare(old, new)
    assert found.equal
    assert all(line.kind == "gap" for line in found.lines)


_LINES = st.lists(st.sampled_from(["", "a", "b", "    c", "'''", "x = 1", "\t<b>", "# é"]), max_size=30)


@given(old=_LINES, new=_LINES)
def test_the_old_and_the_new_file_can_be_read_out_of_the_table(old: list[str], new: list[str]) -> None:
    found = compare("\n".join(old), "\n".join(new))
    for kind, number, lines in (("old", "old", old), ("new", "new", new)):
        shown = [line for line in found.lines if line.kind in (kind, "same")]
        for line in shown:
            at = getattr(line, number)
            assert text_of(line.html) == lines[at - 1].replace("<b>", "&lt;b&gt;")
        left_out = sum(line.n_left_out for line in found.lines)
        assert len(shown) + left_out == len(source_lines("\n".join(lines)))


@pytest.mark.parametrize("what", ["few-words", "hundred-words", "all-different", "two-words"])
def test_no_two_files_keep_the_page_busy(what: str) -> None:
    rng = random.Random(1)
    make = {
        "few-words": lambda: "a\n" * 100_000,
        "hundred-words": lambda: "".join(f"{rng.randrange(101)}\n" for _ in range(70_000)),
        "all-different": lambda: "".join(f"{rng.random()}\n" for _ in range(13_000)),
        "two-words": lambda: "".join(rng.choice("ab") + "\n" for _ in range(120_000)),
    }[what]
    old, new = make(), make()[10:]
    started = time.process_time()
    found = compare(old, new)
    assert time.process_time() - started < 6 * TIMEOUT_S + 3
    assert len(found.lines) <= MOST_LINES
    assert found.cut is (what != "few-words")


def test_two_of_ones_own_files_are_compared(campus: Campus) -> None:
    first = campus.hand_in("ada", corpus("ok-block-pointers"))
    second = campus.hand_in("ada", corpus("ok-block-pointers").replace("import triton\n", "import triton  # again\n"))
    client = campus.client("ada")
    html = client.get(f"{PAGE}?pick={second}&pick={first}").text
    assert "1 line added, 1 line removed." in html
    assert "<ins>" in html
    assert "<del>" in html
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    assert table in client.get(PAGE).text  # without a choice: the latest two
    for pick in (first, second):  # one alone: with its neighbour
        assert table in client.get(f"{PAGE}?pick={pick}").text


def test_with_one_file_there_is_nothing_to_compare(campus: Campus) -> None:
    client = campus.client("ada")
    assert "hand in two files first" in client.get(PAGE).text
    campus.hand_in("ada")
    assert "#1 is the only one so far" in client.get(PAGE).text


def test_what_a_student_wrote_is_text_here_too(campus: Campus) -> None:
    evil = "</td><script>alert(1)</script>\x1b[31m\u202e"
    campus.hand_in("ada", f"x = 1\n# {evil}\n")
    campus.hand_in("ada", f"x = 2\n'''{evil}'''\n")
    html = campus.client("ada").get(PAGE).text
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert" in html
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_one_file_alone_is_compared_with_the_one_before_it(campus: Campus) -> None:
    ids = [campus.hand_in("ada", f"x = {i}") for i in range(4)]
    page = f"/submissions/{ids[2]}"
    link = f"{PAGE}?pick={ids[2]}"
    for name, role in (("ada", Role.STUDENT), ("grace", Role.INSTRUCTOR)):
        client = campus.client(name, role)
        assert f'href="{link}"' in client.get(page).text
        html = client.get(link).text
        assert f'From <a href="/submissions/{ids[1]}">' in html
        assert f' to <a href="{page}">' in html


@pytest.mark.parametrize(
    ("who", "status"), [("ada", 200), ("ben", 404), ("grace", 200)], ids=["own", "another-student", "instructor"]
)
def test_others_files_are_for_instructors_alone(campus: Campus, who: str, status: int) -> None:
    picks = "&".join(f"pick={campus.hand_in('ada', f'x = {i}')}" for i in range(2))
    client = campus.client(who, Role.INSTRUCTOR if who == "grace" else Role.STUDENT)
    assert client.get(f"{PAGE}?{picks}").status_code == status


def test_instructors_may_compare_two_students(campus: Campus) -> None:
    picks = "&".join(f"pick={campus.hand_in(name, f'x = {name!r}')}" for name in ("ada", "ben"))
    html = campus.client("grace", Role.INSTRUCTOR).get(f"{PAGE}?{picks}").text
    assert "by ada" in html
    assert "by ben" in html
    assert campus.client("ada").get(f"{PAGE}?{picks}").status_code == 404


@pytest.mark.parametrize("pick", ["0", "-1", "99999999999", "x", "12345"])
def test_a_number_that_is_no_file_breaks_nothing(campus: Campus, pick: str) -> None:
    assert campus.client("ada").get(f"{PAGE}?pick={pick}&pick=1").status_code in (200, 404)
