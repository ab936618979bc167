"""Takes out of a cache directory, and out of memory, what no engine will come back for.

What a live engine or job uses is never touched: each is checked again under the directory
lock, under which users announce themselves, or by the file's own locks, right before it goes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvsnap.errors import IncompatibleError, NotFoundError
from kvsnap.status import DRAM_DIR
from kvsnap.tiers import dram_lock, engines, paths, quota, writers

Kind = Literal["namespace", "dram file", "quarantine", "writer", "engine record"]

DEFAULT_UNUSED_S = 30 * 86400.0
_AT_ONCE_BYTES = 4 << 30

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneItem:
    """Something that may go."""

    kind: Kind
    path: str
    nbytes: int
    """Real bytes, on disk or in memory."""
    last_use: float
    """Unix time [s]"""
    goes: bool
    why: str
    """Why it goes or stays, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePruneReport:
    """What was looked at, and what went (or with `dry_run` would go)."""

    cache_dir: str
    dry_run: bool
    unused_for_s: float
    items: tuple[PruneItem, ...]
    """Namespaces first, then DRAM files, both by last use, then the rest."""
    freed_bytes: int
    """Real bytes of what goes; less where foreign files lie among it."""
    failed: tuple[str, ...]
    """Paths that should have gone and are still there: in use by now, or no permission."""


def prune_cache(
    cache_dir: Path,
    *,
    unused_for_s: float = DEFAULT_UNUSED_S,
    dram_dir: Path = DRAM_DIR,
    all_dram: bool = False,
    dry_run: bool = False,
) -> CachePruneReport:
    """Remove namespaces and DRAM files that nobody has used for `unused_for_s` seconds, and what dead processes left.

    Args:
        all_dram: Also DRAM files of this user's other cache directories.
        dry_run: Only look; nothing changes.

    Raises:
        NotFoundError: there is no such directory.
        ConfigError: it is something else than a cache directory.
        StorageError: the directory can't be locked.
    """
    if not cache_dir.is_dir():
        raise NotFoundError(f"there is no directory {cache_dir}")
    quota.read_marker(cache_dir)

    items = plan_cache_prune(cache_dir, dram_dir, now=time.time(), unused_for_s=unused_for_s, all_dram=all_dram)
    lock = writers.DirectoryLock(cache_dir)
    failed = [] if dry_run else [item.path for item in items if item.goes and not _remove(item, lock)]
    return CachePruneReport(
        cache_dir=str(cache_dir),
        dry_run=dry_run,
        unused_for_s=unused_for_s,
        items=tuple(items),
        freed_bytes=sum(item.nbytes for item in items if item.goes and item.path not in failed),
        failed=tuple(failed),
    )


def plan_cache_prune(
    cache_dir: Path, dram_dir: Path, *, now: float, unused_for_s: float, all_dram: bool = False
) -> list[PruneItem]:
    """What there is, and whether it goes. Changes nothing."""
    in_memory = dram_lock.list_dram_files(dram_dir)
    owned = {info.namespace_id for info in in_memory if info.is_used and info.is_of(cache_dir)}
    namespaces: list[PruneItem] = []
    rest: list[PruneItem] = []
    for directory in paths.namespace_dirs(cache_dir):
        used = quota.is_used(directory) or _namespace_id(directory) in owned  # a read-only engine owns but its DRAM
        last_use = quota.last_use(directory)
        goes, why = _verdict(used, now - last_use, unused_for_s)
        nbytes = quota.Meter(directory).used_bytes()
        namespaces.append(
            PruneItem(
                kind="namespace", path=str(directory), nbytes=nbytes, last_use=last_use, goes=goes, why=why
            )
        )  # fmt: skip
        if not goes:
            rest.extend(_leftovers(directory))
    memory: list[PruneItem] = []
    for info in in_memory:
        goes, why = _verdict(info.is_used, now - info.last_use, unused_for_s)
        if not info.is_of(cache_dir):
            if info.is_used:
                continue
            goes, why = goes and all_dram, why if all_dram else "of another cache directory"
        memory.append(
            PruneItem(
                kind="dram file", path=info.path, nbytes=info.bytes, last_use=info.last_use, goes=goes, why=why
            )
        )  # fmt: skip
    return [*sorted(namespaces, key=_by_use), *sorted(memory, key=_by_use), *rest]


def _leftovers(directory: Path) -> list[PruneItem]:
    """Quarantine, and what dead writers and engines left, in a namespace that stays."""
    items = []
    present = paths.entries(directory / paths.QUARANTINE)
    quarantined = [e for e in present if paths.is_own_file(e.name) and e.is_file(follow_symlinks=False)]
    found: list[tuple[Kind, Path, str]] = [("quarantine", Path(entry.path), "damaged") for entry in quarantined]
    dead = [writer for writer in writers.writers(directory) if not writers.is_alive(writer)]
    found += [("writer", writer, "its writer is dead") for writer in dead]
    found += [("engine record", path, "its engine is dead") for path in engines.dead_records(directory)]
    for kind, path, why in found:
        nbytes = quota.Meter(path).used_bytes() if kind == "writer" else paths.real_bytes(path)
        last_use = paths.size_and_time(path)[1] / 1e9
        items.append(PruneItem(kind=kind, path=str(path), nbytes=nbytes, last_use=last_use, goes=True, why=why))
    return items


def _remove(item: PruneItem, lock: writers.DirectoryLock) -> bool:
    """Whether it is gone."""
    path = Path(item.path)
    if item.kind == "namespace":
        is_gone = _remove_namespace(path, lock)
    elif item.kind == "dram file":
        is_gone = dram_lock.remove_file(path) or not path.exists()
    else:
        with lock:
            if item.kind == "writer":
                writers.remove_dead(path)
            elif item.kind == "quarantine" or path in engines.dead_records(path.parent.parent):
                paths.remove_file(path)
        is_gone = not path.exists()
    if is_gone:
        log.info("kvsnap: removed %s %s, %d bytes", item.kind, path, item.nbytes)
    return is_gone


def _remove_namespace(directory: Path, lock: writers.DirectoryLock) -> bool:
    """Piece by piece, so that engines of other namespaces needn't wait for the lock; stops if somebody comes back."""
    while True:
        with lock:
            if quota.is_used(directory):
                return False
            freed = quota.remove_namespace(directory, _AT_ONCE_BYTES)
        if freed < _AT_ONCE_BYTES:
            break
    has_shards = any(paths.shard_id_of(entry.name) for entry in paths.entries(directory / paths.SHARDS))
    return not has_shards and not (directory / paths.NAMESPACE).exists()  # foreign files may keep the directory


def _verdict(is_used: bool, age_s: float, unused_for_s: float) -> tuple[bool, str]:
    if is_used:
        return False, "in use"
    if age_s < unused_for_s:
        return False, f"used {_age_text(age_s)} ago"
    return True, f"unused for {_age_text(age_s)}"


def _age_text(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _namespace_id(directory: Path) -> str | None:
    try:
        return paths.read_namespace(directory).id()
    except IncompatibleError:
        return None


def _by_use(item: PruneItem) -> float:
    return item.last_use
