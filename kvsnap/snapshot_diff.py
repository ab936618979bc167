"""What two snapshots have in common. Reads manifests and catalogs only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvsnap.catalog import Catalog
from kvsnap.identity import differing_fields
from kvsnap.keys import ChunkKey
from kvsnap.manifest import Digest, Manifest, ShardRecord
from kvsnap.repository import Repository
from kvsnap.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Chunks and shards of one side, or of both."""

    num_chunks: int
    num_tokens: int
    chunk_bytes: int
    """Bytes of the chunks, each counted once."""
    num_shards: int
    shard_bytes: int
    """Bytes of the shards: what an import moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """From snapshot `a` to snapshot `b`."""

    a: Digest
    b: Digest
    is_same_namespace: bool
    """False: no engine can use both, and they share no chunk."""
    identity_fields: tuple[str, ...]
    """Fields of the model's identity that differ, dotted."""
    layout_fields: tuple[str, ...]
    """Fields of the layout, `chunk_tokens` and `key_scheme`, if they differ."""
    added: Part
    """Only in `b`."""
    gone: Part
    """Only in `a`."""
    shared: Part
    """In both; a shared chunk may lie in different shards."""


def diff_snapshots(url_a: str | Storage, ref_a: str, url_b: str | Storage, ref_b: str) -> DiffReport:
    """Compare two snapshots, of one repository or of two.

    Raises:
        NotFoundError: one isn't there.
        CorruptChunkError, IncompatibleError: one is damaged, or lacks a part, or needs a later kvsnap.
    """
    (id_a, a, catalog_a), (id_b, b, catalog_b) = _load(url_a, ref_a), _load(url_b, ref_b)
    keys_a, keys_b = set(catalog_a.keys()), set(catalog_b.keys())
    shards_a, shards_b = ({shard.digest: shard for shard in side.shards} for side in (a, b))
    both = shards_a.keys() & shards_b.keys()
    return DiffReport(
        a=id_a,
        b=id_b,
        is_same_namespace=a.namespace.id() == b.namespace.id(),
        identity_fields=differing_fields(a.namespace.identity, b.namespace.identity),
        layout_fields=_layout_fields(a, b),
        added=_part(catalog_b, keys_b - keys_a, [shards_b[d] for d in shards_b if d not in both]),
        gone=_part(catalog_a, keys_a - keys_b, [shards_a[d] for d in shards_a if d not in both]),
        shared=_part(catalog_b, keys_a & keys_b, [shards_b[d] for d in both]),
    )


def _load(url: str | Storage, ref: str) -> tuple[Digest, Manifest, Catalog]:
    repository = Repository.open(url)
    snapshot, manifest = repository.open_snapshot(ref)
    return snapshot, manifest, repository.catalog(manifest)


def _part(catalog: Catalog, keys: set[ChunkKey], shards: Iterable[ShardRecord]) -> Part:
    of_rows = catalog.keys()
    rows = np.fromiter((key in keys for key in of_rows), np.bool_, len(catalog))
    records = list(shards)
    return Part(
        num_chunks=int(rows.sum()),
        num_tokens=int(catalog.tokens[rows].sum()),
        chunk_bytes=int(catalog.nbytes[rows].sum()),
        num_shards=len(records),
        shard_bytes=sum(record.nbytes for record in records),
    )


def _layout_fields(a: Manifest, b: Manifest) -> tuple[str, ...]:
    one, other = a.namespace.layout.to_json(), b.namespace.layout.to_json()
    names = [f"layout.{name}" for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    more = ("chunk_tokens", "key_scheme")
    return (*names, *(name for name in more if getattr(a.namespace, name) != getattr(b.namespace, name)))
