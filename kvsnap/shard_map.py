"""Which chunks of the index lie in which shard. Guarded by the cache's lock."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvsnap.index import Chunk
from kvsnap.keys import ChunkKey
from kvsnap.layout import Geometry
from kvsnap.residency import Residency
from kvsnap.shard import ChunkEntry
from kvsnap.tiers.disk import Shard

_UNUSED = (0, 0.0)


class ShardSize(NamedTuple):
    """What a shard takes."""

    id: str
    real_bytes: int
    """On disk."""
    data_bytes: int
    """By all chunks that it was written with, dead or alive."""


@dataclass(slots=True)
class _Held:
    real_bytes: int
    data_bytes: int
    num_entries: int
    written: float
    """When, Unix time [s]."""
    age: tuple[int, str]
    """Of two shards that hold the same chunk the one with the higher age counts, in every process alike."""
    chunks: list[Chunk] = field(default_factory=list)
    """All that ever counted as lying here; those that still do say so themselves."""

    @classmethod
    def of(cls, shard: Shard) -> _Held:
        return cls(
            real_bytes=shard.real_bytes,
            data_bytes=sum(entry.nbytes for entry in shard.entries),
            num_entries=len(shard.entries),
            written=shard.written_ns / 1e9,
            age=(shard.written_ns, shard.id),
        )


class ShardMap:
    """The shards that are known, and the chunks that count as lying in each."""

    def __init__(self, residency: Residency, geometry: Geometry) -> None:
        self._residency = residency
        self._geometry = geometry
        self._shards: dict[str, _Held] = {}
        self._expected: dict[ChunkKey, tuple[int, float]] = {}
        """Recorded use of chunks that have not been seen yet."""

    def __len__(self) -> int:
        return len(self._shards)

    def __contains__(self, shard_id: str) -> bool:
        return shard_id in self._shards

    def adopt(self, shards: Iterable[Shard], *, leaving: Container[str] = ()) -> int:
        """Enter shards and their chunks; returns how many chunks count now that didn't.

        A chunk whose chain of parents is not on disk counts as dead. Of two copies the one
        in the younger shard counts: what was compacted by somebody else has moved there.
        The bytes of the dead stay until their shard goes. Whoever brought a chunk here wanted it
        then: it counts as used when its shard was written, else an import would be the first to be evicted.

        Args:
            leaving: Shards that have vanished and are about to be forgotten.
        """
        fresh: dict[ChunkKey, Chunk] = {}
        orphans: dict[ChunkKey, list[tuple[str, str, ChunkEntry]]] = {}
        adopted = 0
        for shard in shards:  # one at a time: a directory has millions of entries
            if shard.id not in self._shards:
                self._shards[shard.id] = _Held.of(shard)
            ready = [(shard.id, shard.scope, entry) for entry in reversed(shard.entries)]
            while ready:
                row = ready.pop()
                entry = row[2]
                above = (fresh.get(entry.parent) or self._residency.index.get(entry.parent)) if entry.depth else None
                if entry.depth and (above is None or above.shard is None):
                    orphans.setdefault(entry.parent, []).append(row)  # its parent may be in a shard to come
                    continue
                adopted += self._place(row, above, fresh, leaving)
                ready.extend(orphans.pop(entry.key, ()))
        self._residency.index.add_all(fresh.values())
        return adopted

    def _place(
        self,
        row: tuple[str, str, ChunkEntry],
        above: Chunk | None,
        fresh: dict[ChunkKey, Chunk],
        leaving: Container[str],
    ) -> bool:
        """Whether the chunk counts now and didn't."""
        shard_id, scope, entry = row
        chunk = fresh.get(entry.key) or self._residency.index.get(entry.key)
        if chunk is None:
            chunk = Chunk(entry.key, above or entry.parent, entry.depth, entry.tokens, scope, entry.block_keys)
            chunk.hits, last_use = self._expected.pop(entry.key, _UNUSED)
            chunk.last_use = max(last_use, self._shards[shard_id].written)
            fresh[entry.key] = chunk
        elif chunk.shard is not None and chunk.shard not in leaving and not self._is_younger(shard_id, chunk.shard):
            return False
        is_new = chunk.shard is None
        self._residency.put_on_disk(chunk, shard_id, entry.offset, entry.xxh3)
        self._shards[shard_id].chunks.append(chunk)
        return is_new

    def _is_younger(self, shard_id: str, than: str) -> bool:
        other = self._shards.get(than)
        return shard_id != than and (other is None or self._shards[shard_id].age > other.age)

    def apply_usage(self, usage: Iterable[tuple[ChunkKey, tuple[int, float]]]) -> None:
        """Take over what others recorded of each chunk's use: key, (hits, last use). What isn't here yet may come."""
        for key, known in usage:
            chunk = self._residency.index.get(key)
            if chunk is None:
                self._expected[key] = known
            else:
                chunk.hits, chunk.last_use = max(chunk.hits, known[0]), max(chunk.last_use, known[1])

    def expect_nothing(self) -> None:
        """Forget the recorded use of chunks that did not come."""
        self._expected = {}

    def usage(self, chunks: Iterable[Chunk]) -> list[tuple[ChunkKey, int, float]]:
        """(key, hits, last use) of those on disk that were used since they were written.

        Needs no lock if `chunks` is a list of its own.
        """
        rows = []
        for chunk in chunks:
            held = self._shards.get(chunk.shard or "")
            if held is not None and (chunk.hits or chunk.last_use > held.written):
                rows.append((chunk.key, chunk.hits, chunk.last_use))
        return rows

    def entries(self, shard_id: str) -> list[ChunkEntry]:
        """The chunks that still count in a shard, in file order."""
        held = self._shards.get(shard_id)
        alive = {c.key: c for c in held.chunks if c.shard == shard_id} if held else {}
        return [
            ChunkEntry(
                key=c.key,
                parent=c.parent_key,
                depth=c.depth,
                tokens=c.tokens,
                xxh3=c.shard_xxh3,
                block_keys=c.block_keys,
                offset=c.offset,
                nbytes=self._geometry.chunk_bytes(c.tokens),
            )
            for c in sorted(alive.values(), key=lambda c: c.offset)
        ]

    def replace(self, old_id: str, new: Shard | None) -> int:
        """The chunks of `old_id` lie in `new` now, as far as it has them; returns how many were lost."""
        held = self._shards.pop(old_id, None)
        if new is not None:
            moved = _Held.of(new)
            self._shards[new.id] = moved
            for entry in new.entries:
                chunk = self._residency.index.get(entry.key)
                if chunk is not None and chunk.shard == old_id:
                    self._residency.put_on_disk(chunk, new.id, entry.offset, entry.xxh3)
                    moved.chunks.append(chunk)
        lost = 0
        for chunk in held.chunks if held else ():
            if chunk.shard == old_id:
                lost += len(self._residency.drop_from_disk(chunk))
        return lost

    def forget(self, shard_id: str) -> int:
        """The shard is gone; returns how many chunks lost their place on disk, descendants elsewhere included."""
        return self.replace(shard_id, None)

    # -- for eviction ----------------------------------------------------------------

    def sizes(self) -> list[ShardSize]:
        """What each shard takes."""
        return [ShardSize(shard_id, held.real_bytes, held.data_bytes) for shard_id, held in self._shards.items()]

    def ids(self) -> list[str]:
        """All shards, those that were adopted first in front."""
        return list(self._shards)

    def alive_share(self, shard_id: str) -> float:
        """Share of a shard's data that counts; 1.0 for a shard that isn't known."""
        held = self._shards.get(shard_id)
        if held is None or not held.data_bytes:
            return 1.0
        alive = {c.key: c.tokens for c in held.chunks if c.shard == shard_id}
        return sum(map(self._geometry.chunk_bytes, alive.values())) / held.data_bytes

    def totals(self) -> tuple[int, int]:
        """Chunks that the shards were written with, dead or alive, and their bytes."""
        held = list(self._shards.values())
        return sum(h.num_entries for h in held), sum(h.data_bytes for h in held)
