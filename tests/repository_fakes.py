"""Storages with a clock that can be turned and with places to stop at, and checks of whole repositories."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from kvsnap.listing import list_snapshots
from kvsnap.manifest import Digest
from kvsnap.repository import Repository, catalog_name, manifest_name, shard_name
from kvsnap.storage import MemoryStorage, Storage
from kvsnap.storage.wrapper import WrapperStorage

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
