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
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

from kvsnap.errors import ConfigError, CorruptChunkError, StorageError

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


class RefusedError(StorageError):
    """The storage answered, and trying again won't help: no access, no such bucket, no room."""


class ShortReadError(StorageError):
    """An object ended before the size that the storage itself gives for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One stored object, as the storage itself tells it."""

    name: str
    """Full name inside the storage."""
    nbytes: int
    """Size in bytes."""
    modified: float
    """When it was written, by the clock that `Storage.now` reads [s since 1970]."""


class Versioned(NamedTuple):
    """A mutable object as it was read."""

    data: bytes
    version: str
    """Opaque; equal versions of a name have equal bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a storage does with the conditions that kvsnap puts on its requests. `probe_storage` finds it out."""

    conditional_create: bool
    """`put_if_absent` never replaces, whoever else writes at the same time."""
    conditional_replace: bool
    """`put_if_match` never replaces a version that it wasn't given."""
    ranges: bool
    """A ranged read transfers the range only (HTTP 206)."""
    checksums: bool
    """The storage compares what arrives with the SHA-256 sent along, and refuses what differs."""

    def to_json(self) -> dict[str, bool]:
        """As it stands in a repository's `kvsnap.json`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, obj: object) -> Capabilities:
        """As `to_json` gave it. What a later version adds must have a default, which holds where it isn't recorded.

        Raises:
            CorruptChunkError: it makes no sense.
        """
        found = obj if isinstance(obj, Mapping) else {}
        known = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        for field in fields(cls):
            if not isinstance(known.get(field.name, field.default), bool):
                raise CorruptChunkError(f"it doesn't say whether the store has {field.name}")
        return cls(**known)


ALL_CAPABILITIES = Capabilities(conditional_create=True, conditional_replace=True, ranges=True, checksums=True)


class Reader(Protocol):
    """An object open for one sequential read."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the start of `buffer`; the number of bytes read, 0 at the end.

        Raises:
            ShortReadError: the object ended early.
        """


class Storage(ABC):
    """Bytes by name. Every method may be called from several threads.

    Buffers stay the caller's: a storage copies what it needs before it returns, since
    the caller reuses them. All methods raise `StorageError` when the storage itself
    fails (`RefusedError` where trying again won't help) and `ConfigError` on a name that
    isn't valid.

    After a `StorageError` a write may have happened all the same: the answer can get lost.
    """

    url: str
    """What the user called it, for messages."""
    needs_name_first: bool = False
    """Whether it must know name and digest before the first byte. Then `put_stream` reads the pieces twice, and a
    caller that can know both by itself does better with `put_known`."""

    @abstractmethod
    def put_if_absent(self, name: str, data: Buffer) -> bool:
        """Store `data` durably under `name`, whole or not at all.

        Returns:
            False when the name is taken; then nothing has changed and nothing was compared.
        """

    @abstractmethod
    def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
        """Store the concatenated pieces durably, whole or not at all, without holding them in memory.

        `pieces` starts from the beginning at each call; it is called again where a storage must know the name first,
        and for another try. `name` is called after the last piece of a whole pass, because a content digest is known
        only then. Whatever either raises is passed on, and nothing is stored. A piece may be reused by its producer as
        soon as the next one is asked for.

        Returns:
            False when the name is taken; then nothing has changed and nothing was compared.
        """

    def put_known(self, name: str, pieces: Callable[[], Iterable[Buffer]], *, nbytes: int, sha256: str) -> bool:
        """Like `put_stream`, where name, size and digest (64 hex) are known beforehand: the pieces are read once.

        Size and digest are the caller's word, sent along for a storage that checks them. Who has the pieces from a
        place that it doesn't trust checks them itself and raises in `pieces`.
        """
        return self.put_stream(pieces, lambda: name)

    @abstractmethod
    def put(self, name: str, data: Buffer) -> None:
        """Store or replace `name`; a reader sees the old or the new bytes, never a mix."""

    @abstractmethod
    def get_versioned(self, name: str, *, max_bytes: int) -> Versioned:
        """Like `get`, with the version that `put_if_match` takes.

        Raises:
            NotFoundError, CorruptChunkError: as `get`.
        """

    @abstractmethod
    def put_if_match(self, name: str, data: Buffer, version: str | None) -> bool:
        """Replace `name` durably if it still has `version`; None: if it does not exist. One compare-and-swap.

        `data` should differ from everything that was ever stored under the name (a write id does), so that an own
        write whose answer got lost is told from another's.

        Returns:
            False when it has another version, or none; then nothing has changed.
        """

    @abstractmethod
    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        """Read from `offset` into `buffer` until it is full or the object ends; the number of bytes read.

        Raises:
            NotFoundError: nothing has this name.
            ShortReadError: the object ended before its own size.
        """

    @abstractmethod
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> AbstractContextManager[Reader]:
        """Open `name` for one sequential read, in one request, of at most `nbytes` bytes from `offset` on.

        Raises:
            NotFoundError: nothing has this name.
        """

    @abstractmethod
    def head(self, name: str) -> ObjectInfo:
        """Size and time of `name`.

        Raises:
            NotFoundError: nothing has this name.
        """

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below `prefix` (whole segments with a final slash, or empty for all), in order of their names'
        bytes.

        Objects whose name isn't valid, and writes in progress, are left out.
        """

    @abstractmethod
    def delete(self, name: str) -> bool:
        """Remove `name`; False when it was not there."""

    def delete_while(self, name: str, check: Callable[[], None]) -> bool:
        """`delete`; right before each try `check` is called, which raises if it must not happen any more."""
        check()
        return self.delete(name)

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this storage is taken to do: what `use` said, else the best."""

    def use(self, capabilities: Capabilities) -> None:  # noqa: B027 (optional)
        """Take the storage to do this, and no more. Where a condition isn't kept, look first and then write: good
        enough for a single writer only.
        """

    @abstractmethod
    def now(self) -> float:
        """The time by the storage's own clock, which `ObjectInfo.modified` is in [s since 1970]."""

    def refuses_wrong_checksum(self, name: str) -> bool:
        """Whether a write to the free name `name` with a wrong checksum is refused. May leave something there."""
        return False

    def copy_from(self, source: Storage, name: str, *, nbytes: int) -> bool | None:
        """Copy `name`, of `nbytes` bytes, from `source`, inside the store that holds both, if it is absent here.

        Returns:
            None when they don't share a store that can do this; False when the name is taken.

        Raises:
            NotFoundError: `source` doesn't have it.
            CorruptChunkError: it has another size in `source`. Nothing was copied.
        """
        return None

    def close(self) -> None:  # noqa: B027 (optional)
        """Give back connections; nothing else may be called afterwards."""

    def is_empty(self) -> bool:
        """Whether nothing at all is stored here, foreign objects included."""
        return next(iter(self.list("")), None) is None

    def sweep(self, *, dry_run: bool = False) -> int:
        """Remove what interrupted writes left behind and nobody can still be writing (`dry_run`: only count); how many.

        Listings never show any of it.
        """
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
