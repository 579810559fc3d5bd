"""Finding the entry point in a student's module. Runs inside the sandbox, after the file was executed.

A function of the configured name is used as it is. An `autograd.Function` subclass, as the public CS336 course asks
for, is accepted too: the class named by a module-level `ENTRY`, else by the configured name, else the only one whose
name contains "triton", else the only one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


def gradients(
    output: torch.Tensor, inputs: Sequence[torch.Tensor], upstream: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `inputs` as `torch.autograd.grad` gives them; None for one that `output` does not depend on.

    That function first imports torch's symbolic shapes, two seconds of a process that answers one hand-in; the engine
    below it does not.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    keep_graph = create_graph = False
    found: tuple[torch.Tensor | None, ...] = engine.run_backward(
        (output,), (upstream,), keep_graph, create_graph, tuple(inputs), True, accumulate_grad=False
    )
    return found


class EntryError(Exception):
    """No entry point, or more than one that is as good. `kind` is the fault label."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Entry:
    """What the student's file is called through."""

    name: str
    call: Callable[..., Any]
    is_autograd: bool


def find_entry(module: ModuleType, wanted: str, kind: str) -> Entry:
    """The entry point of `module`. Raises EntryError with a sentence that says what was found instead."""
    named = module.__dict__.get("ENTRY", wanted)
    if inspect.isclass(named):
        named = named.__name__
    if not isinstance(named, str):
        raise EntryError("entry-missing", f"ENTRY is {type(named).__name__}; give the name of your entry point as text")
    found = module.__dict__.get(named)
    if found is not None and _is_autograd(found):
        return Entry(named, found.apply, True)
    if callable(found) and (kind == "function" or inspect.isclass(found) is False):
        return Entry(named, found, False)
    if "ENTRY" in module.__dict__:
        raise EntryError("entry-missing", f"ENTRY names {named!r}, which the file does not define")
    if found is not None:
        raise EntryError("entry-missing", f"{wanted} is {_describe(found)}; it must be {_demand(kind)}")
    return _only_class(module, wanted, kind)


def check_signature(entry: Entry, n_arguments: int, signature: str) -> None:
    """Raise EntryError when `entry` cannot be called positionally with that many arguments."""
    target = entry.call.__self__.forward if entry.is_autograd else entry.call  # type: ignore[attr-defined]
    n_given = n_arguments + (1 if entry.is_autograd else 0)  # ctx
    try:
        shape = inspect.signature(target)
    except (TypeError, ValueError):
        return
    try:
        shape.bind(*[None] * n_given)
    except TypeError as exc:
        raise EntryError("wrong-signature", f"expected {signature}, found {entry.name}{shape}: {exc}") from None


def _only_class(module: ModuleType, wanted: str, kind: str) -> Entry:
    classes = {
        name: item
        for name, item in module.__dict__.items()
        if _is_autograd(item) and item.__module__ == module.__name__
    }
    with_triton = [name for name in classes if "triton" in name.lower()]
    for names in (with_triton, list(classes)):
        if len(names) == 1:
            return Entry(names[0], classes[names[0]].apply, True)
        if len(names) > 1:
            raise EntryError(
                "entry-ambiguous",
                f"no {wanted} in the file, and {' and '.join(sorted(names))} are equally good; "
                "name one with a line such as ENTRY = " + repr(sorted(names)[0]),
            )
    raise EntryError("entry-missing", f"no {_demand(kind)} {wanted} in the file{_found_instead(module, wanted)}")


def _is_autograd(item: Any) -> bool:
    return inspect.isclass(item) and issubclass(item, torch.autograd.Function) and item is not torch.autograd.Function


def _demand(kind: str) -> str:
    return "function" if kind == "function" else "autograd.Function"


def _describe(item: Any) -> str:
    return "a class" if inspect.isclass(item) else f"a {type(item).__name__}"


def _found_instead(module: ModuleType, wanted: str) -> str:
    own = [
        name
        for name, item in module.__dict__.items()
        if not name.startswith("_") and callable(item) and getattr(item, "__module__", "") == module.__name__
    ]
    words = set(wanted.split("_"))
    close = difflib.get_close_matches(wanted, own, n=2, cutoff=0.5)
    close += [name for name in own if set(name.split("_")) == words and name not in close]
    if close:
        return f"; found {' and '.join(close[:2])} instead. Names are part of the contract"
    return f"; it defines {', '.join(own[:6])}" if own else "; it defines nothing that can be called"
