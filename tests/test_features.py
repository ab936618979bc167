"""Versions and features: what needs a later kvsnap is refused by name, what doesn't is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvsnap
from kvsnap import features
from kvsnap.canonical import canonical_json, sha256_hex
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError
from kvsnap.features import MARKER_NAME, OPERATIONS, record_features
from kvsnap.listing import list_snapshots
from kvsnap.manifest import Digest, decode_manifest
from kvsnap.refs import remove, tag_snapshot
from kvsnap.repository import Repository
from kvsnap.repository_copy import copy_snapshots
from kvsnap.repository_prune import prune_repository
from kvsnap.snapshot_diff import diff_snapshots
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import MemoryStorage, Storage
from kvsnap.verify import verify_snapshot
from tests.snapshot_fakes import filled_cache


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    filled_cache(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def storage(cache: Path) -> Storage:
    storage = MemoryStorage()
    export_snapshot(cache, storage, tag="prod")
    return storage


def change(storage: Storage, edit: Callable[[dict[str, Any]], object]) -> None:
    marker = json.loads(storage.get(MARKER_NAME, max_bytes=10_000))
    edit(marker)
    storage.put(MARKER_NAME, canonical_json(marker))


def commands(storage: Storage, cache: Path, tmp_path: Path) -> dict[str, list[Callable[[], object]]]:
    """What needs which of the lists."""
    return {
        "read": [
            lambda: list_snapshots(storage),
            lambda: import_snapshot(storage, "prod", tmp_path / "other"),
            lambda: diff_snapshots(storage, "prod", storage, "prod"),
            lambda: copy_snapshots(storage, MemoryStorage()),
        ],
        "write": [
            lambda: export_snapshot(cache, storage),
            lambda: tag_snapshot(storage, "prod", "canary"),
            lambda: copy_snapshots(storage, storage, ref="prod"),
        ],
        "verify": [lambda: verify_snapshot(storage, "prod")],
        "delete": [lambda: prune_repository(storage), lambda: remove(storage, "canary")],
    }


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_feature_stops_what_needs_it_and_nothing_else(
    storage: Storage, cache: Path, tmp_path: Path, operation: str
) -> None:
    def edit(marker: dict[str, Any]) -> None:
        marker["features"][operation] = ["lz4-shards"]
        marker["since"] = {"lz4-shards": "0.9.0"}

    all_commands = commands(storage, cache, tmp_path)
    tag_snapshot(storage, "prod", "canary")
    change(storage, edit)

    for act in all_commands.pop(operation):
        with pytest.raises(IncompatibleError, match=rf"lz4-shards \(kvsnap 0\.9\.0\) to {operation}.*upgrade"):
            act()
    for act in (all_commands.get("verify") or []) + (all_commands.get("delete") or [])[:1]:
        act()


def test_a_later_format_stops_everything(storage: Storage, cache: Path, tmp_path: Path) -> None:
    change(storage, lambda marker: marker.update(format=2))
    message = rf"format version 2, this kvsnap {kvsnap.__version__} reads up"

    for acts in commands(storage, cache, tmp_path).values():
        for act in acts:
            with pytest.raises(IncompatibleError, match=message):
                act()


@pytest.mark.parametrize("lists", [None, [], "read", {"read": "lz4"}, {"read": [7]}, {"read": None}])
def test_lists_that_make_no_sense_are_no_empty_lists(storage: Storage, lists: object) -> None:
    change(storage, lambda marker: marker.update(features=lists))

    with pytest.raises(CorruptChunkError, match="features to read"):
        Repository.open(storage)


def test_what_is_not_known_and_not_required_stays(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version's optional fields, and its lists for operations that this one hasn't."""

    def edit(marker: dict[str, Any]) -> None:
        marker["hints"] = {"prefetch": True}
        marker["features"]["mirror"] = ["x"]
        marker["store"]["object_lambda"] = True

    change(storage, edit)
    before = json.loads(storage.get(MARKER_NAME, max_bytes=10_000))
    monkeypatch.setattr(features, "FEATURES", {name: frozenset({"lz4"}) for name in OPERATIONS})

    assert record_features(storage, {"read": ["lz4"], "verify": ["lz4"]})
    assert not record_features(storage, {"read": ["lz4"]})

    after = json.loads(storage.get(MARKER_NAME, max_bytes=10_000))
    assert after.pop("since") == {"lz4": kvsnap.__version__}
    assert after["features"] == {**before["features"], "read": ["lz4"], "verify": ["lz4"]}
    assert {**after, "features": before["features"]} == before
    Repository.open(storage)


def test_two_recorders_lose_nothing(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """By compare-and-swap: the second one finds the first one's and adds to it."""
    monkeypatch.setattr(features, "FEATURES", {name: frozenset({"a", "b"}) for name in OPERATIONS})
    original = storage.get_versioned

    def raced(name: str, *, max_bytes: int) -> Any:
        found = original(name, max_bytes=max_bytes)
        monkeypatch.setattr(storage, "get_versioned", original)
        record_features(storage, {"read": ["a"]})
        return found

    monkeypatch.setattr(storage, "get_versioned", raced)
    record_features(storage, {"read": ["b"]})

    assert json.loads(storage.get(MARKER_NAME, max_bytes=10_000))["features"]["read"] == ["a", "b"]


def test_a_cache_directory_is_no_repository(tmp_path: Path) -> None:
    storage = MemoryStorage()
    storage.put(MARKER_NAME, canonical_json({"cap_bytes": None, "format": 1, "kind": "cache"}))

    with pytest.raises(ConfigError, match="is it a cache"):
        Repository.open(storage)


class TestManifest:
    def published(self, storage: Storage, **changes: object) -> Digest:
        repository = Repository.open(storage)
        obj = json.loads(repository.manifest_bytes(repository.resolve("prod"))) | changes
        data = canonical_json(obj)
        storage.put(f"manifests/{sha256_hex(data)}.json", data)
        return Digest(sha256_hex(data))

    def test_an_unknown_required_feature_is_refused_by_name_and_writer(self, storage: Storage, tmp_path: Path) -> None:
        snapshot = self.published(storage, required_features=["lz4"], writer={"name": "kvsnap", "version": "9.1"})

        with pytest.raises(IncompatibleError, match=r"written by kvsnap 9\.1.* requires features lz4") as caught:
            import_snapshot(storage, snapshot, tmp_path / "other")

        assert caught.value.fields == ("required_features",)
        assert not (tmp_path / "other").exists()

    @pytest.mark.parametrize("value", [None, "lz4", [None], [["lz4"]], {"lz4": 1}])
    def test_a_list_that_makes_no_sense(self, storage: Storage, value: object) -> None:
        snapshot = self.published(storage, required_features=value)

        with pytest.raises(CorruptChunkError, match="required_features"):
            Repository.open(storage).manifest(snapshot)

    def test_unknown_fields_and_known_features_come_through(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvsnap.manifest.FEATURES", frozenset({"lz4"}))
        snapshot = self.published(storage, required_features=["lz4"], provenance={"job": 7})
        data = Repository.open(storage).manifest_bytes(snapshot)

        assert decode_manifest(data, expect=snapshot).encode() == data

    def test_a_copy_keeps_every_byte(self, storage: Storage) -> None:
        snapshot = self.published(storage, provenance={"job": 7})
        target = MemoryStorage()

        copy_snapshots(storage, target, ref=snapshot)

        assert Repository.open(target).manifest_bytes(snapshot) == Repository.open(storage).manifest_bytes(snapshot)
