"""A report on a terminal: rich tables, small plots in text. What students wrote is text here, never markup."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from grader.figures import BarChart, HeatMap, Level, LineChart, Whose, amount, is_empty, place
from grader.sections import Block, Column, Command, Kind, Report, Section, Table, TextBlock
from grader.wording import Hostile, error_text, in_words, points_text

LEAVES_OUT_BELOW = 140  # columns: what the handout says too
MOST_IN_SHORT = 5  # rows
WHOLE = frozenset({Kind.NUMBER, Kind.PARTS})
GAP = 2  # columns between two of a table
LONGEST_WORD = 34  # columns; longer ones, such as digests, may be broken anywhere
BACKGROUND = frozenset({"compile", "provenance"})  # sections that a short report does without
PLOT_ROWS, PLOT_COLUMNS = 12, 48
BAR_COLUMNS = 32
_MARKS = {
    Whose.OWN: "●",
    Whose.OWN_BACKWARD: "◆",
    Whose.NAIVE: "■",
    Whose.REFERENCE: "▲",
    Whose.LIMIT: "─",
}
_SHADES = "·░▒▓█"
_STYLES = {
    "pass": "green",
    "full": "green",
    "partial": "yellow",
    "held": "yellow",
    "not_counted": "yellow",
    "fail": "red",
    "wrong": "red",
    "error": "red",
    "limit": "red",
    "refused": "red",
}


def print_report(report: Report, console: Console, *, whole: bool = True) -> None:
    """Print a report. Nothing in it is read as rich markup or as a terminal code.

    Args:
        whole: otherwise what passed, how it was counted, where it comes from, and every plot are left out.
    """
    title = Text(report.title, style="bold")
    title.append(f"  {report.verdict}", style=_STYLES.get(report.verdict, ""))
    if report.fault:
        title.append(f"  {report.fault}", style="bold")
    console.print(title)
    score = f"{points_text(report.points)} of {points_text(report.out_of)} points."
    console.print(Text(" ".join([report.headline, score, *report.remarks])))
    for section in report.sections:
        if whole or section.key not in BACKGROUND:
            _print_section(section, console, whole=whole)


def _print_section(section: Section, console: Console, *, whole: bool) -> None:
    heading = Text(f"\n{section.title}", style="bold underline")
    if section.verdict:
        heading.append(f"  {in_words(section.verdict)}", style=_STYLES.get(section.verdict, "dim"))
    if section.points:
        heading.append(f"  {section.points}", style="not underline")
    console.print(heading)
    if section.measured:
        console.print(Text(f"Measured: {section.measured}."))
    if section.asked:
        console.print(Text(f"Asked: {section.asked}."))
    if not whole and section.verdict:
        if section.unearned:
            console.print(Text(section.unearned))
    else:
        for sentence in _told(section):
            console.print(Text(sentence))
    for block in section.blocks:
        shown = block if whole or not section.verdict else _in_short(block)
        if shown is not None:
            _print_block(shown, console)


def _told(section: Section) -> list[str]:
    """What a section says, the advice right behind its first sentence."""
    advice = [f"Hint: {section.hint}"] if section.hint else []
    if section.step:
        advice.append(f"The step to look at: {section.step}")
    if section.explained:
        advice.append(f"The handout explains it under “{section.explained}”.")
    return [*section.sentences[:1], *advice, *section.sentences[1:]]


def _in_short(block: Block) -> Table | None:
    """What of an axis a reader has to act on: the first judged rows that did not pass."""
    if not isinstance(block, Table):
        return None
    kept = [number for number, mark in enumerate(block.marks) if mark != "pass"]
    if not kept:
        return None
    title = f"{block.title}: {len(kept)} of {len(block.rows)} do not pass"
    if len(kept) > MOST_IN_SHORT:
        title += f"; the first {MOST_IN_SHORT}"
        del kept[MOST_IN_SHORT:]
    rows, marks = tuple(block.rows[number] for number in kept), tuple(block.marks[number] for number in kept)
    return dataclasses.replace(block, title=title, rows=rows, marks=marks)


def _print_block(block: Block, console: Console) -> None:
    if isinstance(block, Table):
        if block.rows:  # of a file that did not get so far there is nothing to list
            _print_table(block, console)
        return
    about = f" (line {block.line} of your file)" if isinstance(block, TextBlock) and block.line is not None else ""
    console.print(Text(block.title + about, style="italic"))
    if isinstance(block, Command):
        console.print(Text(f"  {block.text}"), soft_wrap=True)  # so that it can be copied
    elif isinstance(block, TextBlock):
        console.print(Padding(Text(block.text.plain), (0, 0, 0, 2)))
    elif isinstance(block, LineChart):
        _print_lines(line_plot(block), console)
    elif isinstance(block, BarChart):
        _print_lines(bar_plot(block), console)
    else:
        _print_lines(heat_plot(block), console)


def _print_table(table: Table, console: Console) -> None:
    """Columns beside each other where every word of them fits whole; otherwise a row is a name and lines below it."""
    aside = console.width < LEAVES_OUT_BELOW
    places = [i for i in table.filled if not (aside and table.columns[i].kind is Kind.ASIDE)]
    cells = [[_cell(table, number, i) for i in places] for number in range(len(table.rows))]
    columns = [table.columns[i] for i in places]
    widths = _widths(columns, cells, console.width)
    console.print(Text(table.title, style="italic"))
    if not widths:
        _print_stacked(columns, cells, console)
        return
    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
    for at, column in enumerate(columns):
        justify: JustifyMethod = "right" if column.flush_right else "left"
        shown.add_column(Text(column.name), justify=justify, overflow="fold", width=widths[at])
    for row in cells:
        shown.add_row(*row)
    console.print(shown)


def _print_stacked(columns: Sequence[Column], cells: Sequence[Sequence[Text]], console: Console) -> None:
    for row in cells:
        first, rest = Text("  ").append_text(row[0]), Text()
        for column, cell in zip(columns[1:], row[1:], strict=True):
            if column.kind is Kind.VERDICT:
                first.append("  ").append_text(cell)
            elif cell.plain:
                rest.append(("; " if rest.plain else "") + f"{column.name} ", style="dim")
                rest.append_text(Text(", ").join(cell.split("\n")))
        console.print(first)
        if rest.plain:
            console.print(Padding(rest, (0, 0, 0, 4)))


def _widths(columns: Sequence[Column], cells: Sequence[Sequence[Text]], console_width: int) -> list[int]:
    """Of every column, such that no word is broken; empty where they do not fit beside each other."""
    rows = [[Text(column.name) for column in columns], *cells]
    least = [max(_least(column, row[at]) for row in rows) for at, column in enumerate(columns)]
    most = [max(cell_len(line) for row in rows for line in row[at].plain.split("\n")) for at in range(len(columns))]
    if most[0] <= console_width // 3:
        least[0] = most[0]  # a row's name stays whole where there is room
    spare = console_width - sum(least) - GAP * (len(columns) - 1)
    if spare < 0:
        return []
    share = min(1.0, spare / max(1, sum(most) - sum(least)))
    return [a + int((b - a) * share) for a, b in zip(least, most, strict=True)]


def _least(column: Column, cell: Text) -> int:
    """Columns that a cell needs so that no word of it is broken, nor a number from its unit."""
    words = cell.plain.split("\n" if column.kind in WHOLE else None)
    return min(LONGEST_WORD, max((cell_len(word) for word in words), default=0))


def _cell(table: Table, number: int, at: int) -> Text:
    value = table.rows[number][at]
    text = value.plain if isinstance(value, Hostile) else value if isinstance(value, str) else "\n".join(value)
    mark = table.marks[number] if table.marks and table.columns[at].kind is Kind.VERDICT else ""
    return Text(text, style=_STYLES.get(mark, "dim") if mark else "")


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(Text(f"  {line}"), no_wrap=True, overflow="crop")


def line_plot(chart: LineChart) -> list[str]:
    """A log-log plot in characters. Where two curves meet, the one named first is shown."""
    if is_empty(chart):
        return ["nothing was measured"]
    curves = [(one, [(math.log(x), math.log(y)) for x, y in one.points if x > 0 and y > 0]) for one in chart.series]
    levels = [math.log(level.value) for level in chart.levels]
    xs = [x for _, curve in curves for x, _ in curve]
    canvas = _Canvas(xs, [*(y for _, curve in curves for _, y in curve), *levels])
    for level in levels:
        canvas.line((canvas.left, level), (canvas.right, level), "┄")
    for series, curve in reversed(curves):
        for a, b in itertools.pairwise(curve) if series.joined else ():
            canvas.line(a, b, _MARKS[series.whose] if series.whose is Whose.LIMIT else "·")
    for series, curve in reversed(curves):
        for point in curve if series.measured and series.whose is not Whose.LIMIT else ():
            canvas.put(point, _MARKS[series.whose])
    highest, lowest = (amount(math.exp(y), chart.y_unit) for y in (canvas.top, canvas.bottom))
    labels = [highest, *[""] * (PLOT_ROWS - 2), lowest]
    width = max(len(highest), len(lowest))
    lines = [f"{label:>{width}} │{''.join(row)}" for label, row in zip(labels, canvas.cells, strict=True)]
    least, most = place(math.exp(canvas.left)), place(math.exp(canvas.right))
    lines.append(f"{'':>{width}} └{'─' * PLOT_COLUMNS}")
    lines.append(f"{'':>{width}}  {least}{chart.x_label:^{PLOT_COLUMNS - len(least) - len(most)}}{most}")
    named = [f"{_MARKS[series.whose]} {series.name}" for series, _ in curves if series.measured]
    return [*lines, *(f"{'':>{width}}  {line}" for line in _in_lines([*named, *_held(chart.levels, chart.y_unit)]))]


def _in_lines(items: Sequence[str]) -> list[str]:
    """The items beside each other, in as many lines as a plot's width asks for."""
    lines = [items[0]] if items else []
    for item in items[1:]:
        if len(lines[-1]) + 2 + len(item) <= PLOT_COLUMNS:
            lines[-1] += f"  {item}"
        else:
            lines.append(item)
    return lines


class _Canvas:
    """Characters in rows and columns, addressed by the numbers that they stand for."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float]) -> None:
        self.left, self.right, self.bottom, self.top = min(xs), max(xs), min(ys), max(ys)
        self.cells = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]

    def put(self, point: tuple[float, float], mark: str) -> None:
        row = PLOT_ROWS - 1 - _place(point[1], self.bottom, self.top, PLOT_ROWS)
        self.cells[row][_place(point[0], self.left, self.right, PLOT_COLUMNS)] = mark

    def line(self, a: tuple[float, float], b: tuple[float, float], mark: str) -> None:
        for step in range(PLOT_COLUMNS + 1):
            share = step / PLOT_COLUMNS
            self.put((a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])), mark)


def _held(levels: Sequence[Level], unit: str) -> list[str]:
    return [f"┄ {level.name} {amount(level.value, unit)}" for level in levels]


def _place(value: float, least: float, most: float, cells: int) -> int:
    return round((value - least) / (most - least) * (cells - 1)) if most > least else 0


def bar_plot(chart: BarChart) -> list[str]:
    """One bar a line, its number and interval behind it."""
    most = max((bar.value for bar in chart.bars), default=0.0)
    width = max((len(bar.name) for bar in chart.bars), default=0)
    lines = []
    for bar in chart.bars:
        length = round(bar.value / most * BAR_COLUMNS) if most > 0 else 0
        said = amount(bar.value, chart.unit)
        if bar.low is not None and bar.high is not None:
            said += f" ({amount(bar.low, chart.unit)} to {amount(bar.high, chart.unit)})"
        lines.append(f"{bar.name:<{width}} {'█' * length}{'▏' if bar.value and not length else ''} {said}")
    return [*lines, *_held(chart.levels, chart.unit)]


def heat_plot(chart: HeatMap) -> list[str]:
    """Darker is worse, on a scale of decades below the worst block; ! is not finite."""
    known = [value for row in chart.values for value in row if value is not None and value > 0]
    most = max(known, default=0.0)
    lines = ["".join(_shade(value, most) * 2 for value in row) for row in chart.values]
    scale = f"{_SHADES[-1]} up to {error_text(most)}, each lighter shade ten times less; ! not finite"
    return [
        *lines,
        scale,
        f"down: {chart.row_label}" + (f"; across: {chart.column_label}" if chart.column_label else ""),
    ]


def _shade(value: float | None, most: float) -> str:
    if value is None:
        return "!"
    if value <= 0 or most <= 0:
        return _SHADES[0]
    decades = int(math.log10(most / value))
    return _SHADES[max(0, len(_SHADES) - 1 - decades)]
