"""The `usage` file: hits and last use of chunks. Advisory: losing it costs a worse choice of what to evict.

8 bytes   "KVSUSE01"
8 bytes   number of rows, u64 little-endian
48 bytes  per row: key (32), hits (u64 LE), last use in seconds since 1970 (f64 LE)
16 bytes  XXH3-128 digest of all bytes before
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

import xxhash

from kvsnap.errors import CorruptChunkError
from kvsnap.keys import ChunkKey

Row = tuple[ChunkKey, int, float]
"""Key, hits, last use in seconds since 1970."""

_MAGIC = b"KVSUSE01"
_HEAD = struct.Struct("<8sQ")
_ROW = struct.Struct("<32sQd")
_DIGEST_BYTES = 16
_MAX_FILE_BYTES = 1 << 30
_MAX_HITS = 2**64 - 1


def encode(rows: Iterable[Row]) -> bytes:
    """The file's content."""
    packed = [_ROW.pack(key, min(max(hits, 0), _MAX_HITS), last_use) for key, hits, last_use in rows]
    body = b"".join([_HEAD.pack(_MAGIC, len(packed)), *packed])
    return body + xxhash.xxh3_128_digest(body)


def decode(data: bytes) -> dict[ChunkKey, tuple[int, float]]:
    """What `encode` was given, by key; raises CorruptChunkError for anything else."""
    body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if len(body) < _HEAD.size or xxhash.xxh3_128_digest(body) != digest:
        raise CorruptChunkError("its checksum is wrong")
    magic, count = _HEAD.unpack_from(body)
    if magic != _MAGIC or len(body) != _HEAD.size + count * _ROW.size:
        raise CorruptChunkError(f"it is of another format, or has not {count} rows")
    rows = _ROW.iter_unpack(memoryview(body)[_HEAD.size :])
    return {ChunkKey(key): (hits, last_use if math.isfinite(last_use) else 0.0) for key, hits, last_use in rows}


def read(path: Path) -> dict[ChunkKey, tuple[int, float]]:
    """`decode` the file; raises OSError or CorruptChunkError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_FILE_BYTES:
            raise CorruptChunkError(
                f"it has {found.st_size} bytes, expected at most {_MAX_FILE_BYTES} in a regular file"
            )
        return decode(file.read())
