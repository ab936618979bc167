"""Move a shard's bytes in one pass that copies, hashes and checks.

sha256 names the file, BLAKE3 and XXH3 of each chunk's range are taken on the way, so
that nothing is read twice and never more than a few pieces are in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import xxhash

from kvsnap.direct_io import aligned_buffer
from kvsnap.manifest import Digest
from kvsnap.storage.base import Reader

PIECE_BYTES = 4 << 20

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
    """32 bytes"""


class ShardHasher:
    """Fed with a file from its start, gives its sha256 and the digests of ranges.

    The ranges must be in order of offset and must not overlap.
    """

    def __init__(self, ranges: Sequence[Range] = ()) -> None:
        self._sha256 = hashlib.sha256()
        self._ranges = ranges
        self._next = 0
        self._position = 0
        self._open: tuple[Any, Any] | None = None
        self.digests: list[RangeDigests] = []
        """Of the ranges that have been passed, in order."""

    @property
    def nbytes(self) -> int:
        """Bytes fed so far."""
        return self._position

    def update(self, piece: memoryview) -> None:
        """Feed the next bytes; `piece` isn't kept."""
        self._sha256.update(piece)
        start, end = self._position, self._position + len(piece)
        while self._next < len(self._ranges) and self._ranges[self._next].offset < end:
            target = self._ranges[self._next]
            if self._open is None:
                self._open = new_hashes()
            stop = target.offset + target.nbytes
            part = piece[max(target.offset - start, 0) : min(stop, end) - start]
            for state in self._open:
                state.update(part)
            if stop > end:
                break
            self.digests.append(RangeDigests(self._open[0].digest(), self._open[1].digest()))
            self._open = None
            self._next += 1
        self._position = end

    def sha256(self) -> Digest:
        """Of all bytes so far."""
        return Digest(self._sha256.hexdigest())


def new_hashes() -> tuple[Any, Any]:
    """Fresh XXH3-128 and BLAKE3 states."""
    from blake3 import blake3

    return xxhash.xxh3_128(), blake3()


def pieces(reader: Reader, *, limit: int) -> Iterator[memoryview]:
    """Read to the end, or until more than `limit` bytes came: whoever expects so many needs no more to see the rest.

    Each piece is valid until the next one is asked for. The buffer is aligned, so O_DIRECT takes it.
    """
    buffer = aligned_buffer(PIECE_BYTES)
    total = 0
    while total <= limit and (found := reader.readinto(buffer)):
        yield buffer[:found]
        total += found
