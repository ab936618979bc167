"""The engines of a cache directory, as far as a warm-up cares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvsnap.engines import STATUS_TIMEOUT_S, ask, engines_of, namespaces_in_use
from kvsnap.errors import KvsnapError
from kvsnap.namespace import Namespace
from kvsnap.tiers.paths import open_namespaces


@dataclass(frozen=True, slots=True)
class TierBytes:
    """What live engines hold."""

    dram: int
    disk: int


def tier_bytes(cache_dir: Path | None) -> TierBytes | None:
    """Bytes of chunks in the tiers of a directory's live engines; None where none answers."""
    if cache_dir is None or not cache_dir.is_dir():
        return None
    dram, disk, has_answer = 0, 0, False
    try:
        for record in engines_of(cache_dir):
            answer = ask(record, "status", {}, timeout_s=STATUS_TIMEOUT_S)
            dram += int(answer["dram"]["chunk_bytes"])
            disk = max(disk, int(answer["disk"]["chunk_bytes"]))  # one directory, seen by each of them
            has_answer = True
    except (KvsnapError, KeyError, TypeError, ValueError):
        return None
    return TierBytes(dram, disk) if has_answer else None


def namespace_in_use(cache_dir: Path | None) -> tuple[Path, Namespace] | None:
    """The namespace of a directory's live engines, else the only one there; None where that isn't clear."""
    if cache_dir is None or not cache_dir.is_dir():
        return None
    try:
        matching = namespaces_in_use(cache_dir, open_namespaces(cache_dir))
    except KvsnapError:
        return None
    return matching[0] if len(matching) == 1 else None
