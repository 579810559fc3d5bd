"""Candidates that are threads of the test and say what the test wants, to the examiner as it is."""

import math
import mmap
import socket
import threading

import torch

from grader.measurement import Isolation
from workers.devices.cpu import ARENA_BYTES
from workers.protocol import Channel, PeerGoneError
from workers.sandbox import Ending

RIGHT = {
    "n_launches": 1,
    "unique_bytes": 1000,
    "peak_bytes": 1000,
    "outputs": {name: {"written_by_kernel": True} for name in ("y", "lse", "o")},
}


def facts(**changed):
    """What a right file's audit would say, with something changed."""
    return {"forward": RIGHT | changed}


def softmax(message, arena):
    """Online softmax, worked out with torch: the outputs as they are said, their values in the arena."""
    (spec,) = message["inputs"]
    base = torch.frombuffer(arena, dtype=getattr(torch, spec["dtype"]), count=spec["count"], offset=spec["offset"])
    x = base.as_strided(spec["shape"], spec["strides"])
    values = {"y": torch.softmax(x.float(), -1).to(x.dtype), "lse": torch.logsumexp(x.float(), -1)}
    said = []
    for slot in message["outputs"]:
        value = values[slot["name"]].contiguous()
        write(arena, slot["offset"], value)
        said.append(say(slot["name"], list(value.shape), str(value.dtype).removeprefix("torch.")))
    return said


def say(name, shape, dtype, **more):
    return {"name": name, "alternative": 0, "shape": shape, "dtype": dtype, "copied": True, **more}


def write(arena, offset, value):
    count = math.prod(value.shape)
    torch.frombuffer(arena, dtype=value.dtype, count=count, offset=offset).copy_(value.reshape(-1))


def result(message, outputs, **more):
    return {"op": "result", "request": message["request"], "outputs": outputs, "facts": facts(), **more}


def loaded(message, **more):
    return {"op": "loaded", "request": message["request"], "entry": "online_softmax", **more}


class Liars:
    """Where the examiner takes candidates from. `answer(message, arena)` gives the frames that answer a request."""

    isolation = Isolation(level="none")

    def __init__(self, answer):
        self._answer = answer
        self.taken = []

    def take(self, timeout_s):
        assert timeout_s > 0
        self.taken.append(_Liar(self._answer))
        return self.taken[-1]

    @property
    def alive(self):
        return [liar for liar in self.taken if not liar.ended]


class _Liar:
    def __init__(self, answer):
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.arena = mmap.mmap(-1, ARENA_BYTES)
        self.ended = False
        self._answer, self._sock, self._theirs, self._peer = answer, ours, theirs, Channel(theirs)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                message = self._peer.receive()
                for frame in self._answer(message, self.arena):
                    self._peer.send(frame)
            except PeerGoneError:
                return

    def freeze(self):
        pass

    def thaw(self):
        pass

    def n_started_processes(self):
        return 0

    def over_limit(self):
        return None

    def kill(self):
        if not self.ended:
            self._sock.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            self._sock.close()
            self._theirs.close()
        self.ended = True
        return Ending(
            cause="killed",
            exit_code=None,
            signal=None,
            memory_peak_bytes=None,
            output_bytes_total=0,
            stdout=b"",
            stderr=b"",
            processes_left=0,
        )
