"""What prompts would take in the tiers, and what of it is on disk already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsnap.keys import ChunkKey, KeyChain, root_key
from kvsnap.local_shards import live_entries, scan_shards
from kvsnap.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens and bytes of chunks, each chunk once."""

    tokens: int
    resident_tokens: int
    missing_bytes: int


def resident_keys(directory: Path, ns: Namespace) -> set[ChunkKey]:
    """Chunks on disk that can be used."""
    return set(live_entries(ns, scan_shards(directory, ns).shards)[0])


def estimate(ns: Namespace, resident: set[ChunkKey], prompts: Iterable[tuple[Sequence[int], str | None]]) -> Estimate:
    """What an engine of this namespace would store of prompts (token ids, salt): full chunks, a short one each."""
    block_tokens = ns.layout.block_tokens
    chunks: dict[ChunkKey, int] = {}
    for ids, salt in prompts:
        chain = KeyChain(root_key(ns.identity.hash(), ns.chunk_tokens, salt=salt), ns.chunk_tokens, block_tokens)
        chain.extend(ids)
        for key in chain.keys:
            chunks[key] = ns.chunk_tokens
        rest = (len(ids) - len(chain.keys) * ns.chunk_tokens) // block_tokens * block_tokens
        if rest:
            chunks[chain.short_key(len(chain.keys), rest)] = rest
    missing = {key: tokens for key, tokens in chunks.items() if key not in resident}
    return Estimate(
        tokens=sum(chunks.values()),
        resident_tokens=sum(chunks.values()) - sum(missing.values()),
        missing_bytes=sum(ns.geometry.chunk_bytes(tokens) for tokens in missing.values()),
    )
