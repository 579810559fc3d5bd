"""docs/security.md tells of every requirement of OWASP's ASVS 5.0.0, level 1, and names tests that are there."""

from __future__ import annotations

import re
import tomllib

import pytest
from web_campus import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in re.findall(r"^\| *\d.*\|$", PAGE, re.M)]
# chapter and section, and how many of the section's first requirements are of level 1
LEVEL_1 = {
    "1.2": 5, "1.3": 2, "1.5": 1, "2.1": 1, "2.2": 2, "2.3": 1, "3.2": 2, "3.3": 1, "3.4": 2, "3.5": 3, "4.1": 1,
    "4.4": 1, "5.2": 2, "5.3": 2, "6.1": 1, "6.2": 8, "6.3": 2, "6.4": 2, "7.2": 4, "7.4": 2, "8.1": 1, "8.2": 2,
    "8.3": 1, "9.1": 3, "9.2": 1, "10.4": 5, "11.3": 2, "11.4": 1, "12.1": 1, "12.2": 2, "13.4": 1, "14.2": 1,
    "14.3": 1, "15.1": 1, "15.2": 1, "15.3": 1,
}  # fmt: skip
NO_TEST = ("Does not apply: ", "Operator: ", "Not met: ", "Documented above.")


def told(numbers: str) -> list[str]:
    """ "1.2.3", "1.2.3, 1.2.4" or "1.2.1 to 1.2.3"."""
    if " to " in numbers:
        first, last = numbers.split(" to ")
        section, _, low = first.rpartition(".")
        return [f"{section}.{i}" for i in range(int(low), int(last.rpartition(".")[2]) + 1)]
    return numbers.split(", ")


def test_every_requirement_of_level_1_is_told_once_and_in_order() -> None:
    asked = [f"{section}.{i + 1}" for section, n in LEVEL_1.items() for i in range(n)]
    assert len(asked) == 70
    assert [number for numbers, *_ in ROWS for number in told(numbers)] == asked


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_row_names_a_test_or_says_why_there_is_none(row: tuple[str, ...]) -> None:
    _, _, where = row
    assert re.search(r"`test_\w+`|ruff S\d+", where) or where.startswith(NO_TEST)


def test_the_tests_that_it_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    files = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    there = {name for text in files for name in re.findall(r"^def (test_\w+)\(", text, re.M)}
    assert named - there == set()
    assert len(named) > 40


def test_the_rules_that_it_names_are_checked() -> None:
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["ruff"]["lint"]
    named = set(re.findall(r"ruff (S\d+)", PAGE))
    assert named
    assert "S" in lint["select"]
    assert not named & set(lint["ignore"])


def test_every_variable_and_file_that_it_names_is_there() -> None:
    example = (ROOT / ".env.example").read_text(encoding="utf-8")
    assert [name for name in re.findall(r"TILEGRADE_[A-Z_]+", PAGE) if name not in example] == []
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", PAGE)
    assert [path for path in linked if not (ROOT / "docs" / path).exists()] == []
