"""What goes into and comes out of S3 requests, piece by piece."""

from __future__ import annotations

import http.client
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from kvsnap.errors import CorruptChunkError
from kvsnap.storage.base import Buffer, ShortReadError

Edge = Callable[[], AbstractContextManager[None]]
"""Inside, the SDK's errors become kvsnap's."""


class PieceBody:
    """A request's body of `nbytes` bytes, made anew from its pieces whenever the SDK starts over.

    What the pieces raise is kept in `error`: the SDK would wrap it.
    """

    def __init__(self, pieces: Callable[[], Iterable[Buffer]], nbytes: int) -> None:
        self._pieces = pieces
        self._nbytes = nbytes
        self._iterator: Iterator[Buffer] | None = None
        self._piece = memoryview(b"")
        self._position = 0
        self.error: Exception | None = None

    def __len__(self) -> int:
        return self._nbytes

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = 0) -> int:
        if (position, whence) == (self._position, 0):
            return position
        if (position, whence) == (0, 2):  # measuring
            self._position = self._nbytes
            return self._nbytes
        if (position, whence) != (0, 0):
            raise OSError("a stream of pieces only starts over")
        self.close()
        self._position = 0
        return 0

    def read(self, amount: int | None = None, /) -> Buffer:
        if self.error is not None:
            raise self.error
        if self._position >= self._nbytes:
            return b""
        try:
            return self._read(self._nbytes if amount is None or amount < 0 else amount)
        except Exception as error:
            self.error = error
            raise

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        self._piece = memoryview(b"")
        if isinstance(iterator, Iterator) and hasattr(iterator, "close"):
            iterator.close()

    def _read(self, amount: int) -> Buffer:
        if self._iterator is None:
            self._iterator = iter(self._pieces())
        while not self._piece:
            piece = next(self._iterator, None)
            if piece is None:
                raise CorruptChunkError(f"expected {self._nbytes} bytes to store, but only {self._position} came")
            self._piece = memoryview(piece).cast("B")
            if len(self._piece) >= self._nbytes - self._position:
                # its producer checks what it gave, perhaps only at the end: hear it before the last byte is sent
                self._piece = memoryview(bytes(self._piece))
                if len(self._piece) > self._nbytes - self._position or any(map(len, self._iterator)):
                    raise CorruptChunkError(f"expected {self._nbytes} bytes to store, but more came")
        part = self._piece[: min(amount, self._nbytes - self._position)]
        self._piece = self._piece[len(part) :]
        self._position += len(part)
        return part


class BodyReader:
    """An answer's body of `nbytes` bytes; shorter is an error, never an end."""

    def __init__(self, body: Any, nbytes: int, what: str, edge: Edge) -> None:
        self._body = body
        self._below = _uncopied(body)
        self._nbytes = nbytes
        self._left = nbytes
        self._what = what
        self._edge = edge

    @property
    def left(self) -> int:
        """Bytes not read yet."""
        return self._left

    def readinto(self, buffer: memoryview, /) -> int:
        buffer = buffer[: self._left]
        source = self._body if self._below is None else self._below
        done = 0
        while done < len(buffer):
            with self._edge():
                found = source.readinto(buffer[done:])
            if not found:
                raise ShortReadError(
                    f"{self._what} ended after {self._nbytes - self._left} of the {self._nbytes} bytes announced"
                )
            done += found
            self._left -= found
        return done

    def skip(self, nbytes: int) -> None:
        """Read past `nbytes` bytes."""
        scratch = memoryview(bytearray(min(nbytes, 1 << 20)))
        while nbytes and (found := self.readinto(scratch[:nbytes])):
            nbytes -= found

    def limit(self, nbytes: int) -> None:
        """End after at most `nbytes` more bytes."""
        self._left = min(self._left, nbytes)
        self._nbytes = self._left

    def close(self) -> None:
        """Give the connection back, or drop it where something is left unread."""
        with self._edge():
            if self._below is not None and self._below.isclosed():  # read to its end
                self._body._raw_stream.release_conn()
            self._body.close()


def _uncopied(body: Any) -> http.client.HTTPResponse | None:
    """The standard library's answer below botocore's and urllib3's: its `readinto` fills the buffer itself.

    Theirs allocate and copy, which took a fifth of the CPU of an import. Both keep it in attributes that they don't
    promise, so it may be missing; and what is decoded or comes in chunks of its own is theirs to read.
    """
    below = getattr(getattr(body, "_raw_stream", None), "_fp", None)
    if not isinstance(below, http.client.HTTPResponse) or below.chunked or below.getheader("Content-Encoding"):
        return None
    return below


class EmptyReader:
    """Nothing to read."""

    def readinto(self, buffer: memoryview, /) -> int:
        return 0


def regroup(pieces: Iterable[Buffer], nbytes: int, part_bytes: int) -> Iterator[bytearray]:
    """The same bytes in parts of `part_bytes`, the last one smaller.

    Raises:
        CorruptChunkError: they are not `nbytes` in all.
    """
    part, done = bytearray(), 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        done += len(view)
        while view:
            taken = min(part_bytes - len(part), len(view))
            part += view[:taken]
            view = view[taken:]
            if len(part) == part_bytes:
                yield part
                part = bytearray()
    if done != nbytes:
        raise CorruptChunkError(f"expected {nbytes} bytes to store, but {done} came")
    if part:
        yield part
