"""What crosses the border between the scheduler half and the workers.

Plain data, small, no vLLM: it is pickled for every step, also for empty ones.
`connector.py` wraps it in the classes that vLLM expects.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class CopyOp:
    """One copy between a DRAM slot and device blocks, the same on every rank."""

    slot: int
    """Slot of the DRAM tier."""
    generation: int
    """The slot's generation when the copy was planned. Another one there: copy nothing."""
    first_block: int
    """First block inside the chunk that takes part, 0-based."""
    block_ids: list[int]
    """Device block of each consecutive block of the chunk, from `first_block` on."""
    request_id: str
    """The request whose blocks these are."""


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """What the workers copy in one engine step."""

    seq: int
    """Number of the plan, from 1; a worker that finished all loads up to `seq` reports it."""
    acked: int = 0
    """The scheduler half knew of all failed loads of plans up to this number when it planned. A
    worker stores nothing that may have been computed from blocks that it failed to load."""
    loads: list[CopyOp] = field(default_factory=list)
    """Slot to device, complete before the forward pass of this step."""
    stores: list[CopyOp] = field(default_factory=list)
    """Device to slot, after the forward pass of this step."""
    async_loads: dict[str, list[CopyOp]] = field(default_factory=dict)
    """By request id: slot to device, reported by `finished_recving` (model runner V2)."""

    def is_empty(self) -> bool:
        """Whether the step moves nothing."""
        return not (self.loads or self.stores or self.async_loads)


@dataclass(slots=True, kw_only=True)
class WorkerReport:
    """What one rank has to say after a step, beside its completion words."""

    rank: int
    """Global rank inside the engine."""
    failed: list[tuple[int, int]] = field(default_factory=list)
    """(slot, generation) of copies that were refused or failed on this rank."""
    lost_loads: bool = False
    """Whether blocks that were promised hold nothing: what was computed since is not to be trusted."""
