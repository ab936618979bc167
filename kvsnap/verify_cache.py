"""The verify ladder for a cache directory. Works beside live engines; nothing is changed.

quick      markers, names and sizes of shards
default    also the headers of all shards, and which chunks hang on no root
sample     also the bytes of some chunks, chosen at random
read-data  also every byte: XXH3 of each chunk, sha256 of each imported shard
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvsnap.direct_io import ALIGN, FileReader
from kvsnap.errors import CorruptChunkError, NotFoundError, StorageError
from kvsnap.local_shards import (
    IMPORTED_ID_DIGITS,
    LocalShard,
    live_entries,
    open_shard,
    scan_shards,
    shard_paths,
)
from kvsnap.runtime import widen_affinity
from kvsnap.shard import ChunkEntry
from kvsnap.snapshot_export import match_namespaces
from kvsnap.tiers import paths, quota, usage
from kvsnap.transfer import NUM_WORKERS, Progress, ShardHasher, pieces
from kvsnap.verify_report import VerifyReport, choose_depth, choose_sample, compare_chunks, read_digests


def verify_cache_dir(
    cache_dir: Path,
    *,
    namespace: str | None = None,
    quick: bool = False,
    sample: float | None = None,
    seed: int | None = None,
    read_data: bool = False,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify the shards of all namespaces of a cache directory, or of those that start with `namespace`.

    A shard that a live engine evicts meanwhile is no problem.

    Args:
        quick, sample, read_data: How deep, at most one of them; `sample` is a share of the chunks.
        seed: Chooses the sample; without, another one each time.

    Raises:
        NotFoundError: there is no such directory, or no such namespace in it.
        ConfigError: it is something else than a cache directory; a wrong argument.
        IncompatibleError: it needs a later kvsnap.
        StorageError: it can't be read.
    """
    report = VerifyReport(
        subject=str(cache_dir), depth=choose_depth(quick=quick, sample=sample, read_data=read_data), seed=seed
    )
    if cache_dir.is_dir():
        _check_marker(cache_dir, report)
    directories = match_namespaces(cache_dir, namespace)
    if namespace is None:
        known = {directory for directory, _ in directories}
        for directory in paths.namespace_dirs(cache_dir):
            if directory not in known:
                message = f"{directory / paths.NAMESPACE} is missing or damaged; its chunks can't be used"
                report.add("damaged", str(directory / paths.NAMESPACE), message)
    shards: list[LocalShard] = []
    for directory, ns in directories:
        _note_rest(directory, report)
        if quick:
            _check_sizes(directory, report)
            continue
        scan = scan_shards(directory, ns)
        shards += scan.shards
        for bad in scan.damaged:
            if os.path.lexists(bad.path):  # else it was evicted
                report.add("damaged", str(bad.path), f"shard {bad.path} is damaged: {bad.reason}")
        live, num_dead = live_entries(ns, scan.shards)
        report.num_shards += len(scan.shards)
        report.num_chunks += len(live) + num_dead
        if num_dead:
            report.notes.append(f"{directory.name}: {num_dead} chunks lack an ancestor and can't be used")
    if read_data:
        _read_all([(shard, shard.header.chunks) for shard in shards], report, progress, whole=True)
    elif sample is not None:
        entries = [(shard, entry) for shard in shards for entry in shard.header.chunks]
        chosen, report.seed = choose_sample(len(entries), sample, seed)
        wanted: dict[str, tuple[LocalShard, list[ChunkEntry]]] = {}
        for i in sorted(chosen):
            shard, entry = entries[i]
            wanted.setdefault(str(shard.path), (shard, []))[1].append(entry)
        _read_all(wanted.values(), report, progress, whole=False)
    return report


def _check_marker(cache_dir: Path, report: VerifyReport) -> None:
    quota.read_marker(cache_dir)
    path = cache_dir / paths.MARKER
    try:
        paths.read_json(path)
    except FileNotFoundError:
        report.notes.append(f"{path} is missing; no engine has recorded a cap")
    except (OSError, ValueError) as error:
        report.add("damaged", str(path), f"{path} is damaged: {error}")


def _note_rest(directory: Path, report: VerifyReport) -> None:
    """What is beside the shards, and harmless."""
    if quarantined := len(paths.entries(directory / paths.QUARANTINE)):
        report.notes.append(f"{directory.name}: {quarantined} files are in quarantine")
    try:
        usage.read(directory / paths.USAGE)
    except FileNotFoundError:
        pass
    except (OSError, CorruptChunkError) as error:
        report.notes.append(f"{directory / paths.USAGE} is damaged ({error}); how hot its chunks are is forgotten")


def _check_sizes(directory: Path, report: VerifyReport) -> None:
    for path in shard_paths(directory):
        try:
            found = os.lstat(path)
        except OSError:  # evicted
            continue
        report.num_shards += 1
        if not stat.S_ISREG(found.st_mode):
            report.add("damaged", str(path), f"shard {path} is damaged: it is not a regular file")
        elif found.st_size < 2 * ALIGN or found.st_size % ALIGN:
            message = f"shard {path} is damaged: it has {found.st_size} bytes, expected a multiple of {ALIGN}"
            report.add("damaged", str(path), message)


def _read_all(
    wanted: Iterable[tuple[LocalShard, Sequence[ChunkEntry]]],
    report: VerifyReport,
    progress: Progress | None,
    *,
    whole: bool,
) -> None:
    """Read chunks of shards, a few shards at once; with `whole` each shard from its first byte to its last."""

    def read(item: tuple[LocalShard, Sequence[ChunkEntry]]) -> VerifyReport:
        part = report.part()
        shard, entries = item
        name = str(shard.path)
        try:
            if whole:
                _read_whole(shard, part)
            else:
                with open_shard(shard.path) as fd:
                    found = [read_digests(FileReader(fd, name, entry.offset), entry.nbytes) for entry in entries]
                part.read_chunks += len(found)
                part.read_bytes += sum(entry.nbytes for entry in entries)
                compare_chunks(name, entries, found, part)
        except NotFoundError:  # evicted
            pass
        except StorageError as error:
            part.add("unreadable", name, str(error))
        return part

    items = list(wanted)
    total = sum(s.header.file_bytes if whole else sum(entry.nbytes for entry in entries) for s, entries in items)
    with ThreadPoolExecutor(NUM_WORKERS, "kvsnap-verify", initializer=widen_affinity) as pool:
        for part in pool.map(read, items):
            report.join(part)
            if progress is not None:
                progress(report.read_bytes, total)


def _read_whole(shard: LocalShard, report: VerifyReport) -> None:
    name, entries = str(shard.path), shard.header.chunks
    hasher = ShardHasher(entries, with_blake3=False)
    with open_shard(shard.path) as fd:
        for piece in pieces(FileReader(fd, name), limit=shard.header.file_bytes):
            hasher.update(piece)
    report.read_bytes += hasher.nbytes
    report.read_chunks += len(hasher.digests)
    compare_chunks(name, entries, hasher.digests, report)
    is_imported = len(shard.id) == IMPORTED_ID_DIGITS
    if is_imported and hasher.sha256() != shard.id and not report.problems:
        message = f"shard {name} is damaged: expected sha256 {shard.id[:12]}, read {hasher.sha256()[:12]}"
        report.add("damaged", name, message)
