"""What a warm-up found and did, and the ready file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvsnap.atomic import write_file
from kvsnap.warmup.volatile import Finding


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A prompt that isn't warm."""

    source: str
    """`file:line`"""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """What a warm-up did."""

    target: str
    """The server's URL, or the offline engine."""
    model: str
    state: Literal["warm", "cold"]
    """`warm`: every prompt is a hit, as vLLM itself says."""
    num_prompts: int
    """Of this shard, equal ones once."""
    num_duplicates: int
    """Equal ones that were left out."""
    num_warmed: int
    """Computed, and proved to be hits now."""
    num_resident: int
    """Skipped: were hits at the first request."""
    num_short: int
    """Skipped: shorter than one block, nothing can be kept of them."""
    num_failed: int
    """Refused by the server, or not answered."""
    num_unproved: int
    """Computed, but the second request was no full hit."""
    num_left: int
    """Not reached, or not proved, before the budget ran out."""
    prompt_tokens: int
    """Of all prompts that were sent, each once."""
    computed_tokens: int
    """Of these, computed at the first request."""
    proved_tokens: int
    """Of these, cached at the last one."""
    cached_by_source: dict[str, int] | None
    """Where the proofs' cached tokens came from: `device` (vLLM's own cache), `host`, `disk`; with other traffic's."""
    dram_bytes: int | None
    """What the DRAM tiers of the cache directory's engines grew by; None without --cache-dir or without an answer."""
    disk_bytes: int | None
    """What their disk tier grew by."""
    ttft_before_s: float | None
    """Median time to first token of the prompts that were computed, at their first request."""
    ttft_after_s: float | None
    """The same prompts at their proof."""
    seconds: float
    budget_s: float | None
    is_budget_spent: bool
    proof: Literal["usage", "metrics"]
    """Where cached tokens were read: each answer's usage, or the server's counters."""
    shard: str | None
    """`index/count`"""
    num_groups: int
    """Groups of prompts with a common start, in this shard."""
    failures: tuple[Failure, ...]
    volatile: tuple[Finding, ...]
    warnings: tuple[str, ...]
    snapshot: str | None = None
    """Id of the exported snapshot."""
    export_error: str | None = None
    """Why the export that was asked for was not done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupPlan:
    """What a warm-up would do."""

    target: str
    model: str
    num_prompts: int
    num_duplicates: int
    num_short: int
    num_failed: int
    prompt_tokens: int
    store_tokens: int
    """Tokens in whole blocks, what prompts share counted once: what would be there in the end."""
    resident_tokens: int | None
    """Of these, on disk already; None without --cache-dir."""
    compute_tokens: int
    """Of all, at least to be computed: what isn't there yet, what prompts share counted once."""
    store_bytes: int | None
    """Bytes that would be stored; None where the size of a chunk isn't known (no engine has used --cache-dir)."""
    shard: str | None
    num_groups: int
    failures: tuple[Failure, ...]
    volatile: tuple[Finding, ...]
    warnings: tuple[str, ...]


def write_ready_file(path: Path, report: WarmupReport) -> None:
    """Say that traffic may come, with the report inside; in full or not at all.

    Raises:
        StorageError: it can't be written.
    """
    write_file(path, json.dumps(dataclasses.asdict(report), indent=2, sort_keys=True).encode() + b"\n")
