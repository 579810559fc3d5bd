"""docs/assignments.md is followed to the letter: its files, its commands, and what it says that they print."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from grader import assignment
from grader.assignment import Assignment, load_assignment
from grader.errors import AssignmentError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "assignments.md").read_text(encoding="utf-8")
FILES = {
    path: text + "\n" for path, _, text in re.findall(r"^`([^`\n]+)`:\n\n(`{3,})\w*\n(.*?)\n\2$", PAGE, re.M | re.S)
}
SLUG = "fused-cross-entropy"
MADE = {
    f"assignments/{SLUG}/assignment.toml",
    f"assignments/{SLUG}/handout.md",
    f"assignments/{SLUG}/starter.py",
    "reference/fused_cross_entropy.py",
    "reference/kernels/fused_cross_entropy.py",
}
MISTAKEN = f"tests/corpus/{SLUG}/no-rescale-denominator.py"


def printed_by(command: str) -> list[str]:
    """Lines that the page shows below a command."""
    blocks = re.findall(r"^```console\n(.*?)\n```$", PAGE, re.M | re.S)
    return [line for block in blocks for line in block.splitlines()[1:] if block.startswith(f"$ {command}\n")]


def commands() -> list[list[str]]:
    """What the page says to type, in order."""
    blocks = re.findall(r"^```sh\n(.*?)\n```$", PAGE, re.M | re.S)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


def write_files(project: Path) -> None:
    for path, text in FILES.items():
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(text, encoding="utf-8")


def test_the_page_holds_every_file_of_an_assignment():
    assert {*MADE, "reference/fused_cross_entropy_mistakes.py", MISTAKEN} == set(FILES)
    assert [command[:2] for command in commands()] == [
        ["assignment", "new"],
        ["grade", MISTAKEN],
        ["course", "assign"],
    ]


def test_code_on_the_page_keeps_the_rules_of_the_project(project):
    write_files(project)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", str(ROOT / "pyproject.toml"), "reference"],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_handout_names_every_visible_probe_and_no_hidden_one(project):
    write_files(project)
    found = load_assignment(project / "assignments" / SLUG)
    table = found.handout.partition("## What is tried")[2].partition("## Points")[0]
    assert set(re.findall(r"`([a-z0-9-]+)`", table)) == {case.name for case in found.cases if not case.hidden}


# -- the tables of keys ------------------------------------------------------------------------------------------------


class Recording(dict):
    """A TOML table that notes which of its keys are asked for, and those of the tables within it."""

    def __init__(self, table: dict, where: str, asked: set[tuple[str, str]]) -> None:
        self.where, self.asked = where, asked
        super().__init__({key: self._within(key, value) for key, value in table.items()})

    def _within(self, key: str, value: object) -> object:
        if isinstance(value, dict):
            # outputs are named by the author
            return Recording(value, self.where if self.where == "outputs" else _joined(self.where, key), self.asked)
        if isinstance(value, list):
            return [self._within(key, one) for one in value]
        return value

    def __contains__(self, key: object) -> bool:
        self.asked.add((self.where, str(key)))
        return super().__contains__(key)


def _joined(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def loaded(data: dict) -> Assignment:
    file = Path("assignment.toml")
    return assignment._assignment(assignment._Table(file, "", data), "doubling", "## Heading", "", "")


# every key that there is; `test_every_key_that_the_loader_asks_for...` sees to it
EVERYTHING = tomllib.loads(
    """
    title = "T"
    summary = "S"
    operation = "a.b"
    entry = "double"
    entry_kind = "autograd"
    signature = "double(x) -> y"
    target_gpu = "sm_80"
    deadline = 2030-01-01T00:00:00Z
    explained = { Heading = ["wrong-scale"] }
    outputs.y = { own_kernel = false, gradient = true }
    points = { numerics = 40, structure = 20, memory = 20, speed = 20 }
    limits = { load_s = 9, call_s = 9, total_s = 9, memory_mib = 999, output_kib = 9, attempts = 9 }

    [tolerance]
    slack = 2
    score_slope = 1.0
    floor = { float32 = 1, float16 = 1, bfloat16 = 1 }
    gradient_floor = { float32 = 2, float16 = 2, bfloat16 = 2 }

    [structure]
    axes = { rows = 9 }
    options = { flag = true }
    dtype = "float16"
    max_launches = 9
    max_backward_launches = 9
    max_bytes_ratio = 9
    max_tile_elements = 9
    torch_ops = ["add"]
    forbidden_ops = ["mm"]
    unread_inputs = ["x"]

    [memory]
    axis = "T"
    along = ["rows"]
    sizes = [1, 2]
    cuda_sizes = [3, 4]
    axes = { columns = 9 }
    cuda_axes = { columns = 8 }
    pass_exponent = 9
    dtype = "float16"

    [speed]
    sizes = [{ rows = 9 }]
    dtype = "float16"
    options = { flag = true }
    steps = [{ speedup = 9, fraction = 1.0 }]
    gpu_steps.h200 = [{ speedup = 8, fraction = 1.0 }]
    replay = "top"

    [[cases]]
    name = "random"
    tries = "t"
    axes = { rows = 9 }
    required = true

    [[cases]]
    name = "other"
    axes = { rows = 9 }
    tries = "t"
    points = 9
    required = true
    hidden = true
    fill = "large"
    dtype = "float16"
    layout = "strided"
    check = "guard"
    options = { flag = true }
    devices = ["cuda"]
    """
)
AUTHORS = {("outputs", "y"), ("explained", "Heading")}  # names that an author chooses
# tables with keys of their own that one row of the page explains
IN_ONE_ROW = {"tolerance.floor", "tolerance.gradient_floor", "speed.steps", "speed.gpu_steps", "speed.gpu_steps.h200"}


def key_rows() -> dict[tuple[str, str], str]:
    """The default, as the page has it, of every key by its table."""
    rows, where = {}, ""
    for line in PAGE.partition("\n## Every key\n")[2].splitlines():
        if found := re.match(r"`\[+(\w+)\]+`", line):
            where = found[1]
        if found := re.match(r"\| `(\w+)` \| [^|]+ \| ([^|]+) \| [^|]+ \|$", line):
            assert (where, found[1]) not in rows
            rows[where, found[1]] = found[2]
    return rows


def test_every_key_that_the_loader_asks_for_is_on_the_page_and_no_other():
    asked: set[tuple[str, str]] = set()
    loaded(Recording(EVERYTHING, "", asked))
    own = {(where, key) for where, key in asked if where not in IN_ONE_ROW} - AUTHORS
    assert own == set(key_rows())
    set_here = {(where, key) for where, key in own if key in _table(EVERYTHING, where)}
    assert set_here == own, "EVERYTHING lacks a key, so keys within it may be missing from the page"


def _table(data: dict, where: str) -> dict:
    """The table whose keys a heading of the page is about, where the page can be tried out."""
    table = data[where] if where else data
    return table["y"] if where == "outputs" else table[-1] if where == "cases" else table


@pytest.mark.parametrize(("where", "key"), key_rows(), ids=[f"{where}.{key}" for where, key in key_rows()])
def test_defaults_on_the_page_are_those_of_the_loader(where, key):
    default = key_rows()[where, key]
    data = copy.deepcopy(EVERYTHING)
    del _table(data, where)[key]
    if key in ("memory", "speed"):  # an axis has points exactly where it has a table
        data.pop(key, None)
        data["points"].pop(key, None)
        data["points"]["numerics"] = 60
    if default == "needed":
        with pytest.raises(AssignmentError, match=f"{key}: missing|always have points"):
            loaded(data)
        return
    without = loaded(data)
    if literal := re.fullmatch("`(.*)`", default):
        _table(data, where)[key] = tomllib.loads(f"it = {literal[1]}")["it"]
        assert loaded(data) == without
    else:
        assert without != loaded(EVERYTHING)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_assignment_made_by_the_page_passes_its_check_and_names_a_planted_mistake(project, tilegrade):
    new, grade, _ = commands()
    assert {str(Path(path).relative_to(project)) for path in tilegrade(*new).stdout.splitlines()[:-1]} == MADE
    unwritten = tilegrade("assignment", "check", SLUG, status=2).stderr
    first, *rest = printed_by(f"tilegrade assignment check {SLUG}")
    assert unwritten.splitlines()[0] == first

    write_files(project)
    check = tilegrade("assignment", "check", SLUG).stdout.splitlines()
    assert check[: len(rest)] == rest
    assert "no-rescale-denominator" in tilegrade("mistakes", SLUG).stdout

    found = json.loads(tilegrade(*grade, "--json").stdout)
    assert (found["verdict"], found["fault"]) == ("wrong", "no-rescale-denominator")
    assert found["axes"]["numerics"]["points"] < 70
