"""What a drawing is made of, that it is made once, and that a page never waits for it for long."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from grader.figures import Bar, BarChart, Chart, HeatMap, Level, LineChart, Series, Whose
from grader.web import charts
from grader.web.charts import Gallery, draw
from grader.web.drawing import Engine, NoDrawingError

STYLE = (Path(charts.__file__).parent / "static" / "tilegrade.css").read_text(encoding="utf-8")
EVIL = "</text></svg><script>alert(1)</script>"


def memory(*curves: tuple[Whose, list[tuple[float, float]]], levels: tuple[Level, ...] = ()) -> LineChart:
    series = tuple(Series(name=whose.value, whose=whose, points=tuple(points)) for whose, points in curves)
    return LineChart(title="Memory", x_label="T", y_label="peak", y_unit="bytes", series=series, levels=levels)


POWER_LAWS = memory(
    (Whose.OWN, [(t, 8 * t) for t in (64.0, 128.0, 256.0)]),
    (Whose.NAIVE, [(t, 8 * t * t) for t in (64.0, 128.0, 256.0)]),
    levels=(Level(name="all there is", value=2.0**20),),
)
ROOFLINE = LineChart(
    title="Roofline",
    x_label="FLOP a byte",
    y_label="FLOP/s",
    y_unit="FLOP/s",
    series=(
        Series(name="yours", whose=Whose.OWN, points=((2000.0, 5e13),), joined=False),
        Series(name="ceiling", whose=Whose.LIMIT, points=((4.0, 1.6e13), (183.0, 7.7e14), (4000.0, 7.7e14))),
    ),
)
SPEED = BarChart(
    title="Speed-up",
    unit="times",
    bars=(
        Bar(name="yours", whose=Whose.OWN, value=6.0, low=5.5, high=6.5),
        Bar(name="reference", whose=Whose.REFERENCE, value=24.0),
    ),
    levels=(Level(name="all points", value=12.0),),
)
ERRORS = HeatMap(title="Errors", row_label="rows", column_label="columns", values=((0.0, 0.01), (1.0, None)))
EVERY: list[Chart] = [POWER_LAWS, ROOFLINE, SPEED, ERRORS]
NAMES = ["memory", "roofline", "speed", "errors"]


def elements(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter())


def texts(svg: str) -> list[str]:
    return [one.text or "" for one in elements(svg) if one.tag == "text"]


def with_colour(svg: str, colour: str) -> list[ElementTree.Element]:
    return [one for one in elements(svg) if f"var(--{colour})" in (one.get("fill"), one.get("stroke"))]


def middle(element: ElementTree.Element) -> tuple[float, float]:
    found = re.fullmatch(r"translate\(([-\d.]+),([-\d.]+)\)", element.get("transform", ""))
    assert found
    return float(found[1]), float(found[2])


# -- what a drawing is made of -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chart", EVERY, ids=NAMES)
def test_a_drawing_needs_nothing_that_the_content_policy_forbids(chart: Chart) -> None:
    for element in elements(draw(chart)):
        assert element.tag in {"svg", "g", "path", "line", "text", "rect"}
        assert not {name for name in element.attrib if name == "style" or name.startswith("on") or "href" in name}


@pytest.mark.parametrize("chart", EVERY, ids=NAMES)
def test_every_colour_of_a_drawing_is_one_that_the_style_sheet_defines_for_light_and_dark(chart: Chart) -> None:
    used = {
        value
        for element in elements(draw(chart))
        for name, value in element.attrib.items()
        if name in ("fill", "stroke") and value not in ("none", "transparent")
    }
    assert used
    for value in used:
        assert re.fullmatch(r"var\(--[a-z0-9-]+\)", value), f"{value} is the same in the dark"
        assert STYLE.count(f"{value.removeprefix('var(').removesuffix(')')}: ") == 2


def test_strangers_text_is_text_in_a_drawing() -> None:
    bars = BarChart(title=EVIL, unit="bytes", bars=(Bar(name=EVIL, whose=Whose.OWN, value=1.0),))
    svg = draw(bars)
    assert EVIL in "".join(texts(svg))
    assert "<script" not in svg


def test_a_power_law_is_a_straight_line_and_its_exponent_the_slope() -> None:
    svg = draw(POWER_LAWS)
    rises = {}
    for colour in ("chart-own", "chart-naive"):
        marks = sorted(middle(one) for one in with_colour(svg, colour) if one.get("fill") == f"var(--{colour})")
        assert len(marks) == 3
        rises[colour] = [a[1] - b[1] for a, b in itertools.pairwise(marks)]
        assert rises[colour][0] == pytest.approx(rises[colour][1], rel=0.01)
    assert rises["chart-naive"][0] == pytest.approx(2 * rises["chart-own"][0], rel=0.01)


def test_sizes_and_bytes_are_written_as_people_read_them() -> None:
    assert texts(draw(POWER_LAWS)) == ["64", "128", "256", "512 B", "4 KiB", "32 KiB", "256 KiB"]
    assert texts(draw(ROOFLINE)) == [
        "10",
        "100",
        "1,000",
        "20 TFLOP/s",
        "50 TFLOP/s",
        "100 TFLOP/s",
        "200 TFLOP/s",
        "500 TFLOP/s",
    ]


def test_a_level_lies_across_the_whole_drawing() -> None:
    across = [one for one in elements(draw(POWER_LAWS)) if one.get("stroke-dasharray") == "4,3"]
    assert [abs(float(one.get("x2", "0"))) > charts.WIDTH / 2 for one in across] == [True]


def test_curves_differ_in_more_than_colour() -> None:
    looks = charts._LOOKS
    measured = [whose for whose in Whose if whose is not Whose.LIMIT]
    for which in (1, 2):  # broken line, shape
        assert len({str(looks[whose][which]) for whose in measured}) == len(measured)


def test_bars_are_as_long_as_their_values_and_intervals_lie_around_their_ends() -> None:
    svg = draw(SPEED)

    def length(colour: str) -> float:
        # M x,y h LENGTH v ...
        return next(
            abs(float(found[1]))
            for one in with_colour(svg, colour)
            if (found := re.match(r"M[-\d.]+,[-\d.]+h([-\d.]+)", one.get("d", "")))
        )

    assert length("chart-reference") == pytest.approx(4 * length("chart-own"), rel=0.01)
    assert {"yours: 6×", "reference: 24×", "12×"} <= set(texts(svg))
    interval = next(one for one in with_colour(svg, "ink") if one.tag == "line")
    assert abs(float(interval.get("x2", "0"))) == pytest.approx(length("chart-own") / 6, rel=0.05)


def test_an_error_map_marks_the_worst_block_and_what_is_not_finite() -> None:
    svg = draw(ERRORS)
    assert [len(with_colour(svg, f"heat-{step}")) for step in range(charts.HEAT_STEPS)] == [1, 1, 0, 0, 0, 1]
    assert texts(svg) == ["×"]


def test_a_map_of_zeros_is_blank() -> None:
    svg = draw(HeatMap(title="", row_label="", column_label="", values=((0.0, 0.0),)))
    assert len(with_colour(svg, "heat-0")) == 2


@pytest.mark.parametrize("n", [1, 2, 9])
@pytest.mark.parametrize("span", [1.0, 1.5, 1e6])
def test_any_axis_has_a_few_ticks_within_its_ends(n: int, span: float) -> None:
    points = [(64.0 * 2**i, 1000.0 * span ** (i / max(1, n - 1))) for i in range(n)]
    shown = texts(draw(memory((Whose.OWN, points))))
    assert 1 <= len(shown) <= 2 * charts.MOST_TICKS + 2


def test_the_key_names_what_the_drawing_does_not() -> None:
    assert [name for _, _, name in charts.key(POWER_LAWS)] == ["own", "naive", "all there is: 1 MiB"]
    assert [name for _, _, name in charts.key(SPEED)] == ["95 % interval", "all points: 12×"]
    for kind, _, _ in [*charts.key(POWER_LAWS), *charts.key(SPEED), *charts.key(ROOFLINE)]:
        assert f".key-{kind} {{" in STYLE


# -- colours -----------------------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes 2009, severity 1.0: how linear RGB looks to people who lack one kind of cone
BLINDNESS = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
SEES_ALL = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))


def palette(theme: str) -> dict[str, str]:
    light, dark = STYLE.split("@media screen and (prefers-color-scheme: dark)", 1)
    return dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", light if theme == "light" else dark))


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def lab(colour: str, seen_by: tuple[tuple[float, ...], ...]) -> tuple[float, float, float]:
    """CIE L*a*b* of the colour as that eye sees it, under D65."""
    rgb = [min(1.0, max(0.0, sum(m * c for m, c in zip(row, linear(colour), strict=True)))) for row in seen_by]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.0890)
    xyz = [sum(m * c for m, c in zip(row, rgb, strict=True)) / w for row, w in zip(to_xyz, white, strict=True)]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("seen_by", [SEES_ALL, *BLINDNESS.values()], ids=["all", *BLINDNESS])
def test_colours_of_curves_can_be_told_apart(theme: str, seen_by: tuple[tuple[float, ...], ...]) -> None:
    colours = palette(theme)
    curves = ["chart-own", "chart-own-backward", "chart-naive", "chart-reference"]
    for a, b in itertools.combinations(curves, 2):
        assert math.dist(lab(colours[a], seen_by), lab(colours[b], seen_by)) > 20, (a, b)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_mark_stands_out_from_its_card(theme: str) -> None:
    colours = palette(theme)
    card = luminance(colours["card"])
    for name in ("chart-own", "chart-own-backward", "chart-naive", "chart-reference", "chart-limit"):
        mark = luminance(colours[name])
        contrast = (max(card, mark) + 0.05) / (min(card, mark) + 0.05)
        assert contrast >= 3, (name, contrast)  # WCAG 2.2, 1.4.11


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_steps_of_an_error_map_climb_evenly_for_every_eye(theme: str) -> None:
    steps = [lab(palette(theme)[f"heat-{step}"], SEES_ALL)[0] for step in range(charts.HEAT_STEPS)]
    changes = [b - a for a, b in itertools.pairwise(steps)]
    assert all(change < -5 for change in changes) or all(change > 5 for change in changes), steps


# -- drawn once, and never waited for long -----------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was drawn, in order, by the real engine."""
    asked: list[str] = []
    real = charts._draw

    def noting(text: str) -> str:
        asked.append(text)
        return real(text)

    monkeypatch.setattr(charts, "_draw", noting)
    return asked


def test_a_chart_is_drawn_once_and_kept_over_a_restart(tmp_path: Path, drawn: list[str]) -> None:
    first = Gallery(tmp_path / "charts").drawn(EVERY, wait_s=60)
    assert len(drawn) == len(EVERY)
    again = Gallery(tmp_path / "charts").drawn(EVERY, wait_s=0)
    assert again == first
    assert len(drawn) == len(EVERY)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "KEPT_IN_MEMORY", 2)
    gallery = Gallery(tmp_path / "charts")
    gallery.drawn(EVERY, wait_s=60)
    assert len(gallery._memory) == 2


def test_charts_that_say_the_same_are_one_drawing(tmp_path: Path, drawn: list[str]) -> None:
    gallery = Gallery(tmp_path / "charts")
    answers: list[dict[Chart, object]] = []
    askers = [
        threading.Thread(target=lambda: answers.append(dict(gallery.drawn([SPEED], wait_s=60)))) for _ in range(8)
    ]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(drawn) == 1
    assert len(answers) == 8
    assert all(answer[SPEED] == answers[0][SPEED] for answer in answers)


def test_who_does_not_wait_gets_the_rest_the_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on = threading.Event()
    real = charts._draw

    def slow(text: str) -> str:
        may_go_on.wait(30)
        return real(text)

    monkeypatch.setattr(charts, "_draw", slow)
    gallery = Gallery(tmp_path / "charts")
    began = time.monotonic()
    assert gallery.drawn([SPEED], wait_s=0.05) == {}
    assert time.monotonic() - began < 5
    may_go_on.set()
    assert SPEED in gallery.drawn([SPEED], wait_s=30)


def test_a_chart_that_cannot_be_drawn_or_kept_breaks_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "charts").write_text("a file where the folder should be")
    assert SPEED in Gallery(tmp_path / "charts").drawn([SPEED], wait_s=60)

    def die(_text: str) -> str:
        raise ValueError("no")

    monkeypatch.setattr(charts, "_draw", die)
    assert Gallery(tmp_path / "other").drawn([SPEED], wait_s=60) == {}
    assert "a chart was not drawn: no" in caplog.text


def test_a_drawing_that_a_crash_left_half_written_is_drawn_again(tmp_path: Path) -> None:
    gallery = Gallery(tmp_path / "charts")
    whole = gallery.drawn([SPEED], wait_s=60)
    (kept,) = (tmp_path / "charts").rglob("*.svgz")
    kept.write_bytes(kept.read_bytes()[:40])
    assert Gallery(tmp_path / "charts").drawn([SPEED], wait_s=60) == whole


def test_the_engine_can_be_started_before_anybody_waits(drawn: list[str]) -> None:
    charts.warm_up()
    assert len(drawn) == 1


def test_an_empty_chart_has_no_drawing(tmp_path: Path) -> None:
    empty = memory((Whose.OWN, [(64.0, 0.0)]))
    assert Gallery(tmp_path / "charts").drawn([empty], wait_s=60) == {}
    with pytest.raises(ValueError, match="nothing to draw"):
        draw(empty)


def test_more_drawings_than_are_kept_in_memory_are_answered_from_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[str]
) -> None:
    monkeypatch.setattr(charts, "KEPT_IN_MEMORY", 1)
    gallery = Gallery(tmp_path / "charts")
    gallery.drawn(EVERY, wait_s=60)
    assert set(gallery.drawn(EVERY, wait_s=0)) == set(EVERY)
    assert len(drawn) == len(EVERY)


# -- the process that draws -------------------------------------------------------------------------------------------

SMALLEST = '{"mark": "point", "data": {"values": [{}]}}'
# draws, says who drew and whether the engine is in this process, too; then it is killed and can clean nothing up
SERVER = f"""
import os, signal, sys
from grader.web.drawing import Engine
engine = Engine()
engine.draw({SMALLEST!r})
print(engine._process.pid, "vl_convert" in sys.modules, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_engine_draws_outside_of_the_server_and_ends_with_it() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", SERVER], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, within = done.stdout.split()
    assert within == "False", "whatever draws holds Python's lock, and every page waits for it"
    wait_for_the_end_of(int(pid))


def wait_for_the_end_of(pid: int) -> None:
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, "the engine still runs"
        time.sleep(0.01)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def test_an_engine_that_died_costs_one_drawing(engine: Engine) -> None:
    first = engine.draw(SMALLEST)
    assert engine._process is not None
    os.kill(engine._process.pid, signal.SIGKILL)
    wait_for_the_end_of(engine._process.pid)
    with pytest.raises(ValueError, match="ended"):
        engine.draw(SMALLEST)
    assert engine.draw(SMALLEST) == first


def test_an_engine_that_dies_over_a_chart_is_no_error_of_the_page(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charts, "_ENGINE", engine)
    engine.draw(SMALLEST)
    assert engine._process is not None
    os.kill(engine._process.pid, signal.SIGKILL)
    wait_for_the_end_of(engine._process.pid)
    gallery = Gallery(tmp_path / "charts")
    assert gallery.drawn([SPEED], wait_s=60) == {}
    assert gallery.drawn([SPEED], wait_s=60)[SPEED], "the next one draws it"


def test_every_thread_of_the_engine_leaves_the_processor_to_the_server(engine: Engine) -> None:
    engine.draw(SMALLEST)
    assert engine._process is not None
    pid = engine._process.pid
    threads = [int(one.name) for one in Path(f"/proc/{pid}/task").iterdir()]
    assert len(threads) > 1
    assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {10}
    # Linux may share the processor out among sessions first: in one of its own it would have as much as the server
    assert os.getsid(pid) == os.getsid(0)
    assert os.getpgid(pid) != os.getpgrp(), "Ctrl-C is for the server"


@pytest.mark.parametrize("asked", ["{", '{"mark": "no such mark"}', '{"data": 1}', "[]"])
def test_what_the_engine_refuses_does_not_end_it(engine: Engine, asked: str) -> None:
    engine.draw(SMALLEST)
    process = engine._process
    with pytest.raises(NoDrawingError):
        engine.draw(asked)
    assert engine.draw(SMALLEST).startswith("<svg")
    assert engine._process is process


def test_a_chart_that_is_refused_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[str]
) -> None:
    monkeypatch.setattr(charts, "_specification", lambda _chart: {"mark": "no such mark"})
    gallery = Gallery(tmp_path / "charts")
    assert gallery.drawn([SPEED], wait_s=60) == gallery.drawn([SPEED], wait_s=60) == {SPEED: ""}
    assert len(drawn) == 1


# -- where nothing can be drawn ---------------------------------------------------------------------------------------

PAGES_WITHOUT_DRAWINGS = """
import sys
from pathlib import Path
sys.path[:0] = [".", "tests/web"]
from web_campus import corpus, make_campus, stored
from grader import db, doctor
from grader.db import Database
from grader.web import charts
folder = Path(sys.argv[1])
database = Database(f"sqlite:///{folder}/pages.db")
db.upgrade(database)
campus = make_campus(database, folder / "data")
charts.warm_up()
ada = campus.client("ada")
pages = ["/c/demo/flash-attention-forward/leaderboard", "/lesson/memory"]
for name in ("ok-block-pointers", "no-rescale-output"):
    number = campus.graded("ada", stored(name), corpus(name))
    pages += [f"/submissions/{number}", f"/submissions/{number}/report.html"]
for page in pages:
    answer = ada.get(page)
    assert answer.status_code == 200, page
    print(answer.text)
print(*(one for one in doctor.examine_host(campus.settings, unread=[]) if one.name.startswith("vl-")))
"""


@pytest.mark.parametrize(
    ("package", "complaint"),
    [
        pytest.param({}, "ModuleNotFoundError: No module named 'vl_convert'", id="not-installed"),
        pytest.param(
            {
                "vl_convert.py": "def vegalite_to_svg(asked, vl_version, allowed_base_urls):\n"
                "    raise RuntimeError(f'Unsupported Vega-Lite version string {vl_version}\\n\\nStack backtrace:')\n",
                "vl_convert_python-9.9.dist-info/METADATA": "Name: vl-convert-python\nVersion: 9.9\n",
            },
            "RuntimeError: Unsupported Vega-Lite version string 6.4",
            id="a-version-without-our-vega-lite",
        ),
    ],
)
def test_pages_do_without_drawings_where_nothing_can_draw(
    tmp_path: Path, package: dict[str, str], complaint: str
) -> None:
    python = _environment_with(tmp_path / "environment", package)
    done = subprocess.run(
        [python, "-c", PAGES_WITHOUT_DRAWINGS, str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 'class="drawing"' not in done.stdout
    assert "still being drawn" not in done.stdout
    assert done.stdout.count("<figure") == done.stdout.count("There is no drawing of this chart. In words: ") > 9
    (said,) = [line for line in done.stderr.splitlines() if "chart" in line]
    assert complaint in said
    assert "pip install 'tilegrade[web]'" in said
    found = done.stdout.splitlines()[-1]
    assert ("ok=True" if package else "ok=False, detail=\"not installed: pip install 'tilegrade[web]'") in found


def _environment_with(folder: Path, package: dict[str, str]) -> str:
    """This Python with the packages it has, and that one in place of the engine that draws. Returns its path."""
    packages = Path(sysconfig.get_path("purelib"))
    there = folder / packages.relative_to(sys.prefix)
    there.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(Path(sys.executable).resolve())
    (folder / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
    for one in packages.iterdir():
        if not one.name.startswith("vl_convert"):
            (there / one.name).symlink_to(one)
    for name, text in package.items():
        (there / name).parent.mkdir(exist_ok=True)
        (there / name).write_text(text)
    return str(folder / "bin" / "python")
