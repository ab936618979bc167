"""Objects in this process's memory: for tests, and as the shortest complete storage to read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter

from kvsnap.errors import CorruptChunkError, NotFoundError
from kvsnap.storage.base import Buffer, Capabilities, ObjectInfo, Reader, Storage, Versioned, validate_name


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    version: int
    modified: float


class MemoryStorage(Storage):
    """A `Storage` that is gone with the process."""

    def __init__(self, url: str = "memory") -> None:
        self.url = url
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._versions = 0

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        return self.put_if_match(name, data, None)

    def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
        data = b"".join(bytes(piece) for piece in pieces())
        return self.put_if_absent(name(), data)

    def put(self, name: str, data: Buffer) -> None:
        with self._lock:
            self._store(name, data)

    def get_versioned(self, name: str, *, max_bytes: int) -> Versioned:
        found = self._find(name)
        if len(found.data) > max_bytes:
            raise CorruptChunkError(f"{name} has {len(found.data)} bytes, at most {max_bytes} are expected")
        return Versioned(found.data, str(found.version))

    def put_if_match(self, name: str, data: Buffer, version: str | None) -> bool:
        with self._lock:
            found = self._objects.get(validate_name(name))
            if (None if found is None else str(found.version)) != version:
                return False
            self._store(name, data)
            return True

    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        part = self._find(name).data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        data = memoryview(self._find(name).data)[offset:]
        yield _MemoryReader(data if nbytes is None else data[:nbytes])

    def head(self, name: str) -> ObjectInfo:
        found = self._find(name)
        return ObjectInfo(name=name, nbytes=len(found.data), modified=found.modified)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix:
            validate_name(prefix.removesuffix("/"))
        with self._lock:
            found = {name: obj for name, obj in self._objects.items() if name.startswith(prefix)}
        for name, obj in sorted(found.items(), key=itemgetter(0)):
            yield ObjectInfo(name=name, nbytes=len(obj.data), modified=obj.modified)

    def delete(self, name: str) -> bool:
        with self._lock:
            return self._objects.pop(validate_name(name), None) is not None

    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create=True, conditional_replace=True, ranges=True, checksums=False)

    def now(self) -> float:
        return time.time()

    def _find(self, name: str) -> _Object:
        with self._lock:
            found = self._objects.get(validate_name(name))
        if found is None:
            raise NotFoundError(f"{name} is not in {self.url}")
        return found

    def _store(self, name: str, data: Buffer) -> None:
        self._versions += 1
        self._objects[validate_name(name)] = _Object(bytes(data), self._versions, self.now())


class _MemoryReader:
    def __init__(self, data: memoryview) -> None:
        self._data = data

    def readinto(self, buffer: memoryview, /) -> int:
        found = min(len(buffer), len(self._data))
        buffer[:found] = self._data[:found]
        self._data = self._data[found:]
        return found
