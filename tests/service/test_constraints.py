"""Every package of every install is pinned, at the version that these tests run with."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {"cpu": ("web", "worker", "dev"), "gpu": ("web", "worker", "dev", "gpu")}
PYTHONS = ("3.11.0", "3.11.9", "3.12.9", "3.13.9")


def pins(device: str) -> dict[str, str]:
    lines = (ROOT / f"constraints-{device}.txt").read_text().splitlines()[1:]
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines)
    return found


def needed(requirements: list[str], python: str) -> dict[str, list[Requirement]]:
    """All that these requirements bring on that Python, as far as what is installed here knows."""
    environment = default_environment() | {
        "python_full_version": python,
        "python_version": python.rpartition(".")[0],
    }
    found: dict[str, list[Requirement]] = {}
    seen = set()
    todo = [Requirement(one) for one in requirements]
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        found.setdefault(name, []).append(one)
        for extra in ("", *one.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                brought = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:  # of another Python or a GPU
                continue
            wanted = [Requirement(text) for text in brought]
            todo += [w for w in wanted if w.marker is None or w.marker.evaluate(environment | {"extra": extra})]
    return found


@pytest.mark.parametrize("device", EXTRAS)
@pytest.mark.parametrize("python", PYTHONS)
def test_whatever_an_install_brings_is_pinned_and_the_pins_agree(device: str, python: str) -> None:
    roots = [*PROJECT["dependencies"]]
    for extra in EXTRAS[device]:
        roots += PROJECT["optional-dependencies"][extra]
    pinned = pins(device)
    found = needed(roots, python)
    if device == "gpu":  # the torch that is installed here may do without
        found |= {"nvidia-cublas": []}
    assert set(found) - set(pinned) == set()
    ours = {canonicalize_name(Requirement(text).name) for text in roots}
    for name, requirements in found.items():
        for one in requirements:
            # another device's torch asks for other versions
            if name in ours or device in _installed():
                assert one.specifier.contains(pinned[name], prereleases=True), one


def test_both_devices_take_the_same_but_for_torch_and_what_it_needs() -> None:
    cpu, gpu = pins("cpu"), pins("gpu")
    assert set(cpu) <= set(gpu)
    assert {name for name in cpu if cpu[name] != gpu[name]} <= {"torch", "setuptools"}
    assert {name for name in set(gpu) - set(cpu) if not name.startswith(("nvidia-", "cuda-"))} == set()


def _installed() -> list[str]:
    """The devices for which `make` has installed this environment."""
    return [device for device in EXTRAS if (Path(sys.prefix) / f".installed-{device}").exists()]


@pytest.mark.skipif(not _installed(), reason="this environment was not installed by `make`")
def test_these_tests_run_with_the_pinned_versions() -> None:
    pinned = pins(_installed()[-1])
    here = {canonicalize_name(one.metadata["Name"]): one.version for one in importlib.metadata.distributions()}
    other = {
        name: f"{here[name]}, pinned {version}; `make setup` installs that"
        for name, version in pinned.items()
        if name in here and Version(here[name]).public != version
    }
    assert other == {}


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "docker").glob("*.Dockerfile")), ROOT / "scripts" / "install-python-packages"],
    ids=lambda path: path.name,
)
def test_whoever_installs_the_project_keeps_to_the_pins(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    (installing,) = [line for line in text.splitlines() if re.search(r"\bpip\b.* install\b", line)]
    assert re.search(r'--constraint "?constraints-(cpu|gpu|\$device)\.txt', installing)
    for name in re.findall(r"constraints-(?:cpu|gpu)\.txt", installing):
        assert re.search(rf"^COPY .*{name}", text, re.MULTILINE)
