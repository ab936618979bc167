"""Numbers on vLLM's /metrics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("vllm")]


@pytest.fixture
def metric_types() -> dict[Any, Any]:
    """prometheus_client's classes with a registry of their own."""
    from functools import partial

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

    registry = CollectorRegistry()
    found: dict[Any, Any] = {cls: partial(cls, registry=registry) for cls in (Counter, Gauge, Histogram)}
    found["registry"] = registry
    return found


def test_counters_add_up_and_states_replace(metric_types: dict[Any, Any]) -> None:
    from kvsnap_connector.stats import KVSnapPromMetrics

    registry = metric_types["registry"]
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = KVSnapPromMetrics(config, metric_types, ["model_name", "engine"], {0: ["m", "0"]})

    metrics.observe({"loads": 2, "slots_now": 5}, 0)
    metrics.observe({"loads": 3, "slots_now": 4, "stores": -1, "miss_not in the tiers": 1}, 0)
    metrics.observe({"loads": 3}, 7)

    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("kvsnap:loads_total", labels) == 5
    assert registry.get_sample_value("kvsnap:slots", labels) == 4
    assert registry.get_sample_value("kvsnap:stores_total", labels) is None
    assert registry.get_sample_value("kvsnap:miss_not_in_the_tiers_total", labels) == 1


def test_intervals_add_up() -> None:
    from kvsnap_connector.stats import KVSnapStats

    total = KVSnapStats({"loads": 1, "slots_now": 5}).aggregate(KVSnapStats({"loads": 2, "slots_now": 4}))

    assert total.data == {"loads": 3, "slots_now": 4}
    assert total.reduce() == {"kvsnap_loads": 3, "kvsnap_slots_now": 4}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
