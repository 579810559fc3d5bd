"""The candidate's half of a GPU, as far as it needs none."""

import io
import mmap
import tarfile

import pytest
import torch
import triton.language as tl
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from workers.devices.cuda_candidate import CudaHalf, without_launches
from workers.storages import OperationCounts, Poison


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
