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
# as Python's tracebacks name a line of the file, after escaping
_OWN_LINE = re.compile(r"(&#34;submission\.py&#34;, )line ([1-9][0-9]{0,5})\b")
# as `grader.deadlines` writes one
_SPOKEN_MOMENT = re.compile(r"\b(\d{2} [A-Z][a-z]+ \d{4} at \d{2}:\d{2}) UTC\b")
_ORDINARY = re.compile(r"[\n\t\x20-\x7e]*")


@lru_cache(maxsize=32)
def source_lines(source: str) -> tuple[Markup, ...]:
    """The lines of a Python file as Python counts them, highlighted and safe to put into a page."""
    text = readable(source)
    shown = highlight_code(text, "python") if len(text) <= MAX_HIGHLIGHTED_CHARACTERS else ""
    lines = (shown or str(escape(text))).split("\n")
    if lines[-1] == "":
        lines.pop()  # the file ends with a line end, as it should
    return tuple(Markup(line) for line in lines)  # noqa: S704  escaped above, by Pygments or by us


def readable(source: str) -> str:
    """A file's text with the line ends that Python sees, everything in it printable."""
    text = _LINE_END.sub("\n", source)
    return text if _ORDINARY.fullmatch(text) else plain(text, limit=len(text))


def count_lines(source: str) -> int:
    """How many lines `source_lines` makes of it."""
    text = _LINE_END.sub("\n", source)
    return text.count("\n") + (text != "" and not text.endswith("\n"))


def printed(value: str | Hostile) -> str:
    """A cell of a report. Texts of ours are printable already; a stranger's are made so here."""
    return value.plain if isinstance(value, Hostile) else value


def with_lines_linked(value: Hostile) -> Markup:
    """What a file said, its mentions of the file's own lines made links to the source on the same page."""
    # the pattern holds no character that escaping leaves behind from a stranger's markup
    return Markup(_OWN_LINE.sub(r'\1<a href="#L\2">line \2</a>', str(escape(value.plain))))  # noqa: S704


def without_nul(text: str) -> str:
    """What PostgreSQL can store of a name that a browser sent."""
    return text.replace("\0", "")


def iso(moment: datetime) -> str:
    """For a `datetime` attribute."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def with_times(sentence: str) -> Markup:
    """A sentence of ours, its moments in UTC made such that the page's script can show them in the reader's zone."""

    def marked(found: re.Match[str]) -> Markup:
        moment = datetime.strptime(found[1], "%d %B %Y at %H:%M").replace(tzinfo=UTC)
        return Markup('<time datetime="{}" data-local>{}</time>').format(iso(moment), utc(moment))

    parts: list[Markup] = []
    end = 0
    for found in _SPOKEN_MOMENT.finditer(sentence):
        parts += [escape(sentence[end : found.start()]), marked(found)]
        end = found.end()
    return Markup().join([*parts, escape(sentence[end:])])


def utc(moment: datetime) -> str:
    """For people without a script."""
    return f"{moment.astimezone(UTC):%-d %b %Y, %H:%M} UTC"
