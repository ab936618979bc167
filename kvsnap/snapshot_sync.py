"""Sync: keep a cache directory at a moving ref.

Each round asks what the ref names now, which costs a request or two, and imports that snapshot if it is another one
than last time: incremental, since an import fetches only what the directory lacks. Nothing is ever removed: what is no
longer in the ref stays until it is evicted, and what was evicted or cleared is not fetched again before the ref moves.
What the cap left out is fetched once the cap or the disk grows. Live engines see new shards by themselves, within 2
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, KvsnapError, NotFoundError
from kvsnap.manifest import Digest
from kvsnap.repository import Repository
from kvsnap.rounds import Pace, Stop, StoppedError
from kvsnap.snapshot_import import ImportReport, import_snapshot
from kvsnap.storage import Storage, open_storage
from kvsnap.storage.stoppable import StoppableStorage
from kvsnap.tiers.quota import cap_of, filesystem_bytes
from kvsnap.transfer import Progress
from kvsnap.trust import TrustedKeys

_GROWTH = 1.01
"""Less is none: the size of some file systems swings with what else their pool holds."""

SyncOutcome = Literal["synced", "unchanged", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRound:
    """What one round found and did."""

    outcome: SyncOutcome
    """`synced`: the directory is at a snapshot that it wasn't at before; `unchanged`: at the same; `failed`: see
    `error`."""
    ref: str
    snapshot: Digest | None
    """What the ref names; None if that could not be read."""
    error: str | None = None
    """Why it failed."""
    is_refused: bool = False
    """It failed because of what the snapshot is: damaged, made for another engine, not signed as required."""
    failures: int = 0
    """Rounds that failed in a row, this one included."""
    last_success: float | None = None
    """When a round last did well [Unix time, s]."""
    is_full: bool = False
    """The directory lacks a part: the last import ended at the cap, and neither the cap nor the disk grew since."""
    report: ImportReport | None = None
    """Of the import; None where there was nothing to import."""


class SnapshotSync:
    """Keeps one directory at one ref.

    Args:
        url: The repository, or its storage.
        ref: A ref; or an id, which never moves.
        max_bytes, other_engines, trusted, progress: As of `import_snapshot`.
        stop: Ends a round, or the wait between two, early.

    Raises:
        ConfigError: `url` or `ref` makes no sense.
    """

    def __init__(
        self,
        url: str | Storage,
        ref: str,
        cache_dir: Path,
        *,
        max_bytes: int | None = None,
        other_engines: bool = False,
        trusted: TrustedKeys | None = None,
        progress: Progress | None = None,
        stop: Stop | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._stop = stop or Stop()
        storage = open_storage(url, sleep=self._stop.sleep) if isinstance(url, str) else url
        self._storage = StoppableStorage(storage, self._stop)
        self._ref = ref
        self._cache_dir = cache_dir
        self._max_bytes = max_bytes
        self._other_engines = other_engines
        self._trusted = trusted
        self._progress = progress
        self._clock = clock
        self._repository: Repository | None = None
        self._done: ImportReport | None = None
        self._bound_then = 0
        """Of the directory when `_done` was imported."""
        self._failures = 0
        self._last_success: float | None = None

    def round(self) -> SyncRound:
        """One round. What fails is told in the answer.

        Raises:
            ConfigError: it can't work, now or later.
            StoppedError: somebody said stop; what is there is a valid part.
        """
        snapshot = None
        report = None
        try:
            snapshot = self._resolve()
            if not self._is_done(snapshot):
                bound = self._bound()
                report = self._import()
                self._done, self._bound_then = report, bound
                snapshot = report.snapshot  # the ref may have moved meanwhile
        except (ConfigError, StoppedError):
            raise
        except (KvsnapError, OSError) as error:
            self._stop.check()  # it may be why
            self._failures += 1
            is_refused = isinstance(error, CorruptChunkError | IncompatibleError)
            return replace(self._answer("failed", snapshot), error=str(error), is_refused=is_refused)
        self._failures = 0
        self._last_success = self._clock()
        return replace(self._answer("unchanged" if report is None else "synced", snapshot), report=report)

    def follow(self, pace: Pace, told: Callable[[SyncRound], None]) -> None:
        """Rounds until somebody says stop; `told` hears of each.

        Raises:
            ConfigError: it can't work.
        """
        try:
            while True:
                told(self.round())
                self._stop.sleep(pace.pause_s(self._failures))
        except StoppedError:
            return

    def close(self) -> None:
        """Close the storage."""
        self._storage.close()

    def _answer(self, outcome: SyncOutcome, snapshot: Digest | None) -> SyncRound:
        return SyncRound(
            outcome=outcome,
            ref=self._ref,
            snapshot=snapshot,
            failures=self._failures,
            last_success=self._last_success,
            is_full=self._done is not None and self._done.is_full and self._done.snapshot == snapshot,
        )

    def _resolve(self) -> Digest:
        if self._repository is None:
            self._repository = Repository.open(self._storage)
        try:
            return self._repository.resolve(self._ref)
        except NotFoundError:
            Repository.open(self._storage)  # is all of it gone? then that is what to say
            raise

    def _is_done(self, snapshot: Digest) -> bool:
        """Whether this snapshot was imported, as far as there is room, and the directory has not been removed since."""
        done = self._done
        if done is None or done.snapshot != snapshot or not Path(done.directory).is_dir():
            return False
        return not done.is_full or self._bound() <= self._bound_then * _GROWTH

    def _bound(self) -> int:
        """What the directory may hold [bytes]. Not the room that is free: live engines make some all the time, for what
        they compute.
        """
        return min(cap_of(self._cache_dir), filesystem_bytes(self._cache_dir))

    def _import(self) -> ImportReport:
        return import_snapshot(
            self._storage,
            self._ref,
            self._cache_dir,
            max_bytes=self._max_bytes,
            other_engines=self._other_engines,
            trusted=self._trusted,
            progress=self._progress,
            sleep=self._stop.sleep,
        )
