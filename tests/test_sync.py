"""Sync: a directory follows a ref; one download per directory; whatever fails is said and tried again."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvsnap.errors import ConfigError, StorageError
from kvsnap.namespace import Namespace
from kvsnap.refs import remove, roll_back, tag_snapshot
from kvsnap.rounds import Pace, Stop, StoppedError
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.snapshot_sync import SnapshotSync, SyncRound
from kvsnap.storage import LocalStorage, Storage
from kvsnap.storage.stoppable import StoppableStorage
from kvsnap.storage.wrapper import WrapperStorage
from kvsnap.testing import Fault, FaultyStorage, Rule
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.writers import only_importer
from tests.disk_fakes import make_namespace
from tests.repository_fakes import Gate, StoppingStorage, Task
from tests.snapshot_fakes import CAP_BYTES, chain, chunks_at, filled_cache, flip, prompt, store

SHARDS = 2  # of `filled_cache`


class CountingStorage(WrapperStorage):
    """Counts the requests, and fails them while `is_down`."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self.is_down = False

    def _call(self, operation: str, name: str, act: Callable[[], Any]) -> Any:
        self.counts[f"{operation} {name.split('/')[0]}"] += 1
        if self.is_down:
            raise StorageError("the store is down")
        return act()

    def downloads(self) -> int:
        return self.counts["open_read shards"]


@pytest.fixture
def leader(tmp_path: Path) -> Path:
    """A cache directory whose content the ref `latest` names."""
    filled_cache(tmp_path / "leader")
    export_snapshot(tmp_path / "leader", str(tmp_path / "repo"), tag="latest")
    return tmp_path / "leader"


@pytest.fixture
def ns() -> Namespace:
    return make_namespace()


@pytest.fixture
def storage(leader: Path, tmp_path: Path) -> CountingStorage:
    return CountingStorage(LocalStorage(tmp_path / "repo"))


@pytest.fixture
def replica(tmp_path: Path) -> Path:
    return tmp_path / "replica"


def more(leader: Path, ns: Namespace, seed: int) -> None:
    """Another prompt, exported."""
    store(leader, ns, chain(ns, prompt(seed, 3 * 64)))
    export_snapshot(leader, str(leader.parent / "repo"), tag="latest")


class TestRounds:
    def test_only_what_is_new_is_fetched(
        self, leader: Path, ns: Namespace, storage: CountingStorage, replica: Path
    ) -> None:
        sync = SnapshotSync(storage, "latest", replica)

        first = sync.round()
        same = sync.round()
        more(leader, ns, 7)
        moved = sync.round()

        assert [found.outcome for found in (first, same, moved)] == ["synced", "unchanged", "synced"]
        assert moved.report is not None
        assert (moved.report.imported_shards, moved.report.present_shards) == (1, SHARDS)
        assert storage.downloads() == SHARDS + 1
        assert chunks_at(replica, ns) == chunks_at(leader, ns)

    def test_an_unchanged_ref_costs_one_request(self, storage: CountingStorage, replica: Path) -> None:
        sync = SnapshotSync(storage, "latest", replica)
        sync.round()
        storage.counts.clear()

        sync.round()

        assert storage.counts == {"get refs": 1}

    def test_what_the_ref_names_no_more_stays(
        self, leader: Path, ns: Namespace, storage: CountingStorage, replica: Path
    ) -> None:
        """Also after a roll back, which downloads nothing."""
        sync = SnapshotSync(storage, "latest", replica)
        sync.round()
        more(leader, ns, 7)
        sync.round()
        everything = chunks_at(replica, ns)
        before = storage.downloads()
        roll_back(str(leader.parent / "repo"), "latest")

        back = sync.round()

        assert back.outcome == "synced"
        assert storage.downloads() == before
        assert chunks_at(replica, ns) == everything

    def test_promotion_reaches_the_followers_of_the_other_ref(
        self, leader: Path, ns: Namespace, storage: CountingStorage, replica: Path
    ) -> None:
        repo = str(leader.parent / "repo")
        tag_snapshot(repo, "latest", "prod")
        sync = SnapshotSync(storage, "prod", replica)
        sync.round()
        more(leader, ns, 7)
        assert sync.round().outcome == "unchanged"
        tag_snapshot(repo, "latest", "prod")

        assert sync.round().outcome == "synced"
        assert chunks_at(replica, ns) == chunks_at(leader, ns)

    def test_a_removed_directory_is_filled_again(self, storage: CountingStorage, replica: Path, tmp_path: Path) -> None:
        sync = SnapshotSync(storage, "latest", replica)
        sync.round()
        replica.rename(tmp_path / "gone")

        assert sync.round().outcome == "synced"

    def test_a_budget_is_for_each_snapshot(
        self, leader: Path, ns: Namespace, storage: CountingStorage, replica: Path
    ) -> None:
        smallest = min(path.stat().st_size for path in leader.rglob("*.safetensors"))
        sync = SnapshotSync(storage, "latest", replica, max_bytes=smallest - 1)

        found = sync.round().report

        assert found is not None
        assert found.num_chunks < found.total_chunks

    def test_a_live_tier_has_the_new_chunks_at_its_next_look(
        self, leader: Path, ns: Namespace, storage: CountingStorage, replica: Path
    ) -> None:
        with DiskTier(replica, ns, cap_bytes=CAP_BYTES) as live:
            list(live.scan())

            SnapshotSync(storage, "latest", replica).round()

            new, vanished = live.poll()
            assert (len(new), vanished) == (SHARDS, [])


class TestFailures:
    def test_a_store_that_is_down(self, storage: CountingStorage, replica: Path) -> None:
        storage.is_down = True
        sync = SnapshotSync(storage, "latest", replica)

        found = [sync.round(), sync.round()]
        storage.is_down = False
        good = sync.round()

        assert [(item.outcome, item.failures) for item in found] == [("failed", 1), ("failed", 2)]
        assert "the store is down" in (found[0].error or "")
        assert not found[0].is_refused
        assert (good.outcome, good.failures) == ("synced", 0)

    def test_a_ref_that_vanishes_and_comes_back(
        self, leader: Path, ns: Namespace, storage: CountingStorage, replica: Path
    ) -> None:
        repo = str(leader.parent / "repo")
        sync = SnapshotSync(storage, "latest", replica)
        sync.round()
        before = chunks_at(replica, ns)
        remove(repo, "latest")

        gone = sync.round()
        snapshot = export_snapshot(leader, repo, tag="latest").snapshot

        assert gone.outcome == "failed"
        assert "no ref" in (gone.error or "")
        assert gone.last_success is not None
        assert chunks_at(replica, ns) == before
        assert sync.round().snapshot == snapshot

    def test_no_repository_yet(self, leader: Path, tmp_path: Path, replica: Path) -> None:
        sync = SnapshotSync(str(tmp_path / "later"), "latest", replica)
        assert sync.round().outcome == "failed"

        export_snapshot(leader, str(tmp_path / "later"), tag="latest")

        assert sync.round().outcome == "synced"

    def test_damage_is_refused_and_tried_again(self, storage: CountingStorage, replica: Path, tmp_path: Path) -> None:
        shard = next((tmp_path / "repo").glob("shards/*/*"))
        flip(shard, -1)
        sync = SnapshotSync(storage, "latest", replica)

        found = sync.round()
        flip(shard, -1)

        assert (found.outcome, found.is_refused) == ("failed", True)
        assert shard.name in (found.error or "")
        assert sync.round().outcome == "synced"

    def test_what_the_cap_left_out_comes_once_the_cap_grows(
        self, storage: CountingStorage, replica: Path, ns: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the store is down just then."""
        cap = sum(path.stat().st_size for path in (tmp_path / "repo").glob("shards/*/*"))
        DiskTier(replica, ns, cap_bytes=cap).close()
        sync = SnapshotSync(storage, "latest", replica)
        first, again = sync.round(), sync.round()
        DiskTier(replica, ns, cap_bytes=100 * cap).close()
        with monkeypatch.context() as patches:
            broken = FaultyStorage(storage, [Rule(fault=Fault.ERROR_BEFORE, operation="open_read")])
            patches.setattr(sync, "_storage", broken)
            failed = sync.round()
        last = sync.round()

        assert [item.outcome for item in (first, again, failed, last)] == ["synced", "unchanged", "failed", "synced"]
        assert [item.is_full for item in (first, again, last)] == [True, True, False]
        assert last.report is not None
        assert last.report.num_chunks == last.report.total_chunks
        assert sync.round().outcome == "unchanged"

    def test_a_ref_whose_manifest_is_gone_is_damage(
        self, storage: CountingStorage, replica: Path, tmp_path: Path
    ) -> None:
        next((tmp_path / "repo" / "manifests").iterdir()).unlink()

        found = SnapshotSync(storage, "latest", replica).round()

        assert (found.outcome, found.is_refused) == ("failed", True)
        assert "ref latest names a snapshot that is gone" in (found.error or "")

    def test_a_repository_that_vanishes_is_named(self, storage: CountingStorage, replica: Path, tmp_path: Path) -> None:
        sync = SnapshotSync(storage, "latest", replica)
        sync.round()
        (tmp_path / "repo").rename(tmp_path / "unmounted")

        assert "there is no kvsnap repository at" in (sync.round().error or "")
        (tmp_path / "unmounted").rename(tmp_path / "repo")
        assert sync.round().outcome == "unchanged"

    def test_a_name_that_makes_no_sense_never_will(self, storage: CountingStorage, replica: Path) -> None:
        with pytest.raises(ConfigError):
            SnapshotSync(storage, "a b", replica).round()


class TestFollow:
    def test_until_stopped(self, leader: Path, ns: Namespace, storage: CountingStorage, replica: Path) -> None:
        stop = Stop()
        rounds: list[SyncRound] = []

        def told(found: SyncRound) -> None:
            rounds.append(found)
            if len(rounds) == 2:
                more(leader, ns, 7)
            if len(rounds) == 4:
                stop.set()

        SnapshotSync(storage, "latest", replica, stop=stop).follow(Pace(0.001), told)

        assert [found.outcome for found in rounds] == ["synced", "unchanged", "synced", "unchanged"]

    def test_a_stop_ends_the_wait_at_once(self, storage: CountingStorage, replica: Path) -> None:
        stop = Stop()
        sync = SnapshotSync(storage, "latest", replica, stop=stop)
        following = Task(lambda: sync.follow(Pace(3600.0), lambda found: stop.set()))

        following.result()

    def test_a_stop_ends_a_download_and_what_is_there_is_valid(
        self, leader: Path, ns: Namespace, replica: Path
    ) -> None:
        """Invariant 8: the first shard may be there, the second one is not."""
        stop = Stop()
        stopping = StoppingStorage(LocalStorage(leader.parent / "repo"))
        seen: list[str] = []

        def before(operation: str, name: str) -> None:
            if operation == "open_read":
                seen.append(name)
                stop.set()

        stopping.before = before
        sync = SnapshotSync(stopping, "latest", replica, stop=stop)

        sync.follow(Pace(3600.0), lambda found: pytest.fail("the round ended"))

        assert seen
        assert chunks_at(replica, ns) == {}
        stopping.before = lambda operation, name: None
        import_snapshot(stopping, "latest", replica)
        assert chunks_at(replica, ns) == chunks_at(leader, ns)

    def test_a_stop_ends_the_wait_for_another_import(self, storage: CountingStorage, replica: Path) -> None:
        replica.mkdir()
        stop = Stop()
        sync = SnapshotSync(storage, "latest", replica, stop=stop)
        with only_importer(replica):
            following = Task(lambda: sync.follow(Pace(3600.0), lambda found: None))
            stop.set()

            following.result()

        assert storage.downloads() == 0


class TestOneDownload:
    def test_many_at_once_download_once(
        self, leader: Path, ns: Namespace, storage: CountingStorage, replica: Path
    ) -> None:
        """Syncs, and engines that import their configured snapshot: whoever waited finds the work done."""
        gate = Gate(lambda operation, name: operation == "open_read")
        stopping = StoppingStorage(storage)
        stopping.before = gate
        syncs = [SnapshotSync(stopping, "latest", replica) for _ in range(4)]
        with ThreadPoolExecutor(8) as pool:
            engines = [pool.submit(import_snapshot, stopping, "latest", replica, expect=ns) for _ in range(4)]
            rounds = [pool.submit(sync.round) for sync in syncs]
            with gate.reached():
                assert storage.downloads() < SHARDS

        assert [future.result().outcome for future in rounds] == ["synced"] * 4
        reports = [future.result() for future in engines] + [future.result().report for future in rounds]
        assert sum(report.imported_shards for report in reports if report is not None) == SHARDS
        assert all(report is not None and report.num_chunks == 7 for report in reports)
        assert storage.downloads() == SHARDS
        assert chunks_at(replica, ns) == chunks_at(leader, ns)

    def test_the_lock_of_a_dead_process_does_not_count(self, storage: CountingStorage, replica: Path) -> None:
        """D08: what it left is an empty file."""
        replica.mkdir()
        (replica / "importer").touch()

        assert SnapshotSync(storage, "latest", replica).round().outcome == "synced"

    def test_no_wait_is_for_ever(self, tmp_path: Path) -> None:
        """Invariant 2: one that hangs holds up nobody for longer than this."""
        with only_importer(tmp_path), only_importer(tmp_path, longest_s=0.02):
            pass

    def test_a_file_system_that_refuses_the_lock_is_an_error_of_the_disk(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="importer"), only_importer(tmp_path / "none"):
            pass


class TestPace:
    def test_pauses_differ(self) -> None:
        pace = Pace(100.0, rng=random.Random(1))

        pauses = [pace.pause_s(0) for _ in range(200)]

        assert 80 <= min(pauses) < 85
        assert 115 < max(pauses) <= 120

    def test_grow_with_failures_up_to_a_bound(self) -> None:
        pace = Pace(60.0, longest_s=900.0, rng=random.Random(1))

        pauses = [pace.pause_s(failures) for failures in (1, 2, 3, 50)]

        assert all(low * 0.8 <= pause <= low * 1.2 for low, pause in zip((60, 120, 240, 900), pauses, strict=True))

    def test_never_fall_below_the_interval(self) -> None:
        assert Pace(7200.0, longest_s=900.0).pause_s(5) >= 7200 * 0.8

    def test_a_stop_is_heard_by_whoever_sleeps(self) -> None:
        stop = Stop()
        stop.sleep(0.001)
        threading.Timer(0.01, stop.set).start()
        began = time.monotonic()

        with pytest.raises(StoppedError):
            stop.sleep(30)

        assert time.monotonic() - began < 20
        assert stop.is_set


def test_a_stoppable_storage_ends_transfers_but_not_short_requests(tmp_path: Path) -> None:
    """A lease is still given back."""
    stop = Stop()
    storage = StoppableStorage(LocalStorage(tmp_path / "repo"), stop)
    storage.put("small", b"1")

    def pieces() -> list[bytes]:
        stop.set()
        return [b"1", b"2"]

    with pytest.raises(StoppedError):
        storage.put_stream(pieces, lambda: "large")
    with pytest.raises(StoppedError):
        storage.put_known("large", lambda: [b"1"], nbytes=1, sha256="00" * 32)
    with pytest.raises(StoppedError), storage.open_read("small"):
        pass

    assert storage.get("small", max_bytes=1) == b"1"
    assert storage.delete("small")
    assert [info.name for info in storage.list("")] == []
