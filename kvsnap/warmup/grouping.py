"""Which prompts share a prefix. Pure functions of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence

from kvsnap.keys import token_bytes

SHARD_TOKENS = 256


def group_key(ids: Sequence[int], *, salt: str | None, model: str, tokens: int = SHARD_TOKENS) -> Hashable:
    """Equal for prompts that start with the same `tokens` tokens."""
    return model, salt, hashlib.sha256(token_bytes(list(ids[:tokens]))).digest()


def group(keys: Sequence[Hashable]) -> list[list[int]]:
    """Positions with equal keys, together; groups in order of their first."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def shard(groups: Sequence[list[int]], index: int, count: int) -> list[list[int]]:
    """Every `count`-th group from number `index` on: the parts of all workers are disjoint and cover everything."""
    return list(groups[index::count])


def distinct_tokens(prompts: Iterable[tuple[Sequence[int], str | None]], block_tokens: int) -> int:
    """Tokens in whole blocks, each shared prefix counted once; prompts come with their salts."""
    seen: set[bytes] = set()
    for ids, salt in prompts:
        state = hashlib.sha256(repr(salt).encode())
        for start in range(0, len(ids) // block_tokens * block_tokens, block_tokens):
            state.update(token_bytes(list(ids[start : start + block_tokens])))
            seen.add(state.digest())
    return len(seen) * block_tokens


def usable_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """The longest hit of a prompt: whole blocks, and never its last token."""
    return max(prompt_tokens - 1, 0) // block_tokens * block_tokens
