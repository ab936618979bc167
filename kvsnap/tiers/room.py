"""Room within the cap, and files whose room is reserved before a byte is written."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from kvsnap.tiers import paths, quota
from kvsnap.tiers.writers import DirectoryLock, WriterDir

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What the file system answers when it has no room, whatever the cap says."""

_MAX_ROUNDS = 8


class Room:
    """Makes room in a cache directory: quarantine first, then unused namespaces, then whatever `evict` chooses.

    The directory lock is held from the count to the reservation, so several processes keep one cap together.
    """

    def __init__(self, cache_dir: Path, own: Path, cap_bytes: int, lock: DirectoryLock) -> None:
        self._cache_dir = cache_dir
        self._own = own
        self.cap_bytes = cap_bytes
        self._lock = lock
        self._meter = quota.Meter(cache_dir)
        self.evict: Callable[[int], int] | None = None

    @property
    def limit_bytes(self) -> int:
        """The cap less the margin for what can't be reserved."""
        return self.cap_bytes - quota.margin(self.cap_bytes)

    def used_bytes(self) -> int:
        """Real bytes of the whole cache directory, as `du` counts."""
        return self._meter.used_bytes()

    def make(self, nbytes: int) -> bool:
        """Free what is needed for `nbytes` more; False if that can't be. Nothing is freed for what can never fit."""
        if nbytes > self.limit_bytes:
            return False
        with self._lock:
            for free in (self._empty_quarantine, self._reclaim_foreign, *[self._evict] * _MAX_ROUNDS):
                over = self.used_bytes() + nbytes - self.limit_bytes
                if over <= 0:
                    return True
                if free(over) == 0 and free == self._evict:
                    return False
            return self.used_bytes() + nbytes <= self.limit_bytes

    def missing(self, nbytes: int) -> int:
        """How much too little room there is for `nbytes` more, once quarantine and unused namespaces gave way.

        0 for what can never fit: nothing should go for it.
        """
        if nbytes > self.limit_bytes or self.used_bytes() + nbytes <= self.limit_bytes:
            return 0
        with self._lock:
            for free in (self._empty_quarantine, self._reclaim_foreign):
                over = self.used_bytes() + nbytes - self.limit_bytes
                if over <= 0:
                    return 0
                free(over)
            return max(0, self.used_bytes() + nbytes - self.limit_bytes)

    def free_disk(self, nbytes: int) -> None:
        """The disk is full below the cap, as others use it too: free about `nbytes`, once."""
        with self._lock:
            freed = self._empty_quarantine(nbytes) + self._reclaim_foreign(nbytes)
            if freed < nbytes:
                self._evict(nbytes - freed)

    def reserve(self, writer: WriterDir, name: str, nbytes: int, *, may_evict: bool = True) -> Path | None:
        """Create the file `name` in the writer's directory, `nbytes` long and allocated; None if there is no room.

        Without `may_evict` nothing goes to make room.

        Raises:
            OSError: the disk is full even after an eviction, or fails. The file is then removed.
        """
        temp = writer.path / name
        with self._lock:
            if not (self.make(nbytes) if may_evict else self.used_bytes() + nbytes <= self.limit_bytes):
                return None
            try:
                _allocate(writer, temp, nbytes)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                if not may_evict:
                    return None
                self.free_disk(nbytes)
                _allocate(writer, temp, nbytes)
        return temp

    def _empty_quarantine(self, nbytes: int) -> int:
        del nbytes
        return quota.empty_quarantine(self._cache_dir)

    def _reclaim_foreign(self, nbytes: int) -> int:
        return quota.reclaim_foreign(self._cache_dir, self._own, nbytes)

    def _evict(self, nbytes: int) -> int:
        return 0 if self.evict is None else self.evict(nbytes)


def _allocate(writer: WriterDir, temp: Path, nbytes: int) -> None:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        fd = os.open(temp, flags, 0o644)
    except FileNotFoundError:  # somebody removed the writer's directory, e.g. where file locks don't work
        writer.create()
        fd = os.open(temp, flags, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except BaseException:
        paths.remove_file(temp)
        raise
    finally:
        os.close(fd)
