"""How a shard gets its name: reserve, fill, make durable, link, in this order. Whenever that stops, nothing is torn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvsnap import direct_io
from kvsnap.atomic import link_new
from kvsnap.errors import CorruptChunkError, StorageError
from kvsnap.shard import ChunkEntry, write_shard
from kvsnap.tiers import paths
from kvsnap.tiers.room import FULL, Room
from kvsnap.tiers.scan import Listing
from kvsnap.tiers.writers import WriterDir

Fill = Callable[[int, Path], None]
"""Writes a file's content, given the file open for writing (with O_DIRECT where that works) and its path."""


def publish(
    shard_id: str, target: Path, nbytes: int, fill: Fill, *,
    room: Room, writer: WriterDir, listing: Listing, is_direct: bool, retry: bool, may_evict: bool = True,
    may_link: Callable[[], bool] | None = None,
) -> bool:  # fmt: skip
    """Write a file of `nbytes` bytes and give it the name `target`, unless that is there already.

    Args:
        fill: Called again after an eviction if the disk gets full while it writes and `retry` allows it.
        may_evict: Whether anything may go to make room for it.
        may_link: Asked once the file is durable, before it gets its name. It may wait.

    Returns:
        False if there is no room for it within the cap, or `may_link` says no.

    Raises:
        StorageError: the disk is full or broken.
        What `fill` raises. No temporary file is left in any case.
    """
    temp = writer.path / paths.shard_name(shard_id)
    try:
        while True:
            if room.reserve(writer, temp.name, nbytes, may_evict=may_evict) is None:
                return False
            try:
                _fill(temp, fill, is_direct)
                break
            except OSError as error:
                if error.errno not in FULL or not retry:
                    raise
                retry = False
                paths.remove_file(temp)
                room.free_disk(nbytes)
        if may_link is not None and not may_link():
            return False
        with listing.adding(shard_id):
            link_new(temp, target)
    except OSError as error:
        raise StorageError(f"shard {shard_id[:12]} can't be written: {error.strerror or error}") from error
    finally:
        paths.remove_file(temp)
    return True


def in_file_order(entries: Iterable[ChunkEntry]) -> list[ChunkEntry]:
    """As they lie in their shard; parents before children."""
    return sorted(entries, key=lambda entry: entry.offset)


def copying(
    read: Callable[[ChunkEntry, list[memoryview]], bool],
    header: bytes,
    old: Sequence[ChunkEntry],
    new: Sequence[ChunkEntry],
) -> Fill:
    """Fills a shard with chunks of another, one at a time through one buffer.

    Args:
        read: Reads and checks one of `old`; False raises CorruptChunkError in the filling.
        header: Of the new shard, with the chunks `new` in the order of `old`.
    """

    def fill(fd: int, temp: Path) -> None:
        buffer = direct_io.aligned_buffer(max(entry.nbytes for entry in old))
        write_shard(fd, header, [])
        for source, target in zip(old, new, strict=True):
            view = buffer[: source.nbytes]
            if not read(source, [view]):
                raise CorruptChunkError(f"chunk {source.key.hex()[:12]} is damaged, it can't be copied")
            direct_io.write_all(fd, [view], target.offset)

    return fill


def _fill(temp: Path, fill: Fill, is_direct: bool) -> None:
    flag = direct_io.O_DIRECT if is_direct else 0
    fd = os.open(temp, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flag)
    try:
        fill(fd, temp)
        os.fsync(fd)
    finally:
        os.close(fd)
