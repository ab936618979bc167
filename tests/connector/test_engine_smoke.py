"""The connector's hooks in a real engine, where unit tests can only imitate what vLLM does with their answers.

Hits, pressure and tensor parallelism are in tests/engine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tools.build_model import TINY, ensure
from tools.offline import OfflineEngine
from tools.prompts import random_prompt
from tools.serving import SHM, Server, connector_config

pytestmark = pytest.mark.engine

BLOCK = 128  # the CPU backend's


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """kvsnap's configuration, with tiers of its own."""
    with tempfile.TemporaryDirectory(prefix="kvsnap-test-", dir=SHM) as shm:
        yield {
            "cache_dir": str(tmp_path / "cache"),
            "dram": "256MiB",
            "dram_dir": shm,
            "disk": "512MiB",
            "load_policy": "always",
        }


def test_a_failed_load_is_computed(tmp_path: Path, options: dict[str, Any]) -> None:
    """A17, A18, B06: blocks are promised and no copy happens; the answer is that of a full prefill, and it comes."""
    prompt = random_prompt(60, 1000)
    transfer = connector_config(options) | {
        "kv_connector": "FailingLoads",
        "kv_connector_module_path": "tests.connector.faulty",
    }
    with OfflineEngine(ensure(TINY), tmp_path, engine={"kv_transfer_config": transfer}) as engine:
        (computed,) = engine.generate([prompt], keep=["computed"])
        engine.reset_prefix_cache()
        (again,) = engine.generate([prompt], keep=["again"])
        promised = engine.metric("vllm:external_prefix_cache_hits")
        pages = engine.compare_pages("computed", "again", blocks=7)
        (other,) = engine.generate([random_prompt(61, 1000)])

    assert promised >= 7 * BLOCK
    assert again.tokens == computed.tokens
    assert pages.largest / pages.scale < 1e-3
    assert other.tokens


def test_numbers_are_on_the_metrics_page(tmp_path: Path, options: dict[str, Any]) -> None:
    """Registered as a plugin would be, or by module path: the front end builds the metrics from the class."""
    prompt = random_prompt(70, 600)
    with Server(ensure(TINY), tmp_path, connector=options) as server:
        with closing(server.client()) as client:
            for _ in range(2):
                client.complete(prompt, max_tokens=1)
                client.reset_prefix_cache()
            client.complete(random_prompt(71, 200), max_tokens=1)
            metrics = client.metrics()
        log = server.log()

    assert metrics.total("kvsnap:worker_stores_total") >= 3
    assert metrics.total("kvsnap:worker_loads_total") >= 2
    assert metrics.total("kvsnap:worker_load_bytes_total") > 0
    assert "kvsnap: namespace" in log
    assert "Stats will not be logged" not in log


def test_a_pooling_model_is_served_without_it(tmp_path: Path, options: dict[str, Any]) -> None:
    """Decline, don't break: one line says why, and the server answers."""
    with Server(ensure(TINY), tmp_path, connector=options, args=["--runner", "pooling"]) as server:
        with closing(server.client()) as client:
            status, _ = client.post("/v1/embeddings", {"model": "model", "input": random_prompt(80, 300)})
        log = server.log()

    assert status == 200
    assert log.count("pooling models are not supported") == 1
