"""The CUDA half over a simulated device: words after events, blocks free at once, each report once."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvsnap.errors import KvsnapError
from kvsnap_connector.cuda_copier import StreamCopier, open_copier
from kvsnap_connector.cuda_worker import CudaWorkerHalf
from kvsnap_connector.metadata import CopyOp, StepPlan
from kvsnap_connector.pages import PagePlaces
from tests.connector.fakes import FakeRegion, op
from tests.connector.sim_device import SimDevice

LAYERS, BLOCKS, PAGE, CHUNK = 3, 16, 496, 4
BLOCK = LAYERS * PAGE


class Setup:
    """One rank with four slots; nothing happens on the device unless the test lets it."""

    def __init__(self, *, num_pieces: int = 3, num_pinned: int | None = None, **kwargs: Any) -> None:
        self.memory = torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8)
        self.places = PagePlaces(
            offsets=tuple(layer * BLOCKS * PAGE for layer in range(LAYERS)),
            block_strides=(PAGE,) * LAYERS,
            num_blocks=BLOCKS,
            page_bytes=PAGE,
        )
        self.device = SimDevice(self.memory, self.places, random.Random(1))
        self.region = FakeRegion(4, 8192)
        self.copier = StreamCopier(self.device, piece_bytes=CHUNK * BLOCK, num_pieces=num_pieces)
        self.half = CudaWorkerHalf(
            0,
            self.copier,
            self.region,
            blocks_per_chunk=CHUNK,
            is_writer=kwargs.pop("is_writer", True),
            num_pinned=num_pinned,
            starts_thread=kwargs.pop("starts_thread", False),
            **kwargs,
        )

    def blocks(self, ids: Sequence[int]) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self.memory[:, list(ids)].transpose(0, 1).reshape(-1).numpy().copy()
        return found

    def overwrite(self, block: int) -> None:
        """What the engine computes next, in a block that was given to somebody else."""
        self.device.compute.add(lambda: self.memory[:, block].fill_(7))


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.delenv("KVSNAP_STRICT", raising=False)
    return Setup()


# -- stores --------------------------------------------------------------------------


def test_a_store_has_its_word_only_after_its_bytes(setup: Setup) -> None:
    """Invariant 1: the scheduler's threads take the word for the bytes, without any step of the engine."""
    expected = setup.blocks([3, 5])
    setup.half.store(StepPlan(seq=1, stores=[op()]))

    while setup.device.run_one():
        setup.half.poll()
        if setup.region.completed:
            assert np.array_equal(setup.region.memory[0][: 2 * BLOCK], expected)
    setup.half.poll()

    assert setup.region.completed == [(0, 1, True)]
    assert (setup.region.memory[0][2 * BLOCK : 4096] == 0).all(), "padding is zeroed"
    assert (setup.region.memory[0][4096:] == 0xEE).all()
    assert setup.half.take_stats()["worker_store_bytes"] == 2 * BLOCK


def test_blocks_may_be_written_again_at_once(setup: Setup) -> None:
    """B.4: no block is held; what the engine queues after the hook comes after the gather."""
    expected = setup.blocks([3, 5])

    setup.half.store(StepPlan(seq=1, stores=[op()]))
    setup.overwrite(3)
    setup.overwrite(5)
    setup.device.run_all()
    setup.half.poll()

    assert np.array_equal(setup.region.memory[0][: 2 * BLOCK], expected)


def test_a_store_of_later_blocks_leaves_the_earlier_ones(setup: Setup) -> None:
    expected = setup.blocks([3, 5])

    setup.half.store(StepPlan(seq=1, stores=[op(first_block=1)]))
    setup.device.run_all()
    setup.half.poll()

    assert (setup.region.memory[0][:BLOCK] == 0xEE).all()
    assert np.array_equal(setup.region.memory[0][BLOCK : 3 * BLOCK], expected)
    assert (setup.region.memory[0][3 * BLOCK : 8192] == 0).all()


def test_a_plan_is_stored_once(setup: Setup) -> None:
    """A step may be played twice (speculative decoding, model runner V2's late hooks)."""
    plan = StepPlan(seq=1, stores=[op()])

    setup.half.store(plan)
    setup.overwrite(3)
    setup.half.store(plan)
    setup.device.run_all()
    setup.half.poll()

    assert setup.region.completed == [(0, 1, True)]


def test_nothing_is_stored_after_blocks_that_were_promised_and_not_filled(setup: Setup) -> None:
    """The connector's own account found them; no load of this half failed."""
    setup.half.distrust(1)
    setup.half.store(StepPlan(seq=1, acked=0, stores=[op(0)]))
    setup.half.store(StepPlan(seq=2, acked=1, stores=[op(1)]))
    setup.device.run_all()
    setup.half.poll()

    assert setup.region.completed == [(0, 1, False), (1, 1, True)]


def test_a_full_ring_refuses_and_never_waits(setup: Setup) -> None:
    """Invariant 7: the fourth of three is a miss later."""
    setup.half.store(StepPlan(seq=1, stores=[op(slot, [slot + 1]) for slot in range(4)]))

    assert setup.region.completed == [(3, 1, False)]
    assert setup.half.take_stats()["worker_stores_refused"] == 1

    setup.device.run_all()
    setup.half.poll()
    setup.half.store(StepPlan(seq=2, stores=[op(3, [9])]))
    setup.device.run_all()
    setup.half.poll()

    assert setup.region.completed == [(3, 1, False), (0, 1, True), (1, 1, True), (2, 1, True), (3, 1, True)]


def test_a_store_for_another_generation_is_not_begun(setup: Setup) -> None:
    setup.half.store(StepPlan(seq=1, stores=[op(generation=2)]))
    setup.device.run_all()
    setup.half.poll()

    assert (setup.region.memory == 0xEE).all()
    assert setup.region.completed == []


def test_a_slot_that_changes_hands_under_a_copy_gets_no_word(setup: Setup) -> None:
    """A15"""
    setup.half.store(StepPlan(seq=1, stores=[op()]))
    setup.region.generations[0] += 1
    setup.device.run_all()
    setup.half.poll()

    assert setup.region.completed == []
    report = setup.half.take_report()
    assert report is not None
    assert report.failed == [(0, 1)]


def test_a_slot_that_was_cleared_under_a_copy_comes_back(setup: Setup) -> None:
    setup.half.store(StepPlan(seq=1, stores=[op()]))
    setup.region.filling[0] = False
    setup.device.run_all()
    setup.half.poll()

    assert setup.region.completed == [(0, 1, False)]


@pytest.mark.parametrize("bad", [op(blocks=[3, 0]), op(blocks=[BLOCKS]), op(first_block=3)])
def test_a_store_that_makes_no_sense_touches_nothing(setup: Setup, bad: CopyOp) -> None:
    setup.half.store(StepPlan(seq=1, stores=[bad]))
    setup.device.run_all()

    assert (setup.region.memory == 0xEE).all()
    assert setup.region.completed == [(0, 1, False)]


def test_a_rank_with_a_replica_only_completes() -> None:
    """MLA"""
    setup = Setup(is_writer=False)

    setup.half.store(StepPlan(seq=1, stores=[op()]))

    assert setup.region.completed == [(0, 1, True)]
    assert (setup.region.memory == 0xEE).all()
    assert setup.half.is_idle


# -- loads ---------------------------------------------------------------------------


def test_an_asynchronous_load_is_reported_once_and_after_its_bytes(setup: Setup) -> None:
    """B02; `finished_recving` is the engine's leave to compute on the blocks."""
    chunk = setup.region.memory[1] = np.random.default_rng(2).integers(0, 256, size=8192, dtype=np.uint8)
    plan = StepPlan(seq=1, async_loads={"a": [op(1, [9, 4], first_block=1), op(1, [7])], "b": []})

    setup.half.load(plan)
    setup.half.load(plan)

    assert setup.half.take_received() == {"b"}
    received = 0
    while setup.device.run_one():
        got = setup.half.take_received()
        if got:
            assert np.array_equal(setup.blocks([9, 4, 7]), np.concatenate([chunk[BLOCK : 3 * BLOCK], chunk[:BLOCK]]))
            assert setup.region.loads_done == 1
            received += 1
    received += bool(setup.half.take_received())
    assert received == 1
    assert setup.half.take_failed_blocks() == set()


def test_a_load_for_another_generation_is_not_begun(setup: Setup) -> None:
    before = setup.memory.clone()

    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9], generation=2)]}))

    assert setup.half.take_received() == {"a"}
    assert setup.half.take_failed_blocks() == {9}
    setup.device.run_all()
    assert torch.equal(setup.memory, before)


def test_a_load_waits_for_what_the_engine_has_queued(setup: Setup) -> None:
    """B.4: new blocks may still be zeroed or written by their last owner's step."""
    chunk = setup.region.memory[1] = np.random.default_rng(2).integers(0, 256, size=8192, dtype=np.uint8)
    setup.overwrite(9)

    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9])]}))
    setup.device.run_all()

    assert np.array_equal(setup.blocks([9]), chunk[:BLOCK])


def test_a_synchronous_load_comes_before_the_forward_pass(setup: Setup) -> None:
    """Model runner V1: the step that was just scheduled reads the blocks."""
    chunk = setup.region.memory[1] = np.random.default_rng(2).integers(0, 256, size=8192, dtype=np.uint8)
    seen: dict[str, np.ndarray[Any, Any]] = {}

    setup.half.load(StepPlan(seq=1, loads=[op(1, [9]), op(1, [4], first_block=1)]))
    setup.device.compute.add(lambda: seen.update(blocks=setup.blocks([9, 4])))
    setup.device.run_all()

    assert np.array_equal(seen["blocks"], chunk[: 2 * BLOCK])


def test_a_slot_stays_pinned_until_all_earlier_loads_are_over(setup: Setup) -> None:
    """Plans end in order: `loads_done` of a later one frees the slots of the earlier ones too."""
    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9])]}))
    setup.half.load(StepPlan(seq=2))
    setup.half.refuse(StepPlan(seq=3, loads=[op(2, [4])]))

    assert setup.region.loads_done == 0

    setup.device.run_all()
    setup.half.poll()

    assert setup.region.loads_done == 3


def test_a_slot_that_changes_under_a_load_is_a_load_error(setup: Setup) -> None:
    """A16"""
    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9, 4])], "b": [op(2, [7], generation=5)]}))
    setup.region.generations[1] += 1
    setup.device.run_all()

    assert setup.half.take_received() == {"a", "b"}
    assert setup.half.take_failed_blocks() == {9, 4, 7}
    report = setup.half.take_report()
    assert report is not None
    assert report.lost_loads


def test_what_was_computed_from_a_lost_load_is_not_kept(setup: Setup) -> None:
    """Invariant 1: the load turned out bad only after the step that read it had stored its result."""
    setup.half.load(StepPlan(seq=1, loads=[op(1, [9])]))
    setup.half.store(StepPlan(seq=1, stores=[op(0, [3])]))
    setup.half.store(StepPlan(seq=2, acked=0, stores=[op(2, [4])]))
    setup.region.generations[1] += 1
    setup.device.run_all()
    setup.half.poll()
    setup.half.store(StepPlan(seq=3, acked=0, stores=[op(3, [5])]))
    setup.half.store(StepPlan(seq=4, acked=1, stores=[op(3, [5])]))
    setup.device.run_all()
    setup.half.poll()

    assert setup.region.completed == [(0, 1, False), (2, 1, False), (3, 1, False), (3, 1, True)]
    assert setup.half._lost_seqs == [], "no list that grows"


def test_a_slow_store_is_not_kept_because_the_scheduler_knows_by_now(setup: Setup) -> None:
    """Invariant 1: what counts is what it knew when it planned the store, not what it knows when the copy ends."""
    setup.half.load(StepPlan(seq=1, loads=[op(1, [9])]))
    setup.half.store(StepPlan(seq=2, acked=0, stores=[op(2, [4])]))
    setup.region.generations[1] += 1
    load, store = setup.half._loads[0], setup.half._stores[0]
    assert load.event is not None
    load.event.wait()
    store.event, late = None, store.event
    setup.half.poll()
    assert setup.half._lost_seqs == [1]

    setup.half.store(StepPlan(seq=3, acked=2, stores=[op(3, [5])]))
    store.event = late
    setup.device.run_all()
    setup.half.poll()

    assert setup.region.completed == [(2, 1, False), (3, 1, True)]


def test_an_old_failure_casts_no_doubt_on_what_was_planned_after_it(setup: Setup) -> None:
    """And one that comes later casts none on what came before it."""
    setup.half.load(StepPlan(seq=1, loads=[op(1, [9])]))
    setup.half.store(StepPlan(seq=1, stores=[op(0, [3])]))
    first = setup.half._stores[0]
    first.event, late = None, first.event
    setup.device.run_all()
    setup.half.poll()
    setup.half.load(StepPlan(seq=2, acked=1, loads=[op(2, [8])]))
    setup.region.generations[2] += 1
    setup.device.run_all()
    setup.half.poll()
    first.event = late
    setup.half.poll()

    assert setup.region.completed == [(0, 1, True)]


# -- pageable memory, and the thread -------------------------------------------------


def test_pageable_slots_are_copied_by_the_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of pageable memory blocks its caller until the whole forward pass is over."""
    setup = Setup(num_pinned=1)
    touched: list[int] = []

    def noting(name: str) -> None:
        original = getattr(setup.device, name)

        def note(*args: Any) -> None:
            area = next(arg for arg in args if isinstance(arg, np.ndarray))
            offset = area.ctypes.data - setup.region.memory.ctypes.data
            touched.append(offset // setup.region.stride)
            original(*args)

        monkeypatch.setattr(setup.device, name, note)

    noting("copy_in")
    noting("copy_out")
    setup.half.store(StepPlan(seq=1, stores=[op(0), op(1)]))
    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1)]}))

    assert touched == [0]
    assert not setup.half.move_one(), "the forward pass is not over"

    setup.device.run_all()
    while setup.half.move_one():
        pass
    assert sorted(touched) == [0, 1, 1]


def test_pageable_copies_arrive_like_others() -> None:
    setup = Setup(num_pinned=0)
    expected = setup.blocks([3, 5])
    chunk = setup.region.memory[1] = np.random.default_rng(2).integers(0, 256, size=8192, dtype=np.uint8)

    setup.half.store(StepPlan(seq=1, stores=[op()]))
    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9])]}))
    received: set[str] = set()
    for _ in range(3):
        setup.device.run_all()
        received |= setup.half.take_received()
        setup.half.move_one()

    assert setup.region.completed == [(0, 1, True)]
    assert np.array_equal(setup.region.memory[0][: 2 * BLOCK], expected)
    assert np.array_equal(setup.blocks([9]), chunk[:BLOCK])
    assert received == {"a"}


def test_nothing_but_the_hook_writes_blocks_where_they_may_be_unmapped() -> None:
    """Trap 26: in vLLM 0.32 sleep comes without a word."""
    setup = Setup(num_pinned=0, may_defer_loads=False)

    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9])]}))
    setup.device.run_all()

    assert setup.half.take_received() == {"a"}


def test_an_idle_engines_words_are_written_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine calls no hook."""
    setup = Setup(starts_thread=True, num_pinned=1)
    entered: list[str] = []
    monkeypatch.setattr(setup.device, "enter_thread", lambda: entered.append(threading.current_thread().name))
    expected = setup.blocks([3, 5])

    for seq in (1, 2):
        setup.half.store(StepPlan(seq=seq, acked=seq, stores=[op(0), op(1)]))
        deadline = time.monotonic() + 30
        while not setup.half.is_idle and time.monotonic() < deadline:
            setup.device.run(100)  # not `run_all`: the thread adds to the streams meanwhile
            time.sleep(0.001)
        assert setup.half.is_idle
        assert sorted(setup.region.completed) == [(0, 1, True), (1, 1, True)]
        setup.region.completed.clear()
        time.sleep(0.05)  # the thread waits to be told
    setup.half.close()
    assert entered == ["kvsnap-copies"], "a thread begins on device 0"
    assert np.array_equal(setup.region.memory[1][: 2 * BLOCK], expected)
    assert setup.region.is_closed


# -- faults, sleep, end --------------------------------------------------------------


@pytest.mark.parametrize("what", ["gather", "copy_out"])
def test_a_store_that_the_device_refuses_fails_alone(setup: Setup, what: str) -> None:
    setup.device.fails = lambda name: name == what
    setup.half.store(StepPlan(seq=1, stores=[op(0)]))
    setup.half.poll()
    setup.device.fails = lambda name: False
    for slot in (1, 2, 3):
        setup.half.store(StepPlan(seq=1 + slot, stores=[op(slot)]))
    setup.device.run_all()
    setup.half.poll()

    assert setup.region.completed == [(0, 1, False), (1, 1, True), (2, 1, True), (3, 1, True)], "no piece is lost"


@pytest.mark.parametrize("what", ["copy_in", "scatter"])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_load_that_fails_half_way_is_reported_when_nothing_moves_any_more(what: str, is_async: bool) -> None:
    """A.9: a cancelled load is reported only after nothing writes its blocks."""
    setup = Setup()
    setup.device.fails = lambda name: name == what
    loads = {"async_loads": {"a": [op(1, [9])]}} if is_async else {"loads": [op(1, [9])]}

    setup.half.load(StepPlan(seq=1, **loads))

    assert setup.half.take_received() == ({"a"} if is_async else set())
    assert setup.half.take_failed_blocks() == {9}
    assert setup.region.loads_done == 1
    assert not any(stream.work for stream in setup.device.streams[1:])


def _refuse(*args: Any) -> Any:
    raise RuntimeError("the device refused")


def test_a_compute_stream_that_cannot_be_marked_costs_one_step(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(setup.copier, "mark", _refuse)
        setup.half.load(StepPlan(seq=1, async_loads={"a": [op(3, [9])]}))
        setup.half.store(StepPlan(seq=1, acked=1, stores=[op(slot) for slot in range(3)]))
    assert setup.half.take_received() == {"a"}
    assert setup.half.take_failed_blocks() == {9}
    assert setup.region.completed == [(slot, 1, False) for slot in range(3)]
    assert len(setup.copier._free) == 3, "no piece is lost"


def test_a_load_that_the_forward_pass_cannot_wait_for_is_an_error(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward pass may run before it, so the engine must compute those blocks."""
    monkeypatch.setattr(setup.copier, "hold_compute", _refuse)

    setup.half.load(StepPlan(seq=1, loads=[op(1, [9])]))
    setup.half.store(StepPlan(seq=1, stores=[op(0, [3])]))
    setup.device.run_all()
    setup.half.poll()

    assert setup.half.take_failed_blocks() == {9}
    assert setup.region.completed == [(0, 1, False)]


@pytest.mark.parametrize("is_store", [True, False])
def test_a_copy_that_fails_on_a_device_that_is_gone_is_never_reported(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, is_store: bool
) -> None:
    """Part of it may be queued, and nobody can say when that ends."""
    setup.device.fails = lambda name: name in {"copy_out", "scatter"}
    monkeypatch.setattr(setup.copier, "quiesce", _refuse)

    if is_store:
        setup.half.store(StepPlan(seq=1, stores=[op(0)]))
    else:
        setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9])]}))
    setup.device.run_all()

    assert setup.half.take_received() == set()
    assert setup.region.completed == []
    assert setup.region.loads_done == 0


def test_a_pageable_copy_that_failed_is_not_tried_again() -> None:
    setup = Setup(num_pinned=0)
    setup.half.store(StepPlan(seq=1, stores=[op(0)]))
    setup.device.run_all()
    setup.device.fails = lambda name: name == "copy_out"

    assert setup.half.move_one()
    assert not setup.half.move_one()
    setup.half.poll()
    assert setup.region.completed == [(0, 1, False)]


def test_nothing_is_under_way_across_sleep(setup: Setup) -> None:
    """0.33: blocks are unmapped between `unregister_kv_caches` and `restore_kv_caches`."""
    setup.half.store(StepPlan(seq=1, stores=[op(0)]))
    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9])]}))
    setup.device.run_all()

    setup.half.pause()

    assert setup.half.is_idle
    assert setup.region.completed == [(0, 1, True)]
    setup.half.load(StepPlan(seq=2, async_loads={"b": [op(1, [8])]}))
    setup.half.store(StepPlan(seq=2, acked=2, stores=[op(2)]))
    assert setup.half.take_received() == {"a", "b"}
    assert setup.half.take_failed_blocks() == {8}
    assert setup.region.completed[1:] == [(2, 1, False)]

    setup.half.resume(StreamCopier(setup.device, piece_bytes=CHUNK * BLOCK, num_pieces=1))
    setup.half.store(StepPlan(seq=3, acked=3, stores=[op(3)]))
    setup.device.run_all()
    setup.half.poll()
    assert setup.region.completed[2:] == [(3, 1, True)]


def test_staging_is_given_back_for_sleep() -> None:
    """All of it, or vLLM's sleep frees so much less."""
    buffers: list[weakref.ref[torch.Tensor]] = []

    class Noting(SimDevice):
        def buffer(self, nbytes: int) -> torch.Tensor:
            buffer = super().buffer(nbytes)
            buffers.append(weakref.ref(buffer))
            return buffer

    setup = Setup()
    device = Noting(setup.memory, setup.places, random.Random(1))
    half = CudaWorkerHalf(
        0,
        StreamCopier(device, piece_bytes=CHUNK * BLOCK, num_pieces=3),
        setup.region,
        blocks_per_chunk=CHUNK,
        is_writer=True,
        starts_thread=False,
    )
    half.store(StepPlan(seq=1, stores=[op(0)]))
    half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9])]}))
    device.run_all()
    assert all(ref() is not None for ref in buffers)

    half.pause()
    gc.collect()

    assert [ref() for ref in buffers] == [None] * 6


class ShortestFirst(random.Random):
    """The stream with the most work goes on last: nobody waits for it by chance."""

    def choice(self, seq: Any) -> Any:
        return min(seq, key=lambda stream: len(stream.work))


@pytest.mark.parametrize("name", ["load", "load_slowly", "store", "store_slowly"])
def test_quiet_means_every_stream(name: str) -> None:
    """What `quiesce` forgets writes to a slot or a block that is reported as nobody's."""
    setup = Setup()
    device, copier = setup.device, setup.copier
    device._rng = ShortestFirst()
    area = setup.region.area(0)[: 2 * BLOCK]
    for _ in range(2):  # both lanes
        if name.startswith("load"):
            getattr(copier, name)(area, [3, 5], copier.mark())
        else:
            piece = copier.reserve()
            assert piece is not None
            getattr(copier, name)(piece, area, copier.mark())

    copier.quiesce()

    assert not any(stream.work for stream in device.streams[1:])


def test_other_blocks_after_sleep_are_refused(setup: Setup) -> None:
    setup.half.pause()
    places = PagePlaces(offsets=(0,), block_strides=(PAGE,), num_blocks=BLOCKS, page_bytes=PAGE)
    other = SimDevice(setup.memory, places, random.Random(1))

    with pytest.raises(KvsnapError, match=f"after sleep there are {BLOCKS} blocks of {PAGE} bytes, before it"):
        setup.half.resume(StreamCopier(other, piece_bytes=PAGE, num_pieces=1))
    fewer = SimDevice(setup.memory, replace(setup.places, num_blocks=BLOCKS - 1), random.Random(1))
    with pytest.raises(KvsnapError, match=f"after sleep there are {BLOCKS - 1} blocks of {BLOCK} bytes, before it"):
        setup.half.resume(StreamCopier(fewer, piece_bytes=BLOCK, num_pieces=1))


def test_sleep_does_not_come_before_a_copy_that_is_late(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The bound is for what may hang; staging that the device still writes to is never given back."""
    monkeypatch.setattr("kvsnap_connector.cuda_worker._DRAIN_SECONDS", 0.01)
    setup.half.store(StepPlan(seq=1, stores=[op(0)]))
    setup.half.load(StepPlan(seq=1, async_loads={"a": [op(1, [9])]}))

    with caplog.at_level(logging.ERROR):
        setup.half.pause()

    assert "copies did not end within" in caplog.text
    assert not any(stream.work for stream in setup.device.streams[1:])
    assert setup.half.take_received() == {"a"}
    assert setup.region.completed == [(0, 1, True)]


def test_memory_is_unpinned_before_it_is_unmapped() -> None:
    """Else the driver keeps pages that belong to nobody."""
    was_mapped: list[bool] = []
    own: Setup = Setup(on_close=lambda: was_mapped.append(not own.region.is_closed))

    own.half.close()

    assert was_mapped == [True]
    assert own.region.is_closed


def test_the_mapping_stays_while_the_device_may_write_to_it(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 8: unmapped memory under a running copy ends the process, or writes into what comes next."""
    monkeypatch.setattr("kvsnap_connector.cuda_worker._CLOSE_SECONDS", 0.01)
    setup.half.store(StepPlan(seq=1, stores=[op(0)]))

    setup.half.close()

    assert not setup.region.is_closed


def test_a_device_that_is_gone_completes_nothing(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.half.store(StepPlan(seq=1, stores=[op(0)]))
    store = setup.half._stores[0]

    class Gone:
        def is_done(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        def wait(self) -> None:
            raise RuntimeError

    store.event = Gone()
    with caplog.at_level(logging.ERROR):
        setup.half.poll()
        setup.half.poll()

    assert setup.region.completed == []
    assert caplog.text.count("the device does not answer") == 1


# -- staging -------------------------------------------------------------------------


def test_staging_holds_a_step_and_leaves_memory_to_the_engine() -> None:
    setup = Setup()
    setup.device.memory = 4 << 30
    small = open_copier(setup.device, piece_bytes=1 << 20, step_bytes=8 << 20, most_bytes=1 << 30)
    assert small.num_pieces == 9

    setup.device.memory = 600 << 20
    tight = open_copier(setup.device, piece_bytes=4 << 20, step_bytes=800 << 20, most_bytes=1 << 30)
    assert tight.num_pieces == 2

    setup.device.memory = 17 << 20
    with pytest.raises(torch.OutOfMemoryError):
        open_copier(setup.device, piece_bytes=16 << 20, step_bytes=800 << 20, most_bytes=1 << 30)


def test_staging_is_bounded() -> None:
    setup = Setup()
    setup.device.memory = 64 << 30

    copier = open_copier(setup.device, piece_bytes=1 << 20, step_bytes=8 << 30, most_bytes=32 << 20)

    assert copier.num_pieces == 29


def test_staging_that_the_device_has_no_room_for_is_halved() -> None:
    """`free_bytes` is a guess: memory is in pieces, and others take some."""
    setup = Setup()
    device = setup.device
    device.memory = 10 << 20
    device.free_bytes = lambda: 64 << 30  # type: ignore[method-assign]

    copier = open_copier(device, piece_bytes=1 << 20, step_bytes=15 << 20, most_bytes=1 << 30)

    assert copier.num_pieces == 4
