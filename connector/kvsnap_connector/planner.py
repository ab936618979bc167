"""The planner: which hits are promised, what the workers copy, when.

Called by the engine's scheduler between steps, so nothing here waits: look-ups, and
bookkeeping of promises and plans. Without vLLM's types, so that tests drive it with
plain objects; `connector.py` translates.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvsnap.cache import TieredCache
from kvsnap.index import READING, READY, Chunk
from kvsnap.keys import ChunkKey, KeyChain, root_key, scope_name
from kvsnap.match import Match, Promise
from kvsnap_connector.metadata import CopyOp, StepPlan, WorkerReport
from kvsnap_connector.requests import RequestState, RequestView
from kvsnap_connector.stores import StorePlanner

log = logging.getLogger(__name__)

MAX_WAITERS = 64
"""Requests that may wait for promotions at the same time."""
_MAX_ROUNDS = 3
_PROBE_EVERY_S = 30.0
_MOST_STEPS = 8
_PREFILL_STEP_TOKENS = 64
"""A step with fewer tokens says nothing about the speed of prefill."""

Scheduled = tuple[str, int, int, Callable[[], Sequence[int]]]
"""(request id, tokens computed before the step, tokens scheduled, its current full block table)."""


class Planner:
    """Decides for one engine.

    Args:
        cache: Both tiers.
        may_store, may_load: From `kv_role`.
        async_loads: Whether loads are reported by `finished_recving` (model runner V2).
        load_policy: `auto` or `always`.
        lookup_seconds: Longest wait for a promotion.
    """

    def __init__(
        self,
        cache: TieredCache,
        *,
        may_store: bool = True,
        may_load: bool = True,
        async_loads: bool = False,
        load_policy: str = "auto",
        lookup_seconds: float = 2.0,
    ) -> None:
        self.cache = cache
        self.off_reason: str | None = None
        self.misses: Counter[str] = Counter()
        """Why prompts got less than they could have, by reason (invariant 9)."""
        self._may_store, self._may_load, self._async = may_store, may_load, async_loads
        self._load_policy, self._lookup_seconds = load_policy, lookup_seconds
        self._chunk_tokens = cache.namespace.chunk_tokens
        self._block_tokens = cache.namespace.layout.block_tokens
        self._roots: dict[str | None, ChunkKey] = {}
        self._requests: dict[str, RequestState] = {}
        self._num_waiting = 0
        self.seq = 0
        """Number of the newest plan."""
        self._acked = 0
        self._loads: list[CopyOp] = []
        self._async_loads: dict[str, list[CopyOp]] = {}
        self._stores = StorePlanner(cache, self._extend)
        self._next_probe = 0.0
        self._steps: deque[tuple[int, float]] = deque(maxlen=_MOST_STEPS)
        self._last_step_end = 0.0
        self._failed_plans: list[Exception] = []
        self._reported: Counter[str] = Counter()

    # -- a request arrives, is asked about, is admitted, ends -------------------------

    def new_request(self, request: RequestView) -> None:
        """Start to follow a request."""
        self._state(request)

    def match(self, request: RequestView, num_local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond the engine's own hit kvsnap will load.

        Returns:
            (tokens, whether asynchronously); (None, False): ask again in the next step.
        """
        state = self._state(request)
        limit = state.end_of_tokens(self._block_tokens)
        blocked = self._why_not(state, num_local_tokens, limit)
        if blocked is not None:
            return self._no_hit(state, blocked)
        state.local = num_local_tokens
        memo = (self.cache.residency.version, num_local_tokens, limit)
        is_late = state.is_waiting and time.monotonic() >= state.deadline
        is_held = state.promise is not None or not state.answer
        if state.memo == memo and is_held and not is_late:
            return self._reply(state.answer)
        self._release(state)
        self._extend(state)
        state.answer = self._look_up(state, num_local_tokens, limit)
        state.memo = (self.cache.residency.version, num_local_tokens, limit)
        self._set_waiting(state, state.answer is None)
        return self._reply(state.answer)

    def admitted(self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request got its blocks; `num_external_tokens` of them are to be loaded now."""
        state = self._state(request)
        self._stop_waiting(state)
        promise, state.promise = state.promise, None
        try:
            if num_external_tokens > 0:
                ops = self._plan_load(state, promise, block_ids, num_external_tokens)
                if self._async:
                    self._async_loads[request.request_id] = ops
                else:
                    self._loads.extend(ops)
        finally:
            if promise is not None:
                self.cache.release(promise)

    def hit_sources(self, request_id: str, num_external_tokens: int) -> dict[str, int]:
        """Tokens of the last hit by tier, `host` or `disk`; they add up to the argument."""
        state = self._requests.get(request_id)
        sources = state.sources if state is not None else {}
        if sum(sources.values()) != num_external_tokens:
            return {"host": num_external_tokens}
        return dict(sources)

    def finished(self, request_id: str) -> None:
        """The request is over, for whatever reason; copies under way go on."""
        state = self._requests.pop(request_id, None)
        if state is not None:
            self._stop_waiting(state)
            self._release(state)

    def preempted(self, request_ids: Iterable[str]) -> None:
        """The requests lost their blocks; they will be asked about again."""
        for request_id in request_ids:
            state = self._requests.get(request_id)
            if state is not None:
                self._stop_waiting(state)
                state.start_over()

    # -- a step ----------------------------------------------------------------------

    def plan_step(self, scheduled: Sequence[Scheduled]) -> StepPlan:
        """What the workers copy in this step: the loads of its admissions, and chunks that it completes."""
        self.seq += 1
        plan = StepPlan(
            seq=self.seq,
            acked=self._acked,
            loads=self._loads,
            async_loads=self._async_loads,
        )
        self._loads, self._async_loads = [], {}
        num_tokens = 0
        for request_id, num_computed, num_scheduled, table in scheduled:
            num_tokens += num_scheduled
            state = self._requests.get(request_id)
            if state is None:
                continue
            try:
                self._stores.note_blocks(state, num_computed, num_scheduled, table)
                if state.may_store and state.epoch == self.cache.dram.epoch and self.off_reason is None:
                    self._stores.plan(plan.stores, state, num_computed, num_scheduled, table)
            except Exception as error:
                # The plan goes out all the same: it has copies that slots and requests wait for.
                state.may_store = False
                self._failed_plans.append(error)
        self._steps.append((num_tokens, time.monotonic()))
        return plan

    def step_done(self, reports: Sequence[WorkerReport] = (), *, are_blocks_lost: bool = False) -> None:
        """A step's output is back. `are_blocks_lost`: vLLM was told of blocks that it computes now instead."""
        self._measure_step()
        for report in reports:
            for slot, generation in report.failed:
                self.cache.fail(slot, generation)
        if are_blocks_lost or any(report.lost_loads for report in reports):
            # All that was planned up to here may have been computed from them, and no worker
            # stores it; plans from here on are made on what vLLM has set right.
            self._acked = self.seq
            for state in self._requests.values():
                state.start_over()
        if self.cache.has_pending_copies:
            self.cache.poll()
        if self._failed_plans:
            error, self._failed_plans = self._failed_plans[0], []
            raise error

    # -- the whole engine ------------------------------------------------------------

    def reset(self) -> bool:
        """The engine's prefix cache was reset: nothing in DRAM from before is served again."""
        for state in self._requests.values():
            self._release(state)
            self._stop_waiting(state)
        dropped = self.cache.reset()
        self._stores.forget_blocks()
        log.info("kvsnap: reset: %d chunks in DRAM made unreachable", dropped)
        return True

    def take_stats(self) -> dict[str, int]:
        """Counters that moved, by how much, since the last call."""
        now = Counter(self.cache.counts)
        now.update({f"miss_{reason.split(':')[0].replace(' ', '_')}": n for reason, n in self.misses.items()})
        moved = {name: value - self._reported[name] for name, value in now.items() if value != self._reported[name]}
        self._reported = now
        return moved

    def status(self) -> dict[str, Any]:
        """The cache's status and this engine's requests."""
        return {
            **self.cache.status(),
            "off_reason": self.off_reason,
            "requests": len(self._requests),
            "waiting": self._num_waiting,
            "misses": dict(self.misses),
        }

    # -- inside: look-up -------------------------------------------------------------

    def _state(self, request: RequestView) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            salt = request.salt
            root = self._roots.get(salt)
            if root is None:
                root = root_key(self.cache.namespace.identity.hash(), self._chunk_tokens, salt=salt)
                if salt is None:
                    self._roots[salt] = root  # salts are many; only the plain root is worth keeping
            state = RequestState(
                view=request,
                chain=KeyChain(root, self._chunk_tokens, self._block_tokens),
                scope=scope_name(lora=None, mm=False, salted=salt is not None),
                epoch=self.cache.dram.epoch,
                may_store=self._may_store and request.wants_store and request.cacheable is None,
            )
            self._requests[request.request_id] = state
        return state

    def _why_not(self, state: RequestState, num_local_tokens: int, limit: int) -> str | None:
        if self.off_reason is not None:
            return "off: " + self.off_reason
        if state.view.cacheable is not None:
            return "request not cacheable: " + state.view.cacheable
        if not self._may_load or not state.view.may_load:
            return "loading not allowed by role or request"
        if limit <= 0:
            return f"prompt below minimum: {self._block_tokens + 1} tokens"
        if limit <= num_local_tokens:
            return "engine holds it all itself"
        return None

    def _look_up(self, state: RequestState, num_local_tokens: int, limit: int) -> int | None:
        match = self.cache.match(state.chain, num_local_tokens, limit)
        if match.num_tokens <= 0 and not match.remote:
            self._miss(state, "not in the tiers")
            return 0
        if not match.is_ready:
            if self._may_wait(state, match):
                return None
            match = match.ready_part(self._block_tokens)
            if match.num_tokens <= 0:
                return 0
        promise = self.cache.promise(match)
        if promise.num_tokens < match.num_tokens:
            self._miss(state, "too much promised to waiting requests")
        state.promise = promise
        return promise.num_tokens

    def _may_wait(self, state: RequestState, match: Match) -> bool:
        cold = [piece.chunk for piece in match.pieces if piece.chunk.state != READY]
        now = time.monotonic()
        if not state.deadline and self._num_waiting >= MAX_WAITERS:
            self._miss(state, "too many requests wait already")
            return False
        if not self._is_worth_it(cold, match):  # also while it waits: the disk may have turned out slow
            self._miss(state, "reading predicted slower than computing")
            self._probe(cold, now)
            return False
        if not state.deadline:
            state.deadline = now + self._lookup_seconds
            state.note_cold(match)
        if now >= state.deadline:
            self._miss(state, "promotion took longer than lookup_seconds")
            return False
        if any(chunk.state == READING for chunk in cold):
            return True
        if state.rounds >= _MAX_ROUNDS:
            self._miss(state, "no free slots for promotion")
            return False
        state.rounds += 1
        begun = self.cache.promote(cold)
        begun += self.cache.fetch(state.chain, match.remote, state.scope)
        if begun == 0 and not self.cache.is_moving(cold):
            self._miss(state, "no free slots for promotion")
            return False
        return True

    def _is_worth_it(self, cold: Sequence[Chunk], match: Match) -> bool:
        if self._load_policy == "always":
            return True
        nbytes = sum(self.cache.geometry.chunk_bytes(chunk.tokens) for chunk in cold if chunk.slot < 0)
        fetch = sum(chunk.nbytes for chunk in match.remote)
        tokens = match.num_tokens - match.ready_part(self._block_tokens).num_tokens
        return self.cache.rates.is_worth_loading(nbytes, fetch, tokens + len(match.remote) * self._chunk_tokens)

    def _probe(self, cold: Sequence[Chunk], now: float) -> None:
        """Read one chunk now and then although it is slow, to notice when it no longer is."""
        if now >= self._next_probe:
            self._next_probe = now + _PROBE_EVERY_S
            self.cache.promote(cold[:1])

    def _extend(self, state: RequestState) -> None:
        if state.chain.num_tokens < state.view.num_tokens:
            state.chain.extend(state.view.token_ids)

    def _reply(self, answer: int | None) -> tuple[int | None, bool]:
        return answer, bool(answer) and self._async

    def _no_hit(self, state: RequestState, reason: str) -> tuple[int, bool]:
        self._release(state)
        self._set_waiting(state, waits=False)
        self._miss(state, reason)
        return 0, False

    def _miss(self, state: RequestState, reason: str) -> None:
        if not state.has_seen_miss:  # one reason a request: asked every step while it waits
            state.has_seen_miss = True
            self.misses[reason] += 1
            log.debug("kvsnap: request %s: miss: %s", state.view.request_id, reason)

    def _set_waiting(self, state: RequestState, waits: bool) -> None:
        if state.is_waiting != waits:
            state.is_waiting = waits
            self._num_waiting += 1 if waits else -1

    def _stop_waiting(self, state: RequestState) -> None:
        """The wait is over, one way or the other; a later one is another."""
        self._set_waiting(state, waits=False)
        state.memo, state.deadline, state.rounds = None, 0.0, 0

    def _release(self, state: RequestState) -> None:
        state.memo = None
        if state.promise is not None:
            self.cache.release(state.promise)
            state.promise = None

    def _measure_step(self) -> None:
        """The speed of prefill, for `load_policy`; several steps may be in flight, and they end in order."""
        now = time.monotonic()
        if self._steps:
            num_tokens, started = self._steps.popleft()
            if num_tokens >= _PREFILL_STEP_TOKENS:
                self.cache.rates.saw_prefill(num_tokens, now - max(started, self._last_step_end))
        self._last_step_end = now

    # -- inside: loads ---------------------------------------------------------------

    def _plan_load(
        self, state: RequestState, promise: Promise | None, block_ids: Sequence[int], num_tokens: int
    ) -> list[CopyOp]:
        """Copies for the first `num_tokens` promised tokens, in order of position."""
        request_id = state.view.request_id
        size = self._block_tokens
        if promise is None or num_tokens > promise.num_tokens:
            # Never seen, and never to be answered with what is not there: a generation that
            # no slot has makes the workers report these blocks, and vLLM computes them.
            log.error("kvsnap: request %s was admitted with %d tokens not promised", request_id, num_tokens)
            first = (promise.start_tokens if promise is not None else state.local) // size
            lost = list(block_ids[first : first + num_tokens // size])
            return [CopyOp(slot=0, generation=0, first_block=0, block_ids=lost, request_id=request_id)]
        ops: list[CopyOp] = []
        slots: list[int] = []
        used: list[Chunk] = []
        state.sources = {}
        at, left = promise.start_tokens // size, num_tokens // size
        for piece, (slot, generation) in zip(promise.pieces, promise.places, strict=True):
            blocks = min(piece.num_blocks, left)
            if blocks <= 0:
                break
            ops.append(
                CopyOp(
                    slot=slot,
                    generation=generation,
                    first_block=piece.first_block,
                    block_ids=list(block_ids[at : at + blocks]),
                    request_id=request_id,
                )
            )
            slots.append(slot)
            used.append(piece.chunk)
            tier = "disk" if piece.chunk.key in state.from_disk else "host"
            state.sources[tier] = state.sources.get(tier, 0) + blocks * size
            at, left = at + blocks, left - blocks
        self.cache.begin_load(self.seq + 1, slots)
        self.cache.touch(used, hit=True)
        for tier, tokens in state.sources.items():
            self.cache.counts[f"hit_tokens_{tier}"] += tokens
        state.loaded = (promise.start_tokens, promise.start_tokens + num_tokens)
        for op in ops:
            self._stores.note_loaded(op.block_ids)
        return ops
