"""docs/assignments.md is followed to the letter: its files, its commands, and what it says that they print."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from grader.assignment import load_assignment

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
