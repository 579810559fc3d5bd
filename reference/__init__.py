"""The operations that assignments are about: one module each, with oracle, baseline, kernel, costs and mistakes."""

from __future__ import annotations

import importlib
import pkgutil

from reference.operation import Costs, Inputs, Mistake, Operation, Options, ReferenceMissing

__all__ = ["Costs", "Inputs", "Mistake", "Operation", "Options", "ReferenceMissing", "load", "names"]


def load(name: str) -> Operation:
    """The operation called "module.variant", e.g. "attention.forward". Raises ReferenceMissing with what exists."""
    module, _, variant = name.partition(".")
    if module in _modules():
        operations = _operations(module)
        if variant in operations:
            return operations[variant]
    raise ReferenceMissing(f"no reference for {name!r}; there are {', '.join(names())}")


def names() -> tuple[str, ...]:
    """Every operation there is a reference for."""
    return tuple(sorted(operation.name for module in _modules() for operation in _operations(module).values()))


def _modules() -> tuple[str, ...]:
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.ispkg))


def _operations(module: str) -> dict[str, Operation]:
    # A module beside the operations (philox, operation itself) has no table and offers none.
    found: dict[str, Operation] = getattr(importlib.import_module(f"reference.{module}"), "OPERATIONS", {})
    return found
