"""Plans stores: which chunks a step completes, and whether their blocks may be kept.

A chunk is stored in the step that computes its last token, also where the engine took
its blocks from its own prefix cache and the tiers no longer have them: else the hottest
root, always in device memory, would be the one never kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvsnap.cache import TieredCache
from kvsnap.keys import ChunkKey
from kvsnap_connector.metadata import CopyOp
from kvsnap_connector.requests import RequestState


class StorePlanner:
    """The store side of one planner.

    Args:
        cache: Both tiers.
        extend: Brings a request's key chain up to its tokens.
    """

    def __init__(self, cache: TieredCache, extend: Callable[[RequestState], None]) -> None:
        self._cache = cache
        self._extend = extend
        self._chunk_tokens = cache.namespace.chunk_tokens
        self._block_tokens = cache.namespace.layout.block_tokens
        self._fresh_blocks: set[int] | None = None
        """Blocks computed since the last reset; None: there was none, so all are."""

    def plan(
        self,
        stores: list[CopyOp],
        state: RequestState,
        num_computed: int,
        num_scheduled: int,
        table: Callable[[], Sequence[int]],
    ) -> None:
        """Add to `stores` what the workers copy out of this request's blocks after the step."""
        view = state.view
        # Tokens whose KV exists after this step and whose ids are confirmed: right for chunked
        # prefill, asynchronous scheduling and speculative decoding alike.
        valid_end = min(num_computed + num_scheduled, view.num_tokens)
        ends_prompt = num_computed < view.num_prompt_tokens <= num_computed + num_scheduled
        if (state.next_chunk + 1) * self._chunk_tokens > valid_end and not ends_prompt:
            return
        self._extend(state)
        blocks = table()
        while state.may_store and (state.next_chunk + 1) * self._chunk_tokens <= valid_end:
            i = state.next_chunk
            start = i * self._chunk_tokens
            self._store(stores, state, i, state.chain.keys[i], start + self._chunk_tokens, blocks)
            state.next_chunk += 1
        if ends_prompt and state.may_store:
            self._store_short(stores, state, blocks)

    def note_blocks(
        self, state: RequestState, num_computed: int, num_scheduled: int, table: Callable[[], Sequence[int]]
    ) -> None:
        """After a reset: remember which blocks were computed since."""
        if self._fresh_blocks is None:
            return
        size = self._block_tokens
        if num_computed % size and num_computed // size == (num_computed + num_scheduled - 1) // size:
            return  # goes on in a block that an earlier step noted
        ids = table()[num_computed // size : -(-(num_computed + num_scheduled) // size)]
        if state.epoch == self._cache.dram.epoch:
            self._fresh_blocks.update(ids)
        else:
            self._fresh_blocks.difference_update(ids)

    def note_loaded(self, block_ids: Sequence[int]) -> None:
        """After a reset: blocks that are filled from chunks stored since are as good as computed."""
        if self._fresh_blocks is not None:
            self._fresh_blocks.update(block_ids)

    def forget_blocks(self) -> None:
        """The cache was reset: from here on only blocks that are computed from now on may be stored."""
        self._fresh_blocks = set()

    def _store_short(self, stores: list[CopyOp], state: RequestState, blocks: Sequence[int]) -> None:
        """Store the whole blocks after the prompt's last full chunk."""
        i, rest = divmod(state.view.num_prompt_tokens, self._chunk_tokens)
        tokens = rest // self._block_tokens * self._block_tokens
        if tokens == 0 or i != state.next_chunk:
            return
        start = i * self._chunk_tokens
        if self._cache.is_covered(state.chain.tail_block_keys(i, start + tokens)):
            return
        self._store(stores, state, i, state.chain.short_key(i, tokens), start + tokens, blocks, is_last=True)

    def _store(
        self,
        stores: list[CopyOp],
        state: RequestState,
        i: int,
        key: ChunkKey,
        end: int,
        blocks: Sequence[int],
        *,
        is_last: bool = False,
    ) -> None:
        start = i * self._chunk_tokens
        present = self._cache.in_dram(key)
        if present is not None:
            is_own = state.is_resumed or (state.loaded[0] < end and start < state.loaded[1])
            if not is_own:
                self._cache.touch([present], hit=True)
            return
        ids = list(blocks[start // self._block_tokens : end // self._block_tokens])
        if not self._are_storable(ids, (end - start) // self._block_tokens):
            state.may_store = False
            return
        place = self._cache.begin_store(
            key,
            state.chain.parent_of(i),
            depth=i,
            tokens=end - start,
            scope=state.scope,
            block_keys=state.chain.tail_block_keys(i, end),
        )
        if place is None:
            state.may_store = is_last  # what comes after would have no parent
            return
        stores.append(
            CopyOp(slot=place[0], generation=place[1], first_block=0, block_ids=ids, request_id=state.view.request_id)
        )

    def _are_storable(self, ids: Sequence[int], count: int) -> bool:
        """Real blocks, all of them, and (after a reset) all computed since."""
        if len(ids) != count or 0 in ids:  # block 0 is vLLM's null block
            return False
        return self._fresh_blocks is None or self._fresh_blocks.issuperset(ids)
