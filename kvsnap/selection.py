"""Which chunks of a cache directory belong into a snapshot: pure, no I/O.

Everything is prefix-closed: a chunk goes along only with all its ancestors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

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
            a shard that goes anyway.
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
    rows = [(i, entry, *_usage_of(entry.key, usage, offered[i])) for i, entry in live.values()]
    sources: list[LocalShard | StoredShard] = list(offered)
    if select != "all":
        keep: set[ChunkKey] = set()
        for _, entry, num_hits, used in reversed(rows):  # children come before their parents
            is_wanted = num_hits > 0 if select == "hot" else used >= now - RECENT_S
            if is_wanted or entry.key in keep:
                keep.update((entry.key, entry.parent))
        rows = [row for row in rows if row[1].key in keep]
    if known is not None:
        places = [known.find(entry) for _, entry, _, _ in rows]
        # A shard that goes for what is new in it brings the rest along: no other shard is needed for that.
        going = {i for (i, *_), place in zip(rows, places, strict=True) if place is None}
        at: dict[StoredShard, int] = {}
        for n, (i, _, num_hits, used) in enumerate(rows):
            place = places[n]
            if place is not None and i not in going:
                stored, entry = place
                if stored not in at:
                    at[stored] = len(sources)
                    sources.append(stored)
                rows[n] = (at[stored], entry, num_hits, used)

    row_of = {row[1].key: at for at, row in enumerate(rows)}
    shard = np.array([row[0] for row in rows], np.int64)
    parent_row = np.array([row_of[e.parent] if e.depth else -1 for _, e, _, _ in rows], np.int64)
    depth = np.array([row[1].depth for row in rows], np.int64)
    hits = np.array([row[2] for row in rows], np.int64)
    last_use = np.array([row[3] for row in rows], np.int64)
    order = heat_order(hits, last_use, depth, shard, [s.id for s in sources], recent=select == "recent")
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
        entries=[rows[i][1] for i in kept.tolist()],
        parent_row=np.where(kept_parent < 0, -1, new_row[kept_parent] if len(kept) else -1),
        shard=position[shard[kept]],
        hits=hits[kept],
        last_use=last_use[kept],
        num_broken=num_broken,
        num_salted=num_salted,
        num_unselected=len(live) - len(kept),
    )


def _usage_of(key: ChunkKey, usage: Usage, shard: LocalShard) -> tuple[int, int]:
    hits, last_use = usage.get(key, (0, shard.mtime))
    return max(int(hits), 0), max(int(last_use), 0)
