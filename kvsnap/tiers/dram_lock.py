"""Who may use a DRAM tier's file: naming, ownership, and files that nobody owns.

The engine holds an exclusive `flock` on the file. Every worker holds a shared lock on
`<file>.workers` for as long as it maps it: a worker that outlives its engine may still
be writing, so a new owner needs both.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvsnap.errors import CorruptChunkError, NotFoundError, StorageError
from kvsnap.runtime import process_start_time
from kvsnap.tiers.dram_file import LAST_USE, PAGE, STATE, VALID, decode_owner, read_header

PREFIX = "kvsnap-"
WORKERS_SUFFIX = ".workers"
DYING_WAIT_S = 5.0
SHARED_WAIT_S = 1.0
_POLL_S = 0.05
_MAX_FILES = 64
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR})

log = logging.getLogger(__name__)


def base_name(cache_dir: Path, namespace_id: str) -> str:
    """`kvsnap-<uid>-<hash>`: the same for the same real directory, namespace and user."""
    text = f"{cache_dir.resolve()}\0{namespace_id}".encode()
    return f"{PREFIX}{os.geteuid()}-{hashlib.sha256(text).hexdigest()[:16]}"


@dataclass(slots=True)
class Claim:
    """An owned file: both locks taken, the workers' lock already given back."""

    path: Path
    fd: int
    workers_fd: int
    messages: list[str]

    def admit_workers(self) -> None:
        """Give the workers' lock back, so that this owner's workers can take it."""
        fcntl.flock(self.workers_fd, fcntl.LOCK_UN)

    def release(self) -> None:
        """Drop ownership; the file stays."""
        for fd in (self.fd, self.workers_fd):
            with suppress(OSError):
                os.close(fd)


def claim(dram_dir: Path, base: str) -> Claim:
    """Own the first file of this name that has no live owner and no live worker.

    An owner that lives: the next number at once. One that is dead or dying, or a
    worker that survived it: up to 5 s in all, then the next number.

    Raises:
        StorageError: `dram_dir` can't be written.
    """
    deadline = time.monotonic() + DYING_WAIT_S
    messages: list[str] = []
    for number in range(_MAX_FILES):
        path = dram_dir / f"{base}-{number}"
        while True:
            try:
                fd, workers_fd = _open_both(path)
            except OSError as error:
                if error.errno in _NOT_OURS:
                    messages.append(f"{path} is not usable: {error}")
                    break
                raise StorageError(f"cannot create the DRAM tier in {dram_dir}: {error}") from error
            got_file = _try_lock(fd, fcntl.LOCK_EX)
            got_workers = got_file and _try_lock(workers_fd, fcntl.LOCK_EX)
            if got_workers and _is_same(path, fd) and _is_same(_workers_path(path), workers_fd):
                return Claim(path, fd, workers_fd, messages)
            live = not got_file and _owner_lives(fd)
            os.close(fd)
            os.close(workers_fd)
            if live:
                break
            if time.monotonic() >= deadline:
                who = "a worker of its last engine still maps it" if got_file else "its owner is dying"
                messages.append(f"{path} is left alone: {who}")
                break
            if got_workers:
                continue  # the file was removed under us: take the new one at once
            time.sleep(_POLL_S)
    raise StorageError(f"all {_MAX_FILES} DRAM files {base}-* in {dram_dir} are in use")


def hold_workers_lock(path: Path) -> int:
    """A worker's shared lock for as long as the returned descriptor stays open.

    Tried for a while: who only looks whether workers live takes the lock for a moment.

    Raises:
        NotFoundError: a new owner is taking the file over, or it is gone.
    """
    fd = _open_own(_workers_path(path), create=False)
    deadline = time.monotonic() + SHARED_WAIT_S
    while not _try_lock(fd, fcntl.LOCK_SH):
        if time.monotonic() >= deadline:
            os.close(fd)
            raise NotFoundError(f"the DRAM tier {path} is being taken over by another engine")
        time.sleep(_POLL_S / 10)
    return fd


@dataclass(frozen=True, slots=True, kw_only=True)
class DramFileInfo:
    """A DRAM tier's file as it lies there, read without mapping or owning it."""

    path: str
    bytes: int
    """Real bytes (allocated blocks)."""
    owner_alive: bool
    workers_alive: bool
    """A process still maps it, be its engine alive or not."""
    namespace_id: str
    """64 hex digits; empty where the header can't be read."""
    chunks: int
    """Valid slots."""
    last_use: float
    """Of the file or a chunk in it, seconds since the epoch."""

    @property
    def is_used(self) -> bool:
        """Whether an engine or a worker holds it."""
        return self.owner_alive or self.workers_alive

    def is_of(self, cache_dir: Path) -> bool:
        """Whether it was made for this cache directory, be its namespace still there or not."""
        base = Path(self.path).name.rpartition("-")[0]
        return bool(self.namespace_id) and base == base_name(cache_dir, self.namespace_id)


def list_dram_files(dram_dir: Path) -> list[DramFileInfo]:
    """This user's DRAM files in a directory, oldest use first."""
    return sorted(_infos(dram_dir), key=lambda info: info.last_use)


def remove_for_room(dram_dir: Path, missing_bytes: int, own_base: str) -> list[DramFileInfo]:
    """Delete files that nobody holds until `missing_bytes` more are free; returns what went.

    Oldest use first; those of `own_base`, which an engine of this server may be about to attach, last.
    """
    gone: list[DramFileInfo] = []
    for info in sorted(list_dram_files(dram_dir), key=lambda info: Path(info.path).name.startswith(own_base + "-")):
        if sum(file.bytes for file in gone) >= missing_bytes:
            break
        if not info.is_used and info.bytes and remove_file(Path(info.path)):
            gone.append(info)
    return gone


def remove_file(path: Path) -> bool:
    """Delete one file, if neither an engine nor a worker holds it; whether it went."""
    workers = _workers_path(path)
    try:
        fd = _open_own(path, create=False)
    except OSError:
        return False
    try:
        workers_fd = _open_own(workers)
    except OSError:
        os.close(fd)
        return False
    try:
        if not (_try_lock(fd, fcntl.LOCK_EX) and _try_lock(workers_fd, fcntl.LOCK_EX) and _is_same(path, fd)):
            return False
        path.unlink()
        workers.unlink(missing_ok=True)
        return True
    finally:
        os.close(fd)
        os.close(workers_fd)


def _infos(dram_dir: Path) -> Iterator[DramFileInfo]:
    prefix = f"{PREFIX}{os.geteuid()}-"
    try:
        names = sorted(os.listdir(dram_dir))
    except OSError:
        return
    for name in names:
        if not name.startswith(prefix) or name.endswith(WORKERS_SUFFIX):
            continue
        try:
            fd = _open_own(dram_dir / name, create=False, write=False)
        except OSError:
            continue
        try:
            yield _info(dram_dir / name, fd)
        finally:
            os.close(fd)


def _info(path: Path, fd: int) -> DramFileInfo:
    status = os.fstat(fd)
    namespace, chunks, last_use = "", 0, status.st_mtime  # what is written through a mapping doesn't show in the latter
    with suppress(CorruptChunkError):
        shape, _ = read_header(fd)
        namespace = shape.namespace.hex()
        table = os.pread(fd, shape.num_slots * shape.record_bytes, shape.table_offset)
        states = np.ndarray((shape.num_slots,), "<u4", table, STATE, (shape.record_bytes,))
        chunks = int((states == VALID).sum())
        uses = np.ndarray((shape.num_slots,), "<f8", table, LAST_USE, (shape.record_bytes,))
        last_use = max(last_use, float(uses[states == VALID].max(initial=0.0)))
    return DramFileInfo(
        path=str(path),
        bytes=status.st_blocks * 512,
        owner_alive=_is_locked(fd),
        workers_alive=_path_is_locked(_workers_path(path)),
        namespace_id=namespace,
        chunks=chunks,
        last_use=last_use,
    )


def _workers_path(path: Path) -> Path:
    return path.with_name(path.name + WORKERS_SUFFIX)


def _open_both(path: Path) -> tuple[int, int]:
    fd = _open_own(path)
    try:
        return fd, _open_own(_workers_path(path))
    except BaseException:
        os.close(fd)
        raise


def _open_own(path: Path, *, create: bool = True, write: bool = True) -> int:
    # Not blocking: a pipe of this name, put there by somebody else, must not hold us up.
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    flags |= os.O_CREAT if create else 0
    fd = os.open(path, flags, 0o600)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        os.close(fd)
        raise PermissionError(errno.EACCES, f"expected a regular file of user {os.geteuid()} with mode 0600")
    return fd


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_locked(fd: int) -> bool:
    # A shared try-lock on a descriptor of its own: taken only for the blink of the test.
    if _try_lock(fd, fcntl.LOCK_SH):
        fcntl.flock(fd, fcntl.LOCK_UN)
        return False
    return True


def _path_is_locked(path: Path) -> bool:
    try:
        fd = _open_own(path, create=False, write=False)
    except OSError:
        return False
    try:
        if _try_lock(fd, fcntl.LOCK_EX):
            fcntl.flock(fd, fcntl.LOCK_UN)
            return False
        return True
    finally:
        os.close(fd)


def _is_same(path: Path, fd: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _owner_lives(fd: int) -> bool:
    newest = decode_owner(os.pread(fd, PAGE, PAGE))
    if newest is None:
        return True  # locked but not yet written: its owner is just starting
    owner = newest[1]
    return process_start_time(owner.pid) == owner.start
