"""Promotes the hottest chunks of the disk tier before they are asked for."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvsnap.index import ABSENT, READY, Chunk
from kvsnap.policy import prefix_closed
from kvsnap.transfer import Progress

if TYPE_CHECKING:
    from kvsnap.cache import TieredCache

_PROGRESS_S = 5.0


class Preload:
    """Promotes into free slots, hottest first, parents first; begins at once and goes on by itself.

    Args:
        cache: Its threads must run.
        budget_bytes: Most bytes to promote.
    """

    def __init__(self, cache: TieredCache, budget_bytes: int) -> None:
        self._cache = cache
        self._wanted = hottest_on_disk(cache, budget_bytes)
        cache.promoter.preload(self._wanted)

    def wait(self, timeout_s: float, progress: Progress | None = None) -> bool:
        """Wait until it is through; False if it isn't after `timeout_s`: it goes on, behind what requests wait for."""
        deadline = time.monotonic() + timeout_s
        in_all = _bytes_of(self._cache, self._wanted)
        while not self._cache.promoter.wait_preload(min(deadline, time.monotonic() + _PROGRESS_S)):
            if time.monotonic() >= deadline:
                return False
            if progress is not None:
                progress(self.loaded()[1], in_all)
        return True

    def loaded(self) -> tuple[int, int]:
        """(chunks, bytes) that are in DRAM now and were not before."""
        loaded = [chunk for chunk in self._wanted if chunk.state == READY]
        return len(loaded), _bytes_of(self._cache, loaded)


def hottest_on_disk(cache: TieredCache, budget_bytes: int) -> list[Chunk]:
    """What a preload takes: chunks that are only on disk, as far as free slots and `budget_bytes` reach.

    In order of worth: the policy's score (uses and recency) stands for the seconds that a
    chunk will save. All full chunks save the same prefill for the same bytes, so no more
    is needed; every chunk comes after its ancestors.
    """
    with cache.lock:
        chunks = list(cache.residency.index)
        room = cache.residency.num_free
    cold = [c for c in chunks if c.state == ABSENT and c.shard is not None]
    cold.sort(key=lambda c: (-cache.residency.score(c), c.depth))
    parents: dict[bytes, bytes | None] = {c.key: c.parent.key if c.parent else None for c in chunks}
    by_key: dict[bytes, Chunk] = {c.key: c for c in cold}
    wanted: list[Chunk] = []
    used = 0
    for key in prefix_closed((c.key for c in cold), parents):
        chunk = by_key.get(key)
        if chunk is None:
            continue
        used += cache.geometry.chunk_bytes(chunk.tokens)
        if used > budget_bytes or len(wanted) >= room:
            break
        wanted.append(chunk)
    return wanted


def _bytes_of(cache: TieredCache, chunks: Iterable[Chunk]) -> int:
    return sum(cache.geometry.chunk_bytes(chunk.tokens) for chunk in chunks)
