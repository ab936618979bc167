"""The worker half: copies what the scheduler half planned, and reports. It decides nothing.

One per rank, without vLLM and torch. All of it runs in the worker's main thread, around
the forward pass; the only thread is the one that faults the DRAM tier's pages in. This is
the half for device memory that is host memory; `cuda_worker.py` has the other one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from kvsnap.errors import KvsnapError
from kvsnap.runtime import widen_affinity
from kvsnap_connector.copier import Bytes, Copier, zero_padding
from kvsnap_connector.guard import is_strict
from kvsnap_connector.metadata import CopyOp, StepPlan, WorkerReport

log = logging.getLogger(__name__)

_JOIN_SECONDS = 3.0
_BACKGROUND_NICE = 15


class Region(Protocol):
    """One rank's view of the DRAM tier; see `kvsnap.tiers.dram.DramRegion`."""

    @property
    def num_slots(self) -> int:
        """Slots of the tier."""
        ...

    @property
    def stride(self) -> int:
        """Bytes of this rank's area in a slot."""
        ...

    def area(self, slot: int) -> Bytes:
        """This rank's area of a slot."""
        ...

    def may_fill(self, slot: int, generation: int) -> bool:
        """Whether the slot waits for exactly this store."""
        ...

    def may_read(self, slot: int, generation: int) -> bool:
        """Whether the slot still holds what a load was planned for."""
        ...

    def complete(self, slot: int, generation: int, *, ok: bool) -> None:
        """Write the completion word of a store."""
        ...

    def finish_loads(self, seq: int) -> None:
        """All loads of plans up to `seq` are over on this rank."""
        ...

    def prefault(self, stop: Sequence[bool] = ()) -> None:
        """Fault the areas in, until done or `stop` is not empty."""
        ...

    def close(self) -> None:
        """Unmap."""
        ...


class WorkerHalf:
    """Copies between one rank's device blocks and its areas of the DRAM tier.

    Nothing here raises for one bad copy: a load that can't be done is reported by
    its device blocks, so that the engine computes them; a store that can't be done
    never gets its completion word, or one that says so.
    """

    def __init__(self, rank: int, copier: Copier, region: Region, *, blocks_per_chunk: int, is_writer: bool) -> None:
        """`is_writer` is False on ranks that hold a replica of another rank's slice (MLA): they only load."""
        needed = blocks_per_chunk * copier.block_bytes
        if not needed <= region.stride:
            raise KvsnapError(f"a chunk needs {needed} bytes of rank {rank}, a slot has {region.stride}")
        self._rank = rank
        self._copier = copier
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._is_writer = is_writer
        self._loaded_seq = self._stored_seq = 0
        self._distrusted_seq = 0
        self._has_lost_loads = False
        self._failed_copies: list[tuple[int, int]] = []
        self._failed_blocks: set[int] = set()
        self._received: set[str] = set()
        self._stats: dict[str, int | float] = {}
        self._stop: list[bool] = []
        self._prefault: threading.Thread | None = None

    @property
    def blocks_per_chunk(self) -> int:
        """Device blocks of a full chunk."""
        return self._blocks_per_chunk

    def pause(self) -> None:
        """The device's blocks go away (sleep). Where copies end in the hook that begins them, none is under way."""

    def load(self, plan: StepPlan) -> None:
        """Do all loads of a plan, before the forward pass reads their blocks."""
        if plan.seq <= self._loaded_seq:
            return  # MRV1 may call before or after the forward pass, but once is enough
        self._loaded_seq = plan.seq
        started = time.perf_counter()
        moved = 0
        # Before the first copy, and even if all fail: their blocks are in the error set by then,
        # and the engine waits for the report for ever.
        self._received |= plan.async_loads.keys()
        try:
            for op in all_loads(plan):
                moved += self._load(op)
        finally:
            self._end_loads(plan.seq)
        if moved:
            self._count(worker_load_bytes=moved, worker_load_seconds=time.perf_counter() - started)

    def store(self, plan: StepPlan) -> None:
        """Do all stores of a plan, after the forward pass has written their blocks.

        None of them where a load before it failed and the scheduler half did not know
        yet when it planned: the step has computed from blocks that hold something else.
        """
        if plan.seq <= self._stored_seq:
            return
        self._stored_seq = plan.seq
        if plan.acked < self._distrusted_seq:
            for op in plan.stores:
                self._fail_store(op)
            return
        started = time.perf_counter()
        moved = sum(self._store(op) for op in plan.stores)
        if moved:
            self._count(worker_store_bytes=moved, worker_store_seconds=time.perf_counter() - started)

    def distrust(self, seq: int) -> None:
        """Blocks that plan `seq` promised were not filled: store nothing until the scheduler half knows."""
        self._distrusted_seq = max(self._distrusted_seq, seq, self._loaded_seq)
        self._has_lost_loads = True

    def refuse(self, plan: StepPlan) -> None:
        """Report everything of a plan that was not done as failed, without touching device or slots."""
        if plan.seq > self._loaded_seq:
            self._loaded_seq = plan.seq
            self._received |= plan.async_loads.keys()
            for op in all_loads(plan):
                self._fail_load(op)
            self._end_loads(plan.seq)
        if plan.seq > self._stored_seq:
            self._stored_seq = plan.seq
            for op in plan.stores:
                self._fail_store(op)

    def _end_loads(self, seq: int) -> None:
        """All loads of plan `seq` are over."""
        self._region.finish_loads(seq)

    def take_failed_blocks(self) -> set[int]:
        """Device blocks that hold nothing, since the last call."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def take_received(self) -> set[str]:
        """Requests whose asynchronous loads ended, each once."""
        taken, self._received = self._received, set()
        return taken

    def take_report(self) -> WorkerReport | None:
        """What went wrong on this rank since the last call; None for nothing."""
        if not self._failed_copies and not self._has_lost_loads:
            return None
        taken, self._failed_copies = self._failed_copies, []
        lost, self._has_lost_loads = self._has_lost_loads, False
        return WorkerReport(rank=self._rank, failed=taken, lost_loads=lost)

    def take_stats(self) -> dict[str, int | float]:
        """Counters since the last call; empty for nothing."""
        taken, self._stats = self._stats, {}
        return taken

    def start_prefault(self) -> None:
        """Fault this rank's areas in, in a background thread.

        The first touch of a shared-memory page costs ten times the copy of it; without
        this the first stores would pay for it in the middle of a step.
        """
        self._prefault = threading.Thread(target=self._run_prefault, name="kvsnap-prefault", daemon=True)
        self._prefault.start()

    def close(self) -> None:
        """Stop the thread and unmap."""
        self._stop.append(True)
        if self._prefault is not None:
            self._prefault.join(_JOIN_SECONDS)
            if self._prefault.is_alive():
                return  # it holds the mapping; both go with the process
        self._region.close()

    def _run_prefault(self) -> None:
        try:
            widen_affinity()
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICE)
        except OSError:
            pass  # it is only slower, or less polite
        try:
            self._region.prefault(self._stop)
        except Exception:
            log.warning("kvsnap: can't fault the DRAM tier in ahead; first stores are slower", exc_info=True)

    def _load(self, op: CopyOp) -> int:
        """Bytes moved; 0 if the load was refused or failed."""
        if not succeeds(lambda: self._scatter(op), "load", op):
            return self._fail_load(op)
        self._count(worker_loads=1)
        return len(op.block_ids) * self._copier.block_bytes

    def _scatter(self, op: CopyOp) -> bool:
        if not self._is_sane(op) or not self._region.may_read(op.slot, op.generation):
            return False
        self._copier.scatter(self._region.area(op.slot)[op.first_block * self._copier.block_bytes :], op.block_ids)
        return self._region.may_read(op.slot, op.generation)

    def _store(self, op: CopyOp) -> int:
        """Bytes moved; 0 if the store was refused or failed, or isn't this rank's."""
        if not succeeds(lambda: self._gather(op), "store", op):
            return self._fail_store(op)
        self._region.complete(op.slot, op.generation, ok=True)
        if not self._is_writer:
            return 0
        self._count(worker_stores=1)
        return len(op.block_ids) * self._copier.block_bytes

    def _gather(self, op: CopyOp) -> bool:
        if not self._is_sane(op) or not self._region.may_fill(op.slot, op.generation):
            return False  # not sane: a fault of ours; not waiting: cleared since it was planned
        if self._is_writer:
            area = self._region.area(op.slot)
            block_bytes = self._copier.block_bytes
            self._copier.gather(op.block_ids, area[op.first_block * block_bytes :])
            zero_padding(area, (op.first_block + len(op.block_ids)) * block_bytes)
        return self._region.may_fill(op.slot, op.generation)

    def _is_sane(self, op: CopyOp) -> bool:
        """Block 0 is vLLM's null block: it stands for KV that isn't there. Generation 0 is a slot never used."""
        return (
            0 <= op.slot < self._region.num_slots
            and op.generation > 0
            and op.first_block >= 0
            and 0 < len(op.block_ids) <= self._blocks_per_chunk - op.first_block
            and min(op.block_ids) > 0
            and max(op.block_ids) < self._copier.num_blocks
        )

    def _fail_load(self, op: CopyOp) -> int:
        self._failed_blocks.update(op.block_ids)
        self._failed_copies.append((op.slot, op.generation))
        self.distrust(self._loaded_seq)
        self._count(worker_load_failures=1)
        return 0

    def _fail_store(self, op: CopyOp) -> int:
        """Write a completion word that says "failed", so that the slot comes back.

        Only where the slot still has this generation: then the scheduler half keeps it
        for this store, even if it has cleared it meanwhile.
        """
        if 0 <= op.slot < self._region.num_slots and op.generation > 0:
            if self._region.may_read(op.slot, op.generation):
                self._region.complete(op.slot, op.generation, ok=False)
            self._failed_copies.append((op.slot, op.generation))
        self._count(worker_store_failures=1)
        return 0

    def _count(self, **increments: int | float) -> None:
        for name, increment in increments.items():
            self._stats[name] = self._stats.get(name, 0) + increment


def all_loads(plan: StepPlan) -> Iterable[CopyOp]:
    """The loads of a plan, synchronous ones first."""
    yield from plan.loads
    for ops in plan.async_loads.values():
        yield from ops


def succeeds(copy: Callable[[], bool], what: str, op: CopyOp) -> bool:
    """Whether the copy went through; if it raised that is logged. The caller reports it."""
    try:
        return copy()
    except Exception:
        if is_strict():
            raise
        log.exception("kvsnap: %s of slot %d, generation %d failed", what, op.slot, op.generation)
        return False
