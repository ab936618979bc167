"""The oracle: a hit by kvsnap equals a hit of the same length by vLLM's own prefix cache.

Equal means the same KV bytes in the engine's blocks, the same log probabilities of the first token, the same
greedy tokens. A full prefill is no yardstick for a hit: it splits the computation in another way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools.offline import OfflineEngine, Output
from tools.prompts import random_prompt
from tools.serving import kvsnap_json

pytestmark = pytest.mark.engine

BLOCK = 128  # the CPU backend's
CHUNK = 256
LENGTHS = [BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + BLOCK, 8000]


@pytest.fixture(scope="module")
def cache_dir(folder: Path) -> Path:
    """The engine's disk tier."""
    return folder / "cache"


@pytest.fixture(scope="module")
def engine(tiny_model: Path, folder: Path, cache_dir: Path, shm_folder: Path) -> Iterator[OfflineEngine]:
    """One engine with both tiers for the whole module."""
    options = {
        "cache_dir": str(cache_dir),
        "dram": "512MiB",
        "dram_dir": str(shm_folder),
        "disk": "1GiB",
        "load_policy": "always",
        "lookup_seconds": 30,
    }
    with OfflineEngine(tiny_model, folder, connector=options, env={"KVSNAP_STRICT": "1"}) as engine:
        yield engine


def usable(tokens: int) -> int:
    """The longest hit of a prompt: whole blocks, and never the last token."""
    return (tokens - 1) // BLOCK * BLOCK


def one(engine: OfflineEngine, prompt: list[int], name: str = "", **options: Any) -> Output:
    """Run one prompt by itself."""
    (output,) = engine.generate([prompt], keep=[name] if name else [], **options)
    return output


def external(engine: OfflineEngine, source: str) -> float:
    """Prompt tokens that vLLM booked to one of kvsnap's tiers so far."""
    return engine.metric("vllm:prompt_tokens_cached_by_source", source=source)


def flush_and_clear_dram(engine: OfflineEngine, cache_dir: Path) -> None:
    """Everything on disk, nothing in DRAM."""
    kvsnap_json("flush", "--cache-dir", cache_dir, runtime_dir=engine.runtime_dir)
    kvsnap_json("clear", "--cache-dir", cache_dir, "--tier", "dram", runtime_dir=engine.runtime_dir)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_dram_and_disk_hits_equal_vllms_own(engine: OfflineEngine, cache_dir: Path, tokens: int) -> None:
    """B01, C03: no length kills the engine or is promised its last token; each hit is as long as vLLM's own."""
    prompt = random_prompt(tokens, tokens)
    blocks = usable(tokens) // BLOCK
    cold = one(engine, prompt, "cold")
    native = one(engine, prompt, "native")

    engine.reset_prefix_cache()
    dram_before = external(engine, "host")
    dram = one(engine, prompt, "dram")
    dram_tokens = external(engine, "host") - dram_before

    flush_and_clear_dram(engine, cache_dir)
    engine.reset_prefix_cache()
    disk_before = external(engine, "disk")
    disk = one(engine, prompt, "disk")
    disk_tokens = external(engine, "disk") - disk_before

    assert (cold.cached, native.cached) == (0, usable(tokens))
    assert (dram.cached, dram_tokens) == (usable(tokens), usable(tokens))
    assert (disk.cached, disk_tokens) == (usable(tokens), usable(tokens))
    assert (dram.logprobs, dram.tokens) == (native.logprobs, native.tokens)
    assert (disk.logprobs, disk.tokens) == (native.logprobs, native.tokens)
    if blocks:
        assert engine.compare_pages("dram", "cold", blocks=blocks).equal
        assert engine.compare_pages("disk", "cold", blocks=blocks).equal


def test_longer_prompt_hits_whole_blocks_of_a_stored_one(engine: OfflineEngine) -> None:
    """A19: what was stored ends inside a block; only its whole blocks are promised, the rest is computed."""
    stored = random_prompt(101, 5 * BLOCK + 5)
    longer = stored + random_prompt(102, 300)
    one(engine, stored)
    native = one(engine, longer, store=False)

    engine.reset_prefix_cache()
    loaded = one(engine, longer)

    assert native.cached == loaded.cached == 5 * BLOCK
    assert (loaded.logprobs, loaded.tokens) == (native.logprobs, native.tokens)


def test_blocks_the_engine_has_are_left_alone(engine: OfflineEngine) -> None:
    """A19: part of the prefix is in vLLM's own cache, its end inside a chunk; kvsnap loads only what follows."""
    prompt = random_prompt(103, 4 * CHUNK + 10)
    one(engine, prompt)
    native = one(engine, prompt, "native")
    engine.reset_prefix_cache()
    one(engine, prompt[: 3 * BLOCK + 1], store=False)  # three blocks, one and a half chunks, come back
    before = external(engine, "host")

    loaded = one(engine, prompt, "loaded")

    assert loaded.cached == native.cached == 4 * CHUNK
    assert external(engine, "host") - before == 4 * CHUNK - 3 * BLOCK
    assert (loaded.logprobs, loaded.tokens) == (native.logprobs, native.tokens)
    assert engine.compare_pages("loaded", "native", blocks=4 * CHUNK // BLOCK).equal


def test_hit_ends_inside_a_chunk_that_differs(engine: OfflineEngine) -> None:
    """Two prompts part in the middle of a chunk: the second hits up to the last block that both share."""
    first = random_prompt(104, 4 * CHUNK)
    second = first[: 2 * CHUNK + BLOCK + 40] + random_prompt(105, 400)
    one(engine, first)
    native = one(engine, second, store=False)

    engine.reset_prefix_cache()
    loaded = one(engine, second)

    assert native.cached == loaded.cached == 2 * CHUNK + BLOCK
    assert (loaded.logprobs, loaded.tokens) == (native.logprobs, native.tokens)


def test_generated_tokens_are_stored_too(engine: OfflineEngine) -> None:
    """The next turn of a conversation begins with the last answer."""
    prompt = random_prompt(106, 3 * BLOCK)
    answer = one(engine, prompt, max_tokens=BLOCK + 3).tokens[0]
    turn = prompt + list(answer) + random_prompt(107, 50)

    engine.reset_prefix_cache()

    assert one(engine, turn).cached == 4 * BLOCK


def test_only_the_same_salt_hits(engine: OfflineEngine, cache_dir: Path) -> None:
    """A10: a tenant's salt separates its chunks from all others'; salted chunks stay off the disk."""
    prompt = random_prompt(108, 2 * CHUNK + 1)
    one(engine, prompt, salts=["tenant x"])
    engine.reset_prefix_cache()

    other = one(engine, prompt, salts=["tenant y"], store=False)
    none = one(engine, prompt, store=False)
    engine.reset_prefix_cache()
    same = one(engine, prompt, salts=["tenant x"])

    assert (other.cached, none.cached, same.cached) == (0, 0, 2 * CHUNK)
    flush_and_clear_dram(engine, cache_dir)
    engine.reset_prefix_cache()
    assert one(engine, prompt, salts=["tenant x"]).cached == 0


def test_parallel_sampling(engine: OfflineEngine) -> None:
    """Several samples of one prompt share its loaded blocks; each is what vLLM's own cache would have given."""
    prompt = random_prompt(109, 3 * CHUNK + 5)
    sampling: dict[str, Any] = {"n": 3, "temperature": 0.9, "seed": 7}
    one(engine, prompt)
    native = one(engine, prompt, **sampling)

    engine.reset_prefix_cache()
    loaded = one(engine, prompt, **sampling)

    assert loaded.tokens == native.tokens
    assert len(set(loaded.tokens)) > 1


def test_prompt_logprobs_are_computed_in_full(engine: OfflineEngine) -> None:
    """A request that must not read from caches gets nothing from kvsnap either."""
    prompt = random_prompt(110, CHUNK + 1)
    one(engine, prompt)
    engine.reset_prefix_cache()

    assert one(engine, prompt, prompt_logprobs=1).cached == 0


def test_store_false_keeps_a_prompt_out(engine: OfflineEngine) -> None:
    """The request says so: nothing of it is there afterwards."""
    prompt = random_prompt(111, CHUNK + 1)
    one(engine, prompt, store=False)
    engine.reset_prefix_cache()

    assert one(engine, prompt, store=False).cached == 0


def test_dram_hit_is_promoted_once(engine: OfflineEngine, cache_dir: Path) -> None:
    """C14: from disk the first time, from DRAM ever after."""
    prompt = random_prompt(112, 2 * CHUNK + 1)
    one(engine, prompt)
    flush_and_clear_dram(engine, cache_dir)
    before = {source: external(engine, source) for source in ("host", "disk")}

    for _ in range(3):
        engine.reset_prefix_cache()
        one(engine, prompt)

    assert external(engine, "disk") - before["disk"] == 2 * CHUNK
    assert external(engine, "host") - before["host"] == 4 * CHUNK


def test_reset_with_connector_forgets_dram(engine: OfflineEngine) -> None:
    """`reset_external` bumps the epoch: what was only in DRAM is unreachable at once, and new prompts are cached."""
    prompt = random_prompt(113, 2 * CHUNK + 1)
    one(engine, prompt)

    answer = engine.reset_prefix_cache(connector=True)

    assert answer
    assert one(engine, prompt, store=False).cached == 0
    engine.reset_prefix_cache()
    one(engine, prompt)
    engine.reset_prefix_cache()
    assert one(engine, prompt).cached == 2 * CHUNK
