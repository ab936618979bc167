"""What a start costs without an engine: attaching a full DRAM tier, and preloading from disk.

Each start is a process of its own: the scheduler half's constructor, a fake worker that maps the tier, the handshake.
Chunks are those of SmolLM2 (5.9 MB), the bytes random but for what makes the disk the limit.

    python -m benchmarks.restart_tiers attach|preload      # one of the rows of benchmarks.restart
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.namespaces import smollm2
from benchmarks.report import emit, note
from benchmarks.snapshot_data import fill, forget, shard_files
from kvsnap.cache import CacheOptions
from kvsnap.config import Config
from kvsnap.direct_io import O_DIRECT, aligned_buffer
from kvsnap.preload import Preload
from kvsnap.tiers.dram import DramRegion
from kvsnap_connector.scheduler import SchedulerHalf
from tools.build_model import cache_folder
from tools.serving import SHM

GIB = 1 << 30
TIER_BYTES = 4 * GIB
PRELOAD_BYTES = 2 * GIB
ROUNDS = 5
READERS = CacheOptions().num_readers
PIECE_BYTES = 4 << 20


def start_once(cache_dir: Path, dram_dir: Path, dram: int, what: str) -> None:
    """One start, in this process; prints its seconds and what it found.

    `what`: `start` (the constructor and the handshake), `preload` (only the preload that follows), `fill` (preload,
    then die as by `kill -9`, so that the DRAM file stays).
    """
    config = Config(
        cache_dir=cache_dir,
        dram=str(dram),
        dram_dir=dram_dir,
        disk="64GiB",
        preload="blocking" if what == "start" else "off",
    )
    began = time.perf_counter()
    half = SchedulerHalf(namespace=smollm2(), config=config, engine_id="benchmark", world_size=1)
    assert half.tier is not None
    region = DramRegion.attach(half.tier.path, half.tier.nonce, rank=0, slice_index=0)
    half.start({0: None})
    seconds = time.perf_counter() - began
    chunks = half.cache.status()["dram"]["chunks"]
    nbytes = 0
    if what != "start":
        began = time.perf_counter()
        begun = Preload(half.cache, dram)
        begun.wait(300.0)
        chunks, nbytes = begun.loaded()
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "chunks": chunks, "bytes": nbytes}), flush=True)
    if what == "fill":
        os._exit(0)
    region.close()
    half.shutdown()


def in_a_process(cache_dir: Path, dram_dir: Path, dram: int, what: str) -> dict[str, float]:
    """`start_once` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.restart_tiers", str(cache_dir), str(dram_dir), str(dram), what]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_attach(folder: Path, shm: Path) -> None:
    """Emits `attach_4gib_extra_s`; with nothing to attach, the tier is a small one, which costs nothing to make."""
    ns = smollm2()
    chunks = TIER_BYTES // ns.geometry.chunk_bytes(ns.chunk_tokens)
    note(f"writing {chunks} chunks, and filling a DRAM tier of 4 GiB with them")
    fill(folder / "full", ns, chunks)
    in_a_process(folder / "full", shm, TIER_BYTES, "fill")
    for shard in shard_files(folder / "full"):
        shard.unlink()  # what the disk tier costs is another row
    with_tier, without = [], []
    for number in range(ROUNDS):
        with_tier.append(in_a_process(folder / "full", shm, TIER_BYTES, "start"))
        (shm / f"none-{number}").mkdir()
        without.append(in_a_process(folder / f"none-{number}", shm / f"none-{number}", 64 << 20, "start"))
        note(f"  {with_tier[-1]['seconds']:.3f} s to attach, {without[-1]['seconds']:.3f} s with nothing there")
    found = min(run["chunks"] for run in with_tier)
    if found < 0.98 * chunks:
        raise RuntimeError(f"found {found:.0f} chunks in DRAM, expected about {chunks}")
    extra = statistics.median(run["seconds"] for run in with_tier)
    extra -= statistics.median(run["seconds"] for run in without)
    emit("attach_4gib_extra_s", extra, at_most=0.5)


def measure_preload(folder: Path, shm: Path) -> None:
    """Emits `preload_over_raw`: both sides read the same files, past the page cache, and take turns."""
    ns = smollm2()
    cache_dir = folder / "preload"
    note("writing 2 GiB of chunks")
    fill(cache_dir, ns, PRELOAD_BYTES // ns.geometry.chunk_bytes(ns.chunk_tokens))
    files = shard_files(cache_dir)
    tier, raw = [], []
    for number in range(ROUNDS):
        for is_raw in (number % 2 == 0, number % 2 != 0):
            forget(files)
            if is_raw:
                seconds, nbytes = read_raw(files)
                raw.append(nbytes / seconds)
            else:
                (shm / f"preload-{number}").mkdir()
                found = in_a_process(cache_dir, shm / f"preload-{number}", PRELOAD_BYTES + GIB // 4, "preload")
                tier.append(found["bytes"] / found["seconds"])
                for file in (shm / f"preload-{number}").iterdir():
                    file.unlink()
        note(f"  preload {tier[-1] / 1e6:.0f} MB/s, raw {raw[-1] / 1e6:.0f} MB/s")
    emit("preload_over_raw", statistics.median(tier) / statistics.median(raw), at_least=0.85)


def read_raw(files: list[Path]) -> tuple[float, int]:
    """Seconds and bytes of an O_DIRECT read of whole files into memory that was touched before, as many in flight."""
    pieces = [(file, offset) for file in files for offset in range(0, file.stat().st_size, PIECE_BYTES)]
    buffers = [aligned_buffer(PIECE_BYTES) for _ in range(READERS)]
    for buffer in buffers:
        buffer[:] = bytes(PIECE_BYTES)
    fds = {file: os.open(file, os.O_RDONLY | O_DIRECT) for file in files}

    def read(number: int) -> int:
        done = 0
        for file, offset in pieces[number::READERS]:
            done += os.preadv(fds[file], [buffers[number]], offset)
        return done

    with ThreadPoolExecutor(READERS) as pool:
        began = time.perf_counter()
        nbytes = sum(pool.map(read, range(READERS)))
        seconds = time.perf_counter() - began
    for fd in fds.values():
        os.close(fd)
    return seconds, nbytes


def main() -> None:
    if len(sys.argv) == 5:
        start_once(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
        return
    wanted = sys.argv[1:] or ["attach", "preload"]
    cache_folder().mkdir(parents=True, exist_ok=True)
    for name, measure in (("attach", measure_attach), ("preload", measure_preload)):
        if name in wanted:
            with (
                tempfile.TemporaryDirectory(prefix="restart-", dir=cache_folder()) as folder,
                tempfile.TemporaryDirectory(prefix="kvsnap-bench-", dir=SHM) as shm,
            ):
                measure(Path(folder), Path(shm))


if __name__ == "__main__":
    main()
