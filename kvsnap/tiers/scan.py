"""Which shards are in a directory, which of them are known, and what changed since the last look."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvsnap.tiers import paths

_SETTLE_NS = 50_000_000


class Listing:
    """The ids of one directory of shards. Thread-safe; only ever lists names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: set[str] = set()
        self._ignored: set[str] = set()
        self._busy: set[str] = set()
        self._mutex = threading.Lock()
        self._stamp: tuple[int, int] | None = None

    def all(self) -> list[str]:
        """The ids of all files that are named like a shard."""
        stamp = paths.stamp(self._directory)
        names = [entry.name for entry in paths.entries(self._directory)]
        # What changes in the same tick of the kernel's clock wouldn't show in the time stamp: look again next time.
        settled = stamp is not None and stamp[1] < time.time_ns() - _SETTLE_NS
        self._stamp = stamp if settled else None
        return [shard_id for name in names if (shard_id := paths.shard_id_of(name)) is not None]

    def is_unchanged(self) -> bool:
        """Whether no name changed since the last `all`; one system call. False if in doubt."""
        return self._stamp is not None and self._stamp == paths.stamp(self._directory)

    def is_new(self, shard_id: str) -> bool:
        with self._mutex:
            return not (shard_id in self._known or shard_id in self._ignored or shard_id in self._busy)

    def is_known(self, shard_id: str) -> bool:
        with self._mutex:
            return shard_id in self._known

    def know(self, shard_id: str) -> None:
        with self._mutex:
            self._known.add(shard_id)

    def ignore(self, shard_id: str) -> None:
        """Neither known nor new, until the file is gone."""
        with self._mutex:
            self._known.discard(shard_id)
            self._ignored.add(shard_id)

    def take_vanished(self) -> list[str]:
        """Ids that were known and whose files are gone without our doing; they aren't known any more."""
        with self._mutex:
            before = set(self._known)
        listed = set(self.all())
        with self._mutex:
            vanished = (before - listed - self._busy) & self._known
            self._known -= vanished
            self._ignored &= listed
        return sorted(vanished)

    @contextmanager
    def adding(self, shard_id: str) -> Iterator[None]:
        """Around the act that makes the file appear: nobody takes it for a new one meanwhile, then it is known."""
        with self._being_busy(shard_id):
            yield
            with self._mutex:
                self._known.add(shard_id)
                self._ignored.discard(shard_id)

    @contextmanager
    def removing(self, shard_id: str) -> Iterator[None]:
        """Around the act that makes the file go: nobody takes it for a vanished one."""
        with self._being_busy(shard_id):
            yield
            with self._mutex:
                self._known.discard(shard_id)
                self._ignored.discard(shard_id)

    @contextmanager
    def _being_busy(self, shard_id: str) -> Iterator[None]:
        with self._mutex:
            self._busy.add(shard_id)
        try:
            yield
        finally:
            with self._mutex:
                self._busy.discard(shard_id)
