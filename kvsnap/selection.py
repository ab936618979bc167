"""Which chunks of a cache directory belong into a snapshot: pure, no I/O.

Everything is prefix-closed: a chunk goes along only with all its ancestors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from kvsnap.keys import ChunkKey
from kvsnap.known import KnownChunks, StoredShard
from kvsnap.local_shards import LocalShard, is_plain, live_entries
from kvsnap.namespace import Namespace
from kvsnap.plan import I64, choose_shards, heat_order
from kvsnap.shard import ChunkEntry

Select = Literal["all", "hot", "recent"]
SELECTS: tuple[Select, ...] = ("all", "hot", "recent")
RECENT_S = 24 * 3600.0
"""`recent` takes what was used in this time before the export."""

Usage = Mapping[ChunkKey, tuple[int, float]]
"""Hits and Unix time of the last use [s]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The chunks to export, and what stayed out and why."""

    shards: tuple[LocalShard | StoredShard, ...]
    """Hottest first, but those that others need before them."""
    entries: list[ChunkEntry]
    """Rows: the chunks, in order of depth, as they lie in their shards."""
    parent_row: I64
    """For each row the row of its parent, -1 at depth 0."""
    shard: I64
    """For each row the position of its shard in `shards`."""
    hits: I64
    last_use: I64
    """Unix time [s]"""
    num_broken: int
    """Chunks left out because an ancestor is missing."""
    num_salted: int
    """Chunks left out because they belong to a tenant."""
    num_unselected: int
    """Chunks left out by `select` or `max_bytes`."""


class _Row(NamedTuple):
    """A chunk, and the position of the shard that it is taken from."""

    source: int
    entry: ChunkEntry
    hits: int
    last_use: int


def select_chunks(
    ns: Namespace,
    shards: tuple[LocalShard, ...],
    usage: Usage,
    *,
    known: KnownChunks | None = None,
    select: Select = "all",
    max_bytes: int | None = None,
    include_salted: bool = False,
    now: float,
) -> Selection:
    """Choose chunks, and with them whole shards.

    Args:
        usage: What is known of hits and last use; a chunk that isn't in it was never
            hit and was last used when its shard was written.
        known: What the repository holds already: taken from there, whichever shard holds it here, but for what lies in
            a shard that goes anyway (see `_place`).
        select: `all`; `hot`: chunks that were hit; `recent`: chunks used in the last 24
            hours. With their ancestors.
        max_bytes: Most bytes of all shards together; the hottest first, with `recent`
            the latest used first.
        include_salted: Also chunks that not every request may use: of salted requests, and of adapters.
        now: Unix time [s]
    """
    offered = tuple(shard for shard in shards if include_salted or is_plain(shard.header.scope))
    num_salted = sum(len(shard.header.chunks) for shard in shards) - sum(len(s.header.chunks) for s in offered)
    live, num_broken = live_entries(ns, offered)
    rows = [_Row(i, entry, *_usage_of(entry.key, usage, offered[i])) for i, entry in live.values()]
    if select != "all":
        keep: set[ChunkKey] = set()
        for row in reversed(rows):  # children come before their parents
            is_wanted = row.hits > 0 if select == "hot" else row.last_use >= now - RECENT_S
            if is_wanted or row.entry.key in keep:
                keep.update((row.entry.key, row.entry.parent))
        rows = [row for row in rows if row.entry.key in keep]
    best: Selection | None = None
    # Under a bound either way may hold more: a shard that goes anyway may be too large for what is left.
    for brings_rest in (True, False) if known is not None and max_bytes is not None else (True,):
        sources, placed = _place(rows, offered, known, brings_rest=brings_rest)
        found = _choose(placed, sources, max_bytes=max_bytes, recent=select == "recent")
        if best is None or len(found.entries) > len(best.entries):
            best = found
    assert best is not None
    return replace(best, num_broken=num_broken, num_salted=num_salted, num_unselected=len(live) - len(best.entries))


def _place(
    rows: Sequence[_Row], offered: Sequence[LocalShard], known: KnownChunks | None, *, brings_rest: bool
) -> tuple[list[LocalShard | StoredShard], list[_Row]]:
    """All shards that hold anything, and the rows with the shard that each is taken from.

    Args:
        brings_rest: A local shard that goes for what is new in it brings along what else it holds: no other shard is
            needed for that.
    """
    sources: list[LocalShard | StoredShard] = list(offered)
    if known is None:
        return sources, list(rows)
    places = [known.find(row.entry) for row in rows]
    going = {row.source for row, place in zip(rows, places, strict=True) if place is None} if brings_rest else set()
    at: dict[StoredShard, int] = {}
    placed = []
    for row, place in zip(rows, places, strict=True):
        if place is None or row.source in going:
            placed.append(row)
            continue
        stored, entry = place
        if stored not in at:
            at[stored] = len(sources)
            sources.append(stored)
        placed.append(row._replace(source=at[stored], entry=entry))
    return sources, placed


def _choose(
    rows: Sequence[_Row], sources: Sequence[LocalShard | StoredShard], *, max_bytes: int | None, recent: bool
) -> Selection:
    """Whole shards, by heat, as far as `max_bytes` allows; nothing is said of what was left out before."""
    row_of = {row.entry.key: at for at, row in enumerate(rows)}
    shard = np.array([row.source for row in rows], np.int64)
    parent_row = np.array([row_of[row.entry.parent] if row.entry.depth else -1 for row in rows], np.int64)
    depth = np.array([row.entry.depth for row in rows], np.int64)
    hits = np.array([row.hits for row in rows], np.int64)
    last_use = np.array([row.last_use for row in rows], np.int64)
    order = heat_order(hits, last_use, depth, shard, [s.id for s in sources], recent=recent)
    holding = set(shard.tolist())
    choice = choose_shards(
        [i for i in order if i in holding],
        [s.nbytes for s in sources],
        shard,
        parent_row,
        depth,
        max_bytes=max_bytes,
    )
    kept = np.flatnonzero(choice.live)
    new_row = np.cumsum(choice.live) - 1
    kept_parent = parent_row[kept]
    held = set(shard[kept].tolist())
    taken = [i for i in choice.shards if i in held]
    position = np.zeros(len(sources), np.int64)
    position[taken] = np.arange(len(taken))
    return Selection(
        shards=tuple(sources[i] for i in taken),
        entries=[rows[i].entry for i in kept.tolist()],
        parent_row=np.where(kept_parent < 0, -1, new_row[kept_parent] if len(kept) else -1),
        shard=position[shard[kept]],
        hits=hits[kept],
        last_use=last_use[kept],
        num_broken=0,
        num_salted=0,
        num_unselected=0,
    )


def _usage_of(key: ChunkKey, usage: Usage, shard: LocalShard) -> tuple[int, int]:
    hits, last_use = usage.get(key, (0, shard.mtime))
    return max(int(hits), 0), max(int(last_use), 0)
