"""PROGRAM, untrusted: the process that imports a student's file and does what the examiner asks.

It holds no secret: no expected output, no reference, no seed, no address. Whatever it says is a claim; the examiner
believes only the bytes in the arena, the clock it reads itself and how this process ended. The student's code shares
this process, so nothing here is a defence: the checks below make honest mistakes readable, no more.

Messages in (`op`): load, call, again, forget. Messages out: ready, loaded, result, failed. A message in has a number,
`request`, and what answers it has the same.
"""

from __future__ import annotations

import ast
import contextlib
import errno
import linecache
import mmap
import os
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from workers import entry, protocol

MAX_TEXT = 4000
MAX_TRACEBACK_LINES = 24
MAX_ALTERNATIVES = 3
MAX_REPLACED = 20

# clocks, waiting, comparing, and what baselines are made of; all functions of ours are watched as well. A file that
# puts something of its own in their place gains nothing, for the examiner uses none of them here, but staff should know
WATCHED = (
    "gc.collect",
    "os.read",
    "os.write",
    "socket.socket.recv",
    "socket.socket.send",
    "time.monotonic",
    "time.perf_counter",
    "time.perf_counter_ns",
    "time.time",
    "torch.allclose",
    "torch.bmm",
    "torch.cuda.Event.elapsed_time",
    "torch.cuda.Event.record",
    "torch.cuda.synchronize",
    "torch.equal",
    "torch.matmul",
    "torch.softmax",
    "torch.testing.assert_close",
    "triton.runtime.jit.JITFunction.run",
    "triton.testing.do_bench",
)

Message = dict[str, Any]


class _Refused(Exception):  # noqa: N818 (it says what was refused)
    """The student's file or result does not keep to the interface. `kind` is the fault label."""

    def __init__(self, kind: str, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.line = kind, line


class _Watch(Protocol):
    """A context around one call, which afterwards knows what happened in it."""

    def __enter__(self) -> _Watch: ...

    def __exit__(self, *exc: object) -> None: ...

    def facts(self, outputs: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]: ...


class _Half(Protocol):
    """What depends on the device: workers/devices/cpu_candidate.py and cuda_candidate.py."""

    note: str  # for the examiner's log: what did not go well while it got ready

    def handlers(self, candidate: Candidate) -> Mapping[str, Callable[[Message], Message]]: ...

    def flat(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor: ...

    def settle(self) -> None: ...

    def watch(self, message: Message, inputs: Mapping[str, torch.Tensor]) -> _Watch: ...


class Candidate:
    """Answers the examiner's requests, one at a time."""

    def __init__(self, arena: mmap.mmap, submission: Path, half: _Half) -> None:
        self._arena = arena
        self._submission = submission
        self._half = half
        self._stock = _functions()
        self.entry: entry.Entry | None = None
        self._kept: dict[str, dict[str, list[torch.Tensor]]] = {}

    def replaced(self) -> list[str]:
        """Functions that are no longer what they were before the student's file was loaded."""
        now = _functions()
        return [name for name, function in self._stock.items() if now.get(name) is not function][:MAX_REPLACED]

    def answer(self, message: Message) -> Message:
        """Do one request; student errors become `failed` messages."""
        handlers: dict[str, Callable[[Message], Message]] = {
            "load": self._load,
            "call": self._call,
            "again": self._again,
            "forget": self._forget,
            **self._half.handlers(self),
        }
        try:
            return handlers[message["op"]](message)
        except _Refused as exc:
            return _failed(exc.kind, str(exc), exc.line, "")
        except entry.EntryError as exc:
            return _failed(exc.kind, str(exc), None, "")
        except BaseException as exc:  # SystemExit and KeyboardInterrupt of the student's are answers too
            return self._explain(exc, message["op"])

    def _load(self, message: Message) -> Message:
        source = bytes(self._arena[message["offset"] : message["offset"] + message["length"]]).decode("utf-8")
        path = str(self._submission)
        self._submission.write_text(source, encoding="utf-8")  # triton reads the source of kernels from the file
        try:
            tree = ast.parse(source, path)
        except (SyntaxError, ValueError) as exc:
            line = getattr(exc, "lineno", None)
            raise _Refused("syntax-error", getattr(exc, "msg", None) or str(exc), line) from None
        module = types.ModuleType("submission")
        module.__file__ = path
        sys.modules["submission"] = module
        exec(compile(tree, path, "exec"), module.__dict__)  # noqa: S102 (this is what the sandbox is for)
        found = entry.find_entry(module, message["entry"], message["entry_kind"])
        entry.check_signature(found, message["n_arguments"], message["signature"])
        self.entry = found
        return {"op": "loaded", "entry": found.name[:200], "is_autograd": found.is_autograd}

    def _call(self, message: Message) -> Message:
        if self.entry is None:
            raise _Refused("entry-missing", "nothing was loaded")
        names = [spec["name"] for spec in message["inputs"]]
        tensors = {spec["name"]: self.tensor(spec) for spec in message["inputs"]}
        upstream = self.tensor(message["upstream"]) if message.get("upstream") else None
        wants_graph = upstream is not None or self.entry.is_autograd
        if wants_graph:
            tensors = {name: tensor.detach().requires_grad_(True) for name, tensor in tensors.items()}
        slots = message["outputs"]
        forward_names = [slot["name"] for slot in slots if not slot.get("gradient")]
        watch = self._half.watch(message, tensors)
        with watch:
            returned = self.entry.call(*[tensors[name] for name in names], *message["options"])
        results = self.name_results(returned, forward_names, slots)
        facts = {"forward": watch.facts({name: found[0] for name, found in results.items()})}
        if upstream is not None:
            backward = self._half.watch(message, tensors)
            with backward:
                leaves = [tensors[name] for name in names]
                gradients = entry.gradients(results[forward_names[0]][0], leaves, upstream)
            for name, gradient in zip(names, gradients, strict=True):
                if gradient is None:
                    raise _Refused("wrong-result-type", f"backward returned None for the gradient of {name}")
                results[f"d{name}"] = [gradient]
            facts["backward"] = backward.facts({f"d{name}": results[f"d{name}"][0] for name in names})
        if message.get("keep"):
            self._kept[message["keep"]] = results
        return {"op": "result", "outputs": self._write(results, slots), "facts": facts}

    def _again(self, message: Message) -> Message:
        """Copy a kept result once more: it must still be what it was."""
        return {"op": "result", "outputs": self._write(self._kept[message["keep"]], message["outputs"]), "facts": {}}

    def _forget(self, message: Message) -> Message:
        self._kept.pop(message["keep"], None)
        return {"op": "result", "outputs": [], "facts": {}}

    def name_results(self, returned: Any, names: list[str], slots: list[Message]) -> dict[str, list[torch.Tensor]]:
        """Results by output name. An autograd.Function returns o alone; the rest is looked for among what it saved."""
        if isinstance(returned, torch.Tensor):
            returned = (returned,)
        if not isinstance(returned, tuple | list):
            raise _Refused("wrong-result-type", f"returned {type(returned).__name__}; expected {_listed(names)}")
        for name, item in zip(names, returned, strict=False):
            _plain_tensor(name, item)
        found = {name: [item] for name, item in zip(names, returned, strict=False)}
        missing = [slot for slot in slots if slot["name"] in names[len(found) :]]
        if self.entry is not None and self.entry.is_autograd and missing:
            found.update(_saved_outputs(found[names[0]][0], missing))
        elif len(returned) != len(names):
            raise _Refused("wrong-result-type", f"returned {len(returned)} tensors; expected {_listed(names)}")
        return found

    def _write(self, results: Mapping[str, list[torch.Tensor]], slots: list[Message]) -> list[Message]:
        """Copy results to their slots of the arena, row-major, in their own dtype."""
        said = []
        for slot in slots:
            for index, tensor in enumerate(results[slot["name"]][:MAX_ALTERNATIVES]):
                value = tensor.detach()
                size = value.numel() * value.element_size()
                copied = size <= slot["capacity"]
                if copied and size:
                    offset = slot["offset"] + index * slot["capacity"]
                    self._half.flat(value.dtype, value.numel(), offset).copy_(value.reshape(-1))
                said.append(
                    {
                        "name": slot["name"],
                        "alternative": index,
                        "shape": list(value.shape)[:8],
                        "dtype": str(value.dtype).removeprefix("torch."),
                        "copied": copied,
                    }
                )
        self._half.settle()  # the examiner reads as soon as we answer
        return said

    def tensor(self, spec: Message) -> torch.Tensor:
        """A view of the arena; the examiner chose offset, shape and strides."""
        base = self._half.flat(getattr(torch, spec["dtype"]), spec["count"], spec["offset"])
        return base.as_strided(spec["shape"], spec["strides"])

    def _explain(self, exc: BaseException, stage: str) -> Message:
        kind = _kind_of(exc, stage)
        frames = traceback.TracebackException.from_exception(exc, limit=None, capture_locals=False)
        line = _own_line(exc, str(self._submission))
        said = _said(exc)
        message = f"left with status {said}" if kind == "python-exit" else f"{type(exc).__name__}: {said}"
        return _failed(kind, message, line, _short_traceback(frames, str(self._submission)))


def _functions() -> dict[str, object]:
    found: dict[str, object] = {"sys.settrace": sys.gettrace(), "sys.setprofile": sys.getprofile()}
    for name in WATCHED:
        parts = name.split(".")
        depth = next((n for n in range(len(parts) - 1, 0, -1) if ".".join(parts[:n]) in sys.modules), 0)
        owner: Any = sys.modules.get(".".join(parts[:depth]))
        for part in parts[depth:]:
            owner = getattr(owner, part, None)
        if owner is not None:
            found[name] = owner
    for name in [name for name in sys.modules if name.startswith("workers.")]:
        found |= _functions_of(sys.modules[name], name)
    return found


def _functions_of(owner: Any, name: str) -> dict[str, object]:
    """Functions of a module of ours and of its classes, by dotted name."""
    found: dict[str, object] = {}
    for key, value in list(vars(owner).items()):
        if isinstance(value, types.FunctionType):
            found[f"{name}.{key}"] = value
        elif isinstance(value, type) and value.__module__ == name:
            found |= _functions_of(value, f"{name}.{key}")
    return found


def _plain_tensor(name: str, item: Any) -> None:
    # a subclass could compute itself when it is read, or run code when it is copied
    if type(item) is not torch.Tensor:
        raise _Refused("wrong-result-type", f"{name} is {type(item).__name__}; it must be a plain torch.Tensor")
    if item.layout is not torch.strided or item.device.type == "meta":
        raise _Refused("wrong-result-type", f"{name} has no memory of its own ({item.layout}, {item.device})")


def _saved_outputs(first: torch.Tensor, missing: list[Message]) -> dict[str, list[torch.Tensor]]:
    """Candidates for outputs that only live among the saved tensors, by shape; the examiner picks by value."""
    saved = [t for t in getattr(first.grad_fn, "saved_tensors", ()) if isinstance(t, torch.Tensor)]
    found = {}
    for slot in missing:
        fitting = [t for t in saved if list(t.shape) == slot["shape"]]
        if not fitting:
            raise _Refused(
                "wrong-result-type",
                f"no tensor of shape {slot['shape']} among the saved ones, so {slot['name']} cannot be found; "
                f"save it with ctx.save_for_backward",
            )
        found[slot["name"]] = fitting
    return found


def _listed(names: list[str]) -> str:
    return f"a tensor {names[0]}" if len(names) == 1 else f"a tuple ({', '.join(names)})"


def _said(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as inner:  # the student's own __str__ may raise
        return f"(its text could not be read: {type(inner).__name__})"


def _kind_of(exc: BaseException, stage: str) -> str:
    text = _said(exc)
    if isinstance(exc, MemoryError) or "can't allocate memory" in text or "Cannot allocate memory" in text:
        return "memory-bomb"
    if isinstance(exc, OSError) and exc.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return "disk-limit"
    if isinstance(exc, OSError) and exc.errno == errno.EAGAIN:
        return "process-limit"
    if isinstance(exc, SystemExit):
        return "python-exit"
    if "CUDA error" in text:
        return "crashed"  # the context is gone, as a process would be
    if isinstance(exc, ImportError) and stage == "load":
        return "import-error"
    if type(exc).__name__ in ("CompilationError", "InterpreterError", "UnsupportedLanguageConstruct"):
        return "compile-error"
    return "raises"


def _own_line(exc: BaseException, path: str) -> int | None:
    """The last line of the student's file on the way to the error, through the causes."""
    line = None
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen and len(seen) < 8:
        seen.add(id(current))
        for frame, number in traceback.walk_tb(current.__traceback__):
            if frame.f_code.co_filename == path:
                line = number
        current = current.__cause__ or current.__context__
    return line


def _short_traceback(found: traceback.TracebackException, path: str) -> str:
    """Frames of the student's file and of triton, as Python prints them, bounded."""
    kept = [frame for frame in found.stack if frame.filename == path or "/triton/" in frame.filename]
    lines = [
        f'  File "{Path(frame.filename).name}", line {frame.lineno}, in {frame.name}\n    {frame.line or ""}'
        for frame in kept[-MAX_TRACEBACK_LINES:]
    ]
    return "\n".join(lines)[-MAX_TEXT:]


def _failed(kind: str, message: str, line: int | None, trace: str) -> Message:
    return {"op": "failed", "kind": kind, "message": _text(message), "line": line, "traceback": _text(trace)}


def _text(value: str) -> str:
    # a lone surrogate is no JSON of ours, and a student's exception may hold one
    return value[:MAX_TEXT].encode("utf-8", "replace").decode("utf-8")


@contextlib.contextmanager
def _own_streams_flushed() -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(Exception):  # the student may have closed or replaced them
            sys.stdout.flush()
            sys.stderr.flush()


def _half(arena: mmap.mmap, submission_file: str) -> _Half:
    # Triton reads the same variable when it is imported, so nothing else could be told to it later
    if os.environ.get("TRITON_INTERPRET") == "1":
        from workers.devices.cpu_candidate import CpuHalf

        return CpuHalf(arena, submission_file)
    from workers.devices.cuda_candidate import CudaHalf

    return CudaHalf(arena, submission_file)


def main(control_fd: int, arena_fd: int, arena_bytes: int) -> None:
    """Serve the examiner until it goes away."""
    submission = Path.cwd() / "submission.py"  # the scratch folder, wherever the sandbox put it
    channel = protocol.Channel(socket.socket(fileno=control_fd))
    arena = mmap.mmap(arena_fd, arena_bytes)
    torch.set_num_threads(1)
    half = _half(arena, str(submission))
    linecache.checkcache()
    candidate = Candidate(arena, submission, half)
    channel.send({"op": "ready", "note": _text(half.note)})
    while True:
        try:
            message = channel.receive()
        except protocol.PeerGoneError:
            return
        with _own_streams_flushed():
            reply = candidate.answer(message)
        # a timed window has no time for it
        replaced = candidate.replaced() if message["op"] != "window" else []
        channel.send(reply | {"request": message["request"]} | ({"replaced": replaced} if replaced else {}))
