"""TieredCache with real tiers and a rank that copies: what comes, what goes, and what a failure costs."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.cache import CacheOptions, TieredCache
from kvsnap.errors import StorageError
from kvsnap.index import READY, Chunk
from kvsnap.keys import ChunkKey, KeyChain
from kvsnap.namespace import Namespace
from kvsnap.preload import Preload
from kvsnap.shard import checksum
from kvsnap.tiers.disk import DiskTier, Shard
from kvsnap.tiers.dram import DramRegion, DramTier
from tests.disk_fakes import Snapshot, disk_use, make_namespace
from tests.waiting import wait_for

NS = make_namespace()
BIG = make_namespace(page=(2, 2, 16, 64), layers=8)  # 256 KiB a chunk
CHUNK = 64


class Rig:
    """One cache with its only rank. `disk_class` lets a test make the disk fail."""

    def __init__(
        self,
        directory: Path,
        *,
        ns: Namespace = NS,
        slots: int = 8,
        cap: int | None = 1 << 30,
        dram: str = "shm",
        threads: bool = True,
        read_only: bool = False,
        disk_class: type[DiskTier] = DiskTier,
        **options: Any,
    ) -> None:
        (directory / dram).mkdir(exist_ok=True)
        cache_dir = directory / "cache"
        chunk = ns.geometry.chunk_bytes(CHUNK)
        tier = DramTier.open(
            directory / dram, cache_dir, ns.id(), ns.geometry, budget_bytes=slots * chunk + 16384 + 512 * slots, ranks=1
        )
        assert tier.num_slots == slots
        self.ns = ns
        self.region = DramRegion.attach(tier.path, tier.nonce.hex(), rank=0, slice_index=0)
        self.disk = None if cap is None else disk_class(cache_dir, ns, cap_bytes=cap, read_only=read_only)
        self.cache = TieredCache(ns, tier, self.disk, CacheOptions(read_only=read_only, **options))
        if threads:
            self.cache.start()

    @property
    def counts(self) -> dict[str, int]:
        return self.cache.counts

    def chain(self, seed: int, chunks: int = 8, tail: int = 0) -> KeyChain:
        rng = random.Random(seed)
        chain = KeyChain(ChunkKey(bytes(32)), CHUNK, 16)
        chain.extend([rng.randrange(50_000) for _ in range(chunks * CHUNK + tail)])
        return chain

    def begin(self, chain: KeyChain, i: int, *, scope: str = "", tokens: int = CHUNK) -> tuple[int, int] | None:
        key = chain.keys[i] if tokens == CHUNK else chain.short_key(i, tokens)
        keys = chain.tail_block_keys(i, i * CHUNK + tokens)
        return self.cache.begin_store(key, chain.parent_of(i), depth=i, tokens=tokens, scope=scope, block_keys=keys)

    def copy(self, place: tuple[int, int], key: bytes, *, ok: bool = True) -> None:
        """What the worker does for a store."""
        if self.region.may_fill(*place):
            self.region.area(place[0])[:] = list(self.bytes_of(key))
        self.region.complete(*place, ok=ok)

    def bytes_of(self, key: bytes) -> bytes:
        return random.Random(key).randbytes(self.region.stride)

    def store(self, chain: KeyChain, count: int, *, start: int = 0, scope: str = "") -> int:
        """Store chunks start … count-1; returns how many could be."""
        stored = 0
        for i in range(start, count):
            place = self.begin(chain, i, scope=scope)
            if place is None:
                break
            self.copy(place, chain.keys[i])
            stored += 1
            self.cache.poll()
        return stored

    def chunks(self, chain: KeyChain) -> list[Chunk]:
        found = [self.cache.residency.index.get(key) for key in chain.keys]
        return [chunk for chunk in found if chunk is not None]

    def promote(self, chain: KeyChain) -> int:
        """Bring what is known of the chain into DRAM and wait; returns how many tokens are ready."""
        match = self.cache.match(chain, 0, chain.num_tokens)
        chunks = [piece.chunk for piece in match.pieces]
        self.cache.promote(chunks)
        wait_for(lambda: not self.cache.is_moving(chunks))
        return self.ready_tokens(chain)

    def ready_tokens(self, chain: KeyChain) -> int:
        """Tokens that a request would be promised; their bytes are compared with what was stored."""
        ready = self.cache.match(chain, 0, chain.num_tokens).ready_part(16)
        promise = self.cache.promise(ready)
        for piece, (slot, generation) in zip(promise.pieces, promise.places, strict=True):
            assert self.region.may_read(slot, generation)
            assert self.region.area(slot).tobytes() == self.bytes_of(piece.chunk.key)
        self.cache.release(promise)
        return promise.num_tokens

    def flush(self, timeout_s: float = 10.0) -> dict[str, Any]:
        return self.cache.flush(timeout_s)

    def kill(self) -> None:
        self.region.close()
        self.cache.close()


def preload(cache: TieredCache, budget_bytes: int, timeout_s: float) -> tuple[int, int]:
    """Chunks and bytes that a preload has brought into DRAM after so many seconds."""
    begun = Preload(cache, budget_bytes)
    begun.wait(timeout_s)
    return begun.loaded()


Start = Callable[..., Rig]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts caches in one directory; ends them all."""
    rigs: list[Rig] = []

    def make(**kwargs: Any) -> Rig:
        rigs.append(Rig(tmp_path, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.kill()


def shards(directory: Path) -> list[Path]:
    return sorted(directory.rglob("shards/*.safetensors"))


class TestPromotion:
    def test_is_single_flight(self, start: Start) -> None:
        """C14: ten waiters for one cold prefix cost one read a chunk."""
        rig = start(threads=False)
        chain = rig.chain(1)
        rig.store(chain, 3)
        rig.cache.writer.start()
        rig.flush()
        rig.cache.clear("dram")
        chunks = rig.chunks(chain)

        begun = [rig.cache.promote(chunks[-1:]) for _ in range(10)]
        rig.cache.promoter.start()
        wait_for(lambda: not rig.cache.is_moving(chunks))

        assert begun == [3] + [0] * 9  # ancestors come along
        assert rig.counts["promoted"] == 3
        assert rig.ready_tokens(chain) == 3 * CHUNK

    def test_is_shortened_where_slots_are_short(self, start: Start) -> None:
        """B11: two waiters never hold half of what each needs; what the first got can be served."""
        rig = start(slots=4)
        first, second = rig.chain(1), rig.chain(2)
        for chain in (first, second):
            rig.store(chain, 4)
            rig.flush()
        rig.cache.clear("dram")
        held = rig.begin(rig.chain(3), 0)
        assert held is not None  # a store in flight holds one of the four

        assert rig.promote(first) == 3 * CHUNK
        assert rig.counts["promotions_shortened"] == 1
        assert rig.promote(second) == 3 * CHUNK  # takes the first's place, leaf by leaf

    def test_does_not_evict_its_own_ancestors(self, start: Start) -> None:
        """Invariant 6: five chunks through four slots: the first four, not the last four."""
        rig = start(slots=4)
        chain = rig.chain(1)
        for i in range(5):
            if i == 4:
                rig.flush()
            rig.store(chain, i + 1, start=i)
        rig.flush()
        rig.cache.clear("dram")

        assert rig.promote(chain) == 4 * CHUNK

    def test_promised_slots_are_not_taken(self, start: Start) -> None:
        rig = start(slots=4)
        cold, hot = rig.chain(1), rig.chain(2)
        for chain in (cold, hot):
            rig.store(chain, 3)
            rig.flush()
        promise = rig.cache.promise(rig.cache.match(hot, 0, 3 * CHUNK))
        assert promise.num_tokens == 3 * CHUNK

        match = rig.cache.match(cold, 0, 3 * CHUNK)
        assert rig.cache.promote([piece.chunk for piece in match.pieces]) == 0  # the fourth slot has its own parent

        for piece, (slot, generation) in zip(promise.pieces, promise.places, strict=True):
            assert rig.region.may_read(slot, generation)
            assert rig.region.area(slot).tobytes() == rig.bytes_of(piece.chunk.key)
        rig.cache.release(promise)

    def test_failing_reads_cost_the_chunk_and_no_slot(self, start: Start) -> None:
        """Invariant 2: whatever a read raises, the slot comes back and the chunk is a miss."""
        rig = start(disk_class=FailingReads)
        chain = rig.chain(1)
        rig.store(chain, 3)
        rig.flush()
        rig.cache.clear("dram")

        assert rig.promote(chain) == 0
        wait_for(lambda: rig.cache.residency.num_free == 8)  # the other reads of the chain are still to end


class FailingReads(DiskTier):
    errors = itertools.cycle([StorageError("input/output error"), ValueError("anything")])

    def read_chunk(self, shard_id: str, entry: Any, views: list[memoryview]) -> bool:
        raise next(self.errors)


class TestPromise:
    def test_is_cut_where_a_clear_came_between(self, start: Start) -> None:
        """Invariant 1: the control socket's thread may empty the tier after the look-up."""
        rig = start()
        chain = rig.chain(1)
        rig.store(chain, 3)
        match = rig.cache.match(chain, 0, 3 * CHUNK)
        assert match.is_ready
        rig.cache.clear("dram")

        promise = rig.cache.promise(match)

        assert (promise.places, promise.num_tokens) == ((), 0)
        rig.cache.release(promise)
        assert rig.cache.residency.num_free == 8

    def test_waiting_requests_hold_a_share_at_most(self, start: Start) -> None:
        """Invariant 7: one may have all, several never block everybody else's stores."""
        rig = start(persist="none", slots=8)
        chains = [rig.chain(seed) for seed in range(2)]
        for chain in chains:
            rig.store(chain, 4)

        first = rig.cache.promise(rig.cache.match(chains[0], 0, 3 * CHUNK))
        second = rig.cache.promise(rig.cache.match(chains[1], 0, 4 * CHUNK))

        assert (first.num_tokens, second.num_tokens) == (3 * CHUNK, CHUNK)
        rig.cache.release(first)
        rig.cache.release(second)

    def test_survives_everything_until_the_load_is_over(self, start: Start) -> None:
        """B02: neither reset, clear nor abort hands the slot out while a rank may still copy from it."""
        rig = start(slots=4, persist="none")
        chain = rig.chain(1)
        rig.store(chain, 4)
        promise = rig.cache.promise(rig.cache.match(chain, 0, 4 * CHUNK))
        rig.cache.begin_load(7, [slot for slot, _ in promise.places])
        rig.cache.release(promise)
        rig.cache.reset()
        rig.cache.clear("all")

        stores = rig.store(rig.chain(2), 4)
        intact = [rig.region.area(slot).tobytes() == rig.bytes_of(p.chunk.key)
                  for p, (slot, _) in zip(promise.pieces, promise.places, strict=True)]  # fmt: skip
        rig.region.finish_loads(7)
        rig.cache.poll()

        assert stores == 0
        assert intact == [True] * 4
        assert rig.store(rig.chain(2), 4) == 4


class TestStores:
    def test_failed_copy_takes_its_children_along(self, start: Start) -> None:
        """Invariant 6, and A16: a child whose parent never came is not there either."""
        rig = start()
        chain = rig.chain(1)
        rig.store(chain, 1)
        places = [rig.begin(chain, i) for i in (1, 2)]
        assert None not in places
        rig.copy(places[1], chain.keys[2])  # type: ignore[arg-type]
        rig.copy(places[0], chain.keys[1], ok=False)  # type: ignore[arg-type]
        rig.cache.poll()

        assert rig.ready_tokens(chain) == CHUNK
        assert rig.cache.residency.num_free == 7

    def test_nothing_is_offered_before_its_copy_is_over(self, start: Start) -> None:
        rig = start()
        chain = rig.chain(1)
        place = rig.begin(chain, 0)
        assert place is not None
        rig.cache.poll()
        before = rig.cache.match(chain, 0, CHUNK).num_tokens

        rig.copy(place, chain.keys[0])
        rig.cache.poll()

        assert before == 0
        assert rig.ready_tokens(chain) == CHUNK

    def test_chunk_that_is_here_is_not_stored_again(self, start: Start) -> None:
        """A promotion in the background may be faster than the store that was planned."""
        rig = start()
        chain = rig.chain(1)
        rig.store(chain, 1)

        assert rig.begin(chain, 0) is None
        owners = [rig.cache.residency.owner(slot) for slot in range(8)]
        assert (8 - owners.count(None), rig.cache.residency.num_free) == (1, 7)

    def test_orphan_is_not_stored(self, start: Start) -> None:
        rig = start()

        assert rig.begin(rig.chain(1), 1) is None
        assert rig.counts["stores_skipped_no_parent"] == 1

    def test_longer_sibling_covers_a_short_chunk_once_it_is_there(self, start: Start) -> None:
        rig = start(slots=2, persist="none")
        chain = rig.chain(1, chunks=1)
        place = rig.begin(chain, 0, tokens=32)
        assert place is not None
        rig.copy(place, chain.short_key(0, 32))
        rig.cache.poll()
        short = rig.cache.in_dram(chain.short_key(0, 32))
        long = rig.begin(chain, 0)
        assert short is not None
        assert long is not None
        before = short.is_covered
        rig.copy(long, chain.keys[0])
        rig.cache.poll()

        assert (before, short.is_covered) == (False, True)
        rig.store(rig.chain(2), 1)
        assert rig.ready_tokens(chain) == CHUNK  # the short one went


class TestAttach:
    @pytest.mark.parametrize("victim", [0, 1, 2])
    def test_damaged_slot_is_dropped_with_its_descendants(self, start: Start, victim: int) -> None:
        """Invariants 1 and 6: a byte that changed between two owners."""
        rig = start(cap=None)
        chain = rig.chain(1)
        rig.store(chain, 3)
        wait_for(lambda: all(chunk.dram_xxh3 for chunk in rig.chunks(chain)))
        slot = rig.chunks(chain)[victim].slot
        offset = rig.cache.dram._map.shape.region_offset(0) + slot * rig.region.stride + 999
        path = rig.cache.dram.path
        rig.kill()
        fd = os.open(path, os.O_RDWR)
        os.pwrite(fd, bytes([os.pread(fd, 1, offset)[0] ^ 4]), offset)
        os.close(fd)

        again = start(cap=None)

        assert again.counts["attach_found"] == 3
        wait_for(lambda: not again.cache.promoter.num_pending and all(c.state == READY for c in again.chunks(chain)))
        assert again.ready_tokens(chain) == victim * CHUNK
        assert again.counts["damaged_slots"] == 1
        assert again.cache.residency.num_free == 8 - victim

    def test_nothing_unchecked_is_promised(self, start: Start) -> None:
        rig = start(cap=None)
        chain = rig.chain(1)
        rig.store(chain, 2)
        wait_for(lambda: all(chunk.dram_xxh3 for chunk in rig.chunks(chain)))
        rig.kill()

        again = start(cap=None, threads=False)
        match = again.cache.match(chain, 0, 2 * CHUNK)

        assert match.num_tokens == 2 * CHUNK
        assert again.ready_tokens(chain) == 0
        again.cache.promoter.start()
        assert again.promote(chain) == 2 * CHUNK
        assert again.counts["attached"] == 2

    def test_chunk_without_its_chain_is_freed(self, start: Start) -> None:
        """Invariant 6: the parent had no checksum yet when the owner was killed."""
        rig = start(cap=None, threads=False)
        chain = rig.chain(1)
        rig.store(chain, 3)
        first, second, third = rig.chunks(chain)
        for chunk in (first, third):
            rig.cache.dram.set_checksum(chunk.slot, checksum(rig.cache.dram.views(chunk.slot, CHUNK)))
        rig.kill()

        again = start(cap=None)

        assert again.promote(chain) == CHUNK
        assert again.cache.residency.num_free == 7
        assert second.depth == 1


class TestPersist:
    @pytest.mark.parametrize(
        ("mode", "stored", "hit", "flushed"), [("auto", 0, 2, 3), ("hot", 0, 2, 3), ("all", 3, 3, 3), ("none", 0, 0, 0)]
    )
    def test_modes(self, start: Start, mode: str, stored: int, hit: int, flushed: int) -> None:
        """What is on disk after a store, after a hit of the first two chunks, and after a flush."""
        rig = start(persist=mode, shard_seconds=0.0)
        chain = rig.chain(1)
        rig.store(chain, 3)

        def on_disk() -> int:
            return sum(chunk.shard is not None for chunk in rig.chunks(chain))

        if stored:
            wait_for(lambda: on_disk() == stored)
        seen = [on_disk()]
        rig.cache.touch(rig.chunks(chain)[1:2], hit=True)
        rig.cache.writer.wake()
        wait_for(lambda: on_disk() == hit)
        seen.append(on_disk())
        rig.flush()

        assert [*seen, on_disk()] == [stored, hit, flushed]

    @pytest.mark.parametrize(("mode", "sinks"), [("auto", True), ("hot", False)])
    def test_cold_chunks_sink_before_they_leave(self, start: Start, mode: str, sinks: bool) -> None:
        """`auto` writes what is next to go; `hot` lets it go."""
        rig = start(persist=mode, slots=4)
        chains = [rig.chain(seed) for seed in range(4)]
        for chain in chains:
            rig.store(chain, 1)
        rig.cache.writer._next_directory = 0.0
        rig.cache.writer.wake()
        if sinks:
            wait_for(lambda: rig.chunks(chains[0])[0].shard is not None)

        assert rig.store(rig.chain(9), 1) == 1
        assert bool(rig.chunks(chains[0])) == sinks

    @pytest.mark.parametrize(
        ("scope", "salted", "allowed"),
        [("salted", False, False), ("salted", True, True), ("mm", True, False), ("mm,salted", True, False)],
    )
    def test_private_scopes_stay_off_the_disk(
        self, start: Start, tmp_path: Path, scope: str, salted: bool, allowed: bool
    ) -> None:
        rig = start(persist="all", persist_salted=salted)
        rig.store(rig.chain(1), 2, scope=scope)
        rig.store(rig.chain(2), 2)

        report = rig.flush()

        assert report == {"written_chunks": 4 if allowed else 2, "unsaved_chunks": 0}
        assert len(shards(tmp_path)) == (2 if allowed else 1)  # a shard holds one scope

    def test_ancestors_are_written_first(self, start: Start) -> None:
        """Invariant 6, on disk: a hit on the third chunk writes all three."""
        rig = start(persist="hot", shard_seconds=0.0)
        chain = rig.chain(1)
        rig.store(chain, 4)
        rig.cache.touch(rig.chunks(chain)[2:3], hit=True)
        rig.cache.writer.wake()

        wait_for(lambda: rig.chunks(chain)[2].shard is not None)

        assert [chunk.shard is not None for chunk in rig.chunks(chain)] == [True, True, True, False]

    def test_shards_are_split_at_their_target_size(self, start: Start, tmp_path: Path) -> None:
        rig = start(shard_bytes=2 * NS.geometry.chunk_bytes(CHUNK))
        rig.store(rig.chain(1), 5)

        rig.flush()

        assert len(shards(tmp_path)) == 3


class BrokenDisk(DiskTier):
    """A disk whose writes fail, or find no room, for as long as the test says so."""

    failure: StorageError | None = None
    has_room = True

    def write(self, scope: str, chunks: Any) -> Shard | None:
        if self.failure is not None:
            raise self.failure
        return super().write(scope, chunks) if self.has_room else None


class TestFailingDisk:
    def test_writing_pauses_and_resumes_by_itself(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        """B08: serving goes on, chunks may leave DRAM unwritten meanwhile, and the disk is tried again."""
        monkeypatch.setattr("kvsnap.writer._PAUSE_S", (0.1,))
        rig = start(slots=4, persist="all", shard_seconds=0.0, disk_class=BrokenDisk)
        disk = rig.disk
        assert isinstance(disk, BrokenDisk)
        disk.failure = StorageError("input/output error")
        chain = rig.chain(1)
        rig.store(chain, 4)
        wait_for(lambda: rig.counts["write_errors"] > 0)

        assert rig.store(rig.chain(2), 2) == 2  # in place of dirty ones: a store does not wait for a broken disk
        assert rig.ready_tokens(chain) == 2 * CHUNK
        disk.failure = None
        wait_for(lambda: rig.counts["written_chunks"] >= 4)
        assert rig.flush() == {"written_chunks": 0, "unsaved_chunks": 0}

    def test_flush_ends_when_writing_fails(self, start: Start) -> None:
        """Invariant 2: bounded by the failure, not by the time that it was given."""
        rig = start(disk_class=BrokenDisk)
        assert isinstance(rig.disk, BrokenDisk)
        rig.disk.failure = StorageError("input/output error")
        rig.store(rig.chain(1), 3)
        started = time.monotonic()

        report = rig.flush(30.0)

        assert time.monotonic() - started < 3.0
        assert report == {"written_chunks": 0, "unsaved_chunks": 3}

    def test_no_room_is_no_error_and_blocks_nothing_else(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        """B07: the disk answers "no room" (ENOSPC even after an eviction): counted, and later ones are tried."""
        monkeypatch.setattr("kvsnap.writer._PAUSE_S", (0.02,))
        rig = start(persist="all", shard_seconds=0.0, disk_class=BrokenDisk)
        assert isinstance(rig.disk, BrokenDisk)
        rig.disk.has_room = False
        first, second = rig.chain(1), rig.chain(2)
        rig.store(first, 2)
        wait_for(lambda: rig.counts["writes_without_room"] > 0)
        rig.disk.has_room = True
        rig.store(second, 2)

        wait_for(lambda: all(chunk.shard is not None for chunk in rig.chunks(second)))

        assert rig.ready_tokens(first) == 2 * CHUNK
        assert rig.flush()["unsaved_chunks"] == 0

    def test_flush_is_bounded_in_time(self, start: Start) -> None:
        """Invariant 7: `flush_seconds`, however slow the disk."""

        class Slow(DiskTier):
            def write(self, scope: str, chunks: Any) -> Shard | None:
                time.sleep(0.3)
                return super().write(scope, chunks)

        rig = start(disk_class=Slow, shard_bytes=1)
        rig.store(rig.chain(1), 8)
        started = time.monotonic()

        report = rig.flush(0.1)

        assert time.monotonic() - started < 0.25
        assert report["unsaved_chunks"] > 0

    def test_threads_outlive_any_exception(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        """Invariant 2: one unforeseen error must not end all writing until the restart."""
        monkeypatch.setattr("kvsnap.writer._PAUSE_S", (0.01,))
        calls = itertools.count()

        class Odd(DiskTier):
            def write(self, scope: str, chunks: Any) -> Shard | None:
                if next(calls) == 0:
                    raise RuntimeError("unforeseen")
                return super().write(scope, chunks)

        rig = start(persist="all", shard_seconds=0.0, disk_class=Odd)
        rig.store(rig.chain(1), 2)

        wait_for(lambda: rig.counts["written_chunks"] == 2)

        assert rig.counts["background_errors"] == 1
        assert rig.ready_tokens(rig.chain(1)) == 2 * CHUNK


class TestDiskCap:
    CAP = 5 << 20  # about 16 chunks of 256 KiB

    def start(self, start: Start, **kwargs: Any) -> Rig:
        size = 4 * BIG.geometry.chunk_bytes(CHUNK)
        return start(ns=BIG, slots=4, cap=self.CAP, shard_bytes=size, **kwargs)

    def fill(self, rig: Rig, seeds: range) -> list[KeyChain]:
        chains = [rig.chain(seed) for seed in seeds]
        for chain in chains:
            assert rig.store(chain, 4) == 4
            assert rig.flush()["unsaved_chunks"] == 0
        return chains

    def test_a_shard_takes_a_part_of_small_tiers_only(self, start: Start) -> None:
        """Its chunks hold their slots, and its room is wanted at once: the hot ones are not to go for it."""
        rig = start(slots=8)
        chain = rig.chain(1)
        rig.store(chain, 8)

        assert rig.flush()["written_chunks"] == 8

        shards = [chunk.shard for chunk in rig.chunks(chain)]
        assert max(shards.count(shard) for shard in shards) == 4
        assert rig.disk is not None
        assert start(slots=8, dram="b", cap=16 * 2 * NS.geometry.chunk_bytes(CHUNK)).cache.writer.shard_bytes == (
            4 * NS.geometry.chunk_bytes(CHUNK)
        )

    def test_coldest_goes_and_the_cap_holds(self, start: Start, tmp_path: Path) -> None:
        """Invariant 7: real bytes, after every write; and what was hit stays."""
        rig = self.start(start)
        chains = self.fill(rig, range(3))
        for _ in range(8):
            rig.cache.touch(rig.chunks(chains[0]), hit=True)

        for seed in range(3, 9):
            chains += self.fill(rig, range(seed, seed + 1))
            assert disk_use(tmp_path / "cache") <= self.CAP

        assert len(rig.chunks(chains[0])) == 4
        assert rig.chunks(chains[1]) == []
        assert rig.promote(chains[0]) == 4 * CHUNK
        assert rig.counts["evicted_disk_chunks"] >= 4

    def test_flush_of_more_than_fits_ends(self, start: Start, tmp_path: Path) -> None:
        """Invariant 7: DRAM larger than the disk: each chunk is asked for once, not in turns until the time is over."""
        rig = start(ns=BIG, slots=32, cap=3 << 20, shard_bytes=4 * BIG.geometry.chunk_bytes(CHUNK))
        for seed in range(8):
            rig.store(rig.chain(seed), 4)
        started = time.monotonic()

        rig.flush(20.0)

        assert time.monotonic() - started < 10.0
        assert rig.counts["written_chunks"] <= 2 * 32  # an ancestor that was evicted may come along once more
        assert disk_use(tmp_path / "cache") <= 3 << 20

    def test_a_chain_longer_than_the_cap_keeps_its_beginning(self, start: Start) -> None:
        """Invariant 6: to write its end by dropping its beginning would leave nothing usable."""
        rig = start(ns=BIG, slots=32, cap=3 << 20, shard_bytes=4 * BIG.geometry.chunk_bytes(CHUNK))
        chain = rig.chain(1, chunks=24)
        rig.store(chain, 24)

        rig.flush()
        written = rig.counts["written_chunks"]
        rig.cache.clear("dram")

        assert written <= 24  # and nothing is written twice on the way
        assert rig.promote(chain) == written * CHUNK > 0


class TestReadOnly:
    def test_changes_nothing_on_disk(self, start: Start, tmp_path: Path) -> None:
        writer = start()
        chain = writer.chain(1)
        writer.store(chain, 3)
        writer.flush()
        writer.kill()
        before = Snapshot.of(tmp_path / "cache")
        rig = start(dram="other", read_only=True, persist="all")

        served = rig.promote(chain)
        rig.cache.touch(rig.chunks(chain), hit=True)
        rig.store(rig.chain(2), 3)
        report = rig.flush()
        rig.kill()

        assert served == 3 * CHUNK
        assert report["written_chunks"] == 0
        assert Snapshot.of(tmp_path / "cache") == before

    def test_damage_is_a_miss_and_stays_where_it_is(self, start: Start, tmp_path: Path) -> None:
        writer = start()
        chain = writer.chain(1)
        writer.store(chain, 3)
        writer.flush()
        writer.kill()
        (shard,) = shards(tmp_path)
        with shard.open("r+b") as file:
            file.seek(-5000, os.SEEK_END)
            file.write(b"?")
        before = Snapshot.of(tmp_path / "cache")

        rig = start(dram="other", read_only=True)

        assert rig.promote(chain) == 2 * CHUNK
        assert Snapshot.of(tmp_path / "cache") == before


class TestClear:
    def test_counts_what_goes(self, start: Start, tmp_path: Path) -> None:
        rig = start()
        rig.store(rig.chain(1), 3)
        rig.flush()
        rig.store(rig.chain(2), 2)
        nbytes = sum(path.stat().st_blocks * 512 for path in shards(tmp_path))

        dram = rig.cache.clear("dram")
        disk = rig.cache.clear("disk")

        assert dram == {"dram_chunks": 5}
        assert (disk["disk_chunks"], disk["disk_shards"]) == (3, 1)
        assert disk["disk_bytes"] >= nbytes
        assert shards(tmp_path) == []
        assert len(rig.cache.residency.index) == 0
        assert rig.cache.clear("all") == {"dram_chunks": 0, "disk_chunks": 0, "disk_shards": 0, "disk_bytes": 0}

    def test_cleared_disk_is_filled_again(self, start: Start) -> None:
        rig = start()
        chain = rig.chain(1)
        rig.store(chain, 3)
        rig.flush()
        rig.cache.clear("disk")

        assert rig.flush() == {"written_chunks": 3, "unsaved_chunks": 0}
        assert rig.ready_tokens(chain) == 3 * CHUNK


class TestPreload:
    @pytest.fixture
    def cold(self, start: Start) -> tuple[Rig, list[KeyChain]]:
        """Three prefixes of three chunks on disk, the last the hottest; nothing in DRAM."""
        rig = start(slots=12)
        chains = [rig.chain(seed) for seed in range(3)]
        for hits, chain in enumerate(chains):
            rig.store(chain, 3)
            for _ in range(4 * hits):
                rig.cache.touch(rig.chunks(chain), hit=True)
        rig.flush()
        rig.cache.clear("dram")
        return rig, chains

    def test_hottest_first_within_its_bytes(self, cold: tuple[Rig, list[KeyChain]]) -> None:
        """Invariants 6 and 7: whole prefixes from their beginning, never more than asked for."""
        rig, chains = cold
        size = NS.geometry.chunk_bytes(CHUNK)

        report = preload(rig.cache, 5 * size + 1, 10.0)

        assert report == (5, 5 * size)
        assert [rig.ready_tokens(chain) // CHUNK for chain in chains] == [0, 2, 3]

    def test_only_into_free_slots(self, start: Start, cold: tuple[Rig, list[KeyChain]]) -> None:
        rig, chains = cold
        fresh = rig.chain(9)
        rig.store(fresh, 8)

        num_chunks, _ = preload(rig.cache, 1 << 40, 10.0)

        assert num_chunks == 4
        assert rig.ready_tokens(fresh) == 8 * CHUNK
        assert rig.ready_tokens(chains[2]) == 3 * CHUNK

    def test_bounded_in_time(self, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
        """Invariant 7: when time is up the engine starts with what is there."""

        class Slow(DiskTier):
            def read_chunk(self, shard_id: str, entry: Any, views: list[memoryview]) -> bool:
                time.sleep(0.05)
                return super().read_chunk(shard_id, entry, views)

        rig = start(disk_class=Slow, num_readers=1)
        chain = rig.chain(1)
        rig.store(chain, 8)
        rig.flush()
        rig.cache.clear("dram")
        started = time.monotonic()

        num_chunks, _ = preload(rig.cache, 1 << 40, 0.1)

        assert time.monotonic() - started < 0.3
        assert num_chunks < 8

    def test_nothing_to_do(self, start: Start) -> None:
        assert preload(start().cache, 1 << 40, 10.0) == (0, 0)


class TestSharedDirectory:
    def test_each_notices_the_others_shards(self, start: Start) -> None:
        """Within 2 s: every second by itself, here at once."""
        one, other = start(dram="a"), start(dram="b")
        chain = one.chain(1)
        one.store(chain, 3)
        one.flush()

        other.cache.writer.read_directory()

        assert other.promote(chain) == 3 * CHUNK
        assert other.flush() == {"written_chunks": 0, "unsaved_chunks": 0}  # not written a second time

    def test_a_running_engine_notices_by_itself(self, start: Start) -> None:
        one, other = start(dram="a"), start(dram="b")
        chain = one.chain(1)
        one.store(chain, 3)
        one.flush()

        wait_for(lambda: len(other.chunks(chain)) == 3)
        one.cache.clear("disk")
        wait_for(lambda: not other.chunks(chain))

    def test_a_shard_that_the_other_dropped_is_a_miss(self, start: Start, tmp_path: Path) -> None:
        """B05: before it was noticed, and after."""
        one, other = start(dram="a"), start(dram="b")
        first, second = one.chain(1), one.chain(2)
        for chain in (first, second):
            one.store(chain, 2)
            one.flush()
        other.cache.writer.read_directory()
        one.cache.clear("disk")

        unnoticed = other.promote(first)
        other.cache.writer.read_directory()

        assert unnoticed == 0
        assert other.cache.match(second, 0, 2 * CHUNK).num_tokens == 0
        assert len(other.cache.residency.index) == 0
        assert one.ready_tokens(first) == 2 * CHUNK  # its own DRAM is its own
        other.store(first, 2)
        assert other.flush()["unsaved_chunks"] == 0

    def test_both_store_the_same(self, start: Start, tmp_path: Path) -> None:
        """Names never collide; the second copy is dead weight, not an error."""
        one, other = start(dram="a"), start(dram="b")
        chain = one.chain(1)
        for rig in (one, other):
            rig.store(chain, 2)
            rig.flush()
        for rig in (one, other):
            rig.cache.writer.read_directory()
            rig.cache.clear("dram")

        assert one.promote(chain) == other.promote(chain) == 2 * CHUNK


class TestUsage:
    def test_survives_on_disk(self, start: Start) -> None:
        """A preload after a reboot still knows what was hot."""
        rig = start()
        chain = rig.chain(1)
        rig.store(chain, 2)
        for _ in range(5):
            rig.cache.touch(rig.chunks(chain)[:1], hit=True)
        rig.flush()
        last_use = rig.chunks(chain)[0].last_use
        rig.kill()

        again = start(dram="other")

        assert [chunk.hits for chunk in again.chunks(chain)] == [5, 0]
        assert again.chunks(chain)[0].last_use == pytest.approx(last_use, abs=1.0)

    def test_survives_in_dram(self, start: Start) -> None:
        rig = start(cap=None)
        chain = rig.chain(1)
        rig.store(chain, 2)
        for _ in range(5):
            rig.cache.touch(rig.chunks(chain)[:1], hit=True)
        wait_for(lambda: all(chunk.dram_xxh3 for chunk in rig.chunks(chain)))
        rig.kill()

        again = start(cap=None)

        assert [chunk.hits for chunk in again.chunks(chain)] == [5, 0]


def test_without_a_disk(start: Start) -> None:
    """`disk` off: the DRAM tier alone, and everything that asks for the disk answers."""
    rig = start(cap=None)
    chain = rig.chain(1)
    rig.store(chain, 3)

    assert rig.flush() == {"written_chunks": 0, "unsaved_chunks": 0}
    assert preload(rig.cache, 1 << 40, 1.0) == (0, 0)
    assert rig.cache.clear("disk") == {}
    assert rig.ready_tokens(chain) == 3 * CHUNK
    assert rig.cache.status()["dram"]["chunks"] == 3


def test_status_adds_up(start: Start) -> None:
    rig = start()
    rig.store(rig.chain(1), 3)
    rig.flush()
    rig.store(rig.chain(2), 2)
    status = rig.cache.status()

    assert (status["dram"]["slots"], status["dram"]["chunks"], status["dram"]["unsaved"]) == (8, 5, 2)
    assert status["dram"]["tokens"] == 5 * CHUNK
    assert (status["disk"]["chunks"], status["disk"]["shards"]) == (3, 1)
    assert status["disk"]["chunk_bytes"] == 3 * NS.geometry.chunk_bytes(CHUNK)
    assert status["disk"]["real_bytes"] <= status["disk"]["cap_bytes"]


def test_hit_ends_at_a_block_of_the_next_chunk(start: Start) -> None:
    """Three of four blocks shared: 48 tokens more; and never beyond the limit, or before the engine's own hit."""
    rig = start()
    prompt = [random.Random(5).randrange(50_000) for _ in range(2 * CHUNK)]
    stored = KeyChain(ChunkKey(bytes(32)), CHUNK, 16)
    stored.extend(prompt)
    rig.store(stored, 2)
    asked = KeyChain(ChunkKey(bytes(32)), CHUNK, 16)
    asked.extend([*prompt[: CHUNK + 50], *range(60)])

    def span(start_tokens: int, limit: int) -> tuple[int, list[tuple[int, int]]]:
        match = rig.cache.match(asked, start_tokens, limit)
        return match.num_tokens, [(piece.first_block, piece.num_blocks) for piece in match.pieces]

    assert span(0, 160) == (112, [(0, 4), (0, 3)])
    assert span(32, 160) == (80, [(2, 2), (0, 3)])
    assert span(80, 160) == (32, [(1, 2)])
    assert span(112, 160) == (0, [])
    assert span(0, 80) == (80, [(0, 4), (0, 1)])
    assert span(0, 32) == (32, [(0, 2)])
