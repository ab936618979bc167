"""The shards of a namespace in a cache directory, read beside whoever else uses it.

Nothing is changed and no lock is taken: a shard never changes, and one that vanishes
(eviction) is simply not there. So this works on a directory at rest and on a live one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvsnap.errors import CorruptChunkError, IncompatibleError, NotFoundError, StorageError
from kvsnap.keys import ChunkKey, root_key
from kvsnap.namespace import Namespace
from kvsnap.shard import ChunkEntry, ShardHeader, read_open_header
from kvsnap.tiers import paths, usage

IMPORTED_ID_DIGITS = 64
"""The id of an imported shard is the sha256 of the file; others have fewer digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """One shard whose header was read and is right."""

    id: str
    path: Path
    header: ShardHeader
    mtime: float
    """When it was written, Unix time [s]"""

    @property
    def nbytes(self) -> int:
        """Size of the whole file."""
        return self.header.file_bytes

    @property
    def scope(self) -> str:
        """Restrictions that all its chunks carry; empty is plain."""
        return self.header.scope


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedShard:
    """One shard that can't be used."""

    id: str
    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class LocalScan:
    """All shards that were there."""

    shards: tuple[LocalShard, ...]
    """In order of id."""
    damaged: tuple[DamagedShard, ...]


def scan_shards(directory: Path, ns: Namespace) -> LocalScan:
    """Read the headers of all shards of the namespace in `directory`."""
    shards, damaged = [], []
    for path in shard_paths(directory):
        try:
            with open_shard(path) as fd:
                header = read_open_header(fd, ns)
                mtime = os.fstat(fd).st_mtime
        except NotFoundError:
            continue
        except (CorruptChunkError, IncompatibleError, StorageError) as error:
            damaged.append(DamagedShard(id=path.stem, path=path, reason=str(error)))
        else:
            shards.append(LocalShard(id=path.stem, path=path, header=header, mtime=mtime))
    return LocalScan(tuple(shards), tuple(damaged))


def shard_paths(directory: Path) -> list[Path]:
    """The files of the namespace in `directory` that are named like shards, in order."""
    names = sorted(entry.name for entry in paths.entries(directory / paths.SHARDS))
    return [directory / paths.SHARDS / name for name in names if paths.shard_id_of(name) is not None]


def read_usage(directory: Path) -> dict[ChunkKey, tuple[int, float]]:
    """Hits and last use of chunks as the engines wrote them down; nothing if there is no good `usage` file."""
    try:
        return usage.read(directory / paths.USAGE)
    except (OSError, CorruptChunkError):
        return {}


@contextmanager
def open_shard(path: Path) -> Iterator[int]:
    """A file descriptor of a shard.

    Raises:
        NotFoundError: it has vanished.
        StorageError: it can't be opened, or is a symbolic link.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise NotFoundError(f"shard {path} has vanished") from None
    except OSError as error:
        raise StorageError(f"shard {path} can't be opened: {error.strerror or error}") from error
    try:
        yield fd
    finally:
        os.close(fd)


class ChainCheck:
    """Decides whether a chunk hangs on its parent rightly, as import, export and verify all see it."""

    def __init__(self, ns: Namespace) -> None:
        self._root = root_key(ns.identity.hash(), ns.chunk_tokens)

    def root_is_right(self, entry: ChunkEntry, scope: str) -> bool:
        """Whether the parent of a chunk at depth 0 is the root. Unknown, so taken as right, for salted ones."""
        return entry.parent == self._root or not is_plain(scope)


def is_plain(scope: str) -> bool:
    """Whether chunks of this scope hang on the root that has no salt and no adapter."""
    return all(part in ("", "mm") for part in scope.split(","))


def live_entries(ns: Namespace, shards: tuple[LocalShard, ...]) -> tuple[dict[ChunkKey, tuple[int, ChunkEntry]], int]:
    """The chunks that have a full chain of parents, parents first, each with the position of a shard that holds it.

    Where several shards hold a chunk, the one with the most chunks counts (then the
    first id), so that the answer depends on the set of shards alone.

    Returns:
        The chunks by key, and how many more chunks have no full chain.
    """
    check = ChainCheck(ns)
    holders: dict[ChunkKey, tuple[int, ChunkEntry]] = {}
    for i in sorted(range(len(shards)), key=lambda i: (-len(shards[i].header.chunks), shards[i].id)):
        for entry in shards[i].header.chunks:
            holders.setdefault(entry.key, (i, entry))
    live: dict[ChunkKey, tuple[int, ChunkEntry]] = {}
    for key, (i, entry) in sorted(holders.items(), key=lambda item: (item[1][1].depth, item[0])):
        if entry.depth == 0:
            is_live = check.root_is_right(entry, shards[i].header.scope)
        else:
            parent = live.get(entry.parent)
            is_live = parent is not None and parent[1].depth == entry.depth - 1
        if is_live:
            live[key] = (i, entry)
    return live, len(holders) - len(live)
