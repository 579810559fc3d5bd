"""Our kernels beside torch's own on the GPU at hand: attention forward and backward, the fused chain, softmax.

    python benchmarks/references.py [--dtypes bfloat16 ...] [--lengths 2048 ...] [--stop-s 60] [--out FOLDER]

Times are medians of replays of a CUDA graph, all of one run. TFLOP/s count 4 T² d a head for a forward and 2.5 times
that for a backward, half of it when causal; TB/s count x read once and y written once. The section `references` of
benchmarks/gpu.py is this.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PROJECT = Path(__file__).resolve().parents[1]
KERNELS = PROJECT / "reference" / "kernels"
DTYPES = ("bfloat16", "float16")
LENGTHS = (2048, 4096, 8192, 16384)
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
ROW_SHAPES = {"softmax": ((16384, 8192), (8192, 32768)), "layer_norm": ((8 * 4096, 4096),)}
CHECKED_ROWS = ((300, 4096), (37, 4001))
CHECKED_LENGTHS = ((512, 512), (333, 517))  # queries, keys
CHECKED = (("bfloat16", 16), ("bfloat16", 32), ("bfloat16", 64), ("bfloat16", 128), ("float16", 64), ("float32", 64))
DROPPED, SEED = 0.1, 1234
FLOPS_OF = {"forward": 1.0, "backward": 2.5}  # times those of a forward
COMPILING_S = 150.0  # at most

Row = dict[str, Any]


@functools.cache
def load(name: str, folder: Path = KERNELS) -> types.ModuleType:
    """One of our kernel files, as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_kernel", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_graph(
    call: Callable[..., Any], *, before: Callable[[], Any] | None = None, window_ms: float = 5.0, windows: int = 5
) -> float:
    """Milliseconds of one call, by replays of a graph of several: what Python costs at a launch is not in it.

    Args:
        before: called once, on the stream that is captured; what it returns is the argument of `call`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        given = () if before is None else (before(),)
        for _ in range(2):
            call(*given)
        n_calls = max(1, min(64, int(window_ms / max(_by_events(lambda: call(*given)), 1e-3))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(n_calls):
                call(*given)
        graph.replay()
        times = [_by_events(graph.replay) / n_calls for _ in range(windows)]
    return median(times)


def _by_events(act: Callable[[], Any]) -> float:
    start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    start.record()
    act()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))


# -- compiling ahead --------------------------------------------------------------------------------------------------


def pretend_driver(arch: int) -> None:
    """Let this process compile for a GPU of that architecture (90 is Hopper) and launch nothing."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int | None = None) -> int:  # noqa: ARG002
            return 0

        def get_active_torch_device(self) -> Any:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            return None

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

    triton.runtime.driver.set_active(Driver())
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)  # type: ignore[assignment]  # noqa: ARG005


def compile_ahead(jobs: Sequence[tuple[Any, ...]], *, stop_s: float, folder: Path = KERNELS) -> int:
    """Compile what the comparison will launch, on all cores, into Triton's cache. Returns how many jobs were done.

    Args:
        jobs: (dtype, d, causal, step, (queries, keys), ...) for attention, (kernel, dtype) for rows.
    """
    arch = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 90
    ends = time.monotonic() + stop_s
    # leaving it ends those that are still at work: nothing is measured beside them, and nobody waits for them
    with multiprocessing.get_context("spawn").Pool(os.cpu_count(), pretend_driver, (arch,)) as pool:
        later = [pool.apply_async(_compile, (job, folder)) for job in jobs]
        for one in later:
            one.wait(max(0.0, ends - time.monotonic()))
        return sum(one.ready() and one.successful() for one in later)


def _compile(job: tuple[Any, ...], folder: Path) -> None:
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(self, *args, grid=grid, warmup=True, **kwargs)  # noqa: ARG005
    try:
        if len(job) == 2:
            name, dtype = job
            module = load(name, folder)
            for shape in (*ROW_SHAPES[name], *CHECKED_ROWS):
                _row_call(name, module)(*_row_inputs(name, shape, dtype, "meta"))
            return
        dtype, d, causal, step, *lengths = job
        module = load("attention", folder)
        for n_queries, n_keys in lengths:
            q, do = (torch.empty(2, n_queries, d, dtype=getattr(torch, dtype), device="meta") for _ in range(2))
            k, v = (torch.empty(2, n_keys, d, dtype=getattr(torch, dtype), device="meta") for _ in range(2))
            if step == "forward":
                module.flash_attention_forward(q, k, v, causal)
                continue
            lse = torch.empty(q.shape[:2], device="meta")
            context = types.SimpleNamespace(saved_tensors=(q, k, v, q, lse), is_causal=causal)
            module.FlashAttention.backward(context, do)
    finally:
        JITFunction.run = run


# -- attention --------------------------------------------------------------------------------------------------------


def heads_of(d: int, t: int) -> int:
    """How many heads fill the GPU: 128k tokens in all with 64 values a head, half of it with 128."""
    return max(2, 2048 * 64 // t // (d // 64))


def forward_flops(d: int, t: int, *, causal: bool) -> float:
    """What one forward over `heads_of` heads must compute."""
    return 4 * d * heads_of(d, t) * t * t / (2 if causal else 1)


def attention_inputs(d: int, t: int, dtype: str) -> list[torch.Tensor]:
    """q, k, v and the gradient of o, [heads, t, d]."""
    return [torch.randn(heads_of(d, t), t, d, device="cuda", dtype=getattr(torch, dtype)) for _ in range(4)]


def worst_error(module: types.ModuleType, dtype: str, d: int, *, causal: bool) -> float:
    """The largest error of o, dq, dk, dv against float64 on even and ragged sizes, over what torch's chain allows."""
    worst = 0.0
    for n_queries, n_keys in CHECKED_LENGTHS:
        q, do = (torch.randn(2, n_queries, d, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
        k, v = (torch.randn(2, n_keys, d, device="cuda").to(getattr(torch, dtype)) for _ in range(2))
        got = _gradients(lambda *leaves: module.FlashAttention.apply(*leaves, causal), (q, k, v), do)

        def plain(*leaves: torch.Tensor) -> torch.Tensor:
            return plain_attention(*leaves, causal=causal)[0]

        want = _gradients(plain, (q.double(), k.double(), v.double()), do.double())
        base = _gradients(plain, (q, k, v), do)
        for one, right, torchs in zip(got, want, base, strict=True):
            limit = 2 * (torchs.double() - right).norm() / right.norm() + (1e-5 if dtype == "float32" else 1e-3)
            ratio = float((one.double() - right).norm() / right.norm() / limit)
            worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return worst


def _gradients(
    attend: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], do: torch.Tensor
) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = attend(*leaves)
    return [o.detach(), *torch.autograd.grad(o, leaves, do)]


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse by one torch operation after another, in the dtype of the inputs."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1)


def torch_attention(backend: str, inputs: Sequence[torch.Tensor], *, causal: bool, backward: bool) -> float:
    """Milliseconds of forward or backward of one of torch's backends."""
    q, k, v, do = (x[None] for x in inputs)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)

    with sdpa_kernel(BACKENDS[backend]):
        if backward:
            return by_graph(lambda o: torch.autograd.grad(o, leaves, do, retain_graph=True), before=forward)
        with torch.no_grad():
            return by_graph(forward)


def our_attention(module: types.ModuleType, inputs: Sequence[torch.Tensor], *, causal: bool, backward: bool) -> float:
    """Milliseconds of forward or backward of our kernels."""
    q, k, v, do = inputs
    if not backward:
        return by_graph(lambda: module.flash_attention_forward(q, k, v, causal))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return by_graph(
        lambda o: torch.autograd.grad(o, leaves, do, retain_graph=True),
        before=lambda: module.FlashAttention.apply(*leaves, causal),
    )


def attention(module: types.ModuleType, named: Row) -> Row:
    """Ours, torch's Flash and cuDNN, forward or backward, TFLOP/s; `named` says of what."""
    dtype, t, d, causal = named["dtype"], named["t"], named["d"], named["mask"] == "causal"
    work = forward_flops(d, t, causal=causal) * FLOPS_OF[named["kernel"]]
    backward = named["kernel"] == "backward"
    inputs = attention_inputs(d, t, dtype)
    timed = {"ours": functools.partial(our_attention, module)} | {
        backend: functools.partial(torch_attention, backend) for backend in BACKENDS
    }
    found: Row = {}
    for who, time_it in timed.items():
        try:
            found[who] = round(work / time_it(inputs, causal=causal, backward=backward) / 1e9, 1)
        except Exception as exc:  # the others are worth knowing without it
            found["failed"] = f"{found['failed']}; " if "failed" in found else ""
            found["failed"] += f"{who}: {_said(exc)}"
    return found | {f"of_{who}": round(found["ours"] / found[who], 2) for who in BACKENDS if {"ours", who} <= {*found}}


# -- rows -------------------------------------------------------------------------------------------------------------


@functools.cache
def copy_rate() -> float:
    """TB/s of a device-to-device copy of 4 GiB, bytes read and written. By events: in a graph a copy is slower."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = [_by_events(lambda: target.copy_(source)) for _ in range(7)]
    return 2 * source.numel() / median(times[2:]) / 1e9


def rows(module: types.ModuleType, named: Row) -> Row:
    """Ours and torch's chain in eager mode, TB/s of x and y, beside a copy's; `named` says of what."""
    name, shape = named["kernel"], tuple(map(int, named["shape"].split("x")))
    given = _row_inputs(name, shape, named["dtype"], "cuda")
    moved = 2 * given[0].numel() * given[0].element_size()
    calls = (_row_call(name, module), _softmax_chain if name == "softmax" else _layer_norm_chain)
    ours, eager = (moved / by_graph(functools.partial(call, *given)) / 1e9 for call in calls)
    copied = copy_rate()
    found = {"ours": round(ours, 3), "eager": round(eager, 3), "copy": round(copied, 3)}
    return found | {"of_copy": round(ours / copied, 3), "of_eager": round(ours / eager, 2)}


def _row_inputs(name: str, shape: tuple[int, ...], dtype: str, device: str) -> list[torch.Tensor]:
    x = torch.randn(shape, device=device).to(getattr(torch, dtype))
    return [x] if name == "softmax" else [x, *(torch.randn(shape[1], device=device).to(x.dtype) for _ in range(3))]


def _row_call(name: str, module: types.ModuleType) -> Callable[..., Any]:
    if name == "softmax":
        return module.online_softmax  # type: ignore[no-any-return]
    return lambda *given: module.fused_bias_dropout_layernorm(*given, DROPPED, SEED)


def _softmax_chain(x: torch.Tensor) -> Any:
    return torch.softmax(x, dim=-1), torch.logsumexp(x, dim=-1)


def _layer_norm_chain(x: torch.Tensor, bias: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> Any:
    z = torch.nn.functional.dropout(x + bias, DROPPED)
    return torch.nn.functional.layer_norm(z, (x.shape[-1],), gamma, beta)


# -- the program ------------------------------------------------------------------------------------------------------


def compare(
    dtypes: Sequence[str] = DTYPES, lengths: Sequence[int] = LENGTHS, *, stop_s: float = 600.0, folder: Path = KERNELS
) -> Iterator[Row]:
    """Everything, one row at a time, each with what it reaches of what is wanted.

    A row whose measurement failed says so under `failed`, and the others are measured all the same. Nothing begins
    after `stop_s`: the last row counts what did not.
    """
    stop = time.monotonic() + stop_s
    yield _guarded({"kernel": "compiled"}, lambda: _compiled(dtypes, folder, stop_s=min(stop_s / 2, COMPILING_S)))
    n_left = 0
    for named in _asked(dtypes, lengths):
        if time.monotonic() > stop:
            n_left += 1
        elif named["kernel"] in ROW_SHAPES:
            yield _guarded(named, lambda named=named: rows(load(named["kernel"], folder), named))
        elif named["kernel"] == "error":
            yield _guarded(named, lambda named=named: _checked(load("attention", folder), named))
        else:
            yield _guarded(named, lambda named=named: attention(load("attention", folder), named))
    if n_left:
        yield {"kernel": "not run", "failed": f"{n_left} rows, for lack of time"}


def _asked(dtypes: Sequence[str], lengths: Sequence[int]) -> Iterator[Row]:
    """What each row is about, in order."""
    for dtype, name in itertools.product(dtypes, ROW_SHAPES):
        for shape in ROW_SHAPES[name]:
            yield {"kernel": name, "dtype": dtype, "shape": "x".join(map(str, shape))}
    for (dtype, d), mask in itertools.product(CHECKED, ("full", "causal")):
        yield {"kernel": "error", "dtype": dtype, "d": d, "mask": mask}
    for dtype, t, d, mask, kernel in itertools.product(dtypes, lengths, (64, 128), ("full", "causal"), FLOPS_OF):
        yield {"kernel": kernel, "dtype": dtype, "d": d, "mask": mask, "t": t}


def _compiled(dtypes: Sequence[str], folder: Path, *, stop_s: float) -> Row:
    steps = ("backward", "forward")
    jobs: list[tuple[Any, ...]] = [
        (*case, step, (1024, 1024)) for case in itertools.product(dtypes, (64, 128), (False, True)) for step in steps
    ]
    jobs += itertools.product(ROW_SHAPES, dtypes)
    checked = [(dtype, d, causal) for dtype, d in CHECKED for causal in (False, True)]
    jobs += [(*case, step, *CHECKED_LENGTHS) for case in checked for step in steps]
    began = time.monotonic()
    n_done = compile_ahead(jobs, stop_s=stop_s, folder=folder)
    return {"jobs": n_done, "of": len(jobs), "seconds": round(time.monotonic() - began, 1)}


def _checked(module: types.ModuleType, named: Row) -> Row:
    error = worst_error(module, named["dtype"], named["d"], causal=named["mask"] == "causal")
    return {"of_limit": round(error, 3)}


def _guarded(named: Row, measure: Callable[[], Row]) -> Row:
    try:
        return named | measure()
    except Exception as exc:
        traceback.print_exc()
        return named | {"failed": _said(exc)}


def _said(exc: Exception) -> str:
    return f"{type(exc).__name__}: {str(exc)[:300]}"


def wanted(row: Row) -> bool:
    """Whether `row` reaches what we set out for; one that failed reaches nothing."""
    if "failed" in row:
        return False
    if row["kernel"] == "forward":
        return bool(row["of_cudnn"] >= 0.9 and row["of_flash"] >= 1.3)
    if row["kernel"] == "backward":
        return bool(row["of_flash"] >= 1.0)
    if row["kernel"] == "error":
        return bool(row["of_limit"] <= 1.0)
    if row["kernel"] == "compiled":
        return bool(row["jobs"] == row["of"])
    return bool(row["of_copy"] >= 0.9 and (row["kernel"] == "softmax" or row["of_eager"] >= 3.0))


def told(row: Row) -> str:
    """One line of the table."""
    said = (value if isinstance(value, str) else f"{key} {value}" for key, value in row.items())
    return "  ".join(said) + ("" if wanted(row) else "  SHORT")


def main() -> int:
    """Print the table and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--lengths", nargs="*", type=int, default=LENGTHS)
    parser.add_argument("--stop-s", type=float, default=600.0, help="no further row after so many seconds")
    parser.add_argument("--kernels", type=Path, default=KERNELS, help="the folder with our kernel files")
    parser.add_argument("--out", type=Path, default=PROJECT / "artifacts" / "references")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: list[Row] = []
    for row in compare(arguments.dtypes, arguments.lengths, stop_s=arguments.stop_s, folder=arguments.kernels):
        found.append(row | {"wanted": wanted(row)})
        print(told(row), flush=True)
        (arguments.out / "references.json").write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
