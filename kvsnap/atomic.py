"""Files that are there in full or not at all, whenever the machine stops.

Everything is written under another name in the same file system, made durable, and only then given
its name: by `rename` where it replaces, by `link` where it must be new.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

from kvsnap.errors import StorageError

TEMP_SUFFIX = ".tmp"
"""Ending of the temporary names that `write_file` gives; whoever lists a directory hides them."""

_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def write_file(path: Path, data: bytes, *, mode: int = 0o644, temp_dir: Path | None = None) -> None:
    """Make `data` the content of `path`, replacing what was there, and make it durable.

    A reader, and whoever starts after a crash, finds the old content or the new one in full.
    The temporary file lies beside `path`, or in `temp_dir` (same file system), and is removed on failure.

    Raises:
        StorageError: the file system refused; `path` is as it was.
    """
    temp = (temp_dir or path.parent) / f".{path.name}.{secrets.token_hex(8)}{TEMP_SUFFIX}"
    try:
        try:
            write_new(temp, data, mode=mode)
            os.replace(temp, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise
        fsync_dir(path.parent)
    except OSError as error:
        raise StorageError(f"{path} can't be written: {error.strerror or error}") from error


def write_new(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Create `path` with `data` and fsync it. The name must be new; raises OSError."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def link_new(temp: Path, final: Path) -> bool:
    """Give the durable file `temp` the name `final` too, and make that durable; False if the name is taken.

    Never replaces. The caller removes `temp` (where the file system has no hard links it is renamed instead, and gone).
    Raises OSError.
    """
    try:
        os.link(temp, final, follow_symlinks=False)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(final):
            return False
        os.rename(temp, final)
    fsync_dir(final.parent)
    return True


def fsync_dir(path: Path) -> None:
    """Make the names in directory `path` durable; a file system that can't do this is taken as it is."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(fd)
