"""A toy engine that drives the real planner, cache and DRAM file the way vLLM does.

It has device blocks, a prefix cache of its own, chunked prefill, preemption and aborts,
recomputation of blocks that a worker reports as not loaded, and the real worker half of
every rank. The KV of a block is a pure function of all tokens up to its end (and the
salt), and what is computed on top of a wrong block is wrong too, as in a model. So a
wrong byte anywhere is seen at once: after every step, every block of every running
request is compared with what it must hold.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvsnap.cache import CacheOptions, TieredCache
from kvsnap.namespace import Namespace
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.dram import DramRegion, DramTier
from kvsnap_connector.copier import Bytes, CpuCopier, PageViews
from kvsnap_connector.metadata import StepPlan
from kvsnap_connector.planner import Planner
from kvsnap_connector.worker import WorkerHalf
from tests.disk_fakes import make_namespace

_HANG_S = 60.0


@dataclass
class ToyRequest:
    """One request; also what the planner sees of it."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    salt: str | None = None
    cacheable: str | None = None
    wants_store: bool = True
    may_load: bool = True
    max_tokens: int = 1
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_running: bool = False
    loaded_tokens: int = 0
    asked: int = 0
    is_stale: bool = False
    """It ran on while the weights changed under it: what it holds is nobody's business."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def table(self) -> list[int]:
        return self.blocks


def request(request_id: str, tokens: Sequence[int], **kwargs: object) -> ToyRequest:
    """A request for these prompt tokens."""
    return ToyRequest(request_id, list(tokens), len(tokens), **kwargs)  # type: ignore[arg-type]


class ToyEngine:
    """See the module. Close it (`stop`) or drop it as a kill would (`kill`)."""

    def __init__(
        self,
        namespace: Namespace,
        cache_dir: Path,
        dram_dir: Path,
        *,
        slots: int = 8,
        num_blocks: int = 64,
        step_tokens: int = 128,
        prefix_caching: bool = True,
        options: CacheOptions | None = None,
        disk_cap: int | None = 1 << 30,
        threads: bool = True,
        load_policy: str = "always",
    ) -> None:
        self.namespace = namespace
        self.size = namespace.layout.block_tokens
        self.step_tokens = step_tokens
        self.prefix_caching = prefix_caching
        geometry = namespace.geometry
        self.ranks = namespace.layout.world_size
        chunk = geometry.chunk_bytes(namespace.chunk_tokens)
        tables = 8192 * 3 + slots * (1024 + 8 * self.ranks)
        dram = DramTier.open(
            dram_dir,
            cache_dir,
            namespace.id(),
            geometry,
            budget_bytes=slots * chunk + tables + 64 * self.ranks,
            ranks=self.ranks,
        )
        self.disk = None if disk_cap is None else DiskTier(cache_dir, namespace, cap_bytes=disk_cap)
        self.cache = TieredCache(namespace, dram, self.disk, options)
        self.planner = Planner(self.cache, load_policy=load_policy, lookup_seconds=30.0)
        self.block_bytes = [geometry.slice_bytes(i, 1) for i in range(geometry.num_slices)]
        self.device = [
            np.zeros((num_blocks, self.block_bytes[namespace.layout.slice_of_rank(r)]), dtype=np.uint8)
            for r in range(self.ranks)
        ]
        self.fails_load: Callable[[int, Sequence[int]], bool] = lambda rank, block_ids: False
        self.workers = [self._worker(rank, dram) for rank in range(self.ranks)]
        self.free = list(range(num_blocks - 1, 0, -1))  # block 0 is the null block
        self.hashed: dict[bytes, int] = {}
        self.waiting: list[ToyRequest] = []
        self.running: list[ToyRequest] = []
        self.preempted_ids: list[str] = []
        self.num_scheduled = 0
        self.version = 0  # of the weights: what is computed after a reset differs
        if threads:
            self.cache.start()

    def _worker(self, rank: int, dram: DramTier) -> WorkerHalf:
        layout = self.namespace.layout
        part = layout.slice_of_rank(rank)
        return WorkerHalf(
            rank,
            _FailingCopier(self, rank),
            DramRegion.attach(dram.path, dram.nonce.hex(), rank=rank, slice_index=part),
            blocks_per_chunk=self.namespace.geometry.blocks_per_chunk,
            is_writer=layout.slices[part].ranks[0] == rank,
        )

    # -- what a client does ----------------------------------------------------------

    def submit(self, req: ToyRequest) -> ToyRequest:
        self.planner.new_request(req)
        self.waiting.append(req)
        return req

    def run(self, *requests: ToyRequest) -> None:
        """Submit and step until all are finished; a hang is a failure after a time that no busy machine needs."""
        for req in requests:
            self.submit(req)
        deadline = time.monotonic() + _HANG_S
        while self.waiting or self.running:
            self.step()
            assert time.monotonic() < deadline, "a request hangs"

    def abort(self, req: ToyRequest) -> None:
        for queue in (self.waiting, self.running):
            if req in queue:
                queue.remove(req)
                self._free(req)
                self.planner.finished(req.request_id)

    def preempt(self, req: ToyRequest) -> None:
        self.running.remove(req)
        self._free(req)
        req.computed, req.is_running, req.is_stale = 0, False, False
        self.preempted_ids.append(req.request_id)
        self.waiting.insert(0, req)

    def reset(self, *, connector: bool = True, preempt: bool = True) -> None:
        """Preempt all if asked to, empty the engine's own prefix cache, and (as vLLM does last) reset the connector."""
        for req in reversed(self.running[:]) if preempt else ():
            self.preempt(req)
        self.hashed.clear()
        if connector:
            self.planner.reset()

    def change_weights(self) -> None:
        """From here on every block holds something else than before. Requests that run go on, with a mixture."""
        self.version += 1
        for req in self.running:
            req.is_stale = True

    def stop(self) -> None:
        self.cache.flush(10.0)
        self.kill()

    def kill(self) -> None:
        """End without telling anybody: only what is durable stays."""
        for worker in self.workers:
            worker.close()
        self.workers = []
        self.cache.close()

    def step_makes_progress(self) -> bool:
        """Step; False where nothing was scheduled and nobody waits for a promotion."""
        waiting_for_disk = self.planner.status()["waiting"] > 0
        before = self.num_scheduled
        self.step()
        return self.num_scheduled > before or waiting_for_disk

    # -- one step, in vLLM's order ---------------------------------------------------

    def step(self) -> StepPlan:
        scheduled: list[tuple[ToyRequest, int, int]] = []
        budget = self.step_tokens
        for req in list(self.running):
            count = min(budget, req.num_tokens - req.computed)
            if count <= 0 or not self._allocate(req, req.computed + count):
                continue
            scheduled.append((req, req.computed, count))
            budget -= count
        for req in list(self.waiting):
            if budget <= 0:
                break
            admitted = self._admit(req, budget)
            if admitted:
                scheduled.append((req, req.computed, admitted))
                budget -= admitted
        self.num_scheduled += len(scheduled)
        if not scheduled:
            time.sleep(0.001)  # as vLLM does
        self.planner.preempted(self.preempted_ids)
        self.preempted_ids = []
        plan = self.planner.plan_step(
            [(req.request_id, computed, count, req.table) for req, computed, count in scheduled]
        )
        for worker in self.workers:
            worker.load(plan)
        for req, computed, count in scheduled:
            self._compute(req, computed, computed + count)
        for worker in self.workers:
            worker.store(plan)
        for req, computed, count in scheduled:
            req.computed = computed + count
        bad_blocks = set().union(*(worker.take_failed_blocks() for worker in self.workers))
        self._go_back(bad_blocks)
        for req, _, _ in scheduled:
            self._check(req)
            self._sample(req)
        reports = [report for worker in self.workers if (report := worker.take_report()) is not None]
        self.planner.step_done(reports, are_blocks_lost=bool(bad_blocks))
        return plan

    def _sample(self, req: ToyRequest) -> None:
        if req.computed < req.num_tokens:
            return
        if req.num_tokens - req.num_prompt_tokens < req.max_tokens - 1:
            req.token_ids.append((req.num_tokens * 7919) % 50000)
        else:
            self.running.remove(req)
            self._free(req)
            self.planner.finished(req.request_id)

    def _go_back(self, bad_blocks: set[int]) -> None:
        """Policy "recompute": every request goes back to its first block that was not loaded."""
        self.hashed = {key: block for key, block in self.hashed.items() if block not in bad_blocks}
        for req in self.running:
            first = next((i for i, block in enumerate(req.blocks) if block in bad_blocks), None)
            if first is not None:
                req.computed = min(req.computed, first * self.size)
                for i in range(first, len(req.blocks)):
                    self.hashed = {key: block for key, block in self.hashed.items() if block != req.blocks[i]}

    def _admit(self, req: ToyRequest, budget: int) -> int:
        local = self._local_hit(req)
        req.asked += 1
        external, _ = self.planner.match(req, len(local) * self.size)
        if external is None:
            return 0
        assert external % self.size == 0
        assert external >= 0
        start = len(local) * self.size + external
        assert start <= req.num_tokens - 1, "nothing is left to compute: vLLM would die"
        count = min(budget, req.num_tokens - start)
        if len(set(self.free) - set(local)) < -(-(start + count) // self.size) - len(local):
            return 0
        self.free = [block for block in self.free if block not in local]
        req.blocks = list(local)
        self._allocate(req, start + count)
        req.computed = start
        self.planner.admitted(req, req.blocks, external)
        req.loaded_tokens += external
        self.waiting.remove(req)
        self.running.append(req)
        for i in range(len(local), start // self.size):  # published before they are loaded, as vLLM does
            self._publish(req, i)
        return count

    def _local_hit(self, req: ToyRequest) -> list[int]:
        found: list[int] = []
        if self.prefix_caching:
            for i in range((req.num_tokens - 1) // self.size):
                block = self.hashed.get(self._content_key(req, i))
                if block is None:
                    break
                found.append(block)
        return found

    def _allocate(self, req: ToyRequest, tokens: int) -> bool:
        needed = -(-tokens // self.size) - len(req.blocks)
        if needed > len(self.free):
            return False
        for _ in range(max(0, needed)):
            block = self.free.pop()
            for key in [key for key, held in self.hashed.items() if held == block]:
                del self.hashed[key]
            for device in self.device:
                device[block] = 0xAA  # what nobody fills is wrong
            req.blocks.append(block)
        return True

    def _free(self, req: ToyRequest) -> None:
        in_use = {block for other in self.running if other is not req for block in other.blocks}
        for block in req.blocks:
            if block not in in_use and block not in self.free:
                self.free.insert(0, block)
        req.blocks = []

    def _publish(self, req: ToyRequest, i: int) -> None:
        if self.prefix_caching and not req.is_stale:
            self.hashed.setdefault(self._content_key(req, i), req.blocks[i])

    # -- the model and the workers ---------------------------------------------------

    def _content_key(self, req: ToyRequest, i: int) -> bytes:
        tokens = np.array(req.token_ids[: (i + 1) * self.size], dtype=np.uint32).tobytes()
        return hashlib.sha256(repr(req.salt).encode() + tokens).digest()

    def kv(self, req: ToyRequest, i: int, rank: int) -> Bytes:
        """What block i of the request must hold on a rank."""
        part = self.namespace.layout.slice_of_rank(rank)
        seed = hashlib.sha256(self._content_key(req, i) + bytes([part, self.version])).digest()
        return np.resize(np.frombuffer(seed, dtype=np.uint8), self.block_bytes[part])

    def _compute(self, req: ToyRequest, start: int, end: int) -> None:
        for i in range(start // self.size, end // self.size):
            for rank, device in enumerate(self.device):
                is_right = all((device[req.blocks[j]] == self.kv(req, j, rank)).all() for j in range(i))
                device[req.blocks[i]] = self.kv(req, i, rank) if is_right else 0xBB
            self._publish(req, i)

    def _check(self, req: ToyRequest) -> None:
        for i in range(0 if req.is_stale else req.computed // self.size):
            for rank, device in enumerate(self.device):
                assert (device[req.blocks[i]] == self.kv(req, i, rank)).all(), (
                    f"block {i} of {req.request_id} is wrong on rank {rank}"
                )


class _FailingCopier(CpuCopier):
    """A rank's copier whose loads fail when the test says so."""

    def __init__(self, engine: ToyEngine, rank: int) -> None:
        super().__init__(PageViews(layers=(engine.device[rank],)))
        self._engine, self._rank = engine, rank

    def scatter(self, area: Bytes, block_ids: Sequence[int]) -> None:
        if self._engine.fails_load(self._rank, block_ids):
            raise RuntimeError("the copy engine failed")
        super().scatter(area, block_ids)


@contextmanager
def toy_engines(folder: Path, **defaults: Any) -> Iterator[Callable[..., ToyEngine]]:
    """Starts engines, one after the other, on the same two tiers unless told otherwise; kills them at the end."""
    engines: list[ToyEngine] = []
    (folder / "shm").mkdir()

    def make(*, cache_dir: Path | None = None, **kwargs: Any) -> ToyEngine:
        engine = ToyEngine(make_namespace(), cache_dir or folder / "cache", folder / "shm", **(defaults | kwargs))
        engines.append(engine)
        return engine

    try:
        yield make
    finally:
        for engine in engines:
            engine.kill()


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids; equal seeds begin alike."""
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(count)]
