# ruff: noqa: N802, N815 - the names are the library's
"""NVML in Python: as many cards as a test wants, each with counters it can change, and calls that this card lacks."""

from __future__ import annotations

import queue
import types


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__({3: "Not Supported", 10: "Timeout", 15: "GPU is lost", 999: "Unknown Error"}[value])
        self.value = value


class FakeCard:
    """One GPU. `lost`: it fell off the bus. `lacks`: names of calls that it answers with "not supported"."""

    def __init__(self, name="NVIDIA H200", uuid="GPU-0", memory_gib=140):
        self.name, self.uuid, self.total = name, uuid, memory_gib << 30
        self.used = 1 << 28
        self.ecc, self.rows, self.temperature, self.slowdown, self.mode = 0, (0, 0, 0, 0), 40, 92, 0
        self.processes: dict[int, int] = {}
        self.xids: queue.Queue[int] = queue.Queue()
        self.lost, self.lacks = False, set()
        self.capability = (9, 0)


class FakeNvml(types.ModuleType):
    """Stands in for the module pynvml."""

    NVMLError = NVMLError
    NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN = 10, 15, 999
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    NVML_TEMPERATURE_GPU, NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 0, 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *cards):
        super().__init__("pynvml")
        self.cards = list(cards)
        self.open = 0
        self.broken = None  # an NVMLError of the library itself

    def nvmlInit(self):
        if self.broken:
            raise self.broken
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._asked(next(card for card in self.cards if card.uuid == uuid), "handle")

    def nvmlDeviceGetUUID(self, card):
        return card.uuid

    def nvmlDeviceGetName(self, card):
        return card.name.encode()

    def nvmlDeviceGetMemoryInfo(self, card):
        return types.SimpleNamespace(total=card.total, used=self._asked(card, "memory").used)

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.processes.items()]

    def nvmlDeviceGetTotalEccErrors(self, card, _kind, _counter):
        return self._asked(card, "ecc").ecc

    def nvmlDeviceGetRemappedRows(self, card):
        return self._asked(card, "rows").rows

    def nvmlDeviceGetTemperature(self, card, _sensor):
        return self._asked(card, "temperature").temperature

    def nvmlDeviceGetTemperatureThreshold(self, card, _threshold):
        return self._asked(card, "slowdown").slowdown

    def nvmlDeviceGetComputeMode(self, card):
        return self._asked(card, "mode").mode

    def nvmlDeviceGetCudaComputeCapability(self, card):
        return self._asked(card, "capability").capability

    def nvmlEventSetCreate(self):
        return []

    def nvmlEventSetFree(self, events):
        events.clear()

    def nvmlDeviceRegisterEvents(self, card, _types, events):
        events.append(self._asked(card, "events"))

    def nvmlEventSetWait_v2(self, events, wait_ms):
        try:
            return types.SimpleNamespace(eventData=events[0].xids.get(timeout=min(wait_ms / 1e3, 0.02)))
        except queue.Empty:
            raise NVMLError(10) from None

    @staticmethod
    def _asked(card, what):
        if card.lost:
            raise NVMLError(15)
        if what in card.lacks:
            raise NVMLError(3)
        return card
