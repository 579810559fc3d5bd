"""Measurements to and from JSON: nothing is lost, and what does not fit is named."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grader import measurement
from grader.measurement import Examination, FailureKind, MemoryPoint

STORED = sorted((Path(__file__).resolve().parents[1] / "web" / "examinations").glob("*.json.gz"))


def text_of(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name.partition(".")[0])
def test_what_is_read_is_written_again_as_it_was(path: Path) -> None:
    found = measurement.loads(text_of(path))
    again = measurement.loads(measurement.dumps(found))
    assert again == found
    assert json.loads(measurement.dumps(again)) == json.loads(measurement.dumps(found))


def test_every_measurement_is_looked_at_by_something() -> None:
    root = Path(__file__).resolve().parents[2]
    text = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("grader", "workers", "benchmarks")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".html")
    )
    read = set(re.findall(r"\.(\w+)\b", text))
    kinds = [one for one in vars(measurement).values() if dataclasses.is_dataclass(one)]
    assert len(kinds) > 20
    fields = {f"{kind.__name__}.{one.name}": one.name for kind in kinds for one in dataclasses.fields(kind)}
    assert [name for name, last in fields.items() if last not in read] == []


def change(*steps: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(data: Any) -> None:
        for step in steps[:-1]:
            data = data[step]
        data[steps[-1]] = to

    return apply


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param(change("seed", to="7"), "Examination.seed: expected int, found str", id="text-for-number"),
        pytest.param(change("seed", to=True), "Examination.seed: expected int, found bool", id="bool-for-number"),
        pytest.param(change("seed", to=None), "Examination.seed: expected int, found NoneType", id="none"),
        pytest.param(change("memory", to={}), "Examination.memory: expected list, found dict", id="no-list"),
        pytest.param(
            change("memory", 1, "peak_bytes", to=1.5),
            "Examination.memory[1].peak_bytes: expected int, found float",
            id="in-a-list",
        ),
        pytest.param(
            change("versions", "torch", to=2), "Examination.versions.torch: expected str, found int", id="in-a-dict"
        ),
        pytest.param(
            change("probes", 0, "type", to="Other"),
            "Examination.probes[0]: expected one of ['ProbeFailed', 'ProbeMeasured']",
            id="unknown-kind",
        ),
        pytest.param(
            change("probes", 0, "outputs", 0, "rel_error", to="small"),
            "Examination.probes[0].outputs[0].rel_error: expected float, found str",
            id="optional",
        ),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(wrong: Callable[[Any], None], said: str) -> None:
    data = json.loads(text_of(next(path for path in STORED if "ok-" in path.name)))
    wrong(data)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        measurement.from_json(Examination, data)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ValueError, match=r"^MemoryPoint: .*missing.*'peak_bytes'"):
        measurement.from_json(MemoryPoint, {"size": 96})


def test_whole_numbers_are_read_as_floats_and_unknown_fields_are_left_out() -> None:
    data = json.loads(text_of(STORED[0]))
    plain = copy.deepcopy(data)
    data["of a later edition"] = [1, 2]
    data["stages"] = [{"name": "audit", "seconds": 2}]
    plain["stages"] = [{"name": "audit", "seconds": 2.0}]
    found = measurement.from_json(Examination, data)
    assert found == measurement.from_json(Examination, plain)
    assert type(found.stages[0].seconds) is float


def test_a_word_that_no_enumeration_has_is_refused() -> None:
    with pytest.raises(ValueError, match="'unheard-of' is not a valid FailureKind"):
        measurement.from_json(FailureKind, "unheard-of")
