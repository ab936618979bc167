"""The disk tier at its cap: leaves die, mixed shards are compacted, room is made ahead of need."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvsnap import disk_eviction
from kvsnap.cache import CacheOptions, TieredCache
from kvsnap.direct_io import aligned_buffer
from kvsnap.index import Chunk
from kvsnap.keys import ChunkKey
from kvsnap.shard import checksum
from kvsnap.tiers.disk import ChunkToWrite, DiskTier, Shard
from kvsnap.tiers.dram import DramRegion, DramTier
from kvsnap.tiers.writers import only_evictor
from tests.disk_fakes import disk_use, make_chunks, make_namespace, make_views
from tests.tiers.test_disk_cap import Watch
from tests.tiers.test_disk_crash import run_and_kill

NS = make_namespace(page=(2, 2, 16, 64), layers=8)  # 256 KiB a chunk
CHUNK = NS.geometry.chunk_bytes(64)
CAP = 20 << 20
OPTIONS = CacheOptions(shard_bytes=4 * CHUNK, shard_seconds=0.0)


@contextmanager
def opened(
    cache_dir: Path, *, cap: int = CAP, slots: int = 24, options: CacheOptions = OPTIONS
) -> Iterator[TieredCache]:
    """A cache without its threads, so that a test decides when something happens."""
    dram = DramTier.anonymous(NS.id(), NS.geometry, budget_bytes=slots * (CHUNK + 2048) + 65536, ranks=1)
    cache = TieredCache(NS, dram, DiskTier(cache_dir, NS, cap_bytes=cap), options)
    try:
        yield cache
    finally:
        cache.close()


class Prompts:
    """Stores chunks through DRAM, as workers would, and has the writer's thread write them."""

    def __init__(self, cache: TieredCache, seed: int = 0) -> None:
        self.cache = cache
        self.rng = random.Random(seed)
        self.region = DramRegion.attach(cache.dram.path, cache.dram.nonce.hex(), rank=0, slice_index=0)

    def store(self, parent: Chunk | None = None) -> Chunk:
        """One more chunk, right below `parent`."""
        key = ChunkKey(self.rng.randbytes(32))
        above = parent.key if parent else ChunkKey(self.rng.randbytes(32))
        place = self.cache.begin_store(
            key, above, depth=parent.depth + 1 if parent else 0, tokens=64, scope="",
            block_keys=self.rng.randbytes(64),
        )  # fmt: skip
        assert place is not None
        self.region.area(place[0])[:8] = memoryview(key[:8])
        self.region.complete(*place, ok=True)
        self.cache.poll()
        chunk = self.cache.in_dram(key)
        assert chunk is not None
        return chunk

    def write(self) -> None:
        """Everything in DRAM reaches the disk, shard by shard, by the writer's own way."""
        writer = self.cache.writer
        with self.cache.lock:
            for chunk in list(self.cache.residency.index):
                writer.want(chunk)
        while writer._wanted and not writer.is_paused:
            writer._write_one_shard()


def write_again(cache: TieredCache, chunks: list[Chunk]) -> None:
    """What another engine does that did not see our shard in time: a second, younger copy."""
    time.sleep(0.01)  # another tick of the file system's clock
    rows = []
    for chunk in chunks:
        views = cache.dram.views(chunk.slot, chunk.tokens)
        row = ChunkToWrite(
            key=chunk.key, parent=chunk.parent_key, depth=chunk.depth, tokens=chunk.tokens,
            block_keys=chunk.block_keys, xxh3=checksum(views), views=views,
        )  # fmt: skip
        rows.append(row)
    assert cache.disk is not None
    with DiskTier(cache.disk.cache_dir, NS) as other:
        assert other.write("", rows) is not None
    cache.writer.read_directory()


def key_bytes(cache: TieredCache, key: ChunkKey) -> bytes:
    """First bytes of a chunk, read from disk and checked."""
    assert cache.disk is not None
    chunk = cache.residency.index.get(key)
    assert chunk is not None
    assert chunk.shard is not None
    [entry] = [entry for entry in cache.shards.entries(chunk.shard) if entry.key == key]
    view = aligned_buffer(entry.nbytes)
    assert cache.disk.read_chunk(chunk.shard, entry, [view])
    return bytes(view[:8])


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def assert_prefix_closed(cache: TieredCache) -> None:
    """Invariant 6."""
    for chunk in cache.residency.index:
        assert chunk.shard is None or chunk.parent is None or chunk.parent.shard is not None


class TestAtTheCap:
    def test_hot_chunks_survive_a_flood_of_cold_ones(self, tmp_path: Path) -> None:
        """Each shard holds a hot root and three cold leaves. The leaves go, the roots move together; `du` ≤ cap."""
        with opened(tmp_path) as cache, Watch(tmp_path) as watch:
            prompts = Prompts(cache)
            hot: list[Chunk] = []
            for _ in range(12):
                root = prompts.store()
                for _ in range(3):
                    prompts.store(root)
                prompts.write()
                hot.append(root)
            for _ in range(20):
                cache.touch(hot, hit=True)

            for _ in range(25):
                last = None
                for _ in range(4):
                    last = prompts.store(last)
                prompts.write()
                assert_prefix_closed(cache)

            assert watch.most <= CAP
            assert all(chunk.shard is not None for chunk in hot)
            assert cache.counts["compacted_shards"] > 0
            assert cache.counts["writes_without_room"] == 0
            assert cache.counts["written_chunks"] == 12 * 4 + 25 * 4
            status = cache.status()["disk"]
            assert 1.0 < status["write_amplification"] < 1.5
            assert status["rewritten_bytes"] == cache.counts["compacted_chunks"] * CHUNK
        with opened(tmp_path) as again:
            for chunk in hot:
                assert key_bytes(again, chunk.key) == chunk.key[:8]

    def test_a_tail_goes_before_its_head(self, tmp_path: Path) -> None:
        """C06: 20 chunks in several shards; when five chunks' room is needed the first ones are still a prefix."""
        with opened(tmp_path) as cache:
            prompts = Prompts(cache)
            chain: list[Chunk] = []
            for _ in range(20):
                chain.append(prompts.store(chain[-1] if chain else None))
                if len(chain) % 4 == 0:
                    prompts.write()

            assert cache.writer.eviction.evict(5 * CHUNK) >= 5 * CHUNK

            assert [chunk.shard is not None for chunk in chain] == [True] * 12 + [False] * 8

    def test_a_reserve_stays_free_ahead_of_need(self, tmp_path: Path) -> None:
        with opened(tmp_path) as cache:
            assert cache.disk is not None
            prompts = Prompts(cache)
            for _ in range(30):
                last = None
                for _ in range(4):
                    last = prompts.store(last)
                prompts.write()

            cache.disk.evict = lambda nbytes: pytest.fail("a write had to evict in line")
            cache.writer.eviction.trim()
            for _ in range(4):
                prompts.store()
            prompts.write()

            assert cache.counts["evicted_disk_chunks"] > 0
            assert cache.counts["writes_without_room"] == 0

    def test_ancestors_of_what_is_written_stay(self, tmp_path: Path) -> None:
        """Invariant 6: even if they are the coldest of all."""
        with opened(tmp_path) as cache:
            prompts = Prompts(cache)
            old = prompts.store()
            prompts.write()
            for _ in range(8):
                prompts.store()
            prompts.write()
            cache.writer.eviction.needed = frozenset({old})

            cache.writer.eviction.evict(CAP)

            assert old.shard is not None
            assert sum(chunk.shard is not None for chunk in cache.residency.index) == 1

    def test_only_one_process_evicts_ahead(self, tmp_path: Path) -> None:
        with opened(tmp_path) as cache:
            prompts = Prompts(cache)
            for _ in range(16):
                prompts.store()
            prompts.write()

            with only_evictor(tmp_path) as is_mine:
                assert is_mine
                assert cache.writer.eviction.trim(17 << 20) == 0
            assert cache.writer.eviction.trim(17 << 20) > 0

    def test_where_there_is_no_room_to_copy_whole_shards_go(self, tmp_path: Path) -> None:
        """Compaction reserves its space first; without any the coldest shards go, the hottest chunk stays."""
        with opened(tmp_path) as cache:
            assert cache.disk is not None
            prompts = Prompts(cache)
            roots = []
            for _ in range(4):
                roots.append(prompts.store())
                for _ in range(3):
                    prompts.store()
                prompts.write()
            for root in roots:
                cache.touch([root], hit=True)
            cache.disk._room.cap_bytes = cache.disk.used_bytes()  # not a byte left

            assert cache.writer.eviction.trim(CHUNK) >= CHUNK

            assert cache.counts["compacted_shards"] == 0
            assert [root.shard is not None for root in roots] == [False, True, True, True]

    def test_the_engine_does_not_wait(self, tmp_path: Path) -> None:
        """The cache's lock is held for moments only, however many chunks there are."""
        with opened(tmp_path) as cache:
            chunks = [
                Chunk(ChunkKey(i.to_bytes(32)), ChunkKey(bytes(32)), 0, 64, "", i.to_bytes(16) * 4)
                for i in range(100_000)
            ]
            cache.residency.index.add_all(chunks)
            names = [f"{i:032x}" for i in range(200)]
            for i, chunk in enumerate(chunks):
                cache.residency.put_on_disk(chunk, names[i // 500], 0, bytes(16))
            assert cache.disk is not None
            for i, name in enumerate(names):
                shard = Shard(name, tmp_path / name, "", (), 500 * CHUNK)
                cache.shards.adopt([shard])
                held = cache.shards._shards[name]
                held.data_bytes, held.chunks = 500 * CHUNK, chunks[500 * i : 500 * i + 500]
            longest, stop = 0.0, threading.Event()

            def engine() -> None:
                nonlocal longest
                while not stop.wait(0.001):
                    start = time.perf_counter()
                    with cache.lock:
                        longest = max(longest, time.perf_counter() - start)

            thread = threading.Thread(target=engine)
            thread.start()
            cache.writer.eviction.evict(1000 * CHUNK)
            stop.set()
            thread.join()

            assert sum(chunk.shard is None for chunk in chunks) == 1000
            assert longest < 0.1  # a few ms on a quiet machine


class TestDeadWeight:
    def test_a_shard_with_nothing_alive_goes(self, tmp_path: Path) -> None:
        """Chunks without their chain count as dead; so does the older of two copies."""
        chain = make_chunks(NS, 3)
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as disk:
            old = disk.write("", chain)
            time.sleep(0.01)  # another tick of the file system's clock
            new = disk.write("", chain)
            orphans = disk.write("", make_chunks(NS, 4, seed=2)[1:])
            assert old is not None
            assert new is not None
            assert orphans is not None
        with opened(tmp_path) as cache:
            assert {chunk.shard for chunk in cache.residency.index} == {new.id}
            assert cache.status()["disk"]["dead_chunks"] == 6
            assert cache.status()["disk"]["dead_bytes"] == 6 * CHUNK

            cache.writer.eviction.tidy()

            assert not old.path.exists()
            assert not orphans.path.exists()
            assert cache.status()["disk"]["dead_chunks"] == 0

    def test_a_shard_under_half_alive_is_compacted_without_need(self, tmp_path: Path) -> None:
        with opened(tmp_path) as cache:
            prompts = Prompts(cache)
            chunks = [prompts.store() for _ in range(4)]
            prompts.write()
            before = chunks[3].shard
            write_again(cache, chunks[:3])

            cache.writer.eviction.tidy()

            assert chunks[3].shard not in (None, before)
            assert key_bytes(cache, chunks[3].key) == chunks[3].key[:8]
            assert len(list((tmp_path / NS.dirname / "shards").iterdir())) == 2
            assert cache.status()["disk"]["dead_chunks"] == 0

    def test_but_not_one_shard_after_the_other(self, tmp_path: Path) -> None:
        """Rewriting in the background has a bounded rate."""
        with opened(tmp_path) as cache:
            prompts = Prompts(cache)
            for _ in range(3):
                chunks = [prompts.store() for _ in range(4)]
                prompts.write()
                write_again(cache, chunks[1:])

            for _ in range(5):
                cache.writer.eviction.tidy()
            assert cache.counts["compacted_shards"] == 1
            cache.writer.eviction._next_tidy -= disk_eviction.TIDY_EVERY_S
            cache.writer.eviction.tidy()

            assert cache.counts["compacted_shards"] == 2

    def test_what_came_before_its_parents_is_not_dead(self, tmp_path: Path) -> None:
        """Two engines: one may see the other's shards in another order than they were written in."""
        chain = make_chunks(NS, 4)
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as disk:
            tail = disk.write("", chain[2:])
            with opened(tmp_path) as cache:
                assert len(cache.residency.index) == 0
                disk.write("", chain[:2])
                cache.writer.read_directory()

                cache.writer.eviction.tidy()

                assert tail is not None
                assert tail.path.exists()
                assert len(cache.residency.index) == 4

    def test_a_damaged_chunk_is_found_while_compacting(self, tmp_path: Path) -> None:
        """Invariant 1: bytes are checked before they are written again; the shard is taken apart instead."""
        with opened(tmp_path) as cache:
            prompts = Prompts(cache)
            chunks = [prompts.store() for _ in range(4)]
            prompts.write()
            cache.writer.eviction._kill(chunks[2:])
            shard = chunks[0].shard
            assert shard is not None
            with (tmp_path / NS.dirname / "shards" / f"{shard}.safetensors").open("r+b") as file:
                file.seek(chunks[0].offset)
                file.write(b"damaged!")

            assert cache.writer.eviction._reclaim_shard(shard, may_compact=True) == 0
            cache.writer._tick()

            assert chunks[0].shard is None
            assert chunks[1].shard not in (None, shard)
            assert key_bytes(cache, chunks[1].key) == chunks[1].key[:8]


class TestOthers:
    def test_another_engine_follows_a_compaction(self, tmp_path: Path) -> None:
        """The shard that vanished was copied: its chunks, and what hangs on them elsewhere, stay in reach."""
        with opened(tmp_path) as one, opened(tmp_path) as two:
            prompts = Prompts(one)
            root = prompts.store()
            others = [prompts.store() for _ in range(3)]
            prompts.write()
            child = prompts.store(root)
            prompts.write()
            two.writer.read_directory()
            assert root.shard is not None
            one.writer.eviction._kill(others)
            one.writer.eviction._compact(root.shard, one.shards.entries(root.shard))

            two.writer.read_directory()

            found = {chunk.key: chunk.shard for chunk in two.residency.index if chunk.shard is not None}
            assert found == {root.key: root.shard, child.key: child.shard}
            assert key_bytes(two, root.key) == root.key[:8]

    def test_a_read_does_not_lose_what_another_engine_moved(self, tmp_path: Path) -> None:
        """Before the directory was looked at again: the shard has vanished, its chunks and their children are there."""
        with opened(tmp_path) as one, opened(tmp_path) as two:
            prompts = Prompts(one)
            root = prompts.store()
            prompts.write()
            child = prompts.store(root)
            prompts.write()
            two.writer.read_directory()
            assert root.shard is not None
            assert one.writer.eviction._compact(root.shard, one.shards.entries(root.shard)) is not None

            ours = [chunk for key in (root.key, child.key) if (chunk := two.residency.index.get(key))]
            assert two.promote(ours) == 2
            two.promoter.start()

            wait_until(lambda: not two.is_moving(ours))
            assert all(two.in_dram(key) is not None for key in (root.key, child.key))
            assert {chunk.shard for chunk in ours} == {root.shard, child.shard}

    def test_a_read_under_way_finds_the_new_place(self, tmp_path: Path) -> None:
        """A promotion that was planned before the compaction reads from where the chunk lies now."""
        with opened(tmp_path) as cache:
            prompts = Prompts(cache)
            chunks = [prompts.store() for _ in range(4)]
            prompts.write()
            cache.clear("dram")
            assert cache.promote(chunks[:1]) == 1  # no thread runs yet: the job waits
            shard = chunks[0].shard
            assert shard is not None
            cache.writer.eviction._compact(shard, cache.shards.entries(shard))
            assert chunks[0].shard not in (None, shard)

            cache.promoter.start()

            wait_until(lambda: not cache.is_moving(chunks[:1]))
            assert cache.in_dram(chunks[0].key) is not None
            assert cache.counts["read_errors"] == 0

    def test_cleared_while_it_is_compacted(self, tmp_path: Path) -> None:
        """What was cleared doesn't come back with the copy."""
        with opened(tmp_path) as cache:
            prompts = Prompts(cache)
            chunks = [prompts.store() for _ in range(2)]
            prompts.write()
            shard = chunks[0].shard
            assert cache.disk is not None
            assert shard is not None
            entries = cache.shards.entries(shard)[:1]
            real = cache.disk.compact

            def compact(shard_id: str, alive: list[object]) -> Shard | None:
                copy = real(shard_id, alive)  # type: ignore[arg-type]
                with cache.lock:
                    for shard_id in cache.shards.ids():
                        cache.shards.forget(shard_id)
                return copy

            cache.disk.compact = compact  # type: ignore[method-assign, assignment]
            cache.writer.eviction._compact(shard, entries)

            cache.disk.clear()
            assert list((tmp_path / NS.dirname / "shards").iterdir()) == []


class TestKilled:
    """Invariant 8."""

    def test_at_every_step_of_a_compaction(self, tmp_path: Path) -> None:
        """What is alive is there at every instant, at worst twice; then the next engine drops the older copy."""
        small = make_namespace(page=(2, 2, 16, 16))
        chunks = make_chunks(small, 5)
        after, was_killed, copies = 0, True, set()
        while was_killed:
            directory = tmp_path / str(after)
            with DiskTier(directory, small, cap_bytes=CAP) as tier:
                shard = tier.write("", chunks)
                assert shard is not None

            def act(directory: Path = directory, shard: Shard = shard) -> None:
                with DiskTier(directory, small, cap_bytes=CAP) as tier:
                    list(tier.scan())
                    assert tier.compact(shard.id, shard.entries[:2]) is not None
                    tier.drop(shard.id)

            was_killed = run_and_kill(act, after)
            dram = DramTier.anonymous(small.id(), small.geometry, budget_bytes=1 << 20, ranks=1)
            cache = TieredCache(small, dram, DiskTier(directory, small, cap_bytes=CAP), OPTIONS)
            assert cache.disk is not None
            assert cache.disk.counts["damaged_shards"] == 0
            present = {chunk.key: chunk for chunk in cache.residency.index}
            assert {chunk.key for chunk in chunks[:2]} <= present.keys()
            assert_prefix_closed(cache)
            views = make_views(small, 64)
            for chunk in present.values():
                assert chunk.shard is not None
                for entry in cache.shards.entries(chunk.shard):
                    assert cache.disk.read_chunk(chunk.shard, entry, views)
            copies.add(len(cache.shards))
            assert not list((cache.disk.dir / "tmp").rglob("*.safetensors"))
            assert disk_use(directory) <= CAP
            cache.close()
            after += 1

        assert copies == {1, 2}
        assert after > 20

    def test_the_older_of_two_copies_goes(self, tmp_path: Path) -> None:
        """Killed between publishing the copy and dropping the original."""
        chunks = make_chunks(NS, 4)
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            shard = tier.write("", chunks)
            assert shard is not None
            time.sleep(0.01)
            copy = tier.compact(shard.id, shard.entries[:2])
            assert copy is not None

        with opened(tmp_path) as cache:
            by_depth = {chunk.depth: chunk.shard for chunk in cache.residency.index}
            assert by_depth == {0: copy.id, 1: copy.id, 2: shard.id, 3: shard.id}
            cache.writer.eviction.evict(3 * CHUNK)

            assert not shard.path.exists()
            assert {chunk.shard for chunk in cache.residency.index} == {copy.id}


class TestCompact:
    def test_takes_no_room_from_others(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=3 << 20) as tier:
            shard = tier.write("", make_chunks(NS, 8))
            assert shard is not None
            tier.evict = lambda nbytes: pytest.fail("evicted for a compaction")

            assert tier.compact(shard.id, shard.entries[:6]) is None
            assert shard.path.exists()
            assert not list((tier.dir / "tmp").rglob("*.safetensors"))

    def test_of_nothing_is_nothing(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            shard = tier.write("", make_chunks(NS, 2))
            assert shard is not None
            assert tier.compact(shard.id, []) is None

    def test_keeps_scope_order_and_bytes(self, tmp_path: Path) -> None:
        chunks: list[ChunkToWrite] = make_chunks(NS, 4, last_tokens=16)
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            shard = tier.write("salted", chunks)
            assert shard is not None
            copy = tier.compact(shard.id, [shard.entries[3], shard.entries[0]])

        assert copy is not None
        assert copy.scope == "salted"
        assert [entry.key for entry in copy.entries] == [chunks[0].key, chunks[3].key]
        assert [entry.xxh3 for entry in copy.entries] == [chunks[0].xxh3, chunks[3].xxh3]
        assert disk_use(tmp_path) < CAP


def test_quarantine_goes_ahead_of_need(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Quarantine first: before any chunk dies."""
    with opened(tmp_path) as cache, caplog.at_level(logging.INFO):
        assert cache.disk is not None
        prompts = Prompts(cache)
        bad = cache.disk.write("", make_chunks(NS, 8))
        assert bad is not None
        for _ in range(4):
            prompts.store()
        prompts.write()
        cache.disk.quarantine(bad.id, [])

        cache.writer.eviction.trim(17 << 20)

        assert list((cache.disk.dir / "quarantine").iterdir()) == []
        assert cache.counts["evicted_disk_chunks"] == 0
