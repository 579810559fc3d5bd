"""Every file of the corpus gets the answer written beside it, through the real sandbox and examiner.

Those of corpus/hostile are graded in tests/hostile.
"""

import tomllib
from pathlib import Path

import pytest

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
EXPECTED = tomllib.loads((CORPUS / "expected.toml").read_text())
AXES = ("numerics", "memory", "structure")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def accepted(want):
    """Headline verdicts that are right for this file."""
    words = {want["verdict"], *want.get("accept", ())}
    if want["verdict"] == "wrong" and want["numerics"] == "pass":
        words.add("partial")
    return words


def planted():
    return [
        pytest.param(name, want, id=name.removesuffix(".py"))
        for name, want in sorted(EXPECTED.items())
        if not name.startswith("hostile/")
    ]


@pytest.mark.parametrize(("name", "want"), planted())
def test_a_file_gets_the_answer_written_beside_it(name, want, grade_source):
    _, grade = grade_source((CORPUS / name).read_bytes(), want["assignment"])
    assert grade["verdict"] in accepted(want), want["hint"]
    if grade["verdict"] == "full":
        assert grade["fault"] in (None, "")
        assert {axis["verdict"] for axis in grade["axes"].values()} <= {"pass", "not_measured"}
        assert grade["score"]["points"] == grade["score"]["out_of"]
        return
    assert grade["fault"] == want["fault"], want["hint"]
    if grade["verdict"] in ("error", "limit"):
        assert grade["axes"]["numerics"]["verdict"] == "fail"
        return
    answered = {name: grade["axes"][name]["verdict"] for name in AXES if want[name] != "na"}
    assert answered == {name: want[name] for name in AXES if want[name] != "na"}
