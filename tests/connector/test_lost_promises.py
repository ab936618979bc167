"""Blocks that were promised and are in no plan: the worker connector knows of them before it stores anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvsnap_connector.metadata import CopyOp, StepPlan

pytestmark = pytest.mark.filterwarnings("ignore")


class NotingHalf:
    """A worker half that takes notes."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def load(self, plan: StepPlan) -> None:
        self.calls.append(("load", plan.seq))

    def store(self, plan: StepPlan) -> None:
        self.calls.append(("store", plan.seq))

    def distrust(self, seq: int) -> None:
        self.calls.append(("distrust", seq))

    def take_failed_blocks(self) -> set[int]:
        return {9}


@pytest.mark.parametrize("lost", [[], [5, 6]])
def test_what_the_step_computes_from_lost_blocks_is_not_trusted(tmp_path: Path, lost: list[int]) -> None:
    """Invariant 1: the step reads blocks that nobody filled, and its plan may store what it makes of them."""
    pytest.importorskip("vllm", exc_type=ImportError)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvsnap_connector.connector import KVSnapConnector
    from kvsnap_connector.wire import KVSnapMetadata
    from tests.connector.test_connector import Engine

    engine = Engine(tmp_path)
    config: Any = engine.config
    cache_config: Any = engine.cache_config
    worker: Any = KVSnapConnector(config, KVConnectorRole.WORKER, cache_config)
    worker._worker = half = NotingHalf()

    worker.bind_connector_metadata(KVSnapMetadata(plan=StepPlan(seq=7), seq=7, lost_blocks=lost))
    worker.start_load_kv(None)
    worker.wait_for_save()

    assert half.calls == ([("distrust", 7)] if lost else []) + [("load", 7), ("store", 7)]
    assert worker.get_block_ids_with_load_errors() == {9, *lost}


def test_a_plan_that_a_fault_cuts_short_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B02: a request whose load is never reported waits for ever."""
    pytest.importorskip("vllm", exc_type=ImportError)
    monkeypatch.delenv("KVSNAP_STRICT", raising=False)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from kvsnap_connector.connector import KVSnapConnector
    from kvsnap_connector.wire import KVSnapMetadata
    from tests.connector.test_connector import Engine

    class Broken(NotingHalf):
        def load(self, plan: StepPlan) -> None:
            raise RuntimeError("broken")

        def refuse(self, plan: StepPlan) -> None:
            self.calls.append(("refuse", plan.seq))

    engine = Engine(tmp_path)
    config: Any = engine.config
    cache_config: Any = engine.cache_config
    worker: Any = KVSnapConnector(config, KVConnectorRole.WORKER, cache_config)
    worker._worker = half = Broken()
    load = CopyOp(slot=0, generation=1, first_block=0, block_ids=[5], request_id="a")

    worker.bind_connector_metadata(KVSnapMetadata(plan=StepPlan(seq=7, async_loads={"a": [load]}), seq=7))
    worker.start_load_kv(None)

    assert half.calls == [("distrust", 7), ("refuse", 7)]
    assert worker.get_block_ids_with_load_errors() == {5, 9}
