"""The runtime directory, and small facts about processes and threads."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

from kvsnap.errors import StorageError

T = TypeVar("T")

_BREATH_S = 0.0002


def runtime_dir() -> Path:
    """The directory for sockets and rendezvous files: private to this user, created if missing.

    `$KVSNAP_RUNTIME_DIR`, else `$XDG_RUNTIME_DIR/kvsnap`, else `kvsnap-<uid>` in the
    system's temporary folder. Mode 0700, owned by this user, no symlink.

    Raises:
        StorageError: it can't be created, or is somebody else's.
    """
    if explicit := os.environ.get("KVSNAP_RUNTIME_DIR"):
        return _private_dir(Path(explicit))
    xdg = os.environ.get("XDG_RUNTIME_DIR")
    if xdg and Path(xdg).is_dir() and os.access(xdg, os.W_OK | os.X_OK):
        return _private_dir(Path(xdg) / "kvsnap")
    return _private_dir(Path(tempfile.gettempdir()) / f"kvsnap-{os.getuid()}")


def process_start_time(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot; None if it is gone or a zombie.

    A pid alone names a process only until it is reused; pid and start time name it for good.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field, the name, is in parentheses and may hold spaces and parentheses.
    fields = text[text.rfind(b")") + 1 :].split()
    if len(fields) < 20 or fields[0] in (b"Z", b"X", b"x"):
        return None
    return int(fields[19])


def widen_affinity() -> None:
    """Let the calling thread run on every CPU that the server may use. First statement of every kvsnap thread.

    vLLM's CPU workers pin their main thread to the cores of their OpenMP threads, and new
    threads inherit that. The parent process is not pinned, so its mask is the operator's.
    """
    with contextlib.suppress(OSError):
        allowed = os.sched_getaffinity(os.getpid())
        with contextlib.suppress(OSError):
            allowed |= os.sched_getaffinity(os.getppid())
        os.sched_setaffinity(0, allowed)


def in_turns(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """`size` of the items at a time; in between other threads have their turn, at the interpreter and at any lock."""
    upcoming = iter(items)
    while few := list(islice(upcoming, size)):
        yield few
        time.sleep(_BREATH_S)


def _private_dir(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise StorageError(f"runtime directory {path} is a symlink, expected a directory of this user")
        if found.st_uid != os.getuid():
            raise StorageError(
                f"runtime directory {path} belongs to user {found.st_uid}, expected {os.getuid()}; "
                "set KVSNAP_RUNTIME_DIR"
            )
        if found.st_mode & 0o022:
            mode = stat.S_IMODE(found.st_mode)
            raise StorageError(f"runtime directory {path} has mode {mode:04o}, others may write to it; chmod it 0700")
        if stat.S_IMODE(found.st_mode) != 0o700:
            path.chmod(0o700)
    except OSError as error:
        raise StorageError(f"runtime directory {path} can't be used: {error}; set KVSNAP_RUNTIME_DIR") from error
    return path
