"""What of a repository is wanted: the snapshots that nobody removed, and those that refs name."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from kvsnap.errors import CorruptChunkError, IncompatibleError, NotFoundError
from kvsnap.gc_lists import GcList, removed_snapshots
from kvsnap.manifest import Digest, Manifest
from kvsnap.repository import Repository, manifest_name


@dataclass(frozen=True, slots=True)
class Reachable:
    """What was found."""

    snapshots: dict[Digest, Manifest]
    refs: dict[str, Digest]
    """Of each ref the snapshot, which is one of these."""


def reachable_snapshots(repository: Repository, lists: list[GcList]) -> Reachable:
    """Read every snapshot that is wanted. `lists`: what is to be deleted.

    What somebody removes meanwhile may be left out.

    Raises:
        MissingObjectError: a ref names a snapshot whose manifest is gone.
        CorruptChunkError: a manifest or a ref is damaged.
        IncompatibleError: a manifest needs a later kvsnap.
    """
    refs = {name: ref.snapshot for name, ref in repository.refs().items()}
    named = set(refs.values())
    removed = removed_snapshots(lists)
    snapshots: dict[Digest, Manifest] = {}
    for snapshot in repository.snapshots():
        if manifest_name(snapshot) not in removed or snapshot in named:
            with suppress(NotFoundError):
                snapshots[snapshot] = _read(repository, snapshot)
    for name, snapshot in list(refs.items()):
        if snapshot not in snapshots:
            del refs[name]
            with suppress(NotFoundError):  # the ref is gone, too
                refs[name], snapshots[refs[name]] = repository.open_snapshot(name)
    return Reachable(snapshots, refs)


def _read(repository: Repository, snapshot: Digest) -> Manifest:
    try:
        return repository.manifest(snapshot)
    except (CorruptChunkError, IncompatibleError) as error:
        message = f"{error}. If nobody wants this snapshot, remove it: kvsnap rm {repository.url}@{snapshot}"
        if isinstance(error, IncompatibleError):
            raise type(error)(message, error.fields) from None
        raise type(error)(message) from None
