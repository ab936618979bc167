"""Fetch one shard of a snapshot into the disk tier, checking it on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvsnap.catalog import Catalog
from kvsnap.errors import CorruptChunkError
from kvsnap.local_shards import ChainCheck, header_length, parse_header
from kvsnap.manifest import Digest
from kvsnap.namespace import Namespace
from kvsnap.plan import I64
from kvsnap.repository import shard_name
from kvsnap.shard import ShardHeader
from kvsnap.storage import Storage
from kvsnap.tiers.disk import DiskTier
from kvsnap.transfer import ShardHasher, pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTarget:
    """What a shard of a snapshot must be."""

    digest: Digest
    nbytes: int
    catalog: Catalog
    rows: I64
    """Its rows in the catalog, in order of offset."""

    def ranges(self) -> list[RowRange]:
        """Where its chunks are."""
        catalog = self.catalog
        return [RowRange(int(catalog.offset[row]), int(catalog.nbytes[row])) for row in self.rows.tolist()]


class RowRange(NamedTuple):
    """Place of a chunk in its file, in bytes."""

    offset: int
    nbytes: int


class ShardFetcher:
    """Fetches shards from `storage` into `disk`."""

    def __init__(self, storage: Storage, disk: DiskTier) -> None:
        self._storage = storage
        self._disk = disk

    def fetch(self, target: ShardTarget) -> bool:
        """Place one shard; False if there is no room for it.

        Raises:
            CorruptChunkError: it is damaged, or not what the catalog says; names the shard and the chunk.
            IncompatibleError: it is a shard of another namespace.
            NotFoundError, StorageError: it can't be read or written.
        """
        name = shard_name(target.digest)
        hasher = ShardHasher(target.ranges())

        def checked() -> Iterator[memoryview]:
            head = _HeaderCheck(target, self._disk.ns, name)
            with self._storage.open_read(name) as reader:
                for piece in pieces(reader, limit=target.nbytes):
                    head.update(piece)
                    hasher.update(piece)
                    yield piece
            head.finish()

        try:
            return self._disk.place(target.digest, target.nbytes, checked()) is not None
        except CorruptChunkError as error:
            raise CorruptChunkError(_describe(name, target, hasher, error)) from None


def check_against_catalog(header: ShardHeader, target: ShardTarget, ns: Namespace) -> None:
    """Compare a shard's header with what the catalog says of the chunks in it.

    Raises:
        CorruptChunkError: a chunk isn't there, or differs; names it.
    """
    catalog = target.catalog
    chain = ChainCheck(ns)
    entries = {entry.key: entry for entry in header.chunks}
    for row in target.rows.tolist():
        key = catalog.key_of(row)
        where = f"chunk {key.hex()[:12]}"
        entry = entries.get(key)
        if entry is None:
            raise CorruptChunkError(f"{where} of the catalog is not in its header")
        parent_row = int(catalog.parent_row[row])
        if parent_row < 0:
            is_parent_right = chain.root_is_right(entry, header.scope)
        else:
            is_parent_right = entry.parent == catalog.key_of(parent_row)
        for what, is_right in (
            ("parent", is_parent_right),
            ("depth", entry.depth == int(catalog.depth[row])),
            ("tokens", entry.tokens == int(catalog.tokens[row])),
            ("offset", entry.offset == int(catalog.offset[row])),
            ("size", entry.nbytes == int(catalog.nbytes[row])),
            ("xxh3", entry.xxh3 == catalog.xxh3[row].tobytes()),
            ("scope", header.scope == catalog.scope[int(catalog.scope_code[row])]),
        ):
            if not is_right:
                raise CorruptChunkError(f"{where} has another {what} in its header than in the catalog")


class _HeaderCheck:
    """Checks a shard's header as soon as the bytes of it have come by."""

    def __init__(self, target: ShardTarget, ns: Namespace, name: str) -> None:
        self._target = target
        self._ns = ns
        self._name = name
        self._head = bytearray()
        self._is_done = False

    def update(self, piece: memoryview) -> None:
        if self._is_done:
            return
        self._head += piece
        if len(self._head) < 8:
            return
        length = header_length(self._head, self._target.nbytes)
        if len(self._head) >= length:
            header = parse_header(self._head[:length], self._target.nbytes, self._ns)
            check_against_catalog(header, self._target, self._ns)
            self._is_done = True
            self._head = bytearray()

    def finish(self) -> None:
        if not self._is_done:
            raise CorruptChunkError("it ends inside its header")


def _describe(name: str, target: ShardTarget, hasher: ShardHasher, error: CorruptChunkError) -> str:
    """Name the shard and the first chunk whose bytes are wrong, else say what else is."""
    catalog = target.catalog
    for row, digests in zip(target.rows.tolist(), hasher.digests, strict=False):
        expected = catalog.blake3[row].tobytes()
        if digests.blake3 != expected:
            return (
                f"shard {name} is damaged in chunk {catalog.key_of(row).hex()[:12]}: expected blake3 "
                f"{expected.hex()[:12]}, read {digests.blake3.hex()[:12]}"
            )
    return f"shard {name} is damaged: {error}"
