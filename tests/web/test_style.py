"""What pages, style sheet and use cases each say, they say alike."""

from __future__ import annotations

import re
from pathlib import Path

from pygments.token import STANDARD_TYPES
from web_campus import Campus

from grader import accounts, course, web

WEB = Path(web.__file__).parent
STYLE = re.sub(r"/\*.*?\*/", "", (WEB / "static" / "tilegrade.css").read_text(encoding="utf-8"), flags=re.S)
STYLED = {
    name for selectors in re.findall(r"([^{}]+)\{", STYLE) for name in re.findall(r"\.([a-zA-Z][\w-]*)", selectors)
}
FOREIGN = {"math", "block"} | set(STANDARD_TYPES.values())  # of a handout's formulas and a file's colours
# put together of a beginning and a word: steps of an error map, curves, columns of a table
MADE = ("heat-", "key-", "is-")


def named() -> tuple[set[str], set[str]]:
    """Classes that a template or a script names, and words in quotes that may be one."""
    classes, quoted = set(), set()
    for path in WEB.rglob("*"):
        if path.suffix in (".html", ".py", ".js"):
            text = path.read_text(encoding="utf-8")
            quoted |= set(re.findall(r"""["']([\w-]+)["']""", text))
            classes |= set(re.findall(r"block main_class %\}([\w-]+)", text))
            # what the template language puts in has quotes of its own
            text = re.sub(r"\{[{%].*?[}%]\}", lambda found: found[0].replace('"', "'"), text)
            for value in re.findall(r"""class(?:Name)? ?= ?\\?"([^"\\]*)""", text):
                classes |= set(re.sub(r"\{.*?\}+", " ", value).split())
                quoted |= {word for words in re.findall(r"'([^']*)'", value) for word in words.split()}
    return classes, quoted


def test_every_class_that_has_a_rule_is_on_a_page() -> None:
    classes, quoted = named()
    unused = STYLED - classes - quoted - FOREIGN
    assert {name for name in unused if not name.startswith(MADE)} == set()


def test_every_class_of_a_page_has_a_rule() -> None:
    classes, _ = named()
    assert {name for name in classes - STYLED if not name.startswith(MADE)} == set()


def templates() -> list[tuple[str, str]]:
    return [(path.name, path.read_text(encoding="utf-8")) for path in sorted((WEB / "templates").glob("*.html"))]


def test_limits_of_fields_are_those_of_the_use_cases() -> None:
    written = {
        f"{name}: {found}" for name, text in templates() for found in re.findall(r'(?:min|max)length="\d+"', text)
    }
    assert written == set()


def test_nothing_that_is_written_once_is_written_again_in_a_template() -> None:
    once = {course.ANONYMOUS: set(), "csrf_token()": {"_pieces.html"}}
    for words, where in once.items():
        assert {name for name, text in templates() if words in text} == where, words


def test_who_chooses_a_password_reads_how_long_it_has_to_be(sqlite_campus: Campus) -> None:
    page = sqlite_campus.client("ada").get("/password").text
    assert page.count(f'minlength="{accounts.MIN_PASSWORD_CHARACTERS}"') == 2
    assert page.count(f'maxlength="{accounts.MAX_PASSWORD_CHARACTERS}"') == 3
    assert f">{accounts.MIN_PASSWORD_CHARACTERS} characters or more" in page
