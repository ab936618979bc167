"""Random lives of a repository: exports, imports, tags, removals, prunes, crashes, pauses, and hours that pass.

Invariants 3 and 5: whatever can be reached exists and is whole, always; what was published and not
removed is listed. Operations crash at any request, and one at a time stops at any request
and goes on later, as a process does that sleeps or runs on a slow network.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvsnap import leases
from kvsnap.errors import ConfigError, CorruptChunkError, NotFoundError, StorageError
from kvsnap.refs import remove, roll_back, tag_snapshot
from kvsnap.repository import MARKER_NAME, Repository
from kvsnap.repository_prune import prune_repository
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.snapshot_merge import merge_snapshots
from kvsnap.storage import Storage
from tests.disk_fakes import make_namespace
from tests.repository_fakes import Gate, StoppingStorage, Task, TimedStorage, check_whole, names_in
from tests.snapshot_fakes import chain, chunks_at, prompt, store

TAGS = ("a", "b")
REFUSALS = (ConfigError, NotFoundError, StorageError)
"""What may be answered to a wrong or untimely command. Damage never is among them."""

NS = make_namespace()
MEANWHILE = ("export", "prune", "prune", "remove", "remove ref", "sleep")
CACHE = st.sampled_from((0, 0, 1, 2))
INDEX = st.integers(0, 7)


class CrashError(BaseException):
    """The process is gone; not even its clean-up runs."""


class Process(StoppingStorage):
    """A process's view of the storage: it dies at its `dies_at`-th request, before or after that took effect."""

    def __init__(self, inner: Storage, dies_at: int | None, *, after: bool = False) -> None:
        super().__init__(inner)
        self._left = dies_at
        self.is_dead = False
        if after:
            self.after = self._count
            self.before = self.check
        else:
            self.before = self._count

    def check(self, operation: str, name: str) -> None:
        if self.is_dead:
            raise CrashError

    def _count(self, operation: str, name: str) -> None:
        self.check(operation, name)
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self.is_dead = True
                raise CrashError


PLACES = (
    ("put*", "catalogs/*"),
    ("put*", "catalogs/*"),
    ("put*", "catalogs/*"),
    ("put_stream", "*"),
    ("put_if_match", "leases/*"),
    ("delete", "leases/*"),
    ("list", "gc/"),
    ("put_if_match", "gc/*"),
    ("put_if_absent", "gc/*"),
    ("delete", "gc/*"),
    ("delete", "shards/*"),
    ("delete", "manifests/*"),
    ("list", "shards/"),
    ("list", "manifests/"),
    ("*", "*"),
)
"""Requests (method and name) before which a process may stop for long.

None lies between the last renewal of a lease and the request that publishes: the lease's margin is
for what that takes, and whoever sleeps longer than it just there needs the grace period.
"""


def stops_at(place: tuple[str, str], number: int) -> Callable[[str, str], bool]:
    """The `number`-th request at a place."""
    left = number

    def matches(operation: str, name: str) -> bool:
        nonlocal left
        if not (fnmatch(operation, place[0]) and fnmatch(name, place[1])) or name.startswith("refs/"):
            return False
        if "put" in operation and name.startswith("manifests/"):
            return False
        left -= 1
        return left < 0

    return matches


class Lives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.storage = TimedStorage()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(leases, "_clock", lambda: self.storage.time)
        for module in ("refs", "snapshot_export", "snapshot_merge"):
            self.patches.setattr(f"kvsnap.{module}.now_text", self.now_text)
        self.patches.setattr("kvsnap.upload.NUM_WORKERS", 1)
        self.patches.setattr("kvsnap.writing.SWEEP_TIMEOUT_S", 0.0)  # whoever waits here waits for one who stands
        self.patches.setattr("kvsnap.writing._POLL_S", 0.001)
        self.memory = tempfile.TemporaryDirectory(prefix="kvsnap-test-", dir=_memory())
        self.caches = [Path(self.memory.name) / f"cache-{i}" for i in range(3)]
        self.published: dict[str, int] = {}
        """Snapshots that somebody was told of, and when."""
        self.removed: dict[str, int] = {}
        self.step = 0

    def now_text(self) -> str:
        return datetime.fromtimestamp(self.storage.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    @initialize()
    def fill(self) -> None:
        shared = chain(NS, prompt(1, 192, shared=64))
        store(self.caches[0], NS, shared)
        store(self.caches[1], NS, shared, chain(NS, prompt(2, 128, shared=64), start=1))
        store(self.caches[2], NS, chain(NS, prompt(3, 128)))

    def teardown(self) -> None:
        self.check()
        self.patches.undo()
        self.memory.cleanup()

    # -- operations ------------------------------------------------------------------

    def do(self, act: Callable[[Storage], Any], dies_at: int | None = None, *, after: bool = False) -> Any:
        self.step += 1
        started = self.step
        try:
            result = act(Process(self.storage, dies_at, after=after))
        except CrashError:
            assert dies_at is not None
        except REFUSALS:
            pass
        else:
            self.learn(result, started)

    def learn(self, result: Any, started: int) -> None:
        """What was published holds, unless somebody has removed it since the operation began."""
        snapshot = getattr(result, "snapshot", None)
        if snapshot is not None and self.removed.get(snapshot, -1) < started:
            self.published[snapshot] = started

    @rule(
        cache=CACHE,
        tag=st.sampled_from((None, *TAGS)),
        dies_at=st.none() | st.integers(0, 40),
        after=st.booleans(),
    )
    def export(self, cache: int, tag: str | None, dies_at: int | None, after: bool) -> None:
        self.do(lambda storage: export_snapshot(self.caches[cache], storage, tag=tag), dies_at, after=after)

    @rule(cache=CACHE, is_marked=st.booleans())
    def export_dies_before_its_manifest(self, cache: int, is_marked: bool) -> None:
        """Leaves shards that no snapshot names, a lease that runs out, and after a prune a list of them."""

        def die(operation: str, name: str) -> None:
            process.is_dead |= "put" in operation and name.startswith("manifests/")
            process.check(operation, name)

        process = Process(self.storage, None)
        process.before = die
        with contextlib.suppress(CrashError, *REFUSALS):
            self.learn(export_snapshot(self.caches[cache], process), self.step)
        self.storage.time += 301
        if is_marked:
            self.prune(None, after=False, grace_s=1000)

    @rule(dies_at=st.none() | st.integers(0, 40), after=st.booleans(), grace_s=st.sampled_from((0, 1000)))
    def prune(self, dies_at: int | None, after: bool, grace_s: float) -> None:
        self.do(lambda storage: prune_repository(storage, grace_s=grace_s), dies_at, after=after)

    @rule(i=INDEX, tag=st.sampled_from(TAGS), dies_at=st.none() | st.integers(0, 20), after=st.booleans())
    def tag(self, i: int, tag: str, dies_at: int | None, after: bool) -> None:
        snapshot = self.any_snapshot(i)
        self.do(lambda storage: tag_snapshot(storage, snapshot, tag), dies_at, after=after)

    @rule(tag=st.sampled_from(TAGS))
    def roll_back(self, tag: str) -> None:
        self.do(lambda storage: roll_back(storage, tag))

    @rule(i=INDEX, tag=st.none() | st.sampled_from(TAGS), dies_at=st.none() | st.integers(0, 12), after=st.booleans())
    def remove(self, i: int, tag: str | None, dies_at: int | None, after: bool) -> None:
        name = tag or self.any_snapshot(i)
        for snapshot in {name, *self.named(name)}:
            self.removed[snapshot] = self.step + 1
            self.published.pop(snapshot, None)
        self.do(lambda storage: remove(storage, name, with_snapshot=True), dies_at, after=after)

    @rule(i=INDEX, j=INDEX, dies_at=st.none() | st.integers(0, 40))
    def merge(self, i: int, j: int, dies_at: int | None) -> None:
        parts = [self.any_snapshot(i), self.any_snapshot(j)]
        self.do(lambda storage: merge_snapshots(storage, parts, tag="a"), dies_at)

    @precondition(lambda self: self.published)
    @rule(i=INDEX)
    def import_(self, i: int) -> None:
        snapshot = list(self.published)[i % len(self.published)]
        with tempfile.TemporaryDirectory(dir=self.memory.name) as target:
            report = import_snapshot(self.storage, snapshot, Path(target))
            assert report.num_chunks == report.total_chunks == len(chunks_at(Path(target), NS))

    @rule(
        kind=st.sampled_from(("export", "export", "export", "prune", "tag", "merge")),
        cache=CACHE,
        tag=st.sampled_from((None, *TAGS)),
        place=st.sampled_from(PLACES),
        number=st.integers(0, 2),
        meanwhile=st.lists(st.sampled_from(MEANWHILE), min_size=1, max_size=3),
        i=INDEX,
        j=INDEX,
    )
    def stop_in_the_middle(
        self,
        kind: str,
        cache: int,
        tag: str | None,
        place: tuple[str, str],
        number: int,
        meanwhile: list[str],
        i: int,
        j: int,
    ) -> None:
        """Something stops at a place, other things happen, it goes on."""
        self.step += 1
        started = self.step
        snapshots = [self.any_snapshot(i), self.any_snapshot(j)]
        storage = StoppingStorage(self.storage)
        storage.before = gate = Gate(stops_at(place, number))
        acts: dict[str, Callable[[], Any]] = {
            "export": lambda: export_snapshot(self.caches[cache], storage, tag=tag),
            "prune": lambda: prune_repository(storage, grace_s=0),
            "tag": lambda: tag_snapshot(storage, snapshots[0], "b"),
            "merge": lambda: merge_snapshots(storage, snapshots, tag=tag),
        }
        task = Task(acts[kind])
        if not gate.wait_or_end(task):
            for what in meanwhile:
                if what == "prune":
                    self.prune(None, after=False, grace_s=0)
                elif what == "export":
                    self.export(j % 3, "a", None, after=False)
                elif what == "remove":
                    self.remove(i, None, None, after=False)
                elif what == "remove ref":
                    self.remove(i, "a", None, after=False)
                elif what == "sleep":
                    self.storage.time += 301
                self.check()
        gate.open()
        try:
            result = task.result()
        except REFUSALS:
            return
        except CorruptChunkError as error:
            if "a prune has deleted" not in str(error):
                raise
            return
        self.learn(result, started)

    @rule(seconds=st.sampled_from((1, 100, 301, 2000)))
    def time_passes(self, seconds: int) -> None:
        self.storage.time += seconds

    # -- what must hold --------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        is_made = MARKER_NAME in names_in(self.storage)
        assert set(self.published) <= (check_whole(self.storage) if is_made else set())

    def any_snapshot(self, i: int) -> str:
        known = list(dict.fromkeys([*self.published, *self.removed])) or ["nothing"]
        return known[i % len(known)]

    def named(self, name: str) -> list[str]:
        try:
            return [Repository.open(self.storage).ref(name).snapshot]
        except (ConfigError, NotFoundError):
            return []


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@pytest.mark.parametrize("num_lives", [35, pytest.param(400, marks=pytest.mark.soak)])
def test_whatever_can_be_reached_exists(num_lives: int) -> None:
    """Invariants 3 and 5, under any interleaving."""
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=num_lives, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
