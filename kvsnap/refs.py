"""Refs: movable names of snapshots, and what they named before.

A ref is the only thing in a repository that two writers may change at once, so it moves by
compare-and-swap. Each write carries a random `write_id`: a writer whose answer got lost reads
the ref back and finds its own.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from kvsnap.canonical import canonical_json
from kvsnap.damage import missing, wrong_size
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, MissingObjectError, NotFoundError
from kvsnap.gc_lists import new_list, read_lists, removed_snapshots
from kvsnap.known import list_shards
from kvsnap.leases import swap
from kvsnap.manifest import DIGEST_PREFIX, Digest, Manifest
from kvsnap.repository import (
    MAX_HISTORY,
    MAX_SMALL_BYTES,
    Ref,
    RefChange,
    Repository,
    catalog_name,
    decode_ref,
    manifest_name,
    now_text,
    ref_name,
    shard_name,
)
from kvsnap.signing import signature_name
from kvsnap.storage import Storage
from kvsnap.storage.base import RefusedError
from kvsnap.writing import WriteSession, under_lease

_TRIES = 20


class RefMovedError(RefusedError):
    """The ref isn't what the caller took it to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagReport:
    """What became of a ref."""

    ref: str
    snapshot: Digest | None
    """What it names now; None: it is removed."""
    previous: Digest | None
    """What it named before."""
    is_changed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryRow:
    """A state of a ref."""

    snapshot: Digest
    updated: str
    """Since when; RFC 3339, UTC"""
    is_there: bool
    """Whether the snapshot still is in the repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveReport:
    """What was removed, or with `dry_run` would be."""

    refs: tuple[str, ...]
    snapshots: tuple[Digest, ...]
    """They are listed no more; their bytes go with a later prune."""
    nbytes: int
    """Bytes of the snapshots' shards; those that other snapshots need stay."""
    dry_run: bool
    named_by: tuple[str, ...] = ()
    """Other refs of the snapshot, which therefore stays."""


def move_ref(repository: Repository, name: str, snapshot: Digest, *, expect: Digest | None = None) -> TagReport:
    """Make `name` a name of `snapshot`, whose manifest must be there already.

    Args:
        expect: What it must name before; without, the last writer wins, and the history tells what it won over.

    Raises:
        RefMovedError: it doesn't name `expect`.
    """
    object_name = ref_name(name)
    for _ in range(_TRIES):
        current, version = _read(repository, name)
        previous = None if current is None else current.snapshot
        if previous == snapshot:
            return TagReport(ref=name, snapshot=snapshot, previous=previous, is_changed=False)
        if expect is not None and previous != expect:
            found = "nothing" if previous is None else previous[:12]
            raise RefMovedError(f"ref {name} names {found}, expected {expect[:12]}; look again and repeat")
        history: list[RefChange] = []
        if current is not None:
            history = [RefChange(snapshot=current.snapshot, updated=current.updated), *current.history]
        ref = Ref(
            snapshot=snapshot,
            write_id=secrets.token_hex(16),
            previous=previous,
            updated=now_text(),
            history=tuple(history[:MAX_HISTORY]),
        )
        if swap(repository.storage, object_name, _encode(ref), version):
            return TagReport(ref=name, snapshot=snapshot, previous=previous, is_changed=True)
    raise RefMovedError(f"ref {name} in {repository.url} moved {_TRIES} times meanwhile; try again")


def publish_ref(
    repository: Repository, session: WriteSession, name: str, snapshot: Digest, *, expect: Digest | None = None
) -> TagReport:
    """`move_ref` to a snapshot that is kept by the session.

    Raises:
        LeaseLostError: the lease ran out; the ref may have moved, and the snapshot may be gone: start over.
        RefMovedError: see `move_ref`.
    """
    session.renew()
    report = move_ref(repository, name, snapshot, expect=expect)
    session.check()
    return report


def tag_snapshot(
    url: str | Storage, ref: str, name: str, *, expect: str | None = None, single_writer: bool = False
) -> TagReport:
    """Make `name` a name of the snapshot `ref`. One that was removed and not yet pruned comes back.

    Raises:
        NotFoundError: no such repository or snapshot.
        CorruptChunkError: the snapshot is damaged, or a part of it is gone.
        RefMovedError: `name` doesn't name the snapshot `expect`.
    """
    ref_name(name)
    repository = Repository.open(url, operation="write", single_writer=single_writer)
    expected = None if expect is None else repository.resolve(expect)
    return _tag(repository, name, ref, expected)


def roll_back(url: str | Storage, name: str, *, steps: int = 1, single_writer: bool = False) -> TagReport:
    """Make `name` name again what it named `steps` moves ago. Is a move itself: rolling back again undoes it.

    Raises:
        NotFoundError: no such ref; it has no such past; the snapshot is gone.
    """
    if steps < 1:
        raise ConfigError(f"a ref is rolled back by 1 or more moves, not {steps}")
    repository = Repository.open(url, operation="write", single_writer=single_writer)
    current = repository.ref(name)
    if steps > len(current.history):
        raise NotFoundError(f"ref {name} has {len(current.history)} earlier states, so none {steps} moves ago")
    return _tag(repository, name, current.history[steps - 1].snapshot, current.snapshot)


def ref_history(url: str | Storage, name: str) -> list[HistoryRow]:
    """What `name` names, and named before, the latest first."""
    repository = Repository.open(url)
    ref = repository.ref(name)
    there = set(repository.snapshots())
    states = [RefChange(snapshot=ref.snapshot, updated=ref.updated), *ref.history]
    return [HistoryRow(snapshot=s.snapshot, updated=s.updated, is_there=s.snapshot in there) for s in states]


def remove(
    url: str | Storage, name: str, *, with_snapshot: bool = False, dry_run: bool = False, single_writer: bool = False
) -> RemoveReport:
    """Remove a ref, or a snapshot by its id. Bytes go with a later prune, and until then a tag brings it back.

    Args:
        with_snapshot: Also the snapshot that the ref names, if no other ref does.

    Raises:
        NotFoundError: there is none.
        ConfigError: refs name the snapshot; they are listed.
    """
    repository = Repository.open(url, operation="delete", single_writer=single_writer)
    names = repository.ref_names()
    is_ref = name in names
    if not is_ref:
        snapshot = repository.resolve(name)
        doomed = [snapshot]
    else:
        doomed = [repository.ref(name).snapshot] if with_snapshot else []
    others = [other for other in names if other != name and _named(repository, other) in doomed]
    if others and not is_ref:
        raise ConfigError(f"snapshot {name[:12]} is named by {', '.join(others)}; remove these refs first")
    if others:
        doomed = []
    there = {digest: manifest_name(digest) for digest in doomed if digest in set(repository.snapshots())}
    if not is_ref and not there:
        raise NotFoundError(f"{repository.url} has no snapshot {name}; see `kvsnap list {repository.url}`")
    if not dry_run:
        removed = removed_snapshots(read_lists(repository.storage)) if there else set()  # what it can't read ends it
        if is_ref:
            repository.storage.delete(ref_name(name))
        if marked := {item: repository.storage.head(item).nbytes for item in there.values() if item not in removed}:
            new_list(repository.storage, "removed", marked)
    return RemoveReport(
        refs=(name,) if is_ref else (),
        snapshots=tuple(there),
        nbytes=sum(_size(repository, digest) for digest in there),
        dry_run=dry_run,
        named_by=tuple(others),
    )


def keep_snapshots(repository: Repository, session: WriteSession, manifests: Mapping[Digest, Manifest]) -> None:
    """Have no prune delete snapshots that are there, and bring back those that were removed.

    Raises:
        CorruptChunkError: a part of one is gone, or has another size.
        LeaseLostError: the lease ran out, so a prune may have taken parts meanwhile: start over.
    """
    doubtful: set[str] = set()
    for snapshot, manifest in manifests.items():
        parts = {shard_name(shard.digest) for shard in manifest.shards}
        doubtful |= session.keep(parts | {catalog_name(manifest.catalog.digest), signature_name(snapshot)})
        doubtful |= session.keep([manifest_name(snapshot)])
    stored = list_shards(repository.storage)
    for snapshot, manifest in manifests.items():
        if problem := _problem(repository, snapshot, manifest, stored, doubtful):
            session.renew()  # if the lease is lost, a prune was free to take it: look again
            raise type(problem)(f"snapshot {snapshot[:12]} can't be used any more: {problem}")


def _problem(
    repository: Repository, snapshot: Digest, manifest: Manifest, stored: Mapping[str, int], doubtful: set[str]
) -> CorruptChunkError | None:
    """What is wrong with the parts of a snapshot, by their sizes."""
    sizes: dict[str, int | None] = {shard_name(shard.digest): shard.nbytes for shard in manifest.shards}
    sizes[catalog_name(manifest.catalog.digest)] = manifest.catalog.nbytes
    if manifest_name(snapshot) in doubtful:  # else it has just been read
        sizes[manifest_name(snapshot)] = None
    for name, nbytes in sizes.items():
        found = stored.get(name)
        try:
            if found is None:
                found = repository.storage.head(name).nbytes
        except NotFoundError:
            if name not in doubtful:
                return missing(name, repository.url)
            return MissingObjectError(f"a prune has deleted {name}; export the snapshot again")
        if nbytes is not None and nbytes != found:
            return wrong_size(name, repository.url, expected=nbytes, found=found)
    return None


def _tag(repository: Repository, name: str, ref: str, expect: Digest | None) -> TagReport:
    def act(session: WriteSession) -> TagReport:
        snapshot, manifest = repository.open_snapshot(ref)
        keep_snapshots(repository, session, {snapshot: manifest})
        return publish_ref(repository, session, name, snapshot, expect=expect)

    return under_lease(repository, "tag", act)


def _read(repository: Repository, name: str) -> tuple[Ref | None, str | None]:
    try:
        data, version = repository.storage.get_versioned(ref_name(name), max_bytes=MAX_SMALL_BYTES)
    except NotFoundError:
        return None, None
    return decode_ref(data, name, repository.url), version


def _encode(ref: Ref) -> bytes:
    return canonical_json(
        {
            "history": [{"snapshot": DIGEST_PREFIX + item.snapshot, "updated": item.updated} for item in ref.history],
            "previous": None if ref.previous is None else DIGEST_PREFIX + ref.previous,
            "snapshot": DIGEST_PREFIX + ref.snapshot,
            "updated": ref.updated,
            "write_id": ref.write_id,
        }
    )


def _named(repository: Repository, name: str) -> Digest | None:
    try:
        return repository.ref(name).snapshot
    except (CorruptChunkError, NotFoundError):
        return None


def _size(repository: Repository, snapshot: Digest) -> int:
    try:
        return repository.manifest(snapshot).totals.nbytes
    except (CorruptChunkError, IncompatibleError, NotFoundError):
        return 0
