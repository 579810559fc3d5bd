"""Assignments are data: what is wrong with a folder is said with file, key, value and remedy."""

from datetime import UTC, datetime

import pytest

from grader.assignment import load_assignment
from grader.errors import AssignmentError

TOML = """
title = "Row softmax"
summary = "One pass."
operation = "softmax.online"
entry = "online_softmax"
signature = "online_softmax(x) -> (y, lse)"
deadline = 2027-03-01T23:59:00Z
[points]
numerics = 70
structure = 30
[outputs.y]
[outputs.lse]
own_kernel = false
[tolerance]
slack = 2
[tolerance.floor]
float32 = 2e-5
float16 = 1e-3
bfloat16 = 8e-3
[structure]
axes = { rows = 4, cols = 64 }
max_launches = 1
max_bytes_ratio = 1.6
[[cases]]
name = "random"
tries = "ordinary values"
axes = { rows = 4, cols = 64 }
required = true
"""


@pytest.fixture
def folder(tmp_path):
    def write(toml=TOML, name="row-softmax"):
        path = tmp_path / name
        path.mkdir()
        (path / "assignment.toml").write_text(toml)
        (path / "handout.md").write_text("# Row softmax\n\n## Recurrence\n")
        (path / "starter.py").write_text("def online_softmax(x): ...\n")
        return path

    return write


def test_a_good_folder_loads_with_its_defaults(folder):
    found = load_assignment(folder())
    assert found.slug == "row-softmax"
    assert found.deadline == datetime(2027, 3, 1, 23, 59, tzinfo=UTC)
    assert [(one.name, one.own_kernel) for one in found.outputs] == [("y", True), ("lse", False)]
    assert found.case("random").dtype == "float32"
    assert found.tolerance.gradient_floor == found.tolerance.floor


def test_the_digest_changes_with_any_of_the_three_files(folder):
    path = folder()
    before = load_assignment(path).digest
    (path / "handout.md").write_text("# Softmax of rows\n")
    assert load_assignment(path).digest != before


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        pytest.param(
            "required = true", "requird = true", r"cases\[0\].requird: unknown key; did you mean 'required'\?"
        ),
        pytest.param("slack = 2", 'slack = "two"', r"tolerance.slack: 'two' is not int or float"),
        pytest.param("slack = 2", "slack = nan", r"tolerance.slack: nan must be a number"),
        pytest.param("slack = 2", "slack = true", r"tolerance.slack: True is not int or float"),
        pytest.param("numerics = 70", "numerics = 60", r"add up to 90; make it 100"),
        pytest.param(
            "structure = 30", "structure = 10\nmemory = 20", r"points.memory: an axis has points exactly when"
        ),
        pytest.param(
            "cols = 64 }\nrequired", "cols = 0 }\nrequired", r"cases\[0\].axes.cols: 0 must be a whole number"
        ),
        pytest.param("required = true", "", r"cases: no case is required"),
        pytest.param('entry = "online_softmax"', 'entry = " "', r"entry: is empty"),
        pytest.param('entry = "online_softmax"', "", r"entry: missing; add it"),
        pytest.param("required = true", 'dtype = "float64"', r"cases\[0\].dtype: 'float64' is not one of float32"),
        pytest.param("[points]", "[points", r"not valid TOML"),
        pytest.param(
            "[points]",
            "[explained]\nRecurence = ['wrong-base']\n[points]",
            r"explained.Recurence: the handout has no such heading; did you mean 'Recurrence'\?",
        ),
        pytest.param(
            "[points]",
            "[explained]\nRecurrence = ['wrong-base', 'wrong-base']\n[points]",
            r"'wrong-base' stands below 'Recurrence' already",
        ),
        pytest.param("max_launches = 1", "max_launches = 0", r"structure.max_launches: 0 must be at least 1"),
    ],
)
def test_a_bad_value_is_named_with_its_remedy(folder, old, new, complaint):
    assert old in TOML
    path = folder(TOML.replace(old, new))
    with pytest.raises(AssignmentError, match=complaint) as caught:
        load_assignment(path)
    assert str(path / "assignment.toml") in str(caught.value)


@pytest.mark.parametrize(
    ("speed", "complaint"),
    [
        pytest.param("sizes = [5]", r"speed.sizes\[0\]: 5 is not dict", id="size-that-is-no-table"),
        pytest.param("sizes = [{ rows = 0 }]", r"speed.sizes\[0\].rows: 0 must be a whole number", id="size-of-zero"),
        pytest.param("sizes = []", r"speed.sizes: names no size", id="no-size"),
        pytest.param("sizes = [{ rows = 8 }]\ngpu_steps.h200 = 5", r"speed.gpu_steps.h200: 5 is not list", id="gpu"),
        pytest.param("sizes = [{ rows = 8 }]\ngpu_steps = 5", r"speed.gpu_steps: 5 is not dict", id="gpus"),
        pytest.param("sizes = [{ rows = 8 }]\ngpu_steps.h200 = [5]", r"steps.h200\[0\] must be a table", id="step"),
        pytest.param(
            "sizes = [{ rows = 8 }]\ngpu_steps.'RTX 4090' = []",
            r"speed.gpu_steps.RTX 4090: is no model as workers name them; write 'rtx4090'",
            id="model",
        ),
    ],
)
def test_a_bad_speed_table_is_named_with_its_remedy(folder, speed, complaint):
    points = TOML.replace("structure = 30", "structure = 20\nspeed = 10")
    toml = f"{points}\n[speed]\nsteps = [{{ speedup = 2.0, fraction = 1.0 }}]\n{speed}\n"
    with pytest.raises(AssignmentError, match=complaint):
        load_assignment(folder(toml))


def test_a_missing_file_is_named(folder):
    path = folder()
    (path / "starter.py").unlink()
    with pytest.raises(AssignmentError, match=r"starter.py: missing"):
        load_assignment(path)


def test_the_floor_grows_with_the_scores(folder):
    tolerance = load_assignment(folder(TOML.replace("slack = 2", "slack = 2\nscore_slope = 3e-7"))).tolerance
    limit = tolerance.limit(baseline_rel_error=1e-6, dtype="float32", largest_score=100.0, gradient=False)
    assert limit == pytest.approx(2e-6 + 2e-5 + 3e-5)
