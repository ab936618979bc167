"""The digest of a model's weights: of their content, wherever they lie and whatever they are called."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvsnap.atomic import write_file
from kvsnap.errors import ConfigError, StorageError
from kvsnap.runtime import widen_affinity

Progress = Callable[[int, int], None]
"""Called with (bytes hashed, bytes to hash), from any thread, one call at a time."""

_SHA256_HEX = re.compile(r"[0-9a-f]{64}")
_READ_BYTES = 4 << 20
_SETTLED_S = 2.0
"""A file changed more recently isn't cached: a second change may fall into the same tick of its ctime."""
_MAX_CACHED = 4096


def weights_digest(
    files: Sequence[Path], *, cache_file: Path | None, threads: int = 4, progress: Progress | None = None
) -> str:
    """`sha256:<hex>` over the sorted raw sha256 digests of `files`: order, names and folders don't count.

    A file in a Hub cache whose blob is named by its sha256 isn't read. Others are hashed
    by `threads` threads and remembered in `cache_file`, by device, inode, size, mtime and
    ctime; what is in it is dropped when it can't be read or written, never an error.

    Raises:
        ConfigError: no files.
        StorageError: a file can't be read, or changes meanwhile.
    """
    if not files:
        raise ConfigError("no weight files found, expected at least one; declare weights_digest instead")
    digests: dict[Path, str] = {}
    stats: dict[Path, os.stat_result] = {}
    cached = _read_cache(cache_file)
    for path in files:
        if (digest := _blob_digest(path)) is not None:
            digests[path] = digest
            continue
        stats[path] = _stat(path)
        if (digest := cached.get(_cache_key(stats[path]))) is not None:
            digests[path] = digest
    todo = [path for path in stats if path not in digests]
    if todo:
        fresh = _hash_files({path: stats[path] for path in todo}, threads, progress)
        digests.update(fresh)
        settled = {path: d for path, d in fresh.items() if time.time() - stats[path].st_ctime > _SETTLED_S}
        if settled and cache_file is not None:
            _write_cache(cache_file, {_cache_key(stats[path]): digest for path, digest in settled.items()})
    raw = sorted(bytes.fromhex(digests[path]) for path in files)
    return f"sha256:{hashlib.sha256(b''.join(raw)).hexdigest()}"


def _blob_digest(path: Path) -> str | None:
    """The sha256 that a Hub cache gives as the name of the blob behind `path`, if it does.

    Small files have their git object's SHA-1 there: 40 digits, no digest of the content alone.
    """
    blob = path.resolve()
    if path.is_symlink() and blob.parent.name == "blobs" and _SHA256_HEX.fullmatch(blob.name) and blob.is_file():
        return blob.name
    return None


def _stat(path: Path) -> os.stat_result:
    try:
        found = path.stat()
    except OSError as error:
        raise StorageError(f"weight file {path} can't be read: {error}") from error
    if not stat.S_ISREG(found.st_mode):
        raise StorageError(f"weight file {path} is no regular file")
    return found


def _hash_files(files: Mapping[Path, os.stat_result], threads: int, progress: Progress | None) -> dict[Path, str]:
    total = sum(found.st_size for found in files.values())
    done = 0
    lock = threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            if progress is not None:
                progress(done, total)

    # The largest first, so that no thread starts the largest when the others are done.
    order = sorted(files, key=lambda path: files[path].st_size, reverse=True)
    with ThreadPoolExecutor(max(1, threads), "kvsnap-weights", initializer=widen_affinity) as pool:
        hexes = list(pool.map(lambda path: _hash_file(path, files[path], advance), order))
    return dict(zip(order, hexes, strict=True))


def _hash_file(path: Path, before: os.stat_result, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            rest = before.st_size  # a file that grows has no end; `after` tells
            while rest and (count := file.readinto(buffer[:rest])):
                digest.update(buffer[:count])
                rest -= count
                advance(count)
            after = os.fstat(file.fileno())
    except OSError as error:
        raise StorageError(f"weight file {path} can't be read: {error}") from error
    if _cache_key(after) != _cache_key(before):
        raise StorageError(f"weight file {path} changed while it was read; start again when it is complete")
    return digest.hexdigest()


def _cache_key(found: os.stat_result) -> str:
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


def _read_cache(cache_file: Path | None) -> dict[str, str]:
    if cache_file is None:
        return {}
    try:
        entries = json.loads(cache_file.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(entries, dict):
        return {}
    return {key: hex_ for key, hex_ in entries.items() if isinstance(hex_, str) and _SHA256_HEX.fullmatch(hex_)}


def _write_cache(cache_file: Path, new: Mapping[str, str]) -> None:
    # Read again: another engine may have added entries since. Losing one costs one more hash.
    entries = {**_read_cache(cache_file), **new}
    kept = dict(list(entries.items())[-_MAX_CACHED:])
    with contextlib.suppress(OSError, StorageError):
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        write_file(cache_file, json.dumps(kept).encode())
