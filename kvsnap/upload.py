"""Bring shards of a cache directory into a repository, each byte read at most once.

A shard that the repository has from an earlier export isn't read at all: its chunks are
looked up in that snapshot's catalog, and its header there must equal the one here byte
for byte (the header holds a checksum of every chunk).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvsnap.catalog import Catalog
from kvsnap.errors import CorruptChunkError, NotFoundError
from kvsnap.keys import ChunkKey
from kvsnap.local_shards import FdReader, LocalShard, open_shard
from kvsnap.manifest import Digest, Manifest
from kvsnap.repository import Repository, shard_name
from kvsnap.shard import ChunkEntry
from kvsnap.transfer import ShardHasher, new_hashes, pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedShard:
    """A shard that the repository has now."""

    digest: Digest
    blake3: Mapping[ChunkKey, bytes]
    """Of the chunks that were asked for, at least."""
    sent_bytes: int
    """Bytes stored; 0 if the repository had it."""


class Uploader:
    """Uploads to `repository`, knowing what the snapshot `base` (with its catalog) already brought there."""

    def __init__(self, repository: Repository, base: tuple[Manifest, Catalog] | None) -> None:
        self._repository = repository
        self._base = base
        self._rows = {} if base is None else {key: row for row, key in enumerate(base[1].keys())}
        self.done: dict[str, UploadedShard] = {}
        """What was brought so far, by shard id."""

    def upload(self, shard: LocalShard, wanted: Sequence[ChunkEntry]) -> UploadedShard:
        """Make sure that the repository holds `shard`.

        Raises:
            NotFoundError: it has vanished from the cache directory.
            CorruptChunkError: it is damaged there; the message names the chunk. Nothing was stored.
            StorageError: it can't be read, or the repository failed.
        """
        done = self.done.get(shard.id)
        if done is None or not all(entry.key in done.blake3 for entry in wanted):
            done = self._find(shard, wanted) or self._send(shard)
            self.done[shard.id] = done
        return done

    def _find(self, shard: LocalShard, wanted: Sequence[ChunkEntry]) -> UploadedShard | None:
        """The same shard in the repository, if an earlier snapshot has it."""
        if self._base is None:
            return None
        manifest, catalog = self._base
        rows = [row for entry in shard.header.chunks if (row := self._rows.get(entry.key)) is not None]
        for position in dict.fromkeys(int(catalog.shard[row]) for row in rows):
            record = manifest.shards[position]
            if record.nbytes == shard.header.file_bytes and self._has_same_header(record.digest, shard):
                blake3 = {
                    catalog.key_of(row): catalog.blake3[row].tobytes() for row in rows if catalog.shard[row] == position
                }
                missing = [entry for entry in wanted if entry.key not in blake3]
                blake3.update(_blake3_of(shard, missing))
                return UploadedShard(digest=record.digest, blake3=blake3, sent_bytes=0)
        return None

    def _has_same_header(self, digest: Digest, shard: LocalShard) -> bool:
        storage, name, length = self._repository.storage, shard_name(digest), shard.header.data_start
        theirs = bytearray(length)
        try:
            if storage.head(name).nbytes != shard.header.file_bytes:
                return False
            storage.read_into(name, memoryview(theirs), 0)
        except NotFoundError:
            return False
        with open_shard(shard.path) as fd:
            return os.pread(fd, length, 0) == theirs

    def _send(self, shard: LocalShard) -> UploadedShard:
        entries = shard.header.chunks
        nbytes = shard.header.file_bytes
        storage = self._repository.storage
        hasher = ShardHasher(entries)

        def read() -> Iterator[memoryview]:
            with open_shard(shard.path, direct=True) as fd:
                yield from pieces(FdReader(fd, str(shard.path)), limit=nbytes)

        def read_and_hash() -> Iterator[memoryview]:
            nonlocal hasher
            hasher = ShardHasher(entries)
            for piece in read():
                hasher.update(piece)
                yield piece

        def name() -> str:
            if hasher.nbytes != nbytes:
                raise CorruptChunkError(
                    f"shard {shard.path} is damaged: it has {hasher.nbytes} bytes, expected {nbytes}"
                )
            for entry, digests in zip(entries, hasher.digests, strict=True):
                _check(shard, entry, digests.xxh3)
            return shard_name(hasher.sha256())

        if storage.needs_name_first:
            for _ in read_and_hash():
                pass
            is_new = storage.put_known(name(), read, nbytes=nbytes, sha256=hasher.sha256())
        else:
            is_new = storage.put_stream(read_and_hash, name)
        digest = hasher.sha256()
        if not is_new and (found := storage.head(shard_name(digest)).nbytes) != hasher.nbytes:
            raise CorruptChunkError(
                f"{shard_name(digest)} in {self._repository.url} is damaged: expected {hasher.nbytes} bytes, "
                f"found {found}; delete it and export again"
            )
        return UploadedShard(
            digest=digest,
            blake3={entry.key: digests.blake3 for entry, digests in zip(entries, hasher.digests, strict=True)},
            sent_bytes=hasher.nbytes if is_new else 0,
        )


def _blake3_of(shard: LocalShard, entries: Sequence[ChunkEntry]) -> dict[ChunkKey, bytes]:
    found = {}
    if entries:
        with open_shard(shard.path) as fd:
            for entry in entries:
                xxh3, blake3 = hash_range(fd, entry.offset, entry.nbytes)
                _check(shard, entry, xxh3)
                found[entry.key] = blake3
    return found


def hash_range(fd: int, offset: int, nbytes: int) -> tuple[bytes, bytes]:
    """XXH3-128 and BLAKE3 of a range of an open file; of what is there, if it ends early."""
    xxh3, blake3 = new_hashes()
    buffer = memoryview(bytearray(min(nbytes, 4 << 20)))
    end = offset + nbytes
    while offset < end and (found := os.preadv(fd, [buffer[: end - offset]], offset)):
        xxh3.update(buffer[:found])
        blake3.update(buffer[:found])
        offset += found
    return xxh3.digest(), blake3.digest()


def _check(shard: LocalShard, entry: ChunkEntry, xxh3: bytes) -> None:
    if xxh3 != entry.xxh3:
        raise CorruptChunkError(
            f"shard {shard.path} is damaged in chunk {entry.key.hex()[:12]}: expected xxh3 {entry.xxh3.hex()[:12]}, "
            f"read {xxh3.hex()[:12]}; it is left out"
        )
