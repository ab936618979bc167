"""Reads chunks from disk into DRAM slots, and checks what an attach found.

A few daemon threads take jobs from a queue. Each read goes straight into the slot's
shared memory; the checksum decides whether the chunk is offered. Bad or vanished bytes
cost the chunk, never the caller (invariant 2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvsnap.errors import KvsnapError, StorageError
from kvsnap.index import Chunk
from kvsnap.remote import RemoteSnapshot
from kvsnap.runtime import widen_affinity
from kvsnap.shard import ChunkEntry, checksum

if TYPE_CHECKING:
    from kvsnap.cache import TieredCache

log = logging.getLogger(__name__)


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

    What a request waits for goes first; checks of an attached tier and preloads are done
    in between, one at a time and thread, so that a request never queues behind them.
    """

    def __init__(self, cache: TieredCache, num_threads: int) -> None:
        self._cache = cache
        self._num_threads = num_threads
        self._jobs: deque[ReadJob] = deque()
        self._later: deque[Chunk] = deque()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._stopping = False
        self._warned: set[str] = set()
        self._num_later_running = 0
        self.num_pending = 0
        """Reads and checks that requests wait for; the writer holds back while there are any."""

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._num_threads):
            thread = threading.Thread(target=self._run, name=f"kvsnap-read-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Let the running reads finish and end the threads; jobs not yet begun are dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=1.0)

    def submit(self, jobs: Sequence[ReadJob]) -> None:
        """Queue jobs; their slots are held by operation pins already."""
        with self._changed:
            self.num_pending += len(jobs)
            self._jobs.extend(jobs)
            self._changed.notify_all()

    def later(self, chunks: Iterable[Chunk]) -> None:
        """Check or promote these when no request waits, in this order, parents first; only into free slots."""
        with self._changed:
            self._later.extend(chunks)
            self._changed.notify_all()

    @property
    def num_later(self) -> int:
        """Chunks given to `later` that are not through yet."""
        return len(self._later) + self._num_later_running

    def wait_later(self, deadline: float, every_s: float = 0.1) -> bool:
        """Wait until `later` is through, at most `every_s` and until `deadline` (monotonic); whether it is."""
        end = min(deadline, time.monotonic() + every_s)
        with self._changed:
            while self.num_later:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _run(self) -> None:
        widen_affinity()
        while True:
            with self._changed:
                while not (self._jobs or self._later or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
                job = self._jobs.popleft() if self._jobs else None
                chunk = self._later.popleft() if job is None else None
                self._num_later_running += chunk is not None
            try:
                if job is None and chunk is not None:
                    later = self._cache.promotion.background_job(chunk)
                    if later is not None:
                        self._do(later)
                elif job is not None:
                    self._do(job)
            finally:
                with self._changed:
                    self.num_pending -= job is not None
                    self._num_later_running -= chunk is not None
                    self._changed.notify_all()

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
        # Several are in flight, so one read's share of the disk is not the disk's speed.
        in_flight = max(1, min(self.num_pending, self._num_threads))
        self._cache.rates.saw_read(nbytes * in_flight, time.monotonic() - started)
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
        in_flight = max(1, min(self.num_pending, self._num_threads))
        self._cache.rates.saw_fetch(nbytes * in_flight, time.monotonic() - started)
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
