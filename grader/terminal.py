"""A report on a terminal: rich tables, small plots in text. What students wrote is text here, never markup."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from grader.report import BarChart, Block, Cell, HeatMap, Hostile, LineChart, Report, Section, Table, TextBlock
from grader.wording import bytes_text, error_text, in_words

WIDE = 90
LEFT_OUT_WHEN_NARROW = frozenset({"what it tries"})  # the handout says it too
PLOT_ROWS, PLOT_COLUMNS = 12, 48
BAR_COLUMNS = 32
_MARKS = "●○×+"
_SHADES = "·░▒▓█"
_STYLES = {
    "pass": "green",
    "full": "green",
    "partial": "yellow",
    "held": "yellow",
    "fail": "red",
    "wrong": "red",
    "error": "red",
    "limit": "red",
    "refused": "red",
}


def print_report(report: Report, console: Console) -> None:
    """Print the whole report. Nothing in it is read as rich markup or as a terminal code."""
    title = Text(report.title, style="bold")
    title.append(f"  {report.verdict}", style=_STYLES.get(report.verdict, ""))
    if report.fault:
        title.append(f"  {report.fault}", style="bold")
    console.print(title)
    console.print(Text(report.headline))
    for section in report.sections:
        _print_section(section, console)


def _print_section(section: Section, console: Console) -> None:
    heading = Text(f"\n{section.title}", style="bold underline")
    if section.verdict:
        heading.append(f"  {in_words(section.verdict)}", style=_STYLES.get(section.verdict, "dim"))
    if section.points:
        heading.append(f"  {section.points}", style="not underline")
    console.print(heading)
    for sentence in section.sentences:
        console.print(Text(sentence))
    for block in section.blocks:
        _print_block(block, console)


def _print_block(block: Block, console: Console) -> None:
    if isinstance(block, Table):
        console.print(_table(block, console.width))
        return
    console.print(Text(block.title, style="italic"))
    if isinstance(block, TextBlock):
        console.print(Padding(Text(block.text.plain), (0, 0, 0, 2)))
    elif isinstance(block, LineChart):
        _print_lines(line_plot(block), console)
    elif isinstance(block, BarChart):
        _print_lines(bar_plot(block), console)
    else:
        _print_lines(heat_plot(block), console)


def _table(table: Table, console_width: int) -> RichTable:
    shown = RichTable(title=Text(table.title), title_justify="left", box=box.SIMPLE, show_edge=False)
    places = [i for i, name in enumerate(table.columns) if console_width >= WIDE or name not in LEFT_OUT_WHEN_NARROW]
    for i in places:
        justify: JustifyMethod = "right" if i in table.numeric else "left"
        # names of probes and kernels stay whole where there is room; the words beside them can wrap
        longest = max((len(_plain(row[i])) for row in table.rows), default=0)
        whole = i == 0 and (console_width >= WIDE or longest <= console_width // 3)
        shown.add_column(Text(table.columns[i]), justify=justify, overflow="fold", no_wrap=whole)
    for number, row in enumerate(table.rows):
        mark = table.marks[number] if number < len(table.marks) else ""
        cells = [Text(_plain(row[i])) for i in places]
        for cell in cells:
            if mark and cell.plain.split(":")[0] == in_words(mark):
                cell.stylize(_STYLES.get(mark, "dim"))
        shown.add_row(*cells)
    return shown


def _plain(cell: Cell) -> str:
    return cell.plain if isinstance(cell, Hostile) else cell


def _print_lines(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(Text(f"  {line}"), no_wrap=True, overflow="crop")


def line_plot(chart: LineChart) -> list[str]:
    """A log-log plot in characters. Where two curves meet, the one named first is shown."""
    curves = [(series.name, [(x, y) for x, y in series.points if x > 0 and y > 0]) for series in chart.series]
    points = [point for _, curve in curves for point in curve]
    if not points:
        return ["nothing was measured"]
    xs, ys = [math.log(x) for x, _ in points], [math.log(y) for _, y in points]
    grid = [[" "] * PLOT_COLUMNS for _ in range(PLOT_ROWS)]
    for mark, (_, curve) in reversed(list(zip(_MARKS, curves, strict=False))):
        for x, y in curve:
            column = _place(math.log(x), min(xs), max(xs), PLOT_COLUMNS)
            row = PLOT_ROWS - 1 - _place(math.log(y), min(ys), max(ys), PLOT_ROWS)
            grid[row][column] = mark
    labels = [""] * PLOT_ROWS
    show = bytes_text if chart.y_unit == "bytes" else lambda value: f"{value:.3g} {chart.y_unit}"
    labels[0], labels[-1] = show(math.exp(max(ys))), show(math.exp(min(ys)))
    width = max(len(label) for label in labels)
    lines = [f"{label:>{width}} │{''.join(row)}" for label, row in zip(labels, grid, strict=True)]
    least, most = f"{math.exp(min(xs)):,.0f}", f"{math.exp(max(xs)):,.0f}"
    lines.append(f"{'':>{width}} └{'─' * PLOT_COLUMNS}")
    lines.append(f"{'':>{width}}  {least}{chart.x_label:^{PLOT_COLUMNS - len(least) - len(most)}}{most}")
    named = "  ".join(f"{mark} {name}" for mark, (name, _) in zip(_MARKS, curves, strict=False))
    return [*lines, f"{'':>{width}}  {named}"]


def _place(value: float, least: float, most: float, cells: int) -> int:
    return round((value - least) / (most - least) * (cells - 1)) if most > least else 0


def bar_plot(chart: BarChart) -> list[str]:
    """One bar a line, its number behind it."""
    most = max((value for _, value in chart.bars), default=0.0)
    width = max((len(name) for name, _ in chart.bars), default=0)
    lines = []
    for name, value in chart.bars:
        length = round(value / most * BAR_COLUMNS) if most > 0 else 0
        said = bytes_text(value) if chart.unit == "bytes" else f"{value:g}"
        lines.append(f"{name:<{width}} {'█' * length}{'▏' if value and not length else ''} {said}")
    return lines


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
