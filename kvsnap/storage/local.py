"""Objects as files below one directory.

A new object is written to a hidden temporary file in the root, fsynced, linked under
its name (an existing name is never replaced, so two writers never mix) and its
directory is fsynced. Whoever replaces or deletes holds a lock (`flock` on a hidden file in
the root, gone with its holder), so that compare-and-swap is one step. Nothing below the root
is ever followed through a symbolic link.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvsnap.atomic import fsync_dir, link_new
from kvsnap.direct_io import O_DIRECT, FileReader
from kvsnap.errors import CorruptChunkError, NotFoundError, StorageError
from kvsnap.storage.base import (
    Buffer,
    Capabilities,
    ObjectInfo,
    Reader,
    Storage,
    Versioned,
    is_valid_name,
    validate_name,
)

LOCK_NAME = ".kvsnap-lock"
LOCK_TIMEOUT_S = 30.0
"""A write under the lock takes milliseconds; whoever holds it longer is stopped or hangs."""
TEMP_PREFIX = ".kvsnap-tmp-"
TEMP_MIN_AGE_S = 3600.0
"""A temporary file this young is never swept, even when nobody seems to hold it."""
DIRECT_MIN_BYTES = 1 << 20
"""What begins with a piece of at least this size is written past the page cache, where that works."""

_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class LocalStorage(Storage):
    """A `Storage` in the directory `root`, made at the first write, and for its owner alone: KV tells of prompts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        if self._exists(name):
            return False
        return self.put_stream(lambda: [data], lambda: name)

    def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
        with _translate(self.url):
            self._make_root()
            with self._temp() as (fd, temp):
                for i, piece in enumerate(pieces()):
                    if i == 0 and len(piece) >= DIRECT_MIN_BYTES:
                        _set_direct(fd, True)
                    _write_all(fd, piece)
                final = self._place(name())
                if final.exists():
                    return False
                os.fsync(fd)
                return link_new(temp, final)

    def put(self, name: str, data: Buffer) -> None:
        validate_name(name)
        with _translate(name), self._lock():
            self._replace(name, data)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        # of one open file: asked for its size by name first, a ref that is replaced meanwhile would come cut short
        with _translate(name), self._open(name) as fd:
            nbytes = os.fstat(fd).st_size
            if nbytes > max_bytes:
                raise CorruptChunkError(f"{name} in {self.url} has {nbytes} bytes, at most {max_bytes} are expected")
            return _read_all(fd)

    def get_versioned(self, name: str, *, max_bytes: int) -> Versioned:
        data = self.get(name, max_bytes=max_bytes)
        return Versioned(data, _version_of(data))

    def put_if_match(self, name: str, data: Buffer, version: str | None) -> bool:
        if version is None:
            return self.put_if_absent(name, data)
        validate_name(name)
        with _translate(name), self._lock():
            try:
                with self._open(name) as fd:
                    found = _version_of(_read_all(fd))
            except NotFoundError:
                return False
            if found != version:
                return False
            self._replace(name, data)
        return True

    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        with _translate(name), self._open(name) as fd:
            done = 0
            while done < len(buffer) and (found := os.preadv(fd, [buffer[done:]], offset + done)):
                done += found
            return done

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        with self._open(name) as fd:
            yield FileReader(fd, name, offset, nbytes)

    def head(self, name: str) -> ObjectInfo:
        with _translate(name), self._open(name) as fd:
            found = os.fstat(fd)
            return ObjectInfo(name=name, nbytes=found.st_size, modified=found.st_mtime)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        start = self._path(prefix.removesuffix("/")) if prefix else self.root
        with _translate(prefix):
            yield from self._walk(start, prefix)

    def delete(self, name: str) -> bool:
        with _translate(name):
            path = self._path(name)
            if not os.path.lexists(path):
                return False
            with self._lock():
                try:
                    path.unlink()
                except FileNotFoundError:
                    return False
                fsync_dir(path.parent)
        return True

    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create=True, conditional_replace=True, ranges=True, checksums=False)

    def now(self) -> float:
        """The file system's clock, which on a network is not this machine's."""
        with _translate(self.url):
            try:
                self._make_root()
                with self._temp() as (fd, _):
                    return os.fstat(fd).st_mtime
            except OSError as error:
                if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):  # who may not write only looks
                    return time.time()
                raise

    def is_empty(self) -> bool:
        with _translate(self.url):
            for directory, _, files in os.walk(self.root):
                if directory != str(self.root):
                    is_foreign = bool(files)
                else:
                    is_foreign = any(not name.startswith(TEMP_PREFIX) and name != LOCK_NAME for name in files)
                if is_foreign:
                    return False
            return True

    def sweep(self, *, dry_run: bool = False) -> int:
        """Remove temporary files that are old and whose writer is gone (it holds a lock while it lives)."""
        swept = 0
        with _translate(self.url):
            now = time.time()
            for path in self.root.glob(TEMP_PREFIX + "*"):
                with suppress(OSError):
                    found = path.lstat()
                    if stat.S_ISREG(found.st_mode) and now - found.st_mtime > TEMP_MIN_AGE_S:
                        swept += _remove_if_unlocked(path, dry_run=dry_run)
        return swept

    def _make_root(self) -> None:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _path(self, name: str) -> Path:
        """Where `name` lies; refuses a symbolic link on the way there."""
        path = self.root
        for segment in validate_name(name).split("/"):
            path = path / segment
            if path.is_symlink():
                raise StorageError(
                    f"{path} is a symbolic link, and a repository has none: put what it leads to in its place"
                )
        return path

    def _place(self, name: str) -> Path:
        """Like `_path`, with its directories made and durable."""
        path = self._path(name)
        self._make_root()
        missing = []
        parent = path.parent
        while not parent.is_dir():
            missing.append(parent)
            parent = parent.parent
        for directory in reversed(missing):
            directory.mkdir(exist_ok=True)
            fsync_dir(directory.parent)
        return path

    def _replace(self, name: str, data: Buffer) -> None:
        """Under the lock."""
        final = self._place(name)
        with self._temp() as (fd, temp):
            _write_all(fd, data)
            os.fsync(fd)
            os.replace(temp, final)
            fsync_dir(final.parent)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other writers that replace or delete out."""
        self._make_root()
        path = self.root / LOCK_NAME
        fd = _open_lock(path)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StorageError(
                            f"{path} was locked for {LOCK_TIMEOUT_S:g} s; look for a stopped kvsnap process"
                        ) from None
                    time.sleep(0.002)
            yield
        finally:
            os.close(fd)

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
            found = [(entry, entry.is_dir(follow_symlinks=False)) for entry in os.scandir(directory)]
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry, is_dir in sorted(found, key=lambda item: item[0].name + "/" * item[1]):
            name = prefix + entry.name
            if not is_valid_name(name):
                continue
            if is_dir:
                yield from self._walk(directory / entry.name, name + "/")
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):
                    stats = entry.stat(follow_symlinks=False)
                    yield ObjectInfo(name=name, nbytes=stats.st_size, modified=stats.st_mtime)


@contextmanager
def _translate(what: str) -> Iterator[None]:
    """Turn the operating system's errors into `StorageError`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{what}: {error}") from error


def _open_lock(path: Path) -> int:
    """The lock file, made if it isn't there; only to read where another user made it, which is enough for a lock."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(path, flags | os.O_RDONLY)


def _set_direct(fd: int, direct: bool) -> None:
    """Have an open file written past the page cache, or not; stays as it is where that isn't possible."""
    with suppress(OSError):
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if direct else flags & ~O_DIRECT)


def _write_all(fd: int, piece: Buffer) -> None:
    """Write; through the page cache from where O_DIRECT doesn't take the piece."""
    view = memoryview(piece).cast("B")
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT:
                raise
            _set_direct(fd, False)


def _read_all(fd: int) -> bytes:
    parts = []
    while part := os.read(fd, 1 << 20):
        parts.append(part)
    return b"".join(parts)


def _version_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _remove_if_unlocked(path: Path, *, dry_run: bool) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not dry_run:
            path.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
