"""Who goes next, and what is worth loading: pure functions over what is known about chunks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol


class EvictionPolicy(Protocol):
    """Ranks chunks; the lowest score is evicted first, leaves before their parents."""

    def score(self, hits: int, last_use: float) -> float:
        """Worth of a chunk with this many hits, last used at `last_use` (seconds since the epoch)."""


@dataclass(frozen=True, slots=True)
class FrequencyRecency:
    """Recency with a bonus for frequency.

    Doubling the hits is worth `bonus_s` of age. That is the logarithm of a use count
    that halves every `bonus_s` seconds, up to a constant that all chunks share, so a
    score never has to be recomputed as time passes.
    """

    bonus_s: float = 600.0

    def score(self, hits: int, last_use: float) -> float:
        """See `EvictionPolicy.score`."""
        return last_use + self.bonus_s * math.log2(1 + hits)


@dataclass(slots=True, kw_only=True)
class Rates:
    """Measured speeds, for the choice between loading and computing. Zero: not yet measured."""

    disk_bytes_per_s: float = 0.0
    fetch_bytes_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0

    def saw_read(self, nbytes: int, seconds: float) -> None:
        """`nbytes` came from disk in `seconds`, those of reads beside it included; the wait for a thread isn't."""
        self.disk_bytes_per_s = _blend(self.disk_bytes_per_s, nbytes / max(seconds, 1e-6))

    def saw_fetch(self, nbytes: int, seconds: float) -> None:
        """The same of what was fetched from a snapshot."""
        self.fetch_bytes_per_s = _blend(self.fetch_bytes_per_s, nbytes / max(seconds, 1e-6))

    def saw_prefill(self, tokens: int, seconds: float) -> None:
        """One step computed `tokens` prompt tokens in `seconds`."""
        self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, tokens / max(seconds, 1e-6))

    def is_worth_loading(self, disk_bytes: int, fetch_bytes: int, tokens: int) -> bool:
        """Whether reading and fetching these bytes is predicted to be faster than computing `tokens` tokens."""
        if not self.prefill_tokens_per_s:
            return True
        seconds = 0.0
        for nbytes, rate in ((disk_bytes, self.disk_bytes_per_s), (fetch_bytes, self.fetch_bytes_per_s)):
            if nbytes and not rate:
                return True
            seconds += nbytes / rate if nbytes else 0.0
        return seconds <= tokens / self.prefill_tokens_per_s


def prefix_closed(wanted: Iterable[bytes], parents: Mapping[bytes, bytes | None]) -> list[bytes]:
    """`wanted` with all ancestors, parents before children, each once, in the order of first need.

    A chunk with an ancestor that `parents` does not know is left out: without its chain
    it can't be hit.
    """
    order: dict[bytes, None] = {}
    for key in wanted:
        chain: list[bytes] = []
        at: bytes | None = key
        while at is not None and at not in order:
            if at not in parents:
                chain = []
                break
            chain.append(at)
            at = parents[at]
        order.update(dict.fromkeys(reversed(chain)))
    return list(order)


def _blend(old: float, new: float) -> float:
    return new if not old else 0.7 * old + 0.3 * new
