"""Try again what failed by chance: with growing, jittered pauses, and never for ever.

A store that is asked too fast answers everybody with an error at the same time; whoever
waits a *random* time up to a growing bound ("full jitter") spreads the load by itself.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

from kvsnap.errors import CorruptChunkError, NotFoundError, StorageError
from kvsnap.storage.base import Buffer, ObjectInfo, Reader, RefusedError, Storage
from kvsnap.storage.wrapper import WrapperStorage

log = logging.getLogger(__name__)

T = TypeVar("T")

_PROGRESS_BYTES = 1 << 20
"""A read that got so far since it broke off has every try before it again: large objects on slow links end, too."""


def is_permanent(error: Exception) -> bool:
    """Whether doing the same again can't help. The only place that decides this."""
    return not isinstance(error, StorageError) or isinstance(error, RefusedError)


_SILENT_S = 10.0
"""After so long somebody who waits is told why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and how patiently."""

    tries: int = 8
    """Of one operation, in all."""
    first_pause_s: float = 0.2
    """Bound of the first pause; it doubles each time."""
    longest_pause_s: float = 5.0
    deadline_s: float = 60.0
    """No try begins later than this after the first one failed, however long that one took."""


class RetryStorage(WrapperStorage):
    """Repeats what failed by chance, and tells an own write whose answer got lost from somebody else's.

    Args:
        sleep, rng: For tests.
    """

    def __init__(
        self,
        inner: Storage,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__(inner)
        self._policy = policy or RetryPolicy()
        self._sleep = sleep
        self._rng = rng or random.Random()
        self._lock = threading.Lock()
        self.retries = 0
        """Tries after a first one, so far."""

    def _call(self, operation: str, name: str, act: Callable[[], T]) -> T:
        attempts = _Attempts(self)
        while True:
            try:
                return act()
            except StorageError as error:
                attempts.failed(error, f"{operation} {name}".rstrip())

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        return self._write("put_if_absent", name, data, lambda: self.inner.put_if_absent(name, data))

    def put_if_match(self, name: str, data: Buffer, version: str | None) -> bool:
        return self._write("put_if_match", name, data, lambda: self.inner.put_if_match(name, data, version))

    def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
        return self._write("put_stream", "", None, lambda: self.inner.put_stream(pieces, name))

    def put_known(self, name: str, pieces: Callable[[], Iterable[Buffer]], *, nbytes: int, sha256: str) -> bool:
        return self._write(
            "put_known", name, None, lambda: self.inner.put_known(name, pieces, nbytes=nbytes, sha256=sha256)
        )

    def _write(self, operation: str, name: str, data: Buffer | None, act: Callable[[], bool]) -> bool:
        """A conditional write; after a failed try the name may be taken by that very try.

        Then the bytes decide (those of a stream are named by their digest: whoever stored them, they are right).
        """
        failed = False

        def attempt() -> bool:
            nonlocal failed
            try:
                done = act()
            except StorageError:
                failed = True
                raise
            return done or (failed and (data is None or holds(self.inner, name, data)))

        return self._call(operation, name, attempt)

    def delete(self, name: str) -> bool:
        return self.delete_while(name, lambda: None)

    def delete_while(self, name: str, check: Callable[[], None]) -> bool:
        failed = False

        def attempt() -> bool:
            nonlocal failed
            try:
                return self.inner.delete_while(name, check) or failed
            except StorageError:
                failed = True
                raise

        return self._call("delete", name, attempt)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        attempts = _Attempts(self)
        told: set[str] = set()
        while True:
            try:
                for info in self.inner.list(prefix):
                    if info.name not in told:
                        told.add(info.name)
                        yield info
                        attempts.got_on()
                return
            except StorageError as error:
                attempts.failed(error, f"list {prefix}")

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        reader = _RetryReader(self.inner, name, offset, nbytes, _Attempts(self))
        try:
            yield reader.opened()
        finally:
            reader.close()


class _Attempts:
    """Counts the failures of one operation, and waits after each."""

    def __init__(self, storage: RetryStorage) -> None:
        self._storage = storage
        self._policy = storage._policy
        self._failures = 0
        self._failed_at = 0.0
        self._began = time.monotonic()
        self._is_told = False

    def got_on(self) -> None:
        """Something has come: whoever waits, waits since now."""
        self._began = time.monotonic()

    def made_progress(self) -> None:
        """What fails from now on is a new failure."""
        self._failures = 0

    def failed(self, error: StorageError, what: str) -> None:
        """Wait before the next try, or raise `error`: it is permanent, or enough is enough."""
        policy, storage = self._policy, self._storage
        if not self._failures:
            self._failed_at = time.monotonic()
        self._failures += 1
        if is_permanent(error) or self._failures >= policy.tries:
            raise error
        bound = min(policy.longest_pause_s, policy.first_pause_s * 2 ** (self._failures - 1))
        with storage._lock:
            pause = storage._rng.uniform(0, bound)
            storage.retries += 1
        if time.monotonic() + pause - self._failed_at > policy.deadline_s:
            raise error
        log.debug("kvsnap: %s: try %d failed, next in %.2f s: %s", what, self._failures, pause, error)
        if not self._is_told and (since := time.monotonic() - self._began) > _SILENT_S:
            self._is_told = True
            log.warning("kvsnap: %s has not succeeded for %.0f s, trying again: %s", what, since, error)
        storage._sleep(pause)


class _RetryReader:
    """Goes on where a read broke off, by a ranged request. Only for immutable objects, whose bytes are then checked."""

    def __init__(self, inner: Storage, name: str, offset: int, nbytes: int | None, attempts: _Attempts) -> None:
        self._inner = inner
        self._name = name
        self._offset = offset
        self._left = nbytes
        self._attempts = attempts
        self._read = 0
        """Bytes since the last failure"""
        self._stack = ExitStack()
        self._reader: Reader | None = None

    def opened(self) -> _RetryReader:
        while self._reader is None:
            try:
                self._reader = self._stack.enter_context(
                    self._inner.open_read(self._name, offset=self._offset, nbytes=self._left)
                )
            except StorageError as error:
                self._attempts.failed(error, f"open {self._name}")
        return self

    def readinto(self, buffer: memoryview, /) -> int:
        while True:
            self.opened()
            assert self._reader is not None
            try:
                found = self._reader.readinto(buffer)
            except StorageError as error:
                self.close()
                self._attempts.failed(error, f"read {self._name}")
                self._read = 0
                continue
            self._attempts.got_on()
            self._read += found
            if self._read >= _PROGRESS_BYTES:
                self._attempts.made_progress()
            self._offset += found
            if self._left is not None:
                self._left -= found
            return found

    def close(self) -> None:
        self._reader = None
        self._stack.close()


def holds(storage: Storage, name: str, data: Buffer) -> bool:
    """Whether the bytes under `name` are `data`."""
    try:
        return storage.get(name, max_bytes=len(memoryview(data).cast("B"))) == data
    except (CorruptChunkError, NotFoundError):
        return False
