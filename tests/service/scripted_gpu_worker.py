"""A real GPU worker process on a played GPU: all of workers.tasks runs, only NVML and the examination are scripted.

usage: scripted_gpu_worker.py FOLDER --device cuda --slot N

FOLDER/sick holds why the host's check fails; without that file it passes. A hand-in with the line `lose` takes the GPU
off its bus in the middle of the grading, and its candidate answers with a CUDA error as it then would.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "gpu")]

from nvml_fakes import FakeCard, FakeNvml  # noqa: E402

from grader.assignment import Assignment  # noqa: E402
from grader.measurement import (  # noqa: E402
    Device,
    Examination,
    Failure,
    FailureKind,
    Isolation,
    ProbeFailed,
    ProbeMeasured,
    ProbeRun,
)
from workers import gpu_examination, health, selfcheck, tasks  # noqa: E402
from workers.tasks import Progress  # noqa: E402

CARD = FakeCard(uuid="GPU-b")
FOLDER = Path(sys.argv[1])


class PlayedGpu:
    """In the place of workers.gpu_examination.WarmGpu."""

    lanes = 2
    compiled_late = ()

    def __call__(self, assignment: Assignment, source: bytes, progress: Progress) -> Examination:
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-b", "it sees other GPUs than its own"
        progress("numerics", 0.5)
        broken = Failure(kind=FailureKind.RAISES, message="CUDA error: unspecified launch failure")
        probes: list[ProbeRun] = [
            ProbeMeasured(name=case.name, outputs=(), largest_score=1.0) for case in assignment.cases
        ]
        if b"lose" in source and not (FOLDER / "lost").exists():
            (FOLDER / "lost").touch()
            (FOLDER / "sick").write_text("gpu: it is lost. Reset it.")
            CARD.lost = True
            probes = [ProbeFailed(name=case.name, failure=broken) for case in assignment.cases]
        return Examination(
            assignment=assignment.slug,
            assignment_digest=assignment.digest,
            source_sha256=hashlib.sha256(source).hexdigest(),
            device=Device(kind="cuda", name=CARD.name),
            isolation=Isolation(level="full"),
            versions={},
            seed=1,
            probes=tuple(probes),
        )

    def warm_up(self, assignment: Assignment) -> Examination:
        return self(assignment, b"", lambda _stage, _fraction: None)

    def close(self) -> None:
        pass


def check(*flags: str, environ: Mapping[str, str]) -> selfcheck.Outcome:
    # it is told the number of the GPU, and counts from all of them
    assert flags[flags.index("--gpu") + 1] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environ
    sick = FOLDER / "sick"
    return selfcheck.Outcome(why_not=sick.read_text() if sick.exists() else "", note="")


if __name__ == "__main__":
    sys.modules["pynvml"] = FakeNvml(FakeCard(name="NVIDIA A100", uuid="GPU-a"), CARD)
    gpu_examination.WarmGpu = PlayedGpu  # type: ignore[assignment,misc]
    health.use_context = lambda: None
    selfcheck.in_a_process = check  # type: ignore[assignment]
    sys.exit(tasks.main(sys.argv[2:]))
