"""Reads and writes between files and 4096-aligned memory, past the page cache where the file system can.

O_DIRECT needs address, offset and length aligned; memory from `aligned_buffer` and slots of the DRAM tier are. What a
file system or a caller's buffer can't do is done buffered instead, so nothing here depends on O_DIRECT.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import secrets
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from kvsnap.errors import CorruptChunkError, StorageError

ALIGN = 4096
"""Of addresses, offsets and lengths under O_DIRECT, in bytes. Slices and chunks start and end at multiples of it."""
MAX_VECTORS = 1024
"""Most buffers that one preadv/pwritev takes (IOV_MAX)."""
BATCH_BYTES = 8 << 20
"""Small neighbours are written together up to this."""

O_DIRECT: int = getattr(os, "O_DIRECT", 0)

log = logging.getLogger(__name__)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to a multiple of 4096."""
    return -(-nbytes // ALIGN) * ALIGN


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed anonymous memory, `nbytes` long, page-aligned. Freed with its last view."""
    return memoryview(mmap.mmap(-1, max(padded(nbytes), ALIGN)))[:nbytes]


def open_read(path: Path, *, direct: bool) -> int:
    """Open `path` for reading, with O_DIRECT if `direct` and the file system takes it. The caller closes it.

    Raises:
        StorageError: vanished, no permission, a symbolic link, an I/O error.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        if direct:
            try:
                return os.open(path, flags | O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return os.open(path, flags)
    except OSError as error:
        raise StorageError(f"{path} can't be opened: {error.strerror or error}") from error


def read_into(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Fill all `views`, one after the other, with the file's bytes from `offset`. Thread-safe, releases the GIL.

    Raises:
        CorruptChunkError: the file ends before the views are full.
        OSError: EINVAL where O_DIRECT doesn't take these views or this offset; any I/O error.
    """
    rest = _vectors(views)
    while rest:
        done = os.preadv(fd, rest[:MAX_VECTORS], offset)
        if done == 0:
            missing = sum(len(view) for view in rest)
            raise CorruptChunkError(f"file ends at byte {offset}, expected {missing} bytes more")
        offset += done
        rest = _after(rest, done)


def read_file(path: Path, views: Sequence[memoryview], offset: int, *, direct: bool) -> None:
    """Open `path`, fill all `views` from `offset`, close it. With `direct`, falls back to a buffered read on EINVAL.

    A buffered read is meant as the second opinion on what O_DIRECT returned, so it first drops what the page
    cache holds of this range.

    Raises:
        CorruptChunkError: the file ends before the views are full.
        StorageError: vanished, no permission, not a file, an I/O error.
    """
    fd = open_read(path, direct=direct)
    try:
        if not direct:
            _forget_cached(fd, offset, sum(len(view) for view in views))
        read_into(fd, views, offset)
    except OSError as error:
        if direct and error.errno == errno.EINVAL:
            read_file(path, views, offset, direct=False)
            return
        raise StorageError(f"{path} can't be read at byte {offset}: {error.strerror or error}") from error
    finally:
        os.close(fd)


def read_ahead(path: Path, nbytes: int) -> None:
    """Have the kernel fetch the first `nbytes` of a file in the background; says nothing if it can't."""
    _advise(path, nbytes, os.POSIX_FADV_WILLNEED)


def forget_cached(path: Path) -> None:
    """Have the next buffered read of a file come from the disk; says nothing if it can't."""
    _advise(path, 0, os.POSIX_FADV_DONTNEED)


def write_all(fd: int, views: Sequence[memoryview], offset: int) -> int:
    """Write all `views`, one after the other, at `offset`; returns the offset after them.

    Under O_DIRECT the total length and `offset` must be multiples of 4096; views that aren't aligned go through a
    bounce buffer. Raises OSError.
    """
    rest = _vectors(views)
    while rest:
        try:
            done = os.pwritev(fd, rest[:MAX_VECTORS], offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            buffer = aligned_buffer(min(BATCH_BYTES, padded(sum(len(view) for view in rest))))
            return _write_bounced(fd, rest, offset, buffer)
        offset += done
        rest = _after(rest, done)
    return offset


def write_stream(fd: int, parts: Iterable[Sequence[memoryview]], offset: int = 0) -> int:
    """Write the views of all `parts` at `offset`, small ones together; returns the offset after them.

    The views must stay as they are until this returns. Raises OSError.
    """
    batch: list[memoryview] = []
    size = 0
    for views in parts:
        for view in _vectors(views):
            if size and (size + len(view) > BATCH_BYTES or len(batch) == MAX_VECTORS):
                offset = write_all(fd, batch, offset)
                batch, size = [], 0
            batch.append(view)
            size += len(view)
    return write_all(fd, batch, offset)


def write_pieces(fd: int, pieces: Iterable[bytes | memoryview], offset: int = 0) -> int:
    """Write bytes of any lengths and alignment; returns the offset after them. Raises OSError.

    Under O_DIRECT their total must be a multiple of 4096. Aligned pieces are written from where they are, others go
    through an aligned buffer.
    """
    rest = iter(pieces)
    for piece in rest:
        view = memoryview(piece)
        if len(view) % ALIGN == 0:
            try:
                offset = _write_exactly(fd, view, offset)
                continue
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return _write_bounced(fd, chain([view], rest), offset, aligned_buffer(BATCH_BYTES))
    return offset


def is_cached(fd: int, nbytes: int) -> bool:
    """Whether an open file of `nbytes` bytes seems to lie in the page cache, judged by three of its pages.

    What does is read faster from there than past it. Costs no I/O worth naming.
    """
    nowait = getattr(os, "RWF_NOWAIT", 0)
    page = bytearray(ALIGN)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead around the probes
        try:
            return bool(nowait) and all(
                os.preadv(fd, [page], nbytes * i // 3 // ALIGN * ALIGN, nowait) > 0 for i in range(3)
            )
        finally:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    except OSError:
        return False


class FileReader:
    """A `Reader` of an open file, from `offset` on, of at most `nbytes`.

    Through the page cache, for the kernel reads far ahead: beside as many writes an import was 1.2 times as fast as
    with O_DIRECT. What did not lie there before goes as soon as it was read.
    """

    def __init__(self, fd: int, name: str, offset: int = 0, nbytes: int | None = None) -> None:
        self._fd = fd
        self._name = name
        self._offset = offset
        self._left = nbytes
        self._keeps = is_cached(fd, os.fstat(fd).st_size)

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the start of `buffer`; the number of bytes read, 0 at the end.

        Raises:
            StorageError: it can't be read.
        """
        if self._left is not None:
            buffer = buffer[: self._left]
        try:
            found = os.preadv(self._fd, [buffer], self._offset)
            if found and not self._keeps:  # a length of 0 would mean all
                os.posix_fadvise(self._fd, self._offset, found, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise StorageError(f"{self._name} can't be read: {error}") from error
        self._offset += found
        if self._left is not None:
            self._left -= found
        return found


def supports_direct(directory: Path) -> bool:
    """Whether O_DIRECT works in `directory`, found by writing two pages and reading them back: some file systems take
    the flag and lose or garble the bytes.

    False on a full disk too, where it can't be told.

    Raises:
        StorageError: not even buffered I/O gives the bytes back.
    """
    page = aligned_buffer(2 * ALIGN)
    page[:] = secrets.token_bytes(2 * ALIGN)
    path = directory / f"probe.{secrets.token_hex(8)}.tmp"
    for flag in (O_DIRECT, 0):
        try:
            if _survives(path, page, flag):
                return bool(flag)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                return False  # full: it can't be told, and what is there can be read either way
            if not flag:
                raise StorageError(f"{directory} failed its write test: {error.strerror or error}") from error
        log.debug("no %s I/O in %s", "direct" if flag else "buffered", directory)
    raise StorageError(f"{directory} failed its write test: what was read back is not what was written")


def _survives(path: Path, page: memoryview, flag: int) -> bool:
    back = aligned_buffer(len(page))
    try:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | flag, 0o600)
        try:
            for offset in (0, ALIGN):
                if os.pwritev(fd, [page[offset : offset + ALIGN]], offset) != ALIGN:
                    return False
            os.fsync(fd)
            return os.preadv(fd, [back], 0) == len(page) and back == page
        finally:
            os.close(fd)
    finally:
        if os.path.lexists(path):
            os.unlink(path)


def _write_bounced(fd: int, pieces: Iterable[bytes | memoryview], offset: int, buffer: memoryview) -> int:
    filled = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            count = min(len(view), len(buffer) - filled)
            buffer[filled : filled + count] = view[:count]
            view, filled = view[count:], filled + count
            if filled == len(buffer):
                offset, filled = _write_exactly(fd, buffer, offset), 0
    return _write_exactly(fd, buffer[:filled], offset)


def _write_exactly(fd: int, view: memoryview, offset: int) -> int:
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
    return offset


def _vectors(views: Sequence[memoryview]) -> list[memoryview]:
    return [view if view.format == "B" and view.ndim == 1 else view.cast("B") for view in views if view.nbytes]


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `views` after their first `done` bytes."""
    for i, view in enumerate(views):
        if done < len(view):
            return [view[done:], *views[i + 1 :]]
        done -= len(view)
    return []


def _advise(path: Path, nbytes: int, advice: int) -> None:
    with contextlib.suppress(OSError, StorageError):
        fd = open_read(path, direct=False)
        try:
            os.posix_fadvise(fd, 0, nbytes, advice)
        finally:
            os.close(fd)


def _forget_cached(fd: int, offset: int, nbytes: int) -> None:
    start = offset // ALIGN * ALIGN
    os.posix_fadvise(fd, start, padded(offset + nbytes) - start, os.POSIX_FADV_DONTNEED)
