"""Reads chunks from disk into DRAM slots, and checks what an attach found.

A few daemon threads take jobs from a queue. Each read goes straight into the slot's
shared memory; the checksum decides whether the chunk is offered. Bad or vanished bytes
cost the chunk, never the caller (invariant 2).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvsnap.errors import StorageError
from kvsnap.index import READING, UNCHECKED, Chunk
from kvsnap.runtime import widen_affinity
from kvsnap.shard import ChunkEntry, checksum

if TYPE_CHECKING:
    from kvsnap.cache import TieredCache

log = logging.getLogger(__name__)
_WAIT_STEP_S = 0.002


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

    @property
    def is_read(self) -> bool:
        """Whether bytes come from disk."""
        return self.shard is not None


class Promoter:
    """The reading threads of one cache."""

    def __init__(self, cache: TieredCache, num_threads: int) -> None:
        self._cache = cache
        self._num_threads = num_threads
        self._jobs: queue.SimpleQueue[ReadJob | None] = queue.SimpleQueue()
        self._arrived = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._warned: set[str] = set()
        self.num_pending = 0
        """Reads and checks not yet over; the writer holds back while there are any."""

    def start(self) -> None:
        """Start the threads."""
        for number in range(self._num_threads):
            thread = threading.Thread(target=self._run, name=f"kvsnap-read-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Let the running reads finish and end the threads; jobs not yet begun are dropped."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def submit(self, jobs: Sequence[ReadJob]) -> None:
        """Queue jobs; their slots are held by operation pins already."""
        with self._arrived:
            self.num_pending += len(jobs)
        for job in jobs:
            self._jobs.put(job)

    def check(self, chunks: Iterable[Chunk]) -> None:
        """Queue checks of attached chunks in the given order."""
        for chunk in chunks:
            if chunk.state == UNCHECKED:
                self._cache.promote([chunk])

    def wait(self, chunks: Sequence[Chunk], deadline: float) -> bool:
        """Wait until none of the chunks is on its way; False where `deadline` (monotonic) came first."""
        with self._arrived:
            while any(chunk.state == READING for chunk in chunks):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._arrived.wait(min(left, 0.1))
        return True

    def _run(self) -> None:
        widen_affinity()
        while True:
            job = self._jobs.get()
            if job is None or self._cache.is_closed:
                return
            good = False
            try:
                good = self._read(job) if job.is_read else self._check(job)
            except Exception as error:  # whatever it is, the slot must come back
                self._warn(type(error).__name__, f"reading chunk {job.chunk.key.hex()[:12]} failed: {error}")
            finally:
                self._cache.finish_read(job, good=good)
                with self._arrived:
                    self.num_pending -= 1
                    self._arrived.notify_all()

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
