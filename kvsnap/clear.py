"""Empty the tiers of a cache directory: live engines do it themselves, what is at rest goes by its files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvsnap.engines import ask, engines_of
from kvsnap.errors import ConfigError, StorageError
from kvsnap.local_shards import shard_paths
from kvsnap.namespace import Namespace
from kvsnap.snapshot_export import match_namespaces
from kvsnap.status import DRAM_DIR, dram_files
from kvsnap.tiers import dram_lock, paths
from kvsnap.tiers.disk import DiskTier

Tier = Literal["all", "disk", "dram"]
TIERS: tuple[Tier, ...] = ("all", "disk", "dram")
CLEAR_TIMEOUT_S = 120.0

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ClearReport:
    """What was removed, or with `dry_run` would be."""

    tier: Tier
    dry_run: bool
    engines: dict[str, Mapping[str, Any]]
    """What each live engine removed of its own, by engine id. With `dry_run`: its status."""
    disk_shards: int = 0
    """Shards at rest."""
    disk_bytes: int = 0
    """Real bytes at rest."""
    dram_files: int = 0
    """DRAM tiers' files that no engine and no worker holds."""
    dram_bytes: int = 0
    dram_chunks: int = 0


def clear_tiers(
    cache_dir: Path,
    tier: Tier,
    *,
    namespace: str | None = None,
    dram_dir: Path = DRAM_DIR,
    dry_run: bool = False,
) -> ClearReport:
    """Remove all chunks of a tier, of all namespaces or of those that start with `namespace`.

    Raises:
        NotFoundError: there is no such directory, or no such namespace in it.
        StorageError: an engine did not answer, or a disk failed; what was removed so far is gone.
    """
    if tier not in TIERS:
        raise ConfigError(f"tier is {tier!r}, expected one of {', '.join(TIERS)}")
    report = ClearReport(tier=tier, dry_run=dry_run, engines={})
    for directory, ns in match_namespaces(cache_dir, namespace):
        is_live = False
        for record in engines_of(cache_dir, ns.id()):
            is_live = True
            command, args = ("status", {}) if dry_run else ("clear", {"tier": tier})
            report.engines[record.engine_id] = ask(record, command, args, timeout_s=CLEAR_TIMEOUT_S)
        if tier != "dram" and not is_live:
            _clear_disk(cache_dir, directory, ns, report)
        if tier != "disk":
            _clear_dram(cache_dir, dram_dir, ns, report)
    return report


def _clear_disk(cache_dir: Path, directory: Path, ns: Namespace, report: ClearReport) -> None:
    if report.dry_run:
        shards = shard_paths(directory)
        quarantined = [Path(entry.path) for entry in paths.entries(directory / paths.QUARANTINE)]
        report.disk_shards += len(shards)
        report.disk_bytes += sum(paths.real_bytes(path) for path in [*shards, *quarantined, directory / paths.USAGE])
        return
    with DiskTier(cache_dir, ns) as disk:
        num_shards, nbytes = disk.clear()
    report.disk_shards += num_shards
    report.disk_bytes += nbytes
    if left := shard_paths(directory):
        raise StorageError(f"{len(left)} shards in {directory} can't be removed; check the permissions")


def _clear_dram(cache_dir: Path, dram_dir: Path, ns: Namespace, report: ClearReport) -> None:
    for info in dram_files(cache_dir, dram_dir, [ns]):
        if info.owner_alive or info.workers_alive:
            continue  # its engine has cleared it, or a worker that outlives its engine still writes to it
        if report.dry_run or dram_lock.remove_file(Path(info.path)):
            report.dram_files += 1
            report.dram_bytes += info.bytes
            report.dram_chunks += info.chunks
