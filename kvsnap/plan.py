"""Which shards to take: pure decisions for export and import.

Shards are taken whole, hottest first. A chunk is *live* when all its ancestors are
taken too; only live chunks are of use, and only they count as exported or resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ShardChoice:
    """What to take, and what that gives."""

    shards: tuple[int, ...]
    """Shards to take, those that others need first, else hottest first."""
    live: Mask
    """For each row whether its chunk and all its ancestors are in `shards`."""
    nbytes: int
    """Bytes of the shards."""


def live_rows(parent_row: I64, depth: I64, present: Mask) -> Mask:
    """Rows that are `present` and whose ancestors all are. Rows lie in order of depth, parents first."""
    live = present.copy()
    if not len(live):
        return live
    bounds = np.flatnonzero(np.diff(depth)) + 1
    for start, end in zip(bounds, [*bounds[1:], len(depth)], strict=False):
        live[start:end] &= live[parent_row[start:end]]
    return live


def heat_order(hits: I64, last_use: I64, depth: I64, shard: I64, names: Sequence[str], *, recent: bool) -> list[int]:
    """Positions of the shards, hottest first; all sums are over the rows of a shard.

    By mean hits, then by latest use (`recent`: the other way round), then the one that
    reaches closest to a root, then by name, so that the order never depends on chance.
    """
    count = len(names)
    rows = np.maximum(np.bincount(shard, minlength=count), 1)
    mean_hits = np.bincount(shard, weights=hits, minlength=count) / rows
    latest = np.zeros(count, np.int64)
    np.maximum.at(latest, shard, last_use)
    mean_depth = np.bincount(shard, weights=depth, minlength=count) / rows
    first, second = (latest, mean_hits) if recent else (mean_hits, latest)
    return sorted(range(count), key=lambda i: (-first[i], -second[i], mean_depth[i], names[i]))


def choose_shards(
    order: Sequence[int],
    shard_bytes: Sequence[int],
    shard: I64,
    parent_row: I64,
    depth: I64,
    *,
    max_bytes: int | None,
) -> ShardChoice:
    """Take shards in the given order while they fit into `max_bytes` (None: all of `order`).

    First pass: a shard is taken together with all the shards that hold ancestors of its
    chunks, if they fit as a whole. Second pass: what fits by itself and still has a chunk
    with a full chain. A shard that isn't in `order` can't be taken.
    """
    offered = set(order)
    rows = _rows_of(shard, len(shard_bytes))
    if max_bytes is None:
        max_bytes = sum(shard_bytes[i] for i in order)
    taken: dict[int, None] = {}
    used = 0
    needs = _needed_shards(shard, parent_row, len(shard_bytes))
    needed_by = _reversed(needs)
    # What doesn't fit once never will: taking others shrinks the room by at least what it shrinks the closure.
    refused = _reach([i for i in range(len(shard_bytes)) if i not in offered], needed_by, set())
    for i in order:
        if i in taken or i in refused:
            continue
        closure = _closure(i, needs, taken, shard_bytes, max_bytes - used)
        if closure is None:
            _reach([i], needed_by, refused)
        else:
            taken.update(dict.fromkeys(closure))
            used += sum(shard_bytes[j] for j in closure)
    live = live_rows(parent_row, depth, np.isin(shard, list(taken)))
    for i in order:
        if i not in taken and used + shard_bytes[i] <= max_bytes and _revive(rows[i], parent_row, live):
            taken[i] = None
            used += shard_bytes[i]
    live = live_rows(parent_row, depth, np.isin(shard, list(taken)))
    return ShardChoice(tuple(taken), live, used)


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The start of a shard, up to the end of its last chunk that is wanted."""

    shard: int
    rows: I64
    """What is wanted of it, in order of place."""
    nbytes: int
    """From the start of the file."""


def choose_part(
    order: Sequence[int],
    rows: Sequence[I64],
    offset: I64,
    nbytes: I64,
    parent_row: I64,
    live: Mask,
    *,
    room: int,
) -> ShardPart | None:
    """What to take of the first shard in `order` whose start, with a chunk of use in it, fits into `room` bytes.

    Args:
        order: Shards that aren't taken, hottest first.
        rows: For each shard its rows, in order of place.
        live: For each row whether it is had already with all its ancestors.
    """
    for i in order:
        wanted: dict[int, None] = {}
        for row in rows[i].tolist():
            if offset[row] + nbytes[row] > room:
                break
            parent = int(parent_row[row])
            if parent < 0 or live[parent] or parent in wanted:
                wanted[row] = None
        if wanted:
            last = next(reversed(wanted))
            return ShardPart(i, np.array(list(wanted), np.int64), int(offset[last] + nbytes[last]))
    return None


def shards_needed_by(rows: I64, shard: I64, parent_row: I64) -> list[int]:
    """The shards that hold parents of the chunks in `rows`, their own included."""
    parents = parent_row[rows]
    found: list[int] = np.unique(shard[parents[parents >= 0]]).tolist()
    return found


def _needed_shards(shard: I64, parent_row: I64, count: int) -> list[list[int]]:
    """For each shard the other shards that hold parents of its chunks."""
    inner = parent_row >= 0
    child, parent = shard[inner], shard[parent_row[inner]]
    pairs = np.unique((child * count + parent)[child != parent])
    needs: list[list[int]] = [[] for _ in range(count)]
    for pair in pairs.tolist():
        needs[pair // count].append(pair % count)
    return needs


def _closure(
    start: int, needs: list[list[int]], taken: dict[int, None], shard_bytes: Sequence[int], room: int
) -> list[int] | None:
    """`start` and what it needs and isn't taken yet, needed ones first; None once it doesn't fit."""
    found: dict[int, None] = {}
    stack = [start]
    while stack:
        i = stack.pop()
        if i in found or i in taken:
            continue
        found[i] = None
        room -= shard_bytes[i]
        if room < 0:
            return None
        stack.extend(needs[i])
    return list(found)[::-1]


def _reversed(needs: list[list[int]]) -> list[list[int]]:
    needed_by: list[list[int]] = [[] for _ in needs]
    for child, parents in enumerate(needs):
        for parent in parents:
            needed_by[parent].append(child)
    return needed_by


def _reach(start: list[int], edges: list[list[int]], seen: set[int]) -> set[int]:
    """Add to `seen` what can be reached from `start`, itself included."""
    stack = start
    while stack:
        i = stack.pop()
        if i not in seen:
            seen.add(i)
            stack.extend(edges[i])
    return seen


def _rows_of(shard: I64, count: int) -> list[I64]:
    order = np.argsort(shard, kind="stable")
    bounds = np.searchsorted(shard[order], np.arange(count + 1))
    return [order[bounds[i] : bounds[i + 1]] for i in range(count)]


def _revive(rows: I64, parent_row: I64, live: Mask) -> bool:
    """Mark the rows of one shard that have a full chain; whether there is any."""
    found = False
    for row in rows.tolist():
        parent = int(parent_row[row])
        if parent < 0 or live[parent]:
            live[row] = found = True
    return found
