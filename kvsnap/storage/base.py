"""What a snapshot repository needs of a place that keeps bytes by name.

A storage knows nothing of snapshots, and a new one stays small: the repository, the
export and the import live above this interface. Names are paths of plain segments
(`shards/3f/3fa9….safetensors`); `validate_name` guards the way in and the way out, so
that no name read from somebody else's manifest can leave the storage.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from kvsnap.errors import ConfigError, CorruptChunkError

Buffer = bytes | bytearray | memoryview

MAX_NAME_BYTES = 512
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}(?:/[A-Za-z0-9][A-Za-z0-9._-]{0,199}){0,7}", re.ASCII)


def is_valid_name(name: str) -> bool:
    """Whether `name` may name an object: no empty, hidden, `.` or `..` segment, no leading slash."""
    return len(name) <= MAX_NAME_BYTES and _NAME.fullmatch(name) is not None


def validate_name(name: str) -> str:
    """Return `name` unchanged.

    Raises:
        ConfigError: it is not a valid name of an object (see `is_valid_name`).
    """
    if not is_valid_name(name):
        raise ConfigError(f"object name {name!r:.100} is not valid; names are plain segments joined by slashes")
    return name


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object, as the storage itself tells it."""

    name: str
    """Full name inside the storage."""
    nbytes: int
    """Size in bytes."""


class Reader(Protocol):
    """An object open for one sequential read."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the start of `buffer`; the number of bytes read, 0 at the end."""


class Storage(ABC):
    """Bytes by name. Every method may be called from several threads.

    Buffers stay the caller's: a storage copies what it needs before it returns, since
    the caller reuses them. All methods raise `StorageError` when the storage itself
    fails and `ConfigError` on a name that isn't valid.
    """

    url: str
    """What the user called it, for messages."""

    @abstractmethod
    def put_if_absent(self, name: str, data: Buffer) -> bool:
        """Store `data` durably under `name`, whole or not at all.

        Returns:
            False when the name is taken; then nothing has changed and nothing was compared.
        """

    @abstractmethod
    def put_stream(self, pieces: Iterable[Buffer], name: Callable[[], str]) -> bool:
        """Store the concatenated `pieces` durably, whole or not at all, without holding them in memory.

        `name` is called once, after the last piece, because a content digest is known
        only then. Whatever it or `pieces` raises is passed on, and nothing is stored. A
        piece may be reused by its producer as soon as the next one is asked for.

        Returns:
            False when the name is taken; then nothing has changed and nothing was compared.
        """

    @abstractmethod
    def put(self, name: str, data: Buffer) -> None:
        """Store or replace `name`; a reader sees the old or the new bytes, never a mix. For refs only."""

    @abstractmethod
    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        """Read from `offset` into `buffer` until it is full or the object ends; the number of bytes read.

        Raises:
            NotFoundError: nothing has this name.
        """

    @abstractmethod
    def open_read(self, name: str) -> AbstractContextManager[Reader]:
        """Open `name` for one sequential read from its start, in one request.

        Raises:
            NotFoundError: nothing has this name.
        """

    @abstractmethod
    def head(self, name: str) -> ObjectInfo:
        """Size of `name`.

        Raises:
            NotFoundError: nothing has this name.
        """

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below `prefix` (whole segments with a final slash, or empty for all), in order of name.

        Objects whose name isn't valid, and writes in progress, are left out.
        """

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Remove `name`; False when it was not there."""

    @abstractmethod
    def capabilities(self) -> Mapping[str, bool]:
        """What this storage was found able to do, recorded in a repository's `kvsnap.json`."""

    def is_empty(self) -> bool:
        """Whether nothing at all is stored here, foreign objects included."""
        return next(iter(self.list("")), None) is None

    def sweep(self) -> int:
        """Remove what interrupted writes left behind and nobody can still be writing; how many."""
        return 0

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """The whole object `name`, refused before anything is allocated when it is larger than `max_bytes`.

        Raises:
            NotFoundError: nothing has this name.
            CorruptChunkError: it is larger than anything that belongs under this name.
        """
        nbytes = self.head(name).nbytes
        if nbytes > max_bytes:
            raise CorruptChunkError(f"{name} in {self.url} has {nbytes} bytes, at most {max_bytes} are expected")
        buffer = bytearray(nbytes)
        found = self.read_into(name, memoryview(buffer), 0)
        if found != nbytes:
            raise CorruptChunkError(f"{name} in {self.url} has {nbytes} bytes, but only {found} could be read")
        return bytes(buffer)
