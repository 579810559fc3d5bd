"""Does the judge let a known mistake through? `python benchmarks/mutation.py [SLUG ...] [--tile N ...]`.

Every known mistake of every operation is taken for a hand-in: its numbers, in the dtypes that were asked for, are
compared and judged on all probes of the assignment, as an examination would. No sandbox and no kernel is needed. Prints
a table, and fails when a mistake earns all points of numerics or when its report names another one with other numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  the project is put on the path above
from torch import Tensor  # noqa: E402

import reference  # noqa: E402
from grader.assignment import Assignment, Case, load_assignment  # noqa: E402
from grader.judging import judge  # noqa: E402
from grader.measurement import Device, Isolation, ProbeMeasured  # noqa: E402
from grader.verdicts import Grade  # noqa: E402
from reference.operation import Inputs, Mistake, Operation, Options  # noqa: E402
from workers import numerics  # noqa: E402
from workers.devices.cpu import ARENA_BYTES, Arena  # noqa: E402
from workers.examination import Answer, Audited, Examiner, Numerics  # noqa: E402
from workers.sandbox import Sandbox  # noqa: E402

SEED = 20270301
# Tile widths that a hand-in may well have. A mistake at a tile's border is none where one tile holds the whole row.
TILES = (16, 32, 64, 128)

Answers = Callable[["Asked"], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One probe as a student's file meets it, and what is known about it."""

    case: Case
    inputs: Inputs
    options: Options
    dtypes: Mapping[str, torch.dtype]  # of the outputs
    oracle: Mapping[str, Tensor]
    naive: Mapping[str, Tensor]
    largest_score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A known mistake in one of its forms."""

    mistake: Mistake
    tile: int | None
    nth: int  # of the bank

    def answers(self, asked: Asked) -> Mapping[str, Tensor]:
        return self.mistake.outputs(asked.inputs, asked.options, self.tile or 0)


class Trial:
    """One assignment on the interpreter device, ready to judge answers that no kernel gave."""

    def __init__(self, assignment: Assignment, seed: int = SEED) -> None:
        self.assignment = assignment
        self.operation: Operation = reference.load(assignment.operation)
        arena = Arena(torch.empty(ARENA_BYTES, dtype=torch.uint8))
        self.asked = [
            _asked(assignment, self.operation, case, arena, seed) for case in assignment.cases_on("interpreter")
        ]
        self._examiner = Examiner(assignment, b"", _NoSandboxes(), lambda _stage, _fraction: None, seed)
        self._examiner.operation = dataclasses.replace(
            self.operation, mistakes=tuple(_remembered(mistake) for mistake in self.operation.mistakes)
        )

    def mutants(self, tiles: tuple[int, ...] = TILES) -> Iterator[Mutant]:
        """Every form of every known mistake."""
        for nth, mistake in enumerate(self._examiner.operation.mistakes):
            for tile in tiles if mistake.tiled else (None,):
                yield Mutant(mistake=mistake, tile=tile, nth=nth)

    def grade(self, answers: Answers, *, diagnosed: bool = True) -> Grade:
        """What a file with these answers gets. It is taken to repeat itself and to leave everything else alone.

        Without `diagnosed` no mistakes are held against the answers, which takes most of the time.
        """
        found = Numerics(entry=self.assignment.entry)
        for asked in self.asked:
            student = _in_dtypes(answers(asked), asked)
            probe = self._measured(asked, student)
            passed = all(run.rel_error is not None and run.rel_error <= run.limit for run in probe.outputs)
            found.probes.append(probe)
            if diagnosed:
                found.answers[asked.case.name] = Answer(asked.case, asked.inputs, student, asked.oracle, passed)
        device = Device(kind="interpreter", name="no kernel ran")
        return judge(self.assignment, self._examiner.examination(found, Audited(), device, {}))

    def _measured(self, asked: Asked, student: Mapping[str, Tensor]) -> ProbeMeasured:
        gradients = {output.name for output in self.assignment.outputs if output.gradient}
        runs = []
        for name, dtype in asked.dtypes.items():
            want = asked.oracle[name]
            own = numerics.relative_error(asked.naive[name], want) or 0.0
            limit = self.assignment.tolerance.limit(
                baseline_rel_error=own,
                dtype=asked.case.dtype,
                largest_score=asked.largest_score,
                gradient=name in gradients,
            )
            runs.append(
                numerics.compare(
                    name,
                    student[name],
                    want,
                    dtype,
                    said_shape=tuple(student[name].shape),
                    said_dtype=str(student[name].dtype).removeprefix("torch."),
                    baseline=asked.naive[name],
                    limit_of=limit,
                    baseline_rel_error=own,
                )
            )
        return ProbeMeasured(
            name=asked.case.name,
            outputs=tuple(runs),
            largest_score=asked.largest_score,
            repeat_equal=True,
            first_result_kept=True,
        )

    def has_numbers_of(self, label: str, mutant: Mutant, grade: Grade) -> bool:
        """Whether a mistake called `label` has the mutant's numbers, within the limit, in every probe that it fails."""
        failing = {case.name: case.limit or 0.0 for case in grade.numerics.cases if not case.passed}
        asked = [one for one in self.asked if one.case.name in failing]
        rivals = (
            Mutant(mistake=mistake, tile=tile, nth=0)
            for mistake in self._examiner.operation.mistakes
            if mistake.label == label
            for tile in (self.operation.tiles if mistake.tiled else (None,))
        )
        return any(all(_near(one, mutant, rival, failing[one.case.name]) for one in asked) for rival in rivals)


def _near(asked: Asked, mutant: Mutant, rival: Mutant, limit: float) -> bool:
    student = _in_dtypes(mutant.answers(asked), asked)
    held = numerics.mistake_on_probe(asked.case.name, student, rival.answers(asked), asked.oracle)
    return held.distance is not None and held.distance <= limit


def load(slug: str) -> Assignment:
    return load_assignment(ROOT / "assignments" / slug)


def slugs() -> list[str]:
    """Every assignment that ships."""
    return sorted(path.parent.name for path in (ROOT / "assignments").glob("*/assignment.toml"))


class _NoSandboxes:
    """Nothing is run, so nothing has to be isolated."""

    isolation = Isolation(level="none")

    def take(self, timeout_s: float) -> Sandbox:
        raise AssertionError(f"no candidate is asked here, nor waited {timeout_s:g} s for")


def _asked(assignment: Assignment, operation: Operation, case: Case, arena: Arena, seed: int) -> Asked:
    digest = hashlib.sha256(f"{assignment.slug}/{case.name}/{seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    options = case.options or {}
    made = operation.make_inputs(case.axes, case.fill, getattr(torch, case.dtype), options, generator)
    arena.clear()
    inputs = {}
    for name, value in made.items():
        layout = operation.layout(name, case_layout=case.layout, fill=case.fill)
        placed = arena.place_expanded(name, value) if layout == "expanded" else arena.place(name, value, layout)
        inputs[name] = placed.value
    return Asked(
        case=case,
        inputs=inputs,
        options=options,
        dtypes={name: dtype for name, (_, dtype) in operation.output_specs(inputs, options).items()},
        oracle=operation.oracle(inputs, options),
        naive=operation.naive(inputs, options),
        largest_score=operation.largest_score(inputs, options),
    )


def _in_dtypes(answers: Mapping[str, Tensor], asked: Asked) -> dict[str, Tensor]:
    return {name: answers[name].to(dtype) for name, dtype in asked.dtypes.items()}


def _remembered(mistake: Mistake) -> Mistake:
    """The same mistake; what it computed for a probe is kept, since every mutant is held against it."""
    known: dict[tuple[int, int], tuple[Inputs, dict[str, Tensor]]] = {}

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        key = (id(inputs), tile)
        if key not in known:
            known[key] = (
                inputs,
                mistake.outputs(inputs, options, tile),
            )  # the inputs too, so that their id stays theirs
        return known[key][1]

    return dataclasses.replace(mistake, outputs=outputs)


def main() -> int:
    """Print what every mutant gets. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("slugs", nargs="*", default=slugs(), metavar="SLUG")
    parser.add_argument("--tile", type=int, action="append", help=f"tile widths to try; {TILES} when left out")
    parser.add_argument("--seed", type=int, default=SEED, help="of the inputs")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    let_through = misnamed = 0
    for slug in asked.slugs:
        trial = Trial(load(slug), asked.seed)
        print(f"{slug}: {len(trial.asked)} probes")
        for mutant in trial.mutants(tuple(asked.tile or TILES)):
            grade = trial.grade(mutant.answers)
            wrong = [case.name for case in grade.numerics.cases if not case.passed]
            label, named = mutant.mistake.label, grade.diagnosis.label
            passes = not grade.numerics.points < grade.numerics.out_of
            other = not passes and named != label and not trial.has_numbers_of(named, mutant, grade)
            let_through, misnamed = let_through + passes, misnamed + other
            form = f"{label}#{mutant.nth}" + (f" tile {mutant.tile}" if mutant.tile else "")
            remark = "LET THROUGH" if passes else f"named {named or 'nothing'}" if other else ""
            print(
                f"  {form:44} {grade.numerics.points:5.1f} of {grade.numerics.out_of:g}, "
                f"{len(wrong):2} wrong{f' ({wrong[0]})' if len(wrong) == 1 else ''}  {remark}".rstrip()
            )
    print(f"{let_through} let through, {misnamed} named for another with other numbers")
    return 1 if let_through or misnamed else 0


if __name__ == "__main__":
    sys.exit(main())
