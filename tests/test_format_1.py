"""What a kvsnap of format 1 wrote is read by this one.

`tests/data/format-1` was written once and is never written again: should a test here fail, users' caches
and snapshots can't be read any more. `tests/data/make_format_1.py` made it (docs/format.md, section 9).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvsnap.errors import UntrustedError
from kvsnap.listing import list_snapshots
from kvsnap.refs import ref_history, tag_snapshot
from kvsnap.repository import Repository
from kvsnap.repository_copy import copy_snapshots
from kvsnap.repository_prune import prune_repository
from kvsnap.snapshot_diff import diff_snapshots
from kvsnap.snapshot_export import export_snapshot, match_namespaces
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import MemoryStorage
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.engines import live_engines, read_records
from kvsnap.trust import TrustedKeys, read_trusted_keys
from kvsnap.verify import verify_cache_dir, verify_snapshot
from tests.disk_fakes import Snapshot
from tests.format_reader import Prompt, read_cache, read_repository
from tests.snapshot_fakes import chunks_at

GOLDEN = Path(__file__).parent / "data" / "format-1"
MAX_GOLDEN_BYTES = 300 << 10
EXPECTED: dict[str, Any] = json.loads((GOLDEN / "expected.json").read_text())
PROMPTS = [Prompt(**prompt) for prompt in EXPECTED["prompts"]]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "cache", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "repository", tmp_path / "repo")
    return tmp_path / "repo"


def keys_of(prompts: list[int]) -> set[str]:
    """Keys of the chunks that some of the prompts brought, in the order of `expected.json`."""
    prompt_of = [0, 0, 0, 0, 1, 2, 2, 3]
    return {key for key, i in zip(EXPECTED["order"], prompt_of, strict=True) if i in prompts}


def test_it_is_small_enough_to_be_kept() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < MAX_GOLDEN_BYTES


class TestCacheDirectory:
    def test_verifies_at_each_step(self) -> None:
        before = Snapshot.of(GOLDEN / "cache")
        for step in ({"quick": True}, {}, {"sample": 1.0}, {"read_data": True}):
            report = verify_cache_dir(GOLDEN / "cache", **step)
            assert (report.problems, report.notes) == ([], [])
        assert report.num_chunks == len(EXPECTED["chunks"])
        assert Snapshot.of(GOLDEN / "cache") == before

    def test_every_chunk_and_its_use_is_found(self, cache: Path) -> None:
        ((_, ns),) = match_namespaces(cache)
        assert ns.id() == EXPECTED["namespace"]
        with DiskTier(cache, ns, cap_bytes=1 << 30) as disk:
            entries = {entry.key.hex(): (shard.scope, entry) for shard in disk.scan() for entry in shard.entries}
            usage = {key.hex(): value for key, value in disk.load_usage().items()}

        found = {
            key: {"depth": e.depth, "scope": scope, "tokens": e.tokens, "xxh3": e.xxh3.hex()}
            for key, (scope, e) in entries.items()
        }
        assert found == EXPECTED["chunks"]
        assert usage[EXPECTED["order"][0]] == (3, 1_760_000_000.5)
        assert chunks_at(cache, ns).keys() == {bytes.fromhex(key) for key in EXPECTED["chunks"]}

    def test_the_engine_is_known_and_known_to_be_gone(self, cache: Path) -> None:
        ((directory, _),) = match_namespaces(cache)

        assert [record.engine_id for record in read_records(directory)] == ["golden-1"]
        assert live_engines(cache) == []

    def test_is_exported(self, cache: Path) -> None:
        storage = MemoryStorage()

        report = export_snapshot(cache, storage, tag="prod", include_salted=True)

        assert report.num_chunks == len(EXPECTED["chunks"])
        assert verify_snapshot(storage, "prod", read_data=True).is_good

    def test_another_reader_agrees(self) -> None:
        assert {key.hex() for key in read_cache(GOLDEN / "cache", PROMPTS).chunks} == EXPECTED["chunks"].keys()


class TestRepository:
    def test_verifies_at_each_step(self) -> None:
        before = Snapshot.of(GOLDEN / "repository")
        for ref in ("prod", "first", EXPECTED["snapshots"]["removed"]):
            for step in ({"quick": True}, {}, {"sample": 1.0}, {"read_data": True}):
                report = verify_snapshot(str(GOLDEN / "repository"), ref, **step)
                assert (report.problems, report.notes) == ([], [])
        assert Snapshot.of(GOLDEN / "repository") == before

    def test_refs_history_and_lists(self) -> None:
        url, snapshots = str(GOLDEN / "repository"), EXPECTED["snapshots"]

        listed = {row.snapshot: row.refs for row in list_snapshots(url).snapshots}

        assert listed == {snapshots["prod"]: ("prod",), snapshots["first"]: ("first",)}
        assert [row.snapshot for row in ref_history(url, "prod")] == [snapshots["prod"], snapshots["first"]]
        assert diff_snapshots(url, "first", url, "prod") is not None

    @pytest.mark.parametrize(("ref", "prompts"), [("first", [0]), ("prod", [0, 1, 2])])
    def test_is_imported_chunk_by_chunk(self, tmp_path: Path, ref: str, prompts: list[int]) -> None:
        import_snapshot(str(GOLDEN / "repository"), ref, tmp_path / "other")

        ((_, ns),) = match_namespaces(tmp_path / "other")
        chunks = chunks_at(tmp_path / "other", ns)
        assert {key.hex() for key in chunks} == keys_of(prompts)
        assert ns.id() == EXPECTED["namespace"]
        assert chunks.items() <= chunks_at(GOLDEN / "cache", ns).items()

    def test_its_signature_counts(self, tmp_path: Path) -> None:
        pytest.importorskip("cryptography")
        trusted = TrustedKeys(names=read_keys(tmp_path).names, source="golden")

        assert verify_snapshot(str(GOLDEN / "repository"), "prod", trusted=trusted).signed_by == "golden"
        with pytest.raises(UntrustedError, match="not signed"):
            import_snapshot(str(GOLDEN / "repository"), "first", tmp_path / "other", trusted=trusted)

    def test_is_written_to_copied_and_pruned(self, repo: Path, cache: Path) -> None:
        """An older repository stays one that everybody of its format can use."""
        url, removed = str(repo), EXPECTED["snapshots"]["removed"]
        more = export_snapshot(cache, url, tag="next", include_salted=True)
        tag_snapshot(url, removed, "back")
        copied = MemoryStorage()
        copy_snapshots(url, copied)
        prune_repository(url, grace_s=0)
        prune_repository(url, grace_s=0)

        for storage in (url, copied):
            for ref in ("first", "prod", "next", "back"):
                assert verify_snapshot(storage, ref, read_data=True).is_good
        assert more.parent in EXPECTED["snapshots"].values()
        assert more.sent_shards == 1, "what the golden repository has is not sent again"
        assert Repository.open(url).resolve("back") == removed

    def test_another_reader_agrees(self) -> None:
        found = read_repository(GOLDEN / "repository", PROMPTS)

        assert {key.hex() for key in found.chunks} == keys_of([0, 1, 2])


def read_keys(folder: Path) -> TrustedKeys:
    """From a copy: a checkout may be writable by all."""
    shutil.copyfile(GOLDEN / "trusted_keys", folder / "trusted_keys")
    (folder / "trusted_keys").chmod(0o644)
    return read_trusted_keys(folder / "trusted_keys")
