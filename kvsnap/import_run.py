"""The working half of an import: several shards on their way at once, each visible only after those that it needs.

Threads take the shards in the order of the plan, parents first. A shard is read, hashed, checked and
written under a temporary name, whatever the others do; it is linked once every earlier shard that holds parents of
its chunks is. So what is there is prefix-closed at any instant, and nobody waits for a later shard.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvsnap.catalog import Catalog
from kvsnap.errors import CorruptChunkError, IncompatibleError
from kvsnap.fetch import ShardFetcher, ShardTarget
from kvsnap.manifest import Manifest
from kvsnap.plan import I64, shards_needed_by
from kvsnap.runtime import widen_affinity
from kvsnap.transfer import NUM_WORKERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportUnit:
    """A shard to have, or the start of one."""

    shard: int
    """Position in the manifest."""
    rows: I64
    """Rows of the catalog that are wanted, in order of place."""
    nbytes: int
    """Bytes to fetch."""
    is_part: bool


class ImportRun:
    """Fetches units in parallel.

    Args:
        is_useful: Whether, with the units of these shards there, one more unit gives any chunk with a full chain.
            Asked once something couldn't be had.
        is_whole: Nothing is known yet that can't be had.
        allow_partial: Note what is damaged and go on, instead of stopping.
        placed: Told each unit as it becomes visible, one at a time.
        problem: Told what is left out, and why.
    """

    def __init__(
        self,
        fetcher: ShardFetcher,
        manifest: Manifest,
        catalog: Catalog,
        *,
        is_useful: Callable[[set[int], ImportUnit], bool],
        is_whole: bool,
        allow_partial: bool,
        placed: Callable[[ImportUnit], None],
        problem: Callable[[str], None],
    ) -> None:
        self._fetcher = fetcher
        self._manifest = manifest
        self._catalog = catalog
        self._is_useful = is_useful
        self._allow_partial = allow_partial
        self._on_placed = placed
        self._on_problem = problem
        self._changed = threading.Condition()
        self._waits: dict[int, set[int]] = {}
        """For each unit that isn't finished the earlier, unfinished ones that it needs; by shard."""
        self._needed_by: dict[int, list[int]] = {}
        self._have: set[int] = set()
        self._is_whole = is_whole
        self._is_stopped = False
        self._error: BaseException | None = None
        self.is_full = False
        """There was no room for a unit."""

    def run(self, units: Sequence[ImportUnit], present: set[int]) -> set[int]:
        """Fetch `units`, where the shards in `present` are there already; the shards that are there afterwards.

        Raises:
            CorruptChunkError, IncompatibleError, StorageError: the first thing that failed. What is placed stays.
        """
        self._have = set(present)
        for unit in units:
            needed = shards_needed_by(unit.rows, self._catalog.shard, self._catalog.parent_row)
            waits = self._waits.keys() & set(needed)
            self._waits[unit.shard] = waits
            for shard in waits:
                self._needed_by.setdefault(shard, []).append(unit.shard)
        executor = ThreadPoolExecutor(NUM_WORKERS, "kvsnap-import", initializer=widen_affinity)
        try:
            for future in [executor.submit(self._fetch, unit) for unit in units]:
                future.result()
        except BaseException as error:
            self._stop(error)
            raise
        finally:
            executor.shutdown(cancel_futures=True)
        if self._error is not None:
            raise self._error
        return self._have

    def _fetch(self, unit: ImportUnit) -> None:
        with self._changed:
            if self._is_stopped:
                return
            # What is on its way counts as if it were there: the exact answer comes before the link.
            if self.is_full or not (self._is_whole or self._is_useful(self._have.union(self._waits), unit)):
                self._finish(unit)
                return
        record = self._manifest.shards[unit.shard]
        target = ShardTarget(digest=record.digest, nbytes=record.nbytes, catalog=self._catalog, rows=unit.rows)
        is_refused = False

        def may_link() -> bool:
            nonlocal is_refused
            is_refused = not self._may_link(unit)
            return not is_refused

        try:
            fetch = self._fetcher.fetch_part if unit.is_part else self._fetcher.fetch
            shard = fetch(target, may_link=may_link)
            with self._changed:
                if shard is not None:
                    self._have.add(unit.shard)
                    self._on_placed(unit)
                else:
                    self.is_full |= not is_refused
                    self._is_whole = False
        except (CorruptChunkError, IncompatibleError) as error:
            if not self._allow_partial:
                self._stop(error)
                return
            with self._changed:
                self._is_whole = False
                self._on_problem(str(error))
        except BaseException as error:
            self._stop(error)
            return
        with self._changed:
            self._finish(unit)

    def _may_link(self, unit: ImportUnit) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or not self._waits[unit.shard])
            return not self._is_stopped and (self._is_whole or self._is_useful(self._have, unit))

    def _finish(self, unit: ImportUnit) -> None:
        """Under the lock."""
        del self._waits[unit.shard]
        for shard in self._needed_by.pop(unit.shard, ()):
            self._waits.get(shard, set()).discard(unit.shard)  # it may have failed first
        self._changed.notify_all()

    def _stop(self, error: BaseException) -> None:
        with self._changed:
            self._is_stopped = True
            self._error = self._error or error
            self._changed.notify_all()
