"""The vLLM classes that carry kvsnap's plain data between the processes of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvsnap_connector.metadata import StepPlan, WorkerReport


@dataclass(slots=True)
class KVSnapMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to all workers, every step."""

    plan: StepPlan | None = None
    """What to copy; None for nothing."""
    seq: int = 0
    """Number of the newest plan when this was made; counts on where `plan` is None."""
    lost_blocks: list[int] = field(default_factory=list)
    """Device blocks that were promised and that no copy will fill: to be reported as load errors."""
    lost_requests: list[str] = field(default_factory=list)
    """Requests that wait for an asynchronous load that will not come."""


@dataclass(slots=True)
class KVSnapWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, only where there is something to say."""

    reports: list[WorkerReport]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVSnapWorkerMetadata:
        """All ranks' reports of one step."""
        assert isinstance(other, KVSnapWorkerMetadata)
        return KVSnapWorkerMetadata(reports=[*self.reports, *other.reports])


@dataclass(slots=True)
class KVSnapHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's answer at start: has it mapped the tier?"""

    rank: int
    reason: str | None
    """Why not; None if it has."""
