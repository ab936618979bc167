"""The worker half on a CUDA device: the same decisions as `worker.py`, with copies under way in between.

A hook queues copies and goes on. When their events have passed, the next hook sees it, or a
small thread does: an idle engine calls no hook, and its completion words must be written all
the same. That thread also does the copies of pageable memory, which may block their caller.

Three rules keep the bytes right, whatever is slow:
- a slot belongs to a copy until its word is written, so the word comes after the event;
- a store's blocks are free as soon as its gather is queued, so the gather is on the compute stream;
- a load's blocks are the engine's only when it is reported, so the report comes after the event.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvsnap.errors import KvsnapError
from kvsnap.runtime import widen_affinity
from kvsnap_connector.copier import Bytes, zero_padding
from kvsnap_connector.cuda_copier import StreamCopier
from kvsnap_connector.cuda_streams import Buffer, Event
from kvsnap_connector.metadata import CopyOp, StepPlan, WorkerReport
from kvsnap_connector.worker import Region, WorkerHalf, succeeds

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.001
_DRAIN_SECONDS = 30.0
_CLOSE_SECONDS = 3.0


@dataclass(slots=True)
class _Plan:
    """The loads of one plan."""

    seq: int
    left: int = 0
    """Loads that are not over."""
    left_of: Counter[str] = field(default_factory=Counter)
    """Those of them by request, where the request waits for the report."""


@dataclass(slots=True, eq=False)
class _Load:
    op: CopyOp
    plan: _Plan
    request_id: str | None
    """None for a synchronous load."""
    after: Event
    event: Event | None = None
    """None while it waits for the thread."""
    has_failed: bool = False


@dataclass(slots=True, eq=False)
class _Store:
    op: CopyOp
    seq: int
    acked: int
    """From its plan; see `StepPlan.acked`."""
    piece: Buffer
    after: Event
    event: Event | None = None
    has_failed: bool = False


class CudaWorkerHalf(WorkerHalf):
    """Copies between one rank's device blocks and its areas of the DRAM tier, behind the engine's back."""

    def __init__(
        self,
        rank: int,
        copier: StreamCopier,
        region: Region,
        *,
        blocks_per_chunk: int,
        is_writer: bool,
        num_pinned: int | None = None,
        may_defer_loads: bool = True,
        on_close: Callable[[], None] = lambda: None,
        starts_thread: bool = True,
    ) -> None:
        """
        Args:
            num_pinned: Slots, from 0 on, that are pinned; None for all.
            may_defer_loads: Whether the thread may write device blocks. Not where vLLM may unmap
                them without a word (sleep mode of 0.32).
            on_close: Called when nothing is under way any more, before the region is unmapped.
            starts_thread: False for tests that call `poll` and `move_one` themselves.
        """
        super().__init__(rank, copier, region, blocks_per_chunk=blocks_per_chunk, is_writer=is_writer)  # type: ignore[arg-type]
        self._streams: StreamCopier | None = copier
        self._num_pinned = region.num_slots if num_pinned is None else num_pinned
        self._may_defer_loads = may_defer_loads
        self._on_close = on_close
        self._changed = threading.Condition(threading.RLock())
        self._plans: deque[_Plan] = deque()
        self._loads: list[_Load] = []
        self._stores: list[_Store] = []
        self._lost_seqs: list[int] = []
        self._is_broken = self._is_closing = False
        self._starts_thread = starts_thread
        self._thread: threading.Thread | None = None

    # -- hooks -----------------------------------------------------------------------

    def load(self, plan: StepPlan) -> None:
        """Queue all loads of a plan. Synchronous ones come before whatever the engine queues next."""
        with self._changed:
            self.poll()
            if plan.seq <= self._loaded_seq:
                return
            self._loaded_seq = plan.seq
            begun = _Plan(plan.seq)
            self._plans.append(begun)
            try:
                after = self._mark() if plan.loads or plan.async_loads else None
                for op in plan.loads:
                    self._begin_load(op, begun, None, after)
                for request_id, ops in plan.async_loads.items():
                    for op in ops:
                        self._begin_load(op, begun, request_id, after)
            finally:
                # Whatever happened: the engine waits for a report on each of them for ever.
                self._received.update(name for name in plan.async_loads if not begun.left_of[name])
                self._end_plans()
                self._watch()

    def store(self, plan: StepPlan) -> None:
        """Queue all stores of a plan. Their blocks may be written again by whatever the engine queues next."""
        with self._changed:
            self.poll()
            if plan.seq <= self._stored_seq:
                return
            self._stored_seq = plan.seq
            known = min((store.acked for store in self._stores), default=plan.acked)
            self._lost_seqs = [seq for seq in self._lost_seqs if seq > known]
            if plan.acked < self._distrusted_seq:
                for op in plan.stores:
                    self._fail_store(op)
                return
            gathered = [(op, piece) for op in plan.stores if (piece := self._begin_store(op)) is not None]
            after = self._mark() if gathered else None
            for op, piece in gathered:
                if after is None or self._streams is None:
                    self._give_back(piece)
                    self._fail_store(op)
                    continue
                store = _Store(op=op, seq=plan.seq, acked=plan.acked, piece=piece, after=after)
                self._stores.append(store)
                if op.slot < self._num_pinned:
                    self._run_store(store, self._streams.store)
            self._watch()

    def refuse(self, plan: StepPlan) -> None:
        """See `WorkerHalf.refuse`. Copies that are under way go on and are reported."""
        with self._changed:
            super().refuse(plan)

    def distrust(self, seq: int) -> None:
        """See `WorkerHalf.distrust`."""
        with self._changed:
            super().distrust(seq)

    def take_received(self) -> set[str]:
        """See `WorkerHalf.take_received`."""
        with self._changed:
            self.poll()
            return super().take_received()

    def take_failed_blocks(self) -> set[int]:
        """See `WorkerHalf.take_failed_blocks`."""
        with self._changed:
            return super().take_failed_blocks()

    def take_report(self) -> WorkerReport | None:
        """See `WorkerHalf.take_report`."""
        with self._changed:
            return super().take_report()

    def take_stats(self) -> dict[str, int | float]:
        """See `WorkerHalf.take_stats`."""
        with self._changed:
            return super().take_stats()

    # -- what the thread does --------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no copy is under way."""
        with self._changed:
            return not self._loads and not self._stores

    def poll(self) -> None:
        """Settle copies whose events have passed. Never waits."""
        with self._changed:
            if self._is_broken:
                return
            try:
                # Loads first: a store that was computed from blocks of a failed one must not be kept.
                for load in [load for load in self._loads if _is_over(load)]:
                    self._end_load(load)
                self._end_plans()
                for store in [store for store in self._stores if _is_over(store)]:
                    self._end_store(store)
            except Exception:
                # The device is gone, and with it soon this process. What it may still write belongs to nobody.
                self._is_broken = True
                log.exception("kvsnap: the device does not answer; no copy is reported any more")

    def move_one(self) -> bool:
        """Do one copy of pageable memory whose turn it is; False if there is none. Waits for it."""
        with self._changed:
            streams = self._streams
            waiting: list[_Load | _Store] = [*self._loads, *self._stores]
            move = next((m for m in waiting if m.event is None and not m.has_failed and m.after.is_done()), None)
        if move is None or streams is None or self._is_broken:
            return False
        if isinstance(move, _Load):
            self._run_load(move, streams.load_slowly)
        else:
            self._run_store(move, streams.store_slowly)
        return True

    def _watch(self) -> None:
        if not self._loads and not self._stores:
            return
        if self._thread is None and self._starts_thread:
            self._thread = threading.Thread(target=self._run, name="kvsnap-copies", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            widen_affinity()
            if self._streams is not None:
                self._streams.enter_thread()
        except Exception:
            log.warning("kvsnap: the thread for copies starts with a fault", exc_info=True)
        while True:
            with self._changed:
                while (self.is_idle or self._is_broken) and not self._is_closing:
                    self._changed.wait()
                if self._is_closing and (self.is_idle or self._is_broken):
                    return
                self.poll()
            try:
                moved = self.move_one()
            except Exception:
                log.exception("kvsnap: a copy of pageable memory failed")
                moved = False
            if not moved:
                time.sleep(_POLL_SECONDS)

    # -- sleep, end ------------------------------------------------------------------

    def pause(self) -> None:
        """Let nothing be under way, and give the staging memory back; the device's blocks go away.

        Plans that come until `resume` are refused.
        """
        if not self._drain(_DRAIN_SECONDS):
            log.error(
                "kvsnap: copies did not end within %.0f s; the device's blocks go away under them", _DRAIN_SECONDS
            )
        with self._changed:
            streams, self._streams = self._streams, None
            if streams is not None and not self._is_broken:
                streams.quiesce()
                streams.free()

    def resume(self, copier: StreamCopier) -> None:
        """The blocks are back, perhaps elsewhere."""
        with self._changed:
            if (copier.block_bytes, copier.num_blocks) != (self._copier.block_bytes, self._copier.num_blocks):
                raise KvsnapError(
                    f"after sleep there are {copier.num_blocks} blocks of {copier.block_bytes} bytes, before it "
                    f"{self._copier.num_blocks} of {self._copier.block_bytes}"
                )
            self._streams = copier

    def close(self) -> None:
        """End what is under way within a bound, stop the thread, unpin and unmap."""
        is_drained = self._drain(_CLOSE_SECONDS)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        if not is_drained or (self._thread is not None and self._thread.is_alive()):
            return  # the device may still write to the mapping; both go with the process
        self._streams = None
        self._on_close()
        super().close()

    def _drain(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while True:
            self.poll()
            if self.is_idle:
                return True
            if self._is_broken or time.monotonic() >= deadline:
                return False
            if self._thread is None:
                self.move_one()
            time.sleep(_POLL_SECONDS)

    # -- inside: loads ---------------------------------------------------------------

    def _begin_load(self, op: CopyOp, plan: _Plan, request_id: str | None, after: Event | None) -> None:
        streams = self._streams
        can = streams is not None and after is not None
        if not can or not succeeds(lambda: self._is_loadable(op), "load", op):
            self._fail_load(op)
            self._lost_seqs.append(plan.seq)
            return
        assert streams is not None
        assert after is not None
        load = _Load(op=op, plan=plan, request_id=request_id, after=after)
        plan.left += 1
        if request_id is not None:
            plan.left_of[request_id] += 1
        self._loads.append(load)
        if op.slot < self._num_pinned or request_id is None or not self._may_defer_loads:
            self._run_load(load, streams.load)
        if request_id is None and load.event is not None:
            try:
                streams.hold_compute(load.event)
            except Exception as error:
                self._fail_half_way(load, error)

    def _is_loadable(self, op: CopyOp) -> bool:
        return self._is_sane(op) and self._region.may_read(op.slot, op.generation)

    def _run_load(self, load: _Load, run: Callable[[Bytes, Sequence[int], Event], Event]) -> None:
        op = load.op
        area = self._region.area(op.slot)[op.first_block * self._copier.block_bytes :]
        try:
            load.event = run(area, op.block_ids, load.after)
        except Exception as error:
            self._fail_half_way(load, error)

    def _end_load(self, load: _Load) -> None:
        """Settle: only now is known that the slot held what was promised all along."""
        op, plan = load.op, load.plan
        self._loads.remove(load)
        if load.has_failed or not self._region.may_read(op.slot, op.generation):
            self._fail_load(op)
            self._lost_seqs.append(plan.seq)
        else:
            self._count(worker_loads=1, worker_load_bytes=len(op.block_ids) * self._copier.block_bytes)
        plan.left -= 1
        if load.request_id is not None:
            plan.left_of[load.request_id] -= 1
            if not plan.left_of[load.request_id]:
                self._received.add(load.request_id)

    def _end_loads(self, seq: int) -> None:
        self._plans.append(_Plan(seq))
        self._end_plans()

    def _end_plans(self) -> None:
        """Plans end in order: a later one says that the earlier ones have ended too."""
        while self._plans and not self._plans[0].left:
            self._region.finish_loads(self._plans.popleft().seq)

    # -- inside: stores --------------------------------------------------------------

    def _begin_store(self, op: CopyOp) -> Buffer | None:
        """Queue the gather; None if the store is settled already, for better or worse."""
        if not succeeds(lambda: self._is_storable(op), "store", op):
            self._fail_store(op)
            return None
        if not self._is_writer:
            self._region.complete(op.slot, op.generation, ok=True)
            return None
        streams = self._streams
        piece = None if streams is None else streams.reserve()
        if streams is None or piece is None:
            self._count(worker_stores_refused=1)
            self._fail_store(op)
            return None
        if not succeeds(lambda: _do(lambda: streams.gather(op.block_ids, piece)), "store", op):
            streams.release(piece)  # a later gather into it comes after this one, on the same stream
            self._fail_store(op)
            return None
        return piece

    def _is_storable(self, op: CopyOp) -> bool:
        return self._is_sane(op) and self._region.may_fill(op.slot, op.generation)

    def _run_store(self, store: _Store, run: Callable[[Buffer, Bytes, Event], Event]) -> None:
        op = store.op
        start = op.first_block * self._copier.block_bytes
        end = start + len(op.block_ids) * self._copier.block_bytes
        area = self._region.area(op.slot)
        try:
            zero_padding(area, end)
            store.event = run(store.piece, area[start:end], store.after)
        except Exception as error:
            self._fail_half_way(store, error)

    def _end_store(self, store: _Store) -> None:
        """Write the completion word: after the event, and only for what may be trusted."""
        op = store.op
        self._stores.remove(store)
        self._give_back(store.piece)
        is_untrusted = any(store.acked < seq <= store.seq for seq in self._lost_seqs)
        if store.has_failed or is_untrusted or not self._region.may_fill(op.slot, op.generation):
            self._fail_store(op)
            return
        self._region.complete(op.slot, op.generation, ok=True)
        self._count(worker_stores=1, worker_store_bytes=len(op.block_ids) * self._copier.block_bytes)

    def _give_back(self, piece: Buffer) -> None:
        if self._streams is not None:
            self._streams.release(piece)

    # -- inside: faults --------------------------------------------------------------

    def _mark(self) -> Event | None:
        streams = self._streams
        if streams is None:
            return None
        try:
            return streams.mark()
        except Exception:
            log.exception("kvsnap: the compute stream can't be marked; this step copies nothing")
            return None

    def _fail_half_way(self, move: _Load | _Store, error: Exception) -> None:
        """Part of it may be queued: report it only when the device no longer touches slot or blocks."""
        op = move.op
        log.error("kvsnap: a copy of slot %d, generation %d failed", op.slot, op.generation, exc_info=error)
        streams = self._streams
        try:
            if streams is not None:
                streams.quiesce()
        except Exception:
            self._is_broken = True
            log.exception("kvsnap: the device does not answer; no copy is reported any more")
            return
        move.has_failed = True


def _is_over(move: _Load | _Store) -> bool:
    return move.has_failed or (move.event is not None and move.event.is_done())


def _do(action: Callable[[], None]) -> bool:
    action()
    return True
