"""Copy between repositories, diff and merge of snapshots."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvsnap import leases
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, NotFoundError, StorageError
from kvsnap.namespace import Namespace
from kvsnap.refs import remove, tag_snapshot
from kvsnap.repository import Repository
from kvsnap.repository_copy import copy_snapshots
from kvsnap.repository_prune import prune_repository
from kvsnap.signing import Signature, read_signatures, store_signature
from kvsnap.snapshot_diff import diff_snapshots
from kvsnap.snapshot_export import ExportReport, export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.snapshot_merge import merge_snapshots
from kvsnap.storage import LocalStorage, MemoryStorage, Storage
from kvsnap.testing import Call, Fault, FaultyStorage, Rule
from kvsnap.verify import verify_snapshot
from tests.disk_fakes import make_namespace
from tests.repository_fakes import (
    Gate,
    StoppingStorage,
    Task,
    TimedStorage,
    check_whole,
    content_of,
    names_in,
    reachable,
    removing,
)
from tests.snapshot_fakes import chain, chunks_at, prompt, store


class OneStore(MemoryStorage):
    """Copies by itself, as S3 does."""

    def copy_from(self, source: Storage, name: str, *, nbytes: int) -> bool | None:
        return self.put_if_absent(name, source.get(name, max_bytes=nbytes))


@pytest.fixture
def storage() -> TimedStorage:
    return TimedStorage()


@pytest.fixture
def exported(cache: Path, ns: Namespace, storage: TimedStorage) -> ExportReport:
    return export_snapshot(cache, storage, tag="prod")


class TestCopy:
    def test_a_snapshot_object_by_object(
        self, storage: TimedStorage, exported: ExportReport, tmp_path: Path, cache: Path, ns: Namespace
    ) -> None:
        target = LocalStorage(tmp_path / "target")

        report = copy_snapshots(storage, target, ref="prod", tag="copied")

        assert (report.snapshots, report.copied_shards, report.copied_bytes) == (
            (exported.snapshot,), 2, exported.nbytes,
        )  # fmt: skip
        assert Repository(target).ref("copied").snapshot == exported.snapshot
        assert check_whole(target) == {exported.snapshot}
        assert verify_snapshot(target, "copied", read_data=True).is_good
        import_snapshot(target, "copied", tmp_path / "other")
        assert chunks_at(tmp_path / "other", ns) == chunks_at(cache, ns)
        assert names_in(target, "leases/") == []

    def test_everything_with_refs_and_signatures(
        self, storage: TimedStorage, exported: ExportReport, cache: Path, ns: Namespace
    ) -> None:
        signature = Signature(key="1" * 64, signature="2" * 128)
        store_signature(storage, exported.snapshot, signature)
        store(cache, ns, chain(ns, prompt(9, 128)))
        second = export_snapshot(cache, storage, tag="next")
        removed = export_snapshot(cache, storage, max_bytes=exported.nbytes)
        remove(storage, removed.snapshot)
        target = MemoryStorage()

        report = copy_snapshots(storage, target)

        assert set(report.refs) == {"next", "prod"}
        assert check_whole(target) == {exported.snapshot, second.snapshot}
        assert read_signatures(target, exported.snapshot) == [signature]

    def test_moves_nothing_again(self, storage: TimedStorage, exported: ExportReport) -> None:
        target = MemoryStorage()
        copy_snapshots(storage, target)
        before = content_of(target)

        again = copy_snapshots(storage, target)

        assert (again.copied_shards, again.present_shards) == (0, 2)
        assert content_of(target) == before

    def test_goes_on_where_it_stopped(self, storage: TimedStorage, exported: ExportReport) -> None:
        """D02: nothing is listed, and only what is missing moves."""
        target = FaultyStorage(MemoryStorage(), [Rule(fault=Fault.ERROR_BEFORE, operation="put_known", skip=1)])
        with pytest.raises(StorageError):
            copy_snapshots(storage, target, threads=1)
        assert check_whole(target) == set()

        assert copy_snapshots(storage, target).copied_shards == 1
        assert check_whole(target) == {exported.snapshot}

    @pytest.mark.parametrize("fault", [Fault.TRUNCATE_SILENTLY, Fault.TRUNCATE])
    def test_what_is_short_is_not_stored(self, storage: TimedStorage, exported: ExportReport, fault: Fault) -> None:
        """D03"""
        source = FaultyStorage(storage, [Rule(fault=fault, operation="open_read", name="shards/*")])
        target = MemoryStorage()

        with pytest.raises((CorruptChunkError, StorageError), match=r"shards/"):
            copy_snapshots(source, target, ref="prod", threads=1)
        assert check_whole(target) == set()
        assert len(names_in(target, "shards/")) <= 1

    def test_a_damaged_shard_is_named_and_not_stored(self, storage: TimedStorage, exported: ExportReport) -> None:
        name = names_in(storage, "shards/")[0]
        data = bytearray(storage.get(name, max_bytes=1 << 30))
        data[-1] ^= 1
        storage.put(name, data)
        target = MemoryStorage()

        with pytest.raises(CorruptChunkError, match=f"{name} in memory is damaged: expected sha256"):
            copy_snapshots(storage, target, ref="prod")
        assert name not in names_in(target)
        assert check_whole(target) == set()

    def test_another_object_under_a_shards_name_stops_it(self, storage: TimedStorage, exported: ExportReport) -> None:
        target = MemoryStorage()
        copy_snapshots(storage, target)
        target.put(names_in(target, "shards/")[0], b"something")

        with pytest.raises(CorruptChunkError, match="found 9; delete it and copy again"):
            copy_snapshots(storage, target, ref="prod")

    def test_dry_run_touches_nothing(self, storage: TimedStorage, exported: ExportReport, tmp_path: Path) -> None:
        report = copy_snapshots(storage, str(tmp_path / "target"), dry_run=True)

        assert (report.copied_shards, report.copied_bytes) == (2, exported.nbytes)
        assert not (tmp_path / "target").exists()

    def test_the_store_does_it_where_it_can(self, storage: TimedStorage, exported: ExportReport) -> None:
        target = OneStore()

        report = copy_snapshots(storage, target)

        assert report.server_side_shards == 2
        assert check_whole(target) == {exported.snapshot}

    @pytest.mark.parametrize("kind", [MemoryStorage, OneStore])
    def test_what_is_missing_in_the_source_is_damage_of_it(
        self, storage: TimedStorage, exported: ExportReport, kind: type[MemoryStorage]
    ) -> None:
        target = kind()
        for lost in ("shards/", "catalogs/"):
            name = names_in(storage, lost)[0]
            data = storage.get(name, max_bytes=1 << 30)
            storage.delete(name)

            with pytest.raises(CorruptChunkError, match=f"{name} is missing in memory"):
                copy_snapshots(storage, target, ref="prod")
            assert name not in names_in(target)
            assert check_whole(target) == set()
            storage.put(name, data)

    @pytest.mark.parametrize("kind", ["shards/", "catalogs/", "manifests/", "refs/other", "gc/"])
    def test_of_all_leaves_out_what_is_damaged(
        self, storage: TimedStorage, exported: ExportReport, ns: Namespace, tmp_path: Path, kind: str
    ) -> None:
        """One bad snapshot must not keep the others from a backup."""
        store(tmp_path / "bad", ns, chain(ns, prompt(50, 128)))
        bad = export_snapshot(tmp_path / "bad", storage, tag="other").snapshot
        parts = {*reachable(storage, bad), "refs/other.json", f"gc/{'0' * 32}.json"}
        name = next(name for name in parts if name.startswith(kind))
        storage.put(name, b"garbage")
        target = MemoryStorage()

        report = copy_snapshots(storage, target)

        is_whole = kind in ("refs/other", "gc/")
        assert set(report.snapshots) == check_whole(target) == {exported.snapshot} | ({bad} if is_whole else set())
        assert Repository(target).ref("prod").snapshot == exported.snapshot
        refs = {"prod", "other"} if kind == "gc/" else {"prod"}
        assert set(report.refs) == set(Repository(target).ref_names()) == refs
        assert len(report.problems) == 1
        assert (name if kind != "refs/other" else "ref other") in report.problems[0]

    def test_a_ref_that_is_removed_meanwhile_is_left_out(self, storage: TimedStorage, exported: ExportReport) -> None:
        tag_snapshot(storage, "prod", "gone")
        source, target = StoppingStorage(storage), MemoryStorage()
        source.before = removing(storage, "refs/gone.json")

        report = copy_snapshots(source, target)

        assert report.refs == ("prod",)
        assert check_whole(target) == {exported.snapshot}

    def test_a_prune_of_the_target_takes_nothing_meanwhile(self, storage: TimedStorage, exported: ExportReport) -> None:
        """Invariant 5: what is copied isn't named yet."""
        target = TimedStorage()
        stopping = StoppingStorage(target)
        stopping.before = gate = Gate(lambda operation, name: name.startswith("manifests/") and "put" in operation)
        copy = Task(lambda: copy_snapshots(storage, stopping))

        with gate.reached():
            assert prune_repository(target, grace_s=0).deleted_objects == 0
        copy.result()

        assert check_whole(target) == {exported.snapshot}

    def test_one_that_slept_looks_again_and_counts_right(
        self, storage: TimedStorage, exported: ExportReport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its lease ran out, and a prune has taken what it had copied."""
        target = TimedStorage()
        monkeypatch.setattr(leases, "_clock", lambda: target.time)
        stopping = StoppingStorage(target)
        stopping.before = gate = Gate(lambda operation, name: name.startswith("catalogs/") and "put" in operation)
        copy = Task(lambda: copy_snapshots(storage, stopping))

        with gate.reached():
            target.time += 400
            for _ in range(2):
                prune_repository(target, grace_s=0)
                target.time += 400
            assert names_in(target, "shards/") == []
        report = copy.result()

        assert check_whole(target) == {exported.snapshot}
        assert (report.num_shards, report.copied_shards, report.present_shards) == (2, 2, 0)
        assert report.copied_bytes == report.nbytes

    def test_a_tag_needs_one_snapshot(self, storage: TimedStorage, exported: ExportReport) -> None:
        with pytest.raises(ConfigError):
            copy_snapshots(storage, MemoryStorage(), tag="x")
        with pytest.raises(NotFoundError):
            copy_snapshots(storage, MemoryStorage(), ref="nothing")


class TestDiff:
    def test_counts_what_is_added_gone_and_shared(
        self, storage: TimedStorage, exported: ExportReport, cache: Path, ns: Namespace
    ) -> None:
        added = store(cache, ns, chain(ns, prompt(9, 128)))[0]
        second = export_snapshot(cache, storage)

        there = diff_snapshots(storage, "prod", storage, second.snapshot)
        back = diff_snapshots(storage, second.snapshot, storage, "prod")

        assert there.is_same_namespace
        assert (there.added.num_chunks, there.added.num_tokens, there.gone.num_chunks) == (2, 128, 0)
        assert there.added.shard_bytes == added.path.stat().st_size
        assert (there.shared.num_chunks, there.shared.num_shards) == (7, 2)
        assert there.shared.shard_bytes == exported.nbytes
        assert back.gone == there.added
        assert back.added.num_chunks == 0

    def test_names_the_fields_that_differ(self, storage: TimedStorage, exported: ExportReport, tmp_path: Path) -> None:
        other = make_namespace(tag="tuned", chunk_tokens=32)
        store(tmp_path / "other", other, chain(other, prompt(1, 64)))
        second = export_snapshot(tmp_path / "other", storage)

        report = diff_snapshots(storage, "prod", storage, second.snapshot)

        assert not report.is_same_namespace
        assert report.identity_fields == ("identity_tag",)
        assert report.layout_fields == ("chunk_tokens",)
        assert (report.shared.num_chunks, report.gone.num_chunks) == (0, 7)

    def test_of_two_repositories(self, storage: TimedStorage, exported: ExportReport) -> None:
        target = MemoryStorage()
        copy_snapshots(storage, target)

        report = diff_snapshots(storage, "prod", target, "prod")

        assert (report.added.num_chunks, report.gone.num_chunks, report.shared.num_chunks) == (0, 0, 7)


class TestMerge:
    @pytest.fixture
    def parts(self, tmp_path: Path, storage: TimedStorage) -> tuple[Namespace, list[ExportReport]]:
        """Three engines' parts: two share a prefix in shards of their own, two a whole shard, byte for byte."""
        ns = make_namespace()
        reports = []
        for seed in (1, 2):
            store(tmp_path / f"part-{seed}", ns, chain(ns, prompt(seed, 256, shared=128)))
            reports.append(export_snapshot(tmp_path / f"part-{seed}", storage, tag=f"part-{seed}"))
        shutil.copytree(tmp_path / "part-2", tmp_path / "part-3")
        store(tmp_path / "part-3", ns, chain(ns, prompt(3, 128)))
        reports.append(export_snapshot(tmp_path / "part-3", storage, tag="part-3"))
        return ns, reports

    def test_has_every_chunk_of_all_parts(
        self, storage: TimedStorage, parts: tuple[Namespace, list[ExportReport]], tmp_path: Path
    ) -> None:
        """Invariant 6: and with each its ancestors."""
        ns, reports = parts

        report = merge_snapshots(storage, ["part-1", "part-2", "part-3"], tag="all")
        import_snapshot(storage, "all", tmp_path / "merged")

        expected: dict[bytes, bytes] = {}
        for seed in (1, 2, 3):
            expected |= chunks_at(tmp_path / f"part-{seed}", ns)
        assert chunks_at(tmp_path / "merged", ns) == expected
        assert (report.num_chunks, report.num_prefixes) == (8, 3)
        assert report.is_new
        assert verify_snapshot(storage, "all", read_data=True).is_good
        assert {report.snapshot, *(part.snapshot for part in reports)} == check_whole(storage)

    def test_moves_no_shard(self, storage: TimedStorage, parts: tuple[Namespace, list[ExportReport]]) -> None:
        before = names_in(storage, "shards/")

        report = merge_snapshots(storage, ["part-1", "part-3"])

        assert names_in(storage, "shards/") == before
        assert report.num_shards == 3

    def test_leaves_out_shards_that_add_nothing(self, storage: TimedStorage, cache: Path, ns: Namespace) -> None:
        """The same chunks again in a larger shard."""
        export_snapshot(cache, storage, tag="two")
        shutil.rmtree(cache)
        all_in_one = chain(ns, prompt(1, 4 * 64 + 32, shared=128)) + chain(ns, prompt(2, 4 * 64, shared=128), start=2)
        store(cache, ns, all_in_one)
        one = export_snapshot(cache, storage, tag="one")

        report = merge_snapshots(storage, ["two", "one"])

        assert (report.snapshot, report.is_new) == (one.snapshot, False)

    def test_can_be_repeated(self, storage: TimedStorage, parts: tuple[Namespace, list[ExportReport]]) -> None:
        first = merge_snapshots(storage, ["part-1", "part-2"], tag="all")
        before = content_of(storage)

        again = merge_snapshots(storage, ["part-1", "part-2"], tag="all")

        assert (again.snapshot, again.is_new) == (first.snapshot, False)
        assert content_of(storage) == before

    def test_survives_the_removal_of_its_parts(
        self, storage: TimedStorage, parts: tuple[Namespace, list[ExportReport]]
    ) -> None:
        merged = merge_snapshots(storage, ["part-1", "part-2", "part-3"], tag="all")
        for name in ("part-1", "part-2", "part-3"):
            remove(storage, name, with_snapshot=True)
        prune_repository(storage, grace_s=0)

        assert check_whole(storage) == {merged.snapshot}
        assert verify_snapshot(storage, "all", read_data=True).is_good

    def test_of_different_models_is_refused(
        self, storage: TimedStorage, parts: tuple[Namespace, list[ExportReport]], tmp_path: Path
    ) -> None:
        other = make_namespace(tag="tuned")
        store(tmp_path / "other", other, chain(other, prompt(1, 64)))
        export_snapshot(tmp_path / "other", storage, tag="tuned")

        with pytest.raises(IncompatibleError, match="identity_tag differ") as raised:
            merge_snapshots(storage, ["part-1", "tuned"])
        assert raised.value.fields == ("identity_tag",)
        with pytest.raises(ConfigError):
            merge_snapshots(storage, ["part-1"])

    @pytest.mark.parametrize("kind", ["shards/", "catalogs/"])
    def test_parts_that_lack_something_are_refused(
        self, storage: TimedStorage, parts: tuple[Namespace, list[ExportReport]], kind: str
    ) -> None:
        """What is published is whole (invariant 3), and prune keeps nothing for what isn't."""
        _, reports = parts
        lost = next(name for name in reachable(storage, reports[0].snapshot) if name.startswith(kind))
        storage.delete(lost)
        before = content_of(storage)

        with pytest.raises(CorruptChunkError, match=f"{lost} is missing in memory; export the snapshot again"):
            merge_snapshots(storage, ["part-1", "part-2"], tag="all")

        assert content_of(storage) == before

    def test_looks_once_whatever_is_merged(
        self, storage: TimedStorage, parts: tuple[Namespace, list[ExportReport]]
    ) -> None:
        counting = FaultyStorage(storage)

        merge_snapshots(counting, ["part-1", "part-2", "part-3"], tag="all")

        assert counting.calls.count(Call("list", "shards/")) == 1
        assert not [call for call in counting.calls if call.operation == "head" and call.name.startswith("shards/")]
