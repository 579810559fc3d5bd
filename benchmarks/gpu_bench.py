"""What the sections of benchmarks/gpu.py share: warm candidates on one GPU, and rows that outlive a cut.

Nothing here needs a GPU to be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from grader.assignment import Assignment, Limits
from grader.measurement import Ceilings, Examination
from workers.ahead import ahead_pool
from workers.devices.cpu import interpreter_pool
from workers.examination import Sandboxes
from workers.gpu_examination import SWITCH_S, Ahead, GpuRecord, Rivals, examine_on_gpu

if TYPE_CHECKING:
    from workers.devices.cuda import Gpu

PROJECT = Path(__file__).resolve().parents[1]
CORPUS = PROJECT / "tests" / "corpus"
Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bench:
    """A GPU with warm candidates of each kind, and baselines that are kept from one grading to the next."""

    gpu: Gpu
    candidates: Sandboxes
    compilers: Sandboxes
    interpreter: Sandboxes | None
    rivals: Rivals

    def examine(
        self,
        assignment: Assignment,
        source: bytes,
        *,
        compiling: int,
        budget_s: float = 60.0,
        audited: bool = True,
        ceilings: Ceilings | None = None,
        record: GpuRecord | None = None,
    ) -> Examination:
        """One file; `compiling` candidates compile it ahead, for `budget_s` seconds at most."""
        return examine_on_gpu(
            assignment,
            source,
            gpu=self.gpu,
            sandboxes=self.candidates,
            interpreter=self.interpreter if audited else None,
            rivals=self.rivals,
            ahead=Ahead(sandboxes=self.compilers, n_candidates=compiling, budget_s=budget_s),
            ceilings=ceilings,
            record=record,
        )


@contextlib.contextmanager
def opened(
    limits: Limits, *, candidates: int, compilers: int, interpreters: int, isolation: Literal["auto", "none"]
) -> Iterator[Bench]:
    """A bench with so many candidates of each kind ready; no interpreter leaves the audit out."""
    from workers.devices.cuda import Gpu, baselines_pool, cuda_pool

    sys.setswitchinterval(SWITCH_S)  # as a worker does: of several lanes one reads the clock
    with contextlib.ExitStack() as stack:
        compiling = stack.enter_context(ahead_pool(limits, size=compilers, isolation=isolation))
        warm = stack.enter_context(cuda_pool(limits, size=candidates, isolation=isolation))
        audit = interpreter_pool(limits, size=interpreters, isolation=isolation) if interpreters else None
        interpreter = stack.enter_context(audit) if audit is not None else None
        gpu = Gpu()
        stack.callback(gpu.close)
        rivals = Rivals(gpu, stack.enter_context(baselines_pool(isolation=isolation)))
        stack.callback(rivals.close)
        yield Bench(gpu, warm, compiling, interpreter, rivals)


def held_s(examination: Examination) -> float:
    """Seconds under the GPU's lock."""
    assert examination.gpu is not None
    return examination.gpu.held_s or 0.0


def each(
    jobs: Iterable[T], work: Callable[[T], Row], *, name: Callable[[T], Row], stop_at: float, lanes: int = 1
) -> Iterator[Row]:
    """One row for each job, as soon as it is done, `lanes` at a time: its name, and what `work` found.

    `error` is where it raised. After `stop_at`, a moment of time.monotonic(), nothing more begins, and the row of what
    did not says `not_run`.
    """

    def one(job: T) -> Row:
        if time.monotonic() >= stop_at:
            return {"not_run": True}
        try:
            return work(job)
        except Exception:
            traceback.print_exc()
            return {"error": traceback.format_exc()[-2000:]}

    pool = ThreadPoolExecutor(max_workers=lanes, thread_name_prefix="lane")
    try:
        later = {pool.submit(one, job): job for job in jobs}
        for done in as_completed(later):
            row = name(later[done]) | done.result()
            if not ran([row]):
                why = row.get("error", "not run").strip().splitlines()[-1]
                print(f"  {', '.join(map(str, name(later[done]).values()))}: {why[:300]}", flush=True)
            yield row
    finally:
        pool.shutdown(cancel_futures=True)


def ran(rows: Iterable[Row]) -> list[Row]:
    """Those that say something: neither `not_run` nor `error`."""
    return [row for row in rows if "not_run" not in row and "error" not in row]


def chosen(names: Iterable[str], parts: list[str]) -> list[str]:
    """Names with one of these parts in them; all where no part is given."""
    return [name for name in names if not parts or any(part in name for part in parts)]


Section = Callable[[argparse.Namespace], Iterator[Row]]


def run_sections(sections: dict[str, Section], arguments: argparse.Namespace) -> dict[str, float]:
    """Run sections in order, each with `arguments.stop_s` seconds of its own; a failure ends its own section alone.

    Every row is appended to rows.jsonl, with its section, before the next one is asked for: what cuts a run short takes
    no number with it, and a second run into the same folder none of the first's.

    Returns:
        Seconds by section.
    """
    arguments.out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    with (arguments.out / "rows.jsonl").open("a") as file:

        def write(section: str, row: Row) -> None:
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            file.write(json.dumps({"section": section, "at": at} | row, default=str) + "\n")
            file.flush()

        for name, section in sections.items():
            began = time.monotonic()
            arguments.stop_at = began + arguments.stop_s
            print(f"=== {name}", flush=True)
            try:
                for row in section(arguments):
                    write(name, row)
            except Exception:
                traceback.print_exc()
                write(name, {"failed": traceback.format_exc()[-2000:]})
            seconds[name] = round(time.monotonic() - began, 2)
    return seconds
