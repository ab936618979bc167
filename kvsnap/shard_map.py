"""Which chunks of the index lie in which shard. Guarded by the cache's lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvsnap.index import Chunk
from kvsnap.keys import ChunkKey
from kvsnap.layout import Geometry
from kvsnap.policy import ShardStanding
from kvsnap.residency import Residency
from kvsnap.shard import ChunkEntry
from kvsnap.tiers.disk import Shard


@dataclass(slots=True)
class _Held:
    real_bytes: int
    chunks: list[Chunk] = field(default_factory=list)


class ShardMap:
    """The shards that are known, and the chunks that count as lying in each."""

    def __init__(self, residency: Residency, geometry: Geometry) -> None:
        self._residency = residency
        self._geometry = geometry
        self._shards: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._shards)

    def adopt(self, shards: Iterable[Shard]) -> int:
        """Enter shards and their chunks; returns how many chunks count now that didn't.

        A chunk whose chain of parents is not on disk counts as dead, as does a second
        copy of one that is there already: the bytes stay until the shard goes.
        """
        index = self._residency.index
        entries: list[tuple[int, str, str, ChunkEntry]] = []
        for shard in shards:
            if shard.id not in self._shards:
                self._shards[shard.id] = _Held(shard.real_bytes)
                entries.extend((entry.depth, shard.id, shard.scope, entry) for entry in shard.entries)
        entries.sort(key=_by_depth)  # stable: within a depth in the order given
        fresh: list[Chunk] = []
        made: dict[ChunkKey, Chunk] = {}
        adopted = 0
        for depth, shard_id, scope, entry in entries:
            above = made.get(entry.parent) or index.get(entry.parent) if depth else None
            if depth and (above is None or above.shard is None):
                continue
            chunk = made.get(entry.key) or index.get(entry.key)
            if chunk is None:
                chunk = Chunk(entry.key, above or entry.parent, depth, entry.tokens, scope, entry.block_keys)
                made[entry.key] = chunk
                fresh.append(chunk)
            elif chunk.shard is not None:
                continue
            self._residency.put_on_disk(chunk, shard_id, entry.offset, entry.xxh3)
            self._shards[shard_id].chunks.append(chunk)
            adopted += 1
        index.add_all(fresh)
        return adopted

    def apply_usage(self, usage: Mapping[ChunkKey, tuple[int, float]]) -> None:
        """Take over what an earlier engine recorded of each chunk's use."""
        for key, (hits, last_use) in usage.items():
            chunk = self._residency.index.get(key)
            if chunk is not None:
                chunk.hits, chunk.last_use = max(chunk.hits, hits), max(chunk.last_use, last_use)

    def usage(self) -> list[tuple[ChunkKey, int, float]]:
        """(key, hits, last use) of every chunk on disk."""
        return [(c.key, c.hits, c.last_use) for c in self._residency.index if c.shard is not None]

    def entries(self, shard_id: str) -> list[ChunkEntry]:
        """The chunks that still count in a shard, in file order."""
        held = self._shards.get(shard_id)
        alive = [c for c in held.chunks if c.shard == shard_id] if held else []
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
            for c in sorted(alive, key=lambda c: c.offset)
        ]

    def replace(self, old_id: str, new: Shard | None) -> int:
        """The chunks of `old_id` lie in `new` now, as far as it has them; returns how many were lost."""
        held = self._shards.pop(old_id, None)
        if new is not None:
            moved = _Held(new.real_bytes)
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

    def forget_all(self) -> int:
        """The disk tier is empty; returns how many chunks it had."""
        return sum(self.forget(shard_id) for shard_id in list(self._shards))

    def standings(self) -> list[ShardStanding]:
        """What each shard is worth: see `ShardStanding`."""
        best: dict[ChunkKey, float] = {}
        on_disk = [c for c in self._residency.index if c.shard is not None]
        on_disk.sort(key=lambda c: -c.depth)
        worth: dict[str, float] = {}
        for chunk in on_disk:
            score = max(self._residency.score(chunk), best.pop(chunk.key, float("-inf")))
            if chunk.shard is not None:
                worth[chunk.shard] = max(worth.get(chunk.shard, float("-inf")), score)
            parent = chunk.parent
            if parent is not None:
                best[parent.key] = max(best.get(parent.key, float("-inf")), score)
        return [
            ShardStanding(shard=shard_id, real_bytes=held.real_bytes, score=worth.get(shard_id, float("-inf")))
            for shard_id, held in self._shards.items()
        ]


def _by_depth(row: tuple[int, str, str, ChunkEntry]) -> int:
    return row[0]
