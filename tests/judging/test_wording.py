import csv
import io
import re
import unicodedata
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.wording import (
    Hostile,
    about,
    apart,
    bytes_text,
    count,
    csv_table,
    listed,
    one_line,
    plain,
    points_text,
    rate_text,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("\x1b[2J\x1b[31mred", "\\x1b[2J\\x1b[31mred", id="ansi"),
        pytest.param("a\0b\x07", "a\\x00b\\x07".replace("\\x00", "\\0"), id="c0"),
        pytest.param("\x9b31m", "\\x9b31m", id="c1"),
        pytest.param("\u202eevil\u2066", "\\u202eevil\\u2066", id="direction"),
        pytest.param("over\rwrite", "over\\rwrite", id="carriage-return"),
        pytest.param("zero\u200bwidth\ufeff", "zero\\u200bwidth\\ufeff", id="zero-width"),
        pytest.param("\ud800", "\\ud800", id="surrogate"),
        pytest.param("tag\U000e0041", "tag\\U000e0041", id="tag"),
        pytest.param("line\n\ttab", "line\n\ttab", id="line-feed-and-tab-stay"),
        pytest.param("<b>T² é 漢</b>", "<b>T² é 漢</b>", id="letters-and-markup-stay"),
    ],
)
def test_controls_become_visible(text, shown):
    assert plain(text) == shown


def test_a_pile_of_marks_is_cut_down():
    assert plain("e" + "\u0301" * 50).count("\u0301") == 3


def test_long_text_is_cut_and_says_so():
    assert plain("x" * 5000, 100) == "x" * 100 + "… (4,900 characters more were cut)"
    assert len(Hostile("y" * 10**6).plain) < 5000


@given(st.text(st.characters(), max_size=300))
def test_any_text_can_be_printed(text):
    shown = plain(text)
    shown.encode()
    assert all(char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for char in shown)
    assert plain(shown) == shown


@pytest.mark.parametrize(
    ("got", "want", "shown"),
    [
        pytest.param(0.25, 0.125, ("0.25", "0.125"), id="far"),
        pytest.param(1.74612, 1.74634, ("1.7461", "1.7463"), id="near"),
        pytest.param(1.0, 1.0 + 2**-52, ("1", "1.0000000000000002"), id="next"),
        pytest.param(2.0, 2.0, ("2", "2"), id="equal"),
    ],
)
def test_two_numbers_have_the_digits_that_tell_them_apart(got, want, shown):
    assert apart(got, want) == shown


def test_one_line_has_no_line_breaks_and_an_end():
    assert one_line(" a\n\n b\tc ") == "a b c"
    assert one_line("z" * 900, 50) == "z" * 49 + "…"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (132096, "129 KiB"),
        (3 << 30, "3.00 GiB"),
        (24576 << 20, "24.0 GiB"),
    ],
)
def test_sizes_have_three_digits_and_a_unit(size, text):
    assert bytes_text(size) == text


def test_numbers_agree_with_their_nouns():
    assert count(1, "launch", "launches") == "1 launch"
    assert count(1200, "row") == "1,200 rows"
    assert listed(["a"]) == "a"
    assert listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefgh")) == "a, b, c, d, e, f and 2 more"
    assert listed(list("abcdefgh"), of=222) == "a, b, c, d, e, f and 216 more"


@pytest.mark.parametrize(
    ("points", "text"), [(68.17, "68.17"), (68.2, "68.2"), (70.0, "70"), (0.0, "0"), (100.0, "100"), (0.05, "0.05")]
)
def test_points_keep_their_two_decimals_and_no_zeros(points, text):
    assert points_text(points) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "less than a minute"),
        (49, "less than a minute"),
        (50, "about 1 minute"),
        (170, "about 3 minutes"),
        (5400, "about 2 hours"),
        (86400, "about 24 hours"),
        (3 * 86400, "about 3 days"),
    ],
)
def test_a_span_is_said_as_people_do(seconds, text):
    assert about(seconds) == text


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\tx", " =1", "＝1+1", "－1", "＠x"])
def test_no_cell_is_a_formula(text):
    assert csv_table(("a",), [(text,)]) == f"a\n'{text}\n"


@pytest.mark.parametrize("between", [";", "\t", "\n", "; "])
def test_no_part_of_a_cell_is_one_where_other_signs_part_cells(between):
    """A spreadsheet set to German or French splits at semicolons, whatever the commas and quotes say."""
    found = list(csv.reader(io.StringIO(csv_table(("a",), [(f"x{between}=1+1",)]), newline="")))
    assert found[1] == [f"x{between[:1]}'{between[1:]}=1+1"]


def test_every_csv_is_made_by_that_function():
    grader = Path(__file__).resolve().parents[2] / "grader"
    writers = [
        path.name
        for path in grader.rglob("*.py")
        if re.search(r"\bcsv\.(writer|DictWriter)\b|^\s*from csv\b|^\s*import csv as", path.read_text(), re.M)
    ]
    assert writers == ["wording.py"]


@given(st.lists(st.lists(st.text(), min_size=2, max_size=2)))
def test_a_table_can_be_read_back(rows):
    found = list(csv.reader(io.StringIO(csv_table(("a", "b"), rows), newline="")))
    assert [[cell.replace("'", "") for cell in row] for row in found[1:]] == [
        [plain(cell).replace("'", "") for cell in row] for row in rows
    ]


def test_moments_and_nothing_have_cells_too():
    moment = datetime(2027, 2, 1, 12, tzinfo=UTC)
    assert csv_table(("a", "b"), [(moment, None)]) == "a,b\n2027-02-01T12:00:00+00:00,\n"


@pytest.mark.parametrize(
    ("per_s", "said"),
    [(0.0, "0.00 B/s"), (999.4, "999 B/s"), (999.6, "1.00 kB/s"), (4.2487e12, "4.25 TB/s"), (7.7663e14, "777 TB/s")],
)
def test_a_rate_has_three_digits_and_a_decimal_prefix(per_s, said):
    assert rate_text(per_s, "B/s") == said
