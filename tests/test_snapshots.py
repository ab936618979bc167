"""Export, import and verify: the round trip, damage, refusals, repetition."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, KvsnapError, NotFoundError, StorageError
from kvsnap.listing import list_snapshots
from kvsnap.namespace import Namespace
from kvsnap.repository import Repository
from kvsnap.repository_prune import prune_repository
from kvsnap.snapshot_export import ExportReport, export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.snapshot_merge import merge_snapshots
from kvsnap.storage import LocalStorage
from kvsnap.tiers.disk import DiskTier, Shard
from kvsnap.verify import verify_cache_dir, verify_snapshot
from tests.disk_fakes import Snapshot, make_namespace
from tests.snapshot_fakes import DAMAGE, chain, chunks_at, flip, prompt, store


@pytest.fixture
def exported(cache: Path, ns: Namespace, repo: Path) -> ExportReport:
    return export_snapshot(cache, str(repo), tag="prod")


def shards_of(repo: Path) -> list[Path]:
    """The repository's shards, the larger first."""
    return sorted(repo.glob("shards/*/*"), key=lambda path: -path.stat().st_size)


def objects_of(repo: Path) -> dict[str, tuple[int, bytes]]:
    """Everything stored: when it was written, and its bytes."""
    storage = LocalStorage(repo)
    return {info.name: (int(info.modified), storage.get(info.name, max_bytes=1 << 30)) for info in storage.list("")}


class TestRoundTrip:
    def test_imports_every_chunk_bit_by_bit(
        self, cache: Path, ns: Namespace, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        report = import_snapshot(str(repo), "prod", tmp_path / "other")

        assert report.num_chunks == exported.num_chunks == 7
        assert chunks_at(tmp_path / "other", ns) == chunks_at(cache, ns)
        assert verify_snapshot(str(repo), "prod", read_data=True).is_good
        assert verify_cache_dir(tmp_path / "other", read_data=True).is_good

    def test_imported_shards_are_named_by_their_sha256(
        self, ns: Namespace, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        import_snapshot(str(repo), "prod", tmp_path / "other")

        found = {path.name for path in (tmp_path / "other" / ns.dirname / "shards").iterdir()}
        assert found == {path.name for path in shards_of(repo)}

    def test_a_cache_and_a_repository_share_no_inode(
        self, cache: Path, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        """Whoever changes a file on one side must not change the other."""
        import_snapshot(str(repo), "prod", tmp_path / "other")

        assert all(path.stat().st_nlink == 1 for path in tmp_path.rglob("*") if path.is_file())

    def test_import_brings_hits_and_last_use_along(
        self, cache: Path, ns: Namespace, repo: Path, tmp_path: Path
    ) -> None:
        key = chain(ns, prompt(1, 64, shared=128))[0].key
        with DiskTier(cache, ns) as disk:
            disk.store_usage([(key, 7, 1234.5)])
        export_snapshot(cache, str(repo), tag="prod")

        import_snapshot(str(repo), "prod", tmp_path / "other")

        with DiskTier(tmp_path / "other", ns) as disk:
            assert disk.load_usage()[key] == (7, 1234.0)

    def test_a_snapshot_is_found_by_ref_id_and_start_of_the_id(self, repo: Path, exported: ExportReport) -> None:
        repository = Repository.open(str(repo))

        for name in ("prod", exported.snapshot, f"sha256:{exported.snapshot}", exported.snapshot[:8]):
            assert repository.resolve(name) == exported.snapshot
        for name in ("other", exported.snapshot[:7], "0" * 8):
            with pytest.raises(NotFoundError):
                repository.resolve(name)


class TestExport:
    def test_an_unchanged_cache_publishes_nothing_new(self, cache: Path, repo: Path, exported: ExportReport) -> None:
        before = objects_of(repo)

        again = export_snapshot(cache, str(repo), tag="prod")

        assert again.snapshot == exported.snapshot
        assert (again.is_new, again.sent_shards, again.sent_bytes) == (False, 0, 0)
        assert objects_of(repo) == before

    def test_hits_alone_make_no_new_snapshot(
        self, cache: Path, ns: Namespace, repo: Path, exported: ExportReport
    ) -> None:
        with DiskTier(cache, ns) as disk:
            disk.store_usage([(chain(ns, prompt(2, 256, shared=128))[3].key, 9, time.time())])

        assert export_snapshot(cache, str(repo)).snapshot == exported.snapshot

    def test_sends_only_what_is_new(self, cache: Path, ns: Namespace, repo: Path, exported: ExportReport) -> None:
        added = store(cache, ns, chain(ns, prompt(9, 128)))

        again = export_snapshot(cache, str(repo), tag="prod")

        assert again.is_new
        assert again.parent == exported.snapshot
        assert again.sent_bytes == added[0].path.stat().st_size
        assert again.num_chunks == exported.num_chunks + 2
        assert verify_snapshot(str(repo), "prod", read_data=True).is_good
        assert verify_snapshot(str(repo), exported.snapshot, read_data=True).is_good

    def test_sends_again_what_the_repository_lost(self, cache: Path, repo: Path, exported: ExportReport) -> None:
        shards_of(repo)[0].unlink()

        again = export_snapshot(cache, str(repo))

        assert again.snapshot == exported.snapshot
        assert again.sent_shards == 1
        assert verify_snapshot(str(repo), "prod", read_data=True).is_good

    def test_what_is_exported_is_prefix_closed(self, cache: Path, repo: Path) -> None:
        """Invariant 6 and C07: chunks whose ancestors are gone are left out, and counted."""
        ns = make_namespace()
        whole = store(cache, ns, chain(ns, prompt(1, 128)))[0]
        store(cache, ns, chain(ns, prompt(2, 256), start=1))

        report = export_snapshot(cache, str(repo))

        assert report.num_chunks == 2
        assert report.num_broken == 3
        assert [path.stat().st_size for path in shards_of(repo)] == [whole.path.stat().st_size]

    def test_a_chunk_that_hangs_on_no_root_is_left_out(self, cache: Path, repo: Path) -> None:
        """Invariant 6: depth 0 alone doesn't make a root."""
        ns = make_namespace()
        store(cache, ns, chain(ns, prompt(1, 64)), chain(ns, prompt(2, 64), salt="tenant"))

        assert export_snapshot(cache, str(repo)).num_broken == 1

    @pytest.mark.parametrize("scope", ["salted", "lora:0badc0de", "lora:0badc0de,mm,salted"])
    def test_chunks_of_tenants_and_adapters_stay_out_unless_asked_for(
        self, scope: str, cache: Path, ns: Namespace, repo: Path
    ) -> None:
        store(cache, ns, chain(ns, prompt(1, 128), salt="tenant"), scope=scope)

        plain = export_snapshot(cache, str(repo))
        everything = export_snapshot(cache, str(repo), include_salted=True)

        assert (plain.num_chunks, plain.num_salted) == (7, 2)
        assert (everything.num_chunks, everything.num_salted) == (9, 0)
        assert verify_snapshot(str(repo), everything.snapshot, read_data=True).is_good

    def test_hot_takes_what_was_hit_and_its_ancestors(
        self, cache: Path, ns: Namespace, repo: Path, tmp_path: Path
    ) -> None:
        branch = chain(ns, prompt(2, 256, shared=128))
        with DiskTier(cache, ns) as disk:
            disk.store_usage([(branch[2].key, 3, time.time())])

        report = export_snapshot(cache, str(repo), select="hot", tag="hot")
        import_snapshot(str(repo), "hot", tmp_path / "other")

        assert (report.num_chunks, report.num_unselected) == (3, 4)
        assert verify_snapshot(str(repo), "hot", read_data=True).is_good

    @pytest.mark.parametrize("is_twice_here", [False, True])
    def test_more_of_a_shard_that_is_there_already(
        self, is_twice_here: bool, cache: Path, ns: Namespace, repo: Path, tmp_path: Path
    ) -> None:
        """A shard goes as a whole, the first snapshot names a part of it, the second all: once, as one shard."""
        with DiskTier(cache, ns) as disk:
            disk.store_usage([(chain(ns, prompt(2, 256, shared=128))[2].key, 3, time.time())])
        export_snapshot(cache, str(repo), select="hot", tag="hot")
        if is_twice_here:  # as after another engine wrote the same bytes
            for path in shards_of(repo):
                (cache / ns.dirname / "shards" / path.name).write_bytes(path.read_bytes())

        whole = export_snapshot(cache, str(repo), tag="all")
        again = export_snapshot(cache, str(repo), tag="all")

        assert (whole.num_chunks, whole.num_shards, whole.sent_bytes) == (7, 2, 0)
        assert (again.snapshot, again.is_new) == (whole.snapshot, False)
        assert verify_snapshot(str(repo), "all", read_data=True).is_good
        assert import_snapshot(str(repo), "all", tmp_path / "other").num_chunks == 7
        merged = merge_snapshots(str(repo), ["hot", "all"], tag="merged")
        assert verify_snapshot(str(repo), merged.snapshot, read_data=True).is_good
        assert prune_repository(str(repo)).marked_objects == 0

    def test_max_bytes_takes_whole_shards_with_their_ancestors(self, cache: Path, ns: Namespace, repo: Path) -> None:
        """Invariant 6: the hotter shard needs the other one, and both don't fit, so the root's goes."""
        hot, sizes = chain(ns, prompt(2, 256, shared=128))[2:], []
        with DiskTier(cache, ns) as disk:
            disk.store_usage([(chunk.key, 100, time.time()) for chunk in hot])
            sizes = [shard.path.stat().st_size for shard in disk.scan()]

        report = export_snapshot(cache, str(repo), max_bytes=max(sizes))

        assert (report.num_shards, report.num_chunks) == (1, 5)
        assert report.nbytes <= max(sizes)
        with pytest.raises(NotFoundError, match="7 chunks were not selected"):
            export_snapshot(cache, str(repo), max_bytes=1000)

    def test_nothing_but_damage_is_named(self, cache: Path, ns: Namespace, repo: Path) -> None:
        shards = list(cache.rglob("*.safetensors"))
        for path in shards:
            flip(path, -4097)

        with pytest.raises(NotFoundError, match="2 shards are damaged") as raised:
            export_snapshot(cache, str(repo))
        assert all(str(path) in str(raised.value) for path in shards)

    def test_a_damaged_shard_is_left_out_with_what_hangs_on_it(self, cache: Path, ns: Namespace, repo: Path) -> None:
        """A snapshot never holds bytes whose checksum is wrong."""
        added = store(cache, ns, chain(ns, prompt(9, 128)))
        flip(added[0].path, -4097)

        report = export_snapshot(cache, str(repo), tag="prod")

        assert report.num_chunks == 7
        assert added[0].entries[-1].key.hex()[:12] in report.damaged[0]
        assert str(added[0].path) in report.damaged[0]
        assert verify_snapshot(str(repo), "prod", read_data=True).is_good
        assert not verify_snapshot(str(repo), "prod").notes

    def test_several_namespaces_need_a_choice(self, cache: Path, ns: Namespace, repo: Path) -> None:
        other = make_namespace(tag="other")
        store(cache, other, chain(other, prompt(1, 64)))

        with pytest.raises(ConfigError, match=rf"(?s)choose one.*{other.dirname}"):
            export_snapshot(cache, str(repo))
        assert export_snapshot(cache, str(repo), namespace=other.id()[:10]).num_chunks == 1
        assert export_snapshot(cache, str(repo), namespace=ns.dirname).num_chunks == 7

    def test_never_writes_into_what_is_no_repository(self, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "thesis.txt").write_text("precious")
        before = Snapshot.of(tmp_path)

        for target in (tmp_path / "home", cache):
            with pytest.raises(ConfigError):
                export_snapshot(cache, str(target))

        assert Snapshot.of(tmp_path) == before

    @pytest.mark.parametrize(
        "name", ["", "../prod", "a/b", ".hidden", "-x", "a b", "x" * 129, "ä", "0" * 64, "prod\n", "a\0"]
    )
    def test_refuses_wrong_ref_names_before_anything_is_written(
        self, cache: Path, ns: Namespace, repo: Path, name: str
    ) -> None:
        """D17: a ref's name becomes a file's name."""
        with pytest.raises(ConfigError, match="ref name"):
            export_snapshot(cache, str(repo), tag=name)

        assert not repo.exists()

    def test_a_ref_remembers_what_it_named_before(
        self, cache: Path, ns: Namespace, repo: Path, exported: ExportReport
    ) -> None:
        store(cache, ns, chain(ns, prompt(9, 128)))

        again = export_snapshot(cache, str(repo), tag="prod")

        ref = Repository.open(str(repo)).ref("prod")
        assert (ref.snapshot, ref.previous) == (again.snapshot, exported.snapshot)

    def test_a_shard_that_vanishes_meanwhile_is_a_miss(self, cache: Path, ns: Namespace, repo: Path) -> None:
        """An engine may evict while an export runs: what is published is complete all the same."""
        added = store(cache, ns, chain(ns, prompt(9, 128)))
        calls = []

        def evict_one(done: int, total: int) -> None:
            calls.append(done)
            added[0].path.unlink(missing_ok=True)

        report = export_snapshot(cache, str(repo), tag="prod", progress=evict_one)

        assert report.num_chunks + 2 * report.vanished == 9
        assert verify_snapshot(str(repo), "prod", read_data=True).is_good


class TestKilledExport:
    """D01 and invariants 3 and 8."""

    def _killed_after(self, shards: int, cache: Path, repo: Path) -> None:
        """Export in a child that gets SIGKILL once so many shards are durable, or more: they go in parallel."""

        def die(done: int, total: int) -> None:
            nonlocal shards
            shards -= 1
            if shards == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        pid = os.fork()
        if pid == 0:
            try:
                export_snapshot(cache, str(repo), tag="prod", progress=die)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    @pytest.mark.parametrize("shards", [1, 2])
    def test_lists_nothing_and_can_be_repeated(self, cache: Path, ns: Namespace, repo: Path, shards: int) -> None:
        self._killed_after(shards, cache, repo)
        assert list_snapshots(str(repo)).snapshots == ()
        there = len(shards_of(repo))
        assert there >= shards

        report = export_snapshot(cache, str(repo), tag="prod")

        assert report.num_chunks == 7
        assert report.sent_shards == 2 - there
        found = verify_snapshot(str(repo), "prod", read_data=True)
        assert found.is_good
        assert not found.notes

    def test_leaves_an_earlier_snapshot_as_it_was(
        self, cache: Path, ns: Namespace, repo: Path, exported: ExportReport
    ) -> None:
        store(cache, ns, chain(ns, prompt(9, 128)))

        self._killed_after(3, cache, repo)

        assert Repository.open(str(repo)).resolve("prod") == exported.snapshot
        found = verify_snapshot(str(repo), "prod", read_data=True)
        assert found.is_good
        assert "belongs to no snapshot" in found.notes[0]

    def test_temporary_files_are_swept_once_they_are_old(
        self, cache: Path, ns: Namespace, repo: Path, exported: ExportReport
    ) -> None:
        """D10: old ones of dead writers go; fresh ones, foreign ones and symbolic links stay."""
        names = {"old": ".kvsnap-tmp-old", "fresh": ".kvsnap-tmp-fresh", "foreign": "x.tmp", "link": ".kvsnap-tmp-link"}
        for name in ("old", "fresh", "foreign"):
            (repo / names[name]).write_bytes(b"x")
        (repo / names["link"]).symlink_to(repo / "x.tmp")
        os.utime(repo / names["old"], (0, 0))
        os.utime(repo / names["foreign"], (0, 0))

        export_snapshot(cache, str(repo))

        assert {name for name, file in names.items() if (repo / file).is_symlink() or (repo / file).exists()} == {
            "fresh",
            "foreign",
            "link",
        }


class TestPublishOrder:
    def test_nothing_is_named_before_it_is_durable(self, cache: Path, ns: Namespace, repo: Path) -> None:
        """Invariant 3: shards, catalog, manifest, ref; a failure in between leaves nothing that can be listed."""
        for blocked, expected in (("catalogs", []), ("manifests", ["catalogs"]), ("refs", ["catalogs", "manifests"])):
            shutil.rmtree(repo, ignore_errors=True)
            repo.mkdir()
            Repository.open_or_create(str(repo))
            (repo / blocked).write_bytes(b"in the way")

            with pytest.raises(StorageError):
                export_snapshot(cache, str(repo), tag="prod")

            assert len(shards_of(repo)) == 2
            assert [name for name in ("catalogs", "manifests", "refs") if (repo / name).is_dir()] == expected

    def test_a_present_object_is_never_written_again(self, cache: Path, repo: Path, exported: ExportReport) -> None:
        """Invariant 4: immutable objects keep inode and time, whatever happens later."""
        before = Snapshot.of(repo)

        export_snapshot(cache, str(repo), select="all", max_bytes=10**9)
        export_snapshot(cache, str(repo), tag="other")

        after = Snapshot.of(repo).files
        files = {name: entry for name, entry in before.files.items() if entry[3] is not None}
        assert {name: after[name] for name in files} == files


class TestDamage:
    """Whatever happens to an object, it is found, named, and never imported."""

    @pytest.mark.parametrize("kind", sorted(DAMAGE))
    def test_of_a_shard(self, repo: Path, exported: ExportReport, tmp_path: Path, kind: str) -> None:
        shard = shards_of(repo)[0]
        DAMAGE[kind](shard)

        report = verify_snapshot(str(repo), "prod", read_data=True)
        with pytest.raises(CorruptChunkError, match=shard.stem) as caught:
            import_snapshot(str(repo), "prod", tmp_path / "other")

        assert {problem.object for problem in report.problems} == {f"shards/{shard.stem[:2]}/{shard.name}"}
        assert report.problems[0].kind == ("missing" if kind == "deleted" else "damaged")
        assert not list((tmp_path / "other").rglob(f"{shard.stem}*"))
        assert ("missing" in str(caught.value)) == (kind == "deleted")

    def test_of_a_byte_names_shard_and_chunk(self, repo: Path, exported: ExportReport, tmp_path: Path) -> None:
        shard = shards_of(repo)[0]
        flip(shard, -4097)
        repository = Repository.open(str(repo))
        catalog = repository.catalog(repository.manifest(exported.snapshot))
        last = {int(catalog.offset[row] + catalog.nbytes[row]): catalog.key_of(row).hex() for row in range(7)}
        key = last[shard.stat().st_size]

        problems = verify_snapshot(str(repo), "prod", read_data=True).problems
        with pytest.raises(CorruptChunkError, match=f"{shard.stem}.*{key[:12]}"):
            import_snapshot(str(repo), "prod", tmp_path / "other")

        assert [problem.chunk for problem in problems] == [key]
        assert verify_snapshot(str(repo), "prod").is_good, "only --read-data reads data"

    @pytest.mark.parametrize("kind", sorted(DAMAGE))
    @pytest.mark.parametrize("what", ["catalogs", "manifests"])
    def test_of_catalog_or_manifest_touches_nothing(
        self, repo: Path, exported: ExportReport, tmp_path: Path, what: str, kind: str
    ) -> None:
        path = next((repo / what).iterdir())
        DAMAGE[kind](path)

        report = verify_snapshot(str(repo), "prod")
        with pytest.raises(CorruptChunkError, match=f"{what}/{path.name}"):
            import_snapshot(str(repo), "prod", tmp_path / "other")

        assert [problem.kind for problem in report.problems] == ["missing" if kind == "deleted" else "damaged"]
        assert not (tmp_path / "other").exists()

    @pytest.mark.parametrize("kind", ["garbage", "empty", "longer"])
    def test_of_a_ref(self, repo: Path, exported: ExportReport, kind: str) -> None:
        DAMAGE[kind](repo / "refs" / "prod.json")

        with pytest.raises(CorruptChunkError, match="ref prod"):
            verify_snapshot(str(repo), "prod")
        assert [row.snapshot for row in list_snapshots(str(repo)).snapshots] == [exported.snapshot]
        assert "ref prod" in list_snapshots(str(repo)).problems[0]

    def test_three_kinds_of_incomplete_have_three_messages(self, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        """D05: manifest gone, shard gone, shard without a manifest."""
        messages = []
        for kind in ("manifest", "shard", "stray"):
            repo = tmp_path / kind
            export_snapshot(cache, str(repo), tag="prod")
            if kind == "manifest":
                next((repo / "manifests").iterdir()).unlink()
            elif kind == "shard":
                shards_of(repo)[0].unlink()
            else:
                (repo / "shards" / "ff").mkdir(exist_ok=True)
                (repo / "shards" / "ff" / f"{'f' * 64}.safetensors").write_bytes(b"stray")
            report = verify_snapshot(str(repo), "prod")
            messages.append(report.problems[0].message if report.problems else report.notes[0])
            assert report.is_good == (kind == "stray")

        assert "ref prod names a snapshot that is gone" in messages[0]
        assert "is missing" in messages[1]
        assert "belongs to no snapshot" in messages[2]

    def test_the_whole_part_is_imported_when_asked_for(
        self, ns: Namespace, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        """D05: the part that hangs together from the root is usable."""
        flip(shards_of(repo)[1], -4097)

        report = import_snapshot(str(repo), "prod", tmp_path / "other", allow_partial=True)

        assert report.num_chunks == 5
        assert len(report.problems) == 1
        assert len(chunks_at(tmp_path / "other", ns)) == 5

    def test_nothing_that_hangs_on_a_damaged_shard_is_imported(
        self, ns: Namespace, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        """Invariant 6: the second shard's chunks have their ancestors in the first."""
        shards_of(repo)[0].unlink()

        report = import_snapshot(str(repo), "prod", tmp_path / "other", allow_partial=True)

        assert (report.num_chunks, report.imported_shards) == (0, 0)

    def test_in_a_cache_directory_is_found_and_named(self, cache: Path, ns: Namespace) -> None:
        shard = max((cache / ns.dirname / "shards").iterdir(), key=lambda path: path.stat().st_size)
        assert verify_cache_dir(cache, read_data=True).is_good

        flip(shard, -4097)

        assert verify_cache_dir(cache).is_good
        problems = verify_cache_dir(cache, read_data=True).problems
        assert [problem.object for problem in problems] == [str(shard)]
        assert problems[0].chunk is not None
        flip(shard, 200)
        assert str(shard) in verify_cache_dir(cache).problems[0].message


class TestImport:
    def test_can_be_repeated(self, repo: Path, exported: ExportReport, tmp_path: Path) -> None:
        import_snapshot(str(repo), "prod", tmp_path / "other")

        again = import_snapshot(str(repo), "prod", tmp_path / "other")

        assert (again.imported_shards, again.present_shards, again.num_chunks) == (0, 2, 7)

    def test_goes_on_where_it_stopped(self, repo: Path, ns: Namespace, exported: ExportReport, tmp_path: Path) -> None:
        """Killed half-way: what is there is a valid part, and only the rest is fetched."""

        def die(done: int, total: int) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        pid = os.fork()
        if pid == 0:
            try:
                import_snapshot(str(repo), "prod", tmp_path / "other", progress=die)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        assert verify_cache_dir(tmp_path / "other", read_data=True).is_good

        report = import_snapshot(str(repo), "prod", tmp_path / "other")

        assert (report.present_shards, report.imported_shards, report.num_chunks) == (1, 1, 7)
        assert not list((tmp_path / "other" / ns.dirname / "tmp").iterdir())

    def test_own_snapshot_is_there_already(self, cache: Path, repo: Path, exported: ExportReport) -> None:
        """A restart with `snapshot` set must not bring a second copy of every chunk."""
        report = import_snapshot(str(repo), "prod", cache)

        assert (report.imported_shards, report.present_shards) == (0, 2)

    def test_max_bytes_takes_the_hottest_whole_shards(
        self, ns: Namespace, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        """Invariant 6: what is there is prefix-closed."""
        budget = shards_of(repo)[0].stat().st_size

        for _ in range(2):
            report = import_snapshot(str(repo), "prod", tmp_path / "other", max_bytes=budget)

        assert (report.chosen_shards, report.num_chunks) == (1, 5)
        assert len(chunks_at(tmp_path / "other", ns)) == 5

    def test_what_was_there_before_counts_beyond_max_bytes(
        self, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        whole = import_snapshot(str(repo), "prod", tmp_path / "other")
        again = import_snapshot(str(repo), "prod", tmp_path / "other", max_bytes=shards_of(repo)[0].stat().st_size)

        assert (again.chosen_shards, again.num_chunks, again.num_tokens) == (1, whole.num_chunks, whole.num_tokens)

    def test_obeys_the_cap_that_the_directory_has(
        self, ns: Namespace, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        """Invariant 7: jobs obey the cap that the engine recorded."""
        cap = shards_of(repo)[0].stat().st_size + (400 << 10)
        DiskTier(tmp_path / "other", ns, cap_bytes=cap).close()

        report = import_snapshot(str(repo), "prod", tmp_path / "other")

        assert report.is_full == (report.imported_shards < 2)
        assert sum(path.lstat().st_blocks * 512 for path in (tmp_path / "other").rglob("*")) <= cap

    def test_an_engine_that_imports_for_itself_finds_the_shards(
        self, ns: Namespace, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        """What is imported must be reported as new, also to the tier that did it."""
        with DiskTier(tmp_path / "other", ns, cap_bytes=1 << 30) as disk:
            assert list(disk.scan()) == []

            import_snapshot(str(repo), "prod", tmp_path / "other", expect=ns, tier=disk)

            assert {shard.id for shard in disk.poll()[0]} == {path.stem for path in shards_of(repo)}

    def test_an_engine_makes_room_for_its_snapshot(
        self, ns: Namespace, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        """A directory full of older chunks of the same engine takes the snapshot all the same."""
        cap = 2 * sum(path.stat().st_size for path in shards_of(repo)) + (400 << 10)
        with DiskTier(tmp_path / "other", ns, cap_bytes=cap) as disk:
            old: list[Shard] = []
            while shard := disk.write("", chain(ns, prompt(100 + len(old), 256))):
                old.append(shard)
            disk.evict = lambda nbytes: disk.drop(old.pop().id) if old else 0

            report = import_snapshot(str(repo), "prod", tmp_path / "other", expect=ns, tier=disk)

        assert report.num_chunks == 7
        assert not report.is_full

    def test_dry_run_touches_nothing(self, repo: Path, exported: ExportReport, tmp_path: Path) -> None:
        before = Snapshot.of(tmp_path)

        report = import_snapshot(str(repo), "prod", tmp_path / "other", dry_run=True)

        assert (report.imported_shards, report.num_chunks) == (2, 7)
        assert Snapshot.of(tmp_path) == before

    def test_of_a_sibling_fine_tune_is_refused(self, repo: Path, exported: ExportReport, tmp_path: Path) -> None:
        """A02: same shapes, same config, other weights."""
        other = make_namespace(tag="instruct")

        with pytest.raises(IncompatibleError, match="identity_tag") as caught:
            import_snapshot(str(repo), "prod", tmp_path / "other", expect=other)

        assert caught.value.fields == ("identity_tag",)
        assert not (tmp_path / "other").exists()

    def test_for_another_layout_names_the_field(self, repo: Path, exported: ExportReport, tmp_path: Path) -> None:
        with pytest.raises(IncompatibleError) as caught:
            import_snapshot(str(repo), "prod", tmp_path / "other", expect=make_namespace(layers=4, chunk_tokens=32))

        assert caught.value.fields == ("layout.slices", "chunk_tokens")


class TestUntrusted:
    """D17 and D18: what a stranger's repository may try."""

    def _publish(self, repo: Path, manifest: dict[str, object]) -> str:
        from kvsnap.canonical import canonical_json, sha256_hex

        data = canonical_json(manifest)
        snapshot = sha256_hex(data)
        (repo / "manifests" / f"{snapshot}.json").write_bytes(data)
        return snapshot

    def _manifest(self, repo: Path) -> dict[str, object]:
        loaded: dict[str, object] = json.loads(next((repo / "manifests").iterdir()).read_bytes())
        return loaded

    @pytest.mark.parametrize(
        "digest",
        ["sha256:../../x", "sha256:/etc/passwd", "../../x", "sha256:" + "A" * 64, "sha256:" + "0" * 63 + "/", 7, None],
    )
    def test_names_that_are_no_digests_are_refused(
        self, repo: Path, exported: ExportReport, tmp_path: Path, digest: object
    ) -> None:
        """D17: a shard's path comes from the manifest."""
        manifest = self._manifest(repo)
        manifest["shards"][0]["digest"] = digest  # type: ignore[index]
        snapshot = self._publish(repo, manifest)

        with pytest.raises(CorruptChunkError, match="digest"):
            import_snapshot(str(repo), snapshot, tmp_path / "other")

        assert not (tmp_path / "other").exists()

    @pytest.mark.parametrize(
        ("field", "value"),
        [("bytes", -1), ("bytes", 2**50), ("bytes", "12"), ("bytes", True), ("bytes", None), ("chunks", 2**40)],
    )
    def test_sizes_are_capped(
        self, repo: Path, exported: ExportReport, tmp_path: Path, field: str, value: object
    ) -> None:
        """D18"""
        manifest = self._manifest(repo)
        manifest["shards"][0][field] = value  # type: ignore[index]
        snapshot = self._publish(repo, manifest)

        with pytest.raises(KvsnapError):
            import_snapshot(str(repo), snapshot, tmp_path / "other")

        assert not (tmp_path / "other").exists()

    @pytest.mark.parametrize(
        "data",
        [b"", b"[]", b"null", b"{", b"[" * 100_000, b'{"a":1,"a":2}', b'{"format":1}', b'{"format":1.5}', b"\xff\xfe"],
    )
    def test_a_manifest_of_garbage_is_refused(self, repo: Path, exported: ExportReport, data: bytes) -> None:
        from kvsnap.canonical import sha256_hex

        snapshot = sha256_hex(data)
        (repo / "manifests" / f"{snapshot}.json").write_bytes(data)

        with pytest.raises(CorruptChunkError):
            Repository.open(str(repo)).manifest(Repository.open(str(repo)).resolve(snapshot))

    def test_a_later_format_is_told_from_damage(self, repo: Path, exported: ExportReport) -> None:
        manifest = self._manifest(repo)
        repository = Repository.open(str(repo))
        later = self._publish(repo, {**manifest, "format": 2})
        needy = self._publish(repo, {**manifest, "required_features": ["lz4"]})
        extended = self._publish(repo, {**manifest, "x_note": "kept"})

        with pytest.raises(IncompatibleError, match=r"format version 2.*upgrade"):
            repository.manifest(repository.resolve(later))
        with pytest.raises(IncompatibleError, match="lz4"):
            repository.manifest(repository.resolve(needy))
        assert repository.manifest(repository.resolve(extended)).to_json()["x_note"] == "kept"

    def test_an_identity_that_is_not_the_hash_of_its_fields_can_not_be_given(
        self, repo: Path, exported: ExportReport, tmp_path: Path
    ) -> None:
        """Invariant 1: the namespace is computed from the fields; shards of another don't get in."""
        manifest = self._manifest(repo)
        manifest["model"]["identity"]["weights"] = "dummy:1"  # type: ignore[index]
        snapshot = self._publish(repo, manifest)

        with pytest.raises(CorruptChunkError, match=r"identity|namespace"):
            import_snapshot(str(repo), snapshot, tmp_path / "other")

        assert not list((tmp_path / "other").rglob("*.safetensors"))

    @pytest.mark.parametrize("what", ["shard", "directory"])
    def test_symbolic_links_in_a_repository_are_not_followed(
        self, repo: Path, exported: ExportReport, tmp_path: Path, what: str
    ) -> None:
        """D17"""
        shard = shards_of(repo)[0]
        moved = shard if what == "shard" else shard.parent
        moved.rename(tmp_path / "elsewhere")
        moved.symlink_to(tmp_path / "elsewhere")

        with pytest.raises(StorageError, match="symbolic link"):
            import_snapshot(str(repo), "prod", tmp_path / "other")

        assert not verify_snapshot(str(repo), "prod").is_good
        assert not (tmp_path / "other").exists()

    @pytest.mark.parametrize("length", [2**63, 2**31, 40 << 20, 0, 4089])
    def test_a_shard_with_a_hostile_header_length_is_refused(
        self, repo: Path, exported: ExportReport, tmp_path: Path, length: int
    ) -> None:
        """D18: nothing is allocated for a header that can't be one, and nothing is unpickled."""
        shard = shards_of(repo)[0]
        with shard.open("r+b") as file:
            file.write(length.to_bytes(8, "little"))

        assert shard.name in verify_snapshot(str(repo), "prod").problems[0].object
        with pytest.raises(CorruptChunkError, match=shard.stem):
            import_snapshot(str(repo), "prod", tmp_path / "other")
