"""Bring shards of a cache directory into a repository: several at once, none sent that is there already.

A shard is read and hashed in one pass with the writing of it, where the storage needs no name first and nothing
that the repository holds could be the same file (what a killed export leaves is). Otherwise it is hashed first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from kvsnap.damage import wrong_size
from kvsnap.direct_io import FileReader
from kvsnap.errors import CorruptChunkError, NotFoundError, StorageError
from kvsnap.keys import ChunkKey
from kvsnap.known import KnownChunks, StoredShard
from kvsnap.local_shards import LocalShard, open_shard
from kvsnap.manifest import Digest
from kvsnap.repository import Repository, shard_name
from kvsnap.runtime import widen_affinity
from kvsnap.shard import ChunkEntry
from kvsnap.transfer import NUM_WORKERS, ShardHasher, pieces

Source = LocalShard | StoredShard
"""Where chunks of a snapshot are: in a cache directory still, or in the repository already."""


class DamagedObjectError(CorruptChunkError):
    """The repository is damaged where a shard belongs, not the shard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedShard:
    """A shard that the repository has now."""

    digest: Digest
    nbytes: int
    """Size of the file."""
    blake3: Mapping[ChunkKey, bytes]
    """Of the chunks that were asked for, at least."""
    sent_bytes: int
    """Bytes stored; 0 if the repository had it."""


class Uploader:
    """Uploads to `repository`, which holds what `known` says."""

    def __init__(self, repository: Repository, known: KnownChunks) -> None:
        self._repository = repository
        self._known = known
        self.done: dict[str, UploadedShard] = {}
        """What was sent or found so far, by id of the local shard."""

    def upload_all(
        self,
        sources: Sequence[Source],
        wanted: Sequence[Sequence[ChunkEntry]],
        *,
        failed: Callable[[Source, Exception], bool],
        done: Callable[[Source], None],
    ) -> list[UploadedShard | None]:
        """Make sure that the repository holds the sources, begun in this order, a few at a time.

        Args:
            wanted: For each source the chunks that matter.
            failed: Told what was not uploaded and why; False: stop and raise that.
            done: Told each source when its outcome is known.

        Returns:
            For each source what the repository has; None where it failed.
        """
        outcome: dict[Future[UploadedShard], int] = {}
        uploaded: list[UploadedShard | None] = [None] * len(sources)
        executor = ThreadPoolExecutor(NUM_WORKERS, "kvsnap-export", initializer=widen_affinity)
        try:
            for i, (source, entries) in enumerate(zip(sources, wanted, strict=True)):
                outcome[executor.submit(self.upload, source, entries)] = i
            for future in as_completed(outcome):
                source = sources[outcome[future]]
                try:
                    uploaded[outcome[future]] = future.result()
                except Exception as error:
                    if not failed(source, error):
                        raise
                done(source)
        finally:
            executor.shutdown(cancel_futures=True)
        return uploaded

    def upload(self, source: Source, wanted: Sequence[ChunkEntry]) -> UploadedShard:
        """Make sure that the repository holds `source`.

        Raises:
            NotFoundError: it has vanished from the cache directory.
            CorruptChunkError: it is damaged there (the message names the chunk) or can't be read. Nothing was stored.
            DamagedObjectError: the repository has something else under its name.
            StorageError: the repository failed.
        """
        if isinstance(source, StoredShard):
            blake3 = {entry.key: self._known.blake3(entry.key) for entry in wanted}
            return UploadedShard(digest=source.digest, nbytes=source.nbytes, blake3=blake3, sent_bytes=0)
        done = self.done.get(source.id)
        if done is None:
            done = self.done[source.id] = self._send(source)
        return done

    def forget(self, names: set[str]) -> None:
        """These objects are gone from the repository: what lay in them is to be sent again."""
        self._known.forget(names)
        for shard_id, shard in list(self.done.items()):
            if shard_name(shard.digest) in names:
                del self.done[shard_id]

    def _send(self, shard: LocalShard) -> UploadedShard:
        nbytes = shard.header.file_bytes
        storage = self._repository.storage
        source = _Source(shard)
        if storage.needs_name_first or nbytes in self._known.objects.values():
            for _ in source.read_and_hash():
                pass
            name = source.name()
            is_new = name not in self._known.objects and storage.put_known(
                name, source.read, nbytes=nbytes, sha256=source.hasher.sha256()
            )
        else:
            is_new = storage.put_stream(source.read_and_hash, source.name)
        digest = source.hasher.sha256()
        if not is_new:
            name = shard_name(digest)
            try:
                found = storage.head(name).nbytes
            except NotFoundError:  # it was there, and a prune has just deleted it
                self._known.forget({name})
                return self._send(shard)
            if found != nbytes:
                raise DamagedObjectError(str(wrong_size(name, self._repository.url, expected=nbytes, found=found)))
        return UploadedShard(digest=digest, nbytes=nbytes, blake3=source.blake3(), sent_bytes=nbytes if is_new else 0)


class _Source:
    """Reads a local shard, any number of times, and hashes and checks it."""

    def __init__(self, shard: LocalShard) -> None:
        self._shard = shard
        self._entries = shard.header.chunks
        self.hasher = ShardHasher(self._entries)
        """Of the last whole pass."""

    def read(self) -> Iterator[memoryview]:
        """The bytes; they must be checked already."""
        yield from self._pieces(None)

    def read_and_hash(self) -> Iterator[memoryview]:
        """The bytes, hashed meanwhile."""
        self.hasher = ShardHasher(self._entries)
        yield from self._pieces(self.hasher.update)

    def _pieces(self, hash_with: Callable[[memoryview], None] | None) -> Iterator[memoryview]:
        path = self._shard.path
        try:
            with open_shard(path) as fd:
                reader = FileReader(fd, f"shard {path}")
                yield from pieces(reader, limit=self._shard.header.file_bytes, hash_with=hash_with)
        except StorageError as error:  # of this disk; the storage that asks for the pieces would take it for its own
            raise CorruptChunkError(f"{error}; it is left out") from error

    def name(self) -> str:
        """Name of the object, after a whole pass; checks what came by."""
        path, nbytes = self._shard.path, self._shard.header.file_bytes
        if self.hasher.nbytes != nbytes:
            raise CorruptChunkError(f"shard {path} is damaged: it has {self.hasher.nbytes} bytes, expected {nbytes}")
        for entry, digests in zip(self._entries, self.hasher.digests, strict=True):
            if digests.xxh3 != entry.xxh3:
                raise CorruptChunkError(
                    f"shard {path} is damaged in chunk {entry.key.hex()[:12]}: expected xxh3 {entry.xxh3.hex()[:12]}, "
                    f"read {digests.xxh3.hex()[:12]}; it is left out"
                )
        return shard_name(self.hasher.sha256())

    def blake3(self) -> dict[ChunkKey, bytes]:
        """Of all chunks, after a whole pass."""
        return {entry.key: digests.blake3 for entry, digests in zip(self._entries, self.hasher.digests, strict=True)}
