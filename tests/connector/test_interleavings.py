"""Copies behind the engine's back, in every order that streams allow; and proof that the tests would notice.

Two plays, each a function of a seed. `play_half` drives the CUDA worker half alone, with
slots that change hands when they must not; `play_engine` drives both real halves through
vLLM's hooks, with two steps in flight. A mutation drops one wait or one check, and some
seed must fail.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvsnap_connector import cuda_worker
from kvsnap_connector.cuda_copier import StreamCopier
from kvsnap_connector.cuda_worker import CudaWorkerHalf
from kvsnap_connector.metadata import CopyOp, StepPlan
from tests.connector.fakes import FakeRegion
from tests.connector.test_cuda_worker import BLOCK, BLOCKS, CHUNK, Setup

pytestmark = pytest.mark.filterwarnings("ignore")

Bytes = np.ndarray[Any, Any]
SLOTS = 4


class HalfPlay:
    """One rank; the scheduler half is played by draws, and sometimes breaks its word about slots."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.setup = Setup(num_pieces=rng.choice([1, 2, 4]), num_pinned=rng.choice([None, None, 0, 2]))
        self.setup.device._rng = rng
        self.is_sync = rng.random() < 0.3
        self.region: FakeRegion = self.setup.region
        self.content: dict[int, Bytes] = {}
        """Bytes of a slot that may be loaded."""
        self.expected: dict[tuple[int, int], tuple[Bytes, int]] = {}
        """What a store must leave in (slot, generation), and from which byte padding is zero."""
        self.dead: set[int] = set()
        """Slots that were taken from under a copy; nobody looks at their bytes until all is quiet."""
        self.blocks: dict[int, Bytes] = {}
        """What the engine's queued work leaves in each block."""
        self.loading: dict[str, tuple[CopyOp, Bytes]] = {}
        self.pins: dict[int, int] = {}
        """Operation pins: a slot that a plan loads from is not reused before that plan's loads are over."""
        self.seq = 0
        for slot in range(SLOTS):
            self.refill(slot)
        for block in range(1, BLOCKS):
            self.compute(block)
        complete = self.region.complete

        def checked(slot: int, generation: int, *, ok: bool) -> None:
            if ok:
                assert self.region.may_fill(slot, generation), "a word for a slot that is somebody else's"
                wanted, end = self.expected[slot, generation]
                assert np.array_equal(self.region.memory[slot][: len(wanted)], wanted), "a word before its bytes"
                assert not self.region.memory[slot][len(wanted) : end].any(), "padding is not zero"
                self.content[slot] = self.region.memory[slot].copy()
            self.region.filling[slot] = False
            complete(slot, generation, ok=ok)

        self.region.complete = checked  # type: ignore[method-assign]

    def refill(self, slot: int) -> None:
        self.region.generations[slot] += 1
        self.region.filling[slot] = False
        self.region.memory[slot] = np.frombuffer(self.rng.randbytes(8192), dtype=np.uint8)
        self.content[slot] = self.region.memory[slot].copy()

    def compute(self, block: int) -> None:
        """The engine queues a kernel that writes a block."""
        content: Bytes = np.frombuffer(self.rng.randbytes(BLOCK), dtype=np.uint8)
        self.blocks[block] = content
        write = content.reshape(3, -1).copy()

        def kernel() -> None:
            self.setup.memory[:, block] = self.setup.memory.new_tensor(write)

        self.setup.device.compute.add(kernel)

    def step(self) -> None:
        rng, half = self.rng, self.setup.half
        self.seq += 1
        busy = {block for op, _ in self.loading.values() for block in op.block_ids}
        free = [block for block in self.blocks if block not in busy]
        rng.shuffle(free)
        plan = StepPlan(seq=self.seq, acked=self.seq - 1)
        good = [slot for slot in self.content if slot not in self.dead and not self.region.filling[slot]]
        for slot in rng.sample(good, min(len(good), rng.randrange(3))):
            if not free:
                break
            ids = [free.pop() for _ in range(rng.randint(1, min(CHUNK, max(1, len(free) // 3))))]
            first = rng.randint(0, CHUNK - len(ids))
            op = CopyOp(
                slot=slot,
                generation=self.region.generations[slot],
                first_block=first,
                block_ids=ids,
                request_id=f"r{self.seq}-{slot}",
            )
            wanted = self.content[slot][first * BLOCK : (first + len(ids)) * BLOCK].copy()
            if self.is_sync:
                plan.loads.append(op)
                for i, block in enumerate(ids):
                    self.blocks[block] = wanted[i * BLOCK : (i + 1) * BLOCK]
            else:
                plan.async_loads[op.request_id] = [op]
                self.loading[op.request_id] = (op, wanted)
            self.pins[slot] = self.seq
        half.load(plan)
        if self.is_sync:
            self.check_forward(plan)
        for block in rng.sample(free, min(len(free), 3)):
            self.compute(block)
        begun: dict[int, list[int]] = {}
        for slot in range(SLOTS):
            is_pinned = self.pins.get(slot, 0) > self.region.loads_done or self.region.filling[slot]
            if is_pinned or slot in self.dead or rng.random() < 0.5 or not free:
                continue
            ids = rng.sample(free, min(len(free), rng.randint(1, CHUNK)))
            generation = self.region.generations[slot] + 1
            if rng.random() < 0.2:  # planned for a slot that has become somebody else's meanwhile
                generation -= 1
            else:
                self.content.pop(slot, None)
                self.region.generations[slot] = generation
                self.region.filling[slot] = True
                self.region.memory[slot] = 0xEE
                begun[slot] = ids
                data = np.concatenate([self.blocks[block] for block in ids])
                self.expected[slot, generation] = data, -(-len(data) // 4096) * 4096
            plan.stores.append(CopyOp(slot=slot, generation=generation, first_block=0, block_ids=ids, request_id="s"))
        half.store(plan)
        for block in rng.sample(free, min(len(free), 4)):  # blocks are anybody's again
            self.compute(block)

    def check_forward(self, plan: StepPlan) -> None:
        """The forward pass of this step reads what was loaded synchronously."""
        wanted = {block: self.blocks[block] for op in plan.loads for block in op.block_ids}

        def kernel() -> None:
            for block, content in wanted.items():
                assert np.array_equal(self.setup.blocks([block]), content), "the forward pass ran before its load"

        self.setup.device.compute.add(kernel)

    def steal(self) -> None:
        """A slot changes hands under a copy, which operation pins rule out; the checks must notice."""
        slot = self.rng.randrange(SLOTS)
        if self.is_sync or slot in self.dead:
            return
        self.dead.add(slot)
        self.content.pop(slot, None)
        self.region.generations[slot] += 1
        self.region.filling[slot] = False
        self.region.memory[slot] = np.frombuffer(self.rng.randbytes(8192), dtype=np.uint8)

    def collect(self) -> None:
        """Reports, as the next step's output brings them."""
        received = self.setup.half.take_received()
        failed = self.setup.half.take_failed_blocks()
        for name in received:
            op, wanted = self.loading.pop(name)
            is_lost = not failed.isdisjoint(op.block_ids)
            assert is_lost or np.array_equal(self.setup.blocks(op.block_ids), wanted), "reported before it was there"
            for block in op.block_ids:
                self.compute(block)
        self.setup.half.take_report()
        if self.setup.half.is_idle and not self.loading:
            for slot in sorted(self.dead):
                self.refill(slot)
            self.dead.clear()
        for slot, content in self.content.items():
            if slot not in self.dead and not self.region.filling[slot]:
                assert np.array_equal(self.region.memory[slot], content), "a slot changed that belongs to nobody"

    def run(self) -> None:
        for _ in range(40):
            action = self.rng.choice(["step", "run", "run", "move", "steal", "collect"])
            if action == "step":
                self.step()
            elif action == "run":
                self.setup.device.run(self.rng.choice([1, 2, 4, 20]))
            elif action == "move":
                self.setup.half.move_one()
            elif action == "steal" and self.rng.random() < 0.4:
                self.steal()
            elif action == "collect":
                self.collect()
            if self.rng.random() < 0.3:
                self.setup.half.poll()
        for _ in range(100):  # more than forty steps can have left behind; one piece moves at a time
            self.setup.device.run_all()
            self.setup.half.move_one()
            self.setup.half.poll()
        self.collect()
        assert self.setup.half.is_idle
        assert not self.loading, "a load is never reported"
        assert self.region.loads_done == self.seq, "slots stay pinned for ever"
        assert len(self.setup.copier._free) == self.setup.copier.num_pieces, "a staging piece is lost"


def play_half(seed: int) -> None:
    HalfPlay(seed).run()


def play_engine(seed: int, *, is_v2: bool = True) -> tuple[int, int]:
    """(hits, blocks in the tier at the end)"""
    from tests.connector.test_compat import TOKENS
    from tests.connector.v2_engine import V2Engine

    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("KVSNAP_RUNTIME_DIR", folder + "/run")
        patch.setenv("XDG_CACHE_HOME", folder + "/xdg")
        patch.delenv("KVSNAP_STRICT", raising=False)
        Path(folder, "run").mkdir(mode=0o700)
        engine = V2Engine(
            Path(folder),
            rng,
            patch,
            is_v2=is_v2,
            num_pinned=rng.choice([None, None, 0, 3]),
            num_pieces=rng.choice([1, 3, 6]),
        )
        try:
            stems = [[rng.randrange(1000) for _ in range(3 * TOKENS)] for _ in range(3)]
            prompts: list[list[int]] = []
            for number in range(70):
                action = rng.random()
                if action < 0.3 and len(engine.waiting) + len(engine.running) < 5:
                    stem = rng.choice(stems)
                    tail = [rng.randrange(1000) for _ in range(rng.randrange(2 * TOKENS))]
                    prompt = stem[: rng.choice([2, 3, 3]) * TOKENS] + tail + [7]
                    prompts.append(prompt)
                    engine.submit(f"r{number}", prompt, rng.randint(1, 20))
                elif action < 0.34 and engine.waiting + engine.running:
                    engine.abort(rng.choice(engine.waiting + engine.running))
                elif action < 0.37 and engine.running:
                    engine.preempt(rng.choice(engine.running))
                elif action < 0.38:
                    engine.scheduler.reset_cache()
                elif action < 0.42 and is_v2:
                    broken = rng.choice(["copy_in", "scatter", "copy_out", "gather", ""])
                    engine.device.fails = lambda what, broken=broken: what == broken  # type: ignore[misc]
                elif action < 0.75 and len(engine.in_flight) < 2:
                    engine.step()
                elif engine.in_flight:
                    engine.update()
                engine._wander()
            engine.device.fails = lambda what: False
            engine.drain()
            assert engine.wrong == []
            good = engine.check_slots(prompts)
            assert engine.scheduler._guard.num_errors == 0
            assert engine.worker._guard.num_errors == 0
        finally:
            engine.stop()
    return engine.hits, good


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 32))
@example(117_844)  # leaves more behind than most
def test_no_order_of_copies_breaks_a_promise(seed: int) -> None:
    """A15, A16, B02, invariants 1 and 8: words, reports and bytes, whatever is slow and whoever steals."""
    play_half(seed)


@pytest.mark.usefixtures("vllm")
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 1 << 32), st.sampled_from([True, True, False]))
@example(570, True)  # five requests whose loads are over share all blocks
@example(202, True)  # one copy of a load fails while another one of the same request goes on
def test_both_halves_in_one_process_with_steps_in_flight(seed: int, is_v2: bool) -> None:
    """A19, B02, B.4: hooks in vLLM's order, metadata aliased, finish, abort, preempt, reset and faults anywhere."""
    play_engine(seed, is_v2=is_v2)


@pytest.mark.usefixtures("vllm")
def test_the_plays_are_worth_something() -> None:
    """A play without a hit or without a chunk in the tier proves nothing."""
    results = [play_engine(seed, is_v2=seed % 3 > 0) for seed in range(6)]

    assert sum(hits for hits, _ in results) >= 6
    assert sum(good for _, good in results) >= 6


@pytest.mark.usefixtures("vllm")
def test_sleep_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.33's hooks: nothing is under way while the blocks are gone, and afterwards all goes on."""
    from tests.connector.test_compat import TOKENS
    from tests.connector.v2_engine import V2Engine

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    engine = V2Engine(tmp_path, random.Random(3), monkeypatch)
    prompt = [*range(4 * TOKENS), 7]
    engine.submit("a", prompt, 1)
    engine.step()
    engine.device.run_all()
    engine.worker.unregister_kv_caches()
    assert engine.half.is_idle
    assert engine.half._streams is None

    engine.worker.restore_kv_caches()
    engine.device = engine.devices[-1]
    engine.drain()
    engine.submit("b", prompt, 1)
    engine.drain()

    assert len(engine.devices) == 2
    assert engine.hits == 1
    assert engine.wrong == []
    engine.stop()


# -- mutations -----------------------------------------------------------------------


def _no_wait_before_load(patch: pytest.MonkeyPatch) -> None:
    def load(self: StreamCopier, lane: Any, area: Any, block_ids: Any, after: Any) -> Any:
        self._device.copy_in(lane.stream, area[: len(block_ids) * self.block_bytes], lane.piece)
        self._device.scatter(lane.stream, lane.piece, block_ids)
        return lane.stream.record()

    patch.setattr(StreamCopier, "_load", load)


def _no_wait_before_store(patch: pytest.MonkeyPatch) -> None:
    def store(self: StreamCopier, stream: Any, piece: Any, area: Any, after: Any) -> Any:
        self._device.copy_out(stream, piece, area)
        return stream.record()

    patch.setattr(StreamCopier, "_store", store)


def _gather_on_a_side_stream(patch: pytest.MonkeyPatch) -> None:
    def gather(self: StreamCopier, block_ids: Any, piece: Any) -> None:
        self._store_stream.wait(self.mark())
        self._device.gather(self._store_stream, block_ids, piece)

    patch.setattr(StreamCopier, "gather", gather)


def _forward_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamCopier, "hold_compute", lambda self, event: None)


def _settled_without_event(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_worker, "_is_over", lambda move: move.has_failed or move.event is not None)


def _one_piece_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamCopier, "reserve", lambda self: self._free[0])
    patch.setattr(StreamCopier, "release", lambda self, piece: None)


def _no_check_before_store(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CudaWorkerHalf, "_is_storable", CudaWorkerHalf._is_sane)


def _no_check_after_store(patch: pytest.MonkeyPatch) -> None:
    def end(self: CudaWorkerHalf, store: Any) -> None:
        self._stores.remove(store)
        self._give_back(store.piece)
        self._region.complete(store.op.slot, store.op.generation, ok=not store.has_failed)

    patch.setattr(CudaWorkerHalf, "_end_store", end)


def _no_check_after_load(patch: pytest.MonkeyPatch) -> None:
    original = CudaWorkerHalf._end_load

    def end(self: CudaWorkerHalf, load: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._region, "may_read", lambda slot, generation: True)
            original(self, load)

    patch.setattr(CudaWorkerHalf, "_end_load", end)


def _plans_end_at_once(patch: pytest.MonkeyPatch) -> None:
    def end(self: CudaWorkerHalf) -> None:
        while self._plans:
            self._region.finish_loads(self._plans.popleft().seq)

    patch.setattr(CudaWorkerHalf, "_end_plans", end)


def _no_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda_worker, "zero_padding", lambda area, nbytes: None)


Mutation = Callable[[pytest.MonkeyPatch], None]
ON_HALF: list[Mutation] = [
    _no_wait_before_load,
    _no_wait_before_store,
    _gather_on_a_side_stream,
    _forward_does_not_wait,
    _settled_without_event,
    _one_piece_for_all,
    _no_check_before_store,
    _no_check_after_store,
    _no_check_after_load,
    _no_padding,
    _plans_end_at_once,
]
ON_ENGINE: list[Mutation] = [
    _no_wait_before_load,
    _no_wait_before_store,
    _gather_on_a_side_stream,
    _settled_without_event,
]


def _name(mutation: Mutation) -> str:
    return mutation.__name__.strip("_")


def _is_noticed(mutation: Mutation, play: Callable[[int], object], seeds: int) -> bool:
    """Whether some seed fails with the mutation, and passes without it."""
    for seed in range(seeds):
        with pytest.MonkeyPatch.context() as patch:
            mutation(patch)
            try:
                play(seed)
                continue
            except Exception:
                pass
        play(seed)
        return True
    return False


@pytest.mark.parametrize("mutation", ON_HALF, ids=_name)
def test_a_forgotten_wait_or_check_is_noticed(mutation: Mutation) -> None:
    assert _is_noticed(mutation, play_half, 150)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("mutation", ON_ENGINE, ids=_name)
def test_a_forgotten_wait_is_noticed_through_vllms_hooks(mutation: Mutation) -> None:
    assert _is_noticed(mutation, play_engine, 40)
