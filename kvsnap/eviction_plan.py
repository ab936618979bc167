"""Which chunks of the disk tier die, and which shards are taken apart for it: pure functions over columns.

A shard never changes, so a dead chunk's bytes come back only when its whole shard goes:
at once where nothing in it is alive, else after what is alive was copied into a new one.
Copying pays where less than half is alive: it then never moves more bytes than it frees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COMPACT_BELOW = 0.5
"""Share of a shard's data; with less alive it is worth to be copied."""
_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskView:
    """The chunks that count on disk, a row each, and the shards that they lie in. Parents of rows are rows."""

    score: NDArray[np.float64]
    """What a chunk is worth; the lowest goes first."""
    parent: NDArray[np.int64]
    """Row of the parent; -1 at depth 0."""
    depth: NDArray[np.int64]
    """More than the parent's."""
    shard: NDArray[np.int64]
    """Position of the shard below."""
    nbytes: NDArray[np.int64]
    """Of the chunk's range in its shard."""
    is_pinned: NDArray[np.bool_]
    """Must not die, and so neither must its ancestors."""
    shard_real_bytes: NDArray[np.int64]
    """What each shard takes on disk."""
    shard_data_bytes: NDArray[np.int64]
    """What the chunks take that it was written with, dead or alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionPlan:
    """What to do, in this order: the victims die, then shard after shard is dropped or compacted."""

    victims: NDArray[np.int64]
    """Rows, children before their parents. With them gone the rest is still prefix-closed."""
    shards: tuple[int, ...]
    """Positions, cheapest first: those with nothing alive, then those with the smallest share."""
    freed_bytes: int
    """Estimate; less than needed only if there is no more to take."""


def plan_eviction(view: DiskView, needed_bytes: int, *, compact_below: float = COMPACT_BELOW) -> EvictionPlan:
    """The coldest leaves, and then their parents, until enough real bytes can be had back.

    Chunks that would die without giving a byte back, as their shard stays, live on.

    Args:
        compact_below: Shards with a smaller share alive are copied; 0: only whole shards go, nothing is copied.
    """
    order = _kill_order(view)
    all_alive = _by_shard(view, np.arange(len(view.shard)))

    def gain(count: int) -> NDArray[np.float64]:
        return _gain(view, all_alive - _by_shard(view, order[:count]), compact_below)

    low, high = 0, len(order)
    while low < high:  # the smallest number of victims that suffices: the gain only grows with it
        middle = (low + high) // 2
        if gain(middle).sum() >= needed_bytes:
            high = middle
        else:
            low = middle + 1
    gains = gain(low)
    share = (all_alive - _by_shard(view, order[:low])) / np.maximum(view.shard_data_bytes, 1)
    chosen: list[int] = []
    freed = 0.0
    for shard in np.lexsort((-gains, share)).tolist():
        if freed >= needed_bytes:
            break
        if gains[shard] > 0:
            chosen.append(shard)
            freed += float(gains[shard])
    return EvictionPlan(victims=_victims(view, order[:low], chosen), shards=tuple(chosen), freed_bytes=int(freed))


def _kill_order(view: DiskView) -> NDArray[np.int64]:
    """Rows in the order in which the coldest leaf goes next, again and again; without what has to stay.

    A row becomes a leaf when its last descendant has gone, so it goes by the highest score below it.
    """
    latest = np.where(view.is_pinned, np.inf, view.score)
    for rows in _levels(view, deepest_first=True):
        below = rows[view.parent[rows] >= 0]
        np.maximum.at(latest, view.parent[below], latest[below])
    order: NDArray[np.int64] = np.lexsort((-view.depth, latest))
    may_go: NDArray[np.bool_] = latest[order] < np.inf
    return order[may_go]


def _victims(view: DiskView, killed: NDArray[np.int64], chosen: list[int]) -> NDArray[np.int64]:
    """Those of `killed` that lie in a chosen shard, or below such a chunk."""
    is_chosen = np.zeros(len(view.shard_real_bytes), dtype=np.bool_)
    is_chosen[chosen] = True
    is_dead = np.zeros(len(view.shard), dtype=np.bool_)
    is_dead[killed] = is_chosen[view.shard[killed]]
    for rows in _levels(view, deepest_first=False):
        below = rows[view.parent[rows] >= 0]
        is_dead[below] |= is_dead[view.parent[below]]
    dead = np.flatnonzero(is_dead)
    return dead[np.argsort(-view.depth[dead], kind="stable")]


def _levels(view: DiskView, *, deepest_first: bool) -> Iterator[NDArray[np.int64]]:
    """Rows of equal depth, depth by depth."""
    if len(view.depth) == 0:
        return
    order = np.argsort(view.depth, kind="stable")
    levels = np.split(order, np.flatnonzero(np.diff(view.depth[order])) + 1)
    yield from reversed(levels) if deepest_first else levels


def _by_shard(view: DiskView, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bytes of the rows in each shard."""
    sums = np.bincount(view.shard[rows], weights=view.nbytes[rows], minlength=len(view.shard_real_bytes))
    return sums.astype(np.float64)


def _gain(view: DiskView, alive: NDArray[np.float64], compact_below: float) -> NDArray[np.float64]:
    """Bytes that each shard would give back: all of it, or all but what is alive and its part of a header."""
    real, data = view.shard_real_bytes, np.maximum(view.shard_data_bytes, 1)
    copied = np.maximum(real - real * (alive / data) - _HEADER_BYTES, 0.0)
    return np.where(alive <= 0, real.astype(np.float64), np.where(alive < compact_below * data, copied, 0.0))
