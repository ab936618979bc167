"""The CUDA copier against a plain pinned copy of the same bytes, and what it takes from the compute stream.

Needs torch and a CUDA device, no vLLM; under three minutes: `python benchmarks/gpu_copy.py`. Rows are medians
over rounds; baseline and copier take turns, so that both meet the same machine.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a machine with a GPU may have nothing installed
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "connector"))

from benchmarks.report import emit, note, table
from kvsnap_connector.cuda_worker import CudaWorkerHalf
from kvsnap_connector.metadata import StepPlan
from tests.gpu.paged import LLAMA_8B, ORDERS, SHAPES, HostTier, PagedCache, chunk_ops, rank

COUNTS = (1, 4, 16, 64)
"""Chunks in one step; of 32 MiB for Llama-3.1-8B."""
ROUNDS = 7
TARGET_RATIO = 0.9
TARGET_SHARE = 0.1


def main() -> int:
    """Measure and print; 1 without a device."""
    if not torch.cuda.is_available():
        note("no CUDA device: nothing measured")
        return 1
    note(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    rows: list[list[object]] = []
    worst = {"load": 9.9, "store": 9.9, "share": 0.0}
    for shape in SHAPES:
        for order in ORDERS if shape is LLAMA_8B else ("LBNHC", "BLNHC"):
            most = max(COUNTS)
            cache = PagedCache(shape, order, num_blocks=most * shape.blocks_per_chunk + 1)
            cache.fill(1)
            with rank(cache, num_slots=most, num_pieces=most) as (half, tier):
                play = Play(cache, half, tier)
                for count in COUNTS:
                    row = play.measure(count)
                    rows.append([shape.name, order, count, *row.cells()])
                    if shape is LLAMA_8B:
                        worst["load"] = min(worst["load"], row.load_ratio)
                        worst["store"] = min(worst["store"], row.store_ratio)
                        worst["share"] = max(worst["share"], row.share)
            del cache
            torch.cuda.empty_cache()
    table(
        [
            "shape",
            "order",
            "chunks",
            "in GB/s",
            "load GB/s",
            "ratio",
            "out GB/s",
            "store GB/s",
            "ratio",
            "compute share",
        ],
        rows,
    )
    emit("gpu_load_over_memcpy", worst["load"], at_least=TARGET_RATIO)
    emit("gpu_store_over_memcpy", worst["store"], at_least=TARGET_RATIO)
    emit("gpu_compute_share", worst["share"], at_most=TARGET_SHARE)
    return 0


class Row:
    """Medians of one shape, order and count."""

    def __init__(self, nbytes: int, seconds: dict[str, list[float]]) -> None:
        middle = {name: statistics.median(values) for name, values in seconds.items()}
        self.speeds = {name: nbytes / value / 1e9 for name, value in middle.items() if name != "compute"}
        self.load_ratio = middle["in"] / middle["load"]
        self.store_ratio = middle["out"] / middle["store"]
        self.share = middle["compute"] / middle["out"]

    def cells(self) -> list[str]:
        """For the table."""
        speeds = {name: f"{value:.1f}" for name, value in self.speeds.items()}
        return [
            speeds["in"],
            speeds["load"],
            f"{self.load_ratio:.2f}",
            speeds["out"],
            speeds["store"],
            f"{self.store_ratio:.2f}",
            f"{self.share:.3f}",
        ]


class Play:
    """Takes turns between a plain copy and the real worker half."""

    def __init__(self, cache: PagedCache, half: CudaWorkerHalf, tier: HostTier) -> None:
        self.cache, self.half, self.tier = cache, half, tier
        self.chunk_bytes = cache.shape.blocks_per_chunk * cache.shape.block_bytes
        self.device = torch.empty(self.chunk_bytes, dtype=torch.uint8, device="cuda")
        self.host = torch.empty(self.chunk_bytes, dtype=torch.uint8, pin_memory=True)
        self.stream = torch.cuda.Stream()
        self.rng = random.Random(1)
        self.seq = 0

    def measure(self, count: int) -> Row:
        """Medians of `ROUNDS`, after one round that allocates what first use allocates."""
        seconds: dict[str, list[float]] = {"in": [], "load": [], "out": [], "store": [], "compute": []}
        for turn in range(ROUNDS + 1):
            found = {
                "in": self.plain(count, self.device, self.host),
                "load": self.load(count),
                "out": self.plain(count, self.host, self.device),
            }
            found["store"], found["compute"] = self.store(count)
            if turn:
                for name, value in found.items():
                    seconds[name].append(value)
        return Row(count * self.chunk_bytes, seconds)

    def plain(self, count: int, target: torch.Tensor, source: torch.Tensor) -> float:
        """Seconds for the same bytes, one pinned copy a chunk."""
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                target.copy_(source, non_blocking=True)
        self.stream.synchronize()
        return time.perf_counter() - started

    def load(self, count: int) -> float:
        """Seconds until all chunks, one request's asynchronous loads, are reported."""
        self.seq += 1
        ops = chunk_ops(self.cache, count, self.rng)
        torch.cuda.synchronize()
        started = time.perf_counter()
        self.half.load(StepPlan(seq=self.seq, acked=self.seq, async_loads={"r": ops}))
        while not self.half.take_received():
            pass
        return time.perf_counter() - started

    def store(self, count: int) -> tuple[float, float]:
        """One step's stores: (seconds from the end of the step to the last word, seconds of the compute stream).

        A kernel that sleeps plays the forward pass, so that all is queued before it ends.
        """
        self.seq += 1
        self.tier.completed.clear()
        ops = chunk_ops(self.cache, count, self.rng)
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000 + 1_000_000 * count)
        before.record()
        self.half.store(StepPlan(seq=self.seq, acked=self.seq, stores=ops))
        after.record()
        before.synchronize()
        started = time.perf_counter()
        while len(self.tier.completed) < count:
            self.half.poll()
        ended = time.perf_counter()
        if not all(ok for _, _, ok in self.tier.completed):
            raise RuntimeError(f"stores failed: {self.tier.completed}")
        after.synchronize()
        return ended - started, before.elapsed_time(after) / 1e3


if __name__ == "__main__":
    sys.exit(main())
