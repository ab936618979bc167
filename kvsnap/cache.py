"""TieredCache: hot chunks in DRAM, cold ones on disk, behind one lock.

The scheduler half of the connector calls it between engine steps, so every method but
`flush`, `preload` and `close` answers from memory at once. Reads, writes and checksums
run in threads (`promoter.py`, `writer.py`) that take the lock only to look something up
or to report. What has not arrived and been verified is never offered (invariant 1).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvsnap.attach import attach
from kvsnap.errors import StorageError
from kvsnap.index import ABSENT, FILLING, READING, READY, UNCHECKED, Chunk
from kvsnap.keys import ChunkKey, KeyChain
from kvsnap.match import Match, Promise, cut
from kvsnap.namespace import Namespace
from kvsnap.policy import EvictionPolicy, FrequencyRecency, Rates
from kvsnap.promoter import Promoter
from kvsnap.promotion import Promotion
from kvsnap.remote import RemoteChunk, RemoteSnapshot
from kvsnap.residency import Residency
from kvsnap.runtime import widen_affinity
from kvsnap.shard_map import ShardMap
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.dram import DramTier, SlotRecord
from kvsnap.writer import Writer

log = logging.getLogger(__name__)

_BACKGROUND_NICE = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """How the tiers are run; `kvsnap.config.Config` has the operator's names."""

    persist: str = "auto"
    """`auto`, `hot`, `all` or `none`: which chunks reach the disk, and when."""
    persist_salted: bool = False
    """Whether chunks of salted requests may reach the disk."""
    read_only: bool = False
    """Change nothing on disk."""
    num_readers: int = 4
    """Threads that promote; as many reads are in flight."""
    shard_bytes: int = 128 << 20
    """A shard is published once this many bytes wait for it."""
    shard_seconds: float = 10.0
    """Longest that a chunk waits for its shard to fill."""
    promise_share: float = 0.5
    """Largest share of the slots that waiting requests may hold."""
    clean_share: float = 0.05
    """Share of the slots that can always be taken without a write."""


class TieredCache:
    """Both tiers of one namespace.

    Args:
        namespace: What all chunks here belong to.
        dram: The DRAM tier, owned by this process.
        disk: The disk tier; None to go without.
        options: See `CacheOptions`.
        policy: Ranks chunks for eviction.
    """

    def __init__(
        self,
        namespace: Namespace,
        dram: DramTier,
        disk: DiskTier | None,
        options: CacheOptions | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.namespace = namespace
        self.geometry = namespace.geometry
        self.dram = dram
        self.disk = disk
        self.options = options or CacheOptions()
        self.lock = threading.RLock()
        self.residency = Residency(dram.num_slots, policy or FrequencyRecency(), dram.free)
        self.counts: Counter[str] = Counter()
        self.rates = Rates()
        self.is_closed = False
        self._chunk_tokens = namespace.chunk_tokens
        self._block_tokens = namespace.layout.block_tokens
        self.remote: RemoteSnapshot | None = None
        """A snapshot whose chunks can be fetched one by one, until its import is through."""
        self.disk_clears = 0
        """How often the disk tier was cleared."""
        self.is_clearing = False
        """Whether the disk tier is being cleared: nothing is read from it."""
        self._num_promised = 0
        self._stop_prefault: list[bool] = []
        self._filling: dict[tuple[int, int], Chunk] = {}
        self._loading: deque[tuple[int, list[int]]] = deque()
        self.counts["attach_found"] = attach(self.residency, dram)
        self.promotion = Promotion(self)
        self.promoter = Promoter(self, self.options.num_readers)
        self.writer = Writer(self)
        self.shards = ShardMap(self.residency, self.geometry)
        if disk is not None:
            with _without_gc():
                self.shards.apply_usage(disk.news_of_usage().items())
                self.shards.adopt(disk.scan())
                self.shards.expect_nothing()
            self._enforce_cap(disk)

    def start(self) -> None:
        """Start the threads; before that nothing moves."""
        self.promoter.start()
        self.writer.start()
        with self.lock:
            unchecked = [chunk for chunk in self.residency.index if chunk.state == UNCHECKED]
        unchecked.sort(key=lambda c: (-self.residency.score(c), c.depth))
        self.promoter.check(unchecked)
        threading.Thread(target=self._prefault, name="kvsnap-prefault", daemon=True).start()

    # -- lookup ----------------------------------------------------------------------

    def match(self, chain: KeyChain, start_tokens: int, limit_tokens: int) -> Match:
        """The longest usable continuation of a prompt, down to block boundaries.

        Args:
            chain: Keys of the whole prompt.
            start_tokens: Where the engine's own hit ends; a multiple of the block size.
            limit_tokens: Never match beyond this position; a multiple of the block size.
        """
        first = start_tokens // self._chunk_tokens
        with self.lock:
            index = self.residency.index
            run = index.run(chain.keys, first, _is_usable)
            last = first + len(run)
            if last * self._chunk_tokens < limit_tokens:
                wanted = chain.tail_block_keys(last, limit_tokens)
                sibling, blocks = index.longest_start(wanted, _is_usable) if wanted else (None, 0)
            else:
                sibling, blocks = None, 0
        match = cut(run, sibling, blocks, self.geometry, start_tokens, limit_tokens)
        remote = self.remote
        if remote is None or last * self._chunk_tokens >= limit_tokens:
            return match
        return replace(match, remote=tuple(remote.run(chain.keys, last, self._chunk_tokens)))

    def is_covered(self, block_keys: bytes) -> bool:
        """Whether some chunk in DRAM begins with all these blocks."""
        with self.lock:
            _, blocks = self.residency.index.longest_start(block_keys, _is_in_dram)
        return blocks * 16 == len(block_keys)

    def promote(self, chunks: Sequence[Chunk]) -> int:
        """See `Promotion.promote`."""
        return self.promotion.promote(chunks)

    def fetch(self, chain: KeyChain, chunks: Sequence[RemoteChunk], scope: str) -> int:
        """See `Promotion.fetch`."""
        return self.promotion.fetch(chain, chunks, scope)

    def is_moving(self, chunks: Iterable[Chunk]) -> bool:
        """Whether any of the chunks is still being read or checked."""
        return any(chunk.state == READING for chunk in chunks)

    # -- pins and loads --------------------------------------------------------------

    def promise(self, match: Match) -> Promise:
        """Pin what a request is told that it will get; shortened where too much is promised already.

        Cut at the first piece that is no longer ready (a clear may come in between). From
        here until `release` or the end of the load the bytes stay as they are, whatever
        becomes of the chunks.
        """
        share = self.options.promise_share if self._num_promised else 1.0  # a single request may have all
        room = int(share * self.residency.num_slots) - self._num_promised
        with self.lock:
            pieces = match.ready_part(self._block_tokens).pieces[: max(0, room)]
            end = match.start_tokens + self._block_tokens * sum(piece.num_blocks for piece in pieces)
            places = tuple((piece.chunk.slot, piece.chunk.generation) for piece in pieces)
            for slot, _ in places:
                self.residency.begin_op(slot)
            self._num_promised += len(places)
        return Promise(pieces=pieces, places=places, start_tokens=match.start_tokens, end_tokens=end)

    def release(self, promise: Promise) -> None:
        """Drop a promise: the request was admitted, gave up or finished."""
        with self.lock:
            for slot, _ in promise.places:
                self.residency.end_op(slot)
            self._num_promised -= len(promise.places)

    def begin_load(self, seq: int, slots: Sequence[int]) -> None:
        """Hold promised slots until every rank reports plan `seq` done."""
        with self.lock:
            for slot in slots:
                self.residency.begin_op(slot)
            self._loading.append((seq, list(slots)))
            self.counts["loads"] += len(slots)

    def touch(self, chunks: Iterable[Chunk], *, hit: bool) -> None:
        """Record use; a hit makes a chunk worth writing."""
        with self.lock:
            for chunk in chunks:
                self.residency.touch(chunk, hit=hit)
                if chunk.slot >= 0:
                    self.dram.touch(chunk.slot, chunk.hits, chunk.last_use)
                if hit:
                    self.writer.want(chunk)

    # -- stores ----------------------------------------------------------------------

    def in_dram(self, key: ChunkKey) -> Chunk | None:
        """The chunk of this key if it holds a slot, complete or not."""
        with self.lock:
            chunk = self.residency.index.get(key)
            return chunk if chunk is not None and chunk.slot >= 0 else None

    def begin_store(
        self, key: ChunkKey, parent: ChunkKey, *, depth: int, tokens: int, scope: str, block_keys: bytes
    ) -> tuple[int, int] | None:
        """Take a slot for a chunk that the workers are about to fill.

        The chunk becomes usable by itself once all ranks have written their completion
        words; see `poll`.

        Returns:
            (slot, generation), or None where no slot can be had without a write, the parent
            is not in DRAM, or the chunk is: the store is skipped, and counted.
        """
        with self.lock:
            index = self.residency.index
            above = index.get(parent) if depth else None
            if depth and (above is None or above.slot < 0):
                self.counts["stores_skipped_no_parent"] += 1
                return None
            present = index.get(key)
            if present is not None and present.slot >= 0:
                self.counts["stores_skipped_present"] += 1  # a promotion was faster
                return None
            slot = self.take_slot(above)
            if slot is None:
                self.counts["stores_skipped_no_slot"] += 1
                self.writer.wake()
                return None
            chunk = index.get(key)
            if chunk is None:
                chunk = Chunk(key, above if above is not None else parent, depth, tokens, scope, block_keys)
                index.add(chunk)
            generation = self.begin_fill(chunk, slot, FILLING)
            self.residency.touch(chunk, hit=False)
            self._filling[slot, generation] = chunk
            self.counts["stores"] += 1
            return slot, generation

    def fail(self, slot: int, generation: int) -> None:
        """A rank refused or failed a copy of this slot: what it held is no longer trusted."""
        with self.lock:
            owner = self.residency.owner(slot)
            self.counts["copies_failed"] += 1
            if owner is not None and owner.generation == generation and owner.state == READY:
                self.residency.vacate_subtree(owner)

    def poll(self) -> None:
        """Take note of the copies that the workers have finished since the last call."""
        with self.lock:
            done = self.dram.loads_done() if self._loading else 0
            while self._loading and self._loading[0][0] <= done:
                for slot in self._loading.popleft()[1]:
                    self.residency.end_op(slot)
            for (slot, generation), chunk in list(self._filling.items()):
                finished = self.dram.fill_state(slot, generation)
                if finished is None or (chunk.parent is not None and chunk.parent.state == FILLING):
                    continue  # the parent is older, so it comes first in this loop once it is done
                del self._filling[slot, generation]
                self._end_fill(chunk, slot, generation, good=finished)

    @property
    def has_pending_copies(self) -> bool:
        """Whether some worker still owes a completion word."""
        return bool(self._filling or self._loading)

    @property
    def has_pending_stores(self) -> bool:
        """Whether some slot is still being filled."""
        return bool(self._filling)

    # -- whole-tier operations -------------------------------------------------------

    def reset(self) -> int:
        """Make every DRAM chunk unreachable at once, also for a later engine; returns how many.

        Slots with copies in flight are reused only when those have ended.
        """
        with self.lock:
            self.dram.bump_epoch()
            return self.residency.vacate_all()

    def clear(self, tier: str) -> dict[str, int]:
        """Remove all chunks of `dram`, `disk` or `all`; returns the numbers removed by tier."""
        self.is_clearing = tier != "dram"  # what is read from a shard that is about to go would come back
        try:
            return self._clear(tier)
        finally:
            self.is_clearing = False

    def _clear(self, tier: str) -> dict[str, int]:
        removed: dict[str, int] = {}
        if tier in ("dram", "all"):
            with self.lock:
                removed["dram_chunks"] = self.residency.vacate_all()
        if tier in ("disk", "all") and self.disk is not None:
            self.disk_clears += 1  # a shard that is being written now belongs to what is cleared
            removed["disk_chunks"] = 0
            for shard_id in self.shards.ids():
                with self.lock:  # one at a time: the engine must not wait for all of them
                    removed["disk_chunks"] += self.shards.forget(shard_id)
            removed["disk_shards"], removed["disk_bytes"] = self.disk.clear()
        return removed

    def flush(self, timeout_s: float) -> dict[str, Any]:
        """Write everything that may be written and isn't yet; wait for it at most `timeout_s` seconds."""
        return self.writer.flush(timeout_s)

    def status(self) -> dict[str, Any]:
        """What is in the tiers and what happened so far; plain values for JSON."""
        with self.lock:
            chunks = list(self.residency.index)
            counts = dict(self.counts)
            num_unsaved = len(self.residency.unsaved)
        in_dram = [c for c in chunks if c.slot >= 0 and c.state != FILLING]
        on_disk = [c for c in chunks if c.shard is not None]
        return {
            "namespace": self.namespace.id(),
            "dram": {
                "path": self.dram.path,
                "bytes": self.dram.file_bytes,
                "slots": self.dram.num_slots,
                "chunks": len(in_dram),
                "chunk_bytes": self._bytes_of(in_dram),
                "tokens": sum(c.tokens for c in in_dram),
                "epoch": self.dram.epoch,
                "unsaved": num_unsaved,
            },
            "disk": {
                "chunks": len(on_disk),
                "chunk_bytes": self._bytes_of(on_disk),
                "tokens": sum(c.tokens for c in on_disk),
                "shards": len(self.shards),
                **self.writer.status(),
            },
            "counts": counts,
        }

    def close(self) -> None:
        """Stop the threads and let go of both tiers. What is on disk and in the DRAM file stays."""
        if self.is_closed:
            return
        self.is_closed = True
        self._stop_prefault.append(True)
        self.writer.stop()
        self.promoter.stop()
        self.dram.close()
        if self.disk is not None:
            self.disk.close()

    # -- called under the lock -------------------------------------------------------

    def take_slot(self, above: Chunk | None) -> int | None:
        """A slot for a child of `above`, which is not evicted for it; None if there is none without a write."""
        parents = [] if above is None else [above]
        self.residency.shield(parents)
        try:
            return self.residency.take_slot(self.writer.is_droppable)
        finally:
            self.residency.unshield(parents)

    def begin_fill(self, chunk: Chunk, slot: int, state: int) -> int:
        """The slot belongs to the chunk, which is FILLING or READING; it is held for that. Returns its generation."""
        generation = self.dram.begin(slot)
        self.residency.occupy(chunk, slot, generation, state)
        self.residency.begin_op(slot)
        return generation

    # -- called by the threads -------------------------------------------------------

    def set_checksum(self, chunk: Chunk, slot: int, generation: int, xxh3: bytes) -> None:
        """The checksum of a stored chunk was computed; empty where that failed."""
        with self.lock:
            if xxh3 and chunk.slot == slot and chunk.generation == generation and chunk.state == READY:
                chunk.dram_xxh3 = xxh3
                self.dram.set_checksum(slot, xxh3)
            self.residency.end_op(slot)

    # -- inside ----------------------------------------------------------------------

    def _enforce_cap(self, disk: DiskTier) -> None:
        """The cap may be smaller than at the last start."""
        try:
            disk.enforce_cap()
        except StorageError as error:  # the next write makes room
            log.warning("kvsnap: the disk tier may be over its cap for now: %s", error)

    def _bytes_of(self, chunks: Iterable[Chunk]) -> int:
        return sum(self.geometry.chunk_bytes(chunk.tokens) for chunk in chunks)

    def _prefault(self) -> None:
        """Map the data's pages here too: promotions would pay for their first touch."""
        widen_affinity()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICE)
        self.dram.prefault(self._stop_prefault)

    def _end_fill(self, chunk: Chunk, slot: int, generation: int, *, good: bool) -> None:
        self.residency.end_op(slot)
        if chunk.slot != slot or chunk.generation != generation:
            return  # reset or cleared meanwhile
        parent = chunk.parent
        if not good or (parent is not None and parent.slot < 0):
            self.counts["stores_failed"] += 1
            self.residency.vacate_subtree(chunk)
            return
        self.dram.commit(self.record(chunk))
        self.residency.ready(chunk)
        self.counts["stored"] += 1
        for short in self.residency.index.covered_by(chunk):
            self.residency.cover(short, chunk)
        self.writer.stored(chunk)

    def record(self, chunk: Chunk) -> SlotRecord:
        """What the DRAM file says of a chunk in its slot."""
        return SlotRecord(
            slot=chunk.slot,
            generation=chunk.generation,
            key=chunk.key,
            parent=chunk.parent_key,
            depth=chunk.depth,
            tokens=chunk.tokens,
            scope=chunk.scope,
            block_keys=chunk.block_keys,
            xxh3=chunk.dram_xxh3,
            hits=chunk.hits,
            last_use=chunk.last_use,
        )


@contextlib.contextmanager
def _without_gc() -> Iterator[None]:
    """Hundreds of thousands of objects that all stay: looking for garbage among them takes longer than making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _is_usable(chunk: Chunk) -> bool:
    return chunk.state in (READY, READING, UNCHECKED) or chunk.shard is not None


def _is_in_dram(chunk: Chunk) -> bool:
    return chunk.state != ABSENT
