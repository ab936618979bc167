"""Time to first token on a real server: SmolLM2-135M, prompts of 2,200 tokens of real text.

Pairs of requests take turns in one server, and the median of the pairs' ratios counts, so that a noisy neighbour hits
both sides alike. vLLM's own prefix cache is emptied between them; vLLM's metrics tell which tier a hit came from.

    python -m benchmarks.ttft [--pairs 20] [--hits 15]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import emit, note
from tools.build_model import SMOLLM2, cache_folder, ensure
from tools.client import Client
from tools.prompts import Prompts
from tools.serving import SHM, Server, kvsnap_json

TOKENS = 2_200
HIT_TOKENS = 2_176  # whole blocks of 128 without the last token
MAX_TOKENS = 2
SETTLE_S = 10
"""The DRAM tier's pages are faulted in behind a new server, by threads that the forward pass starves on two cores."""
NOT_STORED = {"kvsnap": {"store": False}}


class Bench:
    """One server and what is done with it."""

    def __init__(self, server: Server, cache_dir: Path, prompts: Prompts) -> None:
        self._server = server
        self._client: Client = server.client()
        self._cache_dir = cache_dir
        self._prompts = prompts
        self._used = 0

    def fresh(self) -> list[int]:
        """A prompt that the server has never seen."""
        self._used += 1
        return self._prompts.unique(self._used, TOKENS)

    def ttft(self, prompt: Sequence[int], *, store: bool = True) -> float:
        """Seconds to the first token."""
        params = None if store else NOT_STORED
        return self._client.complete(prompt, max_tokens=MAX_TOKENS, kv_transfer_params=params).ttft_s

    def hit(self, prompt: Sequence[int], source: str) -> float:
        """Seconds to the first token of a hit that must come from `device`, `host` or `disk`."""
        if source != "device" and not self._client.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache")
        before = self._client.metrics().prompt_tokens()
        seconds = self.ttft(prompt)
        found = self._client.metrics().prompt_tokens()[source] - before.get(source, 0)
        if found != HIT_TOKENS:
            raise RuntimeError(f"expected {HIT_TOKENS} tokens from {source}, found {found}")
        return seconds

    def clear_dram(self) -> None:
        """All on disk and nothing in DRAM, nor in the page cache."""
        for command in (["flush"], ["clear", "--tier", "dram"]):
            kvsnap_json(*command, "--cache-dir", self._cache_dir, runtime_dir=self._server.runtime_dir)
        for shard in self._cache_dir.glob("*/shards/*"):
            fd = os.open(shard, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(bench: Bench, pairs: int, hits: int) -> None:
    """All rows of this page."""
    for _ in range(2):
        bench.ttft(bench.fresh(), store=False)  # the first passes of a process are slow
    ratios, plain, stored_prompts = [], [], []
    for number in range(pairs):
        seconds = {}
        for store in (number % 2 == 0, number % 2 != 0):
            prompt = bench.fresh()
            seconds[store] = bench.ttft(prompt, store=store)
            if store:
                stored_prompts.append(prompt)
        plain.append(seconds[False])
        ratios.append(seconds[True] / seconds[False])
        note(f"  first requests: {seconds[True]:.3f} s stored, {seconds[False]:.3f} s not stored")
    emit("store_overhead", statistics.median(ratios), at_most=1.05)

    for source, name, limit in (("host", "dram_over_native", 1.25), ("disk", "disk_over_native", 1.6)):
        over, times, floors = [], [], []
        for number in range(hits):
            prompt = stored_prompts[number % len(stored_prompts)]
            if source == "disk":
                bench.clear_dram()
            times.append(bench.hit(prompt, source))
            floors.append(bench.hit(prompt, "device"))
            over.append(times[-1] / floors[-1])
            note(f"  {source}: {times[-1]:.3f} s, vLLM's own {floors[-1]:.3f} s")
        emit(name, statistics.median(over), at_most=limit)
        if source == "host":
            emit("prefill_over_dram", statistics.median(plain) / statistics.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the time to the first token.")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--hits", type=int, default=15)
    arguments = parser.parse_args()
    model = ensure(SMOLLM2)
    with (
        tempfile.TemporaryDirectory(prefix="ttft-", dir=cache_folder()) as temp,
        tempfile.TemporaryDirectory(prefix="kvsnap-bench-", dir=SHM) as shm,
    ):
        folder = Path(temp)
        cache_dir = folder / "cache"
        options = {"cache_dir": str(cache_dir), "dram": "4GiB", "dram_dir": shm, "disk": "16GiB", "lookup_seconds": 10}
        with Server(model, folder, connector=options) as server:
            note(f"server ready after {server.start_s:.0f} s")
            time.sleep(SETTLE_S)
            measure(Bench(server, cache_dir, Prompts(model)), arguments.pairs, arguments.hits)


if __name__ == "__main__":
    main()
