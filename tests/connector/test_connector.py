"""Both halves under vLLM's hooks, in one process and without an engine: what vLLM calls, in its order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvsnap.errors import ConfigError
from tests.connector.fakes import MambaSpec, Request
from tests.connector.test_compat import NAMES, TOKENS, make_cache, make_config

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("vllm")]

CHUNK = 2 * TOKENS
PROMPT = list(range(1000, 1000 + 5 * TOKENS + 3))


class Engine:
    """The objects of vLLM around one scheduler connector and one worker connector."""

    def __init__(self, folder: Path, **extra: Any) -> None:
        self.folder = folder
        self.extra = {
            "cache_dir": str(folder / "cache"),
            "chunk_tokens": CHUNK,
            "dram": "2MB",
            "dram_dir": str(folder),
            "disk": "64MB",
        } | extra
        model = folder / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (model / "model.safetensors").write_bytes(b"weights")
        self.config = make_config()
        self.config.model_config.model = str(model)
        self.config.kv_transfer_config = SimpleNamespace(
            engine_id="engine-1",
            kv_connector_extra_config=self.extra,
            is_kv_producer=True,
            is_kv_consumer=True,
            kv_load_failure_policy="fail",
        )
        self.cache_config, self.caches = make_cache(num_blocks=32)
        self.scheduler: Any = None
        self.worker: Any = None
        self.received: set[str] = set()

    def start(self) -> None:
        """As `EngineCore.__init__` does it."""
        self.build()
        self.shake_hands()

    def build(self) -> None:
        """Both connectors, in vLLM's order."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvsnap_connector.connector import KVSnapConnector

        config: Any = self.config
        cache_config: Any = self.cache_config
        self.worker = KVSnapConnector(config, KVConnectorRole.WORKER, cache_config)
        self.worker.register_kv_caches(self.caches)
        self.scheduler = KVSnapConnector(config, KVConnectorRole.SCHEDULER, cache_config)

    def shake_hands(self) -> None:
        """The workers' answers reach the scheduler."""
        answer = self.worker.get_handshake_metadata()
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): answer})

    def step(self, request: Request | None, table: list[int], *, computed: int, scheduled: int) -> Any:
        """One engine step that runs one request, or none; returns the worker's load errors."""
        ran = [] if request is None else [request.request_id]
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=computed) for name in ran],
            scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
            num_scheduled_tokens=dict.fromkeys(ran, scheduled),
            preempted_req_ids=set(),
            kv_connector_block_state=SimpleNamespace(get_block_ids=lambda _: (table,)),
        )
        meta = self.scheduler.build_connector_meta(output)
        self.worker.bind_connector_metadata(meta)
        self.worker.start_load_kv(SimpleNamespace())
        for block in table[computed // TOKENS :]:
            for name in NAMES:
                self.caches[name][block] = torch.randn(self.caches[name][block].shape)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        self.received = results.finished_recving
        errors = self.worker.get_block_ids_with_load_errors()
        report = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=report, invalid_block_ids=errors, **vars(results))
        )
        return errors

    def admit(self, request: Request, table: list[int], *, local: int = 0) -> int:
        """Ask, and give the request its blocks; returns the tokens that were promised."""
        self.scheduler.on_new_request(request)
        tokens, is_async = self.scheduler.get_num_new_matched_tokens(request, local)
        assert not is_async
        blocks = SimpleNamespace(get_block_ids=lambda: (table,))
        self.scheduler.update_state_after_alloc(request, blocks, tokens or 0)
        return tokens or 0

    def run(self, request: Request, table: list[int]) -> int:
        """A request from its arrival to its end; returns how many tokens it was given."""
        tokens = self.admit(request, table)
        self.step(request, table, computed=tokens, scheduled=request.num_tokens - tokens)
        self.scheduler.request_finished_all_groups(request, (table,))
        return tokens

    def pages(self, table: list[int]) -> torch.Tensor:
        return torch.stack([self.caches[name][table].clone() for name in NAMES])

    def stop(self) -> None:
        for connector in (self.worker, self.scheduler):
            if connector is not None:
                connector.shutdown()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.delenv("KVSNAP_STRICT", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    made = Engine(tmp_path)
    yield made
    made.stop()


FIRST, SECOND = list(range(1, 7)), list(range(11, 17))


def test_a_prompt_is_loaded_byte_for_byte_into_other_blocks(engine: Engine) -> None:
    engine.start()
    assert engine.run(Request("a", PROMPT), FIRST) == 0
    stored = engine.pages(FIRST[:5])

    second = Request("b", PROMPT)
    tokens = engine.admit(second, SECOND)
    errors = engine.step(second, SECOND, computed=tokens, scheduled=second.num_tokens - tokens)

    assert tokens == 5 * TOKENS
    assert errors == set()
    assert torch.equal(engine.pages(SECOND[:5]), stored)


def test_blocks_that_the_engine_holds_are_not_written(engine: Engine) -> None:
    """A19: a local hit that ends inside a chunk."""
    engine.start()
    engine.run(Request("a", PROMPT), FIRST)
    request = Request("b", PROMPT)
    before = engine.pages(SECOND[:3])

    tokens = engine.admit(request, SECOND, local=3 * TOKENS)
    engine.step(request, SECOND, computed=3 * TOKENS + tokens, scheduled=3)

    assert tokens == 2 * TOKENS
    assert torch.equal(engine.pages(SECOND[:3]), before)


def test_a_hit_names_its_tier(engine: Engine) -> None:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    engine.start()
    engine.run(Request("a", PROMPT), FIRST)
    request = Request("b", PROMPT)
    tokens = engine.admit(request, SECOND)

    assert engine.scheduler.get_external_cache_hit_sources(request, tokens) == {CacheHitSource.HOST: tokens}
    assert engine.scheduler.get_external_cache_hit_sources(request, 0) == {}


def test_a_failed_load_is_recomputed_and_not_promised_again(engine: Engine) -> None:
    """A17, B06: the slot lost its chunk between the promise and the copy."""
    engine.start()
    engine.run(Request("a", PROMPT), FIRST)
    request = Request("b", PROMPT)
    tokens = engine.admit(request, SECOND)
    dram = engine.scheduler._scheduler.cache.dram
    for slot in range(dram.num_slots):
        dram._map.generation[slot] += 1

    errors = engine.step(request, SECOND, computed=tokens, scheduled=3)

    assert errors == set(SECOND[:5])
    assert engine.admit(Request("c", PROMPT), SECOND) == 0


@pytest.mark.parametrize("broken", ["admitted", "plan_step"])
def test_a_promise_that_nobody_keeps_is_reported(engine: Engine, broken: str) -> None:
    """A16: blocks without bytes must never look computed, whatever broke in between."""
    engine.start()
    engine.run(Request("a", PROMPT), FIRST)
    request = Request("b", PROMPT)

    def fail(*args: Any) -> Any:
        raise RuntimeError("broken")

    engine.scheduler.on_new_request(request)
    half = engine.scheduler._scheduler
    setattr(half, broken, fail)
    tokens = engine.admit(request, SECOND)
    errors = engine.step(request, SECOND, computed=tokens, scheduled=3)

    assert tokens == 5 * TOKENS
    assert errors == set(SECOND[:5])


@pytest.mark.parametrize("is_broken", [False, True])
def test_an_asynchronous_load_ends_once_either_way(engine: Engine, is_broken: bool) -> None:
    """B02, A22: model runner V2. The request waits for the report, and holds its blocks until then."""
    engine.config.use_v2_model_runner = True
    engine.start()
    engine.run(Request("a", PROMPT), FIRST)
    stored = engine.pages(FIRST[:5])
    request = Request("b", PROMPT)
    blocks = SimpleNamespace(get_block_ids=lambda: (SECOND,))
    half = engine.scheduler._scheduler
    if is_broken:
        half.admitted = lambda *args: 1 // 0

    engine.scheduler.on_new_request(request)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (5 * TOKENS, True)
    engine.scheduler.update_state_after_alloc(request, blocks, 5 * TOKENS)
    errors = engine.step(None, [], computed=0, scheduled=0)

    assert engine.received == {"b"}
    if is_broken:
        assert errors == set(SECOND[:5])
    else:
        assert errors == set()
        assert torch.equal(engine.pages(SECOND[:5]), stored)
    engine.scheduler.update_state_after_alloc(request, blocks, 0)
    assert engine.step(request, SECOND, computed=5 * TOKENS, scheduled=3) == set()
    assert engine.received == set()


def test_a_worker_that_breaks_reports_its_loads(engine: Engine) -> None:
    engine.start()
    engine.run(Request("a", PROMPT), FIRST)
    request = Request("b", PROMPT)
    tokens = engine.admit(request, SECOND)

    def fail(*args: Any) -> Any:
        raise RuntimeError("broken")

    engine.worker._worker.load = fail
    errors = engine.step(request, SECOND, computed=tokens, scheduled=3)

    assert errors == set(SECOND[:5])


@pytest.mark.parametrize("answer", [-16, 7, 10**6, 5 * TOKENS + 3])
def test_an_impossible_promise_is_not_made(engine: Engine, answer: int) -> None:
    """B01, B15: vLLM asserts on it, and the engine is gone."""
    engine.start()
    engine.scheduler._scheduler.match = lambda *args: (answer, False)

    assert engine.scheduler.get_num_new_matched_tokens(Request("a", PROMPT), 0) == (0, False)


def test_no_hook_raises_when_its_half_does(engine: Engine) -> None:
    """Invariant 2, with the neutral answers that vLLM can live with."""
    engine.start()

    class Broken:
        off_reason = None

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    engine.scheduler._scheduler = Broken()
    request = Request("a", PROMPT)
    blocks = SimpleNamespace(get_block_ids=lambda: (FIRST,))

    engine.scheduler.on_new_request(request)
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    engine.scheduler.update_state_after_alloc(request, blocks, 0)
    assert engine.step(request, FIRST, computed=0, scheduled=5) == set()
    assert engine.scheduler.get_kv_connector_stats() is not None
    assert engine.scheduler.request_finished_all_groups(request, (FIRST,)) == (False, None)
    assert engine.scheduler.reset_cache() is True
    assert engine.scheduler._guard.is_off
    engine.scheduler.shutdown()


def test_a_failed_load_policy_of_fail_is_replaced(engine: Engine) -> None:
    """One bad block must not become HTTP 500; vLLM reads the policy right after the constructor."""
    engine.start()

    assert engine.config.kv_transfer_config.kv_load_failure_policy == "recompute"
    assert engine.scheduler.requires_kv_delivery is False


@pytest.mark.parametrize("extra", [{"chunk_tokns": 32}, {"chunk_tokens": TOKENS + 1}, {"dram": "much"}])
def test_a_wrong_configuration_stops_the_start(engine: Engine, extra: dict[str, Any]) -> None:
    engine.extra.update(extra)

    with pytest.raises(ConfigError):
        engine.start()


def test_what_is_not_supported_runs_as_without_it(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.cache_config.kv_cache_groups[0].kv_cache_spec = MambaSpec()
    engine.start()

    assert engine.run(Request("a", PROMPT), FIRST) == 0
    assert engine.run(Request("b", PROMPT), FIRST) == 0
    assert engine.scheduler.reset_cache() is True
    said = [record.message for record in caplog.records if record.name.startswith("kvsnap")]
    assert said == ["kvsnap: turned off: KV caches of kind MambaSpec are not supported"]


def test_a_worker_that_can_not_map_the_tier_turns_it_off(engine: Engine) -> None:
    """Design section 3.1: all ranks have the tier, or none."""
    engine.build()
    for path in engine.folder.glob("kvsnap-*"):
        path.unlink()
    engine.shake_hands()

    assert "rank 0: cannot map the DRAM tier" in (engine.scheduler._guard.off_reason or "")
    assert engine.run(Request("a", PROMPT), FIRST) == 0
    assert engine.run(Request("b", PROMPT), SECOND) == 0


def test_a_rank_that_does_not_answer_turns_it_off(engine: Engine) -> None:
    engine.config.parallel_config.world_size = 2
    engine.config.parallel_config.tensor_parallel_size = 2
    engine.start()

    assert "rank 1 of 2 left no geometry" in (engine.scheduler._guard.off_reason or "")


@pytest.mark.parametrize(("produces", "consumes", "second"), [(True, False, 0), (False, True, 0), (True, True, 80)])
def test_roles_are_kept(engine: Engine, produces: bool, consumes: bool, second: int) -> None:
    engine.config.kv_transfer_config.is_kv_producer = produces
    engine.config.kv_transfer_config.is_kv_consumer = consumes
    engine.start()

    engine.run(Request("a", PROMPT), FIRST)

    assert engine.run(Request("b", PROMPT), SECOND) == second


def test_a_salt_is_a_world_of_its_own(engine: Engine) -> None:
    """A10."""
    engine.start()
    engine.run(Request("a", PROMPT, cache_salt="x"), FIRST)

    assert engine.run(Request("b", PROMPT, cache_salt="y"), SECOND) == 0
    assert engine.run(Request("c", PROMPT, cache_salt="x"), SECOND) == 80


@pytest.mark.parametrize("values", [{"lora_request": object()}, {"mm_features": [object()]}, {"resumable": True}])
def test_an_uncacheable_request_neither_loads_nor_stores(engine: Engine, values: dict[str, Any]) -> None:
    engine.start()
    engine.run(Request("a", PROMPT, **values), FIRST)
    assert engine.run(Request("b", PROMPT), SECOND) == 0

    assert engine.run(Request("c", PROMPT, **values), FIRST) == 0


def test_a_reset_forgets(engine: Engine) -> None:
    """A14: after new weights nothing old is served."""
    engine.start()
    engine.run(Request("a", PROMPT), FIRST)

    assert engine.scheduler.reset_cache() is True

    assert engine.run(Request("b", PROMPT), SECOND) == 0


@pytest.mark.parametrize("digest", ["auto", "release-7"])
def test_a_reset_where_weights_can_change_ends_it(engine: Engine, digest: str) -> None:
    """A14: neither tier can be told from another model's any more; what was declared was said of the weights before."""
    engine.extra["weights_digest"] = digest
    engine.config.weight_transfer_config = SimpleNamespace(backend="nccl")
    engine.start()
    engine.run(Request("a", PROMPT), FIRST)

    assert engine.scheduler.reset_cache() is True

    assert engine.scheduler._guard.is_off
    assert engine.run(Request("b", PROMPT), SECOND) == 0


def test_numbers_of_both_halves_reach_vllm(engine: Engine) -> None:
    engine.start()
    engine.run(Request("a", PROMPT), FIRST)

    worker, scheduler = engine.worker.get_kv_connector_stats(), engine.scheduler.get_kv_connector_stats()

    assert worker.data["worker_stores"] == 3
    assert scheduler is not None
    assert engine.worker.get_kv_connector_stats() is None
    total = type(engine.scheduler).build_kv_connector_stats(worker.to_dict()).aggregate(scheduler)
    assert set(total.data) == set(worker.data) | set(scheduler.data)
