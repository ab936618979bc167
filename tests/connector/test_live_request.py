"""Which requests are cached. Broken metadata never falls back to a plain text key."""

from __future__ import annotations

from typing import Any

import pytest

from kvsnap_connector.live_request import LiveRequest
from tests.connector.fakes import Request


def test_a_plain_request_is_cached() -> None:
    view = LiveRequest(Request())

    assert view.cacheable is None
    assert view.wants_store
    assert view.may_load
    assert view.salt is None


def test_tokens_are_live() -> None:
    request = Request(prompt_token_ids=[1, 2])
    view = LiveRequest(request)

    request._all_token_ids.append(3)

    assert list(view.token_ids) == [1, 2, 3]
    assert view.num_tokens == 3
    assert view.num_prompt_tokens == 2


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prompt_token_ids": None}, "prompt embeddings"),
        ({"prompt_embeds": object()}, "prompt embeddings"),
        ({"prompt_is_token_ids": [True, False]}, "prompt embeddings"),
        ({"pooling_params": object()}, "pooling request"),
        ({"lora_request": object()}, "LoRA adapter"),
        ({"mm_features": [object()]}, "multimodal input"),
        ({"resumable": True}, "resumable streaming"),
        ({"cache_salt": 5}, "malformed cache_salt"),
        ({"prompt_token_ids": [1, -1]}, "malformed token ids"),
        ({"prompt_token_ids": [1, 2**32]}, "malformed token ids"),
        ({"prompt_token_ids": [1, "x"]}, "malformed token ids"),
        ({"prompt_token_ids": [1, None]}, "malformed token ids"),
        ({"kv_transfer_params": "x"}, "malformed kv_transfer_params"),
        ({"kv_transfer_params": {"kvsnap": 1}}, "malformed kv_transfer_params"),
        ({"kv_transfer_params": {"kvsnap": {"store": "no"}}}, "malformed kv_transfer_params"),
        ({"kv_transfer_params": {"kvsnap": {"sotre": False}}}, "malformed kv_transfer_params"),
    ],
)
def test_what_is_not_understood_is_not_cached(values: dict[str, Any], reason: str) -> None:
    """A12, A13: text-only keys of such requests would be other requests' keys."""
    view = LiveRequest(Request(**values))

    assert view.cacheable is not None
    assert view.cacheable.startswith(reason)


def test_a_request_may_ask_not_to_be_stored() -> None:
    view = LiveRequest(Request(kv_transfer_params={"kvsnap": {"store": False}}))

    assert view.cacheable is None
    assert not view.wants_store


def test_parameters_of_other_connectors_are_not_ours() -> None:
    assert LiveRequest(Request(kv_transfer_params={"do_remote_prefill": True})).cacheable is None


def test_a_salt_is_kept() -> None:
    """A10: it goes into the keys."""
    assert LiveRequest(Request(cache_salt="tenant")).salt == "tenant"


def test_a_request_that_must_be_computed_is_not_loaded() -> None:
    view = LiveRequest(Request(skip_reading_prefix_cache=True))

    assert not view.may_load
    assert view.cacheable is None
