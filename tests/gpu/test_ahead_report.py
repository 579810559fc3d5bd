"""What compiling ahead says about a file: real sandboxes, no GPU."""

import dataclasses
from pathlib import Path

import pytest

import reference
from grader.assignment import Limits, load_assignment
from workers.ahead import ahead_pool, compile_ahead

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "corpus" / "flash-attention-forward"
WHOLE = load_assignment(ROOT / "assignments" / "flash-attention-forward")
FEW = dataclasses.replace(
    WHOLE,
    cases=tuple(case for case in WHOLE.cases if case.name in ("random", "head-dim-128")),
    memory=None,
    speed=dataclasses.replace(WHOLE.speed, sizes=WHOLE.speed.sizes[:1]),
)

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def compiled():
    with ahead_pool(Limits(), size=1) as pool:

        def run(source, assignment=FEW, budget_s=100.0):
            operation = reference.load(assignment.operation)
            return compile_ahead(assignment, operation, source, pool=pool, n_candidates=1, budget_s=budget_s)

        yield run


def test_timed_sizes_are_described_and_everything_is_kept(compiled):
    found = compiled((CORPUS / "ok-raw-strides.py").read_bytes())
    assert [kernel.kernel for kernel in found.report.kernels] == ["attn_fwd"]
    assert "queries=8192" in found.report.kernels[0].shapes
    assert "bfloat16" in found.report.kernels[0].shapes
    assert found.report.kernels[0].registers > 0
    assert found.report.finished
    assert sum(map(len, found.archives)) > 10_000


def test_a_kernel_that_asks_for_too_much_is_in_the_report_wherever_it_is_launched(compiled):
    found = compiled((CORPUS / "needs-bigger-shared-memory.py").read_bytes())
    too_large = [kernel for kernel in found.report.kernels if kernel.shared_bytes > found.report.shared_limit_bytes]
    assert {kernel.ctas_per_sm for kernel in too_large} == {0}
    assert any("head_dim=128" in kernel.shapes for kernel in too_large)


def test_what_does_not_compile_at_a_timed_size_says_so(compiled):
    found = compiled((CORPUS / "compile-error-loop-type.py").read_bytes())
    assert found.report.failures
    assert "changes its type inside the loop" in found.report.failures[0].message


def test_what_was_compiled_before_a_call_that_never_ends_is_kept(compiled):
    honest = (CORPUS / "ok-raw-strides.py").read_text()
    entry = "def flash_attention_forward(q, k, v, is_causal=False):\n"
    assert entry in honest
    found = compiled(
        honest.replace(entry, f"{entry}    while q.shape[-1] == 128:\n        pass\n").encode(), budget_s=15.0
    )
    assert not found.report.finished
    assert sum(map(len, found.archives)) > 10_000
