"""Reading what the candidate says about itself into typed measurements.

Everything here is a claim of a hostile process: it is checked for type and bounded in number and length before it
becomes part of an examination. Nothing is repaired; what does not fit raises ClaimError.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grader.measurement import (
    Failure,
    FailureKind,
    Finding,
    KernelArgument,
    Launch,
    OutputWritten,
    Storage,
    TorchOp,
)

MAX_TEXT = 4000
MAX_ITEMS = 64
MAX_COUNT = 2**53


class ClaimError(Exception):
    """The candidate's facts are not of the form that ours have."""


def failure(message: Mapping[str, Any], stage: str) -> Failure:
    """A `failed` message as a Failure. An unknown kind is reported as what it is: not ours."""
    try:
        kind = FailureKind(text(message, "kind"))
    except ValueError:
        kind = FailureKind.NOT_OURS
    return Failure(
        kind=kind,
        message=text(message, "message"),
        line=line(message),
        traceback=text(message, "traceback"),
        stage=stage,
    )


def text(table: Mapping[str, Any], key: str, limit: int = MAX_TEXT) -> str:
    value = table.get(key, "")
    if not isinstance(value, str):
        raise ClaimError(f"{key} is not text")
    return value[:limit]


def count(table: Mapping[str, Any], key: str) -> int:
    value = table.get(key, 0)
    if not _is_count(value):
        raise ClaimError(f"{key} is not a count")
    return int(value)


def line(table: Mapping[str, Any]) -> int | None:
    return None if table.get("line") is None else count(table, "line")


def rows(table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ClaimError(f"{key} is not a list of objects")
    return found[:MAX_ITEMS]


def shape(table: Mapping[str, Any], key: str = "shape") -> tuple[int, ...]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(_is_count(size) for size in found):
        raise ClaimError(f"{key} is not a shape")
    return tuple(found[:8])


def findings(facts: Mapping[str, Any], probe: str | None) -> tuple[Finding, ...]:
    return tuple(
        Finding(
            kind=text(row, "kind", 60),
            message=text(row, "message", 500),
            arg=text(row, "arg", 100) or None if row.get("arg") is not None else None,
            line=line(row),
            probe=probe,
        )
        for row in rows(facts, "findings")
    )


def launches(facts: Mapping[str, Any]) -> tuple[Launch, ...]:
    return tuple(
        Launch(
            kernel=text(row, "kernel", 200),
            line=line(row),
            grid=shape(row, "grid"),
            requested_bytes=count(row, "requested_load_bytes") + count(row, "requested_store_bytes"),
            unique_bytes=count(row, "unique_load_bytes") + count(row, "unique_store_bytes"),
            dot_flops=count(row, "dot_flops"),
            largest_tile_elements=count(row, "largest_tile_elements"),
            args=tuple(_argument(arg) for arg in rows(row, "args")),
        )
        for row in rows(facts, "launches")
    )


def torch_ops(facts: Mapping[str, Any], key: str = "torch_ops") -> tuple[TorchOp, ...]:
    """Compute operations; fills are left out, copies are named `copy`."""
    return tuple(
        TorchOp(
            op="copy" if row.get("copy") else text(row, "op", 100),
            count=count(row, "count") or 1,
            size_bytes=count(row, "bytes"),
            line=line(row),
        )
        for row in rows(facts, key)
        if not row.get("fill")
    )


def names(facts: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = facts.get(key, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ClaimError(f"{key} is not a list of names")
    return tuple(name[:60] for name in found[:MAX_ITEMS])


def storages(facts: Mapping[str, Any], key: str) -> tuple[Storage, ...]:
    return tuple(
        Storage(shape=shape(row), dtype=text(row, "dtype", 40), size_bytes=count(row, "bytes"), line=line(row))
        for row in rows(facts, key)
    )


def outputs_written(facts: Mapping[str, Any]) -> tuple[OutputWritten, ...]:
    found = facts.get("outputs", {})
    if not isinstance(found, dict) or not all(isinstance(row, dict) for row in found.values()):
        raise ClaimError("outputs is not an object of objects")
    return tuple(
        OutputWritten(
            name=str(name)[:60],
            by_own_kernel=row.get("written_by_kernel") is True,
            unwritten_elements=count(row, "unwritten_elements"),
        )
        for name, row in list(found.items())[:MAX_ITEMS]
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def _argument(row: Mapping[str, Any]) -> KernelArgument:
    return KernelArgument(
        name=text(row, "name", 100),
        shape=shape(row),
        dtype=text(row, "dtype", 40),
        requested_load_bytes=count(row, "requested_load_bytes"),
        unique_load_bytes=count(row, "unique_load_bytes"),
        requested_store_bytes=count(row, "requested_store_bytes"),
        unique_store_bytes=count(row, "unique_store_bytes"),
    )
