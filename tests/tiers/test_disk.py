"""The disk tier's ordinary life: write, find again, read, drop."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from kvsnap.direct_io import aligned_buffer
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, StorageError
from kvsnap.namespace import Namespace
from kvsnap.tiers import writers
from kvsnap.tiers.disk import DiskTier, Shard
from kvsnap.tiers.paths import open_namespaces
from tests.disk_fakes import Snapshot, disk_use, make_chunks, make_namespace, make_views, write_shard_file

NS = make_namespace()
CAP = 64 << 20


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(tmp_path / "cache", NS, cap_bytes=CAP)


def write(tier: DiskTier, seed: int = 1, count: int = 3) -> Shard:
    shard = tier.write("", make_chunks(tier.ns, count, seed=seed))
    assert shard is not None
    return shard


def read(tier: DiskTier, shard: Shard, i: int) -> bytes:
    views = make_views(tier.ns, shard.entries[i].tokens)
    assert tier.read_chunk(shard.id, shard.entries[i], views)
    return b"".join(views)


class TestWriteAndRead:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_chunks_come_back(self, tmp_path: Path, ranks: int) -> None:
        ns = make_namespace(ranks=ranks)
        chunks = make_chunks(ns, 3, last_tokens=16)
        with DiskTier(tmp_path, ns, cap_bytes=CAP) as tier:
            shard = tier.write("mm", chunks)
            assert shard is not None

            for i, chunk in enumerate(chunks):
                assert read(tier, shard, i) == b"".join(chunk.views)
            assert shard.scope == "mm"

    def test_without_o_direct(self, tmp_path: Path) -> None:
        """C11: tmpfs, overlays and NFS may refuse it."""
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            tier.is_direct = False
            shard = write(tier)

            assert read(tier, shard, 0) == b"".join(make_chunks(NS, 3)[0].views)

    def test_memory_that_is_not_aligned(self, tier: DiskTier) -> None:
        chunks = make_chunks(NS, 2)
        odd = []
        for chunk in chunks:
            view = aligned_buffer(len(chunk.views[0]) + 1)[1:]
            view[:] = chunk.views[0]
            odd.append(chunk._replace(views=[view]))
        shard = tier.write("", odd)
        assert shard is not None
        view = aligned_buffer(shard.entries[0].nbytes + 1)[1:]

        assert tier.read_chunk(shard.id, shard.entries[0], [view])
        assert view == chunks[0].views[0]

    def test_too_small_a_buffer_is_refused_before_anything_is_written(self, tier: DiskTier) -> None:
        """C11: a slot of the wrong size must not become a shard."""
        chunks = make_chunks(NS, 2)
        chunks[1] = chunks[1]._replace(views=[chunks[1].views[0][:-4096]])

        with pytest.raises(CorruptChunkError, match="bytes, expected"):
            tier.write("", chunks)
        with pytest.raises(ConfigError, match="the views given"):
            tier.read_chunk("ab" * 16, write(tier).entries[0], chunks[1].views)
        assert len(list((tier.dir / "shards").iterdir())) == 1

    def test_many_threads_read_at_once(self, tier: DiskTier) -> None:
        chunks = make_chunks(NS, 8)
        shard = tier.write("", chunks)
        assert shard is not None
        wrong: list[int] = []

        def check(start: int) -> None:
            wrong.extend(
                i % 8 for i in range(start, start + 24) if read(tier, shard, i % 8) != b"".join(chunks[i % 8].views)
            )

        threads = [threading.Thread(target=check, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert wrong == []

    def test_a_shard_is_published_whole(self, tier: DiskTier) -> None:
        """Invariant 4: nothing is written under a shard's name; it appears by a link, once it is durable."""
        shard = write(tier)

        assert shard.path.stat().st_nlink == 1
        assert [p.name for p in (tier.dir / "tmp").rglob("*") if p.is_file()] == ["lock"]

    def test_closed(self, tier: DiskTier) -> None:
        tier.close()

        with pytest.raises(StorageError, match="closed"):
            tier.write("", make_chunks(NS, 1))
        assert list((tier.dir / "tmp").iterdir()) == []


class TestScan:
    def test_a_new_process_finds_everything_again(self, tier: DiskTier) -> None:
        """C02: files survive a restart, and so must the index; nothing is written twice."""
        shards = {shard.id: shard for shard in (write(tier, seed) for seed in (1, 2))}
        before = disk_use(tier.dir / "shards")

        with DiskTier(tier.cache_dir, NS, cap_bytes=CAP) as again:
            assert {shard.id: shard for shard in again.scan()} == shards
            assert disk_use(again.dir / "shards") == before

    def test_is_driven_step_by_step(self, tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        for seed in (1, 2, 3):
            write(tier, seed)
        parsed: list[int] = []
        real = os.pread

        def count(fd: int, nbytes: int, offset: int) -> bytes:
            parsed.append(fd)
            return real(fd, nbytes, offset)

        again = DiskTier(tier.cache_dir, NS, cap_bytes=CAP)
        monkeypatch.setattr(os, "pread", count)
        steps = again.scan()
        next(steps)

        assert len(parsed) == 1
        assert len(list(steps)) == 2
        assert list(again.scan()) == []

    def test_poll_tells_what_others_did(self, tier: DiskTier) -> None:
        mine = write(tier, 1)
        with DiskTier(tier.cache_dir, NS, cap_bytes=CAP) as other:
            assert [shard.id for shard in other.scan()] == [mine.id]
            theirs = write(other, 2)
            other.drop(mine.id)

            assert tier.poll() == ([theirs], [mine.id])
            assert tier.poll() == ([], [])
            assert other.poll() == ([], [])

    def test_poll_is_one_system_call_when_nothing_happened(
        self, tier: DiskTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write(tier)
        os.utime(tier.dir / "shards", ns=(0, 10**18))
        tier.poll()
        monkeypatch.setattr(os, "scandir", lambda path: pytest.fail("listed again"))

        assert tier.poll() == ([], [])

    def test_own_writes_and_drops_are_no_news(self, tier: DiskTier) -> None:
        shards = [write(tier, seed) for seed in range(3)]
        tier.drop(shards[0].id)

        assert tier.poll() == ([], [])

    def test_foreign_files_and_links_are_left_alone(self, tier: DiskTier, tmp_path: Path) -> None:
        """D17: a symbolic link named like a shard is neither read nor moved."""
        outside = write_shard_file(tmp_path / "outside.safetensors", NS, make_chunks(NS, 1))
        shards = tier.dir / "shards"
        (shards / f"{'ab' * 16}.safetensors").symlink_to(outside)
        (shards / f"{'cd' * 16}.safetensors").mkdir()
        (shards / "notes.txt").write_text("mine")

        assert list(tier.scan()) == []
        assert len(list(shards.iterdir())) == 3
        assert tier.clear()[0] == 0
        assert len(list(shards.iterdir())) == 3

    @pytest.mark.parametrize("shard_id", ["../../x", "/etc/passwd", "", "AB" * 16, "ab" * 17, "ab" * 16 + "\n", "."])
    def test_ids_from_outside_cannot_leave_the_directory(self, tier: DiskTier, shard_id: str) -> None:
        """D17: refused before any file is touched."""
        shard = write(tier)
        before = Snapshot.of(tier.cache_dir)

        for act in (
            lambda: tier.drop(shard_id),
            lambda: tier.quarantine(shard_id, []),
            lambda: tier.read_chunk(shard_id, shard.entries[0], make_views(NS, 64)),
            lambda: tier.place(shard_id, 4096, [bytes(4096)]),
        ):
            with pytest.raises(ConfigError, match="shard id"):
                act()
        assert Snapshot.of(tier.cache_dir) == before


class TestDirectory:
    def test_eight_processes_start_at_once(self, tmp_path: Path) -> None:
        """B13: the race to create the directory has no losers."""
        context = multiprocessing.get_context("fork")
        barrier = context.Barrier(8)

        def start(seed: int) -> None:
            barrier.wait()
            with DiskTier(tmp_path / "a" / "b", NS, cap_bytes=CAP) as tier:
                write(tier, seed)

        processes = [context.Process(target=start, args=(seed,)) for seed in range(8)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)

        assert [process.exitcode for process in processes] == [0] * 8
        with DiskTier(tmp_path / "a" / "b", NS, cap_bytes=CAP) as tier:
            assert len(list(tier.scan())) == 8

    def test_two_writers_without_file_locks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """D09: `flock` that always succeeds. Both write the same chunks; both files are whole."""
        monkeypatch.setattr(fcntl, "flock", lambda fd, operation: None)
        a = DiskTier(tmp_path, NS, cap_bytes=CAP)
        b = DiskTier(tmp_path, NS, cap_bytes=CAP)

        shards = [write(a), write(b)]

        with DiskTier(tmp_path, NS, cap_bytes=CAP) as again:
            assert {shard.id for shard in again.scan()} == {shard.id for shard in shards}
            for shard in shards:
                assert read(again, shard, 0) == b"".join(make_chunks(NS, 3)[0].views)

    def test_a_writer_is_locked_also_where_somebody_looks_at_it_just_then(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whoever asks whether it lives takes its lock for a blink. From another pid namespace only the lock tells."""
        answers = [False, False]
        real = writers.try_lock
        monkeypatch.setattr(writers, "try_lock", lambda fd: answers.pop() if answers else real(fd))

        (tmp_path / "tmp").mkdir()
        writer = writers.WriterDir(tmp_path)

        assert not answers
        with (writer.path / "lock").open("r+b") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def test_a_start_waits_longer_for_the_directory_than_a_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A write that is given up comes again; an engine that starts without its disk tier has none."""
        assert writers.START_SECONDS > writers.LOCK_SECONDS
        monkeypatch.setattr(writers, "START_SECONDS", 0.05)
        with (tmp_path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(StorageError, match=r"over 0\.05 s"):
                DiskTier(tmp_path, NS, cap_bytes=CAP)

    def test_a_writer_whose_directory_is_removed_goes_on(self, tier: DiskTier) -> None:
        assert tier.writer is not None
        (tier.writer.path / "lock").unlink()
        tier.writer.path.rmdir()

        assert read(tier, write(tier), 0) == b"".join(make_chunks(NS, 3)[0].views)

    def test_files_say_what_they_are(self, tier: DiskTier) -> None:
        assert json.loads((tier.cache_dir / "kvsnap.json").read_text()) == {
            "cap_bytes": CAP,
            "format": 1,
            "kind": "cache",
        }
        assert [(path.name, ns.id()) for path, ns in open_namespaces(tier.cache_dir)] == [(NS.dirname, NS.id())]

    def test_the_cap_of_the_engine_started_last_counts_for_jobs(self, tier: DiskTier) -> None:
        with DiskTier(tier.cache_dir, NS, cap_bytes=CAP // 2), DiskTier(tier.cache_dir, NS) as job:
            assert job.cap_bytes == CAP // 2

    def test_a_damaged_description_is_written_again(self, tier: DiskTier) -> None:
        """Shards tell for themselves what they are; a torn namespace.json must not lose them."""
        shard = write(tier)
        (tier.dir / "namespace.json").write_bytes(b'{"torn')
        (tier.cache_dir / "kvsnap.json").write_bytes(b"")

        with DiskTier(tier.cache_dir, NS, cap_bytes=CAP) as again:
            assert [found.id for found in again.scan()] == [shard.id]
        assert len(open_namespaces(tier.cache_dir)) == 1

    def test_refuses_a_snapshot_repository(self, tmp_path: Path) -> None:
        (tmp_path / "kvsnap.json").write_text('{"format": 1, "features": {}}')

        with pytest.raises(ConfigError, match="not a cache directory"):
            DiskTier(tmp_path, NS, cap_bytes=CAP)

    def test_refuses_a_newer_format(self, tmp_path: Path) -> None:
        (tmp_path / "kvsnap.json").write_text('{"format": 2, "kind": "cache"}')

        with pytest.raises(IncompatibleError, match="upgrade kvsnap"):
            DiskTier(tmp_path, NS, cap_bytes=CAP)

    def test_refuses_a_directory_behind_a_link(self, tier: DiskTier, tmp_path: Path) -> None:
        """D17: a link inside the cache directory may point anywhere."""
        (tier.dir / "shards").rmdir()
        (tier.dir / "shards").symlink_to(tmp_path)

        with pytest.raises(StorageError, match="symbolic link"):
            DiskTier(tier.cache_dir, NS, cap_bytes=CAP)

    def test_a_file_where_the_directory_should_be(self, tmp_path: Path) -> None:
        (tmp_path / "cache").touch()

        with pytest.raises(StorageError, match="can't be created"):
            DiskTier(tmp_path / "cache", NS, cap_bytes=CAP)


class TestReadOnly:
    def test_changes_nothing(self, tier: DiskTier, tmp_path: Path) -> None:
        shard = write(tier)
        damaged = tier.dir / "shards" / f"{'ab' * 16}.safetensors"
        damaged.write_bytes(b"not a shard")
        tier.store_usage([(shard.entries[0].key, 1, 2.0)])
        before = Snapshot.of(tier.cache_dir)

        reader = DiskTier(tier.cache_dir, NS, cap_bytes=1, read_only=True)
        assert [found.id for found in reader.scan()] == [shard.id]
        assert read(reader, shard, 0) == b"".join(make_chunks(NS, 3)[0].views)
        assert reader.write("", make_chunks(NS, 1)) is None
        assert reader.place("ab" * 32, 4096, [bytes(4096)]) is None
        assert reader.quarantine(shard.id, list(shard.entries)) is None
        assert reader.drop(shard.id) == 0
        assert reader.clear() == (0, 0)
        assert reader.enforce_cap()
        assert reader.load_usage() == {shard.entries[0].key: (1, 2.0)}
        reader.store_usage([])
        assert reader.poll() == ([], [])
        reader.close()

        assert Snapshot.of(tier.cache_dir) == before

    def test_of_nothing_creates_nothing(self, tmp_path: Path) -> None:
        reader = DiskTier(tmp_path / "cache", NS, cap_bytes=CAP, read_only=True)

        assert list(reader.scan()) == []
        assert reader.poll() == ([], [])
        assert reader.used_bytes() == 0
        assert reader.load_usage() == {}
        assert list(tmp_path.iterdir()) == []


class TestPlace:
    """A whole shard file comes in, as an import brings it."""

    @pytest.fixture
    def data(self, tmp_path: Path) -> bytes:
        return write_shard_file(tmp_path / "s.safetensors", NS, make_chunks(NS, 2), "mm").read_bytes()

    def test_keeps_its_digest_as_its_name(self, tier: DiskTier, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()

        shard = tier.place(digest, len(data), [data[:100], data[100:5000], data[5000:]])

        assert shard is not None
        assert (shard.id, shard.scope, shard.path.read_bytes()) == (digest, "mm", data)
        assert read(tier, shard, 1) == b"".join(make_chunks(NS, 2)[1].views)
        assert tier.place(digest, len(data), []) == shard
        assert tier.poll() == ([], [])

    def test_replaces_a_damaged_one(self, tier: DiskTier, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()
        path = tier.dir / "shards" / f"{digest}.safetensors"
        path.write_bytes(b"torn")

        assert tier.place(digest, len(data), [data]) is not None
        assert path.read_bytes() == data
        assert [p.read_bytes() for p in (tier.dir / "quarantine").iterdir()] == [b"torn"]

    def test_refuses_damage_and_leaves_nothing(self, tier: DiskTier, data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        longer = [data, bytes(4096)]

        for pieces in ([flipped], [data[:-4096]], longer, [data[:-1]]):
            with pytest.raises((CorruptChunkError, StorageError)):
                tier.place(digest, len(data), pieces)
        with pytest.raises(CorruptChunkError):
            tier.place(digest, len(data) - 1, [data])
        assert list((tier.dir / "shards").iterdir()) == []
        assert [p.name for p in (tier.dir / "tmp").rglob("*") if p.is_file()] == ["lock"]

    def test_refuses_a_bad_header_with_the_right_digest(self, tier: DiskTier) -> None:
        data = bytes(8192)

        with pytest.raises(CorruptChunkError):
            tier.place(hashlib.sha256(data).hexdigest(), len(data), [data])

    def test_refuses_a_shard_of_another_namespace(self, tier: DiskTier, tmp_path: Path) -> None:
        """Invariant 1: KV of another identity never gets in."""
        other: Namespace = make_namespace(tag="other")
        data = write_shard_file(tmp_path / "o", other, make_chunks(other, 1)).read_bytes()

        with pytest.raises(IncompatibleError, match="identity"):
            tier.place(hashlib.sha256(data).hexdigest(), len(data), [data])
        assert list((tier.dir / "shards").iterdir()) == []
