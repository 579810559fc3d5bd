"""The lesson's widget: what the score path of attention costs against T, with one's own measurements laid over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flask import Blueprint, render_template, request

from grader.figures import Level, LineChart, Series, Whose
from grader.score_path import ITEM_BYTES, AtT, Mode, Shape, at, flash_bytes, naive_bytes, said
from grader.web.house import house
from grader.web.own_points import OwnPoint, own_points
from grader.web.security import viewer

bp = Blueprint("lesson", __name__)

GB = 10**9
OWN_SUBMISSIONS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Slider:
    """A whole number that the reader moves between two ends."""

    name: str
    label: str
    low: int
    high: int
    step: int
    start: int  # the lesson's example
    power: bool = False  # it moves the exponent of a power of two

    def read(self, text: str | None) -> int:
        """The nearest number that the slider can stand on; where it starts for what is no number."""
        try:
            value = int(text or "")
        except ValueError:
            return self.start
        value = min(max(value, self.low), self.high)
        return min(self.low + round((value - self.low) / self.step) * self.step, self.high)


SLIDERS = (
    Slider(name="log2_t", label="Context length T", low=6, high=17, step=1, start=13, power=True),
    Slider(name="batch", label="Batch", low=1, high=64, step=1, start=8),
    Slider(name="heads", label="Heads", low=1, high=128, step=1, start=32),
    Slider(name="head_dim", label="Head dim", low=16, high=256, step=16, start=128),
    Slider(name="gb", label="GPU memory in GB", low=8, high=288, step=1, start=80),
)
SHOWN_T = tuple(1 << i for i in range(SLIDERS[0].low, SLIDERS[0].high + 1))
DTYPES = {"float32": "float32", "bfloat16": "bfloat16 or float16", "float8": "float8"}
MODES = {Mode.CAPACITY: "Capacity: bytes that must exist", Mode.TRAFFIC: "Traffic: bytes that are moved"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Where the sliders stand."""

    values: dict[str, int]  # by the name of the slider
    dtype: str
    mode: Mode

    @classmethod
    def read(cls, form: Mapping[str, str]) -> Asked:
        """Any text gives a page: what does not fit is where the lesson's example has it."""
        dtype, mode = form.get("dtype"), form.get("mode")
        return cls(
            values={slider.name: slider.read(form.get(slider.name)) for slider in SLIDERS},
            dtype=dtype if dtype in DTYPES else "bfloat16",
            mode=Mode(mode) if mode in set(Mode) else Mode.CAPACITY,
        )

    @property
    def t(self) -> int:
        return 1 << self.values["log2_t"]

    @property
    def shape(self) -> Shape:
        of = self.values
        return Shape(batch=of["batch"], heads=of["heads"], head_dim=of["head_dim"], dtype=self.dtype)

    @property
    def memory_bytes(self) -> int:
        return self.values["gb"] * GB


@bp.get("/lesson/memory")
def memory() -> str:
    """The page. Its script asks for it again whenever a slider moves, and takes the part that changed."""
    asked = Asked.read(request.args)
    with house().database.read() as db:
        own = own_points(db, house().catalog, user_id=viewer().id, most=OWN_SUBMISSIONS)
    own = [point for point in own if point.mode is asked.mode]
    return render_template(
        "lesson.html",
        asked=asked,
        sliders=SLIDERS,
        dtypes=DTYPES,
        modes=MODES,
        item_bytes=ITEM_BYTES,
        said=said(asked.shape, t=asked.t, memory_bytes=asked.memory_bytes, mode=asked.mode),
        rows=[at(asked.shape, t, asked.mode) for t in SHOWN_T],
        here=at(asked.shape, asked.t, asked.mode),
        chart=_chart(asked, own),
        own=[_beside(point, asked) for point in own],
        measured_as=own[0] if own else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One measured point and what the curves say at its place."""

    point: OwnPoint
    scaled: int  # bytes, times as many heads as the sliders say
    curves: AtT


def _beside(point: OwnPoint, asked: Asked) -> Beside:
    return Beside(point=point, scaled=_scaled(point, asked), curves=at(asked.shape, point.t, asked.mode))


def _scaled(point: OwnPoint, asked: Asked) -> int:
    """Heads do the same work side by side, so bytes grow with their number; nothing else is assumed."""
    return point.size_bytes * asked.shape.batch * asked.shape.heads // point.shape.batch


def _chart(asked: Asked, own: list[OwnPoint]) -> LineChart:
    shape, mode = asked.shape, asked.mode
    series = [
        Series(name=name, whose=whose, points=tuple((float(t), float(bytes_at(shape, t, mode))) for t in SHOWN_T))
        for name, whose, bytes_at in (("naive", Whose.NAIVE, naive_bytes), ("Flash", Whose.REFERENCE, flash_bytes))
    ]
    if own:
        points = tuple((float(point.t), float(_scaled(point, asked))) for point in own)
        series.insert(0, Series(name="yours, measured", whose=Whose.OWN, points=points, joined=False))
    line = Level(name="GPU memory", value=float(asked.memory_bytes))
    return LineChart(
        title="Bytes of the score path against T",
        x_label="T",
        y_label="bytes that must exist" if mode is Mode.CAPACITY else "bytes moved to and from HBM",
        y_unit="B",
        series=tuple(series),
        levels=(line,) if mode is Mode.CAPACITY else (),
    )
