"""How long the scheduler looks, and what the index costs in memory. Block 16, chunks of 256 tokens.

A look-up is all that a new 8,192-token request costs the scheduler: from vLLM's list of token ids through the keys and
the index to the promise. No engine is needed; chunks are resident in a DRAM tier of small pages.
"""

from __future__ import annotations

import ctypes
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from benchmarks.namespaces import small_pages
from benchmarks.report import emit, note
from kvsnap.cache import TieredCache
from kvsnap.keys import BLOCK_KEY_BYTES, ChunkKey, KeyChain, root_key
from kvsnap.tiers.dram import DramRegion, DramTier
from kvsnap_connector.live_request import LiveRequest
from kvsnap_connector.planner import Planner

PROMPT_TOKENS = 8192
VOCABULARY = 50_000
ROUNDS = 300
MANY = 100_000
FEW = 1_000
SHARED_BLOCKS = 8
SPARE_SLOTS = 64


class Tiers:
    """A cache without a disk tier, and the one rank that fills its slots."""

    def __init__(self, cache: TieredCache, region: DramRegion) -> None:
        self.cache = cache
        self._region = region
        self._root = root_key(cache.namespace.identity.hash(), cache.namespace.chunk_tokens)

    def chain(self, ids: list[int]) -> KeyChain:
        """The keys of a prompt."""
        layout = self.cache.namespace.layout
        chain = KeyChain(self._root, self.cache.namespace.chunk_tokens, layout.block_tokens)
        chain.extend(ids)
        return chain

    def store(self, key: ChunkKey, parent: ChunkKey, depth: int, block_keys: bytes) -> None:
        """Make one full chunk resident."""
        taken = self.cache.begin_store(
            key, parent, depth=depth, tokens=self.cache.namespace.chunk_tokens, scope="", block_keys=block_keys
        )
        if taken is None:
            raise RuntimeError("the DRAM tier is full")
        self._region.complete(*taken, ok=True)

    def store_prompt(self, ids: list[int], num_chunks: int) -> None:
        """Make a prompt's first chunks resident, as far as they aren't."""
        chain = self.chain(ids)
        for i, key in enumerate(chain.keys[:num_chunks]):
            if self.cache.in_dram(key) is None:
                end = (i + 1) * self.cache.namespace.chunk_tokens
                self.store(key, chain.parent_of(i), i, chain.tail_block_keys(i, end))
        self.cache.poll()


@contextmanager
def tiers(num_chunks: int) -> Iterator[Tiers]:
    """Empty tiers with room for so many chunks."""
    namespace = small_pages()
    geometry = namespace.geometry
    slot_bytes = geometry.chunk_bytes(namespace.chunk_tokens) + 2048
    dram = DramTier.anonymous(
        namespace.id(), geometry, budget_bytes=(num_chunks + SPARE_SLOTS) * slot_bytes + (1 << 20), ranks=1
    )
    cache = TieredCache(namespace, dram, None)
    region = DramRegion.attach(dram.path, dram.nonce.hex(), rank=0, slice_index=0)
    try:
        yield Tiers(cache, region)
    finally:
        region.close()
        cache.close()


def prompts(num_chunks: int) -> Iterator[list[int]]:
    """Unrelated 8,192-token prompts that fill so many chunks, the first one always the same."""
    rng = random.Random(5)
    for _ in range(-(-num_chunks // (PROMPT_TOKENS // 256))):
        yield rng.choices(range(VOCABULARY), k=PROMPT_TOKENS)


def look_up_us(cache: TieredCache, ids: list[int], expected_tokens: int) -> float:
    """Median microseconds of a new request's look-up."""
    planner = Planner(cache, load_policy="always")
    times = []
    for number in range(ROUNDS):
        request = SimpleNamespace(
            request_id=str(number),
            cache_salt=None,
            pooling_params=None,
            prompt_token_ids=ids,
            prompt_embeds=None,
            lora_request=None,
            mm_features=[],
            kv_transfer_params=None,
            num_prompt_tokens=len(ids),
            _all_token_ids=list(ids),
        )
        began = time.perf_counter()
        live = LiveRequest(request)
        planner.new_request(live)
        found, _ = planner.match(live, 0)
        times.append(time.perf_counter() - began)
        planner.finished(live.request_id)
        if found != expected_tokens:
            raise RuntimeError(f"expected a hit of {expected_tokens} tokens, found {found}")
    note(f"  quickest {min(times) * 1e6:.0f} us, median {statistics.median(times) * 1e6:.0f} us")
    return statistics.median(times) * 1e6


def resident(num_chunks: int, name: str) -> None:
    """All of the prompt is there, among so many chunks; also the memory they take."""
    note(f"{num_chunks} chunks resident, all hit")
    with tiers(num_chunks) as made:
        before = anonymous_bytes()
        filled = 0
        first: list[int] = []
        for ids in prompts(num_chunks):
            first = first or ids
            made.store_prompt(ids, min(PROMPT_TOKENS // 256, num_chunks - filled))
            filled += PROMPT_TOKENS // 256
        if num_chunks == MANY:
            emit("bytes_per_chunk_dram", (anonymous_bytes() - before) / num_chunks, at_most=1024)
        emit(name, look_up_us(made.cache, first, (PROMPT_TOKENS - 1) // 16 * 16), at_most=500)


def fan_out() -> None:
    """The hit ends inside a chunk with 100,000 siblings that begin like it."""
    note(f"a hit that ends inside a chunk with {MANY} siblings")
    per_chunk = 256 // 16
    with tiers(MANY + PROMPT_TOKENS // 256) as made:
        ids = next(iter(prompts(1)))
        depth = PROMPT_TOKENS // 256 - 1
        made.store_prompt(ids, depth)
        chain = made.chain(ids)
        begin = chain.tail_block_keys(depth, PROMPT_TOKENS)[: SHARED_BLOCKS * BLOCK_KEY_BYTES]
        rng = random.Random(6)
        for _ in range(MANY):
            rest = rng.randbytes((per_chunk - SHARED_BLOCKS) * BLOCK_KEY_BYTES)
            made.store(ChunkKey(rng.randbytes(32)), chain.parent_of(depth), depth, begin + rest)
            made.cache.poll()
        expected = depth * 256 + SHARED_BLOCKS * 16
        emit("lookup_us_fanout", look_up_us(made.cache, ids, expected), at_most=500)


def anonymous_bytes() -> int:
    """This process's memory without files and shared memory, after giving back what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")


def main() -> None:
    parts: dict[str, Callable[[], None]] = {
        "1k": lambda: resident(FEW, "lookup_us_1k"),
        "100k": lambda: resident(MANY, "lookup_us_100k"),
        "fanout": fan_out,
    }
    for name in sys.argv[1:] or parts:
        parts[name]()


if __name__ == "__main__":
    main()
