"""The cap of a cache directory, counted in real bytes over everything in it."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

from kvsnap.atomic import write_file
from kvsnap.canonical import canonical_json
from kvsnap.errors import ConfigError, IncompatibleError
from kvsnap.namespace import FORMAT
from kvsnap.tiers import engines, paths, writers

DEFAULT_SHARE = 0.8
"""Of the file system, where no engine has recorded a cap."""
_MARGIN_BYTES = 256 << 10

log = logging.getLogger(__name__)


def margin(cap_bytes: int) -> int:
    """Bytes kept free below the cap for directories that grow, small files and the file system's own blocks."""
    return min(_MARGIN_BYTES, cap_bytes // 16)


def read_marker(cache_dir: Path) -> int | None:
    """The cap that the engine started last recorded, in bytes; None if there is none.

    Raises:
        ConfigError: `cache_dir` is something else, e.g. a snapshot repository.
        IncompatibleError: a newer format.
    """
    path = cache_dir / paths.MARKER
    try:
        marker = paths.read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        log.warning("kvsnap: %s can't be read and will be written again: %s", path, error)
        return None
    if not isinstance(marker, dict) or marker.get("kind") != "cache":
        raise ConfigError(f"{cache_dir} is not a cache directory ({paths.MARKER} says so); choose another cache_dir")
    if type(marker.get("format")) is not int or marker["format"] > FORMAT:
        raise IncompatibleError(
            f"{cache_dir} has format version {marker.get('format')!r:.20}, this kvsnap reads up to {FORMAT};"
            " upgrade kvsnap",
            ("format",),
        )
    cap = marker.get("cap_bytes")
    return cap if type(cap) is int and cap > 0 else None


def write_marker(cache_dir: Path, cap_bytes: int | None) -> None:
    """Record the cap, or that there is none yet. Only while holding the directory lock."""
    for entry in paths.entries(cache_dir):  # nobody else is between temporary file and rename now
        if entry.name.startswith(f".{paths.MARKER}.") and entry.name.endswith(".tmp"):
            paths.remove_file(entry)
    marker = {"cap_bytes": cap_bytes, "format": FORMAT, "kind": "cache"}
    write_file(cache_dir / paths.MARKER, canonical_json(marker))


def filesystem_bytes(directory: Path) -> int:
    """Size of the file system that holds `directory`, or will once it is made."""
    found = _filesystem(directory)
    return found.f_blocks * found.f_frsize


def free_bytes(directory: Path) -> int:
    """What this user may still write to the file system that holds `directory`, or will once it is made."""
    found = _filesystem(directory)
    return found.f_bavail * found.f_frsize


def _filesystem(directory: Path) -> os.statvfs_result:
    while not directory.exists():
        directory = directory.parent
    return os.statvfs(directory)


def default_cap(cache_dir: Path) -> int:
    """80 % of the file system of `cache_dir`, in bytes."""
    return int(filesystem_bytes(cache_dir) * DEFAULT_SHARE)


def cap_of(cache_dir: Path) -> int:
    """The cap that jobs obey, in bytes: what an engine recorded, else the default."""
    return read_marker(cache_dir) or default_cap(cache_dir)


def room_bytes(cache_dir: Path, own: Path) -> int:
    """About how many real bytes an import into the namespace `own` could place now; `cache_dir` may not exist yet.

    Quarantine and namespaces that nobody uses would give way for them.
    """
    cap = cap_of(cache_dir)
    yielding = 0
    for directory in paths.namespace_dirs(cache_dir):
        is_foreign = directory != own and not is_used(directory)
        yielding += Meter(directory if is_foreign else directory / paths.QUARANTINE).used_bytes()
    under_cap = cap - margin(cap) - Meter(cache_dir).used_bytes()
    return max(0, min(under_cap, free_bytes(cache_dir)) + yielding)


class Meter:
    """Counts what `du` counts. Shards never change, so each is looked at once."""

    def __init__(self, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._shards: dict[Path, dict[str, tuple[int, int]]] = {}

    def used_bytes(self) -> int:
        """Real bytes of everything in the cache directory: directories, temporary files, quarantine, foreign files.

        A temporary file counts with its reserved length even where the file system doesn't allocate that at once.
        """
        used: dict[int, int] = {}
        stack = [self._cache_dir]
        while stack:
            directory = stack.pop()
            try:
                own = os.lstat(directory)
            except OSError:
                continue
            used[own.st_ino] = own.st_blocks * 512
            known = self._shards.get(directory, {})
            shards: dict[str, tuple[int, int]] = {}
            # Others publish while we count, from tmp to shards to quarantine: whoever looks in this order, which
            # happens to be the alphabet's backwards, misses no file.
            for entry in sorted(paths.entries(directory), key=lambda entry: entry.name):
                found = known.get(entry.name)
                if found is None or found[0] != entry.inode():
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            stack.append(directory / entry.name)
                            continue
                        status = entry.stat(follow_symlinks=False)
                    except OSError:
                        continue
                    is_reserved = directory.parent.name == paths.TEMPORARY
                    nbytes = status.st_blocks * 512
                    found = status.st_ino, max(nbytes, status.st_size) if is_reserved else nbytes
                inode, nbytes = shards[entry.name] = found
                used[inode] = max(nbytes, used.get(inode, 0))  # while it is published a shard has two names
            if directory.name == paths.SHARDS:
                self._shards[directory] = shards
        return sum(used.values())


def empty_quarantine(cache_dir: Path) -> int:
    """Remove all quarantined shards; returns the real bytes freed."""
    freed = 0
    for directory in paths.namespace_dirs(cache_dir):
        for entry in paths.entries(directory / paths.QUARANTINE):
            if paths.is_own_file(entry.name):
                freed += paths.remove_file(entry)
    if freed:
        log.info("kvsnap: removed %d bytes of quarantined shards to make room", freed)
    return freed


def reclaim_foreign(cache_dir: Path, own: Path, wanted_bytes: int) -> int:
    """Remove shards of namespaces that nobody uses, oldest use first; returns the real bytes freed.

    Newest shards go first: they hold the ends of prefixes. Only while holding the directory lock, under which users of
    a namespace announce themselves.
    """
    freed = 0
    unused = [directory for directory in paths.namespace_dirs(cache_dir) if directory != own and not is_used(directory)]
    for directory in sorted(unused, key=last_use):
        if freed >= wanted_bytes:
            break
        gone = remove_namespace(directory, wanted_bytes - freed)
        freed += gone
        log.warning("kvsnap: removed %d bytes of the unused namespace %s to make room", gone, directory.name)
    return freed


def remove_namespace(directory: Path, wanted_bytes: float = math.inf) -> int:
    """Remove a namespace's shards, newest first, until `wanted_bytes` are free, and with the last one all the rest.

    Foreign files in it stay, and so does then the directory. Only while holding the directory lock. Returns the real
    bytes freed.
    """
    freed = 0
    shards = [e for e in paths.entries(directory / paths.SHARDS) if paths.shard_id_of(e.name) is not None]
    for entry in sorted(shards, key=_mtime, reverse=True):
        if freed >= wanted_bytes:
            return freed
        freed += paths.remove_file(entry)
    return freed + _remove_rest(directory)


def is_used(directory: Path) -> bool:
    """Whether an engine or a job that writes uses the namespace in `directory`."""
    return any(writers.is_alive(writer) for writer in writers.writers(directory)) or any(
        engines.is_live(record, directory) for record in engines.read_records(directory)
    )


def last_use(directory: Path) -> float:
    """The last write, start or end of a user, Unix time; not the last removal of a shard, which is ours."""
    shards = [entry for entry in paths.entries(directory / paths.SHARDS) if paths.shard_id_of(entry.name) is not None]
    traces = [_mtime(directory / name) for name in (paths.USAGE, paths.TEMPORARY, paths.NAMESPACE)]
    return max(traces + [_mtime(entry) for entry in shards])


def _mtime(path: Path | os.DirEntry[str]) -> float:
    try:
        return os.lstat(path).st_mtime
    except OSError:
        return 0.0


def _remove_rest(directory: Path) -> int:
    freed = writers.sweep(directory)
    for entry in paths.entries(directory / paths.QUARANTINE):
        if paths.is_own_file(entry.name):
            freed += paths.remove_file(entry)
    for entry in paths.entries(directory / paths.ENGINES):
        if entry.name.endswith(".json"):
            freed += paths.remove_file(entry)
    for name in (paths.USAGE, paths.NAMESPACE):
        freed += paths.remove_file(directory / name)
    for name in (paths.QUARANTINE, paths.ENGINES, paths.TEMPORARY, paths.SHARDS, "."):
        nbytes = paths.real_bytes(directory / name)
        try:
            os.rmdir(directory / name if name != "." else directory)
            freed += nbytes
        except OSError:
            continue
    return freed
