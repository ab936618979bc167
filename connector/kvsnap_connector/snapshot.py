"""Imports the configured snapshot into the disk tier before the engine is ready."""

from __future__ import annotations

from pathlib import Path

from kvsnap.namespace import Namespace


def import_at_start(url: str, cache_dir: Path, namespace: Namespace) -> str:
    """Import `url` (`URL@ref`) for exactly this namespace; returns a line for the log.

    Raises:
        IncompatibleError: made for another engine; names the fields that differ.
        KvsnapError: it can't be read, or is damaged.
    """
    from kvsnap.snapshot_import import import_snapshot

    report = import_snapshot(url, cache_dir, expect=namespace)
    return f"{report.chunks} chunks, {report.bytes} bytes imported"
