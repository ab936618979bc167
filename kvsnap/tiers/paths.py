"""Names in a cache directory. What comes from outside is checked before it becomes part of a path."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from kvsnap.errors import ConfigError, IncompatibleError, StorageError
from kvsnap.namespace import Namespace

MARKER = "kvsnap.json"
LOCK = "lock"
EVICTOR = "evictor"
IMPORTER = "importer"
NAMESPACE = "namespace.json"
SHARDS = "shards"
TEMPORARY = "tmp"
QUARANTINE = "quarantine"
ENGINES = "engines"
USAGE = "usage"
SUFFIX = ".safetensors"

_SHARD_ID = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
_ENGINE_ID = re.compile(r"[0-9A-Za-z_-]{1,128}")
_WRITER = re.compile(r"[0-9a-f]{16}")
_NAMESPACE_DIR = re.compile(r"[a-z0-9_-]+-[0-9a-f]{16}")
_MAX_JSON_BYTES = 16 << 20

log = logging.getLogger(__name__)


def new_shard_id() -> str:
    """32 random hex digits."""
    return secrets.token_hex(16)


def shard_name(shard_id: str) -> str:
    """File name of a shard.

    Raises:
        ConfigError: the id is not 32 or 64 lower-case hex digits.
    """
    if not _SHARD_ID.fullmatch(shard_id):
        raise ConfigError(f"shard id {shard_id!r:.80} is not 32 or 64 lower-case hex digits")
    return shard_id + SUFFIX


def shard_id_of(name: str) -> str | None:
    """The id in a file name; None for what is not a shard's name."""
    shard_id = name.removesuffix(SUFFIX)
    return shard_id if shard_id != name and _SHARD_ID.fullmatch(shard_id) else None


def engine_name(engine_id: str) -> str:
    """File name of an engine's record; ConfigError for an id that isn't letters, digits, `_` and `-`."""
    if not _ENGINE_ID.fullmatch(engine_id):
        raise ConfigError(f"engine id {engine_id!r:.160} is not 1 to 128 letters, digits, _ and -")
    return f"{engine_id}.json"


def is_writer_name(name: str) -> bool:
    return _WRITER.fullmatch(name) is not None


def is_own_file(name: str) -> bool:
    """Whether kvsnap gives such names to files in temporary directories and quarantine."""
    return name == LOCK or shard_id_of(name) is not None or (name.startswith((".", "probe.")) and name.endswith(".tmp"))


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """What is in `directory`; nothing if it is missing, a symbolic link or not a directory."""
    try:
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            return []
        with os.scandir(directory) as found:
            return list(found)
    except OSError:
        return []


def real_bytes(path: Path | os.DirEntry[str]) -> int:
    """Bytes that `path` takes on disk, as `du` counts; 0 if it is gone."""
    try:
        return os.lstat(path).st_blocks * 512
    except OSError:
        return 0


def size_and_time(path: Path) -> tuple[int, int]:
    """(real bytes, modification time in ns); zeros if it is gone."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0, 0
    return found.st_blocks * 512, found.st_mtime_ns


def stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced, or a name in a directory comes or goes; None if there is nothing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def make_dir(path: Path) -> None:
    """Create `path`, unless it is there; several processes may do so at once.

    Raises:
        StorageError: it can't be created, or is there and is no directory.
    """
    try:
        path.mkdir(exist_ok=True)
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise StorageError(f"{path} is a symbolic link, expected a directory")
    except OSError as error:
        raise StorageError(f"{path} can't be created: {error.strerror or error}") from error


def remove_file(path: Path | os.DirEntry[str]) -> int:
    """Unlink a regular file; returns its real bytes, 0 if there was none. A symbolic link or directory stays."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            return 0
        os.unlink(path)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("kvsnap: %s can't be removed: %s", os.fspath(path), error.strerror)
        return 0
    return found.st_blocks * 512


def read_json(path: Path) -> object:
    """Parse a small JSON file; FileNotFoundError as it is, ValueError for anything that isn't one."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_JSON_BYTES:
            raise ValueError(f"{path} is not a small regular file")
        try:
            return json.loads(file.read())
        except RecursionError:
            raise ValueError(f"{path} is nested too deeply") from None


def namespace_dirs(cache_dir: Path) -> Iterator[Path]:
    """The directories in `cache_dir` that are named like a namespace's."""
    for entry in sorted(entries(cache_dir), key=lambda entry: entry.name):
        if _NAMESPACE_DIR.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            yield cache_dir / entry.name


def read_namespace(directory: Path) -> Namespace:
    """The namespace of a directory.

    Raises:
        IncompatibleError: namespace.json is missing, damaged or of another format, or the directory is not named by it.
    """
    try:
        ns = Namespace.from_json(read_json(directory / NAMESPACE))
    except (OSError, ValueError) as error:
        raise IncompatibleError(f"{directory / NAMESPACE} can't be read: {error}") from error
    if ns.dirname != directory.name:
        raise IncompatibleError(f"{directory / NAMESPACE} describes {ns.dirname}, expected {directory.name}")
    return ns


def open_namespaces(cache_dir: Path) -> list[tuple[Path, Namespace]]:
    """All namespaces in `cache_dir` that can be read, by name; the others get a log line."""
    found = []
    for directory in namespace_dirs(cache_dir):
        try:
            found.append((directory, read_namespace(directory)))
        except IncompatibleError as error:
            log.warning("kvsnap: %s", error)
    return found
