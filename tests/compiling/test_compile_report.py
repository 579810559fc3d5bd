"""Real files, compiled in the sandbox for sm_90 on a machine without a GPU."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from grader.assignment import Assignment
from grader.measurement import CompileReport, Failure, FailureKind
from workers.compiling import compile_pool, compile_report

CORPUS = Path(__file__).parents[1] / "corpus"
FLASH = "flash-attention-forward"
ONE_SIZE = ({"rows": 4096, "cols": 1024},)
OK_FILES = sorted(CORPUS.glob("*/ok-*.py"))

Compile = Callable[..., CompileReport]

COPY = """\
import torch
import triton
import triton.language as tl

# decorators
@triton.jit
def copy_kernel(x_ptr, y_ptr, lse_ptr, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * T + cols, mask=cols < T, other=0.0).to(tl.float32)
    # device
    tl.store(y_ptr + row * T + cols, x, mask=cols < T)
    tl.store(lse_ptr + row, tl.sum(x, 0))


def online_softmax(x):
    # host
    y = torch.empty_like(x)
    lse = torch.empty(x.shape[0], device=x.device, dtype=torch.float32)
    copy_kernel[(x.shape[0],)](x, y, lse, x.shape[1], BLOCK=1024)
    return y, lse
"""
DEVICE_LINE, HOST_LINE, LAUNCH_LINE = 11, 17, 20


def softmax(
    *, device: str = "", host: str = "", launch: str = "BLOCK=1024", decorators: str = "", end: str = ""
) -> str:
    """A small hand-in with lines of the test's own."""
    source = COPY.replace("# device", device or "# device").replace("# host", host or "# host")
    return source.replace("BLOCK=1024", launch).replace("# decorators", decorators or "# decorators") + end


def corpus(name: str) -> str:
    return (CORPUS / name).read_text(encoding="utf-8")


def only_failure(report: CompileReport) -> Failure:
    assert len(report.failures) == 1, report
    return report.failures[0]


def test_half_precision_flash_attention_uses_the_tensor_cores_of_hopper(compile_file: Compile) -> None:
    sizes = ({"batch": 16, "queries": 8192, "keys": 8192, "head_dim": 64},)
    report = compile_file(FLASH, corpus(f"{FLASH}/ok-base2-class.py"), sizes=sizes, dtype="float16")
    assert report.failures == ()
    assert report.finished
    assert (report.target, report.shared_limit_bytes) == ("sm_90", 232448)
    (kernel,) = report.kernels
    assert kernel.kernel == "_fwd_base2"
    assert kernel.line == 12
    assert kernel.matrix_unit == "wgmma"
    assert 64 <= kernel.registers <= 128
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes == (64 + 3 * 64) * 64 * 2  # a tile of Q, and three stages of K and V of half its rows
    assert 4 <= kernel.ctas_per_sm <= 6
    assert kernel.shapes.startswith("batch=16 queries=8192 keys=8192 head_dim=64 float16; IS_CAUSAL=True HEAD=64")


def test_ieee_float32_products_use_no_matrix_unit_and_spill(compile_file: Compile) -> None:
    sizes = ({"batch": 2, "queries": 512, "keys": 512, "head_dim": 64},)
    report = compile_file("flash-attention", corpus("flash-attention/ok-three-kernels.py"), sizes=sizes)
    assert [kernel.kernel for kernel in report.kernels] == ["forward_kernel", "dkdv_kernel", "dq_kernel"]
    assert {kernel.matrix_unit for kernel in report.kernels} == {"none"}
    assert report.kernels[0].registers == 255
    assert report.kernels[0].spill_bytes > 0
    assert report.failures == ()


def test_a_variable_that_changes_type_in_a_loop_is_explained_with_its_line(compile_file: Compile) -> None:
    source = corpus(f"{FLASH}/compile-error-loop-type.py")
    failure = only_failure(compile_file(FLASH, source))
    assert failure.kind is FailureKind.COMPILE_ERROR
    assert failure.message == (
        "flat_kernel: m changes its type inside the loop: it starts as a single fp32 and becomes a block [64] of fp32; "
        "a compiled loop needs one type throughout."
    )
    assert failure.line is not None
    assert source.splitlines()[failure.line - 1].strip() == "for start in range(0, NK, BLOCK_N):"


def test_operands_of_two_types_are_a_compile_error_at_their_product(compile_file: Compile) -> None:
    source = corpus(f"{FLASH}/compile-error.py")
    failure = only_failure(compile_file(FLASH, source))
    assert failure.kind is FailureKind.COMPILE_ERROR
    assert "same dtype" in failure.message
    assert failure.line is not None
    assert "tl.dot(w.to(tl.float16), v)" in source.splitlines()[failure.line - 1]


def test_a_pipeline_too_deep_shows_as_more_shared_memory_than_there_is(compile_file: Compile) -> None:
    report = compile_file(FLASH, corpus(f"{FLASH}/needs-bigger-shared-memory.py"))
    narrow, wide = report.kernels
    assert narrow.shared_bytes <= report.shared_limit_bytes < wide.shared_bytes
    assert (narrow.ctas_per_sm, wide.ctas_per_sm) == (1, 0)
    assert "head_dim=128" in wide.shapes
    assert report.failures == ()


@pytest.mark.parametrize(
    ("source", "says", "line"),
    [
        pytest.param(softmax(launch="BLOCK=1024, num_warps=3"), "power of 2", LAUNCH_LINE, id="three-warps"),
        pytest.param(softmax(launch="BLOCK=1024, num_wraps=4"), "num_wraps", LAUNCH_LINE, id="misspelt-option"),
        pytest.param(softmax(device="x = twice(x)"), "twice is not defined", DEVICE_LINE, id="unknown-name"),
        pytest.param(
            softmax(device="z = tl.reshape(x, (128, 8)).to(tl.float16); x += tl.sum(tl.dot(z, tl.trans(z)))"),
            "K >= 16",
            DEVICE_LINE,
            id="half-precision-product-of-eight",
        ),
        pytest.param(
            softmax(
                device="x = twice(x)",
                end="\n\n@triton.jit\ndef twice(x):\n    while x is not None:\n        break\n    return x\n",
            ),
            "Break",
            27,
            id="break-in-a-callee",
        ),
        pytest.param(
            softmax(device='x = tl.inline_asm_elementwise("bogus.f32 $0, $1;", "=f,f", [x], tl.float32, True, pack=1)'),
            "'bogus'",
            LAUNCH_LINE,
            id="wrong-assembly",
        ),
    ],
)
def test_what_the_interpreter_lets_through_is_named_with_its_line(
    compile_file: Compile, source: str, says: str, line: int
) -> None:
    failure = only_failure(compile_file("online-softmax", source, sizes=ONE_SIZE))
    assert failure.kind is FailureKind.COMPILE_ERROR
    assert failure.message.startswith("copy_kernel: ")
    assert says in failure.message
    assert "\n" not in failure.message
    assert failure.line == line


def test_a_compiler_pass_that_fails_with_pages_of_output_is_one_sentence(compile_file: Compile) -> None:
    loop = "for k0 in range(0, last, BLOCK_K):"
    source = corpus(f"{FLASH}/ok-base2-class.py")
    assert loop in source
    source = source.replace(loop, "for k0 in tl.range(0, last, BLOCK_K, warp_specialize=True):")
    failure = only_failure(compile_file(FLASH, source))
    assert failure.kind is FailureKind.COMPILE_ERROR
    assert failure.message == "_fwd_base2: the compiler's pass NVGPUWarpSpecialization failed on this kernel"


def test_host_code_may_ask_for_a_gpu(compile_file: Compile) -> None:
    host = (
        "assert x.is_cuda and x.device.type == 'cuda' and x.get_device() == 0; x = x.cuda().to('cuda'); "
        "z = torch.zeros(4, device='cuda'); assert z.device == x.device; w = x[:, 1:] + z[0]; "
        "torch.cuda.synchronize(); assert torch.cuda.get_device_properties(x.device).multi_processor_count == 132"
    )
    report = compile_file("online-softmax", softmax(host=host), sizes=ONE_SIZE)
    assert report.failures == ()
    assert len(report.kernels) == 1


def test_host_code_may_look_at_its_values(compile_file: Compile) -> None:
    report = compile_file("online-softmax", softmax(host="assert x.abs().max().item() < 100"), sizes=ONE_SIZE)
    assert report.failures == ()
    assert report.finished
    assert len(report.kernels) == 1


@pytest.mark.parametrize("upstream", [None, "x"], ids=["forward", "and-backward"])
def test_indices_are_integers_and_have_no_gradient(compile_file: Compile, upstream: str | None) -> None:
    softmax_of_all = reference.load("softmax.online")

    def make_inputs(*asked: Any) -> dict[str, torch.Tensor]:
        made = softmax_of_all.make_inputs(*asked)
        return {**made, "row": torch.zeros(made["x"].shape[0], dtype=torch.int64)}

    operation = dataclasses.replace(
        softmax_of_all, inputs=("x", "row"), make_inputs=make_inputs, upstream=upstream, strided_inputs=("x",)
    )
    source = softmax(host="assert row.dtype == torch.int64; x = x + 0 * x[row]").replace("(x):", "(x, row):")
    source = source.replace("return y, lse", "return y + x, lse")  # which torch can go back through
    report = compile_file("online-softmax", source, operation=operation, sizes=ONE_SIZE)
    assert report.failures == ()
    assert report.finished
    assert len(report.kernels) == 1


def test_an_error_that_only_our_tensors_provoke_blames_nobody(compile_file: Compile) -> None:
    host = "if x.float().std().item() == 0: raise ValueError('these are zeros')"
    report = compile_file("online-softmax", softmax(host=host), sizes=ONE_SIZE)
    assert not report.finished
    assert "empty tensors" in report.unfinished
    assert report.failures == report.kernels == ()


def test_an_error_of_the_host_code_is_no_compile_error(compile_file: Compile) -> None:
    report = compile_file("online-softmax", softmax(host="raise ValueError('not today')"), sizes=ONE_SIZE)
    failure = only_failure(report)
    assert failure.kind is FailureKind.RAISES
    assert failure.line == HOST_LINE


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("def online_softmax(x:", id="syntax-error"),
        pytest.param("import scipy", id="import-error"),
        pytest.param("def softmax(x): pass", id="no-entry-point"),
        pytest.param("import os; os._exit(0)", id="leaves-at-import"),
    ],
)
def test_what_the_interpreter_reports_is_not_reported_twice(compile_file: Compile, source: str) -> None:
    report = compile_file("online-softmax", source, sizes=ONE_SIZE)
    assert not report.finished
    assert report.unfinished == "the file does not load"
    assert report.failures == report.kernels == ()


def test_a_self_test_while_loading_is_left_out(compile_file: Compile) -> None:
    end = "\n\nx = torch.ones(2, 8)\nassert torch.equal(online_softmax(x)[0], x)\n"
    report = compile_file("online-softmax", softmax(end=end), sizes=ONE_SIZE)
    assert not report.finished
    assert report.failures == ()


def test_an_offset_view_is_specialised_as_what_it_is(compile_file: Compile) -> None:
    """Its address is no multiple of 16 bytes, so that a warp cannot load four of its values at once."""
    aligned = compile_file("online-softmax", softmax(), sizes=ONE_SIZE)
    shifted = compile_file("online-softmax", softmax(host="x = x[:, 1:]"), sizes=ONE_SIZE)
    assert aligned.failures == shifted.failures == ()
    assert aligned.kernels[0].registers != shifted.kernels[0].registers


def test_configurations_that_fit_are_compiled_and_those_that_do_not_are_dropped(compile_file: Compile) -> None:
    configs = "[triton.Config({}, num_warps=4, num_stages=n) for n in (2, 8)]"
    source = corpus(f"{FLASH}/needs-bigger-shared-memory.py").replace("num_warps=4, num_stages=8", "")
    source = source.replace("@triton.jit", f'@triton.autotune({configs}, key=["Nq"])\n@triton.jit')
    sizes = ({"batch": 16, "queries": 4096, "keys": 4096, "head_dim": 128},)
    report = compile_file(FLASH, source, sizes=sizes)
    (kernel,) = report.kernels
    assert kernel.shapes.endswith("num_stages=2")
    assert kernel.shared_bytes <= report.shared_limit_bytes
    assert report.failures == ()


def test_prints_are_no_flood_here(compile_file: Compile) -> None:
    report = compile_file("online-softmax", softmax(host="print('x' * (8 << 20))"), sizes=ONE_SIZE)
    assert report.finished
    assert len(report.kernels) == 1


def test_it_compiles_without_isolation_too(assignment: Callable[..., Assignment]) -> None:
    task = assignment("online-softmax", sizes=ONE_SIZE)
    with compile_pool(task.limits, size=1, isolation="none") as pool:
        operation = reference.load(task.operation)
        report = compile_report(task, operation, softmax().encode(), pool=pool, budget_s=100.0)
    assert report.failures == ()
    assert [kernel.kernel for kernel in report.kernels] == ["copy_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("path", OK_FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_right_file_of_the_corpus_compiles(compile_file: Compile, path: Path) -> None:
    report = compile_file(path.parent.name, path.read_text(encoding="utf-8"))
    assert report.failures == ()
    assert report.finished
    assert report.kernels
    for kernel in report.kernels:
        assert 16 <= kernel.registers <= 255
        assert kernel.shared_bytes <= report.shared_limit_bytes
        assert 1 <= kernel.ctas_per_sm <= 32
        assert kernel.line is not None
    if path.parent.name == FLASH:
        assert {kernel.matrix_unit for kernel in report.kernels} <= {"wgmma", "mma"}
