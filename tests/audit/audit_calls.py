"""Runs files of the corpus under a watch, on inputs that lie in one arena as the examiner lays them out."""

from __future__ import annotations

import importlib.util
import itertools
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from workers.audit import Watch, prepare_interpreter

prepare_interpreter()

CORPUS = Path(__file__).parent.parent / "corpus"
GUARD = 64  # elements of NaN around every input

_numbers = itertools.count()


def load(path: Path) -> ModuleType:
    """Import a student's file under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"audited_{next(_numbers)}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_arena(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """Copies of the tensors as views into one shared mapping, strides kept, NaN between and in the gaps."""
    spans = [_span(tensor) + 2 * GUARD for tensor in tensors.values()]
    item_bytes = next(iter(tensors.values())).element_size()
    dtype = next(iter(tensors.values())).dtype
    arena = torch.frombuffer(mmap.mmap(-1, sum(spans) * item_bytes), dtype=dtype)
    arena.fill_(float("nan"))
    placed = {}
    at = GUARD
    for (name, tensor), span in zip(tensors.items(), spans, strict=True):
        view = arena.as_strided(tensor.size(), tensor.stride(), at)
        view.copy_(tensor)
        placed[name] = view
        at += span
    return placed


def _span(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[batch, rows, cols] with gaps between rows and batches swapped with rows in memory."""
    batch, rows, cols = shape
    return normal(rows, batch, cols + 8, seed=seed, dtype=dtype)[:, :, 3 : 3 + cols].transpose(0, 1)


def attention_inputs(
    batch: int, queries: int, keys: int, dim: int, *, make: Callable[..., torch.Tensor] = normal, **more: Any
) -> dict[str, torch.Tensor]:
    return {
        "q": make(batch, queries, dim, seed=1, **more),
        "k": make(batch, keys, dim, seed=2, **more),
        "v": make(batch, keys, dim, seed=3, **more),
    }


def layer_norm_inputs(rows: int, dim: int) -> dict[str, torch.Tensor]:
    return {
        "x": normal(rows, dim, seed=1),
        "bias": normal(dim, seed=2),
        "gamma": normal(dim, seed=3),
        "beta": normal(dim, seed=4),
    }


def named(names: tuple[str, ...], result: Any) -> dict[str, torch.Tensor]:
    values = result if isinstance(result, tuple) else (result,)
    return dict(zip(names, values, strict=True))


def watched(
    path: Path,
    call: Callable[[ModuleType], Any],
    inputs: Mapping[str, torch.Tensor],
    names: tuple[str, ...],
    *,
    level: Any = "full",
    **more: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Outputs by name, and the facts."""
    module = load(path)
    with Watch(inputs=inputs, level=level, submission_file=str(path), **more) as watch:
        result = call(module)
    outputs = named(names, result)
    return outputs, watch.facts(outputs)


def attention(inputs: Mapping[str, torch.Tensor], causal: bool) -> Callable[[ModuleType], Any]:
    return lambda module: module.flash_attention_forward(inputs["q"], inputs["k"], inputs["v"], causal)


def line_of(path: Path, text: str) -> int:
    """The first line of a file that holds a text."""
    lines = path.read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def kinds(facts: Mapping[str, Any]) -> set[str]:
    return {finding["kind"] for finding in facts["findings"]}
