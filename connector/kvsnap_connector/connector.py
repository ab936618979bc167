"""KVSnapConnector: vLLM's hooks, each turned into a call of a half that knows no vLLM.

Every hook is guarded: what goes wrong is logged, counted and answered with the neutral
value, so that a fault of the cache never becomes a fault of a request. One thing needs
more than that: blocks that were promised to the engine and that no copy will fill must
be *reported*, or a request would read what lies in them. `_Admitted` keeps that account.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvsnap.errors import ConfigError
from kvsnap_connector import rendezvous
from kvsnap_connector.compat import Unsupported, block_tokens_of, wanted_layout
from kvsnap_connector.guard import Guard, is_strict
from kvsnap_connector.live_request import LiveRequest, scheduled_of
from kvsnap_connector.metadata import StepPlan
from kvsnap_connector.scheduler import SchedulerHalf
from kvsnap_connector.startup import adopt_vllm_logging, open_scheduler_half, register_rank, wake_worker
from kvsnap_connector.stats import KVSnapPromMetrics, KVSnapStats
from kvsnap_connector.wire import KVSnapHandshake, KVSnapMetadata, KVSnapWorkerMetadata
from kvsnap_connector.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A request that vLLM admitted in this step with tokens that kvsnap promised."""

    blocks: frozenset[int]
    """Device blocks that this step's plan has to fill."""
    is_async: bool
    """Whether the request waits for `finished_recving`."""


class KVSnapConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """kvsnap in one engine: the scheduler half or one worker half, by role."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        adopt_vllm_logging()
        self._guard = Guard()
        self._engine_id = str(self._kv_transfer_config.engine_id)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._register: Callable[[], WorkerHalf] | None = None
        self._kv_caches: dict[str, torch.Tensor] = {}
        self._requests: dict[str, LiveRequest] = {}
        self._local_tokens: dict[str, int] = {}
        self._is_async: dict[str, bool] = {}
        self._admitted: dict[str, _Admitted] = {}
        self._lost_blocks: set[int] = set()
        self._lost_requests: set[str] = set()
        self._errors_told = 0
        self._off_told = False
        if role is KVConnectorRole.SCHEDULER:
            self._open_scheduler(vllm_config, kv_cache_config)

    def _open_scheduler(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        # vLLM reads this right after. Its default, "fail", answers HTTP 500 where a recompute would do.
        if vllm_config.kv_transfer_config is not None:
            vllm_config.kv_transfer_config.kv_load_failure_policy = "recompute"
        try:
            self._scheduler = open_scheduler_half(vllm_config, kv_cache_config, self._kv_transfer_config)
            self._guard.on_off = self._scheduler.turn_off
            self._block_tokens = block_tokens_of(kv_cache_config)
        except ConfigError:
            raise
        except Unsupported as error:
            self._guard.turn_off(str(error))
        except Exception as error:
            self._turn_off_at_start(error)

    def _turn_off_at_start(self, error: Exception) -> None:
        if is_strict():
            raise error
        log.error("kvsnap: start-up failed", exc_info=error)
        self._guard.turn_off(f"start-up failed: {error}")

    @property
    def requires_kv_delivery(self) -> bool:
        """A best-effort cache: a store that is lost is a miss later."""
        return False

    # -- worker ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Find the pages, and leave their geometry for the scheduler half."""
        try:
            self._register = register_rank(self._vllm_config, self._kv_cache_config, kv_caches, self._engine_id)
            self._kv_caches = kv_caches
        except Unsupported as error:
            self._guard.off_reason = str(error)  # the scheduler half says it, once for all ranks
        except Exception as error:
            self._turn_off_at_start(error)

    def unregister_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        """vLLM 0.33, before sleep: nothing may touch the blocks until `restore_kv_caches`."""
        half = self._worker
        try:
            if half is not None:
                half.pause()  # also when turned off: copies may be under way
        except Exception as error:
            self._guard.failed("unregister_kv_caches", error)

    def restore_kv_caches(self, *args: Any, **kwargs: Any) -> None:
        """vLLM 0.33, after sleep: the blocks are back, at the same addresses unless it hands over others."""
        half = self._worker
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, dict) and value), None)
        caches = self._kv_caches if given is None else given
        if half is not None:
            config, cache_config = self._vllm_config, self._kv_cache_config
            self._guard.call("restore_kv_caches", lambda: wake_worker(half, config, cache_config, caches), None)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Map the tier; answers in every case, because silence looks like a rank that is missing."""
        rank = int(self._vllm_config.parallel_config.rank)
        reason = self._guard.off_reason
        try:
            if self._register is not None and self._worker is None and reason is None:
                self._worker = self._register()
        except Unsupported as error:
            reason = str(error)
        except Exception as error:
            if is_strict():
                raise
            log.error("kvsnap: rank %d can't map the tier", rank, exc_info=error)
            reason = str(error) or type(error).__name__
        if self._worker is None and reason is None:
            reason = "no KV caches were registered"
        return KVSnapHandshake(rank=rank, reason=reason)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Copy promised chunks into their blocks: done when it returns, or on a GPU ordered by streams and reported."""
        self._step("start_load_kv", lambda half, plan: half.load(plan))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads end before the forward pass, or before their request is scheduled."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing per layer: stores copy whole pages after the forward pass."""

    def wait_for_save(self) -> None:
        """Copy completed chunks out of their blocks, which may be written again as soon as it returns."""
        self._step("wait_for_save", lambda half, plan: half.store(plan))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose asynchronous load ended on this rank, each once."""
        received = set(self._lost_requests)
        self._lost_requests.clear()
        if self._worker is not None:
            received |= self._worker.take_received()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were promised and hold nothing; the engine computes them."""
        lost, self._lost_blocks = self._lost_blocks, set()
        if self._worker is not None:
            lost |= self._worker.take_failed_blocks()
        return lost

    def build_connector_worker_meta(self) -> KVSnapWorkerMetadata | None:
        """What went wrong on this rank; None for nothing."""
        half = self._worker
        report = (
            None if half is None else self._guard.call("build_connector_worker_meta", lambda: half.take_report(), None)
        )
        return None if report is None else KVSnapWorkerMetadata(reports=[report])

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take over what this step's plan could not promise, beside the plan itself."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, KVSnapMetadata):
            self._lost_blocks.update(connector_metadata.lost_blocks)
            self._lost_requests.update(connector_metadata.lost_requests)
            if connector_metadata.lost_blocks and self._worker is not None:
                self._worker.distrust(connector_metadata.seq)

    def _step(self, hook: str, action: Callable[[WorkerHalf, StepPlan], None]) -> None:
        """Run one side of the bound plan. What can't be done is reported, never dropped."""
        meta = self._connector_metadata
        if not isinstance(meta, KVSnapMetadata) or meta.plan is None:
            return
        half, plan = self._worker, meta.plan
        if half is None:
            self._lose(plan)
            return
        try:
            if self._guard.is_off:
                half.refuse(plan)
            else:
                action(half, plan)
        except Exception as error:
            self._lose(plan)
            half.distrust(plan.seq)
            half.refuse(plan)
            self._guard.failed(hook, error)

    def _lose(self, plan: StepPlan) -> None:
        for op in plan.loads:
            self._lost_blocks.update(op.block_ids)
        for ops in plan.async_loads.values():
            for op in ops:
                self._lost_blocks.update(op.block_ids)
        if self._worker is None:
            self._lost_requests.update(plan.async_loads)

    # -- scheduler -------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers have answered: import, preload, and say what was found. The engine is not ready before."""
        half = self._scheduler
        if half is None:
            return
        world_size = self._vllm_config.parallel_config.world_size
        answers: dict[int, str | None] = dict.fromkeys(range(world_size), "the worker did not answer")
        for answer in metadata.values():
            if isinstance(answer, KVSnapHandshake):
                answers[answer.rank] = answer.reason
        try:
            half.start(answers)
        except ConfigError:
            raise
        except Exception as error:
            self._close(half)
            self._turn_off_at_start(error)
            return
        if half.off_reason is not None:
            self._guard.turn_off(half.off_reason)

    def on_new_request(self, request: Request) -> None:
        """Look at the request once, and let the half compute its keys."""
        half = self._scheduler
        if half is not None:
            self._guard.call("on_new_request", lambda: half.new_request(self._view(request)), None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own hit can be loaded; (None, False): ask again."""
        half = self._scheduler
        if half is None:
            return 0, False

        def match() -> tuple[int | None, bool]:
            tokens, is_async = half.match(self._view(request), num_computed_tokens)
            self._check_promise(request, num_computed_tokens, tokens)
            return tokens, is_async and bool(tokens)

        neutral: tuple[int | None, bool] = 0, False
        tokens, is_async = self._guard.call("get_num_new_matched_tokens", match, neutral)
        self._local_tokens[request.request_id] = num_computed_tokens
        self._is_async[request.request_id] = is_async
        return tokens, is_async

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM took the promise (or less of it, or none) and gave the request its blocks."""
        half = self._scheduler
        if half is None:
            return
        table = blocks.get_block_ids()[0]
        if num_external_tokens > 0:
            self._account(request.request_id, table, num_external_tokens)
        self._guard.call(
            "update_state_after_alloc", lambda: half.admitted(self._view(request), table, num_external_tokens), None
        )

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """The tokens of an admitted hit by the tier that had them."""
        half = self._scheduler
        if half is None or num_external_tokens == 0:
            return {}

        def split() -> dict[CacheHitSource, int]:
            found = half.hit_sources(request.request_id, num_external_tokens)
            return {CacheHitSource(name): tokens for name, tokens in found.items() if tokens}

        return self._guard.call("get_external_cache_hit_sources", split, {CacheHitSource.HOST: num_external_tokens})

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Plan this step's copies; whatever was promised and isn't in the plan is reported lost."""
        half = self._scheduler
        if half is None:
            return KVSnapMetadata()

        def make_plan() -> StepPlan | None:
            if scheduler_output.preempted_req_ids:
                half.preempted(scheduler_output.preempted_req_ids)
            return half.plan_step(list(scheduled_of(scheduler_output)))

        plan = self._guard.call("build_connector_meta", make_plan, None)
        meta = KVSnapMetadata(
            plan=None if plan is None or plan.is_empty() else plan,
            seq=self._guard.call("build_connector_meta", lambda: half.planned_seq, 0),
        )
        if self._admitted:
            self._settle(meta)
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """What the workers say about the step."""
        half = self._scheduler
        if half is None:
            return
        meta = connector_output.kv_connector_worker_meta
        reports = meta.reports if isinstance(meta, KVSnapWorkerMetadata) else None
        errors = set(connector_output.invalid_block_ids or ())
        self._guard.call("update_connector_output", lambda: half.step_done(reports, errors), None)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. Its blocks are never held: stores have ended by then."""
        request_id = request.request_id
        self._requests.pop(request_id, None)
        self._local_tokens.pop(request_id, None)
        self._is_async.pop(request_id, None)
        half = self._scheduler
        if half is not None:
            self._guard.call("request_finished", lambda: half.finished(request_id), None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The same, as vLLM asks connectors that support several groups."""
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        """Make every chunk in DRAM unreachable; always true, or kvsnap turns itself off.

        Where weights can change in place, what is stored may be another model's from here on.
        """
        half = self._scheduler
        if half is None or self._guard.is_off:
            return True
        try:
            if not half.reset():
                raise RuntimeError("the DRAM tier refused to be reset")
        except Exception as error:
            self._guard.turn_off(f"a reset failed, so old chunks might be answered: {error}")
            self._guard.failed("reset_cache", error)
        if self._weights_can_change():
            self._guard.turn_off("the cache was reset where weights can change in place; restart to cache again")
        return True

    def _weights_can_change(self) -> bool:
        # A declared weights_digest makes no difference: it was declared of the weights before.
        in_place = getattr(self._vllm_config, "weight_transfer_config", None) is not None
        return in_place or bool(getattr(self._vllm_config.model_config, "enable_sleep_mode", False))

    # -- both ------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Numbers since the last call, if there are any."""
        half = self._scheduler or self._worker
        if half is None:
            return None
        data = dict(self._guard.call("get_kv_connector_stats", lambda: half.take_stats(), None) or {})
        if self._guard.num_errors > self._errors_told:
            data["hook_errors"] = self._guard.num_errors - self._errors_told
            self._errors_told = self._guard.num_errors
        if self._guard.is_off and not self._off_told:
            data["off_now"] = 1
            self._off_told = True
        return KVSnapStats(data=data) if data else None

    def shutdown(self) -> None:
        """Flush and close within bounds. Nothing depends on being called."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                self._close(half)
        try:
            rendezvous.remove_own(self._engine_id)
        except Exception as error:
            log.error("kvsnap: shutdown failed", exc_info=error)

    def _close(self, half: SchedulerHalf | WorkerHalf) -> None:
        try:
            half.close() if isinstance(half, WorkerHalf) else half.shutdown()
        except Exception as error:
            log.error("kvsnap: shutdown failed", exc_info=error)

    @classmethod
    def supports_sleep_mode(cls, *args: Any, **kwargs: Any) -> bool:
        """vLLM 0.33 asks: yes, see `unregister_kv_caches`."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The physical order of the KV cache to ask for; see `compat.wanted_layout`."""
        try:
            return wanted_layout(vllm_config, is_head_major=_is_head_major())
        except Exception as error:
            if is_strict():
                raise
            log.warning("kvsnap: no wish for a KV cache layout: %s", error)
            return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """No: nothing is done in layer hooks, so full CUDA graphs are fine."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Rebuild the numbers in the front end."""
        return KVSnapStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """`kvsnap:*` on /metrics."""
        return KVSnapPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # -- inside ----------------------------------------------------------------------

    def _view(self, request: Request) -> LiveRequest:
        view = self._requests.get(request.request_id)
        if view is None or view.request is not request:
            view = self._requests[request.request_id] = LiveRequest(request)
        return view

    def _check_promise(self, request: Request, local: int, tokens: int | None) -> None:
        """A promise that breaks vLLM's rules would end the engine; better find it here."""
        if tokens is None or tokens == 0:
            return
        fits = tokens > 0 and tokens % self._block_tokens == 0 and local + tokens < request.num_tokens
        if not fits:
            raise ValueError(f"a promise of {tokens} tokens after {local} of {request.num_tokens} is not possible")

    def _account(self, request_id: str, table: Sequence[int], num_external_tokens: int) -> None:
        first = self._local_tokens.get(request_id, 0) // self._block_tokens
        count = -(-num_external_tokens // self._block_tokens)
        self._admitted[request_id] = _Admitted(
            frozenset(table[first : first + count]), self._is_async.get(request_id, False)
        )

    def _settle(self, meta: KVSnapMetadata) -> None:
        """Compare what was promised with what the plan fills."""
        plan = meta.plan
        for request_id, admitted in self._admitted.items():
            ops = [] if plan is None else [op for op in plan.loads if op.request_id == request_id]
            is_planned = plan is not None and request_id in plan.async_loads
            if plan is not None and is_planned:
                ops += plan.async_loads[request_id]
            missing = admitted.blocks.difference(*(op.block_ids for op in ops))
            if missing:
                meta.lost_blocks += sorted(missing)
                if not self._guard.is_off:
                    self._guard.failed("plan", ValueError(f"{len(missing)} promised blocks are not in the plan"))
            if admitted.is_async and not is_planned:
                meta.lost_requests.append(request_id)
        self._admitted.clear()


def _is_head_major() -> bool:
    """Whether the GPU's kernels want heads outside tokens in a page: FlashInfer's on Blackwell."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    return capability is not None and capability.major == 10
