"""Temporary directories of writers: `tmp/<writer>/`, each with a lock file that tells whether its writer lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from kvsnap.atomic import write_file
from kvsnap.errors import StorageError
from kvsnap.runtime import process_start_time
from kvsnap.tiers import paths

LOCK_SECONDS = 10.0
"""Longest wait for another process that holds the directory lock."""
START_SECONDS = 60.0
"""At a start, where giving up costs the disk tier until the next one."""
IMPORT_SECONDS = 600.0
"""Longest wait for another process that imports."""

_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS}

log = logging.getLogger(__name__)


class DirectoryLock:
    """Exclusive use of a cache directory among processes and threads, for short acts: `with lock: …`. Re-entrant.

    Raises StorageError on entry when another process holds it for too long.
    """

    def __init__(self, cache_dir: Path, *, longest_s: float = LOCK_SECONDS) -> None:
        self._path = cache_dir / paths.LOCK
        self._longest_s = longest_s
        self._thread_lock = threading.RLock()
        self._depth = 0
        self._fd = -1

    def __enter__(self) -> None:
        if not self._thread_lock.acquire(timeout=self._longest_s):
            raise StorageError(f"{self._path} is held by another thread for over {self._longest_s:g} s")
        if self._depth == 0:
            try:
                self._fd = self._lock(time.monotonic() + self._longest_s)
            except BaseException:
                self._thread_lock.release()
                raise
        self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            os.close(self._fd)
        self._thread_lock.release()

    def _lock(self, deadline: float) -> int:
        pause = 0.001
        while True:
            try:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            except OSError as error:
                raise StorageError(f"{self._path} can't be opened: {error.strerror or error}") from error
            try:
                if try_lock(fd) and _is_file_at(fd, self._path):
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            if time.monotonic() > deadline:
                raise StorageError(f"{self._path} is held by another process for over {self._longest_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def try_lock(fd: int) -> bool:
    """Take an exclusive flock without waiting. A file system without locks is taken as if there were no others."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise StorageError(f"flock failed: {error.strerror or error}") from error
    return True


@contextmanager
def only_evictor(cache_dir: Path) -> Iterator[bool]:
    """True to one process per cache directory at a time; False to the others, and where it can't be told."""
    try:
        fd = os.open(cache_dir / paths.EVICTOR, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        yield False
        return
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


@contextmanager
def only_importer(
    cache_dir: Path, *, longest_s: float = IMPORT_SECONDS, sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Inside, this process is the only one that downloads into the directory, so that nothing is downloaded twice.

    The lock of a process that died is gone with it. Who has waited for `longest_s` goes on all the same: whatever both
    bring is the same. `sleep` may raise to end the wait.
    """
    path = cache_dir / paths.IMPORTER
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise StorageError(f"{path} can't be opened: {error.strerror or error}") from error
    try:
        deadline = time.monotonic() + longest_s
        pause = 0.01
        while not try_lock(fd):
            if pause == 0.01:
                log.info("kvsnap: another process imports into %s; waiting for it", cache_dir)
            if time.monotonic() > deadline:
                log.warning("kvsnap: %s is held by another process for over %g s; going on", path, longest_s)
                break
            sleep(pause)
            pause = min(2 * pause, 0.5)
        yield
    finally:
        os.close(fd)


class WriterDir:
    """This process's own temporary directory. Create and sweep only while holding the directory lock."""

    def __init__(self, namespace_dir: Path) -> None:
        self.name = secrets.token_hex(8)
        self.path = namespace_dir / paths.TEMPORARY / self.name
        self._fd = -1
        self.create()

    def create(self) -> None:
        """Make the directory and lock it; again if somebody removed it. Raises StorageError."""
        paths.make_dir(self.path)
        if self._fd >= 0:
            os.close(self._fd)
        pid = os.getpid()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self.path / paths.LOCK, flags, 0o666)
        except OSError as error:
            raise StorageError(f"{self.path} can't be used: {error.strerror or error}") from error
        try:
            os.write(self._fd, f"{pid} {process_start_time(pid) or 0}\n".encode())
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # a full disk can still be read; the lock says enough
                raise StorageError(f"{self.path} can't be used: {error.strerror or error}") from error
        while not try_lock(self._fd):  # somebody looks just now whether we live; without the lock we would not
            time.sleep(0.001)

    def write_file(self, path: Path, data: bytes) -> None:
        """Replace `path` atomically, with the temporary file in here. Raises StorageError."""
        write_file(path, data, temp_dir=self.path)

    def close(self) -> None:
        """Remove the directory and what is in it."""
        _remove_writer(self.path)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def is_alive(writer: Path) -> bool:
    """Whether the writer of a temporary directory lives: its lock is held, or its process is there.

    The second counts where file locks don't work: better a file that stays until the next start than one that is
    taken from under a writer.
    """
    try:
        fd = os.open(writer / paths.LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    try:
        if not try_lock(fd):
            return True
        words = os.pread(fd, 64, 0).split()
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return False
        return process_start_time(int(words[0])) == int(words[1]) != 0
    except (OSError, StorageError):
        return True
    finally:
        os.close(fd)


def writers(namespace_dir: Path) -> list[Path]:
    """The temporary directories of a namespace, dead and alive. Symbolic links and foreign names are not among them."""
    tmp = namespace_dir / paths.TEMPORARY
    return [
        tmp / entry.name
        for entry in paths.entries(tmp)
        if paths.is_writer_name(entry.name) and entry.is_dir(follow_symlinks=False)
    ]


def sweep(namespace_dir: Path) -> int:
    """Remove what dead writers left; returns the real bytes freed. Only while holding the directory lock."""
    return sum(remove_dead(writer) for writer in writers(namespace_dir))


def remove_dead(writer: Path) -> int:
    """Remove what a writer left, if it is dead; returns the real bytes freed. Only while holding the directory lock."""
    if is_alive(writer):
        return 0
    freed = _remove_writer(writer)
    log.info("kvsnap: removed what a dead writer left in %s", writer)
    return freed


def _remove_writer(writer: Path) -> int:
    """Remove kvsnap's own regular files, the lock last, and the directory if nothing else is in it."""
    freed = 0
    for entry in paths.entries(writer):
        if paths.is_own_file(entry.name) and entry.name != paths.LOCK:
            freed += paths.remove_file(entry)
    if [entry.name for entry in paths.entries(writer)] in ([], [paths.LOCK]):
        paths.remove_file(writer / paths.LOCK)
        with contextlib.suppress(OSError):
            freed += paths.real_bytes(writer)
            os.rmdir(writer)
    return freed


def _is_file_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False
