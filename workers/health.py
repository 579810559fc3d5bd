"""Whether a GPU is fit to grade: judged from NVML's counters and from kernels whose times are known.

A broken GPU must never read as a student's fault. So it is looked at before a worker takes work, after every grading
(`Watched`), and again after whatever went wrong.
"""

from __future__ import annotations

import dataclasses
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from grader.assignment import Assignment
from grader.measurement import Ceilings, Examination, ProbeFailed, ProbeMeasured
from workers.devices import nvml
from workers.devices.nvml import Card, NvmlError, Reading
from workers.isolation import FIRST_SLOT_UID, SLOTS
from workers.selfcheck import Check

MODELS = Path(__file__).with_name("devices") / "gpu_models.toml"
MOST_FOREIGN_BYTES = 2 << 30  # of others: the driver's own and a screen are less
HOT_MARGIN_C = 5  # from where it slows itself down
# Xids that say something of the card or its driver. All others (13, 31, 43, 45, ...) a program can cause by itself.
# https://docs.nvidia.com/deploy/xid-errors/
HARDWARE_XIDS = frozenset({48, 61, 62, 63, 64, 74, 79, 92, 94, 95, 110, 119, 120, 121, 122, 123, 140, 143, 149})
RATE_TRIES = 3
GONE_WITHIN_S = 10.0  # the contexts of a worker that was killed
_RESET = "Reset it (`nvidia-smi --gpu-reset -i {uuid}`), and have it replaced when that comes back."


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a healthy GPU of one model does."""

    copy_bytes_per_s: float
    bfloat16_flops_per_s: float
    within: float  # relative


@cache
def models() -> dict[str, Model]:
    """The recorded models, by NVML's name."""
    found = tomllib.loads(MODELS.read_text(encoding="utf-8"))
    return {name: Model(**{key: float(value) for key, value in row.items()}) for name, row in found.items()}


def choose(index: int, visible: str | None = None) -> Card:
    """The GPU of that number among those that CUDA_VISIBLE_DEVICES leaves. Raises NvmlError where there is none."""
    cards = nvml.cards(visible)
    if index < len(cards):
        return cards[index]
    raise NvmlError(f"there is no GPU number {index}; NVML counts {len(cards)}, from 0")


def check_gpu(index: int, *, visible: str | None, in_use: bool) -> list[Check]:
    """Look at one GPU, and time what is recorded for its model.

    Args:
        visible: what CUDA_VISIBLE_DEVICES was set to.
        in_use: the worker that asks is on it, and in a container may not know its own processes by NVML's numbers.
    """
    try:
        card = choose(index, visible)
        reading = _calm_reading(card, in_use=in_use)
        strangers = {pid: size for pid, size in reading.processes.items() if not _is_ours(pid)}
        if len(strangers) < len(reading.processes):  # a worker grades here while somebody asks how the GPU is
            reading = dataclasses.replace(reading, processes=strangers)
            in_use = not strangers
    except NvmlError as exc:
        remedy = "Look whether `nvidia-smi` works here; a container needs what docker/README.md says of GPUs."
        return [_check("gpu", False, "asked NVML", str(exc), remedy)]
    found = judge_reading(reading, in_use=in_use)
    if all(one.ok for one in found):
        found.append(_known_kernels(card))
    return found


def _calm_reading(card: Card, *, in_use: bool) -> Reading:
    """The GPU's counters, once the processes of a worker that was just killed are gone."""
    until = time.monotonic() + GONE_WITHIN_S
    while not in_use and time.monotonic() < until:
        reading = nvml.read(card)
        if all(_is_ours(pid) for pid in reading.processes):
            return reading
        time.sleep(0.2)
    return nvml.read(card)


def _is_ours(pid: int) -> bool:
    """Whether a process is a worker or a candidate of this host's."""
    folder = Path("/proc", str(pid))
    try:
        if FIRST_SLOT_UID <= folder.stat().st_uid < FIRST_SLOT_UID + SLOTS:
            return True
        return b"workers.tasks" in (folder / "cmdline").read_bytes()
    except OSError:
        return False


def _known_kernels(card: Card) -> Check:
    nvml.show_only(card)
    remedy = "Look whether the driver fits torch: `python -c 'import torch; torch.cuda.init()'` says what is wrong."
    try:
        from workers.ceilings import measure
        from workers.devices.cuda import gpu_lock

        with gpu_lock(card.uuid):
            use_context()
            check = judge_rates(card, measure())
            for _ in range(RATE_TRIES - 1):  # its clocks may have been low
                check = check if check.ok else judge_rates(card, measure())
    except Exception as exc:  # whatever torch and the driver raise, the worker must hear of it as a check that failed
        said = f"{type(exc).__name__}: {str(exc).splitlines()[0] if str(exc) else ''}"
        return _check("gpu kernels", False, "timed a large copy and a large matrix product", said, remedy)
    return check


def judge_reading(reading: Reading, *, in_use: bool = False) -> list[Check]:
    """What NVML's counters say. `in_use`: by a worker of ours, so processes and memory say nothing."""
    card = reading.card
    reset = _RESET.format(uuid=card.uuid)
    found = [_check("gpu", True, "asked NVML", f"{card.name}, {card.memory_bytes / 2**30:.0f} GiB, {reading.driver}")]
    if not in_use:
        found += _judge_others(reading)
    faults = [
        text
        for wrong, text in (
            (
                reading.uncorrected_errors,
                f"{reading.uncorrected_errors} uncorrected errors since the driver was loaded",
            ),
            (reading.remap_failed, "no spare rows are left"),
            (reading.remap_pending, "a damaged row waits to be taken out of use"),
        )
        if wrong
    ]
    told = {
        "uncorrected": reading.uncorrected_errors,
        "remapped rows": reading.remapped_rows,
    }
    fine = ", ".join(f"{name} {'not told' if value is None else value}" for name, value in told.items())
    found.append(_check("gpu errors", not faults, "read ECC and row counters", "; ".join(faults) or fine, reset))
    if reading.temperature_c is not None:
        limit = reading.slowdown_c
        cool = limit is None or reading.temperature_c < limit - HOT_MARGIN_C
        found.append(
            _check(
                "gpu temperature",
                cool,
                "read it",
                f"{reading.temperature_c} C" + (f", it slows down at {limit}" if limit else ""),
                "It is too hot to give equal times: look after its cooling.",
            )
        )
    if reading.compute_mode:
        found.append(
            _check(
                "gpu mode",
                False,
                "read its compute mode",
                "it lets one process in alone, or none",
                f"Grading needs several: `nvidia-smi -i {card.uuid} -c DEFAULT`.",
            )
        )
    return found


def _judge_others(reading: Reading) -> list[Check]:
    card = reading.card
    listed = ", ".join(f"process {pid} with {size / 2**30:.1f} GiB" for pid, size in sorted(reading.processes.items()))
    return [
        _check(
            "gpu processes",
            not listed,
            "looked for processes with a context on it",
            listed or "none",
            f"They would disturb every time that is measured: end them, or give the worker another GPU by "
            f"CUDA_VISIBLE_DEVICES. This is {card.uuid}.",
        ),
        _check(
            "gpu memory",
            bool(listed) or reading.used_bytes <= MOST_FOREIGN_BYTES,  # said once, above
            "read how much of it is used",
            f"{reading.used_bytes / 2**30:.1f} of {card.memory_bytes / 2**30:.0f} GiB",
            f"No process that NVML names holds it. {_RESET.format(uuid=card.uuid)}",
        ),
    ]


def judge_rates(card: Card, ceilings: Ceilings) -> Check:
    """Whether known kernels take as long as is recorded for this model."""
    measured = {"copy": ceilings.copy_bytes_per_s, "bfloat16": ceilings.flops_per_s.get("bfloat16", 0.0)}
    said = f"copy {measured['copy'] / 1e12:.2f} TB/s, bf16 products {measured['bfloat16'] / 1e12:.0f} TFLOP/s"
    tried = "timed a large copy and a large matrix product"
    model = models().get(card.name)
    if model is None:
        return _check("gpu kernels", True, tried, f"{said}; none recorded for {card.name}, so not compared")
    recorded = {"copy": model.copy_bytes_per_s, "bfloat16": model.bfloat16_flops_per_s}
    off = [name for name, value in measured.items() if not abs(value / recorded[name] - 1) <= model.within]
    band = f"recorded {recorded['copy'] / 1e12:.2f} and {recorded['bfloat16'] / 1e12:.0f}, within {model.within:.0%}"
    return _check(
        "gpu kernels",
        not off,
        tried,
        f"{said}; {band}",
        "Look at `nvidia-smi -q -d PERFORMANCE,CLOCK,POWER`: it is throttled, its clocks or power are capped, another "
        f"program uses it, or workers/devices/{MODELS.name} is wrong.",
    )


class Watched:
    """An examiner whose GPU is looked at after each grading: what was measured on a sick one is not recorded.

    That asks NVML alone: another hand-in may be timed meanwhile. A context that breaks in an examination raises there.

    Args:
        examine: examines one hand-in on the GPU.
        read: the GPU's counters now.
        xids: numbers of the driver's error reports so far.
        still_works: raises when this process's own context is broken.
    """

    def __init__(
        self,
        examine: Callable[..., Any],
        *,
        read: Callable[[], Reading],
        xids: Callable[[], list[int]],
        still_works: Callable[[], None],
    ) -> None:
        self._examine, self._read, self._xids, self._still_works = examine, read, xids, still_works
        self._before = read()
        self._n_xids = len(xids())

    def __call__(self, *arguments: Any) -> Any:
        found = self._examine(*arguments)
        if trouble := self.trouble():
            raise SickGpuError(trouble)
        return found

    def trouble(self) -> str:
        """What happened to the GPU since the start; empty when nothing did."""
        try:
            now = self._read()
        except NvmlError as exc:
            return f"the GPU no longer answers: {exc}"
        bad = [xid for xid in self._xids()[self._n_xids :] if xid in HARDWARE_XIDS]
        if bad:
            return f"the driver reported Xid {', '.join(map(str, bad))}"
        for name in ("uncorrected_errors", "remapped_rows"):
            before, after = getattr(self._before, name), getattr(now, name)
            if before is not None and after is not None and after > before:
                return f"{name.replace('_', ' ')} went from {before} to {after}"
        if now.remap_failed and not self._before.remap_failed:
            return "no spare rows are left"
        return ""

    def trouble_after_fault(self) -> str:
        """`trouble`, and whether this process's own context works. Uses the GPU: not while somebody is timed on it."""
        if trouble := self.trouble():
            return trouble
        try:
            self._still_works()
        except Exception as exc:  # whatever a broken context raises
            return f"the worker's own context is broken: {exc}"
        return ""


def use_context() -> None:
    """Have this process's own CUDA context compute something.

    Raises:
        SickGpuError: the result is wrong. When the context is broken torch raises what it likes.
    """
    import torch

    factor = torch.arange(256 * 256).remainder(7).view(256, 256).double()  # small whole numbers: products are exact
    if not torch.equal((factor.cuda() @ factor.cuda().T).cpu(), factor @ factor.T):
        raise SickGpuError("the GPU multiplies whole numbers wrongly")


def reference_trouble(assignment: Assignment, found: Examination) -> str:
    """What our own reference kernel does not pass here of what every file must pass; empty when it passes.

    For the staff. No quarantine: a GPU that is broken shows by itself, and a kernel that is wrong is ours.
    """
    required = {case.name for case in assignment.cases if case.required}
    asked = [run for run in found.probes if run.name in required]
    wrong = [run.name for run in asked if isinstance(run, ProbeFailed)]
    ran = [run for run in asked if isinstance(run, ProbeMeasured)]
    wrong += [run.name for run in ran if any(output.n_wrong for output in run.outputs)]
    if found.load_failure is not None or wrong or not asked:
        said = found.load_failure.message if found.load_failure else ", ".join(wrong[:5]) or "no probe ran"
        return f"The reference kernel of {found.assignment} does not pass here ({said[:300]}): compare nobody with it."
    return ""


class SickGpuError(Exception):
    """What was measured may be the GPU's fault and not the file's. Ours: nothing counts against the student."""


def _check(name: str, ok: bool, tried: str, found: str, remedy: str = "") -> Check:
    return Check(name=name, ok=ok, tried=tried, found=found, remedy="" if ok else remedy)
