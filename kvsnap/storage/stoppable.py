"""A storage whose long transfers end at once when somebody says stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from kvsnap.rounds import Stop
from kvsnap.storage.base import Buffer, Reader, Storage
from kvsnap.storage.wrapper import WrapperStorage


class StoppableStorage(WrapperStorage):
    """Raises `StoppedError` between the pieces of a shard. Short requests go on, so that a lease is still given back.

    Args:
        inner: Opened with `stop.sleep`, if it waits and tries again.
    """

    def __init__(self, inner: Storage, stop: Stop) -> None:
        super().__init__(inner)
        self._stop = stop

    def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
        self._stop.check()
        return super().put_stream(lambda: self._checked(pieces()), name)

    def put_known(self, name: str, pieces: Callable[[], Iterable[Buffer]], *, nbytes: int, sha256: str) -> bool:
        self._stop.check()
        return super().put_known(name, lambda: self._checked(pieces()), nbytes=nbytes, sha256=sha256)

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        self._stop.check()
        with super().open_read(name, offset=offset, nbytes=nbytes) as reader:
            yield _StoppableReader(reader, self._stop)

    def _checked(self, pieces: Iterable[Buffer]) -> Iterator[Buffer]:
        for piece in pieces:
            self._stop.check()
            yield piece


class _StoppableReader:
    def __init__(self, inner: Reader, stop: Stop) -> None:
        self._inner = inner
        self._stop = stop

    def readinto(self, buffer: memoryview, /) -> int:
        self._stop.check()
        return self._inner.readinto(buffer)
