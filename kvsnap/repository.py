"""A snapshot repository in a storage: its names, and how each kind of object is read and written.

    kvsnap.json                       format and features
    shards/ab/<sha256>.safetensors    immutable
    catalogs/<sha256>.parquet         immutable
    manifests/<sha256>.json           immutable; this is the snapshot
    manifests/<sha256>.sig            who signed it (see `kvsnap.signing`)
    refs/<name>.json                  names of snapshots
    leases/  gc/                      who writes, and what is to be deleted

Every digest is checked before the bytes are parsed, every size before they are read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any

from kvsnap.canonical import canonical_json, sha256_hex
from kvsnap.catalog import Catalog, decode_catalog
from kvsnap.damage import damaged, damaged_manifest, damaged_marker, damaged_ref, dangling, missing, missing_marker
from kvsnap.errors import ConfigError, CorruptChunkError, KvsnapError, NotFoundError
from kvsnap.features import FEATURES as FEATURES  # re-exported
from kvsnap.features import KIND, check_marker, decode_marker
from kvsnap.features import MARKER_NAME as MARKER_NAME
from kvsnap.manifest import (
    DIGEST_PREFIX,
    MAX_MANIFEST_BYTES,
    Digest,
    Manifest,
    decode_manifest,
    parse_digest,
)
from kvsnap.namespace import FORMAT
from kvsnap.signing import check_signed
from kvsnap.storage import Capabilities, LocalStorage, RefusedError, Storage, open_storage, probe_storage
from kvsnap.storage.wrapper import WrapperStorage
from kvsnap.trust import TrustedKeys

log = logging.getLogger(__name__)

MAX_SMALL_BYTES = 64 << 10
"""Largest marker or ref that is read."""
MAX_HISTORY = 100
"""Earlier states that a ref remembers."""
PROBE_PREFIX = "gc/probe-"
"""What a probe of the storage leaves when it is killed; see `kvsnap.storage.probe`."""

_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_ID_PREFIX = re.compile(r"[0-9a-f]{8,64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefChange:
    """An earlier state of a ref."""

    snapshot: Digest
    updated: str
    """Since when it named this; RFC 3339, UTC"""


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
    history: tuple[RefChange, ...] = ()
    """What it named before, the latest first; not more than `MAX_HISTORY`."""


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
    """URL and ref (or id) of `URL@REF`; no ref where nothing follows an `@` in the last segment.

    Options may stand before or after the ref: `s3://bucket/prefix?region=x@REF`, `s3://bucket/prefix@REF?region=x`.
    """
    head, mark, query = text.partition("?")
    if mark and text.startswith("s3://") and "@" in head.rpartition("/")[2]:
        url, ref = split_snapshot_url(head)
        return f"{url}?{query}", ref
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
    def open(cls, url: str | Storage, *, operation: str = "read", single_writer: bool = False) -> Repository:
        """Open an existing repository for `operation` (a key of `FEATURES`).

        Args:
            url: Where it is; or its storage, already open.
            single_writer: The caller's word that nobody else writes to it or prunes it. Needed to write to a store
                that ignores the conditions of conditional requests, where two writers overwrite each other in silence.

        Raises:
            NotFoundError: there is none at `url`.
            IncompatibleError: it needs a later kvsnap for this operation.
            ConfigError: its store is fit for a single writer only.
        """
        repository = cls(open_storage(url) if isinstance(url, str) else url)
        repository._check_marker(operation, single_writer=single_writer)
        return repository

    @classmethod
    def open_or_create(cls, url: str | Storage, *, single_writer: bool = False) -> Repository:
        """Open a repository to write to; make one where nothing is yet, having tried out what the store does.

        Raises:
            ConfigError: something else is there; the store is fit for a single writer only (see `open`).
            IncompatibleError: it needs a later kvsnap to be written to.
        """
        repository = cls(open_storage(url) if isinstance(url, str) else url)
        storage = repository.storage
        if _is_fresh(storage):
            marker = {
                "features": {name: [] for name in FEATURES},
                "format": FORMAT,
                "kind": KIND,
                "store": _capabilities(storage).to_json(),
            }
            storage.put_if_absent(MARKER_NAME, canonical_json(marker))
        try:
            repository._check_marker("write", single_writer=single_writer)
        except NotFoundError:
            raise ConfigError(
                f"{repository.url} is not empty and no kvsnap repository; export to a new directory"
            ) from None
        return repository

    def _check_marker(self, operation: str, *, single_writer: bool) -> None:
        data = self._marker_bytes()
        if data is None and self._has_snapshots():
            data = self._marker_bytes()  # the first export may have made all of it in between
            if data is None:
                raise missing_marker(self.url)
        if data is None:
            raise NotFoundError(f"there is no kvsnap repository at {self.url}: kvsnap.json is missing")
        marker = decode_marker(data, self.url)
        check_marker(marker, operation, self.url)
        try:
            found = Capabilities.from_json(marker.get("store"))
        except CorruptChunkError as error:
            raise damaged_marker(self.url, str(error)) from None
        self.storage.use(found)  # to read, too: one that ignores ranges sends whole objects, to be skipped into
        if operation in ("write", "delete"):
            self._check_store(found, single_writer=single_writer)

    def _marker_bytes(self) -> bytes | None:
        try:
            return self.storage.get(MARKER_NAME, max_bytes=MAX_SMALL_BYTES)
        except NotFoundError:
            return None
        except CorruptChunkError as error:  # larger than any
            raise damaged_marker(self.url, str(error)) from None

    def _has_snapshots(self) -> bool:
        try:
            return bool(self.snapshots())
        except RefusedError:  # who may not list isn't told
            return False

    def _check_store(self, found: Capabilities, *, single_writer: bool) -> None:
        lacking = [name for name in ("conditional_create", "conditional_replace") if not getattr(found, name)]
        if not lacking:
            return
        what = f"the store of {self.url} ignores conditional requests (it lacks {' and '.join(lacking)})"
        if not single_writer:
            raise ConfigError(
                f"{what}: two writers, or a writer and a prune, would destroy each other's work in silence; use "
                "another store, or make sure that nobody else writes and say so with --single-writer"
            )
        log.warning("kvsnap: %s: nobody else may write to it or prune it now, or snapshots are lost", what)

    def resolve(self, name: str) -> Digest:
        """The snapshot that a ref, an id or the first 8 or more digits of an id names. It may not exist any more.

        Raises:
            NotFoundError: no ref and no snapshot has this name.
            ConfigError: the name isn't valid, is the start of several ids, or is a ref's and the start of another
                snapshot's id.
        """
        text = name.removeprefix(DIGEST_PREFIX)
        if _HEX.fullmatch(text):
            return Digest(text)
        named = None
        if text == name:
            with suppress(NotFoundError):
                named = self.ref(name).snapshot
        found = []
        if _ID_PREFIX.fullmatch(text):
            try:
                found = [digest for digest in self.snapshots() if digest.startswith(text)]
            except RefusedError:  # who may not list goes by refs and whole ids
                if named is None:
                    raise
        if named is not None:
            if others := set(found) - {named}:
                raise ConfigError(
                    f"{name} is a ref of {self.url}, and the start of snapshot id {min(others)}; write a whole id "
                    "(sha256:…)"
                )
            return named
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
        return decode_ref(data, name, self.url)

    def refs(self, tell: Callable[[CorruptChunkError], None] | None = None) -> dict[str, Ref]:
        """All refs by name, in order; those that somebody removes meanwhile are left out.

        Args:
            tell: Told of each one that is damaged, which is then left out.

        Raises:
            CorruptChunkError: the object of one makes no sense.
        """
        found = {}
        for name in self.ref_names():
            try:
                found[name] = self.ref(name)
            except NotFoundError:
                continue
            except CorruptChunkError as error:
                if tell is None:
                    raise
                tell(error)
        return found

    def open_snapshot(self, name: str, *, trusted: TrustedKeys | None = None) -> tuple[Digest, Manifest]:
        """The snapshot that a ref, an id or the start of an id names, and its manifest.

        Raises:
            NotFoundError: nothing has this name.
            MissingObjectError: a ref has it, and the manifest that it names is gone.
            CorruptChunkError, UntrustedError, IncompatibleError: see `manifest`.
        """
        snapshot = self.resolve(name)
        try:
            return snapshot, self.manifest(snapshot, trusted=trusted)
        except NotFoundError:
            if not self.is_ref(name):
                raise
            latest = self.resolve(name)  # it may have moved, and a prune may have taken what it named before
            if latest == snapshot:
                raise dangling(name, manifest_name(snapshot), self.url) from None
            return latest, self.manifest(latest, trusted=trusted)

    def is_ref(self, name: str) -> bool:
        """Whether there is a ref of this name."""
        try:
            self.ref(name)
        except (ConfigError, NotFoundError):
            return False
        return True

    def manifest(self, snapshot: Digest, *, trusted: TrustedKeys | None = None) -> Manifest:
        """Read a manifest: its digest first, with `trusted` then who signed it, and only then what it says.

        Raises:
            NotFoundError: it is not there.
            CorruptChunkError: it is damaged.
            UntrustedError: none of `trusted` signed it.
            IncompatibleError: it needs a later kvsnap.
        """
        data = self.manifest_bytes(snapshot)
        if trusted is not None:
            check_signed(self.storage, data, trusted)
        try:
            return decode_manifest(data, expect=snapshot)
        except CorruptChunkError as error:
            raise damaged_manifest(manifest_name(snapshot), snapshot, self.url, str(error)) from None

    def manifest_bytes(self, snapshot: Digest) -> bytes:
        """The bytes of a manifest, by their digest the right ones.

        Raises:
            NotFoundError: it is not there.
            CorruptChunkError: it is damaged.
        """
        try:
            data = self.storage.get(manifest_name(snapshot), max_bytes=MAX_MANIFEST_BYTES)
        except NotFoundError:
            raise NotFoundError(f"{self.url} has no snapshot {snapshot}; see `kvsnap list {self.url}`") from None
        except CorruptChunkError as error:  # larger than any
            raise damaged_manifest(manifest_name(snapshot), snapshot, self.url, str(error)) from None
        if (found := sha256_hex(data)) != snapshot:
            raise damaged_manifest(
                manifest_name(snapshot), snapshot, self.url, f"expected sha256 {snapshot[:12]}, read {found[:12]}"
            )
        return data

    def catalog_bytes(self, manifest: Manifest) -> bytes:
        """The bytes of a snapshot's catalog, by size and digest the right ones.

        Raises:
            MissingObjectError: it is not there.
            CorruptChunkError: it is damaged.
        """
        record = manifest.catalog
        name = catalog_name(record.digest)
        try:
            data = self.storage.get(name, max_bytes=record.nbytes)
        except NotFoundError:
            raise missing(name, self.url) from None
        except CorruptChunkError as error:  # larger than the manifest says
            raise damaged(name, self.url, str(error)) from None
        if (found := sha256_hex(data)) != record.digest:
            raise damaged(name, self.url, f"expected sha256 {record.digest[:12]}, read {found[:12]}")
        return data

    def catalog(self, manifest: Manifest) -> Catalog:
        """Read a snapshot's catalog: its size, then its digest, and only then Parquet.

        Raises:
            MissingObjectError: it is not there.
            CorruptChunkError: it is damaged, or disagrees with the manifest.
        """
        record = manifest.catalog
        name = catalog_name(record.digest)
        data = self.catalog_bytes(manifest)
        catalog = decode_catalog(
            data,
            num_rows=record.num_rows,
            shard_bytes=[shard.nbytes for shard in manifest.shards],
            what=f"catalog {name}",
        )
        counts = [len(rows) for rows in catalog.rows_of_shards(len(manifest.shards))]
        if counts != [shard.num_chunks for shard in manifest.shards]:
            raise CorruptChunkError(
                f"{name} in {self.url} and its manifest disagree on the chunks per shard; export the snapshot again"
            )
        return catalog

    def put_object(self, name: str, data: bytes) -> bool:
        """Store a small immutable object under the name of its digest; False if it is there already.

        Raises:
            CorruptChunkError: something else lies under that name.
        """
        if self.storage.put_if_absent(name, data):
            return True
        if self.storage.head(name).nbytes != len(data) or self.storage.get(name, max_bytes=len(data)) != data:
            raise damaged(name, self.url, "it has other bytes than its name says")
        return False

    def _digests(self, prefix: str, suffix: str) -> list[Digest]:
        found = []
        for info in self.storage.list(prefix):
            text = info.name.removeprefix(prefix).removesuffix(suffix)
            if _HEX.fullmatch(text) and info.name == prefix + text + suffix:
                found.append(Digest(text))
        return found


def decode_ref(data: bytes, name: str, url: str) -> Ref:
    """Read the object of the ref `name` of the repository at `url`.

    Raises:
        CorruptChunkError: it makes no sense.
    """
    try:
        return _decode_ref(data)
    except KvsnapError as error:
        raise damaged_ref(name, url, str(error)) from None


def _decode_ref(data: bytes) -> Ref:
    obj = _object(data)
    history = obj.get("history", [])
    if not isinstance(history, list) or not all(isinstance(item, dict) for item in history):
        raise CorruptChunkError("its history is no list of objects")
    return Ref(
        snapshot=parse_digest(obj.get("snapshot")),
        write_id=str(obj.get("write_id")),
        previous=None if obj.get("previous") is None else parse_digest(obj["previous"]),
        updated=str(obj.get("updated")),
        history=tuple(
            RefChange(snapshot=parse_digest(item.get("snapshot")), updated=str(item.get("updated")))
            for item in history[:MAX_HISTORY]
        ),
    )


def _is_fresh(storage: Storage) -> bool:
    """Whether nothing is there yet but what a killed probe has left."""
    if storage.is_empty():
        return True
    names = [info.name for info in islice(storage.list(""), 16)]
    return bool(names) and all(name.startswith(PROBE_PREFIX) for name in names)


def _capabilities(storage: Storage) -> Capabilities:
    """By trying it out; a directory does by its nature what `LocalStorage` says, and stays clean."""
    inner = storage
    while isinstance(inner, WrapperStorage):
        inner = inner.inner
    return storage.capabilities() if isinstance(inner, LocalStorage) else probe_storage(storage)


def _object(data: bytes) -> dict[str, Any]:
    try:
        obj = json.loads(data)
    except (ValueError, RecursionError):
        obj = None
    if not isinstance(obj, dict):
        raise CorruptChunkError("it is no JSON object")
    return obj
