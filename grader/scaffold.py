"""A new assignment's files: a folder that loads at once, and a reference that says what is still to be written.

What is left to write is marked `WRITE: ...`, in the reference as the message of the exception that stands there.
`docs/assignments.md` goes through every file.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grader.errors import UserError

PROJECT = Path(__file__).resolve().parents[1]
LONGEST_SLUG = 64
MARK = "WRITE: "

_SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# the entry point is called like the module, and must not hide what a kernel file imports
_TAKEN = frozenset({"torch", "triton", "tl"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A place where something is still to be written."""

    path: Path
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def new_assignment(slug: str, *, assignments: Path, reference: Path) -> list[Path]:
    """Write the files of a new assignment and of its reference. Returns their paths.

    Args:
        assignments: the folder of all assignments.
        reference: the folder of the package `reference`.

    Raises:
        UserError: the slug is none, or something of that name is there; nothing was written then.
    """
    module = _module(slug)
    if not (reference / "operation.py").is_file():
        raise UserError(f"{reference} holds no references; run this in a checkout of Tilegrade, not an installed copy.")
    files = {
        assignments / slug / "assignment.toml": _ASSIGNMENT,
        assignments / slug / "handout.md": _HANDOUT,
        assignments / slug / "starter.py": _STARTER,
        **dict(zip(_reference_files(reference, module), (_REFERENCE, _KERNEL), strict=True)),
    }
    for path in (assignments / slug, reference / module, *files):
        if path.exists() or path.is_symlink():
            raise UserError(f"{path} exists already, and nothing is overwritten. Choose another slug or remove it.")
    names = {"slug": slug, "module": module, "title": slug.replace("-", " ").capitalize()}
    _write({path: _filled(text, names) for path, text in files.items()}, folder=assignments / slug)
    return list(files)


def left_in_reference(operation: str, *, reference: Path) -> list[Left]:
    """What is still to be written before the operation "module.variant" can be examined."""
    return _left(_reference_files(reference, operation.partition(".")[0]))


def left_in_folder(folder: Path) -> list[Left]:
    """What is still to be written in an assignment's folder. It loads and is graded all the same."""
    return _left(sorted(path for path in folder.iterdir() if path.suffix in (".toml", ".md", ".py")))


def _module(slug: str) -> str:
    if not _SLUG.fullmatch(slug) or len(slug) > LONGEST_SLUG:
        raise UserError(
            f"{slug!r} is no slug: use lower-case letters and digits in words joined by hyphens, a letter first, "
            f"at most {LONGEST_SLUG} characters. It names the folder, the page's address and the entry point."
        )
    module = slug.replace("-", "_")
    if keyword.iskeyword(module) or module in _TAKEN:
        raise UserError(f"{slug!r} would make an entry point called {module}, which Python or a kernel needs itself.")
    return module


def _reference_files(reference: Path, module: str) -> tuple[Path, Path]:
    return reference / f"{module}.py", reference / "kernels" / f"{module}.py"


def _left(paths: Iterable[Path]) -> list[Left]:
    found = []
    for path in paths:
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            _, mark, what = line.partition(MARK)
            if mark:
                found.append(Left(path=path, line=number, what=what.removesuffix("-->").strip(' ")')))
    return found


def _filled(text: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(f"«{name}»", value)
    return text


def _write(files: Mapping[Path, str], *, folder: Path) -> None:
    undo: list[Callable[[], None]] = []
    try:
        folder.mkdir(parents=True)
        undo.append(folder.rmdir)
        for path, text in files.items():
            with path.open("x", encoding="utf-8") as file:
                undo.append(path.unlink)
                file.write(text)
    except OSError as exc:
        for step in reversed(undo):
            step()
        raise UserError(f"Cannot write {exc.filename}: {exc.strerror}. Nothing was made.") from None


_ASSIGNMENT = """\
title = "«title»"
summary = "WRITE: one sentence for the list of assignments."
operation = "«module».forward" # in reference/«module».py
entry = "«module»"
entry_kind = "function"
signature = "«module»(x) -> y"
target_gpu = "sm_90"
# deadline = 2030-03-01T23:59:00Z # a course may set another one

[outputs] # in the order of the reference; each must be written by a Triton kernel of the student's
y = {}

[points] # 100 in all; [memory] and [speed] are tables of their own, with points here
numerics = 70
structure = 30

# An output passes when its error is at most `slack` times that of `naive` in the same dtype, plus the floor.
[tolerance]
slack = 2.0
floor = { float32 = 2e-5, float16 = 7e-4, bfloat16 = 6e-3 }

# One call at these sizes is audited.
[structure]
axes = { rows = 16, cols = 1000 }
max_launches = 1
max_bytes_ratio = 1.2 # distinct bytes, times the least possible

[[cases]]
name = "random"
tries = "normal values, whole tiles of any usual width"
axes = { rows = 8, cols = 256 }
points = 6
required = true # nothing is earned without it

[[cases]]
name = "tail"
tries = "333 columns: the last tile is partly empty"
axes = { rows = 7, cols = 333 }
points = 3

[[cases]]
name = "tail-short"
tries = "65 columns, one more than 64"
axes = { rows = 5, cols = 65 }
points = 1
hidden = true # students see a verdict, nothing else

[[cases]]
name = "one-column"
tries = "rows of a single column"
axes = { rows = 9, cols = 1 }

[[cases]]
name = "one-row"
tries = "a single row"
axes = { rows = 1, cols = 777 }

[[cases]]
name = "strided"
tries = "x is a view with strides of its own"
axes = { rows = 6, cols = 320 }
layout = "strided"
points = 3

[[cases]]
name = "half"
tries = "float16 in, float16 out"
axes = { rows = 6, cols = 384 }
dtype = "float16"
points = 3

[[cases]]
name = "bfloat16"
tries = "bfloat16 in, bfloat16 out"
axes = { rows = 6, cols = 384 }
dtype = "bfloat16"
points = 3

[[cases]]
name = "repeat"
tries = "the same call twice gives the same bits"
axes = { rows = 5, cols = 320 }
check = "repeat"

[[cases]]
name = "input-unchanged"
tries = "x is as it was after the call"
axes = { rows = 5, cols = 320 }
check = "input-unchanged"

[[cases]]
name = "fresh-inputs"
tries = "new values in the same buffer; the first result must stay"
axes = { rows = 5, cols = 320 }
check = "fresh-inputs"

[[cases]]
name = "guard"
tries = "NaN around x, results that start as NaN: nothing outside may be read or written, nothing left out"
axes = { rows = 7, cols = 190 }
check = "guard"
points = 2
"""

_HANDOUT = """\
# «title»

<!-- WRITE: what the kernel computes and why it is worth writing, in two paragraphs -->

## What to hand in

One UTF-8 Python file that defines

```python
def «module»(x): ...   # -> y
```

| | shape | dtype | |
|---|---|---|---|
| `x` | `(rows, cols)` | float32, float16 or bfloat16 | may be a view that is not contiguous |
| `y` | `(rows, cols)` | that of `x` | |

- `y` is written by a Triton kernel of yours, in one launch.
- Compute in float32, whatever the dtype of `x`.
- Work on the device of `x`. The file may use torch, triton and the standard library; numpy, einops, einx and jaxtyping
  are there too.

**Promised:** at least one row and one column; finite values.
**Not promised:** that `cols` is a multiple of anything; that `x` is contiguous.

## What is tried

| probes | what they try |
|---|---|
| `random` (required) | normal values, 256 columns |
| `tail`, `one-column`, `one-row` | widths that are no multiple of a tile, the smallest shapes |
| `strided` | `x` is a view |
| `half`, `bfloat16` | 16-bit input |
| `repeat`, `input-unchanged`, `fresh-inputs` | equal bits twice, inputs untouched, no stale answers |
| `guard` | nothing is read or written outside the tensors |

One more probe is hidden; it tries nothing that this page does not mention.

## Points

| axis | points | how |
|---|---|---|
| numerics | 70 | by probe; without `random` nothing is earned |
| structure | 30 | your own kernel writes `y`, one launch, no copy of `x` in global memory |

## Checkpoint

<!-- WRITE: three to six questions that someone who has done it can answer -->
"""

_STARTER = '''\
"""«title»: your file. Hand in this one file; it may use torch, triton and the standard library.

Run it on a laptop without a GPU:

    TRITON_INTERPRET=1 python starter.py
"""

import torch
import triton
import triton.language as tl


@triton.jit
def «module»_kernel(
    x_ptr,  # first element of x
    y_ptr,  # first element of y
    x_row_stride,  # elements from one row of x to the next; x may be a view, so ask the tensor
    x_col_stride,  # elements from one column of x to the next
    n_cols,  # any number of at least 1
    TILE: tl.constexpr,  # a power of two
):
    row = tl.program_id(0)  # which row this program owns


def «module»(x):
    """y like x, which is [rows, cols]."""
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    # TODO: choose a tile width, launch, return y.
    raise NotImplementedError("«module» is yours to write")


if __name__ == "__main__":
    print(«module»(torch.randn(4, 300, device="cuda" if torch.cuda.is_available() else "cpu")))
'''

_REFERENCE = '''\
"""The operation "«module».forward".

x [rows, cols]; y like x.
"""

# Every operation's functions take (inputs, options), also where one of them has no use for the options.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from reference.operation import Costs, Inputs, Mistake, Operation, Options, Specs

FILLS = ("normal",)

# What often goes wrong, as the numbers that it gives. A report names the mistake whose numbers are the student's.
MISTAKES: tuple[Mistake, ...] = ()


def oracle(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """The definition, in float64. The judge compares against this, never a kernel."""
    raise NotImplementedError("WRITE: oracle, {output: tensor} in float64, by definition")


def naive(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Plain torch in the dtype of x. Its own error sets what a student's may be."""
    raise NotImplementedError("WRITE: naive, {output: tensor} in the dtype that the handout promises")


def largest_score(inputs: Inputs, options: Options) -> float:
    """Largest value that is exponentiated: limits grow with it by `score_slope`. 0 where nothing is."""
    return 0.0


def make_inputs(
    axes: Mapping[str, int], fill: str, dtype: torch.dtype, options: Options, generator: torch.Generator
) -> dict[str, Tensor]:
    """x of the recipe called `fill`: normal values."""
    if fill != "normal":
        raise KeyError(f"no fill {fill!r} here; there are {', '.join(FILLS)}")
    return {"x": torch.randn(axes["rows"], axes["cols"], generator=generator).to(dtype)}


def output_specs(inputs: Inputs, options: Options) -> Specs:
    x = inputs["x"]
    return {"y": (tuple(x.shape), x.dtype)}


def costs(axes: Mapping[str, int], dtype: torch.dtype, options: Options) -> Costs:
    """x is read once and y is written once; so does one eager operation."""
    n_elements = axes["rows"] * axes["cols"]
    n_x = n_elements * dtype.itemsize
    return Costs(
        flops=n_elements,
        least_bytes=2 * n_x,
        naive_peak_bytes=n_x,
        reference_peak_bytes=n_x,
        eager_launches=1,
        eager_bytes=2 * n_x,
    )


OPERATIONS = {
    "forward": Operation(
        name="«module».forward",
        axes=("rows", "cols"),
        inputs=("x",),
        options=(),
        outputs=("y",),
        fills=FILLS,
        kernel_file=Path(__file__).parent / "kernels" / Path(__file__).name,
        mistakes=MISTAKES,
        make_inputs=make_inputs,
        output_specs=output_specs,
        oracle=oracle,
        naive=naive,
        eager=naive,
        largest_score=largest_score,
        costs=costs,
    )
}
'''

_KERNEL = '''\
"""«title»: our own solution, a complete hand-in."""


def «module»(x):
    """y like x.

    Args:
        x: [rows, cols], float32, float16 or bfloat16, any strides.
    """
    raise NotImplementedError("WRITE: our own kernel, and its launch")
'''
