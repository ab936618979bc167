"""The worker half copies exactly what is still true, and reports the rest."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvsnap.errors import KvsnapError
from kvsnap_connector.copier import Bytes, CpuCopier
from kvsnap_connector.metadata import CopyOp, StepPlan
from kvsnap_connector.worker import WorkerHalf
from tests.connector.fakes import FakeRegion, make_pages, op

LAYERS, BLOCKS, PAGE, CHUNK = 3, 16, 500, 4
BLOCK = LAYERS * PAGE


class Setup:
    """One rank with a tier of four slots."""

    def __init__(self, *, is_writer: bool = True) -> None:
        self.memory: NDArray[Any]
        self.memory, pages = make_pages(LAYERS, BLOCKS, PAGE)
        self.region = FakeRegion(4, 8192)
        self.copier = CpuCopier(pages)
        self.half = WorkerHalf(0, self.copier, self.region, blocks_per_chunk=CHUNK, is_writer=is_writer)

    def blocks(self, ids: Sequence[int]) -> NDArray[Any]:
        return self.memory[:, list(ids)].transpose(1, 0, 2).reshape(-1).copy()


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_store_fills_the_slot_and_completes_it(setup: Setup) -> None:
    expected = setup.blocks([3, 5])

    setup.half.store(StepPlan(seq=1, stores=[op()]))

    assert np.array_equal(setup.region.memory[0][: 2 * BLOCK], expected)
    assert setup.region.completed == [(0, 1, True)]
    assert setup.half.take_report() is None


def test_the_padding_of_a_store_is_zero_when_it_is_completed(setup: Setup) -> None:
    """The checksum covers the padding; another chunk was in the slot before."""
    setup.half.store(StepPlan(seq=1, stores=[op(blocks=[3, 5])]))

    assert (setup.region.memory[0][2 * BLOCK : 4096] == 0).all()
    assert (setup.region.memory[0][4096:] == 0xEE).all()


def test_a_store_for_another_generation_writes_no_byte_and_no_word(setup: Setup) -> None:
    """Invariant 1: the slot belongs to another chunk by now."""
    setup.half.store(StepPlan(seq=1, stores=[op(generation=2)]))

    assert (setup.region.memory == 0xEE).all()
    assert setup.region.completed == []
    report = setup.half.take_report()
    assert report is not None
    assert report.failed == [(0, 2)]


def test_a_slot_that_changes_hands_during_a_store_is_not_completed(setup: Setup) -> None:
    """A15: a copy that ran into a new owner's slot must not look like a chunk."""

    class Stealing(CpuCopier):
        def gather(self, block_ids: Sequence[int], area: Bytes) -> None:
            super().gather(block_ids, area)
            setup.region.generations[0] += 1

    _, pages = make_pages(LAYERS, BLOCKS, PAGE)
    half = WorkerHalf(0, Stealing(pages), setup.region, blocks_per_chunk=CHUNK, is_writer=True)

    half.store(StepPlan(seq=1, stores=[op()]))

    assert setup.region.completed == []
    assert half.take_report() is not None


def test_the_null_block_is_never_stored(setup: Setup) -> None:
    setup.half.store(StepPlan(seq=1, stores=[op(blocks=[3, 0])]))

    assert (setup.region.memory == 0xEE).all()
    assert setup.region.completed == [(0, 1, False)]


def test_a_copy_that_raises_is_a_failed_store(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSNAP_STRICT", raising=False)

    class Broken(CpuCopier):
        def gather(self, block_ids: Sequence[int], area: Bytes) -> None:
            raise OSError("no")

    _, pages = make_pages(LAYERS, BLOCKS, PAGE)
    half = WorkerHalf(0, Broken(pages), setup.region, blocks_per_chunk=CHUNK, is_writer=True)

    half.store(StepPlan(seq=1, stores=[op(0), op(1)]))

    assert setup.region.completed == [(0, 1, False), (1, 1, False)]


def test_a_rank_with_a_replica_only_completes() -> None:
    """MLA: the lowest rank writes the slice, all of them say when they are past the step."""
    setup = Setup(is_writer=False)

    setup.half.store(StepPlan(seq=1, stores=[op()]))

    assert (setup.region.memory == 0xEE).all()
    assert setup.region.completed == [(0, 1, True)]


def test_a_load_fills_the_blocks_from_the_middle_of_a_chunk(setup: Setup) -> None:
    chunk = np.random.default_rng(2).integers(0, 256, size=8192, dtype=np.uint8)
    setup.region.memory[1] = chunk
    untouched = setup.blocks([1, 2, 3])

    setup.half.load(StepPlan(seq=1, loads=[op(1, [9, 4], first_block=1)]))

    assert np.array_equal(setup.blocks([9, 4]), chunk[BLOCK : 3 * BLOCK])
    assert np.array_equal(setup.blocks([1, 2, 3]), untouched)
    assert setup.region.loads_done == 1
    assert setup.half.take_failed_blocks() == set()


def test_a_load_of_another_generation_touches_no_block_and_reports_them(setup: Setup) -> None:
    """A16: lookup promised, eviction came before the load."""
    before = setup.memory.copy()

    setup.half.load(StepPlan(seq=4, loads=[op(1, [9, 4], generation=3), op(2, [7])]))

    assert np.array_equal(setup.blocks([9, 4]), before[:, [9, 4]].transpose(1, 0, 2).reshape(-1))
    assert setup.half.take_failed_blocks() == {9, 4}
    assert setup.half.take_failed_blocks() == set()
    assert setup.region.loads_done == 4


def test_a_slot_that_changes_during_a_load_is_a_load_error(setup: Setup) -> None:
    class Stealing(CpuCopier):
        def scatter(self, area: Bytes, block_ids: Sequence[int]) -> None:
            super().scatter(area, block_ids)
            setup.region.generations[1] += 1

    _, pages = make_pages(LAYERS, BLOCKS, PAGE)
    half = WorkerHalf(0, Stealing(pages), setup.region, blocks_per_chunk=CHUNK, is_writer=True)

    half.load(StepPlan(seq=1, loads=[op(1, [9, 4])]))

    assert half.take_failed_blocks() == {9, 4}


@pytest.mark.parametrize(
    "bad",
    [
        op(4),
        op(-1),
        op(blocks=[0]),
        op(blocks=[BLOCKS]),
        op(blocks=[]),
        op(blocks=[1, 2], first_block=3),
        op(first_block=-1),
    ],
    ids=["slot beyond", "slot below", "null block", "block beyond", "nothing", "chunk beyond", "chunk below"],
)
def test_a_load_that_makes_no_sense_copies_nothing(setup: Setup, bad: CopyOp) -> None:
    before = setup.memory.copy()

    setup.half.load(StepPlan(seq=1, loads=[bad]))

    assert np.array_equal(setup.memory, before)
    assert setup.half.take_failed_blocks() == set(bad.block_ids)


def test_a_slot_that_was_never_used_is_not_loaded(setup: Setup) -> None:
    """Invariant 1: a fresh slot has generation 0, and so has a load that was planned for nothing."""
    setup.region.generations[1] = 0

    setup.half.load(StepPlan(seq=1, loads=[op(1, [9], generation=0)]))

    assert setup.half.take_failed_blocks() == {9}


def test_an_asynchronous_load_is_reported_once_even_if_it_failed(setup: Setup) -> None:
    """B02: exactly one completion per started transfer."""
    plan = StepPlan(seq=1, async_loads={"a": [op(1, [9])], "b": [op(2, [4], generation=9)]})

    setup.half.load(plan)
    setup.half.load(plan)

    assert setup.half.take_received() == {"a", "b"}
    assert setup.half.take_received() == set()
    assert setup.half.take_failed_blocks() == {4}


def test_a_plan_is_carried_out_once(setup: Setup) -> None:
    """Runners differ in when they call; a store repeated after a reuse would copy another chunk's blocks."""
    plan = StepPlan(seq=1, stores=[op()])

    setup.half.store(plan)
    setup.half.store(plan)

    assert setup.region.completed == [(0, 1, True)]


def test_a_refused_plan_is_answered_in_full(setup: Setup) -> None:
    plan = StepPlan(seq=1, loads=[op(1, [9])], stores=[op(0), op(2, generation=5)], async_loads={"a": [op(3, [4])]})

    setup.half.refuse(plan)

    assert setup.half.take_failed_blocks() == {9, 4}
    assert setup.half.take_received() == {"a"}
    assert setup.region.completed == [(0, 1, False)]
    assert setup.region.loads_done == 1


def test_the_numbers_are_bytes_of_this_rank(setup: Setup) -> None:
    setup.half.store(StepPlan(seq=1, stores=[op()]))
    setup.half.load(StepPlan(seq=2, loads=[op(blocks=[7])]))

    stats = setup.half.take_stats()

    assert stats["worker_store_bytes"] == 2 * BLOCK
    assert stats["worker_load_bytes"] == BLOCK
    assert setup.half.take_stats() == {}


def test_the_mapping_is_faulted_in_by_a_thread_of_its_own(setup: Setup) -> None:
    setup.half.start_prefault()
    setup.half.close()

    assert setup.region.prefaulted
    assert setup.region.is_closed
    assert not [thread for thread in threading.enumerate() if thread.name == "kvsnap-prefault"]


def test_a_tier_for_smaller_chunks_is_refused() -> None:
    _, pages = make_pages(LAYERS, BLOCKS, PAGE)

    with pytest.raises(KvsnapError, match="a chunk needs 6000 bytes of rank 0, a slot has 4096"):
        WorkerHalf(0, CpuCopier(pages), FakeRegion(4, 4096), blocks_per_chunk=CHUNK, is_writer=True)
