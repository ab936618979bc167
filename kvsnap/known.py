"""What a repository holds already, as an export sees it: a chunk that is there is referenced, never sent again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvsnap.catalog import Catalog
from kvsnap.keys import ChunkKey
from kvsnap.manifest import Digest, Manifest
from kvsnap.repository import shard_name
from kvsnap.shard import ChunkEntry
from kvsnap.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """A shard in a repository. It may hold more than an export wants of it."""

    digest: Digest
    nbytes: int
    """Size of the whole file."""
    scope: str

    @property
    def id(self) -> str:
        """The digest."""
        return self.digest


class KnownChunks:
    """The chunks that a snapshot brought into a repository, as far as its shards are still there.

    Args:
        base: The snapshot, with its catalog; None: none is known.
        objects: The shards in the repository: names, and their sizes [bytes].
    """

    def __init__(self, base: tuple[Manifest, Catalog] | None, objects: Mapping[str, int]) -> None:
        self.objects = dict(objects)
        """The shards in the repository: names, and their sizes [bytes]."""
        self._learned: dict[ChunkKey, tuple[StoredShard, ChunkEntry, bytes]] = {}
        self._rows: dict[ChunkKey, int] = {}
        self._shards: list[StoredShard | None] = []
        if base is None:
            return
        manifest, self._catalog = base
        for record, rows in zip(manifest.shards, self._catalog.rows_of_shards(len(manifest.shards)), strict=True):
            is_there = len(rows) > 0 and self.objects.get(shard_name(record.digest)) == record.nbytes
            scope = self._catalog.scope[int(self._catalog.scope_code[rows[0]])] if is_there else ""
            stored = StoredShard(digest=record.digest, nbytes=record.nbytes, scope=scope)
            self._shards.append(stored if is_there else None)
        self._rows = {key: row for row, key in enumerate(self._catalog.keys())}

    def find(self, entry: ChunkEntry) -> tuple[StoredShard, ChunkEntry] | None:
        """Where the chunk of a local shard's `entry` is in the repository, and its entry there."""
        if (learned := self._learned.get(entry.key)) is not None:
            return learned[:2]
        row = self._rows.get(entry.key)
        if row is None:
            return None
        catalog = self._catalog
        shard = self._shards[int(catalog.shard[row])]
        if shard is None or (int(catalog.depth[row]), int(catalog.tokens[row])) != (entry.depth, entry.tokens):
            return None
        return shard, entry._replace(
            xxh3=catalog.xxh3[row].tobytes(), offset=int(catalog.offset[row]), nbytes=int(catalog.nbytes[row])
        )

    def blake3(self, key: ChunkKey) -> bytes:
        """Of a chunk that `find` has found."""
        if (learned := self._learned.get(key)) is not None:
            return learned[2]
        digest: bytes = self._catalog.blake3[self._rows[key]].tobytes()
        return digest

    def learn(self, stored: StoredShard, entries: Iterable[ChunkEntry], blake3: Mapping[ChunkKey, bytes]) -> None:
        """The repository's shard holds all of these, whatever the snapshot names of it."""
        self._learned.update((entry.key, (stored, entry, blake3[entry.key])) for entry in entries)

    def forget(self, names: Iterable[str]) -> None:
        """These objects are gone."""
        gone = set(names)
        self.objects = {name: nbytes for name, nbytes in self.objects.items() if name not in gone}
        self._shards = [s if s is not None and shard_name(s.digest) not in gone else None for s in self._shards]
        self._learned = {k: row for k, row in self._learned.items() if shard_name(row[0].digest) not in gone}


def list_shards(storage: Storage) -> dict[str, int]:
    """The shards in a repository, by one listing: names, and their sizes [bytes]."""
    return {info.name: info.nbytes for info in storage.list("shards/")}
