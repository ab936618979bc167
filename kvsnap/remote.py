"""A snapshot that is served from before it has been imported: single chunks by ranged reads.

While an import runs in the background, a prompt whose chunks only the snapshot has
fetches exactly those, each verified against the BLAKE3 that the catalog gives. Once the
import is through, the disk tier has them all and nothing comes here any more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvsnap.catalog import Catalog
from kvsnap.direct_io import aligned_buffer
from kvsnap.keys import ChunkKey
from kvsnap.storage import Storage

_MOST_FAILURES = 3
_DOWN_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteChunk:
    """A chunk that only the snapshot has."""

    row: int
    """Its row in the catalog."""
    key: ChunkKey
    index: int
    """Its place in the prompt: the number of its ancestors."""
    nbytes: int


class RemoteSnapshot:
    """Looks chunks up in a snapshot's catalog and reads them.

    Args:
        storage: Where the repository lies.
        shard_names: Name of each shard's object, in the manifest's order.
        catalog: The chunk table, its digest checked.

    Memory: the catalog's columns and 12 bytes a chunk.
    """

    def __init__(self, storage: Storage, shard_names: Sequence[str], catalog: Catalog) -> None:
        self._storage = storage
        self._names = list(shard_names)
        self._catalog = catalog
        starts: NDArray[np.uint64] = np.ascontiguousarray(catalog.key[:, :8]).view(">u8").ravel().astype(np.uint64)
        self._order = np.argsort(starts, kind="stable")
        self._starts = starts[self._order]
        self._lost: set[int] = set()
        self._failures = 0
        self._down_until = 0.0

    def __len__(self) -> int:
        return len(self._catalog)

    def find(self, key: ChunkKey, tokens: int) -> int | None:
        """The row of a chunk with this key that holds `tokens` tokens."""
        start = np.uint64(int.from_bytes(key[:8], "big"))
        at = int(np.searchsorted(self._starts, start))
        while at < len(self._starts) and self._starts[at] == start:
            row = int(self._order[at])
            if self._catalog.key_of(row) == key:
                return row if int(self._catalog.tokens[row]) == tokens else None
            at += 1
        return None

    def run(self, keys: Sequence[ChunkKey], start: int, tokens: int) -> list[RemoteChunk]:
        """The full chunks of `keys[start:]` up to the first that the snapshot has not."""
        found: list[RemoteChunk] = []
        if self.is_down:
            return found
        for index in range(start, len(keys)):
            row = self.find(keys[index], tokens)
            if row is None or row in self._lost:
                break
            found.append(RemoteChunk(row=row, key=keys[index], index=index, nbytes=int(self._catalog.nbytes[row])))
        return found

    @property
    def is_down(self) -> bool:
        """Whether the repository is left alone for a while."""
        return time.monotonic() < self._down_until

    def lose(self, row: int) -> None:
        """The chunk's bytes are not what the catalog says: never asked for again."""
        self._lost.add(row)

    def answered(self, *, good: bool) -> None:
        """Whether the repository answered; after a few failures in a row it is left alone for a while."""
        self._failures = 0 if good else self._failures + 1
        if self._failures >= _MOST_FAILURES:
            self._down_until = time.monotonic() + _DOWN_S

    def xxh3(self, row: int) -> bytes:
        """The checksum under which the chunk is kept in the tiers."""
        return bytes(self._catalog.xxh3[row])

    def read(self, row: int, views: Sequence[memoryview]) -> bool:
        """Fetch one chunk into `views`; False where the bytes are not the catalog's.

        Raises:
            NotFoundError, StorageError: the repository failed.
        """
        from blake3 import blake3

        catalog = self._catalog
        nbytes = int(catalog.nbytes[row])
        if nbytes != sum(view.nbytes for view in views):
            return False
        buffer = aligned_buffer(nbytes)
        name = self._names[int(catalog.shard[row])]
        if self._storage.read_into(name, buffer, int(catalog.offset[row])) != nbytes:
            return False
        if blake3(buffer).digest() != catalog.blake3[row].tobytes():
            return False
        at = 0
        for view in views:
            view[:] = buffer[at : at + view.nbytes]
            at += view.nbytes
        return True
