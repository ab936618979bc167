"""The cap: real bytes of the whole cache directory, never overshot, whoever writes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.direct_io import aligned_buffer
from kvsnap.shard import checksum
from kvsnap.tiers.disk import ChunkToWrite, DiskTier, Shard
from kvsnap.tiers.writers import DirectoryLock
from tests.disk_fakes import disk_use, make_chunks, make_namespace

NS = make_namespace(page=(2, 2, 16, 64), layers=8)  # 64 KiB a block, 256 KiB a chunk
CAP = 5 << 20


def keep_in_order(tier: DiskTier, shards: list[Shard]) -> None:
    """The simplest cache: drops its oldest shards."""

    def evict(nbytes: int) -> int:
        freed = 0
        while freed < nbytes and shards:
            freed += tier.drop(shards.pop(0).id)
        return freed

    tier.evict = evict


def big_chunks(count: int) -> list[ChunkToWrite]:
    """Zeroed chunks: cheap to make, as large on disk as any."""
    return [
        chunk._replace(views=[view], xxh3=digest)
        for chunk in make_chunks(NS, count, seed=int.from_bytes(os.urandom(4), "little"))
    ]


view = aligned_buffer(NS.geometry.chunk_bytes(64))
digest = checksum([view])


class Watch:
    """Runs `du` again and again while something else works; knows the largest answer.

    Under the directory lock, so that it doesn't count both a shard and what was written after its removal.
    """

    def __init__(self, directory: Path) -> None:
        self.most = 0
        self._directory = directory
        self._lock = DirectoryLock(directory)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                self.most = max(self.most, disk_use(self._directory))
            if self._stop.wait(0.002):
                return


class TestCap:
    """Invariant 7; D11: `du` stays within the cap at all times."""

    def test_ten_times_the_cap(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier, Watch(tmp_path) as watch:
            shards: list[Shard] = []
            keep_in_order(tier, shards)
            for _ in range(50):
                shard = tier.write("", big_chunks(4))
                assert shard is not None
                shards.append(shard)
                tier.store_usage([(entry.key, 1, 1.0) for shard in shards for entry in shard.entries])

        assert CAP * 0.7 < watch.most <= CAP
        assert tier.counts["shards_dropped"] > 40
        assert tier.used_bytes() == disk_use(tmp_path)

    def test_several_processes_obey_one_cap(self, tmp_path: Path) -> None:
        def work() -> None:
            with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
                shards: list[Shard] = []
                keep_in_order(tier, shards)
                shards.extend(shard for _ in range(25) if (shard := tier.write("", big_chunks(2))) is not None)

        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=work) for _ in range(3)]
        for process in processes:
            process.start()
        with Watch(tmp_path) as watch:
            for process in processes:
                process.join(60)

        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert CAP * 0.5 < watch.most <= CAP

    def test_a_smaller_cap_after_a_restart(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            for _ in range(4):
                tier.write("", big_chunks(4))

        with DiskTier(tmp_path, NS, cap_bytes=CAP // 2) as tier:
            shards = list(tier.scan())
            keep_in_order(tier, shards)

            assert tier.enforce_cap()
            assert 1 <= len(shards) < 4
            assert disk_use(tmp_path) <= CAP // 2

    def test_what_can_never_fit_evicts_nothing(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=1 << 20) as tier:
            tier.evict = lambda nbytes: pytest.fail("evicted for nothing")

            assert tier.write("", big_chunks(4)) is None
            assert tier.counts["no_room"] == 1

    def test_no_room_and_nobody_to_evict(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=3 << 20) as tier:
            assert tier.write("", big_chunks(8)) is not None
            assert tier.write("", big_chunks(8)) is None
            assert not list((tier.dir / "tmp").rglob("*.safetensors"))
            assert disk_use(tmp_path) <= 3 << 20

    def test_foreign_files_count(self, tmp_path: Path) -> None:
        (tmp_path / "notes").write_bytes(os.urandom(4 << 20))

        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            assert tier.write("", big_chunks(4)) is None
        assert (tmp_path / "notes").exists()


class TestWhatGoesFirst:
    def fill(self, tier: DiskTier, count: int) -> list[Shard]:
        return [shard for _ in range(count) if (shard := tier.write("", big_chunks(4))) is not None]

    def test_quarantine(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            shards = self.fill(tier, 4)
            tier.quarantine(shards[0].id, [])
            tier.evict = lambda nbytes: pytest.fail("a good shard had to go before a damaged one")

            assert len(self.fill(tier, 1)) == 1
            assert list((tier.dir / "quarantine").iterdir()) == []

    def test_then_unused_namespaces_oldest_use_first(self, tmp_path: Path) -> None:
        """D12's first half: an old namespace gives way by itself, from the ends of its prefixes."""
        dirs = []
        for age, tag in enumerate(("newer", "older")):
            with DiskTier(tmp_path, make_namespace(tag=tag, page=(2, 2, 16, 64), layers=8), cap_bytes=CAP) as tier:
                self.write_foreign(tier)
                dirs.append(tier.dir)
            for path in [*tier.dir.rglob("*"), tier.dir]:
                os.utime(path, (1e9 - age, 1e9 - age))
        newer, older = dirs

        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            assert len(self.fill(tier, 2)) == 2
            assert newer.exists()
            assert not list(older.rglob("*.safetensors"))

            tier.evict = lambda nbytes: 0
            assert len(self.fill(tier, 2)) == 2
            assert not older.exists()

    def write_foreign(self, tier: DiskTier) -> None:
        for seed in (1, 2):
            assert tier.write("", make_chunks(tier.ns, 4, seed=seed)) is not None

    def test_but_not_those_that_somebody_uses(self, tmp_path: Path) -> None:
        other = DiskTier(tmp_path, make_namespace(tag="used", page=(2, 2, 16, 64), layers=8), cap_bytes=CAP)
        for _ in range(2):
            self.write_foreign(other)

        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            assert self.fill(tier, 2) == []
        assert len(list(other.scan())) == 0
        assert len(list((other.dir / "shards").iterdir())) == 4

    def test_foreign_files_in_an_unused_namespace_stay(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, make_namespace(tag="old", page=(2, 2, 16, 64), layers=8), cap_bytes=CAP) as old:
            for _ in range(2):
                self.write_foreign(old)
        (old.dir / "shards" / "notes.txt").write_text("mine")
        (old.dir / "shards" / f"{'ab' * 16}.safetensors").symlink_to(tmp_path / "kvsnap.json")

        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            tier.evict = lambda nbytes: 0
            assert len(self.fill(tier, 5)) == 4

        assert sorted(path.name for path in (old.dir / "shards").iterdir()) == [f"{'ab' * 16}.safetensors", "notes.txt"]


@pytest.mark.parametrize("act", [lambda tier: tier.clear(), lambda tier: [tier.drop(s.id) for s in tier.scan()]])
def test_what_is_removed_is_room_again(tmp_path: Path, act: Callable[[DiskTier], object]) -> None:
    with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
        empty = tier.used_bytes()
        for _ in range(4):
            tier.write("", big_chunks(4))

        with DiskTier(tmp_path, NS) as job:
            act(job)

        assert tier.used_bytes() <= empty + 8192
        assert len(tier.poll()[1]) == 4
        assert tier.write("", big_chunks(4)) is not None


def test_clear_says_what_it_removed(tmp_path: Path) -> None:
    with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
        shards = [shard for _ in range(3) if (shard := tier.write("", big_chunks(4))) is not None]

        assert tier.clear() == (3, sum(shard.real_bytes for shard in shards))
        assert list(tier.scan()) == []
