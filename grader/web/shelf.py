"""Finished parts of pages, kept in memory until newer ones push them out."""

from __future__ import annotations

import threading
import zlib
from collections import OrderedDict
from collections.abc import Hashable

from markupsafe import Markup

MOST_BYTES = 16 << 20  # some thousand reports, packed to a tenth


class Shelf:
    """What was drawn once and reads the same for everybody with that key. Safe to share between threads."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._size_bytes = 0
        self._kept: OrderedDict[Hashable, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> Markup | None:
        """What was put there, or None when it never was or had to make room."""
        with self._lock:
            packed = self._kept.get(key)
            if packed is None:
                return None
            self._kept.move_to_end(key)
        return Markup(zlib.decompress(packed).decode())  # noqa: S704  markup when it was put there

    def put(self, key: Hashable, html: Markup) -> None:
        """Keep it; what was read longest ago makes room."""
        packed = zlib.compress(html.encode(), 1)
        with self._lock:
            self._size_bytes += len(packed) - len(self._kept.get(key, b""))
            self._kept[key] = packed
            self._kept.move_to_end(key)
            while self._size_bytes > self._most_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._size_bytes -= len(dropped)
