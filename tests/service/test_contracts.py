"""Lists that are kept by hand name all that there is: the import contracts, and CONTRIBUTING.md."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRACTS = {
    contract["name"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}


def modules(folder: str) -> set[str]:
    found = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / folder).glob("*.py"))
    return {".".join(path.parts) for path in found if path.name != "__init__"}


def test_all_of_the_workers_but_the_door_are_kept_from_the_service():
    contract = CONTRACTS["only the Celery door of the workers knows the service"]
    assert set(contract["source_modules"]) == (modules("workers") | {"workers.devices"}) - {"workers.tasks"}


def test_every_module_of_the_workers_is_the_candidates_or_kept_from_it():
    contract = CONTRACTS["the candidate holds nothing of the examiner's"]
    own, kept = set(contract["source_modules"]), set(contract["forbidden_modules"])
    assert own & kept == set()
    assert own | kept == modules("workers") | modules("workers/devices") | {"grader", "reference"}


def test_every_module_of_the_service_stands_on_a_floor():
    floors = CONTRACTS["arrows of the service point down, floor by floor"]["layers"]
    assert {name for floor in floors for name in floor.split(" : ")} == modules("grader") | {"grader.web"}


def test_where_things_go_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:grader|workers|reference|tests|docs|scripts|assignments)/[^`<* ]*)[^`]*`", text)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_changelog_tells_no_history_before_the_first_release():
    unreleased, _, released = (ROOT / "CHANGELOG.md").read_text().partition("## Unreleased")[2].partition("\n## ")
    if not released:
        history = r"\b(?:(?:is|are|has|have|needs?)\s+now|now\s+(?:is|are|has|have|needs?)|no\s+longer)\b"
        assert re.findall(history, unreleased) == []
