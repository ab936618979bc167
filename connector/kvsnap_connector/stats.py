"""kvsnap's numbers in vLLM's metrics: the log line, and `kvsnap:*` on /metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

GAUGE_SUFFIX = "_now"
"""Numbers whose name ends so are states; all others are counted up."""

Number = int | float


@dataclass
class KVSnapStats(KVConnectorStats):  # type: ignore[misc]
    """Numbers of one interval: name -> increment, or state for a name ending in `_now`."""

    data: dict[str, Number] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another interval, rank or half to this one."""
        for name, value in other.data.items():
            if name.endswith(GAUGE_SUFFIX):
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, Number]:
        """What the periodic log line says."""
        return {f"kvsnap_{name}": round(value, 3) for name, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


class KVSnapPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`kvsnap:<name>` with vLLM's labels; made when a number is first seen."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, dict(metric_types), labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {}
        self._gauges: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval of one engine."""
        labels = self.per_engine_labelvalues.get(engine_idx)
        if labels is None:
            return
        for name, value in transfer_stats_data.items():
            if name.endswith(GAUGE_SUFFIX):
                self._gauge(name).labels(*labels).set(value)
            elif value > 0:  # a counter that went down would end the server's metrics
                self._counter(name).labels(*labels).inc(value)

    def _counter(self, name: str) -> Any:
        if name not in self._counters:
            self._counters[name] = self._counter_cls(
                name=f"kvsnap:{_sane(name)}", documentation=_describe(name), labelnames=self._labelnames
            )
        return self._counters[name]

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            self._gauges[name] = self._gauge_cls(
                name=f"kvsnap:{_sane(name.removesuffix(GAUGE_SUFFIX))}",
                documentation=_describe(name),
                labelnames=self._labelnames,
                multiprocess_mode="mostrecent",
            )
        return self._gauges[name]


def _describe(name: str) -> str:
    return f"kvsnap: {name.removesuffix(GAUGE_SUFFIX).replace('_', ' ')}."


def _sane(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
