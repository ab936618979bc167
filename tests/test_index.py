"""The index: the longest match whatever the number of siblings, in little memory."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvsnap.index import ABSENT, FILLING, READY, Chunk, Index, shared_blocks
from kvsnap.keys import ChunkKey, KeyChain

ROOT = ChunkKey(bytes(32))
_numbers = iter(range(1 << 60))


def new_key() -> ChunkKey:
    return ChunkKey(next(_numbers).to_bytes(32, "big"))


def block_keys(path: bytes, parent: bytes = bytes(32)) -> bytes:
    """As real ones: block j's key names the parent and everything up to j, here by one letter a block."""
    import hashlib

    return b"".join(hashlib.sha256(parent + path[: j + 1]).digest()[:16] for j in range(len(path)))


def make(path: bytes, parent: Chunk | ChunkKey = ROOT, state: int = READY) -> Chunk:
    above = parent.key if isinstance(parent, Chunk) else parent
    depth = parent.depth + 1 if isinstance(parent, Chunk) else 0
    chunk = Chunk(new_key(), parent, depth, 16 * len(path), "", block_keys(path, above))
    chunk.state = state
    return chunk


def anything(chunk: Chunk) -> bool:
    return True


paths = st.lists(st.sampled_from(b"ab"), min_size=1, max_size=6).map(bytes)


class TestLongestStart:
    @given(st.lists(paths, max_size=40, unique=True), paths)
    def test_equals_a_brute_force(self, siblings: list[bytes], prompt: bytes) -> None:
        index = Index()
        index.add_all(make(path) for path in siblings)
        wanted = block_keys(prompt)

        chunk, blocks = index.longest_start(wanted, anything)

        best = max((shared_blocks(other.block_keys, wanted) for other in index), default=0)
        assert blocks == best
        assert (chunk is None) == (best == 0)
        if chunk is not None:
            assert chunk.block_keys[: 16 * blocks] == wanted[: 16 * blocks]

    @given(
        st.lists(st.tuples(paths, st.sampled_from([ABSENT, FILLING, READY])), max_size=12, unique_by=lambda p: p[0]),
        paths,
    )
    def test_what_is_not_good_is_never_returned(self, siblings: list[tuple[bytes, int]], prompt: bytes) -> None:
        """Invariant 1: also where the best match is one that does not count."""
        index = Index()
        for path, state in siblings:
            index.add(make(path, state=state))
        wanted = block_keys(prompt)

        chunk, blocks = index.longest_start(wanted, lambda c: c.state == READY)

        assert chunk is None or chunk.state == READY
        assert blocks == (shared_blocks(chunk.block_keys, wanted) if chunk else 0)

    def test_chunks_below_another_parent_never_match(self) -> None:
        index = Index()
        index.add(make(b"aaaa", ChunkKey(b"p" * 32)))

        assert index.longest_start(block_keys(b"aaaa"), anything) == (None, 0)

    def test_of_equal_matches_the_ready_one_is_taken(self) -> None:
        """A hit in DRAM needs no wait for the disk."""
        index = Index()
        cold = [make(b"aab" + bytes([letter]), state=ABSENT) for letter in b"xyz"]
        hot = make(b"aac")
        index.add_all([*cold, hot])

        chunk, blocks = index.longest_start(block_keys(b"aa"), anything)

        assert (chunk, blocks) == (hot, 2)

    def test_many_siblings_cost_no_time(self) -> None:
        """A system prompt with 20,000 continuations: a look-up stays a binary search."""
        rng = random.Random(1)
        index = Index()
        index.add_all(make(b"sys" + rng.randbytes(5)) for _ in range(20_000))
        wanted = [block_keys(b"sys" + rng.randbytes(5)) for _ in range(200)]

        started = time.perf_counter()
        lengths = [index.longest_start(keys, anything)[1] for keys in wanted]
        took = time.perf_counter() - started

        assert min(lengths) >= 3
        assert took / len(wanted) < 0.002  # a walk over the siblings would take 10 ms


class TestCoveredBy:
    @given(st.lists(paths, max_size=40, unique=True), paths)
    def test_equals_a_brute_force(self, siblings: list[bytes], path: bytes) -> None:
        """However many other siblings lie between a short chunk and the longer one."""
        index = Index()
        index.add_all(make(other) for other in siblings if other != path)
        chunk = make(path)
        index.add(chunk)

        covered = index.covered_by(chunk)

        assert len(set(covered)) == len(covered)
        assert set(covered) == {c for c in index if c is not chunk and chunk.block_keys.startswith(c.block_keys)}

    def test_looks_past_many_siblings(self) -> None:
        index = Index()
        short = make(b"a")
        index.add_all([short, *(make(b"a" + bytes([letter]) + b"x") for letter in range(64))])
        chunk = make(b"azz")
        index.add(chunk)

        assert index.covered_by(chunk) == [short]


@given(st.binary(max_size=80), st.binary(max_size=80), st.integers(0, 5))
def test_shared_blocks_counts_whole_keys(a: bytes, b: bytes, common: int) -> None:
    head = bytes(range(16 * common))
    x, y = head + a, head + b
    expected = 0
    while expected < min(len(x), len(y)) // 16 and x[: 16 * expected + 16] == y[: 16 * expected + 16]:
        expected += 1

    assert shared_blocks(x, y) == expected


def test_run_ends_at_the_first_gap() -> None:
    index = Index()
    chain: list[Chunk] = []
    for _ in range(5):
        chain.append(make(b"aaaa", chain[-1] if chain else ROOT))
        index.add(chain[-1])
    keys = [chunk.key for chunk in chain]
    chain[3].state = FILLING

    assert index.run(keys, 0, lambda c: c.state == READY) == chain[:3]
    assert index.run(keys, 1, anything) == chain[1:]
    assert index.run([*keys[:2], new_key(), *keys[2:]], 0, anything) == chain[:2]
    assert index.run(keys, 9, anything) == []


class Family(RuleBasedStateMachine):
    """Children lists under random additions and removals, against plain dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index()
        self.model: dict[Chunk, Chunk | None] = {}

    chunks: Bundle[Chunk] = Bundle("chunks")

    @rule(target=chunks)
    def add_root(self) -> Chunk:
        return self._add(None)

    @rule(target=chunks, parent=chunks)
    def add_child(self, parent: Chunk) -> Chunk:
        return self._add(parent if parent in self.model else None)

    @rule(parent=chunks, count=st.integers(1, 4))
    def add_many(self, parent: Chunk, count: int) -> None:
        if parent in self.model:
            fresh = [make(b"ab", parent) for _ in range(count)]
            self.index.add_all(fresh)
            self.model.update(dict.fromkeys(fresh, parent))

    @rule(chunk=consumes(chunks))
    def remove_with_descendants(self, chunk: Chunk) -> None:
        if chunk in self.model:
            order = self.index.subtree(chunk)
            for below in order:
                self.index.remove(below)
                del self.model[below]

    @rule(chunk=consumes(chunks))
    def remove_leaf(self, chunk: Chunk) -> None:
        if chunk in self.model and chunk not in self.model.values():
            self.index.remove(chunk)
            self.index.remove(chunk)  # a second time does nothing
            del self.model[chunk]

    def _add(self, parent: Chunk | None) -> Chunk:
        chunk = make(b"ab", parent if parent is not None else ROOT)
        self.index.add(chunk)
        self.model[chunk] = parent
        return chunk

    @invariant()
    def same_family(self) -> None:
        assert set(self.index) == set(self.model)
        assert len(self.index) == len(self.model)
        for chunk in self.model:
            children = list(chunk.children())
            assert len(set(children)) == len(children)
            assert set(children) == {c for c, parent in self.model.items() if parent is chunk}
            assert list(chunk.ancestors()) == list(self._ancestors(chunk))
            assert self.index.get(chunk.key) is chunk
            order = self.index.subtree(chunk)
            assert order[-1] is chunk
            position = {c: i for i, c in enumerate(order)}
            assert all(position[c] < position[parent] for c in order if c is not chunk and (parent := c.parent))

    def _ancestors(self, chunk: Chunk) -> Iterator[Chunk]:
        above = self.model[chunk]
        while above is not None:
            yield above
            above = self.model[above]


Family.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFamily = Family.TestCase


def test_deep_subtree() -> None:
    """A million tokens are 4,000 chunks in one line: deeper than Python recurses."""
    index = Index()
    at: Chunk | ChunkKey = ROOT
    for _ in range(4000):
        at = make(b"a", at)
        index.add(at)

    (top,) = [chunk for chunk in index if chunk.depth == 0]
    order = index.subtree(top)

    assert [chunk.depth for chunk in order] == list(range(3999, -1, -1))


@pytest.mark.parametrize("bulk", [True, False])
def test_memory_per_chunk(bulk: bool) -> None:
    """A terabyte of cold chunks is a few million entries: below 1 KiB each, keys included, at 16 blocks."""
    count, depth = 2000, 50
    chains = []
    for number in range(count // depth):
        chain = KeyChain(new_key(), 256, 16)
        chain.extend([number * 7 + i for i in range(256 * depth)])
        chains.append(chain)

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    index = Index()
    fresh: list[Chunk] = []
    for chain in chains:
        above: Chunk | ChunkKey = ROOT
        for i in range(depth):
            chunk = Chunk(
                ChunkKey(bytes(bytearray(chain.keys[i]))), above, i, 256, "", chain.tail_block_keys(i, 1 << 40)
            )
            chunk.offset, chunk.last_use = 4096 * i + 8192, 1.5 + i
            chunk.shard, chunk.shard_xxh3 = "shard", random.Random(i).randbytes(16)
            fresh.append(chunk)
            above = chunk
            if not bulk:
                index.add(chunk)
    if bulk:
        index.add_all(fresh)
    per_chunk = (tracemalloc.get_traced_memory()[0] - before - 8 * count) / count
    tracemalloc.stop()

    assert len(index) == count
    assert per_chunk < 1024
