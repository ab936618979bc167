"""What kvsnap wants to know of a vLLM request, read from the live object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvsnap.keys import token_bytes


class LiveRequest:
    """A view of one request of the engine; token ids grow as it generates.

    Anything about it that isn't understood makes it uncacheable: broken metadata must
    never fall back to a plain text key, under which other requests are stored.
    """

    __slots__ = ("cacheable", "may_load", "request", "request_id", "salt", "wants_store")

    def __init__(self, request: Any) -> None:
        self.request = request
        """vLLM's object."""
        self.request_id: str = request.request_id
        self.wants_store = True
        self.may_load = not getattr(request, "skip_reading_prefix_cache", False)
        salt: object = request.cache_salt
        self.salt = salt if isinstance(salt, str) else None
        self.cacheable = self._uncacheable_reason()
        """None if KV of this request may be loaded and stored, else why not."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All token ids, the prompt's and the confirmed output's. Live: do not keep or change it."""
        ids: Sequence[int] = self.request._all_token_ids
        return ids

    @property
    def num_tokens(self) -> int:
        """Length of `token_ids`."""
        return len(self.request._all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_prompt_tokens)

    def _uncacheable_reason(self) -> str | None:
        request = self.request
        if request.pooling_params is not None:
            return "pooling request"
        if request.prompt_token_ids is None or request.prompt_embeds is not None:
            return "prompt embeddings"
        if getattr(request, "prompt_is_token_ids", None) is not None:
            return "prompt embeddings"
        if request.lora_request is not None:
            return "LoRA adapter"
        if request.mm_features:
            return "multimodal input"
        if getattr(request, "resumable", False):
            return "resumable streaming"
        if request.cache_salt is not self.salt:
            return "malformed cache_salt"
        try:
            token_bytes(request.prompt_token_ids)
        except ValueError:  # ConfigError is one
            return "malformed token ids"
        return self._read_params(request.kv_transfer_params)

    def _read_params(self, params: object) -> str | None:
        """`{"kvsnap": {"store": false}}`; None if they are understood."""
        if params is None:
            return None
        own = params.get("kvsnap") if isinstance(params, Mapping) else params
        if own is None:
            return None
        if not isinstance(own, Mapping) or not isinstance(own.get("store", True), bool) or set(own) - {"store"}:
            return 'malformed kv_transfer_params, expected {"kvsnap": {"store": true or false}}'
        self.wants_store = own.get("store", True)
        return None


def scheduled_of(output: Any) -> Iterable[tuple[str, int, int, Callable[[], Sequence[int]]]]:
    """(request, tokens computed before this step, tokens of this step, its block table on demand)."""
    state = output.kv_connector_block_state

    def table_of(request_id: str) -> Callable[[], Sequence[int]]:
        def table() -> Sequence[int]:
            found = None if state is None else state.get_block_ids(request_id)
            return [] if found is None else found[0]

        return table

    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, counts[new.req_id], table_of(new.req_id)
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, counts[request_id], table_of(request_id)
