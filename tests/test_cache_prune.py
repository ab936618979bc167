"""What nobody comes back for is listed and goes; what a live engine uses never does."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from kvsnap.cache_prune import CachePruneReport, prune_cache
from kvsnap.errors import ConfigError, NotFoundError
from kvsnap.namespace import Namespace
from kvsnap.status import read_status
from kvsnap.tiers import dram as dram_module
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.dram import DramTier
from kvsnap.tiers.dram_file import VALID
from kvsnap.tiers.dram_lock import Claim, list_dram_files, remove_for_room
from tests.disk_fakes import Snapshot, disk_use, make_chunks, make_namespace

DAY = 86400.0
NS = make_namespace()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def dram_dir(tmp_path: Path) -> Path:
    path = tmp_path / "shm"
    path.mkdir()
    return path


def make_old(directory: Path, days: float) -> None:
    """As if nobody had used it since."""
    then = os.path.getmtime(directory) - days * DAY
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (then, then), follow_symlinks=False)


def fill(cache: Path, ns: Namespace, *, days: float = 0.0) -> Path:
    with DiskTier(cache, ns, cap_bytes=1 << 30) as disk:
        assert disk.write("", make_chunks(ns, 3)) is not None
        disk.store_usage([])
        directory = disk.dir
    make_old(directory, days)
    return directory


def leave_dram(dram_dir: Path, cache: Path, ns: Namespace, *, days: float = 0.0, nbytes: int = 200_000) -> Path:
    """The file of an engine that ended."""
    tier = DramTier.open(dram_dir, cache, ns.id(), ns.geometry, budget_bytes=nbytes, ranks=1)
    tier.close()
    path = Path(tier.path)
    then = path.stat().st_mtime - days * DAY
    os.utime(path, (then, then))
    return path


def gone(report: CachePruneReport) -> Counter[str]:
    return Counter(item.kind for item in report.items if item.goes)


class TestNamespaces:
    def test_five_old_ones_and_the_one_in_use(self, cache: Path, dram_dir: Path) -> None:
        """D12: the dtype changed five times. Dry run: all with size and last use. Then those past their time go."""
        old = [fill(cache, make_namespace(tag=f"dtype {i}"), days=40 - 8 * i) for i in range(5)]
        with DiskTier(cache, NS, cap_bytes=1 << 30) as used:
            used.write("", make_chunks(NS, 3))
            make_old(used.dir, 400)
            before = Snapshot.of(cache)

            planned = prune_cache(cache, dram_dir=dram_dir, dry_run=True)

            assert Snapshot.of(cache) == before
            assert [Path(item.path) for item in planned.items] == [used.dir, *old]  # the longest unused first
            assert [item.goes for item in planned.items] == [False, True, True, False, False, False]
            assert planned.items[0].why == "in use"
            assert [item.nbytes for item in planned.items[1:]] == [disk_use(directory) for directory in old]
            done = prune_cache(cache, dram_dir=dram_dir)

            assert done.items == planned.items
            assert done.failed == ()
            assert [directory.exists() for directory in old] == [False, False, True, True, True]
            assert len(list(DiskTier(cache, NS, read_only=True).scan())) == 1
            assert gone(prune_cache(cache, dram_dir=dram_dir)) == {}

    def test_age_is_a_choice(self, cache: Path, dram_dir: Path) -> None:
        directory = fill(cache, NS, days=2)

        assert gone(prune_cache(cache, dram_dir=dram_dir, unused_for_s=3 * DAY)) == {}
        assert gone(prune_cache(cache, dram_dir=dram_dir, unused_for_s=DAY)) == {"namespace": 1}
        assert not directory.exists()

    def test_foreign_files_stay(self, cache: Path, dram_dir: Path) -> None:
        directory = fill(cache, NS, days=50)
        (directory / "notes.txt").write_text("mine")

        report = prune_cache(cache, dram_dir=dram_dir)

        assert report.failed == ()
        assert [path.name for path in directory.iterdir()] == ["notes.txt"]

    def test_an_engine_that_only_reads_uses_its_namespace(self, cache: Path, dram_dir: Path) -> None:
        """It leaves no trace in the directory; its DRAM file tells."""
        directory = fill(cache, NS, days=50)
        reader = DramTier.open(dram_dir, cache, NS.id(), NS.geometry, budget_bytes=200_000, ranks=1)

        assert gone(prune_cache(cache, dram_dir=dram_dir)) == {}
        assert directory.exists()
        reader.close()

    def test_not_a_cache_directory(self, cache: Path, dram_dir: Path, tmp_path: Path) -> None:
        (tmp_path / "kvsnap.json").write_text('{"kind":"repository"}')

        with pytest.raises(ConfigError, match="not a cache directory"):
            prune_cache(tmp_path, dram_dir=dram_dir)
        with pytest.raises(NotFoundError, match="no directory"):
            prune_cache(cache, dram_dir=dram_dir)


class TestLeftovers:
    def test_of_the_dead_go_those_of_the_living_stay(self, cache: Path, dram_dir: Path) -> None:
        """D10: in a namespace that is used; quarantine, a dead writer, a dead engine's record."""
        with DiskTier(cache, NS, cap_bytes=1 << 30) as disk:
            bad = disk.write("", make_chunks(NS, 3))
            assert bad is not None
            disk.quarantine(bad.id, [])
            dead = disk.dir / "tmp" / ("ab" * 8)
            dead.mkdir()
            (dead / "lock").write_text("999999999 1\n")
            (dead / f"{'cd' * 16}.safetensors").write_bytes(bytes(1 << 16))
            (disk.dir / "engines" / "torn.json").write_text("{")
            before = Snapshot.of(cache)

            planned = prune_cache(cache, dram_dir=dram_dir, dry_run=True)

            assert Snapshot.of(cache) == before
            assert gone(planned) == {"quarantine": 1, "writer": 1, "engine record": 1}
            assert planned.freed_bytes > 1 << 16
            used = disk.used_bytes()
            report = prune_cache(cache, dram_dir=dram_dir)

            assert report.failed == ()
            assert used - disk.used_bytes() == report.freed_bytes
            assert disk.writer is not None
            assert [path.name for path in (disk.dir / "tmp").iterdir()] == [disk.writer.name]


class TestDramFiles:
    def test_without_owner_go_after_their_time(self, cache: Path, dram_dir: Path, tmp_path: Path) -> None:
        fill(cache, NS)
        foreign_namespace = leave_dram(dram_dir, cache, make_namespace(tag="gone"), days=31)
        recent = leave_dram(dram_dir, cache, NS, days=1)
        elsewhere = leave_dram(dram_dir, tmp_path / "other", NS, days=60)
        owned = DramTier.open(
            dram_dir, cache, make_namespace(tag="on").id(), NS.geometry, budget_bytes=200_000, ranks=1
        )
        os.utime(owned.path, (0, 0))

        report = prune_cache(cache, dram_dir=dram_dir)

        assert gone(report) == {"dram file": 1}
        assert not foreign_namespace.exists()
        assert recent.exists()
        assert elsewhere.exists()
        assert Path(owned.path).exists()
        assert {item.why for item in report.items if not item.goes} >= {"of another cache directory", "in use"}
        assert gone(prune_cache(cache, dram_dir=dram_dir, all_dram=True)) == {"dram file": 1}
        assert not elsewhere.exists()
        assert Path(owned.path).exists()
        owned.close()

    def test_status_lists_them(self, cache: Path, dram_dir: Path, tmp_path: Path) -> None:
        fill(cache, NS)
        of_gone = leave_dram(dram_dir, cache, make_namespace(tag="gone"))
        elsewhere = leave_dram(dram_dir, tmp_path / "other", NS)

        status = read_status(cache, dram_dir=dram_dir)

        assert [file.path for file in status.dram_files] == [str(of_gone)]
        assert [file.path for file in status.other_dram_files] == [str(elsewhere)]
        [namespace] = status.namespaces
        assert not namespace.is_used
        assert namespace.last_use > 0

    def test_give_way_to_a_tier_that_finds_no_room(
        self, cache: Path, dram_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Oldest use first, no more than is needed, one line each; a smaller tier only if that is not enough."""
        old, older, recent = (
            leave_dram(dram_dir, tmp_path / name, NS, days=days) for name, days in (("a", 3), ("b", 5), ("c", 1))
        )
        size = old.stat().st_blocks * 512
        free = [0]

        def available(held: Claim) -> int:
            """A file system that holds the three files, and one more that is half as large."""
            used = sum(path.stat().st_blocks * 512 for path in dram_dir.iterdir())
            return 3 * size + size // 2 - used + os.fstat(held.fd).st_blocks * 512 + free[0]

        monkeypatch.setattr(dram_module, "_available", available)

        tier = DramTier.open(dram_dir, cache, NS.id(), NS.geometry, budget_bytes=200_000, ranks=1)

        assert not older.exists()
        assert old.exists()
        assert recent.exists()
        assert [message.startswith(f"removed {older}") for message in tier.messages] == [True]
        tier.close()

    def test_an_engine_of_the_same_server_loses_its_file_last(
        self, cache: Path, dram_dir: Path, tmp_path: Path
    ) -> None:
        own = leave_dram(dram_dir, cache, NS, days=9)
        other = leave_dram(dram_dir, tmp_path / "other", NS)

        [first] = remove_for_room(dram_dir, 1, own.name.rpartition("-")[0])

        assert first.path == str(other)
        assert [info.path for info in list_dram_files(dram_dir)] == [str(own)]

    def test_use_counts_by_the_chunks_too(self, cache: Path, dram_dir: Path) -> None:
        """What is written through a mapping doesn't show in the file's time."""
        tier = DramTier.open(dram_dir, cache, NS.id(), NS.geometry, budget_bytes=200_000, ranks=1)
        tier._map.state[0] = VALID
        tier.touch(0, 1, 5e9)
        tier.close()
        os.utime(tier.path, (0, 0))

        assert [info.last_use for info in list_dram_files(dram_dir)] == [5e9]
