"""Which chunks are here, by key and by the blocks they begin with.

A chunk is in the index while it is in the DRAM tier or on disk. Two structures:

- a dictionary from key to `Chunk`;
- all chunks sorted by the concatenation of their block keys. A block key names its
  parent chunk and every token up to its own end, so chunks that begin with the same
  blocks are neighbours in this order, and the longest match with a prompt lies next to
  where the prompt's own block keys would be inserted: a binary search, whatever the
  number of siblings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sortedcontainers import SortedKeyList

from kvsnap.keys import BLOCK_KEY_BYTES, ChunkKey

if TYPE_CHECKING:
    from collections.abc import Callable

# States of a chunk in the DRAM tier.
ABSENT, FILLING, UNCHECKED, READING, READY = range(5)

_NEIGHBOURS = 4
"""Chunks looked at on either side of where a prompt would stand. The nearest share most with it; of others that
share as much one may be READY, or good, where those are not."""


class Chunk:
    """One chunk and where it is: about 810 bytes in all with the keys of 16 blocks (docs/performance.md)."""

    __slots__ = (
        "above",
        "after",
        "before",
        "block_keys",
        "covered_by",
        "depth",
        "dram_children",
        "dram_xxh3",
        "first_child",
        "generation",
        "hits",
        "is_queued",
        "key",
        "last_use",
        "offset",
        "scope",
        "shard",
        "shard_xxh3",
        "shields",
        "slot",
        "state",
        "tokens",
    )

    def __init__(
        self, key: ChunkKey, above: Chunk | ChunkKey, depth: int, tokens: int, scope: str, block_keys: bytes
    ) -> None:
        self.key = key
        self.above = above
        """The parent chunk, or the root's hash at depth 0."""
        self.depth = depth
        self.tokens = tokens
        self.scope = scope
        self.block_keys = block_keys
        self.slot = -1
        """In the DRAM tier; -1 for none."""
        self.generation = 0
        """Of the slot, when this chunk got it."""
        self.state = ABSENT
        """In the DRAM tier: one of the five above."""
        self.dram_xxh3 = b""
        """Of the bytes in the slot; empty until computed."""
        self.shard: str | None = None
        """Id of the shard that holds it, or None."""
        self.offset = 0
        """Where its range starts in the shard, in bytes."""
        self.shard_xxh3 = b""
        """Of its range in the shard, as the shard's header says."""
        self.hits = 0
        """Uses by requests after the one that stored it."""
        self.last_use = 0.0
        """Unix time in seconds, of the last use or of its coming here."""
        self.dram_children = 0
        """Children that hold a slot: such a chunk is no leaf of the DRAM tier."""
        self.first_child: Chunk | None = None
        """The child that came last; the others follow by `after`."""
        self.before: Chunk | None = None
        self.after: Chunk | None = None
        """Siblings: the parent's children are a doubly linked list."""
        self.shields = 0
        """Above zero while slots are taken for its relatives: not to be evicted for them."""
        self.covered_by: Chunk | None = None
        """For a short chunk: a longer sibling that begins with the same blocks."""
        self.is_queued = False
        """Whether the eviction queue has an entry for it."""

    @property
    def is_covered(self) -> bool:
        """A short chunk whose blocks a longer sibling has too, in DRAM or on disk."""
        other = self.covered_by
        return other is not None and (other.slot >= 0 or other.shard is not None)

    @property
    def parent(self) -> Chunk | None:
        """The parent chunk; None at depth 0."""
        return self.above if isinstance(self.above, Chunk) else None

    @property
    def parent_key(self) -> ChunkKey:
        """The parent's key; the root's hash at depth 0."""
        return self.above.key if isinstance(self.above, Chunk) else self.above

    def ancestors(self) -> Iterator[Chunk]:
        """From the parent up to depth 0."""
        at = self.parent
        while at is not None:
            yield at
            at = at.parent

    def children(self) -> Iterator[Chunk]:
        """The known chunks right below."""
        at = self.first_child
        while at is not None:
            following = at.after  # read first: the caller may remove `at`
            yield at
            at = following

    def __repr__(self) -> str:
        return f"Chunk({self.key.hex()[:12]}, depth={self.depth}, tokens={self.tokens}, state={self.state})"


class Index:
    """All known chunks. Not thread-safe: the cache's lock guards it."""

    def __init__(self) -> None:
        self._chunks: dict[ChunkKey, Chunk] = {}
        self._by_blocks: Any = SortedKeyList(key=attrgetter("block_keys"))

    def __len__(self) -> int:
        return len(self._chunks)

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks.values())

    def get(self, key: ChunkKey) -> Chunk | None:
        """The chunk of this key, if known."""
        return self._chunks.get(key)

    def add(self, chunk: Chunk) -> None:
        """Make a chunk known; its key must not be, its parent must."""
        self._chunks[chunk.key] = chunk
        self._by_blocks.add(chunk)
        _link(chunk)

    def add_all(self, chunks: Iterable[Chunk]) -> None:
        """Like `add` for many at once, sorted in one go."""
        fresh = list(chunks)
        self._chunks.update((chunk.key, chunk) for chunk in fresh)
        self._by_blocks.update(fresh)
        for chunk in fresh:
            _link(chunk)

    def remove(self, chunk: Chunk) -> None:
        """Forget a chunk; it must have no children."""
        if self._chunks.pop(chunk.key, None) is not None:
            self._by_blocks.remove(chunk)
            _unlink(chunk)

    def subtree(self, chunk: Chunk) -> list[Chunk]:
        """The chunk and all its descendants, children before their parents."""
        order = [chunk]
        for at in order:
            order.extend(at.children())
        order.reverse()
        return order

    def run(self, keys: list[ChunkKey], start: int, is_good: Callable[[Chunk], bool]) -> list[Chunk]:
        """The chunks of `keys[start:]` up to the first that is unknown or not good."""
        found: list[Chunk] = []
        get = self._chunks.get
        for i in range(start, len(keys)):
            chunk = get(keys[i])
            if chunk is None or not is_good(chunk):
                break
            found.append(chunk)
        return found

    def longest_start(self, block_keys: bytes, is_good: Callable[[Chunk], bool]) -> tuple[Chunk | None, int]:
        """The chunk that shares the most leading blocks, and how many.

        Args:
            block_keys: Block keys of the prompt's next chunk, 16 bytes each.
            is_good: Which chunks count. Of equally long matches a READY one is preferred.
        """
        best: Chunk | None = None
        best_blocks = 0
        at = self._by_blocks.bisect_key_left(block_keys)
        size = len(self._by_blocks)
        left = range(at - 1, max(-1, at - 1 - _NEIGHBOURS), -1)
        right = range(at, min(size, at + _NEIGHBOURS))
        for side in (right, left):
            for position in side:
                chunk: Chunk = self._by_blocks[position]
                blocks = shared_blocks(chunk.block_keys, block_keys)
                if blocks == 0 or blocks < best_blocks:
                    break  # further away from here on it only gets shorter
                better = blocks > best_blocks or (best is not None and best.state != READY and chunk.state == READY)
                if better and is_good(chunk):
                    best, best_blocks = chunk, blocks
        return best, best_blocks

    def covered_by(self, chunk: Chunk) -> list[Chunk]:
        """Short siblings whose blocks are all among the first blocks of `chunk`."""
        covered: list[Chunk] = []
        at = self._by_blocks.bisect_key_left(chunk.block_keys)
        while at > 0:
            other: Chunk = self._by_blocks[at - 1]
            shared = shared_blocks(other.block_keys, chunk.block_keys)
            if shared == 0:
                break
            if shared * BLOCK_KEY_BYTES == len(other.block_keys):
                covered.append(other)
                at -= 1
            else:  # what is still to come has no more blocks than these: jump over all their siblings
                at = self._by_blocks.bisect_key_right(chunk.block_keys[: shared * BLOCK_KEY_BYTES])
        return covered


def _link(chunk: Chunk) -> None:
    parent = chunk.parent
    if parent is not None:
        chunk.after = parent.first_child
        if chunk.after is not None:
            chunk.after.before = chunk
        parent.first_child = chunk


def _unlink(chunk: Chunk) -> None:
    if chunk.before is not None:
        chunk.before.after = chunk.after
    elif chunk.parent is not None:
        chunk.parent.first_child = chunk.after
    if chunk.after is not None:
        chunk.after.before = chunk.before
    chunk.before = chunk.after = None


def shared_blocks(a: bytes, b: bytes) -> int:
    """Leading 16-byte block keys that two concatenations have in common."""
    low, high = 0, min(len(a), len(b)) // BLOCK_KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * BLOCK_KEY_BYTES] == b[: middle * BLOCK_KEY_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
