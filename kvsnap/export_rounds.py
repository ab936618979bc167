"""Export every so often, so that a ref names a snapshot of what the engines hold now.

Several leaders may export to one ref. A ref moves by compare-and-swap and each move names a whole snapshot, so the last
one wins and nothing is lost. A leader moves it only to what is new: it never undoes another leader's move, nor a roll
back, just because its own round comes by, or because it failed or began anew in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, KvsnapError, NotFoundError
from kvsnap.manifest import Digest
from kvsnap.repository import Repository
from kvsnap.rounds import Pace, Stop, StoppedError
from kvsnap.snapshot_export import ExportReport
from kvsnap.storage import Storage

IsOwed = Callable[[Digest], bool]
"""Whether the ref shall yet move to a snapshot that the repository had already."""
Export = Callable[[ExportReport | None, IsOwed], ExportReport]
"""Exports once. It is given what came out of it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRound:
    """What became of one round."""

    outcome: Literal["exported", "unchanged", "failed"]
    error: str | None = None
    """Why it failed."""
    is_refused: bool = False
    """It failed because of what was found: damage, or another format or model."""
    failures: int = 0
    """Rounds that failed in a row, this one included."""
    last_successful_export: float | None = None
    """When a round last did well [Unix time, s]; None: never since the start."""
    report: ExportReport | None = None
    """None where it failed."""


def is_owed(storage: Storage, tag: str | None, snapshot: Digest, *, settled: Digest | None = None) -> bool:
    """Whether the ref `tag` has never named the snapshot: whoever published it failed, or died, before the ref moved.

    A ref that did name it, as far as its history goes back, was moved on by somebody who meant it. So it was where the
    snapshot is `settled`: it has been dealt with before. A ref that isn't there is made.
    """
    if tag is None:
        return False
    try:
        ref = Repository.open(storage).ref(tag)
    except NotFoundError:
        return True
    return snapshot not in (settled, ref.snapshot, *(state.snapshot for state in ref.history))


class ExportRounds:
    """Calls `export` again and again. A failure is told at once, and each later round says how old the last success
    is: who only sees that nothing new comes does not know whether there is nothing new."""

    def __init__(
        self, export: Export, storage: Storage, tag: str | None, *, stop: Stop, clock: Callable[[], float] = time.time
    ) -> None:
        self._export = export
        self._storage = storage
        self._tag = tag
        self._stop = stop
        self._clock = clock
        self._failures = 0
        self._last_success: float | None = None
        self._last: ExportReport | None = None
        """Of the last round that did well: the ref has taken its snapshot, or wasn't to take it."""

    def round(self) -> ExportRound:
        """One round. What fails is told in the answer.

        Raises:
            ConfigError: it can't work, now or later.
            StoppedError: somebody said stop. The repository is as whole as before.
        """
        try:
            settled = None if self._last is None else self._last.snapshot
            report = self._export(self._last, partial(is_owed, self._storage, self._tag, settled=settled))
        except (ConfigError, StoppedError):
            raise
        except (KvsnapError, OSError) as error:
            self._stop.check()  # it may be why
            self._failures += 1
            return ExportRound(
                outcome="failed",
                error=str(error),
                is_refused=isinstance(error, CorruptChunkError | IncompatibleError),
                failures=self._failures,
                last_successful_export=self._last_success,
            )
        self._last = report
        self._failures = 0
        self._last_success = self._clock()
        return ExportRound(
            outcome="exported" if report.is_new else "unchanged",
            last_successful_export=self._last_success,
            report=report,
        )

    def run(self, pace: Pace, told: Callable[[ExportRound], None]) -> None:
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
