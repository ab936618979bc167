"""Damage and failing disks: a miss, never a wrong byte and never an engine's end."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvsnap.errors import StorageError
from kvsnap.tiers.disk import DiskTier, Shard
from tests.disk_fakes import make_chunks, make_namespace, make_views
from tests.snapshot_fakes import flip

NS = make_namespace(ranks=2)
CHUNKS = make_chunks(NS, 4)


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "cache", NS, cap_bytes=64 << 20)


@pytest.fixture
def shard(tier: DiskTier) -> Shard:
    shard = tier.write("mm", CHUNKS)
    assert shard is not None
    return shard


def read(tier: DiskTier, shard: Shard, i: int) -> bool:
    views = make_views(NS, 64)
    good = tier.read_chunk(shard.id, shard.entries[i], views)
    return good and b"".join(views) == b"".join(CHUNKS[i].views)


class TestFlippedByte:
    """A28: right length, wrong bytes."""

    @pytest.mark.parametrize("spot", [0, 5000, -1])
    def test_is_found_wherever_it_is(self, tier: DiskTier, shard: Shard, spot: int) -> None:
        """Invariant 1; the padding counts too."""
        entry = shard.entries[1]
        flip(shard.path, entry.offset + spot % entry.nbytes)

        assert [read(tier, shard, i) for i in range(4)] == [True, False, True, True]

    def test_is_no_damage_if_a_second_read_is_right(
        self, tier: DiskTier, shard: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = os.preadv
        calls: list[int] = []

        def garble_once(fd: int, views: list[memoryview], offset: int) -> int:
            done = real(fd, views, offset)
            if not calls:
                views[0][0] ^= 1
            calls.append(offset)
            return done

        monkeypatch.setattr(os, "preadv", garble_once)

        assert read(tier, shard, 0)
        assert len(calls) == 2

    def test_quarantine_saves_the_good_chunks_and_heals(self, tier: DiskTier, shard: Shard) -> None:
        flip(shard.path, shard.entries[1].offset)
        flip(shard.path, shard.entries[2].offset)

        # the caller has seen that chunk 1 is damaged, not yet that chunk 2 is
        saved = tier.quarantine(shard.id, [entry for i, entry in enumerate(shard.entries) if i != 1])

        assert saved is not None
        assert saved.scope == "mm"
        assert [entry.key for entry in saved.entries] == [CHUNKS[0].key, CHUNKS[3].key]
        views = make_views(NS, 64)
        assert tier.read_chunk(saved.id, saved.entries[1], views)
        assert b"".join(views) == b"".join(CHUNKS[3].views)
        assert [path.name for path in (tier.dir / "quarantine").iterdir()] == [shard.path.name]
        assert tier.poll() == ([], [])
        assert tier.quarantine(shard.id, list(shard.entries)) is None

        again = tier.write("mm", CHUNKS)
        assert again is not None
        assert all(read(tier, again, i) for i in range(4))

    def test_nothing_to_save(self, tier: DiskTier, shard: Shard) -> None:
        for entry in shard.entries:
            flip(shard.path, entry.offset)

        assert tier.quarantine(shard.id, list(shard.entries)) is None
        assert not shard.path.exists()

    def test_in_the_header_sends_the_shard_to_quarantine_at_the_next_scan(self, tier: DiskTier, shard: Shard) -> None:
        flip(shard.path, 200)

        with DiskTier(tier.cache_dir, NS, cap_bytes=64 << 20) as again:
            assert list(again.scan()) == []
            assert again.counts["damaged_shards"] == again.counts["quarantined"] == 1
            assert again.poll() == ([], [])
        assert [path.name for path in (tier.dir / "quarantine").iterdir()] == [shard.path.name]

    def test_a_shard_of_another_namespace_goes_there_too(self, tier: DiskTier, shard: Shard) -> None:
        """Invariant 1: a file that was copied in by hand is no hit."""
        other = make_namespace(tag="other", ranks=2)
        with DiskTier(tier.cache_dir, other, cap_bytes=64 << 20) as wrong:
            (wrong.dir / "shards" / shard.path.name).write_bytes(shard.path.read_bytes())

            assert list(wrong.scan()) == []
            assert wrong.counts["quarantined"] == 1


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


class TestMissingFiles:
    """B05: every way in which a file can be gone is a StorageError or damage, for the caller to count as a miss."""

    @pytest.mark.parametrize(
        "harm",
        [
            Path.unlink,
            lambda path: (path.unlink(), path.mkdir()),
            lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
            replace_by_fifo,
        ],
        ids=["deleted", "directory", "link", "fifo"],
    )
    def test_gone(self, tier: DiskTier, shard: Shard, harm: Callable[[Path], object]) -> None:
        harm(shard.path)

        with pytest.raises(StorageError):
            read(tier, shard, 0)

    @pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE, errno.EACCES])
    @pytest.mark.parametrize("call", ["open", "preadv"])
    def test_failing_disk(
        self, tier: DiskTier, shard: Shard, error: int, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object, **kwargs: object) -> int:
            raise OSError(error, os.strerror(error))

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(StorageError, match=os.strerror(error)):
                read(tier, shard, 0)

        assert read(tier, shard, 0)

    def test_truncated_under_the_reader(self, tier: DiskTier, shard: Shard) -> None:
        """B16: no mmap, so no SIGBUS; what is left of the file still reads."""
        os.truncate(shard.path, shard.entries[2].offset + 4096)

        assert [read(tier, shard, i) for i in range(4)] == [True, True, False, False]

    def test_a_shard_that_vanishes_during_a_scan(self, tier: DiskTier, shard: Shard) -> None:
        again = DiskTier(tier.cache_dir, NS, cap_bytes=64 << 20)
        steps = again.scan()
        tier.drop(shard.id)

        assert list(steps) == []
        assert again.counts["damaged_shards"] == again.counts["unreadable_shards"] == 0

    def test_an_unreadable_shard_is_left_where_it_is(
        self, tier: DiskTier, shard: Shard, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An I/O error is no proof of damage."""
        again = DiskTier(tier.cache_dir, NS, cap_bytes=64 << 20)

        def fail(*args: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pread", fail)

        assert list(again.scan()) == []
        assert again.counts["unreadable_shards"] == 1
        assert shard.path.exists()


class TestFullDisk:
    """B07: the disk fills up below the cap, since others use it too."""

    def fail_first(self, monkeypatch: pytest.MonkeyPatch, call: str, times: int) -> list[int]:
        real = getattr(os, call)
        failed: list[int] = []

        def full(fd: int, *args: object) -> object:
            if len(failed) < times:
                failed.append(fd)
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(fd, *args)

        monkeypatch.setattr(os, call, full)
        return failed

    @pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "fsync"])
    def test_evicts_once_and_tries_again(
        self, tier: DiskTier, shard: Shard, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        evicted: list[int] = []

        def evict(nbytes: int) -> int:
            evicted.append(nbytes)
            return tier.drop(shard.id)

        tier.evict = evict
        self.fail_first(monkeypatch, call, 1)

        written = tier.write("", CHUNKS)

        assert written is not None
        assert len(evicted) == 1
        assert all(read(tier, written, i) for i in range(4))

    @pytest.mark.parametrize("call", ["posix_fallocate", "pwritev", "fsync"])
    def test_then_gives_up_cleanly_and_resumes_later(
        self, tier: DiskTier, shard: Shard, call: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        evicted: list[int] = []

        def evict(nbytes: int) -> int:
            evicted.append(nbytes)
            return 0

        tier.evict = evict
        with monkeypatch.context() as patch:
            self.fail_first(patch, call, 100)
            with pytest.raises(StorageError, match="No space left"):
                tier.write("", CHUNKS)

        assert len(evicted) == 1
        assert [path.name for path in (tier.dir / "tmp").rglob("*") if path.is_file()] == ["lock"]
        assert tier.counts["write_errors"] == 1
        assert "No space left" in str(tier.last_error)
        assert read(tier, shard, 0)
        assert tier.write("", CHUNKS) is not None

    def test_usage_is_skipped(self, tier: DiskTier, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
        tier.store_usage([(shard.entries[0].key, 7, 1.5)])
        with monkeypatch.context() as patch:
            self.fail_first(patch, "fsync", 1)
            tier.store_usage([])

        assert tier.counts["usage_errors"] == 1
        assert tier.load_usage() == {shard.entries[0].key: (7, 1.5)}


class TestUsage:
    def test_comes_back(self, tier: DiskTier) -> None:
        rows = [(chunk.key, i, 1.7e9 + i / 2) for i, chunk in enumerate(CHUNKS)]
        tier.store_usage(rows)

        with DiskTier(tier.cache_dir, NS, cap_bytes=64 << 20) as again:
            assert again.load_usage() == {key: (hits, last) for key, hits, last in rows}

    @pytest.mark.parametrize("harm", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:20] + b"x" + raw[21:]])
    def test_damage_is_no_usage(self, tier: DiskTier, harm: Callable[[bytes], bytes]) -> None:
        tier.store_usage([(CHUNKS[0].key, 1, 2.0)])
        path = tier.dir / "usage"
        path.write_bytes(harm(path.read_bytes()))

        assert tier.load_usage() == {}
        assert tier.counts["usage_errors"] == 1
