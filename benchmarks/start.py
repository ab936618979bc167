"""What 100,000 chunks on disk cost a start: block 16, 2,000 shards, no index cache, minus an empty directory.

Each start is a process of its own: the scheduler half's constructor, a fake worker that maps the tier, the handshake.
`preload` is off: what it reads has bounds of its own.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.index import anonymous_bytes
from benchmarks.namespaces import small_pages
from benchmarks.report import emit, note
from kvsnap.config import Config
from kvsnap.direct_io import aligned_buffer
from kvsnap.keys import BLOCK_KEY_BYTES, ChunkKey
from kvsnap.shard import checksum
from kvsnap.tiers.disk import ChunkToWrite, DiskTier
from kvsnap.tiers.dram import DramRegion
from kvsnap_connector.scheduler import SchedulerHalf
from tools.build_model import cache_folder

CHUNKS = 100_000
SHARDS = 2_000
CHAIN = 50
"""Chunks of one prompt."""
ROUNDS = 5


def fill(cache_dir: Path) -> None:
    """Write the shards."""
    namespace = small_pages()
    rng = random.Random(7)
    disk = DiskTier(cache_dir, namespace, cap_bytes=16 << 30)
    page = aligned_buffer(namespace.geometry.chunk_bytes(namespace.chunk_tokens))
    page[:] = rng.randbytes(len(page))
    xxh3 = checksum([page])
    for _ in range(SHARDS):
        chunks: list[ChunkToWrite] = []
        parent = ChunkKey(rng.randbytes(32))
        for depth in range(CHUNKS // SHARDS):
            key = ChunkKey(rng.randbytes(32))
            if depth % CHAIN == 0:
                parent = ChunkKey(rng.randbytes(32))
            chunks.append(
                ChunkToWrite(
                    key=key,
                    parent=parent,
                    depth=depth % CHAIN,
                    tokens=namespace.chunk_tokens,
                    block_keys=rng.randbytes(BLOCK_KEY_BYTES * namespace.geometry.blocks_per_chunk),
                    xxh3=xxh3,
                    views=[page],
                )
            )
            parent = key
        disk.write("", chunks)
    disk.close()


def start_once(cache_dir: Path, dram_dir: Path) -> None:
    """One start, in this process; prints its seconds, chunks found and bytes of memory."""
    before = anonymous_bytes()
    config = Config(cache_dir=cache_dir, dram="64MiB", dram_dir=dram_dir, disk="16GiB", preload="off")
    began = time.perf_counter()
    half = SchedulerHalf(namespace=small_pages(), config=config, engine_id="benchmark", world_size=1)
    assert half.tier is not None
    region = DramRegion.attach(half.tier.path, half.tier.nonce, rank=0, slice_index=0)
    half.start({0: None})
    seconds = time.perf_counter() - began
    chunks = half.cache.status()["disk"]["chunks"]
    print(json.dumps({"seconds": seconds, "chunks": chunks, "bytes": anonymous_bytes() - before}))
    region.close()
    half.shutdown()


def run_once(cache_dir: Path, dram_dir: Path) -> dict[str, float]:
    """One start, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.start", str(cache_dir), str(dram_dir)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    if len(sys.argv) == 3:
        start_once(Path(sys.argv[1]), Path(sys.argv[2]))
        return
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="start-", dir=cache_folder()) as folder,
        tempfile.TemporaryDirectory(prefix="kvsnap-bench-", dir="/dev/shm") as shm,
    ):
        full, dram_dir = Path(folder) / "full", Path(shm)
        note(f"writing {CHUNKS} chunks in {SHARDS} shards")
        fill(full)
        with_chunks, empty = [], []
        for number in range(ROUNDS):
            with_chunks.append(run_once(full, dram_dir))
            empty.append(run_once(Path(folder) / f"empty-{number}", dram_dir))
            note(f"  {with_chunks[-1]['seconds']:.2f} s with chunks, {empty[-1]['seconds']:.2f} s without")
    if any(run["chunks"] != CHUNKS for run in with_chunks):
        raise RuntimeError(f"found {with_chunks[0]['chunks']:.0f} chunks, expected {CHUNKS}")
    seconds = statistics.median(run["seconds"] for run in with_chunks)
    seconds -= statistics.median(run["seconds"] for run in empty)
    memory = statistics.median(run["bytes"] for run in with_chunks) - statistics.median(run["bytes"] for run in empty)
    emit("start_100k_extra_s", seconds, at_most=2.0)
    emit("bytes_per_chunk", memory / CHUNKS, at_most=1024)


if __name__ == "__main__":
    main()
