"""Merge: join snapshots of one namespace into one, within a repository.

Several engines, or several runs of one, each export a part. The merged snapshot has every
chunk of any of them; each part is prefix-closed, so their union is. Shards are referenced,
not copied, and those that have nothing to add are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import kvsnap
from kvsnap.canonical import sha256_hex
from kvsnap.catalog import Catalog, encode_catalog
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, NotFoundError
from kvsnap.gc_lists import removed_snapshots
from kvsnap.identity import differing_fields
from kvsnap.keys import ChunkKey
from kvsnap.manifest import CatalogRecord, Digest, Manifest, ShardRecord, Totals
from kvsnap.plan import choose_shards, heat_order
from kvsnap.refs import keep_snapshots, publish_ref
from kvsnap.repository import Repository, manifest_name, now_text, ref_name
from kvsnap.storage import Storage
from kvsnap.writing import WriteSession, publish_snapshot, under_lease


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge made."""

    snapshot: Digest
    """Id of the merged snapshot."""
    is_new: bool
    """False: the repository had one of the same shards and chunks (one of the parts may be it)."""
    tag: str | None
    parts: tuple[Digest, ...]
    num_chunks: int
    num_tokens: int
    num_prefixes: int
    num_shards: int
    nbytes: int
    """Bytes of its shards."""


def merge_snapshots(
    url: str | Storage, refs: Sequence[str], *, tag: str | None = None, single_writer: bool = False
) -> MergeReport:
    """Merge the snapshots `refs` of the repository at `url`. May be killed and repeated.

    Raises:
        ConfigError: fewer than two snapshots.
        IncompatibleError: they are of different models, layouts or chunk sizes; `fields` says which differ.
        CorruptChunkError: one of them is damaged, a part of one is gone, or they contradict each other.
        NotFoundError: no such repository or snapshot.
    """
    if tag is not None:
        ref_name(tag)
    if len(refs) < 2:
        raise ConfigError(f"{len(refs)} snapshot to merge, expected two or more")
    repository = Repository.open(url, operation="write", single_writer=single_writer)
    return under_lease(repository, "merge", lambda session: _merge(repository, session, refs, tag))


def _merge(repository: Repository, session: WriteSession, refs: Sequence[str], tag: str | None) -> MergeReport:
    opened = [repository.open_snapshot(ref) for ref in refs]
    for ref, (_, manifest) in zip(refs, opened, strict=True):
        _check_same(refs[0], opened[0][1], ref, manifest)
    by_id = dict(opened)
    parts, manifests = list(by_id), list(by_id.values())
    keep_snapshots(repository, session, by_id)
    shards, catalog = join_catalogs([(manifest.shards, repository.catalog(manifest)) for manifest in manifests])
    inner = set(catalog.parent_row.tolist())
    totals = Totals(
        num_chunks=len(catalog),
        num_tokens=int(catalog.tokens.sum()),
        nbytes=sum(shard.nbytes for shard in shards),
        num_prefixes=sum(row not in inner for row in range(len(catalog))),
    )
    snapshot = _same(repository, session, manifests[0], shards, catalog)
    is_new = snapshot is None
    if snapshot is None:
        data = encode_catalog(catalog)
        manifest = Manifest(
            namespace=manifests[0].namespace,
            created=now_text(),
            writer={"name": "kvsnap", "version": kvsnap.__version__},
            shards=shards,
            catalog=CatalogRecord(digest=Digest(sha256_hex(data)), nbytes=len(data), num_rows=len(catalog)),
            totals=totals,
            parent=parts[0],
            required_features=tuple(sorted({name for manifest in manifests for name in manifest.required_features})),
            annotations=manifests[0].annotations,
        )
        snapshot = publish_snapshot(repository, session, catalog=data, manifest=manifest.encode())
    if tag is not None:
        if not is_new:
            keep_snapshots(repository, session, {snapshot: repository.manifest(snapshot)})
        publish_ref(repository, session, tag, snapshot)
    return MergeReport(
        snapshot=snapshot,
        is_new=is_new,
        tag=tag,
        parts=tuple(parts),
        num_chunks=totals.num_chunks,
        num_tokens=totals.num_tokens,
        num_prefixes=totals.num_prefixes,
        num_shards=len(shards),
        nbytes=totals.nbytes,
    )


def join_catalogs(
    parts: Sequence[tuple[Sequence[ShardRecord], Catalog]],
) -> tuple[tuple[ShardRecord, ...], Catalog]:
    """The union of snapshots of one namespace: shards and chunk table.

    A chunk that lies in several shards is taken from the one that holds most chunks, so that
    few shards are needed. Hits add nothing up: the highest count and the latest use hold.

    Raises:
        CorruptChunkError: two parts say different things of one chunk.
    """
    records = list({shard.digest: shard for shards, _ in parts for shard in shards}.values())
    number = {record.digest: i for i, record in enumerate(records)}
    held: list[dict[ChunkKey, tuple[int, int]]] = [{} for _ in records]
    heat: dict[ChunkKey, tuple[int, int]] = {}
    for p, (shards, catalog) in enumerate(parts):
        keys = catalog.keys()
        of_row = [number[shards[i].digest] for i in catalog.shard.tolist()]
        hits, last_use = catalog.hits.tolist(), catalog.last_use.tolist()
        for row, (key, shard) in enumerate(zip(keys, of_row, strict=True)):
            held[shard].setdefault(key, (p, row))
            known = heat.get(key, (0, 0))
            heat[key] = (max(known[0], hits[row]), max(known[1], last_use[row]))
    chosen: dict[ChunkKey, tuple[int, int, int]] = {}
    for i in sorted(range(len(records)), key=lambda i: (-len(held[i]), records[i].digest)):
        for key, (p, row) in held[i].items():
            chosen.setdefault(key, (i, p, row))
    catalogs = [catalog for _, catalog in parts]
    ordered = sorted(chosen, key=lambda key: (int(catalogs[chosen[key][1]].depth[chosen[key][2]]), key))
    joined = _table(ordered, chosen, catalogs, heat)
    order = heat_order(
        joined.hits, joined.last_use, joined.depth, joined.shard, [r.digest for r in records], recent=False
    )
    used = set(joined.shard.tolist())
    choice = choose_shards(
        [i for i in order if i in used],
        [record.nbytes for record in records],
        joined.shard,
        joined.parent_row,
        joined.depth,
        max_bytes=None,
    )
    position = np.zeros(len(records), np.int64)
    position[list(choice.shards)] = np.arange(len(choice.shards))
    rows = np.bincount(joined.shard, minlength=len(records)).tolist()
    kept = tuple(
        ShardRecord(digest=records[i].digest, nbytes=records[i].nbytes, num_chunks=rows[i]) for i in choice.shards
    )
    fields = {name: getattr(joined, name) for name in Catalog.__dataclass_fields__}
    return kept, Catalog(**{**fields, "shard": position[joined.shard]})


def _table(
    ordered: list[ChunkKey],
    chosen: dict[ChunkKey, tuple[int, int, int]],
    catalogs: list[Catalog],
    heat: dict[ChunkKey, tuple[int, int]],
) -> Catalog:
    """Rows of the chosen chunks; `shard` is the number of the shard."""
    row_of = {key: row for row, key in enumerate(ordered)}
    scopes = sorted({scope for catalog in catalogs for scope in catalog.scope})
    codes = {scope: code for code, scope in enumerate(scopes)}
    parent_row = []
    for key in ordered:
        _, p, row = chosen[key]
        above = int(catalogs[p].parent_row[row])
        parent_row.append(-1 if above < 0 else row_of[catalogs[p].key_of(above)])
    sources = [(catalogs[chosen[key][1]], chosen[key][2]) for key in ordered]

    def ints(name: str) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([getattr(catalog, name)[row] for catalog, row in sources], np.int64)

    def raw(name: str, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        data = b"".join(getattr(catalog, name)[row].tobytes() for catalog, row in sources)
        return np.frombuffer(data, np.uint8).reshape(len(sources), width)

    depth = ints("depth")
    for row, above in enumerate(parent_row):
        if depth[row] != (depth[above] + 1 if above >= 0 else 0):
            raise CorruptChunkError(
                f"the snapshots say different things of chunk {ordered[row].hex()[:12]}; verify each with --read-data"
            )
    return Catalog(
        key=raw("key", 32),
        parent_row=np.array(parent_row, np.int64),
        depth=depth,
        tokens=ints("tokens"),
        shard=np.array([chosen[key][0] for key in ordered], np.int64),
        offset=ints("offset"),
        nbytes=ints("nbytes"),
        xxh3=raw("xxh3", 16),
        blake3=raw("blake3", 32),
        scope=tuple(scopes),
        scope_code=np.array([codes[c.scope[int(c.scope_code[row])]] for c, row in sources], np.int64),
        hits=np.array([heat[key][0] for key in ordered], np.int64),
        last_use=np.array([heat[key][1] for key in ordered], np.int64),
    )


def _same(
    repository: Repository, session: WriteSession, like: Manifest, shards: Sequence[ShardRecord], catalog: Catalog
) -> Digest | None:
    """A snapshot of these shards and chunks that is there already."""
    wanted = {shard.digest: shard.num_chunks for shard in shards}
    removed = removed_snapshots(session.lists)
    for snapshot in repository.snapshots():
        if manifest_name(snapshot) in removed:
            continue
        try:
            manifest = repository.manifest(snapshot)
            if {shard.digest: shard.num_chunks for shard in manifest.shards} == wanted and (
                manifest.namespace.id() == like.namespace.id()
                and set(repository.catalog(manifest).keys()) == set(catalog.keys())
            ):
                return snapshot
        except (CorruptChunkError, IncompatibleError, NotFoundError):
            continue
    return None


def _check_same(ref_a: str, a: Manifest, ref_b: str, b: Manifest) -> None:
    if a.namespace.id() == b.namespace.id():
        return
    fields = differing_fields(a.namespace.identity, b.namespace.identity)
    if a.namespace.layout.hash() != b.namespace.layout.hash():
        fields += ("layout",)
    if a.namespace.chunk_tokens != b.namespace.chunk_tokens:
        fields += ("chunk_tokens",)
    raise IncompatibleError(
        f"snapshots {ref_a} and {ref_b} can't be merged, no engine could use both: {', '.join(fields)} differ", fields
    )
