"""Objects as files below one directory.

A new object is written to a hidden temporary file in the root, fsynced, linked under
its name (an existing name is never replaced, so two writers never mix) and its
directory is fsynced. Nothing below the root is ever followed through a symbolic link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvsnap.atomic import fsync_dir, link_new
from kvsnap.direct_io import O_DIRECT
from kvsnap.errors import NotFoundError, StorageError
from kvsnap.storage.base import Buffer, ObjectInfo, Reader, Storage, is_valid_name, validate_name

TEMP_PREFIX = ".kvsnap-tmp-"
TEMP_MIN_AGE_S = 3600.0
"""A temporary file this young is never swept, even when nobody seems to hold it."""

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LocalStorage(Storage):
    """A `Storage` in the directory `root`, which is made at the first write."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        if self._exists(name):
            return False
        return self.put_stream([data], lambda: name)

    def put_stream(self, pieces: Iterable[Buffer], name: Callable[[], str]) -> bool:
        with _translate(self.url):
            if not self.root.is_dir():
                self.root.mkdir(parents=True, exist_ok=True)
                fsync_dir(self.root.parent)
            with self._temp() as (fd, temp):
                set_direct(fd, True)
                for piece in pieces:
                    _write_all(fd, piece)
                final = self._place(name())
                if final.exists():
                    return False
                os.fsync(fd)
                return link_new(temp, final)

    def put(self, name: str, data: Buffer) -> None:
        with _translate(name):
            final = self._place(name)
            with self._temp() as (fd, temp):
                _write_all(fd, data)
                os.fsync(fd)
                os.replace(temp, final)
                fsync_dir(final.parent)

    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        with _translate(name), self._open(name) as fd:
            done = 0
            while done < len(buffer) and (found := os.preadv(fd, [buffer[done:]], offset + done)):
                done += found
            return done

    @contextmanager
    def open_read(self, name: str) -> Iterator[Reader]:
        with self._open(name) as fd:
            set_direct(fd, True)
            yield _FileReader(fd, name)

    def head(self, name: str) -> ObjectInfo:
        with _translate(name), self._open(name) as fd:
            return ObjectInfo(name=name, nbytes=os.fstat(fd).st_size)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        start = self._path(prefix.removesuffix("/")) if prefix else self.root
        with _translate(prefix):
            yield from self._walk(start, prefix)

    def delete(self, name: str) -> bool:
        with _translate(name):
            path = self._path(name)
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            fsync_dir(path.parent)
        return True

    def capabilities(self) -> Mapping[str, bool]:
        return {"conditional_create": True, "ranges": True}

    def is_empty(self) -> bool:
        with _translate(self.url):
            try:
                return all(name.startswith(TEMP_PREFIX) for name in os.listdir(self.root))
            except FileNotFoundError:
                return True

    def sweep(self) -> int:
        """Remove temporary files that are old and whose writer is gone (it holds a lock while it lives)."""
        swept = 0
        with _translate(self.url):
            for path in self.root.glob(TEMP_PREFIX + "*"):
                with suppress(OSError):
                    found = path.lstat()
                    if stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime > TEMP_MIN_AGE_S:
                        swept += _remove_if_unlocked(path)
        return swept

    def _path(self, name: str) -> Path:
        """Where `name` lies; refuses a symbolic link on the way there."""
        path = self.root
        for segment in validate_name(name).split("/"):
            path = path / segment
            if path.is_symlink():
                raise StorageError(f"{path} is a symbolic link; a repository has none, remove it")
        return path

    def _place(self, name: str) -> Path:
        """Like `_path`, with its directories made and durable."""
        path = self._path(name)
        missing = []
        parent = path.parent
        while not parent.is_dir():
            missing.append(parent)
            parent = parent.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            fsync_dir(directory.parent)
        return path

    def _exists(self, name: str) -> bool:
        with suppress(NotFoundError):
            self.head(name)
            return True
        return False

    @contextmanager
    def _open(self, name: str) -> Iterator[int]:
        try:
            fd = os.open(self._path(name), _READ_FLAGS)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"{name} is not in {self.url}") from None
        except OSError as error:
            raise StorageError(f"{name} in {self.url} can't be opened: {error}") from error
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StorageError(f"{name} in {self.url} is not a regular file")
            yield fd
        finally:
            os.close(fd)

    @contextmanager
    def _temp(self) -> Iterator[tuple[int, Path]]:
        """A locked temporary file on the root's file system, gone at the end."""
        path = self.root / f"{TEMP_PREFIX}{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield fd, path
        finally:
            path.unlink(missing_ok=True)
            os.close(fd)

    def _walk(self, directory: Path, prefix: str) -> Iterator[ObjectInfo]:
        try:
            entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            name = prefix + entry.name
            if not is_valid_name(name):
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(directory / entry.name, name + "/")
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    yield ObjectInfo(name=name, nbytes=entry.stat(follow_symlinks=False).st_size)


class _FileReader:
    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        self._position = 0

    def readinto(self, buffer: memoryview, /) -> int:
        with _translate(self._name):
            found = read_at(self._fd, buffer, self._position)
        self._position += found
        return found


@contextmanager
def _translate(what: str) -> Iterator[None]:
    """Turn the operating system's errors into `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error}") from error


def set_direct(fd: int, direct: bool) -> None:
    """Have an open file read and written past the page cache, or not; stays as it is where that isn't possible."""
    with suppress(OSError):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if direct else flags & ~O_DIRECT)


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """`preadv` that goes through the page cache from where O_DIRECT doesn't take the buffer or the offset."""
    try:
        return os.preadv(fd, [buffer], offset)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        set_direct(fd, False)
        return os.preadv(fd, [buffer], offset)


def _write_all(fd: int, piece: Buffer) -> None:
    """Write; through the page cache from where O_DIRECT doesn't take the piece."""
    view = memoryview(piece).cast("B")
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT:
                raise
            set_direct(fd, False)


def _remove_if_unlocked(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
