"""Keeps the disk tier within its cap: chunks die leaf first, shards with little left in them are compacted.

Done ahead of need, by the writer's thread: a reserve below the cap stays free, so that a
write finds its room there. Only what comes by surprise (another process wrote, the disk is
full below the cap) is met in line, and then by dropping whole shards, which takes no room.

What to do is decided on a copy of the index, taken in a moment; the cache's lock is held
for a few chunks at a time, so the engine's thread never waits for an eviction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsnap.errors import CorruptChunkError, KvsnapError
from kvsnap.eviction_plan import COMPACT_BELOW, DiskView, plan_eviction
from kvsnap.index import READING, Chunk
from kvsnap.runtime import in_turns
from kvsnap.shard import ChunkEntry

if TYPE_CHECKING:
    from kvsnap.cache import TieredCache

log = logging.getLogger(__name__)

RESERVE_SHARDS = 2
RESERVE_SHARE = 8
"""The reserve is at most the cap divided by this."""
TIDY_EVERY_S = 10.0
"""A shard is compacted only for its dead weight at most this often."""
_LOOK_AT = 16
_AT_ONCE = 32
_ROWS_AT_ONCE = 1024


class DiskEviction:
    """The evicting side of one cache. Thread-safe: an import evicts from a thread of its own."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._next_tidy = 0.0
        self._looked_at = 0
        self.needed: frozenset[Chunk] = frozenset()
        """Ancestors of what is being written: without them it would be dead on arrival (invariant 6)."""
        if cache.disk is not None:
            cache.disk.evict = self.evict

    # -- when ------------------------------------------------------------------------

    def evict(self, needed_bytes: int) -> int:
        """Free about `needed_bytes` at once by dropping the coldest shards; returns the real bytes freed.

        The disk tier calls it with its directory lock held, so nothing is copied here.
        """
        return self._reclaim(needed_bytes, compact_below=0.0)

    def trim(self, upcoming_bytes: int = 0) -> int:
        """Restore the reserve, and room for a write of `upcoming_bytes`; returns the real bytes freed."""
        disk = self._cache.disk
        if disk is None or self._cache.options.read_only:
            return 0
        reserve = min(RESERVE_SHARDS * self._cache.options.shard_bytes, disk.cap_bytes // RESERVE_SHARE)
        missing = disk.missing_bytes(max(reserve, upcoming_bytes))
        if missing <= 0:
            return 0
        with disk.evicting() as is_mine:  # else another engine is at it
            return self._reclaim(missing, compact_below=COMPACT_BELOW) if is_mine else 0

    def tidy(self) -> None:
        """Look at a few shards: drop those with nothing alive, now and then compact one under half alive."""
        cache = self._cache
        disk = cache.disk
        if disk is None or cache.options.read_only:
            return
        with cache.lock:
            ids = cache.shards.ids()
        start = self._looked_at if self._looked_at < len(ids) else 0
        self._looked_at = start + _LOOK_AT
        suspects = []
        for shard_id in ids[start : start + _LOOK_AT]:
            with cache.lock:
                if cache.shards.alive_share(shard_id) < COMPACT_BELOW:
                    suspects.append(shard_id)
        if not suspects:
            return
        with disk.evicting() as is_mine:
            for shard_id in suspects if is_mine else ():
                self._tidy_one(shard_id)

    def _tidy_one(self, shard_id: str) -> None:
        cache = self._cache
        assert cache.disk is not None
        found = cache.disk.reread(shard_id)
        with cache.lock:
            if found is not None and shard_id in cache.shards:
                cache.shards.adopt([found])  # what came before its parents may hang on them by now
            share = cache.shards.alive_share(shard_id)
        now = time.monotonic()
        if share == 0.0:
            self._reclaim_shard(shard_id, may_compact=False)
        elif share < COMPACT_BELOW and now >= self._next_tidy:
            self._next_tidy = now + TIDY_EVERY_S
            self._reclaim_shard(shard_id, may_compact=True)

    def status(self) -> dict[str, Any]:
        """Dead weight, and what compaction has cost so far."""
        cache = self._cache
        with cache.lock:
            chunks = list(cache.residency.index)
            num_chunks, nbytes = cache.shards.totals()
        alive = [cache.geometry.chunk_bytes(chunk.tokens) for chunk in chunks if chunk.shard is not None]
        written, rewritten = cache.counts["written_bytes"], cache.counts["compacted_bytes"]
        return {
            "dead_chunks": max(0, num_chunks - len(alive)),
            "dead_bytes": max(0, nbytes - sum(alive)),
            "written_bytes": written,
            "rewritten_bytes": rewritten,
            "write_amplification": round((written + rewritten) / written, 3) if written else 1.0,
        }

    # -- how -------------------------------------------------------------------------

    def _reclaim(self, needed_bytes: int, *, compact_below: float) -> int:
        cache = self._cache
        assert cache.disk is not None
        view, chunks, ids = self._view()
        plan = plan_eviction(view, needed_bytes, compact_below=compact_below)
        self._kill([chunks[row] for row in plan.victims.tolist()])
        freed = 0
        for shard in plan.shards:
            gained = self._reclaim_shard(ids[shard], may_compact=compact_below > 0)
            if gained is None:  # no room to copy into: whole shards then, until there is
                return freed + self._reclaim(needed_bytes - freed, compact_below=0.0)
            freed += gained
        return freed

    def _view(self) -> tuple[DiskView, list[Chunk], list[str]]:
        """The chunks on disk and their shards, as they are about now."""
        cache = self._cache
        with cache.lock:
            known = list(cache.residency.index)
            sizes = cache.shards.sizes()
            needed = self.needed
        positions = {size.id: position for position, size in enumerate(sizes)}
        chunks: list[Chunk] = []
        rows: dict[Chunk, int] = {}
        table: list[tuple[float, int, int, int, bool]] = []
        for few in in_turns(known, _ROWS_AT_ONCE):
            for chunk in few:
                position = positions.get(chunk.shard or "")
                if position is not None:
                    rows[chunk] = len(chunks)
                    chunks.append(chunk)
                    is_pinned = chunk in needed or chunk.state == READING
                    nbytes = cache.geometry.chunk_bytes(chunk.tokens)
                    table.append((cache.residency.score(chunk), chunk.depth, position, nbytes, is_pinned))
        parents: list[int] = []
        for few in in_turns(chunks, _ROWS_AT_ONCE):
            parents.extend(rows.get(chunk.parent, -1) if chunk.parent is not None else -1 for chunk in few)
        score, depth, shard, sizes_of, pinned = zip(*table, strict=True) if table else ((), (), (), (), ())
        view = DiskView(
            score=np.array(score, dtype=np.float64),
            parent=np.array(parents, dtype=np.int64),
            depth=np.array(depth, dtype=np.int64),
            shard=np.array(shard, dtype=np.int64),
            nbytes=np.array(sizes_of, dtype=np.int64),
            is_pinned=np.array(pinned, dtype=np.bool_),
            shard_real_bytes=np.array([size.real_bytes for size in sizes], dtype=np.int64),
            shard_data_bytes=np.array([size.data_bytes for size in sizes], dtype=np.int64),
        )
        return view, chunks, [size.id for size in sizes]

    def _kill(self, victims: Sequence[Chunk]) -> None:
        """Chunks lose their place on disk, children first, a few at a time."""
        cache = self._cache
        for few in in_turns(victims, _AT_ONCE):
            with cache.lock:
                for chunk in few:
                    if chunk.shard is not None:
                        cache.counts["evicted_disk_chunks"] += len(cache.residency.drop_from_disk(chunk))

    def _reclaim_shard(self, shard_id: str, *, may_compact: bool) -> int | None:
        """Drop a shard; what is alive in it moves to a new one, or dies if it may not.

        Returns:
            The real bytes freed. None: nothing was done, as there is no room for the new one.
        """
        cache = self._cache
        assert cache.disk is not None
        with cache.lock:
            alive = cache.shards.entries(shard_id)
        if alive and may_compact:
            return self._compact(shard_id, alive)
        self._kill(self._chunks_of(shard_id, alive))
        with cache.lock:
            cache.counts["evicted_disk_chunks"] += cache.shards.forget(shard_id)
            cache.counts["evicted_shards"] += 1
        return cache.disk.drop(shard_id)

    def _compact(self, shard_id: str, alive: list[ChunkEntry]) -> int | None:
        cache = self._cache
        assert cache.disk is not None
        try:
            copy = cache.disk.compact(shard_id, alive)
        except CorruptChunkError:
            cache.writer.repair(shard_id)
            return 0
        except (KvsnapError, OSError) as error:
            cache.counts["compaction_errors"] += 1
            log.debug("kvsnap: shard %s is not compacted: %s", shard_id[:12], error)
            return 0
        if copy is None:
            return None
        with cache.lock:
            is_known = shard_id in cache.shards
            if is_known:
                cache.shards.replace(shard_id, copy)
                cache.counts["compacted_shards"] += 1
                cache.counts["compacted_chunks"] += len(alive)
                cache.counts["compacted_bytes"] += sum(entry.nbytes for entry in alive)
        if not is_known:  # cleared, or removed by another process, meanwhile
            cache.disk.drop(copy.id)
            return 0
        return cache.disk.drop(shard_id) - copy.real_bytes

    def _chunks_of(self, shard_id: str, entries: Iterable[ChunkEntry]) -> list[Chunk]:
        with self._cache.lock:
            found = [self._cache.residency.index.get(entry.key) for entry in entries]
        alive = [chunk for chunk in found if chunk is not None and chunk.shard == shard_id]
        return sorted(alive, key=lambda chunk: -chunk.depth)
