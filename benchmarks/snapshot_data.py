"""Cache directories full of large chunks, and the plain ways to move the same bytes."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvsnap.direct_io import O_DIRECT, aligned_buffer, write_all
from kvsnap.keys import BLOCK_KEY_BYTES, ChunkKey, root_key
from kvsnap.namespace import Namespace
from kvsnap.shard import TARGET_BYTES, checksum
from kvsnap.tiers.disk import ChunkToWrite, DiskTier
from kvsnap.transfer import NUM_WORKERS, PIECE_BYTES

PAGE_BYTES = 4096


def fill(cache_dir: Path, ns: Namespace, num_chunks: int, *, seed: int = 1, per_shard: int | None = None) -> int:
    """Write prompts, one per shard of about 128 MiB, as an engine does; returns the bytes of the shards.

    But for the first page of each chunk the bytes are the same in all of them, so that the disk is the limit.
    """
    rng = random.Random(seed)
    geometry = ns.geometry
    root = root_key(ns.identity.hash(), ns.chunk_tokens)
    chunk_bytes = geometry.chunk_bytes(ns.chunk_tokens)
    per_shard = per_shard or max(1, TARGET_BYTES // chunk_bytes)
    body = aligned_buffer(chunk_bytes - PAGE_BYTES)
    body[:] = rng.randbytes(len(body))
    before = directory_bytes(cache_dir)
    with DiskTier(cache_dir, ns, cap_bytes=1 << 40) as disk:
        for start in range(0, num_chunks, per_shard):
            chunks: list[ChunkToWrite] = []
            for depth in range(min(per_shard, num_chunks - start)):
                head = aligned_buffer(PAGE_BYTES)
                head[:] = rng.randbytes(PAGE_BYTES)
                chunks.append(
                    ChunkToWrite(
                        key=ChunkKey(rng.randbytes(32)),
                        parent=chunks[-1].key if chunks else root,
                        depth=depth,
                        tokens=ns.chunk_tokens,
                        block_keys=rng.randbytes(BLOCK_KEY_BYTES * geometry.blocks_per_chunk),
                        xxh3=checksum([head, body]),
                        views=[head, body],
                    )
                )
            if disk.write("", chunks) is None:
                raise RuntimeError(f"no room for the benchmark's data in {cache_dir}")
    return directory_bytes(cache_dir) - before


def shard_files(folder: Path) -> list[Path]:
    """All shards below `folder`."""
    return sorted(folder.rglob("*.safetensors"))


def directory_bytes(folder: Path) -> int:
    """Bytes of all shards below `folder`."""
    return sum(path.stat().st_size for path in shard_files(folder)) if folder.exists() else 0


def forget(files: Iterable[Path]) -> None:
    """Have the next reads come from the disk."""
    os.sync()
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def recall(files: Iterable[Path]) -> None:
    """Have the next reads come from the page cache."""
    for path in files:
        with path.open("rb") as file:
            while file.read(PIECE_BYTES):
                pass


def seconds(act: Callable[[], object]) -> float:
    """How long it takes."""
    os.sync()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def in_parallel(act: Callable[[Path], object], files: Sequence[Path], threads: int = NUM_WORKERS) -> None:
    """`act` on each of the files."""
    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(act, files))


def copy_buffered(source: Path, folder: Path) -> None:
    """As `cp` does, no reflink; then fsync."""
    target = folder / source.name
    shutil.copyfile(source, target)
    fd = os.open(target, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def copy_direct(source: Path, folder: Path) -> None:
    """Past the page cache; then fsync."""
    buffer = aligned_buffer(PIECE_BYTES)
    reading = os.open(source, os.O_RDONLY | O_DIRECT)
    writing = os.open(folder / source.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_DIRECT, 0o644)
    offset = 0
    while found := os.preadv(reading, [buffer], offset):
        offset = write_all(writing, [buffer[:found]], offset)
    os.fsync(writing)
    os.close(writing)
    os.close(reading)


def sha256_of(source: Path) -> None:
    """Read and hash, through the page cache."""
    digest = hashlib.sha256()
    buffer = aligned_buffer(PIECE_BYTES)
    with source.open("rb", buffering=0) as file:
        while found := file.readinto(buffer):
            digest.update(buffer[:found])


def write_like(source: Path, folder: Path) -> None:
    """A file of the same length from memory, past the page cache, which is faster than through it; then fsync."""
    buffer = aligned_buffer(PIECE_BYTES)
    buffer[:PAGE_BYTES] = os.urandom(PAGE_BYTES)
    fd = os.open(folder / source.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_DIRECT, 0o644)
    offset, nbytes = 0, source.stat().st_size
    while offset < nbytes:
        offset = write_all(fd, [buffer[: nbytes - offset]], offset)
    os.fsync(fd)
    os.close(fd)
