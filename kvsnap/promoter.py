"""Reads chunks from disk into DRAM slots, and checks what an attach found.

A few daemon threads take jobs from queues. Each read goes straight into the slot's
shared memory; the checksum decides whether the chunk is offered. Bad or vanished bytes
cost the chunk, never the caller (invariant 2).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvsnap.errors import KvsnapError, StorageError
from kvsnap.index import Chunk
from kvsnap.remote import RemoteSnapshot
from kvsnap.shard import ChunkEntry, checksum
from kvsnap.work_queue import WorkQueue

if TYPE_CHECKING:
    from kvsnap.cache import TieredCache

log = logging.getLogger(__name__)

_URGENT, _PRELOAD, _CHECK = range(3)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadJob:
    """One chunk on its way into a slot, or a check of what is there."""

    chunk: Chunk
    slot: int
    generation: int
    shard: str | None
    """Where to read it from; None: only check the slot's bytes."""
    offset: int
    xxh3: bytes
    """The checksum that the bytes must have."""

    row: int = -1
    """Its row in the snapshot `source`, where it is fetched from there."""
    source: RemoteSnapshot | None = None

    @property
    def is_fill(self) -> bool:
        """Whether the slot is filled, and not only checked."""
        return self.shard is not None or self.source is not None

    @property
    def kind(self) -> str:
        """Name of the counter that it moves."""
        if self.source is not None:
            return "fetched"
        return "promoted" if self.shard is not None else "attached"


class Promoter:
    """The reading threads of one cache.

    What a request waits for goes first; preloads, and after them checks of an attached tier, are done in between, one
    at a time and thread, so that a request never queues behind them. What comes from a snapshot has threads of its
    own: a store that does not answer must not keep anybody from the disk.
    """

    def __init__(self, cache: TieredCache, num_threads: int) -> None:
        self._cache = cache
        self._reads = WorkQueue("kvsnap-read", num_threads, num_levels=3)
        self._fetches = WorkQueue("kvsnap-fetch", num_threads)
        self._warned: set[str] = set()

    def start(self) -> None:
        """Start the threads."""
        self._reads.start()

    def stop(self) -> None:
        """Let the running reads finish and end the threads; jobs not yet begun are dropped."""
        self._reads.stop()
        self._fetches.stop()

    def submit(self, jobs: Sequence[ReadJob]) -> None:
        """Queue jobs; their slots are held by operation pins already."""
        fetches = [job for job in jobs if job.source is not None]
        if fetches:
            self._fetches.start()  # most engines never need these threads
            self._fetches.add(_URGENT, (partial(self._do, job) for job in fetches))
        self._reads.add(_URGENT, (partial(self._do, job) for job in jobs if job.source is None))

    def preload(self, chunks: Iterable[Chunk]) -> None:
        """Promote these when no request waits, in this order, parents first; only into free slots."""
        self._reads.add(_PRELOAD, (partial(self._do_later, chunk) for chunk in chunks))

    def check(self, chunks: Iterable[Chunk]) -> None:
        """Check these, which an attach has found, when there is nothing else to do."""
        self._reads.add(_CHECK, (partial(self._do_later, chunk) for chunk in chunks))

    @property
    def num_pending(self) -> int:
        """Reads and checks that requests wait for; the writer holds back while there are any."""
        return self._reads.count(_URGENT)

    @property
    def num_later(self) -> int:
        """Chunks given to `preload` or `check` that are not through yet."""
        return self._reads.count(_PRELOAD) + self._reads.count(_CHECK)

    def wait_preload(self, deadline: float) -> bool:
        """Wait until all given to `preload` is through, or the threads stop; False if `deadline` comes first."""
        return self._reads.wait(_PRELOAD, deadline)

    def _do_later(self, chunk: Chunk) -> None:
        job = self._cache.promotion.background_job(chunk)
        if job is not None:
            self._do(job)

    def _do(self, job: ReadJob) -> None:
        good = False
        try:
            if job.source is not None:
                good = self._fetch(job, job.source)
            else:
                good = self._read(job) if job.is_fill else self._check(job)
        except Exception as error:  # whatever it is, the slot must come back
            self._warn(type(error).__name__, f"reading chunk {job.chunk.key.hex()[:12]} failed: {error}")
        finally:
            self._cache.promotion.finish_read(job, good=good)

    def _read(self, job: ReadJob) -> bool:
        disk = self._cache.disk
        assert disk is not None
        assert job.shard is not None
        chunk = job.chunk
        views = self._cache.dram.views(job.slot, chunk.tokens)
        nbytes = sum(view.nbytes for view in views)
        entry = ChunkEntry(
            key=chunk.key,
            parent=chunk.parent_key,
            depth=chunk.depth,
            tokens=chunk.tokens,
            xxh3=job.xxh3,
            block_keys=chunk.block_keys,
            offset=job.offset,
            nbytes=nbytes,
        )
        started = time.monotonic()
        try:
            good = disk.read_chunk(job.shard, entry, views)
        except StorageError as error:
            self._cache.writer.read_directory()  # perhaps another engine has compacted the shard
            moved = self._moved(job)
            if moved is not None:
                return self._read(moved)
            self._cache.counts["read_errors"] += 1
            self._warn("storage", f"{error}; treated as a miss")
            self._cache.writer.lose(job.shard, chunk)
            return False
        self._cache.rates.saw_read(nbytes * _in_flight(self._reads), time.monotonic() - started)
        if not good:
            self._cache.counts["damaged_chunks"] += 1
            log.warning("kvsnap: shard %s is damaged at chunk %s: treated as a miss", job.shard, chunk.key.hex()[:12])
            self._cache.writer.damaged(job.shard, chunk)
        return good

    def _moved(self, job: ReadJob) -> ReadJob | None:
        """The job at the place where its bytes lie now; None if they are still there, or gone."""
        with self._cache.lock:
            chunk = job.chunk
            if chunk.shard in (None, job.shard) or chunk.shard_xxh3 != job.xxh3:
                return None
            return replace(job, shard=chunk.shard, offset=chunk.offset)

    def _fetch(self, job: ReadJob, source: RemoteSnapshot) -> bool:
        if source.is_down:  # since this was queued
            return False
        views = self._cache.dram.views(job.slot, job.chunk.tokens)
        started = time.monotonic()
        try:
            good = source.read(job.row, views)
        except KvsnapError as error:
            self._cache.counts["fetch_errors"] += 1
            source.answered(good=False)
            self._warn("fetch", f"{error}; treated as a miss")
            return False
        source.answered(good=True)
        nbytes = sum(view.nbytes for view in views)
        self._cache.rates.saw_fetch(nbytes * _in_flight(self._fetches), time.monotonic() - started)
        if not good:
            self._cache.counts["damaged_fetches"] += 1
            source.lose(job.row)
            self._warn("damaged", f"chunk {job.chunk.key.hex()[:12]} of the snapshot is damaged; treated as a miss")
        return good

    def _check(self, job: ReadJob) -> bool:
        good = checksum(self._cache.dram.views(job.slot, job.chunk.tokens)) == job.xxh3
        if not good:
            self._cache.counts["damaged_slots"] += 1
            log.warning("kvsnap: chunk %s in the DRAM tier is damaged: dropped", job.chunk.key.hex()[:12])
        return good

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("kvsnap: %s (further ones of this kind are only counted)", text)


def _in_flight(queue: WorkQueue) -> int:
    """How many reads share the disk or the network now: one's share is not the whole speed."""
    return max(1, min(queue.count(_URGENT), queue.num_threads))
