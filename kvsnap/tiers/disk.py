"""The disk tier: shards of one namespace in a cache directory, under a cap of real bytes.

Several engines and jobs may use one directory at once. Shards are written under `tmp/<writer>/`, made durable, and
linked into place; they never change and go as a whole. All methods are thread-safe; reads don't wait for writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kvsnap import direct_io
from kvsnap.atomic import fsync_dir
from kvsnap.canonical import canonical_json
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, StorageError
from kvsnap.keys import ChunkKey
from kvsnap.namespace import Namespace
from kvsnap.shard import FIRST_READ, Chunk, ChunkEntry, ShardHeader, checksum, encode_header, read_header, write_shard
from kvsnap.tiers import engines, paths, quota, usage, writers
from kvsnap.tiers.incoming import Pieces, part_of_shard, whole_shard
from kvsnap.tiers.publish import Fill, copying, in_file_order, publish
from kvsnap.tiers.room import Room
from kvsnap.tiers.scan import Listing

log = logging.getLogger(__name__)

_READ_AHEAD = 16
"""Headers on their way from the disk during a scan."""


class ChunkToWrite(NamedTuple):
    """A chunk and where its bytes are. They must not change until `write` returns."""

    key: ChunkKey
    parent: ChunkKey
    depth: int
    tokens: int
    block_keys: bytes
    xxh3: bytes
    """XXH3-128 digest of `views`, 16 bytes."""
    views: list[memoryview]
    """One per slice, padded to 4096; 4096-aligned memory is written from where it is."""


class Shard(NamedTuple):
    """A shard in this tier."""

    id: str
    path: Path
    scope: str
    entries: tuple[ChunkEntry, ...]
    """In file order, parents before children."""
    real_bytes: int
    """What it takes on disk, in bytes."""
    written_ns: int = 0
    """When, Unix time in ns, as its file says; the same for whoever looks."""


class DiskTier:
    """One namespace's shards.

    Args:
        cache_dir: Created if missing.
        ns: Decides which chunks belong here.
        cap_bytes: Real bytes that the whole cache directory may take; recorded in it. None, for jobs: obey what is
            recorded, 80 % of the file system if nothing is, and record nothing.
        read_only: Change nothing on disk. Writes, drops and quarantine then do nothing.

    Raises:
        ConfigError: `cache_dir` is something else than a cache directory, or the cap isn't positive.
        IncompatibleError: the directory has a newer format, or its namespace.json is of another namespace.
        StorageError: the directory can't be created, locked or written to.
    """

    def __init__(
        self, cache_dir: Path, ns: Namespace, *, cap_bytes: int | None = None, read_only: bool = False
    ) -> None:
        if cap_bytes is not None and cap_bytes <= 0:
            raise ConfigError(f"the disk tier's cap is {cap_bytes} bytes, expected more than 0")
        self.cache_dir = Path(cache_dir)
        self.ns = ns
        self.read_only = read_only
        self.dir = self.cache_dir / ns.dirname
        self.counts: Counter[str] = Counter()
        """What happened so far: shards_written, bytes_written, no_room, write_errors, quarantined, …"""
        self.last_error: str | None = None
        """The last failure of a write, for people."""
        self.is_direct = True
        """Whether O_DIRECT is tried; found out by a write test, not known in a read-only tier."""
        self.writer: writers.WriterDir | None = None
        self._shards = self.dir / paths.SHARDS
        self._listing = Listing(self._shards)
        self._lock = writers.DirectoryLock(self.cache_dir)
        self._seen_usage: tuple[int, int] | None = None
        if read_only:
            recorded = quota.read_marker(self.cache_dir)
            self._check_namespace()
        else:
            recorded = self._prepare(cap_bytes)
        self._room = Room(
            self.cache_dir, self.dir, cap_bytes or recorded or quota.default_cap(self.cache_dir), self._lock
        )

    @property
    def cap_bytes(self) -> int:
        """Real bytes that the whole cache directory may take."""
        return self._room.cap_bytes

    @property
    def evict(self) -> Callable[[int], int] | None:
        """Frees about as many bytes as it is asked for, by `drop`; returns the bytes freed. Set by the cache.

        Called with the directory lock held: whoever calls `write`, `place`, `quarantine` or `enforce_cap` must hold no
        lock that it needs.
        """
        return self._room.evict

    @evict.setter
    def evict(self, evict: Callable[[int], int] | None) -> None:
        self._room.evict = evict

    def _prepare(self, cap_bytes: int | None) -> int | None:
        with contextlib.suppress(OSError):
            self.cache_dir.resolve().mkdir(mode=0o700, parents=True, exist_ok=True)
        paths.make_dir(self.cache_dir.resolve())
        with writers.DirectoryLock(self.cache_dir, longest_s=writers.START_SECONDS):
            recorded = quota.read_marker(self.cache_dir)
            if recorded is None or cap_bytes not in (None, recorded):
                quota.write_marker(self.cache_dir, cap_bytes)
            for name in ("", paths.SHARDS, paths.TEMPORARY, paths.QUARANTINE, paths.ENGINES):
                paths.make_dir(self.dir / name)
            for directory in paths.namespace_dirs(self.cache_dir):  # first: the disk may be full of it
                self.counts["swept_bytes"] += writers.sweep(directory)
            self.writer = writers.WriterDir(self.dir)
            try:
                if not self._check_namespace():
                    self.writer.write_file(self.dir / paths.NAMESPACE, canonical_json(self.ns.to_json()))
                self.is_direct = direct_io.supports_direct(self.writer.path)
            except BaseException:
                self.writer.close()
                raise
        return recorded

    def _check_namespace(self) -> bool:
        """Whether namespace.json is there and right. What can't be read is written again: shards check themselves."""
        if not os.path.lexists(self.dir / paths.NAMESPACE):
            return False
        try:
            found = paths.read_namespace(self.dir)
        except IncompatibleError as error:
            log.warning("kvsnap: %s", error)
            return False
        if found.id() != self.ns.id():
            raise IncompatibleError(f"{self.dir} belongs to namespace {found.id()[:12]}, expected {self.ns.id()[:12]}")
        return True

    # -- what is there ---------------------------------------------------------------

    def scan(self) -> Iterator[Shard]:
        """All shards that aren't known yet, one header read per step. Damaged ones go to quarantine."""
        ids = [shard_id for shard_id in self._listing.all() if self._listing.is_new(shard_id)]
        upcoming = iter(ids)
        for i, shard_id in enumerate(ids):
            for ahead in islice(upcoming, 1 if i else _READ_AHEAD):
                direct_io.read_ahead(self._path(ahead), FIRST_READ)
            if self._listing.is_new(shard_id) and (shard := self._open(shard_id)) is not None:
                self._listing.know(shard_id)
                yield shard

    def poll(self) -> tuple[list[Shard], list[str]]:
        """What changed since the last look: new shards, and ids of those that vanished. Cheap if nothing did."""
        if self._listing.is_unchanged():
            return [], []
        vanished = self._listing.take_vanished()
        return list(self.scan()), vanished

    def _open(self, shard_id: str) -> Shard | None:
        try:
            try:
                return self._read_shard(shard_id)
            except CorruptChunkError:
                direct_io.forget_cached(self._path(shard_id))
                return self._read_shard(shard_id)
        except StorageError as error:
            if os.path.lexists(self._path(shard_id)):  # else it has just vanished
                self._ignore(shard_id, "unreadable_shards", error)
        except (CorruptChunkError, IncompatibleError) as error:
            self._ignore(shard_id, "damaged_shards", error)
            if not self.read_only:
                self._move_to_quarantine(shard_id)
        return None

    def _read_shard(self, shard_id: str) -> Shard:
        path = self._path(shard_id)
        header = read_header(path, expect=self.ns)
        return Shard(shard_id, path, header.scope, header.chunks, *paths.size_and_time(path))

    def _ignore(self, shard_id: str, what: str, error: Exception) -> None:
        self.counts[what] += 1
        self._listing.ignore(shard_id)
        log.warning("kvsnap: %s; treated as a miss", error)

    # -- reading ---------------------------------------------------------------------

    def read_chunk(self, shard_id: str, entry: ChunkEntry, views: list[memoryview]) -> bool:
        """Read a chunk straight into `views`, one per slice, in 4096-aligned memory, and check it.

        Several threads may read at once; the GIL is released.

        Returns:
            True: the bytes are right. False: a second read, past every cache, found damage too.

        Raises:
            StorageError: vanished, no permission, an I/O error.
            ConfigError: the views are not as long as the chunk.
        """
        nbytes = sum(view.nbytes for view in views)
        if nbytes != entry.nbytes:
            raise ConfigError(f"chunk {entry.key.hex()[:12]} has {entry.nbytes} bytes, the views given {nbytes}")
        path = self._path(shard_id)
        for direct in (True, False):
            try:
                direct_io.read_file(path, views, entry.offset, direct=direct and self.is_direct)
            except CorruptChunkError:
                continue
            if checksum(views) == entry.xxh3:
                return True
        self.counts["damaged_chunks"] += 1
        return False

    # -- writing ---------------------------------------------------------------------

    def write(self, scope: str, chunks: Sequence[ChunkToWrite]) -> Shard | None:
        """Write a shard with `chunks`, parents before children; durable and readable by others once this returns.

        Space is reserved first, so the cap is never overshot; `evict` is called if there is too little.

        Returns:
            The shard, or None if there is no room.

        Raises:
            StorageError: the disk is full or broken. Nothing is left behind.
            CorruptChunkError: the chunks don't fit each other or the namespace.
        """
        if self.read_only:
            return None
        header, entries = encode_header(self.ns, scope, chunks)
        for chunk, entry in zip(chunks, entries, strict=True):
            if (nbytes := sum(view.nbytes for view in chunk.views)) != entry.nbytes:
                raise CorruptChunkError(f"chunk {chunk.key.hex()[:12]} has {nbytes} bytes, expected {entry.nbytes}")
        total = entries[-1].offset + entries[-1].nbytes

        def fill(fd: int, temp: Path) -> None:
            write_shard(fd, header, [chunk.views for chunk in chunks])

        return self._publish(paths.new_shard_id(), total, fill, scope, entries)

    def place(
        self, shard_id: str, nbytes: int, pieces: Pieces, *,
        sha256: Callable[[], str] | None = None, may_link: Callable[[], bool] | None = None,
    ) -> Shard | None:  # fmt: skip
        """Take in a whole shard file of `nbytes` bytes whose sha256 is `shard_id`, given piece by piece (import).

        Args:
            sha256: Gives the digest of all pieces once they have come, where the caller takes it anyway.
            may_link: Asked once the shard is verified and durable, before anybody can see it. It may wait.

        Returns:
            The shard, also if it was here already; None if there is no room, or `may_link` says no.

        Raises:
            CorruptChunkError: not these bytes, or a damaged header. Nothing is left behind.
            IncompatibleError: a shard of another namespace. Nothing is left behind.
            StorageError: the disk is full or broken. Nothing is left behind.
        """
        if self.read_only:
            return None
        if len(shard_id) != 64:
            raise ConfigError(f"shard id {shard_id!r:.80} is not a sha256, expected 64 lower-case hex digits")
        if nbytes <= 0 or nbytes % direct_io.ALIGN:
            raise CorruptChunkError(f"shard {shard_id[:12]} has {nbytes} bytes, expected a multiple of 4096")
        header: list[ShardHeader] = []
        if os.path.lexists(self._path(shard_id)):
            try:
                return self._read_shard(shard_id)
            except (CorruptChunkError, IncompatibleError):
                self._move_to_quarantine(shard_id)
        fill = whole_shard(shard_id, nbytes, pieces, self.ns, sha256=sha256, found=header.append)
        shard = self._publish(shard_id, nbytes, fill, "", (), retry=False, may_link=may_link)
        return shard and shard._replace(scope=header[0].scope, entries=header[0].chunks)

    def place_part(
        self, scope: str, chunks: Sequence[Chunk], data: Pieces, *, may_link: Callable[[], bool] | None = None
    ) -> Shard | None:
        """Write a new shard with `chunks`, parents before children, whose ranges come one after the other in `data`.

        That checks what it yields, and raises when it isn't right. All else as `place`.
        """
        if self.read_only:
            return None
        header, entries = encode_header(self.ns, scope, chunks)
        total = entries[-1].offset + entries[-1].nbytes
        fill = part_of_shard(header, total, data)
        return self._publish(paths.new_shard_id(), total, fill, scope, entries, retry=False, may_link=may_link)

    def _publish(
        self, shard_id: str, nbytes: int, fill: Fill, scope: str, entries: tuple[ChunkEntry, ...], *,
        retry: bool = True, may_evict: bool = True, may_link: Callable[[], bool] | None = None,
    ) -> Shard | None:  # fmt: skip
        path = self._path(shard_id)
        try:
            published = publish(
                shard_id, path, nbytes, fill, room=self._room, writer=self._writer(),
                listing=self._listing, is_direct=self.is_direct, retry=retry and may_evict, may_evict=may_evict,
                may_link=may_link,
            )  # fmt: skip
        except StorageError as error:
            self.counts["write_errors"] += 1
            self.last_error = str(error)
            raise
        if not published:
            self.counts["no_room"] += may_evict
            return None
        self.counts["shards_written"] += 1
        self.counts["bytes_written"] += nbytes
        return Shard(shard_id, path, scope, entries, *paths.size_and_time(path))

    # -- room ------------------------------------------------------------------------

    def used_bytes(self) -> int:
        """Real bytes of the whole cache directory, as `du` counts: directories, temporary files, quarantine."""
        return self._room.used_bytes()

    def enforce_cap(self) -> bool:
        """Evict until the directory is within its cap, which may be smaller than at the last start; True if it is."""
        return self.read_only or self._room.make(0)

    def missing_bytes(self, ahead_bytes: int) -> int:
        """How much too little room there is for `ahead_bytes` more, once quarantine and unused namespaces gave way."""
        return 0 if self.read_only else self._room.missing(ahead_bytes)

    def evicting(self) -> AbstractContextManager[bool]:
        """`with` it while shards are chosen to go: True for one process per directory at a time, never waits."""
        return writers.only_evictor(self.cache_dir)

    def reread(self, shard_id: str) -> Shard | None:
        """A known shard as its header tells; None if it can't be read."""
        try:
            return self._read_shard(shard_id)
        except (CorruptChunkError, IncompatibleError, StorageError):
            return None

    # -- removing --------------------------------------------------------------------

    def drop(self, shard_id: str) -> int:
        """Remove a shard; returns its real bytes, 0 if it was gone. Takes no lock: `evict` calls it."""
        if self.read_only:
            return 0
        with self._listing.removing(shard_id):
            nbytes = paths.remove_file(self._path(shard_id))
        self.counts["shards_dropped"] += nbytes > 0
        return nbytes

    def quarantine(self, shard_id: str, good: Sequence[ChunkEntry]) -> Shard | None:
        """Set a damaged shard aside. Those of the `good` chunks that are right are copied into a new shard first.

        Returns:
            The new shard; None if nothing could be saved (or this tier is read-only).
        """
        paths.shard_name(shard_id)
        is_known = self._listing.is_known(shard_id)
        self._listing.ignore(shard_id)
        if self.read_only or not is_known:
            return None
        salvaged = None
        try:
            salvaged = self._salvage(shard_id, good)
        except (StorageError, CorruptChunkError, IncompatibleError) as error:
            log.warning("kvsnap: nothing saved of damaged shard %s: %s", shard_id[:12], error)
        self._move_to_quarantine(shard_id)
        return salvaged

    def _salvage(self, shard_id: str, good: Sequence[ChunkEntry]) -> Shard | None:
        if not good:
            return None
        buffer = direct_io.aligned_buffer(max(entry.nbytes for entry in good))
        right = [entry for entry in in_file_order(good) if self.read_chunk(shard_id, entry, [buffer[: entry.nbytes]])]
        salvaged = self._copy(shard_id, right, may_evict=True) if right else None
        self.counts["chunks_salvaged"] += len(salvaged.entries) if salvaged else 0
        return salvaged

    def compact(self, shard_id: str, alive: Sequence[ChunkEntry]) -> Shard | None:
        """Copy the `alive` chunks of a shard into a new one, each checked, one at a time; the caller drops the old one.

        Returns:
            The new shard; None where there is no room for it beside the old one: nothing is evicted for it.

        Raises:
            CorruptChunkError: one of the chunks is damaged. StorageError: vanished, or the disk fails.
        """
        return None if self.read_only or not alive else self._copy(shard_id, in_file_order(alive), may_evict=False)

    def _copy(self, shard_id: str, chosen: Sequence[ChunkEntry], *, may_evict: bool) -> Shard | None:
        scope = read_header(self._path(shard_id), expect=self.ns).scope
        header, entries = encode_header(self.ns, scope, chosen)
        fill = copying(partial(self.read_chunk, shard_id), header, chosen, entries)
        total = entries[-1].offset + entries[-1].nbytes
        return self._publish(paths.new_shard_id(), total, fill, scope, entries, may_evict=may_evict)

    def _move_to_quarantine(self, shard_id: str) -> None:
        target = self.dir / paths.QUARANTINE
        try:
            with self._listing.removing(shard_id):
                os.rename(self._path(shard_id), target / paths.shard_name(shard_id))
            fsync_dir(target)
            fsync_dir(self._shards)
        except OSError as error:
            log.warning("kvsnap: shard %s can't be moved to quarantine: %s", shard_id[:12], error.strerror)
            return
        self.counts["quarantined"] += 1
        log.warning("kvsnap: shard %s is damaged: moved to %s", shard_id[:12], target)

    def clear(self) -> tuple[int, int]:
        """Remove all shards of this namespace, quarantine and usage; returns how many shards, and the real bytes."""
        if self.read_only:
            return 0, 0
        num_shards = nbytes = 0
        with self._lock:
            for shard_id in self._listing.all():
                freed = self.drop(shard_id)
                num_shards, nbytes = num_shards + (freed > 0), nbytes + freed
            for entry in paths.entries(self.dir / paths.QUARANTINE):
                nbytes += paths.remove_file(entry) if paths.is_own_file(entry.name) else 0
            nbytes += paths.remove_file(self.dir / paths.USAGE)
        return num_shards, nbytes

    # -- usage, engines, end ---------------------------------------------------------

    def news_of_usage(self) -> dict[ChunkKey, tuple[int, float]]:
        """`load_usage` if somebody else has stored since this tier last did or looked; else nothing. Cheap then."""
        before, self._seen_usage = self._seen_usage, paths.stamp(self.dir / paths.USAGE)
        return self.load_usage() if self._seen_usage not in (before, None) else {}

    def load_usage(self) -> dict[ChunkKey, tuple[int, float]]:
        """Hits and last use (seconds since 1970) by key, as stored last; empty if there is none or it is damaged."""
        try:
            return usage.read(self.dir / paths.USAGE)
        except FileNotFoundError:
            return {}
        except (OSError, CorruptChunkError) as error:
            self.counts["usage_errors"] += 1
            log.warning("kvsnap: %s is not used: %s", self.dir / paths.USAGE, error)
            return {}

    def store_usage(self, rows: Iterable[usage.Row]) -> None:
        """Replace the usage file. Skipped, and counted, if there is no room or the disk fails: it is advisory."""
        if self.read_only:
            return
        data = usage.encode(rows)
        try:
            with self._lock:
                if self.used_bytes() + direct_io.padded(len(data)) > self._room.limit_bytes:
                    self.counts["usage_errors"] += 1
                    return
                self._writer().write_file(self.dir / paths.USAGE, data)
                self._seen_usage = paths.stamp(self.dir / paths.USAGE)
        except StorageError as error:
            self.counts["usage_errors"] += 1
            self.last_error = str(error)

    def register(self, record: engines.EngineRecord) -> None:
        """Write the record by which jobs find this engine. Nothing in a read-only tier."""
        if not self.read_only:
            engines.write_record(self.dir, record, self._writer())

    def close(self) -> None:
        """Remove this writer's temporary directory. Shards stay. Later writes raise StorageError."""
        if self.writer is not None:
            writer, self.writer = self.writer, None
            writer.close()

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _writer(self) -> writers.WriterDir:
        writer = self.writer
        if writer is None:
            raise StorageError(f"the disk tier in {self.dir} is closed")
        return writer

    def _path(self, shard_id: str) -> Path:
        return self._shards / paths.shard_name(shard_id)
