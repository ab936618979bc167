"""What of a repository is wanted: the snapshots that nobody removed, and those that refs name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvsnap.damage import dangling
from kvsnap.errors import CorruptChunkError, IncompatibleError, NotFoundError
from kvsnap.gc_lists import GcList, removed_snapshots
from kvsnap.manifest import Digest, Manifest
from kvsnap.repository import Repository, manifest_name

Tell = Callable[[CorruptChunkError | IncompatibleError], None]
"""Told what can't be read; returns if that is to be left out."""


@dataclass(frozen=True, slots=True)
class Reachable:
    """What was found."""

    snapshots: dict[Digest, Manifest]
    refs: dict[str, Digest]
    """Of each ref the snapshot, which is one of these."""


def raise_it(error: CorruptChunkError | IncompatibleError) -> None:
    """A `Tell` that leaves nothing out."""
    raise error


def reachable_snapshots(repository: Repository, lists: list[GcList], tell: Tell = raise_it) -> Reachable:
    """Read every snapshot that is wanted. `lists`: what is to be deleted.

    What somebody removes meanwhile may be left out.

    Raises:
        MissingObjectError: a ref names a snapshot whose manifest is gone.
        CorruptChunkError: a manifest or a ref is damaged.
        IncompatibleError: a manifest needs a later kvsnap.
    """
    refs = {name: ref.snapshot for name, ref in repository.refs(tell).items()}
    named = set(refs.values())
    removed = removed_snapshots(lists)
    snapshots: dict[Digest, Manifest] = {}
    unreadable: set[Digest] = set()
    for snapshot in repository.snapshots():
        if manifest_name(snapshot) in removed and snapshot not in named:
            continue
        try:
            snapshots[snapshot] = repository.manifest(snapshot)
        except NotFoundError:
            continue
        except CorruptChunkError as error:
            unreadable.add(snapshot)
            tell(error)
        except IncompatibleError as error:
            unreadable.add(snapshot)
            remove = f"kvsnap rm {repository.url}@{snapshot}"
            tell(IncompatibleError(f"{error}. If nobody wants this snapshot, remove it: {remove}", error.fields))
    for name in [name for name, snapshot in refs.items() if snapshot not in snapshots]:
        del refs[name]
        try:
            latest = repository.ref(name).snapshot  # it may have moved meanwhile, or be gone
            if latest in unreadable:
                continue
            if latest not in snapshots:
                snapshots[latest] = _named(repository, name, latest)
            refs[name] = latest
        except NotFoundError:
            continue
        except (CorruptChunkError, IncompatibleError) as error:
            tell(error)
    return Reachable(snapshots, refs)


def _named(repository: Repository, name: str, snapshot: Digest) -> Manifest:
    try:
        return repository.manifest(snapshot)
    except NotFoundError:
        raise dangling(name, manifest_name(snapshot), repository.url) from None
