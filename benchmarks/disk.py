"""The disk tier against the bare disk: chunks of SmolLM2 (5.9 MB), shards of 20.

The raw side does the same with nothing around it: O_DIRECT, pieces of the same size, as many in flight, files of the
same length preallocated alike, fsync. The two take turns, and the medians of the rounds are compared.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from benchmarks.namespaces import smollm2
from benchmarks.report import emit, note
from kvsnap.cache import CacheOptions
from kvsnap.direct_io import O_DIRECT, aligned_buffer
from kvsnap.keys import BLOCK_KEY_BYTES, ChunkKey
from kvsnap.shard import checksum
from kvsnap.tiers.disk import ChunkToWrite, DiskTier, Shard
from tools.build_model import cache_folder

CHUNKS_PER_SHARD = 20
SHARDS = 6
READ_ROUNDS = 5
READERS = CacheOptions().num_readers


def make_chunks(tier: DiskTier, seed: int) -> list[ChunkToWrite]:
    """A chain of full chunks of random bytes."""
    rng = random.Random(seed)
    geometry = tier.ns.geometry
    parent = ChunkKey(rng.randbytes(32))
    chunks = []
    for depth in range(CHUNKS_PER_SHARD):
        view = aligned_buffer(geometry.chunk_bytes(tier.ns.chunk_tokens))
        view[:] = os.urandom(len(view))
        key = ChunkKey(rng.randbytes(32))
        chunks.append(
            ChunkToWrite(
                key=key,
                parent=parent,
                depth=depth,
                tokens=tier.ns.chunk_tokens,
                block_keys=rng.randbytes(BLOCK_KEY_BYTES * geometry.blocks_per_chunk),
                xxh3=checksum([view]),
                views=[view],
            )
        )
        parent = key
    return chunks


def write_raw(path: Path, pieces: Sequence[memoryview]) -> None:
    """One file, one piece at a time as the disk tier's writer does, then fsync."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | O_DIRECT, 0o600)
    try:
        os.posix_fallocate(fd, 0, sum(len(piece) for piece in pieces))
        offset = 0
        for piece in pieces:
            done = 0
            while done < len(piece):
                done += os.pwritev(fd, [piece[done:]], offset + done)
            offset += done
        os.fsync(fd)
    finally:
        os.close(fd)


def read_raw(fd: int, view: memoryview, offset: int) -> None:
    """One piece of an open file."""
    done = 0
    while done < len(view):
        done += os.preadv(fd, [view[done:]], offset + done)


def in_parallel(jobs: Sequence[Callable[[], object]]) -> float:
    """Seconds that the jobs take on as many threads as the disk tier reads with."""
    with ThreadPoolExecutor(READERS) as pool:
        began = time.perf_counter()
        for done in [pool.submit(job) for job in jobs]:
            done.result()
        return time.perf_counter() - began


def measure_writes(tier: DiskTier, folder: Path) -> tuple[list[Shard], list[Path]]:
    """Shards and raw files in turn; emits the ratio of their speeds."""
    shards, files, tier_s, raw_s = [], [], [], []
    for number in range(SHARDS):
        chunks = make_chunks(tier, number)
        for is_raw in (number % 2 == 0, number % 2 != 0):
            began = time.perf_counter()
            if is_raw:
                files.append(folder / f"raw-{number}")
                write_raw(files[-1], [chunk.views[0] for chunk in chunks])
                raw_s.append(time.perf_counter() - began)
            else:
                shard = tier.write("", chunks)
                tier_s.append(time.perf_counter() - began)
                assert shard is not None
                shards.append(shard)
    megabytes = CHUNKS_PER_SHARD * tier.ns.geometry.chunk_bytes(tier.ns.chunk_tokens) / 1e6
    tier_mbs, raw_mbs = (megabytes / statistics.median(times) for times in (tier_s, raw_s))
    note(f"  write: tier {tier_mbs:.0f} MB/s, raw {raw_mbs:.0f} MB/s")
    emit("disk_write_over_raw", tier_mbs / raw_mbs, at_least=0.8)
    return shards, files


def measure_reads(tier: DiskTier, shards: Sequence[Shard], files: Sequence[Path]) -> None:
    """All chunks of all shards, and all pieces of the raw files, in turn; emits the ratio of their speeds."""
    size = tier.ns.geometry.chunk_bytes(tier.ns.chunk_tokens)
    buffers = [aligned_buffer(size) for _ in range(SHARDS * CHUNKS_PER_SHARD)]
    for buffer in buffers:
        buffer[:] = bytes(size)  # touched before: page faults are not what is measured
    fds = [os.open(path, os.O_RDONLY | O_DIRECT) for path in files]

    def check(shard: Shard, at: int, buffer: memoryview) -> None:
        if not tier.read_chunk(shard.id, shard.entries[at], [buffer]):
            raise RuntimeError(f"shard {shard.id} is damaged")

    places = [(s, c) for s in range(SHARDS) for c in range(CHUNKS_PER_SHARD)]
    jobs: dict[bool, list[Callable[[], object]]] = {
        False: [partial(check, shards[s], c, buffer) for (s, c), buffer in zip(places, buffers, strict=True)],
        True: [partial(read_raw, fds[s], buffer, c * size) for (s, c), buffer in zip(places, buffers, strict=True)],
    }
    tier_s: list[float] = []
    raw_s: list[float] = []
    for number in range(READ_ROUNDS):
        for is_raw in (number % 2 == 0, number % 2 != 0):
            (raw_s if is_raw else tier_s).append(in_parallel(jobs[is_raw]))
    for fd in fds:
        os.close(fd)
    megabytes = len(places) * size / 1e6
    tier_mbs, raw_mbs = (megabytes / statistics.median(times) for times in (tier_s, raw_s))
    note(f"  read, {READERS} in flight: tier with checksum {tier_mbs:.0f} MB/s, raw {raw_mbs:.0f} MB/s")
    emit("disk_read_over_raw", tier_mbs / raw_mbs, at_least=0.9)


def main() -> None:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="disk-", dir=cache_folder()) as temp:
        folder = Path(temp)
        tier = DiskTier(folder / "cache", smollm2(), cap_bytes=16 << 30)
        shards, files = measure_writes(tier, folder)
        measure_reads(tier, shards, files)
        tier.close()


if __name__ == "__main__":
    main()
