"""The frames that examiner and candidate exchange, with their limits.

A frame is four bytes of big-endian length and that many bytes of UTF-8 JSON holding one object with a string `op`.
The candidate is hostile: everything read here is checked before it is used, and reading can neither run code nor
grow without bound. Descriptors sent along are dropped by the kernel, because `recv` is called without ancillary space.
"""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import time
from typing import Any, NoReturn

MAX_FRAME_BYTES = 64 * 1024
MAX_DEPTH = 12
MAX_INTEGER = 2**63

_LENGTH = struct.Struct(">I")


class ProtocolError(Exception):
    """The peer sent something that is not a frame of ours."""


class PeerGoneError(Exception):
    """The peer closed its end; its exit status says why."""


class TimedOutError(Exception):
    """No whole frame arrived before the deadline."""


def encode(message: dict[str, Any]) -> bytes:
    """Serialise one message to a frame. Raises ProtocolError when a frame cannot hold it."""
    try:
        # text as it is: escaped, a student's message in another script would take up to three times the room
        body = json.dumps(message, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except ValueError as exc:
        raise ProtocolError(f"cannot be sent: {exc}") from None
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes; a frame holds {MAX_FRAME_BYTES}")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict[str, Any]:
    """Parse one frame body strictly: no NaN, no deep nesting, no huge integers, no surrogates, no duplicate keys."""
    try:
        text = body.decode("utf-8", errors="strict")
        if _depth(text) > MAX_DEPTH:
            raise ProtocolError(f"nested deeper than {MAX_DEPTH}")
        message = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_int=_small_int
        )
    except (UnicodeDecodeError, ValueError, RecursionError) as exc:
        raise ProtocolError(f"not JSON of ours: {type(exc).__name__}") from None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise ProtocolError("not an object with an 'op'")
    _refuse_surrogates(message)
    return message


class Channel:
    """One end of the socketpair between examiner and candidate. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. Raises PeerGoneError when nobody can read it any more."""
        try:
            self._sock.sendall(encode(message))
        except OSError as exc:
            raise PeerGoneError(str(exc)) from None

    def has_input(self) -> bool:
        """Whether something has arrived. Never waits: for who would rather spin than be woken late."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(self._buffer or poller.poll(0))

    def receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for one whole message.

        Raises:
            TimedOutError: `timeout_s` passed first. What was read so far is kept for the next call.
            PeerGoneError: the peer closed its end.
            ProtocolError: the frame is too large or not ours.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self._take()
            if message is not None:
                return message
            self._fill(deadline)

    def _take(self) -> dict[str, Any] | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (size,) = _LENGTH.unpack_from(self._buffer)
        if size > MAX_FRAME_BYTES:
            raise ProtocolError(f"frame of {size} bytes; the limit is {MAX_FRAME_BYTES}")
        end = _LENGTH.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return decode(body)

    def _fill(self, deadline: float | None) -> None:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimedOutError
        if self._sock.fileno() < 0:
            raise PeerGoneError("closed on our side")
        # poll, not select: a worker may hold descriptors beyond 1023
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        if not poller.poll(None if left_s is None else left_s * 1000):
            raise TimedOutError
        try:
            chunk = self._sock.recv(MAX_FRAME_BYTES)
        except OSError as exc:
            raise PeerGoneError(str(exc)) from None
        if not chunk:
            raise PeerGoneError("closed")
        self._buffer += chunk


def _depth(text: str) -> int:
    """Deepest bracket nesting outside strings, found without recursion."""
    depth = deepest = 0
    in_string = escaped = False
    for char in text:
        if in_string:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in "]}":
            depth -= 1
    return deepest


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("duplicate keys")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not allowed")


def _small_int(digits: str) -> int:
    if len(digits) > 20:
        raise ValueError("integer too long")
    value = int(digits)
    if not -MAX_INTEGER <= value < MAX_INTEGER:
        raise ValueError("integer too large")
    return value


def _refuse_surrogates(value: Any) -> None:
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise ProtocolError("lone surrogate")
    elif isinstance(value, float):
        if not math.isfinite(value):  # 1e999 parses to inf without passing parse_constant
            raise ProtocolError("number out of range")
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(key)
            _refuse_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(item)
