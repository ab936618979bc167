"""What is in a repository, for people and scripts. Reads manifests and refs only."""

from __future__ import annotations

from dataclasses import dataclass

from kvsnap.damage import dangling
from kvsnap.errors import CorruptChunkError, IncompatibleError, NotFoundError, StorageError
from kvsnap.gc_lists import read_lists, removed_snapshots
from kvsnap.manifest import Digest
from kvsnap.repository import Repository, manifest_name
from kvsnap.storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRow:
    """One snapshot."""

    snapshot: Digest
    """Its id."""
    refs: tuple[str, ...]
    """The refs that name it now."""
    created: str
    """RFC 3339, UTC"""
    model: str | None
    """Name of the model as the engine was given it."""
    namespace: str
    """Id of the namespace, 64 hex."""
    num_chunks: int
    num_tokens: int
    num_prefixes: int
    num_shards: int
    nbytes: int
    """Bytes of its shards."""
    parent: Digest | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListReport:
    """All snapshots of a repository but those that were removed and wait for a prune."""

    url: str
    snapshots: tuple[SnapshotRow, ...]
    """Newest first."""
    problems: tuple[str, ...]
    """Manifests and refs that can't be read, refs whose snapshot is missing."""


def list_snapshots(url: str | Storage) -> ListReport:
    """List the snapshots of the repository at `url`; what can't be read is told, not raised.

    Raises:
        NotFoundError: there is no repository.
        StorageError: it can't be read.
    """
    repository = Repository.open(url)
    problems: list[str] = []
    refs: dict[Digest, list[str]] = {}
    for name in repository.ref_names():
        try:
            refs.setdefault(repository.ref(name).snapshot, []).append(name)
        except (CorruptChunkError, NotFoundError, StorageError) as error:
            problems.append(str(error))
    removed: set[str] = set()
    try:
        removed = removed_snapshots(read_lists(repository.storage))
    except CorruptChunkError as error:
        problems.append(str(error))
    snapshots = [s for s in repository.snapshots() if s in refs or manifest_name(s) not in removed]
    for snapshot in sorted(refs.keys() - set(snapshots)):
        problems += [str(dangling(name, manifest_name(snapshot), repository.url)) for name in refs[snapshot]]
    rows = []
    for snapshot in snapshots:
        try:
            manifest = repository.manifest(snapshot)
        except (CorruptChunkError, IncompatibleError, NotFoundError, StorageError) as error:
            problems.append(str(error))
            continue
        totals = manifest.totals
        rows.append(
            SnapshotRow(
                snapshot=snapshot,
                refs=tuple(refs.get(snapshot, ())),
                created=manifest.created,
                model=manifest.model_id,
                namespace=manifest.namespace.id(),
                num_chunks=totals.num_chunks,
                num_tokens=totals.num_tokens,
                num_prefixes=totals.num_prefixes,
                num_shards=len(manifest.shards),
                nbytes=totals.nbytes,
                parent=manifest.parent,
            )
        )
    rows.sort(key=lambda row: (row.created, row.snapshot), reverse=True)
    return ListReport(url=repository.url, snapshots=tuple(rows), problems=tuple(problems))
