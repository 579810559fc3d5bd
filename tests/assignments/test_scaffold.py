"""`tilegrade assignment new`: what it makes, what it refuses, and what is left to write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grader import scaffold
from grader.assignment import load_assignment
from grader.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
LONG = "-".join(["abcdefg"] * 8)[: scaffold.LONGEST_SLUG]

KERNEL = '''\
"""Twice x."""

import torch
import triton
import triton.language as tl


@triton.jit
def twice_kernel(x_ptr, y_ptr, x_row, x_col, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row + cols * x_col, mask=cols < n_cols)
        tl.store(y_ptr + row * n_cols + cols, x * 2.0, mask=cols < n_cols)


def row_doubling(x):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    twice_kernel[(x.shape[0],)](x, y, *x.stride(), x.shape[1], BLOCK=64)
    return y
'''


@pytest.fixture
def folders(tmp_path):
    """Folders for assignments and references, with what a checkout has in them."""
    for name in ("assignments/online-softmax", "reference/kernels", "reference/baselines"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("operation.py", "softmax.py", "kernels/layer_norm.py"):
        (tmp_path / "reference" / name).write_text("# ours\n")
    return {"assignments": tmp_path / "assignments", "reference": tmp_path / "reference"}


def texts(folder):
    return {path: path.read_text() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_reference(reference, module, kernel):
    """Fill in what the skeleton asks for: y is twice x."""
    file = reference / f"{module}.py"
    lines = file.read_text().splitlines()
    oracle, naive = (number for number, line in enumerate(lines) if scaffold.MARK in line)
    lines[oracle] = '    return {"y": 2.0 * inputs["x"].double()}'
    lines[naive] = '    return {"y": 2.0 * inputs["x"]}'
    file.write_text("\n".join(lines) + "\n")
    (reference / "kernels" / f"{module}.py").write_text(kernel)


@pytest.mark.parametrize("slug", ["doubling", "row-doubling", "top2-of-3", LONG])
def test_a_new_folder_loads_at_once(folders, slug):
    scaffold.new_assignment(slug, **folders)
    found = load_assignment(folders["assignments"] / slug)
    assert (found.slug, found.entry) == (slug, slug.replace("-", "_"))
    assert sum(found.points.values()) == 100


@pytest.mark.parametrize("slug", ["doubling", LONG])
def test_a_new_reference_keeps_the_rules_of_the_project(project, slug):
    scaffold.new_assignment(slug, assignments=project / "assignments", reference=project / "reference")
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


@pytest.mark.parametrize(
    "slug",
    ["", "Doubling", "row_doubling", "row--doubling", "-x", "x-", "3d", "../x", "a/b", "a b", "ä", "x\n",
     LONG + "x" * 9, "class", "lambda", "torch", "tl"],
)  # fmt: skip
def test_a_bad_slug_is_refused_in_one_sentence_and_nothing_is_made(folders, tmp_path, slug):
    before = texts(tmp_path)
    with pytest.raises(UserError) as refusal:
        scaffold.new_assignment(slug, **folders)
    assert repr(slug) in str(refusal.value)
    assert texts(tmp_path) == before


@pytest.mark.parametrize("slug", ["online-softmax", "softmax", "layer-norm", "operation", "kernels", "baselines"])
def test_nothing_is_overwritten(folders, tmp_path, slug):
    before = texts(tmp_path)
    with pytest.raises(UserError, match="exists already"):
        scaffold.new_assignment(slug, **folders)
    assert texts(tmp_path) == before


def test_a_slug_is_made_once(folders, tmp_path):
    scaffold.new_assignment("doubling", **folders)
    before = texts(tmp_path)
    with pytest.raises(UserError, match="exists already"):
        scaffold.new_assignment("doubling", **folders)
    assert texts(tmp_path) == before


def test_a_write_that_fails_halfway_leaves_nothing_behind(folders, tmp_path):
    (folders["reference"] / "kernels" / "layer_norm.py").unlink()
    (folders["reference"] / "kernels").rmdir()
    before = texts(tmp_path)
    with pytest.raises(UserError, match="Nothing was made"):
        scaffold.new_assignment("doubling", **folders)
    assert texts(tmp_path) == before
    assert not (folders["assignments"] / "doubling").exists()


def test_without_a_checkout_there_is_nowhere_to_write_a_reference(tmp_path):
    with pytest.raises(UserError, match="checkout"):
        scaffold.new_assignment("doubling", assignments=tmp_path / "assignments", reference=tmp_path / "reference")


def test_what_is_left_is_listed_until_it_is_written(folders):
    scaffold.new_assignment("row-doubling", **folders)
    reference = folders["reference"]
    left = scaffold.left_in_reference("row_doubling.forward", reference=reference)
    assert [(one.path.parent.name, one.what.split(",")[0]) for one in left] == [
        ("reference", "oracle"),
        ("reference", "naive"),
        ("kernels", "our own kernel"),
    ]
    assert str(left[0]).startswith(f"{reference / 'row_doubling.py'}:{left[0].line}: ")
    write_reference(reference, "row_doubling", KERNEL)
    assert scaffold.left_in_reference("row_doubling.forward", reference=reference) == []
    prose = scaffold.left_in_folder(folders["assignments"] / "row-doubling")
    assert [one.path.name for one in prose] == ["assignment.toml", "handout.md", "handout.md"]


@pytest.mark.parametrize("slug", sorted(path.parent.name for path in (ROOT / "assignments").glob("*/assignment.toml")))
def test_nothing_is_left_to_write_in_what_ships(slug):
    found = load_assignment(ROOT / "assignments" / slug)
    assert scaffold.left_in_folder(ROOT / "assignments" / slug) == []
    assert scaffold.left_in_reference(found.operation, reference=ROOT / "reference") == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_new_assignment_passes_its_check_once_its_reference_is_written(project, tilegrade):
    tilegrade("assignment", "new", "row-doubling")
    refused = tilegrade("assignment", "check", "row-doubling", status=2).stderr
    assert refused.startswith("tilegrade: The reference of 'row-doubling' is not written yet. Still to write:\n")
    assert len(refused.splitlines()) == 4

    write_reference(project / "reference", "row_doubling", KERNEL)
    checked = tilegrade("assignment", "check", "row-doubling").stdout
    assert "reference: full, 100 of 100 points" in checked
    assert "starter: error, 0 of 100 points" in checked
    assert "handout.md:3: what the kernel computes" in checked


@pytest.mark.slow
def test_a_refused_slug_is_one_line_on_the_terminal(tilegrade):
    done = tilegrade("assignment", "new", "Row_Doubling", status=2)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
