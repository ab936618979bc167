"""What lies where: the index, the slots of the DRAM tier, pins, and who is evicted.

Bookkeeping only, no I/O and no thread: the cache calls it under its lock. It keeps two
promises. A slot with an operation on it is never handed out. Each tier by itself is
prefix-closed (invariant 6): a chunk loses its slot, or its place on disk, only together
with all its descendants.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable

from kvsnap.index import ABSENT, READY, Chunk, Index
from kvsnap.keys import ChunkKey
from kvsnap.policy import EvictionPolicy

_MAX_SKIPPED = 64


class Residency:
    """The state of both tiers in memory.

    Args:
        num_slots: Slots of the DRAM tier.
        policy: Ranks the leaves for eviction.
        free_slot: Called with a slot as soon as it holds no chunk any more.
    """

    def __init__(self, num_slots: int, policy: EvictionPolicy, free_slot: Callable[[int], None]) -> None:
        self.index = Index()
        self.num_slots = num_slots
        self.version = 0
        """Goes up with every change that a lookup could see."""
        self._policy = policy
        self._free_slot = free_slot
        self._free = list(range(num_slots - 1, -1, -1))
        self._owner: list[Chunk | None] = [None] * num_slots
        self._ops = [0] * num_slots
        self.unsaved: dict[ChunkKey, Chunk] = {}
        """Complete chunks in DRAM that are not on disk."""
        self._heap: list[tuple[float, int, Chunk]] = []
        # One entry a chunk at most (`is_queued`), with the score it had when it was offered. An
        # entry whose chunk is no longer evictable is dropped when it comes up; what makes the
        # chunk evictable again offers it again.
        self._order = itertools.count()

    # -- slots -----------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    def owner(self, slot: int) -> Chunk | None:
        """The chunk in the slot."""
        return self._owner[slot]

    def take_slot(self, is_droppable: Callable[[Chunk], bool]) -> int | None:
        """A free slot, made free by evicting the coldest droppable leaf if need be; None if there is none."""
        if self._free:
            return self._free.pop()
        victim = self._coldest(is_droppable)
        if victim is None:
            return None
        self.vacate(victim)
        return self._free.pop() if self._free else None

    def take_found_slots(self, slots: set[int]) -> None:
        """Take particular free slots: those that an attach found chunks in."""
        self._free = [slot for slot in self._free if slot not in slots]

    def give_back(self, slot: int) -> None:
        """Return a slot from `take_slot` unused."""
        self._free.append(slot)

    def occupy(self, chunk: Chunk, slot: int, generation: int, state: int) -> None:
        """Put a chunk into a slot that was taken. Its parent must have one."""
        chunk.slot, chunk.generation, chunk.state = slot, generation, state
        self._owner[slot] = chunk
        if chunk.parent is not None:
            chunk.parent.dram_children += 1
        self.version += 1

    def ready(self, chunk: Chunk) -> None:
        """The chunk's bytes are all there and good."""
        chunk.state = READY
        if chunk.shard is None:
            self.unsaved[chunk.key] = chunk
        self.version += 1
        self._offer(chunk)

    def vacate(self, chunk: Chunk) -> None:
        """Take the slot away from a chunk without children in DRAM."""
        if chunk.slot < 0:
            return
        slot = chunk.slot
        chunk.slot, chunk.state, chunk.dram_xxh3 = -1, ABSENT, b""
        self.unsaved.pop(chunk.key, None)
        self._owner[slot] = None
        self._free_slot(slot)
        if self._ops[slot] == 0:
            self._free.append(slot)
        parent = chunk.parent
        if parent is not None:
            parent.dram_children -= 1
            self._offer(parent)
        self.version += 1
        self._forget_if_gone(chunk)

    def vacate_subtree(self, chunk: Chunk) -> None:
        """Take the slots away from a chunk and all its descendants."""
        for below in self.index.subtree(chunk):
            self.vacate(below)

    def vacate_all(self) -> int:
        """Empty the DRAM tier; returns how many chunks it had."""
        chunks = [chunk for chunk in self._owner if chunk is not None]
        for chunk in sorted(chunks, key=lambda c: -c.depth):
            self.vacate(chunk)
        return len(chunks)

    # -- pins ------------------------------------------------------------------------

    def begin_op(self, slot: int) -> None:
        """An operation starts to read or write the slot's bytes."""
        self._ops[slot] += 1

    def end_op(self, slot: int) -> None:
        """An operation is over, however it ended."""
        self._ops[slot] -= 1
        if self._ops[slot]:
            return
        owner = self._owner[slot]
        if owner is None:
            self._free.append(slot)
        else:
            self._offer(owner)

    def has_ops(self, slot: int) -> bool:
        """Whether an operation is under way on the slot."""
        return self._ops[slot] > 0

    def shield(self, chunks: Iterable[Chunk]) -> None:
        """Keep chunks from being evicted while slots are taken for their relatives."""
        for chunk in chunks:
            chunk.shields += 1

    def unshield(self, chunks: Iterable[Chunk]) -> None:
        """Undo `shield`."""
        for chunk in chunks:
            chunk.shields -= 1
            self._offer(chunk)

    # -- disk ------------------------------------------------------------------------

    def put_on_disk(self, chunk: Chunk, shard: str, offset: int, xxh3: bytes) -> None:
        """The chunk lies in a shard. Its parent must lie in one too."""
        chunk.shard, chunk.offset, chunk.shard_xxh3 = shard, offset, xxh3
        self.unsaved.pop(chunk.key, None)
        self.version += 1

    def drop_from_disk(self, chunk: Chunk) -> list[Chunk]:
        """The chunk is gone from disk, so its descendants there are out of reach; returns all that lost their place."""
        lost = []
        for below in self.index.subtree(chunk):
            if below.shard is not None:
                below.shard, below.offset, below.shard_xxh3 = None, 0, b""
                if below.state == READY:
                    self.unsaved[below.key] = below
                lost.append(below)
                self._forget_if_gone(below)
        self.version += 1
        return lost

    # -- use -------------------------------------------------------------------------

    def touch(self, chunk: Chunk, *, hit: bool) -> None:
        """The chunk was used: by a later request (`hit`), or by the one that stored it."""
        chunk.last_use = time.time()
        chunk.hits += hit

    def score(self, chunk: Chunk) -> float:
        """What the chunk is worth; a covered short chunk nothing."""
        return float("-inf") if chunk.is_covered else self._policy.score(chunk.hits, chunk.last_use)

    def cover(self, chunk: Chunk, by: Chunk) -> None:
        """A short chunk has a longer sibling with the same blocks: first to go, as long as that is here."""
        chunk.covered_by = by
        if self._is_evictable(chunk):  # its old entry may lie far down the queue
            chunk.is_queued = True
            heapq.heappush(self._heap, (self.score(chunk), next(self._order), chunk))

    def coldest_first(self, count: int) -> list[Chunk]:
        """The next `count` chunks that eviction would take if all could be dropped, in its order.

        Leaves before their parents; a parent counts as a leaf once all its children
        in DRAM are in the list.
        """
        popped: list[tuple[float, int, Chunk]] = []
        parents: list[tuple[float, int, Chunk]] = []
        children: dict[ChunkKey, int] = {}
        order: dict[ChunkKey, Chunk] = {}
        while (self._heap or parents) and len(order) < count:
            if not self._heap or (parents and parents[0] < self._heap[0]):
                chunk = heapq.heappop(parents)[2]
            else:
                entry = self._pop()
                if entry is None or entry[2].key in order:
                    continue
                popped.append(entry)
                chunk = entry[2]
            order[chunk.key] = chunk
            parent = chunk.parent
            if parent is not None and parent.state == READY and not parent.shields and not self._ops[parent.slot]:
                children[parent.key] = children.get(parent.key, parent.dram_children) - 1
                if children[parent.key] == 0:
                    heapq.heappush(parents, (self.score(parent), next(self._order), parent))
        for entry in popped:
            self._push_back(entry)
        return list(order.values())

    # -- inside ----------------------------------------------------------------------

    def _offer(self, chunk: Chunk) -> None:
        if not chunk.is_queued and self._is_evictable(chunk):
            chunk.is_queued = True
            heapq.heappush(self._heap, (self.score(chunk), next(self._order), chunk))

    def _is_evictable(self, chunk: Chunk) -> bool:
        return (
            chunk.state == READY
            and chunk.dram_children == 0
            and chunk.shields == 0
            and chunk.slot >= 0
            and self._ops[chunk.slot] == 0
        )

    def _pop(self) -> tuple[float, int, Chunk] | None:
        """The coldest entry if it stands; None where it was stale (dropped) or too low (corrected)."""
        entry = heapq.heappop(self._heap)
        score, order, chunk = entry
        if not self._is_evictable(chunk):
            chunk.is_queued = False
            return None
        current = self.score(chunk)
        if current > score:
            heapq.heappush(self._heap, (current, order, chunk))
            return None
        return entry

    def _push_back(self, entry: tuple[float, int, Chunk]) -> None:
        entry[2].is_queued = True
        heapq.heappush(self._heap, entry)

    def _coldest(self, is_droppable: Callable[[Chunk], bool]) -> Chunk | None:
        skipped: list[tuple[float, int, Chunk]] = []
        victim: Chunk | None = None
        while self._heap and len(skipped) < _MAX_SKIPPED:
            entry = self._pop()
            if entry is None:
                continue
            if is_droppable(entry[2]):
                victim = entry[2]
                victim.is_queued = False
                break
            skipped.append(entry)
        for entry in skipped:
            self._push_back(entry)
        return victim

    def _forget_if_gone(self, chunk: Chunk) -> None:
        at: Chunk | None = chunk
        while at is not None and at.slot < 0 and at.shard is None and at.first_child is None:
            self.index.remove(at)
            at = at.parent
