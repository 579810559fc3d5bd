"""The mended interpreter computes what Triton's own does, and rightly where that one does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
from audit_calls import CORPUS, load, normal

from workers import interpreter

PATH = Path(__file__).parent / "audited_kernels.py"
kernels = load(PATH)

# runs files under Triton's own interpreter in a process of its own; prints the bytes of every output
STOCK = """
import hashlib, importlib.util, json, sys, warnings
warnings.simplefilter("ignore")
import torch
calls = json.load(sys.stdin)
digests = {}
for path, name, arguments in calls:
    spec = importlib.util.spec_from_file_location("stock_" + str(len(digests)), path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    values = []
    for item in arguments:
        if isinstance(item, dict):
            generator = torch.Generator().manual_seed(item["seed"])
            item = torch.randn(item["shape"], generator=generator).to(getattr(torch, item["dtype"]))
        values.append(item)
    results = getattr(module, name)(*values)
    results = results if isinstance(results, tuple) else (results,)
    digests[path + str(arguments)] = [hashlib.sha256(r.contiguous().numpy().tobytes()).hexdigest() for r in results]
print(json.dumps(digests))
"""


def _run(calls, *, mended):
    program = STOCK
    if mended:
        program = STOCK.replace("calls = ", "from workers.interpreter import prepare_interpreter as p; p()\ncalls = ")
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(calls),
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=CORPUS.parent.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return json.loads(done.stdout)


def _tensor(*shape, seed, dtype="float32"):
    return {"shape": list(shape), "seed": seed, "dtype": dtype}


def _corpus_calls():
    for path in sorted((CORPUS / "flash-attention-forward").glob("ok-*.py")):
        for dtype in ("float32", "float16"):
            q, k, v = (_tensor(1, 40, 32, seed=seed, dtype=dtype) for seed in range(3))
            yield [str(path), "flash_attention_forward", [q, k, v, True]]
    for path in sorted((CORPUS / "online-softmax").glob("ok-*.py")):
        if "autotune" not in path.stem:  # Triton's own needs a driver for it
            yield [str(path), "online_softmax", [_tensor(2, 200, seed=1)]]
    for path in sorted((CORPUS / "fused-bias-dropout-layernorm").glob("ok-*.py")):
        vectors = [_tensor(70, seed=seed) for seed in (2, 3, 4)]
        yield [str(path), "fused_bias_dropout_layernorm", [_tensor(1, 70, seed=1), *vectors, 0.25, 11]]


def test_correct_files_have_the_bits_that_tritons_own_interpreter_gives():
    calls = list(_corpus_calls())
    stock, mended = _run(calls, mended=False), _run(calls, mended=True)
    assert len(stock) == len(calls)
    assert mended == stock


# ---- bfloat16


def test_a_product_in_bfloat16_is_exact_to_its_rounding():
    a, b = normal(16, 32, seed=1).bfloat16(), normal(32, 16, seed=2).bfloat16()
    c, wide = torch.empty(16, 16, dtype=torch.bfloat16), torch.empty(16, 16)
    kernels.product[(1,)](a, b, c, M=16, N=16, K=32)
    kernels.product[(1,)](a, b, wide, M=16, N=16, K=32)
    exact = a.double() @ b.double()
    assert (wide - exact).abs().max() <= 1e-5 * exact.abs().max()
    assert torch.equal(c, wide.bfloat16())


def test_arithmetic_in_bfloat16_rounds_as_torch_does():
    x, y = normal(64, seed=1).bfloat16(), normal(64, seed=2).bfloat16()
    z = torch.empty_like(x)
    kernels.arithmetic[(1,)](x, y, z, WIDTH=64)
    assert torch.equal(z, torch.where(x > y, x * y + x - y, -torch.minimum(x, y) + 1.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_reduction_is_right_in_every_type(dtype):
    x = normal(128, dtype=dtype)
    y = torch.empty(128, dtype=dtype)
    kernels.softmax_in_its_type[(1,)](x, y, WIDTH=128)
    expected = torch.softmax((x - x.max()).double() * 0.5, 0)
    assert (y.double() - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.max()


def test_narrowing_rounds_to_nearest_even_and_keeps_infinities_and_nan():
    values = np.array([1.0, 1.00390625, 1.01171875, 3.4e38, np.inf, -np.inf, np.nan, -0.0], dtype=np.float32)
    got = torch.from_numpy(interpreter._narrow(values).view(np.int16)).view(torch.bfloat16)
    expected = torch.from_numpy(values).bfloat16()
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))


# ---- custom reductions and scans


def test_custom_reductions_keep_the_order_of_elements():
    x = normal(4, 8)
    sums, best = torch.empty(4), torch.empty(4)
    where, scan = torch.empty(4, dtype=torch.int32), torch.empty(4, 8)
    kernels.custom_reductions[(1,)](x, sums, best, where, scan, M=4, N=8)
    pairs = x
    while pairs.shape[1] > 1:
        pairs = 0.5 * pairs[:, ::2] + pairs[:, 1::2]
    running = [x[:, 0]]
    for column in range(1, 8):
        running.append(0.5 * running[-1] + x[:, column])
    assert torch.equal(sums, pairs[:, 0])
    assert torch.equal(best, x.max(1).values)
    assert torch.equal(where.long(), x.argmax(1))
    assert torch.allclose(scan, torch.stack(running, 1))


# ---- autotune, heuristics, driver


def test_autotune_runs_the_first_configuration_that_compiles_once():
    x, y = normal(20), torch.full((20,), 100.0)
    kernels.tuned_add[(1,)](x, y, 20)
    assert torch.equal(y, x)  # reset_to_zero, then added once
    assert kernels.tuned_add.best_config.kwargs == {"WIDTH": 32}


def test_heuristics_choose_from_the_arguments():
    x, y = normal(20), torch.zeros(20)
    kernels.heuristic_copy[(1,)](x, y, 20)
    assert torch.equal(x, y)


def test_device_properties_answer_without_a_device():
    properties = triton.runtime.driver.active.utils.get_device_properties(0)
    assert properties["multiprocessor_count"] == 132
    assert triton.runtime.driver.active.get_current_target().backend == "cuda"
    assert not torch.cuda.is_available()


def test_a_callable_grid_gets_the_arguments_as_plain_numbers():
    x, y = normal(4, 16), torch.empty(4, 16)
    seen = {}

    def grid(meta):
        seen.update(meta)
        return (triton.cdiv(meta["N"], 4),)

    kernels.copy_rows[grid](x, y, 16, WIDTH=16)
    assert torch.equal(x, y)
    assert type(seen["N"]) is int


def test_a_grid_of_four_dimensions_is_refused():
    with pytest.raises(ValueError, match="4 dimensions"):
        kernels.heuristic_copy[(1, 1, 1, 1)](torch.zeros(4), torch.zeros(4), 4)


def test_preparing_twice_changes_nothing():
    before = triton.language.tensor.__init__
    interpreter.prepare_interpreter()
    assert triton.language.tensor.__init__ is before


def test_nothing_is_prepared_in_a_process_that_does_not_interpret():
    program = "from workers.interpreter import prepare_interpreter as p; p()"
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=CORPUS.parent.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "without TRITON_INTERPRET=1" in done.stderr
