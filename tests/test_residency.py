"""Slots, pins and both tiers' closure, against a plain model."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvsnap.index import ABSENT, FILLING, READING, READY, Chunk
from kvsnap.keys import ChunkKey
from kvsnap.policy import FrequencyRecency
from kvsnap.residency import Residency

ROOT = ChunkKey(bytes(32))


def always(chunk: Chunk) -> bool:
    return True


class Machine(RuleBasedStateMachine):
    """Stores, promotions, pins, losses and evictions in random order.

    The model: for every slot, how many operations are on it (`ops`), and the chunks by
    key. Everything else is recomputed from the chunks after each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.clock = itertools.count(1)
        self.chunks: list[Chunk] = []
        self.busy: list[tuple[Chunk, int, int]] = []
        self.pins: list[int] = []
        self.promised: list[list[Chunk]] = []
        self.freed: list[int] = []

    @initialize(slots=st.integers(1, 6))
    def begin(self, slots: int) -> None:
        self.residency = Residency(slots, FrequencyRecency(), self.freed.append)
        self.generations = [0] * slots

    # -- helpers ---------------------------------------------------------------------

    def ops(self, slot: int) -> int:
        return sum(s == slot for _, s, _ in self.busy) + self.pins.count(slot)

    def in_dram(self) -> list[Chunk]:
        return [c for c in self.chunks if c.slot >= 0]

    def pick(self, data: st.DataObject, chunks: list[Chunk]) -> Chunk | None:
        return data.draw(st.sampled_from(chunks)) if chunks else None

    def take(self, droppable: set[Chunk]) -> int | None:
        """Take a slot and check it: nobody's, no operation on it, and the right victim."""
        leaves = [
            c
            for c in self.in_dram()
            if c.state == READY
            and c in droppable
            and not self.ops(c.slot)
            and not c.shields
            and not any(other.parent is c for other in self.in_dram())
        ]
        before = {c: c.slot for c in self.in_dram()}
        had_free = self.residency.num_free
        scores = {c: self.residency.score(c) for c in leaves}

        slot = self.residency.take_slot(lambda chunk: chunk in droppable)

        gone = [c for c in before if c.slot < 0]
        if had_free:
            assert gone == []
        elif leaves:
            assert [c in leaves for c in gone] == [True]
            assert scores[gone[0]] == min(scores.values())
            assert slot == before[gone[0]]
        else:
            assert slot is None
        if slot is not None:
            assert self.ops(slot) == 0
            assert all(c.slot != slot for c in self.chunks)
        return slot

    def occupy(self, chunk: Chunk, slot: int, state: int) -> None:
        self.generations[slot] += 1
        self.residency.occupy(chunk, slot, self.generations[slot], state)
        self.residency.begin_op(slot)
        self.busy.append((chunk, slot, self.generations[slot]))

    # -- what the cache does ---------------------------------------------------------

    @rule(data=st.data(), is_root=st.booleans(), all_droppable=st.booleans())
    def store(self, data: st.DataObject, is_root: bool, all_droppable: bool) -> None:
        above = None if is_root else self.pick(data, self.in_dram())
        droppable = {c for c in self.chunks if all_droppable or c.shard is not None}
        self.residency.shield([above] if above else [])
        slot = self.take(droppable)
        self.residency.unshield([above] if above else [])
        if slot is None:
            return
        key = ChunkKey(next(self.numbers).to_bytes(32, "big"))
        chunk = Chunk(key, above or ROOT, above.depth + 1 if above else 0, 16, "", key[16:])
        self.residency.index.add(chunk)
        chunk.last_use = float(next(self.clock))
        self.occupy(chunk, slot, FILLING)
        self.chunks.append(chunk)

    @rule(data=st.data())
    def promote(self, data: st.DataObject) -> None:
        cold = [
            c for c in self.chunks if c.state == ABSENT and c.shard is not None and (not c.parent or c.parent.slot >= 0)
        ]
        chunk = self.pick(data, cold)
        if chunk is None:
            return
        family = [chunk, *chunk.ancestors()]
        self.residency.shield(family)
        slot = self.take({c for c in self.chunks if c.shard is not None})
        if slot is not None:
            self.occupy(chunk, slot, READING)
        self.residency.unshield(family)

    @rule(number=st.integers(0, 9), good=st.booleans())
    @precondition(lambda self: self.busy)
    def end_copy(self, number: int, good: bool) -> None:
        chunk, slot, generation = self.busy.pop(number % len(self.busy))
        if chunk.slot == slot and chunk.generation == generation:
            if good:
                self.residency.ready(chunk)
            else:
                self.residency.vacate_subtree(chunk)
        self.residency.end_op(slot)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        chunk = self.pick(data, [c for c in self.in_dram() if c.state == READY])
        if chunk is not None:
            self.residency.begin_op(chunk.slot)
            self.pins.append(chunk.slot)

    @rule()
    @precondition(lambda self: self.pins)
    def unpin(self) -> None:
        self.residency.end_op(self.pins.pop())

    @rule(data=st.data(), hit=st.booleans())
    def touch(self, data: st.DataObject, hit: bool) -> None:
        chunk = self.pick(data, self.chunks)
        if chunk is not None:
            chunk.last_use = float(next(self.clock))
            chunk.hits += hit

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        ready = [c for c in self.in_dram() if c.state == READY and c.shard is None]
        chunk = self.pick(data, [c for c in ready if c.parent is None or c.parent.shard is not None])
        if chunk is not None:
            self.residency.put_on_disk(chunk, "shard", 4096, b"x" * 16)

    @rule(data=st.data())
    def lose_from_disk(self, data: st.DataObject) -> None:
        chunk = self.pick(data, [c for c in self.chunks if c.shard is not None])
        if chunk is not None:
            below = {c for c in self.chunks if c.shard is not None and (c is chunk or chunk in c.ancestors())}
            assert set(self.residency.drop_from_disk(chunk)) == below

    @rule(data=st.data())
    def lose_from_dram(self, data: st.DataObject) -> None:
        chunk = self.pick(data, self.in_dram())
        if chunk is not None:
            self.residency.vacate_subtree(chunk)

    @rule()
    def reset(self) -> None:
        before = len(self.in_dram())
        assert self.residency.vacate_all() == before
        assert self.in_dram() == []

    # -- what must hold after every step ---------------------------------------------

    @invariant()
    def tiers_are_prefix_closed(self) -> None:
        """Invariant 6, in each tier by itself."""
        for chunk in self.chunks:
            if chunk.parent is not None:
                assert chunk.slot < 0 or chunk.parent.slot >= 0
                assert chunk.shard is None or chunk.parent.shard is not None
            assert chunk.dram_children == sum(c.parent is chunk for c in self.in_dram())

    @invariant()
    def index_knows_exactly_what_is_somewhere(self) -> None:
        self.chunks = [c for c in self.chunks if c.slot >= 0 or c.shard is not None]
        assert set(self.residency.index) == set(self.chunks)
        assert set(self.residency.unsaved.values()) == {c for c in self.chunks if c.state == READY and c.shard is None}

    @invariant()
    def slots_add_up(self) -> None:
        """Invariant 7: free, used, and held only by an operation: each slot is one of them."""
        owners = {c.slot: c for c in self.in_dram()}
        assert len(owners) == len(self.in_dram())
        held = [s for s in range(self.residency.num_slots) if s not in owners and self.ops(s)]
        assert self.residency.num_free + len(owners) + len(held) == self.residency.num_slots
        for slot in range(self.residency.num_slots):
            assert self.residency.owner(slot) is owners.get(slot)
            assert self.residency.has_ops(slot) == (self.ops(slot) > 0)

    @invariant()
    def next_victims_are_told_without_taking_them(self) -> None:
        """Leaves before their parents, nothing pinned, and no change by the asking."""
        before = [(c, c.slot, c.state) for c in self.chunks]
        order = self.residency.coldest_first(99)

        assert len(set(order)) == len(order)
        position = {c: i for i, c in enumerate(order)}
        for chunk in order:
            assert chunk.state == READY
            assert not self.ops(chunk.slot)
            assert all(position[c] < position[chunk] for c in self.in_dram() if c.parent is chunk)
        assert [(c, c.slot, c.state) for c in self.chunks] == before

    def teardown(self) -> None:
        if not hasattr(self, "residency"):
            return
        for _, slot, _ in self.busy:
            self.residency.end_op(slot)
        for slot in self.pins:
            self.residency.end_op(slot)
        self.residency.vacate_all()
        taken = {self.residency.take_slot(always) for _ in range(self.residency.num_slots)}
        assert taken == set(range(self.residency.num_slots)), "a slot was lost for good, or is there twice"
        assert self.residency.take_slot(always) is None


Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestResidency = Machine.TestCase


def fill(residency: Residency, count: int, *, scores: list[float] | None = None) -> list[Chunk]:
    """Unrelated chunks in the first `count` slots."""
    chunks = []
    for number in range(count):
        key = ChunkKey((1000 + number).to_bytes(32, "big"))
        chunk = Chunk(key, ROOT, 0, 16, "", key[16:])
        chunk.last_use = scores[number] if scores else float(number)
        residency.index.add(chunk)
        slot = residency.take_slot(always)
        assert slot is not None
        residency.occupy(chunk, slot, 1, FILLING)
        residency.ready(chunk)
        chunks.append(chunk)
    return chunks


def test_one_undroppable_chunk_hides_no_other() -> None:
    """However often it was used while it waits to be written: the next clean one is found."""
    residency = Residency(3, FrequencyRecency(), lambda slot: None)
    dirty, *clean = fill(residency, 3)
    for _ in range(200):
        residency.begin_op(dirty.slot)
        residency.end_op(dirty.slot)
        residency.shield([dirty])
        residency.unshield([dirty])
    slot = clean[0].slot

    assert residency.take_slot(lambda chunk: chunk is not dirty) == slot


def test_next_victims_come_in_the_order_of_their_present_worth() -> None:
    residency = Residency(4, FrequencyRecency(), lambda slot: None)
    chunks = fill(residency, 4)
    chunks[0].last_use = 10.0

    assert residency.coldest_first(2) == chunks[1:3]
    assert residency.coldest_first(9) == [*chunks[1:], chunks[0]]


def test_covered_chunk_goes_first_as_long_as_its_cover_is_here() -> None:
    residency = Residency(4, FrequencyRecency(), lambda slot: None)
    a, short, cover, b = fill(residency, 4)
    residency.cover(short, cover)
    assert residency.coldest_first(1) == [short]

    residency.vacate(cover)

    assert residency.coldest_first(9) == [a, short, b]


def test_free_slots_are_told_to_the_tier() -> None:
    """The record must leave `valid` before the slot can be handed out again."""
    freed: list[int] = []
    residency = Residency(2, FrequencyRecency(), freed.append)
    (chunk,) = fill(residency, 1)
    slot = chunk.slot
    residency.begin_op(slot)

    residency.vacate(chunk)

    assert freed == [slot]
    assert residency.num_free == 1  # the other one
    residency.end_op(slot)
    assert residency.num_free == 2


def test_long_chain_goes_at_once() -> None:
    """A million tokens are 4,000 chunks in one line: deeper than Python recurses."""
    residency = Residency(1, FrequencyRecency(), lambda slot: None)
    above: Chunk | ChunkKey = ROOT
    chain = []
    for depth in range(4000):
        chunk = Chunk(ChunkKey(depth.to_bytes(32, "big")), above, depth, 16, "", b"k" * 16)
        residency.index.add(chunk)
        residency.put_on_disk(chunk, "shard", 0, b"")
        chain.append(chunk)
        above = chunk

    assert len(residency.drop_from_disk(chain[0])) == 4000
    assert len(residency.index) == 0
