"""Fetch shards of a snapshot into the disk tier, whole or in part, checking all of it on the way. One request each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kvsnap.catalog import Catalog
from kvsnap.damage import missing
from kvsnap.direct_io import aligned_buffer
from kvsnap.errors import CorruptChunkError, NotFoundError
from kvsnap.local_shards import ChainCheck
from kvsnap.manifest import Digest
from kvsnap.namespace import Namespace
from kvsnap.plan import I64
from kvsnap.repository import shard_name
from kvsnap.shard import ShardHeader, decode_header, header_length
from kvsnap.storage import Reader, Storage
from kvsnap.tiers.disk import DiskTier, Shard
from kvsnap.transfer import PIECE_BYTES, ShardHasher, new_hashes, pieces

MayLink = Callable[[], bool]
"""Asked once a shard is verified and durable, before anybody can see it; may wait."""


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
    """Fetches shards from `storage` into `disk`. Several threads may do so at once."""

    def __init__(self, storage: Storage, disk: DiskTier) -> None:
        self._storage = storage
        self._disk = disk

    def fetch(self, target: ShardTarget, *, may_link: MayLink | None = None) -> Shard | None:
        """Place one whole shard; None if there is no room for it, or `may_link` says no.

        Raises:
            CorruptChunkError: it is missing, damaged, or not what the catalog says; names the shard and the chunk.
            IncompatibleError: it is a shard of another namespace.
            StorageError: it can't be read or written.
        """
        name = shard_name(target.digest)
        hasher = ShardHasher(target.ranges(), with_blake3=False)

        def checked() -> Iterator[memoryview]:
            head = _HeaderCheck(target, self._disk.ns)
            with self._storage.open_read(name) as reader:
                for piece in pieces(reader, limit=target.nbytes, hash_with=hasher.update):
                    head.update(piece)
                    yield piece
            head.finish()
            if wrong := _wrong_chunk(target, hasher):
                raise CorruptChunkError(wrong)

        place = partial(
            self._disk.place, target.digest, target.nbytes, checked(), sha256=hasher.sha256, may_link=may_link
        )
        return self._named(name, place, lambda: _wrong_chunk(target, hasher))

    def fetch_part(self, target: ShardTarget, *, may_link: MayLink | None = None) -> Shard | None:
        """Place a new shard with the rows of `target` alone, by one request for the range up to the last of them.

        The digest of the whole can't be checked then: each chunk's BLAKE3 is, and the header's own checksum. Like
        `fetch` otherwise.
        """
        name = shard_name(target.digest)

        def place() -> Shard | None:
            ranges = target.ranges()
            end = ranges[-1].offset + ranges[-1].nbytes
            with self._storage.open_read(name, nbytes=end) as reader:
                header = _read_header(reader, target, self._disk.ns)
                entries = {entry.offset: entry for entry in header.chunks}
                data = _checked_ranges(reader, target, header.data_start)
                chosen = [entries[place.offset] for place in ranges]
                return self._disk.place_part(header.scope, chosen, data, may_link=may_link)

        return self._named(name, place, lambda: None)

    def _named(
        self, name: str, place: Callable[[], Shard | None], wrong_chunk: Callable[[], str | None]
    ) -> Shard | None:
        try:
            return place()
        except NotFoundError as error:
            raise missing(name, self._storage.url) from error
        except CorruptChunkError as error:
            # It may have been damaged on its way here only.
            raise CorruptChunkError(
                f"{name} in {self._storage.url} is damaged: {wrong_chunk() or error}; if `kvsnap verify --read-data` "
                "reads it so, too, delete it, then export the snapshot again"
            ) from None


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

    def __init__(self, target: ShardTarget, ns: Namespace) -> None:
        self._target = target
        self._ns = ns
        self._head = bytearray()
        self._is_done = False

    def update(self, piece: memoryview) -> None:
        if self._is_done:
            return
        if len(self._head) < 8:
            self._head += piece[:8]
            piece = piece[8:]
        length = header_length(self._head, self._target.nbytes) if len(self._head) >= 8 else 8
        self._head += piece[: length - len(self._head)]
        if len(self._head) >= max(length, 9):
            _parse(self._head, self._target, self._ns)
            self._is_done = True
            self._head = bytearray()

    def finish(self) -> None:
        if not self._is_done:
            raise CorruptChunkError("it ends inside its header")


def _read_header(reader: Reader, target: ShardTarget, ns: Namespace) -> ShardHeader:
    head = bytearray(8)
    _read_exactly(reader, memoryview(head))
    head += bytes(header_length(head, target.nbytes) - len(head))
    _read_exactly(reader, memoryview(head)[8:])
    return _parse(head, target, ns)


def _parse(head: bytearray, target: ShardTarget, ns: Namespace) -> ShardHeader:
    header = decode_header(head, target.nbytes, ns)
    check_against_catalog(header, target, ns)
    return header


def _checked_ranges(reader: Reader, target: ShardTarget, position: int) -> Iterator[memoryview]:
    """The bytes of the rows of `target`, read on from `position`; each chunk is checked at its end."""
    buffer = aligned_buffer(PIECE_BYTES)
    catalog = target.catalog
    for row, place in zip(target.rows.tolist(), target.ranges(), strict=True):
        while position < place.offset:
            position += _read_exactly(reader, buffer[: place.offset - position])
        xxh3, blake3 = new_hashes()
        while position < place.offset + place.nbytes:
            piece = buffer[: place.offset + place.nbytes - position]
            position += _read_exactly(reader, piece)
            xxh3.update(piece)
            blake3.update(piece)
            yield piece
        for what, found, expected in (
            ("blake3", blake3.digest(), catalog.blake3[row].tobytes()),
            ("xxh3", xxh3.digest(), catalog.xxh3[row].tobytes()),
        ):
            if found != expected:
                raise CorruptChunkError(_mismatch(catalog, row, what, expected, found))


def _read_exactly(reader: Reader, buffer: memoryview) -> int:
    done = 0
    while done < len(buffer):
        found = reader.readinto(buffer[done:])
        if not found:
            raise CorruptChunkError("it ends early")
        done += found
    return done


def _wrong_chunk(target: ShardTarget, hasher: ShardHasher) -> str | None:
    """The first chunk whose bytes are wrong."""
    catalog = target.catalog
    for row, digests in zip(target.rows.tolist(), hasher.digests, strict=False):
        expected = catalog.xxh3[row].tobytes()
        if digests.xxh3 != expected:
            return _mismatch(catalog, row, "xxh3", expected, digests.xxh3)
    return None


def _mismatch(catalog: Catalog, row: int, what: str, expected: bytes, found: bytes) -> str:
    return f"chunk {catalog.key_of(row).hex()[:12]}: expected {what} {expected.hex()[:12]}, read {found.hex()[:12]}"
