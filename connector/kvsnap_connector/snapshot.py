"""The configured snapshot: imported into the disk tier before the engine is ready, or served from meanwhile."""

from __future__ import annotations

from kvsnap.errors import ConfigError
from kvsnap.remote import RemoteSnapshot
from kvsnap.tiers.disk import DiskTier
from kvsnap.transfer import Progress
from kvsnap.trust import installed_keys

_OWN_SHARE = 8
"""This part of the disk tier is left for what the engine computes itself."""

# Snapshots need pyarrow, which an engine without one never loads: imports are in the functions.


def import_into(url: str, tier: DiskTier, progress: Progress | None = None) -> str:
    """Import `url` (`URL@ref`) into the engine's own disk tier; returns a line for the log.

    Where this user or container has a file of trusted keys (`kvsnap.trust`), one of them must have signed it.

    Raises:
        UntrustedError: none has.
        IncompatibleError: made for another engine; names the fields that differ.
        KvsnapError: it can't be read, or is damaged.
    """
    from kvsnap.snapshot_import import import_snapshot

    repository, ref = _split(url)
    report = import_snapshot(
        repository,
        ref,
        tier.cache_dir,
        max_bytes=tier.cap_bytes - tier.cap_bytes // _OWN_SHARE,  # else its end would evict its start
        expect=tier.ns,
        tier=tier,
        trusted=installed_keys(),
        progress=progress,
    )
    return (
        f"{report.num_chunks} of {report.total_chunks} chunks are here "
        f"({report.imported_shards} shards, {report.imported_bytes >> 20} MiB imported now)"
    )


def open_remote(url: str, tier: DiskTier) -> RemoteSnapshot:
    """Read the manifest and the catalog of `url`, and serve single chunks from it.

    Raises: as `import_into`.
    """
    from kvsnap.engines import check_expected
    from kvsnap.repository import Repository, shard_name

    url, ref = _split(url)
    repository = Repository.open(url)
    _, manifest = repository.open_snapshot(ref, trusted=installed_keys())
    check_expected(manifest.namespace, tier.ns, f"snapshot {ref}")
    names = [shard_name(shard.digest) for shard in manifest.shards]
    return RemoteSnapshot(repository.storage, names, repository.catalog(manifest))


def may_pass(error: Exception) -> bool:
    """Whether the same may work later by itself: a store that is down, not one that refuses, nor a damaged snapshot."""
    from kvsnap.storage.retry import is_permanent

    return not is_permanent(error)


def _split(url: str) -> tuple[str, str]:
    from kvsnap.repository import split_snapshot_url

    repository, ref = split_snapshot_url(url)
    if ref is None:
        raise ConfigError(f"snapshot {url} names no ref or id; write it as URL@ref")
    return repository, ref
