"""Words and numbers as people read them, and text of strangers made safe to show."""

from __future__ import annotations

import csv
import io
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

# categories that have no glyph of their own, or change how their neighbours are shown
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
_NAMED = {"\r": "\\r", "\x1b": "\\x1b", "\0": "\\0"}
# where a spreadsheet begins a cell, also one that splits at semicolons, and finds what it takes for a formula
_FORMULA = re.compile(r"(?:\A|(?<=[;\t\n]))(?=\t| *[=+\-@＝＋－＠])")
_MAX_MARKS = 3  # combining marks in a row; more would be drawn over other lines
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_PREFIXES = ("", "k", "M", "G", "T", "P")


@dataclass(frozen=True, slots=True)
class Hostile:
    """Text that a student's file produced. Show `plain`; pages escape it as they escape everything."""

    text: str
    limit: int = 4000

    @property
    def plain(self) -> str:
        return plain(self.text, self.limit)


def plain(text: str, limit: int = 4000) -> str:
    """Make any text printable: control and direction characters become visible escapes, and the length is bounded.

    Line feeds and tabs stay. The result can be printed on a terminal and encoded as UTF-8 whatever came in.
    """
    shown = []
    marks = 0
    for char in text[:limit]:
        if char in "\n\t":
            marks = 0
            shown.append(char)
            continue
        category = unicodedata.category(char)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        shown.append(_escape(char) if category in _UNSEEN or marks > _MAX_MARKS else char)
    if len(text) > limit:
        shown.append(f"… ({len(text) - limit:,} characters more were cut)")
    return "".join(shown)


def one_line(text: str, limit: int = 240) -> str:
    """`plain`, with every run of white space made one space."""
    words = " ".join(text[: 4 * limit].split())
    return plain(words if len(words) <= limit else words[: limit - 1] + "…", limit)


def in_words(code: str) -> str:
    """A verdict as people read it: "not run" for not_run."""
    return code.replace("_", " ")


def points_text(points: float) -> str:
    """Points as every page and sentence gives them: they have two decimals, and zeros at the end are left out."""
    return f"{points:.2f}".rstrip("0").rstrip(".")


def about(seconds: float) -> str:
    """A span as people say it: "less than a minute", "about 5 minutes"."""
    if seconds < 50:
        return "less than a minute"
    for unit, size, most in (("minute", 60, 90), ("hour", 3600, 36)):
        n = round(seconds / size)
        if n < most:
            return f"about {count(max(1, n), unit)}"
    return f"about {count(round(seconds / 86400), 'day')}"


def csv_cell(value: object) -> str:
    """A printable cell that no spreadsheet takes for a formula (OWASP, CSV injection). Moments are in ISO 8601."""
    text = "" if value is None else value.isoformat() if isinstance(value, datetime) else plain(str(value))
    return _FORMULA.sub("'", text)


def csv_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV text with a header."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([csv_cell(value) for value in row] for row in rows)
    return out.getvalue()


def _escape(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def bytes_text(size_bytes: float) -> str:
    """A size with three significant digits and its unit."""
    value, unit = float(size_bytes), 0
    while abs(value) >= 1024 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{value:.0f} B"
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {_UNITS[unit]}"


def rate_text(per_s: float, unit: str) -> str:
    """A rate with three significant digits: "776 TFLOP/s", "4.25 TB/s"."""
    value, prefix = float(per_s), 0
    while abs(value) >= 999.5 and prefix < len(_PREFIXES) - 1:
        value /= 1000
        prefix += 1
    return f"{value:.{max(0, 3 - len(str(int(abs(value)))))}f} {_PREFIXES[prefix]}{unit}"


def error_text(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.1e}"


def apart(got: float, want: float) -> tuple[str, str]:
    """Two numbers with four significant digits, or as many more as it takes to tell one from the other."""
    for digits in range(4, 18):
        a, b = f"{got:.{digits}g}", f"{want:.{digits}g}"
        if a != b:
            break
    return a, b


def count(n: int, noun: str, plural: str = "") -> str:
    """A number with its noun: "1 row", "2 rows"."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 6, of: int | None = None) -> str:
    """ "a, b and c", cut after `most`. `of` is how many there are, where `names` holds only the first of them."""
    shown = list(names[:most])
    total = len(names) if of is None else of
    if total > len(shown):
        return f"{', '.join(shown)} and {total - len(shown)} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)
