"""A storage that keeps to a rate, so that a snapshot job leaves the network to those who serve requests.

Only what moves shards is held up. Small requests pass at once: a lease must be renewed in time, however slow the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from kvsnap.storage.base import Buffer, Reader, Storage
from kvsnap.storage.wrapper import WrapperStorage

PARTS_PER_S = 8
"""Larger pieces go in parts, so many a second: stores take long silence for a dead client."""
ALIGN = 4096
"""Parts are multiples of this, which O_DIRECT wants."""


class Throttle:
    """Lets so many bytes a second through, whichever threads they belong to.

    Args:
        clock, sleep: For tests, and for a `sleep` that raises to end a wait.
    """

    def __init__(
        self,
        bytes_per_s: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.part_bytes = max(bytes_per_s // PARTS_PER_S // ALIGN * ALIGN, ALIGN)
        """Most bytes to ask for at once."""
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock()

    def take(self, nbytes: int) -> None:
        """Wait until what was let through before is paid for; `nbytes` go now."""
        with self._lock:
            now = self._clock()
            begins_at = max(self._free_at, now)
            self._free_at = begins_at + nbytes / self.bytes_per_s
        if begins_at > now:
            self._sleep(begins_at - now)


class LimitStorage(WrapperStorage):
    """Reads and writes shards at most as fast as `bytes_per_s`, each direction on its own, all threads together."""

    def __init__(self, inner: Storage, bytes_per_s: int, *, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(inner)
        self._up = Throttle(bytes_per_s, sleep=sleep)
        self._down = Throttle(bytes_per_s, sleep=sleep)

    def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
        return super().put_stream(lambda: self._slowly(pieces()), name)

    def put_known(self, name: str, pieces: Callable[[], Iterable[Buffer]], *, nbytes: int, sha256: str) -> bool:
        return super().put_known(name, lambda: self._slowly(pieces()), nbytes=nbytes, sha256=sha256)

    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        self._down.take(len(buffer))
        return super().read_into(name, buffer, offset)

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        with super().open_read(name, offset=offset, nbytes=nbytes) as reader:
            yield _SlowReader(reader, self._down)

    def _slowly(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        size = self._up.part_bytes
        for piece in pieces:
            view = memoryview(piece)
            for start in range(0, len(view), size):
                part = view[start : start + size]
                self._up.take(len(part))
                yield part


class _SlowReader:
    def __init__(self, inner: Reader, throttle: Throttle) -> None:
        self._inner = inner
        self._throttle = throttle

    def readinto(self, buffer: memoryview, /) -> int:
        found = self._inner.readinto(buffer[: self._throttle.part_bytes])
        if found:
            self._throttle.take(found)
        return found
