"""A storage over another one, to be subclassed: retries, limits and faults are such."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from kvsnap.storage.base import Buffer, Capabilities, ObjectInfo, Reader, Storage, Versioned

T = TypeVar("T")


class WrapperStorage(Storage):
    """Passes everything on to `inner`, each request by way of `_call`."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url = inner.url
        self.needs_name_first = inner.needs_name_first

    def _call(self, operation: str, name: str, act: Callable[[], T]) -> T:
        """Do `act`, which is method `operation` of `inner` on `name`. May do it again."""
        return act()

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        return self._call("put_if_absent", name, lambda: self.inner.put_if_absent(name, data))

    def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
        return self._call("put_stream", "", lambda: self.inner.put_stream(pieces, name))

    def put_known(self, name: str, pieces: Callable[[], Iterable[Buffer]], *, nbytes: int, sha256: str) -> bool:
        return self._call("put_known", name, lambda: self.inner.put_known(name, pieces, nbytes=nbytes, sha256=sha256))

    def put(self, name: str, data: Buffer) -> None:
        self._call("put", name, lambda: self.inner.put(name, data))

    def get(self, name: str, *, max_bytes: int) -> bytes:
        return self._call("get", name, lambda: self.inner.get(name, max_bytes=max_bytes))

    def get_versioned(self, name: str, *, max_bytes: int) -> Versioned:
        return self._call("get_versioned", name, lambda: self.inner.get_versioned(name, max_bytes=max_bytes))

    def put_if_match(self, name: str, data: Buffer, version: str | None) -> bool:
        return self._call("put_if_match", name, lambda: self.inner.put_if_match(name, data, version))

    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        return self._call("read_into", name, lambda: self.inner.read_into(name, buffer, offset))

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        with ExitStack() as stack:
            source = self.inner.open_read
            yield self._call("open_read", name, lambda: stack.enter_context(source(name, offset=offset, nbytes=nbytes)))

    def head(self, name: str) -> ObjectInfo:
        return self._call("head", name, lambda: self.inner.head(name))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, name: str) -> bool:
        return self._call("delete", name, lambda: self.inner.delete(name))

    def delete_while(self, name: str, check: Callable[[], None]) -> bool:
        return self._call("delete", name, lambda: self.inner.delete_while(name, check))

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def use(self, capabilities: Capabilities) -> None:
        self.inner.use(capabilities)

    def now(self) -> float:
        return self._call("now", "", self.inner.now)

    def refuses_wrong_checksum(self, name: str) -> bool:
        return self._call("refuses_wrong_checksum", name, lambda: self.inner.refuses_wrong_checksum(name))

    def copy_from(self, source: Storage, name: str, *, nbytes: int) -> bool | None:
        while isinstance(source, WrapperStorage):
            source = source.inner
        origin = source
        return self._call("copy_from", name, lambda: self.inner.copy_from(origin, name, nbytes=nbytes))

    def is_empty(self) -> bool:
        return self._call("is_empty", "", self.inner.is_empty)

    def sweep(self, *, dry_run: bool = False) -> int:
        return self._call("sweep", "", lambda: self.inner.sweep(dry_run=dry_run))

    def close(self) -> None:
        self.inner.close()
