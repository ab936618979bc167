"""The manifest: what one snapshot contains. Its sha256 is the snapshot's id.

Written last, once every shard and the catalog that it names are durable, so a snapshot
whose manifest can be read is complete. Canonical JSON; object digests in it are
`sha256:<hex>`, hashes that are no object digests are plain hex.

A reader checks the digest before it parses, refuses a `format` above `FORMAT` and any
`required_features` that it does not know, keeps fields that it does not know, and takes
no name and no size from it unchecked: it may have been made by a stranger.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType

import kvsnap
from kvsnap.canonical import MAX_INTEGER, canonical_json, sha256_hex
from kvsnap.errors import CorruptChunkError, IncompatibleError, KvsnapError
from kvsnap.fields import Fields, get_int, get_list, get_mapping, get_str
from kvsnap.identity import ModelIdentity
from kvsnap.layout import Layout
from kvsnap.namespace import FORMAT, Namespace

Digest = NewType("Digest", str)
"""sha256 of an object's bytes, 64 lower-case hex digits. As text for others: `sha256:<hex>`."""

MAX_MANIFEST_BYTES = 64 << 20
MAX_SHARDS = 200_000
MAX_ROWS = 16_000_000
MAX_CATALOG_BYTES = 4 << 30
MAX_SHARD_BYTES = 64 << 30
DIGEST_PREFIX = "sha256:"
FEATURES: frozenset[str] = frozenset()
"""Features that this version can read beyond the base format; none yet."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_KNOWN = (
    "annotations", "block_tokens", "catalog", "chunk_tokens", "created", "format", "key_scheme", "layout", "model",
    "parent", "required_features", "shards", "totals", "writer",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard of a snapshot."""

    digest: Digest
    nbytes: int
    """Size of the whole file."""
    num_chunks: int
    """Chunks of the snapshot in it; the file may hold more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRecord:
    """Where the chunk table is."""

    digest: Digest
    nbytes: int
    num_rows: int
    """One row per chunk of the snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the snapshot."""

    num_chunks: int
    num_tokens: int
    """Tokens whose KV is in it, each chunk counted once."""
    nbytes: int
    """Bytes of its shards: what an import of all of it moves."""
    num_prefixes: int
    """Chunks that are no other chunk's parent: the longest prefixes."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one snapshot contains. Immutable: a new state is a new manifest."""

    namespace: Namespace
    """Identity, layout and chunk size that its chunks belong to; `human` is `model_id`, `revision`, annotations."""
    created: str
    """When it was exported, RFC 3339, UTC. For people and for retention."""
    writer: Mapping[str, Any]
    """Program and version that wrote it."""
    shards: tuple[ShardRecord, ...]
    """Hottest first. A catalog row names a shard by its position here."""
    catalog: CatalogRecord
    totals: Totals
    parent: Digest | None = None
    """The snapshot that this one follows, if any."""
    required_features: tuple[str, ...] = ()
    """A reader that doesn't know all of them refuses the snapshot."""
    annotations: Mapping[str, Any] = field(default_factory=dict)
    """Facts for people: engine version, host and the like. Never compared."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields that this version doesn't know, as read."""

    @property
    def model_id(self) -> str | None:
        """Name of the model as the engine was given it; for people."""
        return _text_or_none(self.namespace.human, "model")

    @property
    def revision(self) -> str | None:
        """Revision of the model as the engine was given it; for people."""
        return _text_or_none(self.namespace.human, "revision")

    def to_json(self) -> dict[str, Any]:
        """The manifest's fields, see docs/format.md."""
        catalog, totals = self.catalog, self.totals
        return {
            **self.extra,
            "annotations": dict(self.annotations),
            "block_tokens": self.namespace.layout.block_tokens,
            "catalog": {
                "bytes": catalog.nbytes,
                "digest": DIGEST_PREFIX + catalog.digest,
                "rows": catalog.num_rows,
            },
            "chunk_tokens": self.namespace.chunk_tokens,
            "created": self.created,
            "format": self.namespace.format,
            "key_scheme": self.namespace.key_scheme,
            "layout": self.namespace.layout.to_json(),
            "model": {
                "id": self.model_id,
                "identity": self.namespace.identity.to_json(),
                "revision": self.revision,
            },
            "parent": None if self.parent is None else DIGEST_PREFIX + self.parent,
            "required_features": list(self.required_features),
            "shards": [
                {"bytes": shard.nbytes, "chunks": shard.num_chunks, "digest": DIGEST_PREFIX + shard.digest}
                for shard in self.shards
            ],
            "totals": {
                "bytes": totals.nbytes,
                "chunks": totals.num_chunks,
                "prefixes": totals.num_prefixes,
                "tokens": totals.num_tokens,
            },
            "writer": dict(self.writer),
        }

    def encode(self) -> bytes:
        """The bytes of the object; their sha256 is the snapshot's id."""
        return canonical_json(self.to_json())


def decode_manifest(data: bytes, *, expect: Digest) -> Manifest:
    """Read a manifest that is known by its digest.

    Raises:
        CorruptChunkError: it is not the object of this digest, or makes no sense.
        IncompatibleError: it needs a later kvsnap.
    """
    if (found := sha256_hex(data)) != expect:
        raise CorruptChunkError(f"manifest {expect[:12]} is damaged: expected sha256 {expect[:12]}, read {found[:12]}")
    try:
        obj = json.loads(data, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_refuse)
    except (ValueError, RecursionError) as error:
        raise CorruptChunkError(f"manifest {expect[:12]} is not JSON: {error}") from None
    if not isinstance(obj, dict):
        raise CorruptChunkError(f"manifest {expect[:12]} is not a JSON object")
    _check_version(obj, expect)
    try:
        canonical_json(obj)  # what can't be written as canonical JSON was never written by us, and could not be again
        return _from_json(obj)
    except (KvsnapError, RecursionError) as error:
        raise CorruptChunkError(f"manifest {expect[:12]} makes no sense: {error}") from None


def parse_digest(text: object) -> Digest:
    """The digest in `sha256:<hex>`.

    Raises:
        IncompatibleError: it is anything else. So no name can leave its directory.
    """
    if not isinstance(text, str) or _DIGEST.fullmatch(text) is None:
        raise IncompatibleError(f"digest is {text!r:.100}, expected sha256: and 64 lower-case hex digits", ("digest",))
    return Digest(text.removeprefix(DIGEST_PREFIX))


def _check_version(obj: Fields, digest: Digest) -> None:
    version = obj.get("format")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise CorruptChunkError(f"manifest {digest[:12]} makes no sense: format is {version!r:.40}")
    if version > FORMAT:
        raise IncompatibleError(
            f"manifest {digest[:12]} has format version {version}, this kvsnap reads up to {FORMAT}; upgrade kvsnap",
            ("format",),
        )
    features = obj.get("required_features")
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise CorruptChunkError(f"manifest {digest[:12]} makes no sense: required_features is no list of names")
    if unknown := sorted(set(features) - FEATURES):
        writer = obj.get("writer")
        by = f" (written by kvsnap {writer.get('version')!s:.20})" if isinstance(writer, dict) else ""
        raise IncompatibleError(
            f"manifest {digest[:12]}{by} requires features {', '.join(unknown)[:200]}, which this kvsnap "
            f"{kvsnap.__version__} doesn't know; upgrade kvsnap",
            ("required_features",),
        )


def _from_json(obj: Fields) -> Manifest:
    if missing := [name for name in _KNOWN if name not in obj]:
        raise IncompatibleError(f"it lacks {', '.join(missing)}", tuple(missing))
    model, annotations = get_mapping(obj, "model"), get_mapping(obj, "annotations")
    if missing := [name for name in ("id", "identity", "revision") if name not in model]:
        raise IncompatibleError(f"model lacks {', '.join(missing)}", tuple(missing))
    layout = Layout.from_json(obj["layout"])
    hashed = Namespace(
        identity=ModelIdentity.from_json(model["identity"]),
        layout=layout,
        chunk_tokens=get_int(obj, "chunk_tokens"),
        key_scheme=get_str(obj, "key_scheme"),
        format=get_int(obj, "format"),
        human={**annotations, "model": model["id"], "revision": model["revision"]},
    )
    namespace = Namespace.from_json(hashed.to_json())  # the strict checks of namespace.json
    if get_int(obj, "block_tokens") != layout.block_tokens:
        raise IncompatibleError(f"block_tokens is {obj['block_tokens']}, its layout has {layout.block_tokens}")
    shards = _shards(get_list(obj, "shards"))
    catalog, totals = get_mapping(obj, "catalog"), get_mapping(obj, "totals")
    manifest = Manifest(
        namespace=namespace,
        created=get_str(obj, "created"),
        writer=get_mapping(obj, "writer"),
        shards=shards,
        catalog=CatalogRecord(
            digest=parse_digest(catalog.get("digest")),
            nbytes=_size(catalog, "bytes", MAX_CATALOG_BYTES),
            num_rows=_size(catalog, "rows", MAX_ROWS),
        ),
        totals=Totals(
            num_chunks=_size(totals, "chunks", MAX_ROWS),
            num_tokens=_size(totals, "tokens", MAX_INTEGER),
            nbytes=_size(totals, "bytes", MAX_INTEGER),
            num_prefixes=_size(totals, "prefixes", MAX_ROWS),
        ),
        parent=None if obj["parent"] is None else parse_digest(obj["parent"]),
        required_features=tuple(get_list(obj, "required_features")),
        annotations=annotations,
        extra={name: value for name, value in obj.items() if name not in _KNOWN},
    )
    _check_sums(manifest)
    return manifest


def _shards(records: list[Any]) -> tuple[ShardRecord, ...]:
    if len(records) > MAX_SHARDS:
        raise IncompatibleError(f"it has {len(records)} shards, at most {MAX_SHARDS} are read")
    shards = []
    for record in records:
        if not isinstance(record, Mapping):
            raise IncompatibleError(f"shard is {record!r:.80}, expected an object")
        shards.append(
            ShardRecord(
                digest=parse_digest(record.get("digest")),
                nbytes=_size(record, "bytes", MAX_SHARD_BYTES),
                num_chunks=_size(record, "chunks", MAX_ROWS),
            )
        )
    if len({shard.digest for shard in shards}) != len(shards):
        raise IncompatibleError("it names a shard twice")
    return tuple(shards)


def _check_sums(manifest: Manifest) -> None:
    totals = manifest.totals
    in_shards = sum(shard.num_chunks for shard in manifest.shards)
    if not totals.num_chunks == manifest.catalog.num_rows == in_shards:
        raise IncompatibleError(
            f"totals has {totals.num_chunks} chunks, the catalog {manifest.catalog.num_rows}, the shards {in_shards}"
        )
    if totals.nbytes != (nbytes := sum(shard.nbytes for shard in manifest.shards)):
        raise IncompatibleError(f"totals has {totals.nbytes} bytes, the shards {nbytes}")


def _size(obj: Fields, name: str, most: int) -> int:
    if name not in obj:
        raise IncompatibleError(f"it lacks {name}", (name,))
    value = get_int(obj, name)
    if not 0 <= value <= most:
        raise IncompatibleError(f"{name} is {value}, expected 0 to {most}", (name,))
    return value


def _text_or_none(human: Mapping[str, Any], name: str) -> str | None:
    value = human.get(name)
    return value if isinstance(value, str) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is there twice in one object")
    return fields


def _refuse(text: str) -> Any:
    raise ValueError(f"number {text[:20]} is not an integer")
