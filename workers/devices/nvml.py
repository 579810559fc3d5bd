"""The GPUs of this host and how they are, as NVML tells it. Needs the driver's library, but not torch.

What a card or a driver does not tell is None, never a number that looks healthy.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_WAIT_MS = 1000
_NO_XID = 0


class NvmlError(Exception):
    """The driver's library is missing or refuses to work; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One GPU of this host."""

    index: int  # among those that CUDA_VISIBLE_DEVICES leaves
    uuid: str
    name: str  # e.g. "NVIDIA H200"
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How one GPU is at one moment."""

    card: Card
    driver: str
    used_bytes: int
    uncorrected_errors: int | None  # ECC, since the driver was loaded
    remapped_rows: int | None  # uncorrectable ones, ever
    remap_pending: bool | None  # rows wait for a reset to be taken out of use
    remap_failed: bool | None  # no spare rows are left
    temperature_c: int | None
    slowdown_c: int | None  # where the card slows itself down
    compute_mode: int | None  # 0: any number of processes may use it
    processes: Mapping[int, int]  # host process number -> bytes, of those with a context


@contextlib.contextmanager
def session() -> Iterator[Any]:
    """The library, initialised. Raises NvmlError where that cannot be done."""
    try:
        import pynvml
    except ImportError:
        raise NvmlError("the package nvidia-ml-py is missing: `DEVICE=gpu make setup` installs it") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as exc:
        raise NvmlError(f"NVML: {exc}") from None
    try:
        yield pynvml
    except pynvml.NVMLError as exc:
        raise NvmlError(f"NVML: {exc}") from None
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def cards(visible: str | None = None) -> list[Card]:
    """The GPUs of this host, in NVML's order, or those that CUDA_VISIBLE_DEVICES (`visible`) names, in its order."""
    with session() as nvml:
        found = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            found.append(
                Card(
                    index=index,
                    uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                )
            )
    return _visible(found, visible)


def read(card: Card) -> Reading:
    """How a GPU is now. Raises NvmlError when it does not answer, for one because it fell off the bus."""
    with session() as nvml:
        handle = nvml.nvmlDeviceGetHandleByUUID(card.uuid)
        rows = _ask(nvml, nvml.nvmlDeviceGetRemappedRows, handle)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return Reading(
            card=card,
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            used_bytes=int(memory.used),
            uncorrected_errors=_ask(
                nvml,
                nvml.nvmlDeviceGetTotalEccErrors,
                handle,
                nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nvml.NVML_VOLATILE_ECC,
            ),
            remapped_rows=None if rows is None else int(rows[1]),
            remap_pending=None if rows is None else bool(rows[2]),
            remap_failed=None if rows is None else bool(rows[3]),
            temperature_c=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_c=_degrees(
                _ask(nvml, nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
            ),
            compute_mode=_ask(nvml, nvml.nvmlDeviceGetComputeMode, handle),
            processes={int(one.pid): int(one.usedGpuMemory or 0) for one in running},
        )


def capability() -> str | None:
    """Compute capability of the first visible GPU, such as "90", asked without opening it; None where unknown."""
    seen = cards(visible_devices())
    with session() as nvml:
        for card in seen[:1]:
            found = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, nvml.nvmlDeviceGetHandleByUUID(card.uuid))
            return None if found is None else f"{found[0]}{found[1]}"
    return None


class XidWatch:
    """Listens for the driver's error reports (Xid) of one GPU, for as long as it is open."""

    def __init__(self, card: Card) -> None:
        self._card = card
        self._lock = threading.Lock()
        self._heard: list[int] = []
        self._over = threading.Event()
        self.works = False  # False: this host does not report them
        ready = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(ready,), name="xid", daemon=True)
        self._thread.start()
        ready.wait(5.0)

    def heard(self) -> list[int]:
        """Xid numbers so far, the oldest first."""
        with self._lock:
            return list(self._heard)

    def close(self) -> None:
        """Stop listening."""
        self._over.set()
        self._thread.join(3 * _WAIT_MS / 1e3)

    def _listen(self, ready: threading.Event) -> None:
        try:
            with contextlib.suppress(NvmlError), session() as nvml:
                self._hear(nvml, ready)
        finally:
            ready.set()

    def _hear(self, nvml: Any, ready: threading.Event) -> None:
        events = nvml.nvmlEventSetCreate()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(self._card.uuid)
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            self.works = True
            ready.set()
            while not self._over.is_set():
                xid = _next_xid(nvml, events)
                if xid != _NO_XID:
                    with self._lock:
                        self._heard.append(xid)
        finally:
            nvml.nvmlEventSetFree(events)


def _next_xid(nvml: Any, events: Any) -> int:
    try:
        return int(nvml.nvmlEventSetWait_v2(events, _WAIT_MS).eventData)
    except nvml.NVMLError as exc:
        if exc.value == nvml.NVML_ERROR_TIMEOUT:
            return _NO_XID
        raise


def _visible(found: list[Card], visible: str | None) -> list[Card]:
    if visible is None:
        return found
    chosen = []
    for word in (word.strip() for word in visible.split(",")):
        one = next((card for card in found if word in (str(card.index), card.uuid)), None)
        if one is None:  # CUDA, too, ignores all that follows one it does not know
            break
        chosen.append(one)
    return [Card(index=n, uuid=c.uuid, name=c.name, memory_bytes=c.memory_bytes) for n, c in enumerate(chosen)]


def _ask(nvml: Any, question: Any, *arguments: Any) -> Any:
    """An answer, or None where this card or this driver does not give it."""
    try:
        return question(*arguments)
    except nvml.NVMLError as exc:
        if exc.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNKNOWN):
            raise
        return None


def _degrees(value: int | None) -> int | None:
    """A threshold, where it is one: some cards tell how far they are from it instead."""
    return value if value is not None and 60 <= value <= 130 else None


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def show_only(card: Card) -> None:
    """Hide all GPUs but one from this process, and from the candidates it will start. Before torch looks at them."""
    if len(cards(visible_devices())) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = card.uuid


def visible_devices() -> str | None:
    """What the operator, or a container, left visible."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
