"""Move a shard's bytes in one pass that copies, hashes and checks.

sha256 names the file, BLAKE3 and XXH3 of each chunk's range are taken on the way, so
that nothing is read twice and never more than a few pieces are in memory.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle
from typing import Any, NamedTuple, Protocol

import xxhash

from kvsnap.direct_io import aligned_buffer
from kvsnap.manifest import Digest
from kvsnap.runtime import widen_affinity
from kvsnap.storage.base import Reader

PIECE_BYTES = 4 << 20
NUM_WORKERS = 4
"""Shards on their way at once."""
NUM_BUFFERS = 4
"""Pieces of a shard in memory: one being read, one being used, the others being hashed."""
_HASH_BYTES = 1 << 20
"""Bytes that all digests take before the next bytes come: so much stays in a core's cache, which saves 5 %."""

_idle = threading.local()

Progress = Callable[[int, int], None]
"""Called now and then with bytes done and bytes in all."""


class Range(Protocol):
    """A chunk's place in its file; `ChunkEntry` is such."""

    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class RangeDigests(NamedTuple):
    """Digests of one range."""

    xxh3: bytes
    """XXH3-128, 16 bytes"""
    blake3: bytes
    """32 bytes; empty where it wasn't asked for"""


class ShardHasher:
    """Fed with a file from its start, gives its sha256 and the digests of ranges.

    The ranges must be in order of offset and must not overlap. BLAKE3 takes a fifth of the
    time; without it that digest stays empty.
    """

    def __init__(self, ranges: Sequence[Range] = (), *, with_blake3: bool = True) -> None:
        self._sha256 = hashlib.sha256()
        self._ranges = ranges
        self._with_blake3 = with_blake3
        self._next = 0
        self._position = 0
        self._open: tuple[Any, ...] = ()
        self.digests: list[RangeDigests] = []
        """Of the ranges that have been passed, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes fed so far."""
        return self._position

    def update(self, piece: memoryview) -> None:
        """Feed the next bytes; `piece` isn't kept."""
        for start in range(0, len(piece), _HASH_BYTES):
            self._update(piece[start : start + _HASH_BYTES])

    def _update(self, piece: memoryview) -> None:
        self._sha256.update(piece)
        start, end = self._position, self._position + len(piece)
        while self._next < len(self._ranges) and self._ranges[self._next].offset < end:
            target = self._ranges[self._next]
            if not self._open:
                self._open = new_hashes() if self._with_blake3 else (xxhash.xxh3_128(),)
            stop = target.offset + target.nbytes
            part = piece[max(target.offset - start, 0) : min(stop, end) - start]
            for state in self._open:
                state.update(part)
            if stop > end:
                break
            xxh3, *blake3 = self._open
            self.digests.append(RangeDigests(xxh3.digest(), blake3[0].digest() if blake3 else b""))
            self._open = ()
            self._next += 1
        self._position = end

    def sha256(self) -> Digest:
        """Of all bytes so far."""
        return Digest(self._sha256.hexdigest())


def new_hashes() -> tuple[Any, Any]:
    """Fresh XXH3-128 and BLAKE3 states."""
    from blake3 import blake3

    return xxhash.xxh3_128(), blake3()


def pieces(
    reader: Reader, *, limit: int, hash_with: Callable[[memoryview], None] | None = None
) -> Iterator[memoryview]:
    """Read to the end, or until more than `limit` bytes came: whoever expects so many needs no more to see the rest.

    Each piece is valid until the next one is asked for. All but the last are `PIECE_BYTES` long, and memory is
    aligned, so O_DIRECT takes them. With `hash_with`, that is called on each piece in order, by another thread, while
    the caller uses the piece and a third thread reads the next one; it is done with all of them at the end.
    """
    if hash_with is None:
        buffer = aligned_buffer(PIECE_BYTES)
        total = 0
        while total <= limit and (found := _fill(reader, buffer)):
            yield buffer[:found]
            total += found
    else:
        with (
            _buffers() as buffers,
            ThreadPoolExecutor(1, "kvsnap-piece", initializer=widen_affinity) as reading,
            ThreadPoolExecutor(1, "kvsnap-hash", initializer=widen_affinity) as hashing,
        ):
            yield from _hashed_pieces(reader, limit, hash_with, buffers, reading, hashing)


@contextmanager
def _buffers() -> Iterator[list[memoryview]]:
    """Pieces of memory that the thread keeps for its next shard: fresh ones were a fourth of the kernel's time."""
    buffers = getattr(_idle, "buffers", None) or [aligned_buffer(PIECE_BYTES) for _ in range(NUM_BUFFERS)]
    _idle.buffers = None
    try:
        yield buffers
    finally:
        _idle.buffers = buffers


def _hashed_pieces(
    reader: Reader,
    limit: int,
    hash_with: Callable[[memoryview], None],
    ring: Sequence[memoryview],
    reading: ThreadPoolExecutor,
    hashing: ThreadPoolExecutor,
) -> Iterator[memoryview]:
    buffers = cycle(ring)
    hashed: deque[Future[None]] = deque()
    total = 0
    buffer = next(buffers)
    filled = reading.submit(_fill, reader, buffer)
    while found := filled.result():
        piece = buffer[:found]
        hashed.append(hashing.submit(hash_with, piece))
        total += found
        if total > limit:
            yield piece
            break
        if len(hashed) == len(ring):
            hashed.popleft().result()
        buffer = next(buffers)
        filled = reading.submit(_fill, reader, buffer)
        yield piece
    for future in hashed:
        future.result()


def _fill(reader: Reader, buffer: memoryview) -> int:
    """Read until the buffer is full or the end has come; sockets give less than is asked for."""
    done = 0
    while done < len(buffer) and (found := reader.readinto(buffer[done:])):
        done += found
    return done
