"""A snapshot repository in a storage: its names, and how each kind of object is read and written.

    kvsnap.json                       format and features
    shards/ab/<sha256>.safetensors    immutable
    catalogs/<sha256>.parquet         immutable
    manifests/<sha256>.json           immutable; this is the snapshot
    refs/<name>.json                  the only mutable objects

Every digest is checked before the bytes are parsed, every size before they are read.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvsnap.canonical import canonical_json, sha256_hex
from kvsnap.catalog import Catalog, decode_catalog
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, KvsnapError, NotFoundError
from kvsnap.manifest import DIGEST_PREFIX, MAX_MANIFEST_BYTES, Digest, Manifest, decode_manifest, parse_digest
from kvsnap.namespace import FORMAT
from kvsnap.storage import Storage, open_storage

MARKER_NAME = "kvsnap.json"
MAX_SMALL_BYTES = 64 << 10
"""Largest marker or ref that is read."""
KIND = "repository"
FEATURES: Mapping[str, frozenset[str]] = {name: frozenset() for name in ("delete", "read", "verify", "write")}
"""Features of a repository that this version knows, per operation; none yet."""

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ID_PREFIX = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """A movable name for a snapshot."""

    snapshot: Digest
    write_id: str
    """Random; tells whose write it was when an answer got lost."""
    previous: Digest | None
    """What it named before."""
    updated: str
    """RFC 3339, UTC"""


def shard_name(digest: Digest) -> str:
    """Name of a shard in a repository."""
    return f"shards/{digest[:2]}/{digest}.safetensors"


def catalog_name(digest: Digest) -> str:
    """Name of a catalog in a repository."""
    return f"catalogs/{digest}.parquet"


def manifest_name(digest: Digest) -> str:
    """Name of a manifest in a repository."""
    return f"manifests/{digest}.json"


def ref_name(name: str) -> str:
    """Name of a ref's object.

    Raises:
        ConfigError: `name` isn't the name of a ref.
    """
    if _REF.fullmatch(name) is None or _HEX.fullmatch(name) is not None:
        raise ConfigError(
            f"ref name {name!r:.150} is not valid; use 1 to 128 letters, digits, dots, dashes and underscores, "
            "a letter or digit first, and no snapshot id"
        )
    return f"refs/{name}.json"


def split_snapshot_url(text: str) -> tuple[str, str | None]:
    """URL and ref (or id) of `URL@REF`; no ref where nothing follows an `@` in the last segment."""
    url, at, ref = text.rpartition("@")
    if not at or not url or "/" in ref:
        return text, None
    if not ref:
        raise ConfigError(f"{text} ends in @, expected a ref or a snapshot id after it")
    return url, ref


def now_text() -> str:
    """The time as it stands in manifests and refs: RFC 3339, UTC, whole seconds."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Repository:
    """An opened repository. Holds nothing but the storage; any number may be open at once."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.url = storage.url

    @classmethod
    def open(cls, url: str, *, operation: str = "read") -> Repository:
        """Open an existing repository for `operation` (a key of `FEATURES`).

        Raises:
            NotFoundError: there is none at `url`.
            IncompatibleError: it needs a later kvsnap for this operation.
        """
        repository = cls(open_storage(url))
        repository._check_marker(operation)
        return repository

    @classmethod
    def open_or_create(cls, url: str) -> Repository:
        """Open a repository to write to; make one where nothing is yet.

        Raises:
            ConfigError: something else is there.
            IncompatibleError: it needs a later kvsnap to be written to.
        """
        repository = cls(open_storage(url))
        storage = repository.storage
        if storage.is_empty():
            marker = {
                "features": {name: [] for name in FEATURES},
                "format": FORMAT,
                "kind": KIND,
                "store": storage.capabilities().to_json(),
            }
            storage.put_if_absent(MARKER_NAME, canonical_json(marker))
        try:
            repository._check_marker("write")
        except NotFoundError:
            raise ConfigError(f"{url} is not empty and no kvsnap repository; export to a new directory") from None
        return repository

    def _check_marker(self, operation: str) -> None:
        try:
            data = self.storage.get(MARKER_NAME, max_bytes=MAX_SMALL_BYTES)
        except NotFoundError:
            raise NotFoundError(f"there is no kvsnap repository at {self.url}: kvsnap.json is missing") from None
        marker = _object(data, f"kvsnap.json in {self.url}")
        version = marker.get("format")
        if marker.get("kind") != KIND or isinstance(version, bool) or not isinstance(version, int):
            raise ConfigError(f"{self.url} is no kvsnap repository (kvsnap.json names another kind); is it a cache?")
        if version > FORMAT:
            raise IncompatibleError(
                f"repository {self.url} has format version {version}, this kvsnap reads up to {FORMAT}; upgrade kvsnap",
                ("format",),
            )
        features = marker.get("features")
        required = features.get(operation, []) if isinstance(features, dict) else []
        if unknown := sorted({str(name) for name in required} - FEATURES[operation]):
            raise IncompatibleError(
                f"repository {self.url} requires features {', '.join(unknown)[:200]} to {operation}; upgrade kvsnap",
                ("features",),
            )

    def resolve(self, name: str) -> Digest:
        """The snapshot that a ref, an id or the first 8 or more digits of an id names. It may not exist any more.

        Raises:
            NotFoundError: no ref and no snapshot has this name.
            ConfigError: the name isn't valid, or is the start of several ids.
        """
        text = name.removeprefix(DIGEST_PREFIX)
        if _HEX.fullmatch(text):
            return Digest(text)
        if text == name:
            try:
                return self.ref(name).snapshot
            except NotFoundError:
                pass
        found = [digest for digest in self.snapshots() if digest.startswith(text)] if _ID_PREFIX.fullmatch(text) else []
        if len(found) > 1:
            raise ConfigError(f"{name} is the start of {len(found)} snapshot ids in {self.url}; give more digits")
        if not found:
            raise NotFoundError(f"{self.url} has no ref and no snapshot {name}; see `kvsnap list {self.url}`")
        return found[0]

    def snapshots(self) -> list[Digest]:
        """Ids of all snapshots, in order of id."""
        return self._digests("manifests/", ".json")

    def ref_names(self) -> list[str]:
        """Names of all refs, in order."""
        found = []
        for info in self.storage.list("refs/"):
            name = info.name.removeprefix("refs/").removesuffix(".json")
            if _REF.fullmatch(name) and info.name == f"refs/{name}.json":
                found.append(name)
        return found

    def ref(self, name: str) -> Ref:
        """One ref.

        Raises:
            NotFoundError: there is none of this name.
            CorruptChunkError: its object makes no sense.
        """
        try:
            data = self.storage.get(ref_name(name), max_bytes=MAX_SMALL_BYTES)
        except NotFoundError:
            raise NotFoundError(f"{self.url} has no ref {name}; see `kvsnap list {self.url}`") from None
        obj = _object(data, f"ref {name} in {self.url}")
        try:
            return Ref(
                snapshot=parse_digest(obj.get("snapshot")),
                write_id=str(obj.get("write_id")),
                previous=None if obj.get("previous") is None else parse_digest(obj["previous"]),
                updated=str(obj.get("updated")),
            )
        except KvsnapError as error:
            raise CorruptChunkError(f"ref {name} in {self.url} makes no sense: {error}") from None

    def set_ref(self, name: str, snapshot: Digest) -> bool:
        """Make `name` a name of `snapshot`, whose manifest must be there already; False if it is one."""
        try:
            previous: Digest | None = self.ref(name).snapshot
        except NotFoundError:
            previous = None
        if previous == snapshot:
            return False
        ref = {
            "previous": None if previous is None else DIGEST_PREFIX + previous,
            "snapshot": DIGEST_PREFIX + snapshot,
            "updated": now_text(),
            "write_id": secrets.token_hex(16),
        }
        self.storage.put(ref_name(name), canonical_json(ref))
        return True

    def manifest(self, snapshot: Digest) -> Manifest:
        """Read a manifest, digest first.

        Raises:
            NotFoundError: it is not there.
            CorruptChunkError: it is damaged.
            IncompatibleError: it needs a later kvsnap.
        """
        try:
            data = self.storage.get(manifest_name(snapshot), max_bytes=MAX_MANIFEST_BYTES)
        except NotFoundError:
            raise NotFoundError(
                f"snapshot {snapshot[:12]} is not in {self.url}: {manifest_name(snapshot)} is missing; export again"
            ) from None
        return decode_manifest(data, expect=snapshot)

    def catalog(self, manifest: Manifest) -> Catalog:
        """Read a snapshot's catalog: its size, then its digest, and only then Parquet.

        Raises:
            NotFoundError: it is not there.
            CorruptChunkError: it is damaged, or disagrees with the manifest.
        """
        record = manifest.catalog
        name = catalog_name(record.digest)
        try:
            data = self.storage.get(name, max_bytes=record.nbytes)
        except NotFoundError:
            raise NotFoundError(f"catalog {name} is missing in {self.url}; export again") from None
        found = sha256_hex(data)
        if found != record.digest:
            raise CorruptChunkError(
                f"catalog {name} is damaged: expected sha256 {record.digest[:12]}, read {found[:12]}; export again"
            )
        catalog = decode_catalog(
            data,
            num_rows=record.num_rows,
            shard_bytes=[shard.nbytes for shard in manifest.shards],
            what=f"catalog {name}",
        )
        counts = [len(rows) for rows in catalog.rows_of_shards(len(manifest.shards))]
        if counts != [shard.num_chunks for shard in manifest.shards]:
            raise CorruptChunkError(f"catalog {name} and its manifest disagree on the chunks per shard; export again")
        return catalog

    def put_object(self, name: str, data: bytes) -> bool:
        """Store a small immutable object under the name of its digest; False if it is there already.

        Raises:
            CorruptChunkError: something else lies under that name.
        """
        if self.storage.put_if_absent(name, data):
            return True
        if self.storage.head(name).nbytes != len(data) or self.storage.get(name, max_bytes=len(data)) != data:
            raise CorruptChunkError(f"{name} in {self.url} is damaged; delete it and export again")
        return False

    def _digests(self, prefix: str, suffix: str) -> list[Digest]:
        found = []
        for info in self.storage.list(prefix):
            text = info.name.removeprefix(prefix).removesuffix(suffix)
            if _HEX.fullmatch(text) and info.name == prefix + text + suffix:
                found.append(Digest(text))
        return found


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        obj = json.loads(data)
    except (ValueError, RecursionError):
        obj = None
    if not isinstance(obj, dict):
        raise CorruptChunkError(f"{what} is not a JSON object")
    return obj
