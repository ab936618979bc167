"""Imports the configured snapshot into the disk tier before the engine is ready."""

from __future__ import annotations

from kvsnap.errors import ConfigError
from kvsnap.tiers.disk import DiskTier


def import_at_start(url: str, tier: DiskTier) -> str:
    """Import `url` (`URL@ref`) into the engine's own disk tier; returns a line for the log.

    Raises:
        IncompatibleError: made for another engine; names the fields that differ.
        KvsnapError: it can't be read, or is damaged.
    """
    # Imported here: snapshots need pyarrow, which an engine without one never loads.
    from kvsnap.repository import split_snapshot_url
    from kvsnap.snapshot_import import import_snapshot

    repository, ref = split_snapshot_url(url)
    if ref is None:
        raise ConfigError(f"snapshot {url} names no ref or id; write it as URL@ref")
    report = import_snapshot(repository, ref, tier.cache_dir, expect=tier.ns, tier=tier)
    return (
        f"{report.num_chunks} of {report.total_chunks} chunks are here "
        f"({report.imported_shards} shards, {report.imported_bytes >> 20} MiB imported now)"
    )
