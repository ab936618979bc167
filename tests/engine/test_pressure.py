"""A small pool of blocks, chunked prefill, no prefix cache of vLLM's own: all that is reused comes from kvsnap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.offline import OfflineEngine
from tools.prompts import random_prompt

pytestmark = pytest.mark.engine

BLOCK = 128
CHUNK = 256
POOL_BLOCKS = 18
PROMPTS = [random_prompt(200 + i, 3 * CHUNK + BLOCK + 17 * i) for i in range(6)]
CLOSE = 1e-3
"""Recomputed KV differs from stored KV in its low bits (other batches), that of another prompt by its whole size."""


@pytest.fixture(scope="module")
def engine(tiny_model: Path, folder: Path, shm_folder: Path) -> Iterator[OfflineEngine]:
    """Two of the six requests are admitted and grow to 19 blocks; there are 17."""
    options = {
        "cache_dir": str(folder / "cache"),
        "dram": "256MiB",
        "dram_dir": str(shm_folder),
        "disk": "1GiB",
        "load_policy": "always",
    }
    settings = {
        "num_gpu_blocks_override": POOL_BLOCKS,
        "max_num_batched_tokens": 320,  # not a multiple of blocks: chunked prefill stops inside them
        "max_num_seqs": 6,
        "max_model_len": 2048,
        "enable_prefix_caching": False,
    }
    with OfflineEngine(tiny_model, folder, connector=options, engine=settings, env={"KVSNAP_STRICT": "1"}) as engine:
        yield engine


def test_preempted_requests_store_and_load_their_own_kv(engine: OfflineEngine) -> None:
    """A21: blocks of preempted requests go to others; what kvsnap stored under a prompt's keys is that prompt's KV."""
    outputs = engine.generate(PROMPTS, max_tokens=2 * BLOCK)

    assert engine.metric("vllm:num_preemptions") > 0
    for number, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        # the answer's blocks too: they were computed, preempted, loaded and continued
        whole = prompt + list(output.tokens[0][: 2 * BLOCK - 1])
        blocks = (len(whole) - 1) // BLOCK
        (loaded,) = engine.generate([whole], keep=["loaded"])
        (computed,) = engine.generate([whole], keep=["computed"], salts=[f"computed anew {number}"], store=False)
        difference = engine.compare_pages("loaded", "computed", blocks=blocks)

        assert loaded.cached >= len(prompt) // CHUNK * CHUNK
        assert computed.cached == 0
        assert difference.largest < CLOSE * difference.scale


def test_hits_without_vllms_prefix_cache(engine: OfflineEngine) -> None:
    """B01 once more: with vLLM's prefix cache off every hit is kvsnap's, at all lengths around block and chunk."""
    for tokens in (BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK):
        prompt = random_prompt(300 + tokens, tokens)
        (cold,) = engine.generate([prompt])
        (first,) = engine.generate([prompt])
        (second,) = engine.generate([prompt])

        usable = (tokens - 1) // BLOCK * BLOCK
        assert (cold.cached, first.cached, second.cached) == (0, usable, usable)
        assert (first.tokens, first.logprobs) == (second.tokens, second.logprobs)


def test_concurrent_requests_of_one_prefix(engine: OfflineEngine) -> None:
    """B10: more hits wait than the pool can hold at once; all finish, each with its own question's answer."""
    shared = random_prompt(400, 4 * CHUNK)
    prompts = [shared + random_prompt(401 + i, 30 + i) for i in range(6)]
    engine.generate([shared + random_prompt(450, 1)])
    alone = [engine.generate([prompt], store=False)[0] for prompt in prompts]

    together = engine.generate(prompts, store=False)

    assert [output.cached for output in together] == [4 * CHUNK] * 6
    assert [output.tokens[0][0] for output in together] == [output.tokens[0][0] for output in alone]
