"""The oracle with two ranks: each holds its own heads, a chunk is there for both or for none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.offline import OfflineEngine
from tools.prompts import random_prompt
from tools.serving import kvsnap_json

pytestmark = pytest.mark.engine

BLOCK = 128
CHUNK = 256


@pytest.fixture(scope="module")
def cache_dir(folder: Path) -> Path:
    """The engine's disk tier."""
    return folder / "cache"


@pytest.fixture(scope="module")
def engine(tiny_model: Path, folder: Path, cache_dir: Path, shm_folder: Path) -> Iterator[OfflineEngine]:
    """TP=2 on the CPU backend, which otherwise wants two NUMA nodes for it."""
    options = {
        "cache_dir": str(cache_dir),
        "dram": "256MiB",
        "dram_dir": str(shm_folder),
        "disk": "1GiB",
        "load_policy": "always",
        "lookup_seconds": 30,
    }
    with OfflineEngine(
        tiny_model,
        folder,
        connector=options,
        engine={"tensor_parallel_size": 2},
        env={"VLLM_CPU_SIM_MULTI_NUMA": "1", "KVSNAP_STRICT": "1"},
    ) as engine:
        yield engine


@pytest.mark.parametrize("tokens", [BLOCK + 1, 2 * CHUNK, 4 * CHUNK + BLOCK])
def test_dram_and_disk_hits_equal_vllms_own(engine: OfflineEngine, cache_dir: Path, tokens: int) -> None:
    """The oracle of test_oracle.py; pages are compared on both ranks."""
    prompt = random_prompt(500 + tokens, tokens)
    usable = (tokens - 1) // BLOCK * BLOCK
    engine.generate([prompt], keep=["cold"])
    (native,) = engine.generate([prompt])
    engine.reset_prefix_cache()
    (dram,) = engine.generate([prompt], keep=["dram"])
    kvsnap_json("flush", "--cache-dir", cache_dir, runtime_dir=engine.runtime_dir)
    kvsnap_json("clear", "--cache-dir", cache_dir, "--tier", "dram", runtime_dir=engine.runtime_dir)
    engine.reset_prefix_cache()
    (disk,) = engine.generate([prompt], keep=["disk"])

    assert native.cached == dram.cached == disk.cached == usable
    assert native.logprobs == dram.logprobs == disk.logprobs
    assert native.tokens == dram.tokens == disk.tokens
    assert engine.compare_pages("dram", "cold", blocks=usable // BLOCK).equal
    assert engine.compare_pages("disk", "cold", blocks=usable // BLOCK).equal
