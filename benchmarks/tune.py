"""Tries tiles, warps and pipeline depths for our attention kernels on the GPU at hand and says which are fastest.

    python benchmarks/tune.py [--only forward dq dkdv] [--stop-s 200] [--out FOLDER] [--compile-only]

Every candidate is compiled first, many at a time and without the GPU; those that spill registers or ask for too much
shared memory are left out. What remains runs in a process of its own, because a kernel that hangs takes the process
with it: checked against float64 on even and ragged sizes, then timed by replays of a CUDA graph. The winners
are for the tables in reference/kernels/attention.py. --compile-only needs no GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import concurrent.futures.process
import contextlib
import io
import itertools
import json
import math
import multiprocessing
import os
import queue
import re
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from references import PROJECT, attention_inputs, by_graph, forward_flops, load, plain_attention, pretend_driver

SHARED_LIMIT_BYTES = 232448
MOST_SPILLED_BYTES = 200
KERNELS = ("forward", "dq", "dkdv")
WORK = {"forward": 1.0, "dq": 1.5, "dkdv": 2.0}  # matrix products, in those of a forward
ROWS_KERNEL = "attention_bwd_rows_kernel"  # runs once for both large ones and is not timed
LENGTHS = (2048, 8192)
COMPILED_SHAPE = (2, 1024, 1024)
CHECKED_SHAPES = ((2, 512, 512), (2, 333, 517), (1, 700, 260))  # batch, queries, keys
HANG_S = 12.0  # a candidate that is silent for longer than this is given up
START_S = 30.0  # for torch and the GPU's context

Config = dict[str, Any]
Job = dict[str, Any]  # kernel, d, causal, dtype, config; then what was found


# -- candidates -------------------------------------------------------------------------------------------------------


def jobs_of(only: list[str]) -> list[Job]:
    """Every candidate; those that come first in each group are tried first."""
    groups = []
    for kernel, d, causal in itertools.product(only, (64, 128), (False, True)):
        group = {"kernel": kernel, "d": d, "causal": causal, "dtype": "bfloat16"}
        groups.append([group | {"config": config} for config in _configs(kernel, causal=causal)])
    in_turn = itertools.zip_longest(*groups)
    return [job | {"number": number} for number, job in enumerate(job for turn in in_turn for job in turn if job)]


def _configs(kernel: str, *, causal: bool) -> Iterator[Config]:
    def made(queries: int, keys: int, warps: int, stages: int, **more: bool) -> Config:
        base = {"BLOCK_Q": queries, "BLOCK_K": keys, "num_warps": warps, "num_stages": stages}
        return base | {"DESCRIBED": True} | more

    if kernel == "forward":
        for warps, (queries, keys), stages in itertools.product((4, 8), ((128, 128), (128, 64), (64, 64)), (2, 3)):
            yield made(queries, keys, warps, stages)
        return
    own = {"dq": ((128, 64), (128, 128)), "dkdv": ((64, 128), (128, 128))}[kernel]
    for (queries, keys), stages in itertools.product(own, (2, 3)):
        if not causal:  # with a mask that asks for row numbers the result is wrong
            yield made(queries, keys, 4, stages, SPECIALIZED=True)
    for warps, (queries, keys), stages in itertools.product((4, 8), ((64, 64), *own), (2, 3)):
        yield made(queries, keys, warps, stages, SPECIALIZED=False)


# -- kernels under other configurations -------------------------------------------------------------------------------


class Kernels:
    """Our attention kernels, with the configuration of one job in place of the tables."""

    def __init__(self) -> None:
        self.module = load("attention")
        self._forward, self._backward = self.module.forward_tiles, self.module.backward_tiles

    def configure(self, job: Job) -> None:
        """Use what `job` says for its kernel and the tables for the others."""
        config = job["config"]
        self.module.forward_tiles, self.module.backward_tiles = self._forward, self._backward
        if job["kernel"] == "forward":
            self.module.forward_tiles = lambda *_: config
        elif job["kernel"] == "dq":
            self.module.backward_tiles = lambda *asked: (config, self._backward(*asked)[1])
        else:
            self.module.backward_tiles = lambda *asked: (self._backward(*asked)[0], config)

    def launch(self, job: Job, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs of the kernel of `job`; of a backward only what it writes itself is worth something."""
        q, k, v, do = inputs
        if job["kernel"] == "forward":
            return list(self.module.flash_attention_forward(q, k, v, job["causal"]))
        return self.backward(job, self.saved(job, inputs), do)

    def saved(self, job: Job, inputs: list[torch.Tensor]) -> types.SimpleNamespace:
        """What a forward leaves for the backward."""
        q, k, v, _ = inputs
        if q.is_meta:
            o, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="meta")
        else:
            o, lse = self.module.flash_attention_forward(q, k, v, job["causal"])
        return types.SimpleNamespace(saved_tensors=(q, k, v, o, lse), is_causal=job["causal"])

    def backward(self, job: Job, context: types.SimpleNamespace, do: torch.Tensor, *also: str) -> list[torch.Tensor]:
        """The backward without the other one of its two large kernels, and without those in `also`."""
        others = {"dq": "attention_bwd_dkdv_kernel", "dkdv": "attention_bwd_dq_kernel"}
        with _not_launched(self.module, others[job["kernel"]], *also):
            return list(self.module.FlashAttention.backward(context, do)[:3])


class _Nothing:
    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        return lambda *_args, **_kwargs: None


@contextlib.contextmanager
def _not_launched(module: types.ModuleType, *names: str) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in names}
    for name in names:
        setattr(module, name, _Nothing())
    try:
        yield
    finally:
        for name, kernel in kept.items():
            setattr(module, name, kernel)


# -- compiling, without a GPU -----------------------------------------------------------------------------------------


def compile_job(job: Job) -> Job:
    """Registers, spills and shared memory of one candidate; its code lands in Triton's cache."""
    import triton

    kernels = Kernels()
    kernels.configure(job)
    found: list[Any] = []
    log = io.StringIO()
    run = triton.runtime.jit.JITFunction.run
    wanted = {"forward": "_fwd_", "dq": "_dq_", "dkdv": "_dkdv_"}[job["kernel"]]

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:  # noqa: ARG001
        if wanted in self.__name__:
            with contextlib.redirect_stdout(log):
                found.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    triton.runtime.jit.JITFunction.run = compiled
    try:
        for shape in (COMPILED_SHAPE, *CHECKED_SHAPES):
            kernels.launch(job, _inputs(job, shape, "meta"))
    except Exception as exc:
        return job | {"error": f"{type(exc).__name__}: {str(exc)[-200:]}"}
    finally:
        triton.runtime.jit.JITFunction.run = run
    facts: Job = {
        "spills": max((int(n) for n in re.findall(r"(\d+) bytes spill stores", log.getvalue())), default=0),
        "registers": max((int(n) for n in re.findall(r"Used (\d+) registers", log.getvalue())), default=0),
        "shared": max(one.metadata.shared for one in found),
    }
    if facts["shared"] > SHARED_LIMIT_BYTES:
        facts["error"] = "too much shared memory"
    elif facts["spills"] > MOST_SPILLED_BYTES:
        facts["error"] = "spills"
    elif job["config"].get("SPECIALIZED") and found[-1].metadata.num_warps == job["config"]["num_warps"]:
        facts["error"] = "was not specialised"
    return job | facts


def _compiler_started(arch: int) -> None:
    import triton

    pretend_driver(arch)
    triton.knobs.nvidia.dump_ptxas_log = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a pass that fails prints pages


def compile_all(jobs: list[Job], *, processes: int, stop: float) -> list[Job]:
    """All jobs with what the compiler said; jobs that were not done by `stop` are left out."""
    done: list[Job] = []
    arch = 10 * torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 90

    def started() -> concurrent.futures.ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        return concurrent.futures.ProcessPoolExecutor(processes, spawn, _compiler_started, (arch,))

    pool, left = started(), list(jobs)
    while left and time.monotonic() < stop:
        futures = {pool.submit(compile_job, job): job for job in left}
        try:
            for future in concurrent.futures.as_completed(futures, timeout=max(1.0, stop - time.monotonic())):
                done.append(future.result())
                left.remove(futures[future])
        except concurrent.futures.process.BrokenProcessPool:
            pool = started()  # a compiler that aborts takes the pool along
        except TimeoutError:
            break
    pool.shutdown(wait=False, cancel_futures=True)
    return done


def _inputs(job: Job, shape: tuple[int, int, int], device: str) -> list[torch.Tensor]:
    n_batch, n_queries, n_keys = shape
    dtype = getattr(torch, job["dtype"])
    lengths = (n_queries, n_keys, n_keys, n_queries)
    if device == "meta":
        return [torch.empty(n_batch, length, job["d"], device=device, dtype=dtype) for length in lengths]
    return [torch.randn(n_batch, length, job["d"], device=device).to(dtype) for length in lengths]


# -- timing, in a process of its own ----------------------------------------------------------------------------------


def timer(jobs: Any, answers: Any) -> None:
    """Check and time the jobs that come, one answer each."""
    kernels = Kernels()
    while (job := jobs.get()) is not None:
        try:
            kernels.configure(job)
            answer = {"error_ratio": _error(kernels, job)}
            if not answer["error_ratio"] <= 1.0:
                answer["error"] = f"wrong: {answer['error_ratio']:.3g} of the limit"
            else:
                answer["rates"] = _rates(kernels, job)
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {str(exc)[:200]}"}
            try:
                torch.cuda.synchronize()
            except Exception:  # an illegal access, say: nothing runs in this process any more
                answers.put(job | answer | {"fatal": True})
                return
        answers.put(job | answer)
        torch.cuda.empty_cache()


def _error(kernels: Kernels, job: Job) -> float:
    """The largest error against float64, over what PyTorch's own chain allows."""
    worst = 0.0
    for shape in CHECKED_SHAPES:
        inputs = _inputs(job, shape, "cuda")
        got = kernels.launch(job, inputs)
        torch.cuda.synchronize()
        want = _plain(job, [x.double() for x in inputs])
        for one, right, plain in zip(got, want, _plain(job, inputs), strict=True):
            if right is None:
                continue
            limit = 2 * (plain.double() - right).norm() / right.norm() + 1e-3
            ratio = float((one.double() - right).norm() / right.norm() / limit)
            worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return worst


def _plain(job: Job, inputs: list[torch.Tensor]) -> list[Any]:
    """What the kernel of `job` should give, by plain torch operations in the dtype of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    o, lse = plain_attention(*leaves, causal=job["causal"])
    if job["kernel"] == "forward":
        return [o.detach(), lse.detach()]
    dq, dk, dv = torch.autograd.grad(o, leaves, inputs[3])
    return [dq, None, None] if job["kernel"] == "dq" else [None, dk, dv]


def _rates(kernels: Kernels, job: Job) -> dict[str, float]:
    """TFLOP/s by length of the kernel in question alone."""
    found = {}
    for t in LENGTHS:
        inputs = attention_inputs(job["d"], t, job["dtype"])
        if job["kernel"] == "forward":
            ms = by_graph(lambda inputs=inputs: kernels.launch(job, inputs))
        else:
            context, do = kernels.saved(job, inputs), inputs[3]
            kernels.backward(job, context, do)
            ms = by_graph(lambda context=context, do=do: kernels.backward(job, context, do, ROWS_KERNEL))
        work = WORK[job["kernel"]] * forward_flops(job["d"], t, causal=job["causal"])
        found[str(t)] = round(work / ms / 1e9, 1)
    return found


def time_all(jobs: list[Job], *, stop: float, heard: Callable[[Job], None]) -> None:
    """Send the jobs to a timing process one by one; one that is silent or has lost its GPU is replaced."""
    spawn = multiprocessing.get_context("spawn")
    process: Any = None
    questions, answers = spawn.Queue(), spawn.Queue()
    for job in jobs:
        if time.monotonic() > stop:
            break
        patience_s = HANG_S
        if process is None:
            questions, answers = spawn.Queue(), spawn.Queue()
            process = spawn.Process(target=timer, args=(questions, answers), daemon=True)
            process.start()
            patience_s += START_S
        questions.put(job)
        try:
            answer = answers.get(timeout=patience_s)
        except queue.Empty:
            answer = job | {"error": f"silent for {patience_s:.0f} s", "fatal": True}
        heard(answer)
        if answer.get("fatal"):
            process.kill()
            process.join()
            process = None
    if process is not None:
        questions.put(None)
        process.join(10)


# -- the program ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Compile, check, time, choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(KERNELS), choices=KERNELS)
    parser.add_argument("--out", type=Path, default=PROJECT / "artifacts" / "tune")
    parser.add_argument("--stop-s", type=float, default=200.0, help="nothing begins after so many seconds")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2, help="that compile")
    parser.add_argument("--compile-only", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    jobs = jobs_of(arguments.only)
    compiled = compile_all(jobs, processes=arguments.processes, stop=began + arguments.stop_s / 2)
    print(f"{len(compiled)} of {len(jobs)} compiled in {time.monotonic() - began:.0f} s", flush=True)
    if arguments.compile_only:
        for job in sorted(compiled, key=_group):
            print(_line(job), flush=True)
        return 0
    found = [job for job in compiled if "error" in job]

    def heard(job: Job) -> None:
        found.append(job)
        (arguments.out / "tune.json").write_text(json.dumps(found, indent=1))

    good = sorted((job for job in compiled if "error" not in job), key=lambda job: job["number"])
    time_all(good, stop=began + arguments.stop_s, heard=heard)
    _print_best(found)
    print(f"{time.monotonic() - began:.0f} s, {sum('rates' in job for job in found)} timed")
    return 0


def _group(job: Job) -> tuple[Any, ...]:
    return job["kernel"], job.get("d", 0), job.get("causal", False)


def _line(job: Job) -> str:
    config = " ".join(f"{key.lower()[:7]}={value}" for key, value in job.get("config", {}).items())
    facts = " ".join(f"{key[:3]}={job[key]}" for key in ("registers", "spills", "shared", "error") if key in job)
    rates = " ".join(f"{key}:{value}" for key, value in job.get("rates", {}).items())
    return f"{job['kernel']} {job.get('d', '')} {'causal' if job.get('causal') else ''} [{config}] {facts} {rates}"


def _print_best(found: list[Job], *, best: int = 3) -> None:
    groups: dict[tuple[Any, ...], list[Job]] = {}
    for job in found:
        groups.setdefault(_group(job), []).append(job)
    for key in sorted(groups):
        timed = [job for job in groups[key] if "rates" in job]
        for job in sorted(timed, key=lambda job: -sum(job["rates"].values()))[:best]:
            print(_line(job))
    reasons = Counter(job["error"][:110] for job in found if "error" in job)
    for text, count in reasons.most_common(12):
        print(f"left out {count}: {text}")


if __name__ == "__main__":
    sys.exit(main())
