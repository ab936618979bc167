"""Which reads, checks and fetches begin, and what becomes of a chunk when one is over.

The decisions, under the cache's lock; `promoter.py` has the threads that do the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvsnap.index import ABSENT, READING, UNCHECKED, Chunk
from kvsnap.keys import ChunkKey, KeyChain
from kvsnap.promoter import ReadJob
from kvsnap.remote import RemoteChunk

if TYPE_CHECKING:
    from kvsnap.cache import TieredCache


class Promotion:
    """Brings chunks of one cache into DRAM slots."""

    def __init__(self, cache: TieredCache) -> None:
        self._cache = cache

    def promote(self, chunks: Sequence[Chunk]) -> int:
        """Start to bring chunks, and their ancestors, into DRAM; returns how many reads began.

        All their slots are taken at once, or the promotion is shortened from its end,
        so that two waiters never hold half of what each needs. A chunk that is on its
        way already is not read again.
        """
        cache = self._cache
        jobs: list[ReadJob] = []
        with cache.lock:
            chain = _with_ancestors(chunks)
            cache.residency.shield(chain)
            try:
                for chunk in chain:
                    if chunk.state == UNCHECKED:
                        jobs.append(self._check_job(chunk))
                    elif chunk.state == ABSENT:
                        job = self._read_job(chunk)
                        if job is None:
                            break
                        jobs.append(job)
            finally:
                cache.residency.unshield(chain)
        cache.promoter.submit(jobs)
        return len(jobs)

    def fetch(self, chain: KeyChain, chunks: Sequence[RemoteChunk], scope: str) -> int:
        """Start to fetch consecutive chunks of a prompt from the snapshot; returns how many began.

        A chunk that is on its way already, for whomever, is in the index and not here.
        """
        cache = self._cache
        jobs: list[ReadJob] = []
        with cache.lock:
            for remote in chunks:
                parent = cache.residency.index.get(chain.parent_of(remote.index)) if remote.index else None
                if remote.index and (parent is None or parent.slot < 0):
                    break  # its parent comes first; asked again once that is here
                if cache.residency.index.get(remote.key) is not None:
                    continue
                job = self._fetch_job(chain, remote, parent, scope)
                if job is None:
                    break
                jobs.append(job)
        cache.promoter.submit(jobs)
        return len(jobs)

    def background_job(self, chunk: Chunk) -> ReadJob | None:
        """Called by a reading thread that has nothing better to do; None where the chunk needs nothing any more."""
        cache = self._cache
        with cache.lock:
            if cache.is_closed:
                return None
            if chunk.state == UNCHECKED:
                return self._check_job(chunk)
            if chunk.state == ABSENT and cache.residency.num_free:
                return self._read_job(chunk)
        return None

    def finish_read(self, job: ReadJob, *, good: bool) -> None:
        """A read or check is over: offer the chunk, or drop it with its descendants in DRAM."""
        cache = self._cache
        with cache.lock:
            if cache.is_closed:
                return
            chunk = job.chunk
            if chunk.slot == job.slot and chunk.generation == job.generation and chunk.state == READING:
                parent_ok = chunk.parent is None or chunk.parent.slot >= 0
                if good and parent_ok:
                    chunk.dram_xxh3 = job.xxh3
                    if job.is_fill:
                        cache.dram.commit(cache.record(chunk))
                    cache.residency.ready(chunk)
                    cache.counts[job.kind] += 1
                    if chunk.hits or cache.options.persist == "all":
                        cache.writer.want(chunk)  # the last engine did not get to write it
                else:
                    cache.residency.vacate_subtree(chunk)
            cache.residency.end_op(job.slot)

    # -- inside ----------------------------------------------------------------------

    def _read_job(self, chunk: Chunk) -> ReadJob | None:
        cache = self._cache
        if chunk.shard is None or cache.disk is None or cache.is_clearing:
            return None
        if chunk.parent is not None and chunk.parent.slot < 0:
            return None
        slot = cache.take_slot(chunk.parent)
        if slot is None:
            cache.counts["promotions_shortened"] += 1
            return None
        generation = cache.begin_fill(chunk, slot, READING)
        return ReadJob(
            chunk=chunk, slot=slot, generation=generation, shard=chunk.shard, offset=chunk.offset, xxh3=chunk.shard_xxh3
        )

    def _fetch_job(self, chain: KeyChain, remote: RemoteChunk, parent: Chunk | None, scope: str) -> ReadJob | None:
        cache = self._cache
        source = cache.remote
        slot = cache.take_slot(parent) if source is not None else None
        if source is None or slot is None:
            return None
        above = parent if parent is not None else chain.parent_of(0)
        end = (remote.index + 1) * cache.namespace.chunk_tokens
        block_keys = chain.tail_block_keys(remote.index, end)
        chunk = Chunk(remote.key, above, remote.index, cache.namespace.chunk_tokens, scope, block_keys)
        cache.residency.index.add(chunk)
        generation = cache.begin_fill(chunk, slot, READING)
        return ReadJob(
            chunk=chunk, slot=slot, generation=generation, shard=None, offset=0, xxh3=source.xxh3(remote.row),
            row=remote.row, source=source,
        )  # fmt: skip

    def _check_job(self, chunk: Chunk) -> ReadJob:
        cache = self._cache
        chunk.state = READING
        cache.residency.begin_op(chunk.slot)
        return ReadJob(
            chunk=chunk, slot=chunk.slot, generation=chunk.generation, shard=None, offset=0, xxh3=chunk.dram_xxh3
        )


def _with_ancestors(chunks: Iterable[Chunk]) -> list[Chunk]:
    order: dict[ChunkKey, Chunk] = {}
    for chunk in chunks:
        path = [chunk]
        for above in chunk.ancestors():
            if above.key in order:
                break
            path.append(above)
        order.update((c.key, c) for c in reversed(path))
    return list(order.values())
