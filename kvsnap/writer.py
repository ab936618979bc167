"""The background thread: takes note of finished copies, computes checksums, writes shards.

Which chunks reach the disk, and when, is the `persist` rule: a
chunk is wanted on disk when it was hit, when it is among the next to be evicted, or at
a flush. Wanted chunks wait in DRAM until a shard is full or old enough; the queue holds
no bytes of its own, so it can't outgrow the tier. When the disk fails or is full,
writing pauses and chunks may leave DRAM unwritten: serving goes on (invariant 2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from kvsnap.disk_eviction import DiskEviction
from kvsnap.errors import KvsnapError
from kvsnap.index import READY, Chunk
from kvsnap.keys import ChunkKey
from kvsnap.runtime import in_turns, widen_affinity
from kvsnap.shard import MAX_CHUNKS, checksum
from kvsnap.tiers.disk import ChunkToWrite, Shard

if TYPE_CHECKING:
    from kvsnap.cache import TieredCache

log = logging.getLogger(__name__)

_PENDING_TICK_S = 0.05
"""Between looks at copies that are under way: they take a forward pass, which shares the cores
with this thread, and the end of the step looks anyway. This is for an engine that falls idle."""
_IDLE_TICK_S = 0.25
_READS_TICK_S = 0.002
_DIRECTORY_EVERY_S = 1.0
_USAGE_EVERY_S = 60.0
_PAUSE_S = (1.0, 5.0, 15.0, 60.0)
_READS_FIRST_S = 0.5
_MOST_TO_CLEAN = 512
_USAGE_AT_ONCE = 512
_SHARE_OF_DRAM = 2
_SHARE_OF_DISK = 8


class Writer:
    """The write-behind side of one cache."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache
        self._wanted: dict[ChunkKey, Chunk] = {}
        self._wanted_since = 0.0
        self._is_urgent = False
        self._flushes = 0
        self._unhashed: deque[tuple[Chunk, int, int]] = deque()
        self._repairs: deque[str] = deque()
        self._event = threading.Event()
        self._progress = threading.Condition()
        self._reading = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._paused_until = 0.0
        self._failures = 0
        self._writing = False
        self._last_write = 0.0
        self._next_directory = time.monotonic() + _DIRECTORY_EVERY_S
        self._next_usage = time.monotonic() + _USAGE_EVERY_S
        self.eviction = DiskEviction(cache)

    # -- called under the cache's lock -----------------------------------------------

    def may_write(self, chunk: Chunk) -> bool:
        """Whether the rules let the chunk reach the disk at all."""
        options = self._cache.options
        if self._cache.disk is None or options.read_only or options.persist == "none":
            return False
        parts = chunk.scope.split(",") if chunk.scope else []
        return "mm" not in parts and ("salted" not in parts or options.persist_salted)

    def is_droppable(self, chunk: Chunk) -> bool:
        """Whether the chunk may leave DRAM as it is."""
        if chunk.shard is not None or chunk.is_covered or not self.may_write(chunk) or self.is_paused:
            return True
        return self._cache.options.persist == "hot" and chunk.hits == 0

    def want(self, chunk: Chunk) -> None:
        """Have the chunk written soon."""
        if chunk.state == READY and chunk.shard is None and chunk.key not in self._wanted and self.may_write(chunk):
            if not self._wanted:
                self._wanted_since = time.monotonic()
            if len(self._wanted) >= 2 * self._cache.residency.num_slots:  # while writing pauses, chunks leave unwritten
                self._wanted = {key: c for key, c in self._wanted.items() if c.slot >= 0 and c.shard is None}
            self._wanted[chunk.key] = chunk

    def stored(self, chunk: Chunk) -> None:
        """A store has completed: its checksum is due."""
        self._unhashed.append((chunk, chunk.slot, chunk.generation))
        if self._cache.options.persist == "all":
            self.want(chunk)
        self.wake()

    def damaged(self, shard: str, chunk: Chunk) -> None:
        """A chunk of the shard is bad on disk: out at once, the shard is taken apart soon."""
        with self._cache.lock:
            if chunk.shard == shard:
                self._cache.residency.drop_from_disk(chunk)
        self.repair(shard)

    def repair(self, shard: str) -> None:
        """Have a damaged shard taken apart soon: what is good in it is saved, the rest set aside."""
        if not self._cache.options.read_only and shard not in self._repairs:
            self._repairs.append(shard)
        self.wake()

    def lose(self, shard: str, chunk: Chunk) -> None:
        """A chunk could not be read: it counts as gone, so that no request asks for it again."""
        with self._cache.lock:
            if chunk.shard == shard:
                self._cache.residency.drop_from_disk(chunk)

    def wake(self) -> None:
        """There may be something to do."""
        self._event.set()

    @property
    def shard_bytes(self) -> int:
        """When a shard is full. Its chunks keep their slots while it is written, and it wants its room on disk at once,
        so of small tiers it takes a part only: else the hottest chunks, which are written, would be all that can go."""
        cache = self._cache
        dram = cache.residency.num_slots * cache.geometry.chunk_bytes(cache.namespace.chunk_tokens)
        cap = cache.disk.cap_bytes if cache.disk else 0
        return min(cache.options.shard_bytes, dram // _SHARE_OF_DRAM, cap // _SHARE_OF_DISK)

    @property
    def is_paused(self) -> bool:
        """Whether writing rests after a failure."""
        return time.monotonic() < self._paused_until

    # -- called from outside ---------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvsnap-write", daemon=True)
        self._thread.start()

    def stop_soon(self) -> None:
        """Write no more; returns at once."""
        self._stopping = True
        self.wake()

    def stop(self) -> None:
        """End the thread; a write under way is finished first, within 3 s."""
        self.stop_soon()
        if self._thread is not None:
            self._thread.join(timeout=3.0)

    def flush(self, timeout_s: float) -> dict[str, Any]:
        """See `TieredCache.flush`."""
        cache = self._cache
        deadline = time.monotonic() + timeout_s
        before = cache.counts["written_chunks"]
        asked: set[ChunkKey] = set()
        self._flushes += 1
        try:
            while not cache.is_closed:
                cache.poll()
                with cache.lock:
                    for chunk in self._unsaved():
                        if chunk.key not in asked:  # once: at the disk's cap writing one can evict another
                            asked.add(chunk.key)
                            self.want(chunk)
                    is_done = not self._wanted and not self._writing and not cache.has_pending_stores
                if is_done or time.monotonic() >= deadline or (self.is_paused and not self._writing):
                    break
                self.wake()
                with self._progress:
                    self._progress.wait(0.02)
        finally:
            self._flushes -= 1
        if time.monotonic() < deadline:
            self._store_usage()
        with cache.lock:
            unsaved = len(self._unsaved())
        return {"written_chunks": cache.counts["written_chunks"] - before, "unsaved_chunks": unsaved}

    def status(self) -> dict[str, Any]:
        """The disk tier's part of the status."""
        disk = self._cache.disk
        return {
            "waiting": len(self._wanted),
            "is_paused": self.is_paused,
            "real_bytes": disk.used_bytes() if disk else 0,
            "cap_bytes": disk.cap_bytes if disk else 0,
            "last_write": self._last_write,
            **self.eviction.status(),
        }

    # -- the thread ------------------------------------------------------------------

    def _run(self) -> None:
        widen_affinity()
        while not self._stopping:
            try:
                self._tick()
            except Exception as error:  # the thread must outlive any single failure
                self._cache.counts["background_errors"] += 1
                self._pause(f"background work failed: {error!r}")
            self._event.wait(_PENDING_TICK_S if self._cache.has_pending_copies else _IDLE_TICK_S)
            self._event.clear()

    def _tick(self) -> None:
        self._cache.poll()
        self._hash()
        now = time.monotonic()
        is_minute = now >= self._next_usage
        if is_minute:
            self._next_usage = now + _USAGE_EVERY_S
            self._cache.dram.note_use()
        if self._cache.disk is None:
            return
        if now >= self._next_directory:
            self._next_directory = now + _DIRECTORY_EVERY_S
            self.read_directory()
            self._clean()
            self.eviction.trim()
            if not self._cache.promoter.num_pending:
                self.eviction.tidy()
        if is_minute:
            self._store_usage()
        while self._repairs:
            try:
                self._repair(self._repairs[0])
            finally:  # a repair that fails is not tried again: its chunks are out already
                self._repairs.popleft()
        if self._is_due():
            self._write_one_shard()

    def _hash(self) -> None:
        cache = self._cache
        while self._unhashed:
            chunk, slot, generation = self._unhashed.popleft()
            with cache.lock:
                if chunk.slot != slot or chunk.generation != generation or chunk.dram_xxh3:
                    continue
                cache.residency.begin_op(slot)
            digest = b""
            try:
                digest = checksum(cache.dram.views(slot, chunk.tokens))
            finally:
                cache.set_checksum(chunk, slot, generation, digest)

    def read_directory(self) -> None:
        """Take note of what others did in the cache directory: shards that came or went, chunks that were used.

        Waits for another thread that does the same; the cache's lock is taken, a few chunks at a time.

        Raises:
            StorageError: the directory can't be read.
        """
        assert self._cache.disk is not None
        with self._reading:
            self._read_usage()
            fresh, vanished = self._cache.disk.poll()
            if fresh or vanished:
                self._note(fresh, vanished)

    def _read_usage(self) -> None:
        assert self._cache.disk is not None
        news = self._cache.disk.news_of_usage()
        if news:
            with self._cache.lock:
                self._cache.shards.expect_nothing()
        for few in in_turns(news.items(), _USAGE_AT_ONCE):
            with self._cache.lock:
                self._cache.shards.apply_usage(few)

    def _note(self, fresh: list[Shard], vanished: list[str]) -> None:
        with self._cache.lock:
            if fresh:  # first: a shard that vanished may have been compacted into a fresh one
                self._cache.shards.adopt(fresh, leaving=frozenset(vanished))
            for shard_id in vanished:
                self._cache.shards.forget(shard_id)

    def _clean(self) -> None:
        """Have the next victims written before they are needed."""
        cache = self._cache
        target = min(_MOST_TO_CLEAN, max(1, int(cache.options.clean_share * cache.residency.num_slots)))
        with cache.lock:
            missing = target - cache.residency.num_free
            for chunk in cache.residency.coldest_first(missing) if missing > 0 else ():
                if not self.is_droppable(chunk):
                    self.want(chunk)
                    self._is_urgent = True

    def _is_due(self) -> bool:
        if not self._wanted or self.is_paused:
            return False
        if self._flushes or self._is_urgent:
            return True
        options = self._cache.options
        is_full = self._waiting_bytes() >= self.shard_bytes
        return is_full or time.monotonic() - self._wanted_since >= options.shard_seconds

    def _waiting_bytes(self) -> int:
        """Bytes that the next shard will have, at most."""
        with self._cache.lock:
            waiting = sum(self._cache.geometry.chunk_bytes(chunk.tokens) for chunk in self._wanted.values())
        return min(waiting, self.shard_bytes)

    def _write_one_shard(self) -> None:
        cache = self._cache
        assert cache.disk is not None
        self._let_reads_pass()
        with cache.lock:
            batch = self._choose()
            places = [(chunk, chunk.slot, chunk.generation, chunk.dram_xxh3) for chunk in batch]
            self.eviction.needed = frozenset(above for chunk in batch for above in chunk.ancestors())
            for _, slot, _, _ in places:
                cache.residency.begin_op(slot)
            self._writing = bool(batch)
        try:
            if batch:  # room is made with the batch's ancestors pinned: else it would take its own chain's place
                self.eviction.trim(sum(cache.geometry.chunk_bytes(chunk.tokens) for chunk in batch))
                self._write(places)
        except KvsnapError as error:
            self._pause(str(error))
        finally:
            with cache.lock:
                for _, slot, _, _ in places:
                    cache.residency.end_op(slot)
                self._writing = False
                self.eviction.needed = frozenset()
                self._is_urgent = False
                self._wanted_since = time.monotonic()
            with self._progress:
                self._progress.notify_all()

    def _write(self, places: list[tuple[Chunk, int, int, bytes]]) -> None:
        cache = self._cache
        assert cache.disk is not None
        rows = []
        for chunk, slot, generation, digest in places:
            views = cache.dram.views(slot, chunk.tokens)
            if not digest:
                digest = checksum(views)
                with cache.lock:
                    cache.residency.begin_op(slot)
                cache.set_checksum(chunk, slot, generation, digest)
            rows.append(
                ChunkToWrite(
                    key=chunk.key,
                    parent=chunk.parent_key,
                    depth=chunk.depth,
                    tokens=chunk.tokens,
                    block_keys=chunk.block_keys,
                    xxh3=digest,
                    views=views,
                )
            )
        clears = cache.disk_clears
        shard = cache.disk.write(places[0][0].scope, rows)
        if shard is None:
            with cache.lock:  # others may find room; these are wanted again by a hit or a flush
                self._give_up({chunk for chunk, _, _, _ in places})
            cache.counts["writes_without_room"] += 1
            self._pause("the disk tier has no room, even after eviction")
            return
        self._failures = 0
        self._last_write = time.time()
        with cache.lock:
            is_void = cache.disk_clears != clears
            if not is_void:
                cache.shards.adopt([shard])
            for chunk, _, _, _ in places:
                self._wanted.pop(chunk.key, None)
            cache.counts["written_chunks"] += len(places)
            cache.counts["written_bytes"] += sum(cache.geometry.chunk_bytes(c.tokens) for c, _, _, _ in places)
        if is_void:
            cache.disk.drop(shard.id)

    def _give_up(self, refused: set[Chunk]) -> None:
        """These are not wanted any more, nor is what hangs on them."""
        for wanted in list(self._wanted.values()):
            if wanted in refused or any(above in refused for above in wanted.ancestors()):
                del self._wanted[wanted.key]

    def _choose(self) -> list[Chunk]:
        """Wanted chunks of one scope with their unwritten ancestors, parents first, up to a shard's size."""
        chosen: dict[ChunkKey, Chunk] = {}
        scope: str | None = None
        size, most = 0, self.shard_bytes
        for wanted in list(self._wanted.values()):
            if wanted.slot < 0 or wanted.shard is not None:
                del self._wanted[wanted.key]
                continue
            chain = [wanted, *wanted.ancestors()]
            for chunk in reversed(chain):
                if chunk.shard is not None or chunk.key in chosen:
                    continue
                if chunk.state != READY or not self.may_write(chunk):
                    break  # not now: later ones of this chain need it first
                scope = chunk.scope if scope is None else scope
                nbytes = self._cache.geometry.chunk_bytes(chunk.tokens)
                is_full = chosen and size + nbytes > most
                if chunk.scope != scope or is_full or len(chosen) >= MAX_CHUNKS:
                    break
                chosen[chunk.key] = chunk
                size += nbytes
        return list(chosen.values())

    def _repair(self, shard_id: str) -> None:
        cache = self._cache
        assert cache.disk is not None
        with cache.lock:
            good = cache.shards.entries(shard_id)
        clears = cache.disk_clears
        salvaged = cache.disk.quarantine(shard_id, good)
        if salvaged is not None and cache.disk_clears != clears:
            cache.disk.drop(salvaged.id)
            salvaged = None
        with cache.lock:
            cache.shards.replace(shard_id, salvaged)
        cache.counts["quarantined_shards"] += 1

    def _unsaved(self) -> list[Chunk]:
        return [c for c in self._cache.residency.unsaved.values() if not c.is_covered and self.may_write(c)]

    def _store_usage(self) -> None:
        cache = self._cache
        if cache.disk is None or cache.options.read_only:
            return
        try:
            self.read_directory()  # the file is replaced: what others wrote there is to be in it again
            with cache.lock:
                chunks = list(cache.residency.index)
            cache.disk.store_usage(cache.shards.usage(chunks))
        except KvsnapError as error:
            cache.counts["usage_errors"] += 1
            log.debug("kvsnap: usage not stored: %s", error)

    def _let_reads_pass(self) -> None:
        deadline = time.monotonic() + _READS_FIRST_S
        while self._cache.promoter.num_pending and time.monotonic() < deadline and not self._flushes:
            time.sleep(_READS_TICK_S)

    def _pause(self, why: str) -> None:
        seconds = _PAUSE_S[min(self._failures, len(_PAUSE_S) - 1)]
        if self._failures == 0:
            log.warning("kvsnap: writing pauses: %s; serving goes on, tried again by itself", why)
        self._failures += 1
        self._cache.counts["write_errors"] += 1
        self._paused_until = time.monotonic() + seconds
