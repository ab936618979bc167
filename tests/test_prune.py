"""Prune: what it deletes, what it leaves, and its races with those who write."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from kvsnap import leases
from kvsnap.canonical import canonical_json
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, NotFoundError, StorageError
from kvsnap.gc_lists import read_lists
from kvsnap.leases import PRUNE_LEASE, BusyError, Lease, LeaseLostError, read_leases
from kvsnap.listing import list_snapshots
from kvsnap.namespace import Namespace
from kvsnap.refs import remove, tag_snapshot
from kvsnap.repository import MARKER_NAME, Repository
from kvsnap.repository_prune import GRACE_S, PruneReport, prune_repository
from kvsnap.snapshot_export import ExportReport, export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import Capabilities, LocalStorage, RetryStorage, Storage
from kvsnap.testing import Fault, FaultyStorage, Rule
from kvsnap.verify import verify_snapshot
from kvsnap.writing import WriteSession
from tests.disk_fakes import make_namespace
from tests.repository_fakes import (
    MAX,
    Gate,
    StoppingStorage,
    Task,
    TimedStorage,
    check_whole,
    content_of,
    names_in,
    race,
    reachable,
    removing,
)
from tests.snapshot_fakes import chain, prompt, store

STRAY = "shards/00/" + "0" * 64 + ".safetensors"


@pytest.fixture
def storage() -> TimedStorage:
    return TimedStorage()


@pytest.fixture
def exported(cache: Path, ns: Namespace, storage: TimedStorage) -> ExportReport:
    return export_snapshot(cache, storage, tag="prod")


def other_snapshot(tmp_path: Path, storage: Any, *, seed: int = 50, tag: str | None = None) -> ExportReport:
    """A snapshot that shares nothing with the others."""
    directory = tmp_path / f"cache-{seed}"
    store(directory, make_namespace(), chain(make_namespace(), prompt(seed, 128)))
    report = export_snapshot(directory, storage, tag=tag)
    shutil.rmtree(directory)
    return report


def interrupted_export(cache: Path, storage: Storage) -> None:
    """One that dies after its shards, before its manifest, and whose lease runs out."""
    faulty = FaultyStorage(storage, [Rule(fault=Fault.ERROR_BEFORE, name="manifests/*", operation="put*", times=None)])
    faulty.rules.append(Rule(fault=Fault.ERROR_BEFORE, operation="delete", times=None))
    with pytest.raises(StorageError):
        export_snapshot(cache, faulty)


def prune_twice(storage: Any, **options: Any) -> PruneReport:
    """Mark, wait, delete."""
    prune_repository(storage, **options)
    storage.time += GRACE_S + 1
    return prune_repository(storage, **options)


class TestWhatGoes:
    def test_nothing_of_a_snapshot(self, storage: TimedStorage, exported: ExportReport) -> None:
        """Invariant 5"""
        before = content_of(storage)

        report = prune_twice(storage)

        assert content_of(storage) == before
        assert (report.num_snapshots, report.deleted_objects, report.marked_objects) == (1, 0, 0)
        assert report.kept_objects == 4

    def test_a_stray_goes_after_the_grace_period_and_not_before(
        self, storage: TimedStorage, exported: ExportReport
    ) -> None:
        """By the storage's clock: the test's machine never sees the hours."""
        storage.put(STRAY, b"stray")

        first = prune_repository(storage)
        storage.time += GRACE_S - 1
        second = prune_repository(storage)
        assert STRAY in names_in(storage)
        storage.time += 2
        third = prune_repository(storage)

        assert (first.marked_objects, first.marked_bytes, first.waiting_bytes) == (1, 5, 5)
        assert (second.marked_objects, second.waiting_objects) == (0, 1)
        assert (third.deleted_objects, third.deleted_bytes, third.waiting_objects) == (1, 5, 0)
        assert STRAY not in names_in(storage)
        assert names_in(storage, "gc/") == []

    def test_without_grace_in_one_go(self, storage: TimedStorage, exported: ExportReport) -> None:
        storage.put(STRAY, b"stray")

        assert prune_repository(storage, grace_s=0).deleted_objects == 1

    def test_a_removed_snapshot_but_what_others_share(
        self, storage: TimedStorage, cache: Path, ns: Namespace, exported: ExportReport
    ) -> None:
        store(cache, ns, chain(ns, prompt(9, 128)))
        second = export_snapshot(cache, storage)
        own = reachable(storage, second.snapshot) - reachable(storage, exported.snapshot)

        remove(storage, second.snapshot)
        assert [row.snapshot for row in list_snapshots(storage).snapshots] == [exported.snapshot]
        report = prune_twice(storage)

        assert report.deleted_objects == len(own) == 3
        assert not own & set(names_in(storage))
        assert check_whole(storage) == {exported.snapshot}

    def test_untagged_snapshots_go_when_asked_for(
        self, storage: TimedStorage, exported: ExportReport, tmp_path: Path
    ) -> None:
        """What a ref named before its last move stays, so that it can be rolled back."""
        untagged = other_snapshot(tmp_path, storage, seed=50)
        moved = other_snapshot(tmp_path, storage, seed=51, tag="prod")
        storage.time += 100

        assert prune_repository(storage, untagged_s=1000).retired == []
        assert prune_repository(storage, untagged_s=10, dry_run=True).retired == [untagged.snapshot]
        assert prune_repository(storage, untagged_s=10).retired == [untagged.snapshot]
        storage.time += GRACE_S + 1
        prune_repository(storage)

        assert check_whole(storage) == {exported.snapshot, moved.snapshot}
        assert untagged.snapshot not in Repository(storage).snapshots()

    def test_foreign_objects_stay(self, storage: TimedStorage, exported: ExportReport) -> None:
        names = ["README", "shards/notes.txt", f"shards/11/{'2' * 64}.safetensors", "photos/a.jpg"]
        for name in names:
            storage.put(name, b"not ours")

        report = prune_twice(storage, grace_s=0)

        assert set(names) <= set(names_in(storage))
        assert report.foreign == len(names)

    def test_signatures_go_with_their_manifests(self, storage: TimedStorage, exported: ExportReport) -> None:
        kept, gone = f"manifests/{exported.snapshot}.sig", f"manifests/{'0' * 64}.sig"
        storage.put(kept, b"signature")
        storage.put(gone, b"signature")

        prune_repository(storage, grace_s=0)

        assert set(names_in(storage, "manifests/")) == {kept, f"manifests/{exported.snapshot}.json"}

    def test_leftovers_of_interrupted_writes(self, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        repo = LocalStorage(tmp_path / "repo")
        export_snapshot(cache, repo)
        old = tmp_path / "repo" / ".kvsnap-tmp-0123456789abcdef"
        old.write_bytes(b"half")
        shutil.copystat("/proc/self/exe", old)

        assert prune_repository(repo, dry_run=True).leftovers == 1
        assert old.exists()
        assert prune_repository(repo).leftovers == 1
        assert not old.exists()

    def test_leftovers_of_a_probe(self, storage: TimedStorage, exported: ExportReport) -> None:
        storage.put("gc/probe-0123456789abcdef-create", b"x")
        assert prune_repository(storage).leftovers == 0
        storage.time += 4000

        assert prune_repository(storage).leftovers == 1
        assert names_in(storage, "gc/") == []

    def test_dry_run_tells_the_bytes_and_changes_nothing(
        self, storage: TimedStorage, exported: ExportReport, tmp_path: Path
    ) -> None:
        doomed = other_snapshot(tmp_path, storage)
        remove(storage, doomed.snapshot)
        storage.time += 2 * GRACE_S
        before = {name: storage.get(name, max_bytes=MAX) for name in names_in(storage)}

        planned = prune_repository(storage, grace_s=0, dry_run=True)

        assert {name: storage.get(name, max_bytes=MAX) for name in names_in(storage)} == before
        done = prune_repository(storage, grace_s=0)
        assert (planned.deleted_objects, planned.deleted_bytes) == (done.deleted_objects, done.deleted_bytes)
        assert done.deleted_bytes > doomed.nbytes
        assert planned.marked_bytes == done.marked_bytes


class TestRefuses:
    def test_a_damaged_manifest_stops_it_until_it_is_removed(
        self, storage: TimedStorage, exported: ExportReport, tmp_path: Path
    ) -> None:
        """Invariant 5: what it names isn't known, so everything might be needed."""
        other = other_snapshot(tmp_path, storage)
        storage.put(f"manifests/{other.snapshot}.json", b"garbage")
        storage.put(STRAY, b"stray")

        with pytest.raises(CorruptChunkError, match=r"nothing is pruned.*kvsnap rm memory@"):
            prune_repository(storage, grace_s=0)
        assert STRAY in names_in(storage)
        remove(storage, other.snapshot)
        prune_repository(storage, grace_s=0)

        assert set(names_in(storage, "shards/")) == {
            name for name in reachable(storage, exported.snapshot) if name.startswith("shards/")
        }

    @pytest.mark.parametrize("untagged_s", [None, 0.0])
    def test_a_ref_whose_manifest_is_gone_stops_it(
        self, storage: TimedStorage, exported: ExportReport, tmp_path: Path, untagged_s: float | None
    ) -> None:
        """Invariant 5: what the ref's snapshot needs is as unknown as with a damaged manifest."""
        lost = other_snapshot(tmp_path, storage, tag="lost")
        other_snapshot(tmp_path, storage, seed=51)  # that a retirement would take
        storage.time += 100
        storage.delete(f"manifests/{lost.snapshot}.json")
        before = content_of(storage)

        for dry_run in (True, False):
            with pytest.raises(
                CorruptChunkError,
                match=r"nothing is pruned: ref lost names a.*kvsnap rm memory@lost",
            ):
                prune_repository(storage, grace_s=0, untagged_s=untagged_s, dry_run=dry_run)

        assert content_of(storage) == before
        remove(storage, "lost")
        prune_repository(storage, grace_s=0)
        assert not {name for name in before if name.startswith("catalogs/")} <= set(names_in(storage))

    @pytest.mark.parametrize("what", ["removed", "moved"])
    def test_a_ref_that_somebody_changes_meanwhile_does_not(
        self, storage: TimedStorage, exported: ExportReport, tmp_path: Path, what: str
    ) -> None:
        """It was read before the manifests were, which a removal and another prune have taken since."""
        gone = other_snapshot(tmp_path, storage, tag="other")
        stopping = StoppingStorage(storage)

        def change(operation: str, name: str) -> None:
            if (operation, name) != ("list", "manifests/"):
                return
            stopping.before = lambda operation, name: None
            if what == "removed":
                storage.delete("refs/other.json")
            else:
                tag_snapshot(storage, "prod", "other")
            storage.delete(f"manifests/{gone.snapshot}.json")

        stopping.before = change
        report = prune_repository(stopping, grace_s=0)

        assert report.num_snapshots == 1
        assert check_whole(storage) == {exported.snapshot}

    def test_a_manifest_of_a_later_version_stops_it(self, storage: TimedStorage, exported: ExportReport) -> None:
        from hashlib import sha256

        data = canonical_json({"format": 99})
        storage.put(f"manifests/{sha256(data).hexdigest()}.json", data)

        with pytest.raises(IncompatibleError, match="upgrade kvsnap"):
            prune_repository(storage, grace_s=0)

    def test_a_repository_that_needs_a_later_version_to_delete(
        self, storage: TimedStorage, exported: ExportReport
    ) -> None:
        marker = storage.get(MARKER_NAME, max_bytes=MAX).replace(b'"delete":[]', b'"delete":["locks"]')
        storage.put(MARKER_NAME, marker)

        with pytest.raises(IncompatibleError, match="requires features locks to delete"):
            prune_repository(storage)
        assert len(list_snapshots(storage).snapshots) == 1

    def test_two_prunes_at_once(self, storage: TimedStorage, exported: ExportReport) -> None:
        """D08: the second is told who runs; when that one has died, it goes on."""
        Lease.acquire(storage, "prune", name=PRUNE_LEASE)
        with pytest.raises(BusyError, match="prune by"):
            prune_repository(storage)
        assert prune_repository(storage, dry_run=True).num_snapshots == 1

        storage.time += 301
        assert prune_repository(storage).num_snapshots == 1

    def test_readers_need_no_lease(self, storage: TimedStorage, exported: ExportReport, tmp_path: Path) -> None:
        """D08: with leases of the dead and of the living there, and one that is garbage."""
        Lease.acquire(storage, "prune", name=PRUNE_LEASE)
        Lease.acquire(storage, "export")
        storage.put("leases/garbage.json", b"[")

        assert len(list_snapshots(storage).snapshots) == 1
        assert verify_snapshot(storage, "prod", read_data=True).is_good
        assert import_snapshot(storage, "prod", tmp_path / "other").num_chunks == 7


class TestRaces:
    """Invariant 5: prune never deletes what a manifest, a ref, a lease or a running export needs."""

    def test_d06_a_prune_between_shards_and_manifest(
        self, storage: TimedStorage, exported: ExportReport, cache: Path, ns: Namespace
    ) -> None:
        """D06: without any grace, at the worst moment."""
        store(cache, ns, chain(ns, prompt(9, 128)))
        stopping = StoppingStorage(storage)
        stopping.before = gate = Gate(lambda operation, name: name.startswith("catalogs/") and "put" in operation)
        export = Task(lambda: export_snapshot(cache, stopping, tag="prod"))

        with gate.reached():
            for _ in range(2):
                report = prune_repository(storage, grace_s=0)
                assert report.deleted_objects == 0
                assert [text.split()[0] for text in report.writers] == ["export"]

        done = export.result()
        assert done.snapshot in check_whole(storage)
        assert prune_repository(storage, grace_s=0).deleted_objects == 0
        assert done.snapshot in check_whole(storage)

    def test_prune_marks_a_shard_while_an_export_reuses_it(
        self, storage: TimedStorage, cache: Path, ns: Namespace
    ) -> None:
        """The shards are strays (an earlier export died); a prune marks them after the export found them."""
        interrupted_export(cache, storage)
        storage.time += 2 * GRACE_S
        stopping = StoppingStorage(storage)
        stopping.before = gate = Gate(lambda operation, name: name.startswith("catalogs/") and "put" in operation)
        export = Task(lambda: export_snapshot(cache, stopping, tag="prod"))

        with gate.reached():
            marking = prune_repository(storage, grace_s=0)
            assert marking.marked_objects == 3
            assert marking.deleted_objects == 0

        assert export.result().sent_shards == 0
        last = prune_repository(storage, grace_s=0)
        assert last.deleted_objects == 0
        assert len(check_whole(storage)) == 1
        assert names_in(storage, "gc/") == []

    def test_an_export_takes_what_it_reuses_off_the_list(
        self, storage: TimedStorage, cache: Path, ns: Namespace
    ) -> None:
        """Marked before the export began, and due while it runs."""
        interrupted_export(cache, storage)
        storage.time += 2 * GRACE_S
        prune_repository(storage)
        storage.time += 2 * GRACE_S
        stopping = StoppingStorage(storage)
        stopping.before = gate = Gate(lambda operation, name: name.startswith("manifests/") and "put" in operation)
        export = Task(lambda: export_snapshot(cache, stopping, tag="prod"))

        with gate.reached():
            assert prune_repository(storage, grace_s=0).deleted_objects == 0

        assert export.result().sent_shards == 0
        assert len(check_whole(storage)) == 1

    def test_an_export_that_wants_what_is_being_deleted_sends_it_again(
        self, storage: TimedStorage, cache: Path, ns: Namespace
    ) -> None:
        """The export finds the shards, the prune has claimed them: it waits, looks, and sends them anew."""
        interrupted_export(cache, storage)
        storage.time += 2 * GRACE_S
        pruning, exporting = StoppingStorage(storage), StoppingStorage(storage)
        pruning.before = claimed = Gate(lambda operation, name: operation == "delete" and name.startswith("shards/"))
        waits = threading.Event()
        exporting.before = lambda operation, name: (
            waits.set() if operation == "get_versioned" and "gc/" in name else None
        )
        prune = Task(lambda: prune_repository(pruning, grace_s=0))

        with claimed.reached():
            export = Task(lambda: export_snapshot(cache, exporting, tag="prod"))
            assert waits.wait(20)
        report = prune.result()

        assert report.deleted_objects == 3
        assert export.result().num_chunks == 7
        assert len(check_whole(storage)) == 1
        assert prune_repository(storage, grace_s=0).deleted_objects == 0

    def test_an_export_goes_on_without_a_prune_that_died(
        self, storage: TimedStorage, cache: Path, ns: Namespace
    ) -> None:
        """Killed while it deletes: half of the shards are gone, its list and lease are still there."""
        interrupted_export(cache, storage)
        storage.time += 2 * GRACE_S
        faulty = FaultyStorage(
            storage, [Rule(fault=Fault.ERROR_BEFORE, operation="delete", name="shards/*", skip=1, times=None)]
        )
        faulty.rules.append(Rule(fault=Fault.ERROR_BEFORE, operation="put_if_match", name=PRUNE_LEASE, skip=1))
        with pytest.raises(StorageError):
            prune_repository(faulty, grace_s=0)
        assert len(names_in(storage, "shards/")) == 1
        storage.time += 301

        report = export_snapshot(cache, storage, tag="prod")

        assert report.sent_shards == 1
        assert len(check_whole(storage)) == 1
        assert prune_repository(storage, grace_s=0).num_snapshots == 1
        assert len(check_whole(storage)) == 1

    @pytest.mark.parametrize("untagged_s", [None, 1000.0])
    def test_a_ref_that_is_removed_meanwhile_names_nothing(
        self, storage: TimedStorage, exported: ExportReport, untagged_s: float | None
    ) -> None:
        """Listed, and gone when it is read: no reason to stop."""
        tag_snapshot(storage, "prod", "gone")
        stopping = StoppingStorage(storage)
        stopping.before = removing(storage, "refs/gone.json")

        report = prune_repository(stopping, untagged_s=untagged_s)

        assert (report.num_snapshots, Repository(storage).ref_names()) == (1, ["prod"])
        assert check_whole(storage) == {exported.snapshot}

    def test_a_prune_goes_on_where_one_died(self, storage: TimedStorage, exported: ExportReport) -> None:
        storage.put(STRAY, b"stray")
        faulty = FaultyStorage(storage, [Rule(fault=Fault.ERROR_BEFORE, operation="delete", name="shards/*")])
        with pytest.raises(StorageError):
            prune_repository(faulty, grace_s=0)
        assert read_lists(storage)[0].sweeper is not None

        assert prune_repository(storage, grace_s=0).deleted_objects == 1
        assert names_in(storage, "gc/") == []

    def test_a_prune_that_slept_deletes_nothing_any_more(
        self, storage: TimedStorage, exported: ExportReport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its lease ran out while the machine slept; somebody may rely on what it claimed."""
        storage.put(STRAY, b"stray")
        stopping = StoppingStorage(storage)
        clock = leases._clock

        def sleep(operation: str, name: str) -> None:
            if operation == "put_if_match" and name.startswith("gc/"):
                monkeypatch.setattr(leases, "_clock", lambda: clock() + 1000)

        stopping.after = sleep

        with pytest.raises(LeaseLostError):
            prune_repository(stopping, grace_s=0)
        assert STRAY in names_in(storage)

    def test_a_delete_is_not_tried_again_once_the_lease_is_over(
        self, storage: TimedStorage, exported: ExportReport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The store is busy for so long that somebody may rely on the shard meanwhile."""
        storage.put(STRAY, b"stray")
        busy = FaultyStorage(storage, [Rule(fault=Fault.SLOW_DOWN, operation="delete", name="shards/*")])
        clock = leases._clock

        def sleep(seconds: float) -> None:
            monkeypatch.setattr(leases, "_clock", lambda: clock() + 1000)

        with pytest.raises(LeaseLostError):
            prune_repository(RetryStorage(busy, sleep=sleep), grace_s=0)
        assert STRAY in names_in(storage)

    def test_an_export_that_slept_looks_again(
        self, storage: TimedStorage, cache: Path, ns: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stopped before its manifest for so long that its lease ran out and a prune took its shards: it sends them
        again, and never publishes what isn't there."""
        stopping = StoppingStorage(storage)
        pruned: list[PruneReport] = []
        clock = leases._clock

        def sleep(operation: str, name: str) -> None:
            if operation == "put_if_absent" and name.startswith("catalogs/") and not pruned:
                monkeypatch.setattr(leases, "_clock", lambda: clock() + 1000)
                storage.time += 1000
                monkeypatch.setattr(leases, "is_dead_here", lambda process: False)
                pruned.append(prune_repository(storage, grace_s=0))

        stopping.before = sleep

        report = export_snapshot(cache, stopping, tag="prod")

        assert (pruned[0].deleted_objects, len(pruned[0].broken_leases)) == (2, 1)
        assert report.sent_shards == 2
        assert check_whole(storage) == {report.snapshot}

    def test_a_lease_of_a_dead_writer_protects_nothing_for_ever(
        self, storage: TimedStorage, cache: Path, ns: Namespace, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leases, "is_dead_here", lambda process: False)
        interrupted_export(cache, storage)

        assert prune_repository(storage, grace_s=0).deleted_objects == 0
        storage.time += 301
        report = prune_repository(storage, grace_s=0)

        assert len(report.broken_leases) == 1
        assert read_leases(storage) == []
        assert report.deleted_objects == 3

    def test_a_writer_that_knows_a_list_does_not_hold_it_up(
        self, storage: TimedStorage, exported: ExportReport
    ) -> None:
        """Else exports that always run would keep prune from ever deleting anything."""
        storage.put(STRAY, b"stray")
        with WriteSession(Repository(storage), "export"):
            storage.time += 200
            prune_repository(storage)  # may be the running one's: not even marked
        storage.time += 100
        prune_repository(storage)
        with WriteSession(Repository(storage), "export"):
            assert prune_repository(storage, grace_s=0).deleted_objects == 1

    def test_a_tag_wins_over_a_removal_or_loses(
        self, storage: TimedStorage, exported: ExportReport, tmp_path: Path
    ) -> None:
        """A tag of a snapshot that is being removed: either the ref names a whole snapshot, or there is none."""
        other = other_snapshot(tmp_path, storage)
        stopping = StoppingStorage(storage)
        stopping.before = gate = Gate(lambda operation, name: operation == "put_if_match" and "refs/" in name)
        tag = Task(lambda: tag_snapshot(stopping, other.snapshot, "late"))

        with gate.reached():
            remove(storage, other.snapshot)
            assert prune_repository(storage, grace_s=0).deleted_objects == 0
        tag.result()
        prune_repository(storage, grace_s=0)

        assert check_whole(storage) == {exported.snapshot, other.snapshot}

    @pytest.mark.parametrize("where", ["memory", "directory"])
    def test_two_exporters_and_a_prune(self, where: str, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        """D09 too."""
        storage = TimedStorage() if where == "memory" else LocalStorage(tmp_path / "repo")
        interrupted_export(cache, storage)
        if isinstance(storage, TimedStorage):
            storage.time += 2 * GRACE_S

        race(storage, cache, ns)


class TestSingleWriter:
    """Stores that ignore conditional requests."""

    @pytest.fixture
    def careless(self, storage: TimedStorage, monkeypatch: pytest.MonkeyPatch) -> TimedStorage:
        import kvsnap.repository

        poor = Capabilities(conditional_create=False, conditional_replace=False, ranges=True, checksums=False)
        monkeypatch.setattr(kvsnap.repository, "probe_storage", lambda storage: poor)
        return storage

    def test_are_refused_with_what_to_do(self, careless: TimedStorage, cache: Path, ns: Namespace) -> None:
        with pytest.raises(ConfigError, match=r"lacks conditional_create and conditional_replace.*--single-writer"):
            export_snapshot(cache, careless)

    def test_are_usable_when_asked_for_and_say_so(
        self, careless: TimedStorage, cache: Path, ns: Namespace, caplog: pytest.LogCaptureFixture
    ) -> None:
        report = export_snapshot(cache, careless, tag="prod", single_writer=True)

        assert "nobody else may write" in caplog.text
        assert check_whole(careless) == {report.snapshot}
        for act in (
            lambda: export_snapshot(cache, careless),
            lambda: prune_repository(careless),
            lambda: remove(careless, "prod"),
            lambda: tag_snapshot(careless, "prod", "other"),
        ):
            with pytest.raises(ConfigError, match="--single-writer"):
                act()
        assert verify_snapshot(careless, "prod").is_good

    def test_a_dry_run_needs_no_promise(self, careless: TimedStorage, cache: Path, ns: Namespace) -> None:
        export_snapshot(cache, careless, tag="prod", single_writer=True)

        assert prune_repository(careless, dry_run=True).deleted_objects == 0

    def test_what_a_killed_probe_left_is_no_foreign_object(
        self, storage: TimedStorage, cache: Path, ns: Namespace
    ) -> None:
        storage.put("gc/probe-0123456789abcdef-replace", b"x")

        assert export_snapshot(cache, storage).num_chunks == 7

    def test_a_place_of_somebody_else_is_left_alone(self, storage: TimedStorage, cache: Path, ns: Namespace) -> None:
        storage.put("photos/a.jpg", b"x")

        with pytest.raises(ConfigError, match="no kvsnap repository"):
            export_snapshot(cache, storage)
        with pytest.raises(NotFoundError):
            prune_repository(storage)
        assert names_in(storage) == ["photos/a.jpg"]
