"""The candidate's half of a GPU, as far as it needs none."""

import io
import mmap
import os
import subprocess
import sys
import tarfile
import types
from pathlib import Path

import pytest
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from workers import gate
from workers.devices import cuda_candidate
from workers.devices.cuda_candidate import CudaHalf, without_launches
from workers.storages import OperationCounts, Poison

ROOT = Path(__file__).resolve().parents[2]


@JITFunction  # as `triton.jit` makes it where nothing is interpreted, whatever the environment of this test run says
def add_one(x_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)


def test_launches_do_nothing_while_they_are_switched_off_and_are_back_afterwards():
    before = (JITFunction.run, CompiledKernel.__getitem__, torch.cuda.CUDAGraph.replay)
    x = torch.zeros(16)
    with without_launches():
        assert add_one[(1,)](x, BLOCK=16) is None
        assert CompiledKernel.__getitem__(object(), (1, 1, 1))(x) is None
        assert torch.cuda.CUDAGraph.replay(object()) is None
    assert x.eq(0).all()
    assert before == (JITFunction.run, CompiledKernel.__getitem__, torch.cuda.CUDAGraph.replay)


def test_launches_are_back_after_an_error_too():
    before = JITFunction.run
    with pytest.raises(ValueError, match="of the file"), without_launches():
        raise ValueError("of the file")
    assert JITFunction.run is before


def test_operations_that_compute_are_counted_and_the_rest_is_not():
    counts = OperationCounts("submission.py")
    x = torch.randn(8, 4)
    with Poison(counts, fill=True):
        y = torch.empty(8, 4)
        assert y.isnan().all()
        y.copy_(x).t().contiguous()
        torch.zeros(3)
        for _ in range(2):
            x @ x.t()
        torch.ops.aten._scaled_dot_product_attention_math(*[x[None, None]] * 3)
    facts = counts.facts()
    counted = {row["op"]: row["count"] for row in facts["torch_ops"]}
    assert counted["mm"] == 2
    assert not {"empty", "copy_", "clone", "t", "zeros"} & counted.keys()
    assert len(facts["torch_ops"]) <= 24


def test_library_attention_is_named_by_the_operation_that_the_dispatcher_sees():
    counts = OperationCounts("submission.py")
    q = torch.randn(1, 1, 8, 16)
    with Poison(counts, fill=False):
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    assert [row["op"] for row in counts.facts()["library_calls"]] == ["_scaled_dot_product_flash_attention_for_cpu"]


def test_kernels_that_were_not_compiled_ahead_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (tmp_path / "OURS").mkdir()
    (tmp_path / "OURS" / "warm_kernel.cubin").touch()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("AHEAD/forward.cubin", "AHEAD/forward.ptx", "../outside.cubin", "/tmp/outside.cubin"):
            entry = tarfile.TarInfo(name)
            entry.size = 6
            archive.addfile(entry, io.BytesIO(b"kernel"))
    half = CudaHalf.__new__(CudaHalf)
    half._host = mmap.mmap(-1, 1 << 20)
    half._host[: len(packed.getvalue())] = packed.getvalue()
    half._compiled_before = {"OURS/warm_kernel.cubin"}
    half._unpack_cache({"length": len(packed.getvalue())})
    assert (tmp_path / "AHEAD" / "forward.ptx").read_bytes() == b"kernel"
    assert not (tmp_path.parent / "outside.cubin").exists()
    assert half._late({}) == {"op": "late", "names": []}
    (tmp_path / "LATER").mkdir()
    (tmp_path / "LATER" / "dq_kernel.cubin").touch()
    assert half._late({}) == {"op": "late", "names": ["dq_kernel"]}


# -- getting ready -----------------------------------------------------------------------------------------------------


def test_only_what_needs_the_gpu_is_done_inside_the_gate(monkeypatch):
    """Whoever measures waits for those inside: seconds of compilers there are seconds of everybody's GPU."""
    seen = []
    arena = mmap.mmap(-1, 4096)

    def step(name, result=None):
        return lambda: seen.append((name, gate.is_busy(arena))) or result

    monkeypatch.setattr(cuda_candidate, "build_ahead", step("build", ""))
    monkeypatch.setattr(cuda_candidate, "make_context", step("context", torch.zeros(1)))
    monkeypatch.setattr(cuda_candidate, "_cubins", step("look", set()))
    monkeypatch.setattr(cuda_candidate, "gc", types.SimpleNamespace(collect=step("collect"), freeze=lambda: None))
    monkeypatch.setattr(cuda_candidate, "watch_launches", lambda: None)
    monkeypatch.setattr(cuda_candidate, "_count_tuning", lambda: None)
    CudaHalf(arena, "submission.py")
    assert seen == [("build", False), ("context", True), ("look", False), ("collect", False)]
    assert not gate.is_busy(arena)


def test_a_candidate_that_gets_no_context_keeps_nobody_waiting(monkeypatch):
    def refused():
        raise RuntimeError("CUDA error: out of memory")

    arena = mmap.mmap(-1, 4096)
    for name in ("watch_launches", "_count_tuning"):
        monkeypatch.setattr(cuda_candidate, name, lambda: None)
    monkeypatch.setattr(cuda_candidate, "build_ahead", lambda: "")
    monkeypatch.setattr(cuda_candidate, "make_context", refused)
    with pytest.raises(RuntimeError, match="out of memory"):
        CudaHalf(arena, "submission.py")
    assert not gate.is_busy(arena)


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """A candidate's cache, and what is built in it for the host; Triton's own compiler is the real one."""
    made = []
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.bindings.runtime"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(nvidia, "CudaUtils", lambda: made.append("utils"))
    monkeypatch.setattr(nvidia, "CudaLauncher", lambda src, metadata: made.append(metadata.name))
    monkeypatch.setattr(cuda_candidate.triton_driver, "_active", None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(gate.ARCH, "90")
    return made


def run_where_nothing_is_interpreted(test):
    """In a process of its own: other folders of tests have Triton interpret, for all of this one's life."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_a_first_launch_finds_all_that_it_needs_built(builds, monkeypatch, request):
    if isinstance(tl.sum, InterpretedFunction):
        run_where_nothing_is_interpreted(request.node.nodeid.partition("@")[0])  # xdist appends the group
        return
    assert not cuda_candidate.build_ahead()
    assert builds == ["utils", "_warm_kernel"]
    assert len(cuda_candidate._cubins()) == 1
    assert cuda_candidate.triton_driver._active is None  # the real one is asked for at the launch

    def not_now(*_args, **_kwargs):
        raise AssertionError("something is compiled at the launch")

    monkeypatch.setattr(subprocess, "run", not_now)
    active = types.SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(cuda_candidate.triton_driver, "_active", active)
    x = torch.zeros(16)
    assert x.data_ptr() % 16 == 0
    kernel = cuda_candidate._warm_kernel.run(x, 16, BLOCK=16, grid=(1,), warmup=True)
    assert kernel.metadata.name == "_warm_kernel"


@pytest.mark.parametrize("lacks", ["arch", "compiler"])
def test_what_cannot_be_built_ahead_is_left_to_the_launch(builds, monkeypatch, lacks):
    if lacks == "arch":
        monkeypatch.delenv(gate.ARCH)
    else:
        monkeypatch.setattr(nvidia, "CudaUtils", lambda: (_ for _ in ()).throw(RuntimeError("no C compiler")))
    said = cuda_candidate.build_ahead()
    assert cuda_candidate.triton_driver._active is None
    assert {"arch": "KeyError", "compiler": "no C compiler"}[lacks] in said  # for the worker's log
