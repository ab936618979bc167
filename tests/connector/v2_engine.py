"""vLLM's scheduler and worker around both real halves in one process, with steps in flight.

Follows `vllm/v1/worker/gpu/kv_connector.py` (model runner V2) hook by hook, or the mixin of
model runner V1, and the scheduler's rules for asynchronous loads: blocks of an aborted
request are kept until its load is reported, a report of anything else is an assertion.
The device is a `SimDevice`: a step's forward pass happens when the device gets to it,
which may be after the next steps have been scheduled. It checks what it reads.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvsnap_connector import startup
from kvsnap_connector.cuda_worker import CudaWorkerHalf
from kvsnap_connector.pinning import Pinned
from tests.connector.fakes import Backend, Request
from tests.connector.sim_device import SimDevice
from tests.connector.test_compat import TOKENS, make_cache, make_config

CHUNK = 2 * TOKENS
BLOCK = 3 * 512


def next_token(num_tokens: int) -> int:
    """What the model says after so many."""
    return 7919 * num_tokens % 1000


@dataclass(eq=False)
class Running:
    """One request as the scheduler sees it."""

    request: Request
    max_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    state: str = "waiting"
    """waiting, loading, loaded, running, gone (aborted under a load)."""
    placeholders: int = 0
    """Tokens that steps in flight will produce."""
    was_scheduled: bool = False
    round: int = 0
    """Raised by a preemption: output of steps from before it no longer counts."""

    @property
    def id(self) -> str:
        return self.request.request_id


@dataclass
class Output:
    """What a step gives back, one or two steps later."""

    ran: list[tuple[Running, int, int]]
    transfer: Any
    errors: set[int]
    report: Any


class _HalfWithoutThread(CudaWorkerHalf):
    """The play calls `poll` and `move_one`, so that they too happen at any time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, starts_thread=False)


class V2Engine:
    """See the module."""

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        monkeypatch: Any,
        *,
        is_v2: bool = True,
        num_blocks: int = 15,
        num_pinned: int | None = None,
        num_pieces: int = 4,
    ) -> None:
        self.rng = rng
        self.is_v2 = is_v2
        self.speeds = rng.choice([[0, 0, 0, 1], [0, 0, 1, 4], [0, 1, 5, 30]])
        """Steps that the device takes now and then: a slow one is many engine steps behind."""
        self.config: Any = make_config(attn_backend=Backend("FLASH_ATTN"), isa="")
        self.config.device_config.device_type = "cuda"
        self.config.use_v2_model_runner = is_v2
        self.config.scheduler_config = SimpleNamespace(max_num_batched_tokens=4 * TOKENS)
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (model / "model.safetensors").write_bytes(b"weights")
        self.config.model_config.model = str(model)
        self.config.kv_transfer_config = SimpleNamespace(
            engine_id=f"engine-{folder.name}",
            kv_connector_extra_config={
                "cache_dir": str(folder / "cache"),
                "chunk_tokens": CHUNK,
                "dram": "52KB",
                "dram_dir": str(folder),
                "disk": "64MB",
                "persist": "none",
                "preload": "off",
                "load_policy": "always",
            },
            is_kv_producer=True,
            is_kv_consumer=True,
            kv_load_failure_policy="fail",
        )
        cache_config, self.caches = make_cache(rng.choice(["LBHNC", "BLNHC"]), num_blocks=num_blocks)
        self.cache_config: Any = cache_config
        self.devices: list[SimDevice] = []

        def open_device(cache: torch.Tensor, places: Any) -> SimDevice:
            self.devices.append(SimDevice(cache, places, rng))
            return self.devices[-1]

        def pin(region: Any, *args: Any) -> tuple[Pinned, Any]:
            slots = region.num_slots if num_pinned is None else num_pinned
            return Pinned(slots, slots * region.stride, 0.0, None, None, ()), lambda: None

        monkeypatch.setattr(startup, "open_device", open_device)
        monkeypatch.setattr(startup, "CudaWorkerHalf", _HalfWithoutThread)
        monkeypatch.setattr(startup, "pin_for", pin)
        monkeypatch.setattr(startup, "_MOST_STAGING_BYTES", (num_pieces + 3) * 2 * BLOCK)
        self._start()
        self.free = list(range(1, num_blocks))  # the last one freed is the next one given: reuse at once
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.gone: dict[str, Running] = {}
        self.preempted: set[str] = set()
        self.in_flight: deque[Output] = deque()
        self.wrong: list[str] = []
        self.hits = self.finished = 0

    def _start(self) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        from kvsnap_connector.connector import KVSnapConnector

        self.worker: Any = KVSnapConnector(self.config, KVConnectorRole.WORKER, self.cache_config)
        self.worker.register_kv_caches(self.caches)
        self.scheduler: Any = KVSnapConnector(self.config, KVConnectorRole.SCHEDULER, self.cache_config)
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        assert self.scheduler._guard.off_reason is None, self.scheduler._guard.off_reason
        self.half: Any = self.worker._worker
        self.device = self.devices[-1]

    # -- a client --------------------------------------------------------------------

    def submit(self, name: str, tokens: list[int], max_tokens: int) -> None:
        req = Running(Request(name, tokens), max_tokens)
        self.scheduler.on_new_request(req.request)
        self.waiting.append(req)

    def abort(self, req: Running) -> None:
        """`finish_requests`: blocks that a load may still write are kept."""
        if req in self.waiting:
            self.waiting.remove(req)
        if req in self.running:
            self.running.remove(req)
        self._finish(req)

    def preempt(self, req: Running) -> None:
        self.running.remove(req)
        self._free(req)
        req.computed, req.placeholders, req.state, req.round = 0, 0, "waiting", req.round + 1
        self.waiting.insert(0, req)
        self.preempted.add(req.id)

    # -- the scheduler ---------------------------------------------------------------

    def step(self) -> None:
        """Schedule and launch one step; its output comes back in `update`."""
        ran: list[tuple[Running, int, int]] = []
        has_sync_loads = False
        budget = 4 * TOKENS
        preempted_now = False
        for req in list(self.running):
            left = req.request.num_tokens + req.placeholders - req.computed
            count = min(budget, left)
            if count <= 0 or req not in self.running:
                continue
            while not self._allocate(req, req.computed + count):
                victim = self.running[-1]
                self.preempt(victim)
                preempted_now = True
                ran = [item for item in ran if item[0] is not victim]
                if victim is req:
                    break
            if req in self.running:
                ran.append((req, req.computed, count))
                budget -= count
        for req in [] if preempted_now else list(self.waiting):
            if budget <= 0:
                break
            admitted = self._admit(req, budget)
            if admitted is not None:
                has_sync_loads |= admitted[1]
                ran.append((req, req.computed, admitted[0]))
                budget -= admitted[0]
        tables = {req.id: list(req.blocks) for req in [*self.waiting, *self.running]}
        new = [item for item in ran if not item[0].was_scheduled]
        cached = [item for item in ran if item[0].was_scheduled]
        meta = self.scheduler.build_connector_meta(
            SimpleNamespace(
                scheduled_new_reqs=[SimpleNamespace(req_id=r.id, num_computed_tokens=done) for r, done, _ in new],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[r.id for r, _, _ in cached], num_computed_tokens=[done for _, done, _ in cached]
                ),
                num_scheduled_tokens={r.id: count for r, _, count in ran},
                preempted_req_ids=self.preempted,
                kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: (tables[name],)),
            )
        )
        self.preempted = set()
        for req, done, count in ran:
            req.was_scheduled = True
            req.computed = done + count
            if req.computed >= req.request.num_tokens + req.placeholders:
                req.placeholders += 1
        self._execute(meta, ran, has_sync_loads)

    def _admit(self, req: Running, budget: int) -> tuple[int, bool] | None:
        """(tokens to run, whether they were loaded synchronously); None if it doesn't run in this step."""
        if req.state == "loading":
            return None
        external, is_async, is_loaded = 0, False, req.state == "loaded"
        if not is_loaded:
            external, is_async = self.scheduler.get_num_new_matched_tokens(req.request, 0)
            if external is None:
                return None
            if external and is_async:
                if self._missing(req) + self._reserved() > len(self.free) or not self._allocate(req, external):
                    return None
                self._tell(req, external)
                req.state, req.computed = "loading", external
                self.hits += 1
                return None
        start = req.computed if is_loaded else external
        count = min(budget, req.request.num_tokens - start)
        if not self._allocate(req, start + count):
            return None
        self._tell(req, external)
        self.hits += bool(external)
        req.computed, req.state = start, "running"
        self.waiting.remove(req)
        self.running.append(req)
        return count, bool(external)

    def _tell(self, req: Running, external: int) -> None:
        table = list(req.blocks)
        self.scheduler.update_state_after_alloc(req.request, SimpleNamespace(get_block_ids=lambda: (table,)), external)

    def update(self) -> None:
        """`update_from_output` of the oldest step in flight."""
        output = self.in_flight.popleft()
        if output.errors:
            self._go_back(output.errors)
        for req, round_, end in output.ran:
            if req not in self.running or req.round != round_:
                continue
            if end < req.request.num_tokens or req.computed < end:
                continue
            req.placeholders = max(0, req.placeholders - 1)
            req.request._all_token_ids.append(next_token(req.request.num_tokens))
            if req.request.num_tokens - req.request.num_prompt_tokens >= req.max_tokens:
                self.running.remove(req)
                self._finish(req)
                self.finished += 1
        self.scheduler.update_connector_output(
            SimpleNamespace(
                kv_connector_worker_meta=output.report, invalid_block_ids=output.errors, **vars(output.transfer)
            )
        )
        for name in output.transfer.finished_recving or ():
            self._received(name)

    def _received(self, name: str) -> None:
        if name in self.gone:
            self.free.extend(self.gone.pop(name).blocks)
            return
        req = next((req for req in self.waiting if req.id == name), None)
        assert req is not None, f"{name} was reported, and nobody waits for it"
        assert req.state == "loading", f"{name} was reported twice"
        if req.computed == 0:
            self._free(req)
            req.state = "waiting"
            return
        req.state = "loaded"

    def _go_back(self, bad: set[int]) -> None:
        """Policy "recompute". A request that loads keeps its blocks until all of its load is over."""
        for req in [*self.waiting, *self.running]:
            held = req.blocks[: -(-req.computed // TOKENS)]
            first = next((i for i, block in enumerate(held) if block in bad), None)
            if first is None:
                continue
            if req.state == "loading":
                req.computed = first * TOKENS
            else:
                req.computed = min(req.computed, first * TOKENS)
                req.placeholders, req.round = 0, req.round + 1

    def _allocate(self, req: Running, tokens: int) -> bool:
        needed = -(-tokens // TOKENS) - len(req.blocks)
        if needed > len(self.free):
            return False
        req.blocks += [self.free.pop() for _ in range(max(0, needed))]
        return True

    def _missing(self, req: Running) -> int:
        """Blocks that it needs beyond those that it has, to run at all."""
        return max(0, -(-req.request.num_tokens // TOKENS) - len(req.blocks))

    def _reserved(self) -> int:
        """Blocks that those need who hold some and can't be preempted, as `_inflight_prefill_reserved_blocks`: else
        requests whose loads are over could hold all blocks, and none could go on."""
        return sum(self._missing(req) for req in self.waiting if req.state in ("loading", "loaded"))

    def _free(self, req: Running) -> None:
        self.free.extend(req.blocks)
        req.blocks = []

    def _finish(self, req: Running) -> None:
        self.scheduler.request_finished_all_groups(req.request, (list(req.blocks),))
        if req.state == "loading":
            self.gone[req.id] = req
        else:
            self._free(req)

    # -- the worker ------------------------------------------------------------------

    def _execute(self, meta: Any, ran: list[tuple[Running, int, int]], has_sync_loads: bool) -> None:
        """`pre_forward`, the model, `post_forward`."""
        worker = self.worker
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        self._wander()
        is_started = has_sync_loads
        if is_started:
            worker.start_load_kv(SimpleNamespace(), scheduler_output=None, request_ids=[])
        for req, done, count in ran:
            self._queue_forward(req, done, done + count)
        worker.finish_forward()
        self._wander()
        if not is_started:
            worker.start_load_kv(SimpleNamespace())
        worker.wait_for_save()
        transfer = worker.get_transfer_results(set())
        errors = worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        report = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        self.in_flight.append(
            Output([(req, req.round, done + count) for req, done, count in ran], transfer, errors, report)
        )

    def _wander(self) -> None:
        """The device goes on for a while; so may the thread."""
        self.device.run(self.rng.choice(self.speeds))
        if self.rng.random() < 0.3:
            self.half.move_one()
        if self.rng.random() < 0.3:
            self.half.poll()

    def _queue_forward(self, req: Running, start: int, end: int) -> None:
        table, tokens = list(req.blocks), list(req.request._all_token_ids)
        while len(tokens) < end:  # sampled by a step that is still in flight
            tokens.append(next_token(len(tokens)))
        whole = end // TOKENS
        written = table[start // TOKENS : -(-end // TOKENS)]
        name = req.id

        def forward() -> None:
            for i in range(start // TOKENS):
                if not np.array_equal(self._read(table[i]), self.kv(tokens, i)):
                    self.wrong.append(f"{name} computes {start} to {end} on block {i}, which is wrong")
            for i, block in enumerate(written, start // TOKENS):
                self._write(block, self.kv(tokens, i) if i < whole else np.full(BLOCK, 0xBB, dtype=np.uint8))

        self.device.compute.add(forward)

    def kv(self, tokens: list[int], i: int) -> np.ndarray[Any, Any]:
        """What block i of these tokens holds, in the order of a slice."""
        seed = hashlib.sha256(np.array(tokens[: (i + 1) * TOKENS], dtype=np.uint32).tobytes()).digest()
        return np.resize(np.frombuffer(seed, dtype=np.uint8), BLOCK)

    def _read(self, block: int) -> np.ndarray[Any, Any]:
        buffer = torch.empty(self.device.block_bytes, dtype=torch.uint8)
        self.device.view.gather(torch.tensor([block]), buffer)
        found: np.ndarray[Any, Any] = buffer.numpy()
        return found

    def _write(self, block: int, content: np.ndarray[Any, Any]) -> None:
        self.device.view.scatter(torch.from_numpy(content.copy()), torch.tensor([block]))

    # -- the end ---------------------------------------------------------------------

    def drain(self) -> None:
        """Run all to its end: nothing hangs, no block is lost."""
        for _ in range(400):
            if not (self.waiting or self.running or self.gone or self.in_flight):
                break
            if len(self.in_flight) < 2:
                self.step()
            self.device.run(200)
            self.half.move_one()
            if self.in_flight:
                self.update()
        assert [*self.waiting, *self.running, *self.gone] == [], "a request hangs"
        self.device.run_all()
        while self.half.move_one():
            self.device.run_all()
        self.half.poll()
        assert self.half.is_idle
        assert sorted(self.free) == list(range(1, self.cache_config.num_blocks)), "blocks are lost"

    def check_slots(self, prompts: list[list[int]]) -> int:
        """Every block that the tier would answer with has the right bytes; how many there are."""
        good = 0
        for number, prompt in enumerate(prompts):
            request = Request(f"check-{number}", [*prompt, 1])
            tokens, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
            promise = self.scheduler._scheduler.planner._requests[request.request_id].promise
            i = 0
            for piece, (slot, _) in zip(promise.pieces, promise.places, strict=True) if tokens else ():
                blocks = self.half._region.area(slot)[: 2 * BLOCK].reshape(2, BLOCK)
                for block in blocks[piece.first_block : piece.first_block + piece.num_blocks]:
                    assert np.array_equal(block, self.kv(prompt, i)), "a chunk in the tier has wrong bytes"
                    i += 1
            good += i
            self.scheduler.request_finished_all_groups(request, ([],))
        return good

    def stop(self) -> None:
        for connector in (self.worker, self.scheduler):
            connector.shutdown()
