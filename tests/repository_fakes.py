"""Storages with a clock that can be turned and with places to stop at, and checks of whole repositories."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvsnap.listing import list_snapshots
from kvsnap.manifest import Digest
from kvsnap.namespace import Namespace
from kvsnap.repository import Repository, catalog_name, manifest_name, shard_name
from kvsnap.repository_prune import prune_repository
from kvsnap.snapshot_export import ExportReport, export_snapshot
from kvsnap.storage import MemoryStorage, Storage
from kvsnap.storage.wrapper import WrapperStorage
from tests.snapshot_fakes import chain, prompt, store

T = TypeVar("T")
MAX = 1 << 30


class TimedStorage(MemoryStorage):
    """Its clock is the tests'."""

    def __init__(self) -> None:
        self.time = 1_700_000_000.0
        super().__init__()

    def now(self) -> float:
        return self.time


class StoppingStorage(WrapperStorage):
    """Calls `before(operation, name)` ahead of every request and `after` behind it."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.before: Callable[[str, str], None] = lambda operation, name: None
        self.after: Callable[[str, str], None] = lambda operation, name: None

    def _call(self, operation: str, name: str, act: Callable[[], T]) -> T:
        self.before(operation, name)
        result = act()
        self.after(operation, name)
        return result


class Gate:
    """Stops the one who comes by, until it is opened."""

    def __init__(self, matches: Callable[[str, str], bool]) -> None:
        self._matches = matches
        self._reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self, operation: str, name: str) -> None:
        if not self._reached.is_set() and self._matches(operation, name):
            self._reached.set()
            assert self._opened.wait(20)

    def open(self) -> None:
        """Let the one who stands there, and all later ones, pass."""
        self._opened.set()

    def wait_or_end(self, task: Task) -> bool:
        """Wait until somebody stands at the gate, or `task` has ended without; whether it has."""
        while not self._reached.wait(0.001):
            if not task.is_alive():
                return not self._reached.is_set()
        return False

    @contextmanager
    def reached(self) -> Iterator[None]:
        """Inside, somebody stands at the gate; it opens at the end."""
        assert self._reached.wait(20)
        try:
            yield
        finally:
            self._opened.set()


class Task(threading.Thread):
    """A thread whose result, or error, the test takes."""

    def __init__(self, act: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self._result: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._act()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self.join(30)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


def removing(storage: Storage, name: str) -> Callable[[str, str], None]:
    """What a `StoppingStorage` calls: an object is listed, and gone when it is asked for."""

    def before(operation: str, asked_for: str) -> None:
        if asked_for == name:
            storage.delete(name)

    return before


def names_in(storage: Storage, prefix: str = "") -> list[str]:
    return [info.name for info in storage.list(prefix)]


def content_of(storage: Storage) -> dict[str, bytes]:
    """Every object but the control plane's."""
    control = ("leases/", "gc/")
    return {name: storage.get(name, max_bytes=MAX) for name in names_in(storage) if not name.startswith(control)}


def check_whole(storage: Storage) -> set[str]:
    """Everything that can be reached exists and is right: invariants 3, 4 and 5.

    Returns:
        Ids of the snapshots that are listed.
    """
    repository = Repository(storage)
    report = list_snapshots(storage)
    assert not report.problems
    listed = {str(row.snapshot) for row in report.snapshots}
    for name in repository.ref_names():
        assert repository.ref(name).snapshot in listed
    for row in report.snapshots:
        manifest = repository.manifest(row.snapshot)
        catalog = repository.catalog(manifest)
        assert catalog_name(manifest.catalog.digest) in names_in(storage, "catalogs/")
        assert (catalog.parent_row < np.arange(len(catalog))).all()
        for shard in manifest.shards:
            data = storage.get(shard_name(shard.digest), max_bytes=MAX)
            assert hashlib.sha256(data).hexdigest() == shard.digest
    for name in names_in(storage, "manifests/"):
        if name.endswith(".sig"):
            continue
        assert hashlib.sha256(storage.get(name, max_bytes=MAX)).hexdigest() in name
    return listed


def reachable(storage: Storage, snapshot: str) -> set[str]:
    """Names of everything that a snapshot needs."""
    manifest = Repository(storage).manifest(Digest(snapshot))
    names = {shard_name(shard.digest) for shard in manifest.shards}
    return names | {catalog_name(manifest.catalog.digest), manifest_name(Digest(snapshot))}


def race(storage: Storage, cache: Path, ns: Namespace) -> None:
    """Two exporters send the same shards at once, while a prune without grace runs again and again: nothing is lost."""
    Repository.open_or_create(storage)
    more = cache.parent / "more"
    shutil.copytree(cache, more)
    store(more, ns, chain(ns, prompt(9, 128)))
    barrier = threading.Barrier(3, timeout=20)
    stop = threading.Event()

    def export(directory: Path, tag: str) -> list[ExportReport]:
        barrier.wait()
        return [export_snapshot(directory, storage, tag=tag) for _ in range(3)]

    def prune() -> int:
        barrier.wait()
        rounds = 0
        while not stop.is_set():
            prune_repository(storage, grace_s=0)
            rounds += 1
        return rounds

    tasks = [Task(lambda: export(cache, "one")), Task(lambda: export(more, "two"))]
    pruning = Task(prune)
    reports = [report for task in tasks for report in task.result()]
    stop.set()

    assert pruning.result() >= 1
    assert {report.snapshot for report in reports} <= check_whole(storage)
    prune_repository(storage, grace_s=0)
    assert {report.snapshot for report in reports} <= check_whole(storage)
