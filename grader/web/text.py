"""What templates need to show text and moments. Strangers' text goes through `grader.wording.plain` first."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache

from markupsafe import Markup, escape

from grader.web.handout import highlight_code
from grader.wording import Hostile, plain

MAX_HIGHLIGHTED_CHARACTERS = 48_000  # highlighting is slow, and a lexer on hostile text may be slower
_LINE_END = re.compile("\r\n|\r")
_ORDINARY = re.compile(r"[\n\t\x20-\x7e]*")


@lru_cache(maxsize=32)
def source_lines(source: str) -> tuple[Markup, ...]:
    """The lines of a Python file as Python counts them, highlighted and safe to put into a page."""
    text = _LINE_END.sub("\n", source)
    if not _ORDINARY.fullmatch(text):
        text = plain(text, limit=len(text))
    shown = highlight_code(text, "python") if len(text) <= MAX_HIGHLIGHTED_CHARACTERS else ""
    lines = (shown or str(escape(text))).split("\n")
    if lines[-1] == "":
        lines.pop()  # the file ends with a line end, as it should
    return tuple(Markup(line) for line in lines)  # noqa: S704  escaped above, by Pygments or by us


def printed(value: str | Hostile) -> str:
    """A cell of a report. Texts of ours are printable already; a stranger's are made so here."""
    return value.plain if isinstance(value, Hostile) else value


def without_nul(text: str) -> str:
    """What PostgreSQL can store of a name that a browser sent."""
    return text.replace("\0", "")


def iso(moment: datetime) -> str:
    """For a `datetime` attribute."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def utc(moment: datetime) -> str:
    """For people without a script."""
    return f"{moment.astimezone(UTC):%-d %b %Y, %H:%M} UTC"


def points(value: float) -> str:
    """At most one decimal, and none where it would be a zero."""
    return f"{value:.1f}".removesuffix(".0")
