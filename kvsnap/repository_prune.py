"""Prune: the only one who deletes in a repository.

1. Mark. Needed is every snapshot that nobody removed, whatever a ref names, and what all
   these name. Anything else goes on a list under `gc/` (see `kvsnap.gc_lists`).
2. Wait. A list is left alone until it is older than the grace period, by the storage's clock,
   and until every writer that runs knows it (see `kvsnap.writing`).
3. Look again: snapshots that appeared meanwhile, and the list itself. Only then claim the
   list by compare-and-swap, delete what is on it, manifests first, then the list.

Killed at any point, the next prune goes on. A manifest that can't be read stops it, or one that
a ref names and that is gone: what it needs isn't known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvsnap.errors import CorruptChunkError, IncompatibleError
from kvsnap.gc_lists import (
    MAX_OBJECTS,
    GcList,
    Reason,
    new_list,
    read_list,
    read_lists,
    replace_list,
)
from kvsnap.leases import LEASE_S, PRUNE_LEASE, Lease, LeaseRecord, break_lease, read_leases
from kvsnap.manifest import Digest, Manifest
from kvsnap.reachable import reachable_snapshots
from kvsnap.repository import PROBE_PREFIX, Ref, Repository, catalog_name, manifest_name, shard_name
from kvsnap.runtime import widen_affinity
from kvsnap.signing import signature_name
from kvsnap.storage import Storage
from kvsnap.transfer import Progress

GRACE_S = 24 * 3600.0
"""From mark to deletion, by default."""
PROBE_MAX_AGE_S = 3600.0
THREADS = 8
YOUNG_MARGIN_S = 60.0
"""What was written this long before the oldest running writer began isn't marked yet."""

_KINDS = (
    re.compile(r"manifests/[0-9a-f]{64}\.(?:json|sig)", re.ASCII),
    re.compile(r"catalogs/[0-9a-f]{64}\.parquet", re.ASCII),
    re.compile(r"shards/([0-9a-f]{2})/\1[0-9a-f]{62}\.safetensors", re.ASCII),
)
"""What kvsnap stores for snapshots, in the order in which it is deleted. Nothing else is ever touched."""


@dataclass(slots=True, kw_only=True)
class PruneReport:
    """What a prune did, or with `dry_run` would do."""

    url: str
    dry_run: bool
    num_snapshots: int = 0
    """Snapshots that stay."""
    kept_objects: int = 0
    kept_bytes: int = 0
    retired: list[Digest] = field(default_factory=list)
    """Snapshots removed by this prune, since no ref has named them for long enough."""
    marked_objects: int = 0
    """Found unneeded by this prune; deleted by one that runs after the grace period."""
    marked_bytes: int = 0
    deleted_objects: int = 0
    deleted_bytes: int = 0
    waiting_objects: int = 0
    """Marked, and not deleted yet: in their grace period, or protected by a writer."""
    waiting_bytes: int = 0
    leftovers: int = 0
    """Interrupted writes (temporary files, multipart uploads, probes) removed."""
    broken_leases: list[str] = field(default_factory=list)
    """Writers that died: their leases are removed."""
    writers: list[str] = field(default_factory=list)
    """Writers that run; what they may use stays."""
    foreign: int = 0
    """Objects that are none of kvsnap's; never touched."""


def prune_repository(
    url: str | Storage,
    *,
    grace_s: float = GRACE_S,
    untagged_s: float | None = None,
    dry_run: bool = False,
    single_writer: bool = False,
    lease_s: int = LEASE_S,
    progress: Progress | None = None,
) -> PruneReport:
    """Delete what no snapshot of the repository at `url` needs any more. May be killed and repeated.

    Args:
        grace_s: How long something stays after it was found unneeded, or removed.
        untagged_s: Also remove snapshots older than this that no ref names, or named before its last move. What a
            roll back took out of use stays, too, as long as it stands.
        dry_run: Say what would be done; change nothing.
        lease_s: How long this prune's lease holds, should it be killed.

    Raises:
        BusyError: another prune runs; names its owner and age.
        CorruptChunkError: a manifest or a ref is damaged, or a ref names a manifest that is gone: so what is needed
            isn't known. Nothing is deleted.
        IncompatibleError: it needs a later kvsnap. Nothing is deleted.
    """
    repository = Repository.open(url, operation="delete", single_writer=single_writer or dry_run)
    report = PruneReport(url=repository.url, dry_run=dry_run)
    with ExitStack() as stack:
        lease = None
        if not dry_run:
            lease = stack.enter_context(
                Lease.acquire(repository.storage, "prune", duration_s=lease_s, name=PRUNE_LEASE)
            )
        _Prune(repository, report, grace_s=grace_s, lease=lease, progress=progress).run(untagged_s)
    return report


class _Prune:
    def __init__(
        self,
        repository: Repository,
        report: PruneReport,
        *,
        grace_s: float,
        lease: Lease | None,
        progress: Progress | None,
    ) -> None:
        self._repository = repository
        self._storage = repository.storage
        self._report = report
        self._grace_s = grace_s
        self._lease = lease
        self._progress = progress
        self._planned: list[GcList] = []
        """With a dry run: the lists that would be written."""

    def run(self, untagged_s: float | None) -> None:
        # Objects before manifests: one that a later manifest names may still be listed, but is then found needed.
        stored = {info.name: info for info in self._storage.list("")}
        writers = self._writers()
        lists = self._lists()
        snapshots = self._snapshots(lists)
        if untagged_s is not None:
            self._retire(untagged_s, snapshots)
            lists = self._lists()
        needed = _names(snapshots)
        listed = {name for item in lists for name in item.objects}
        now = self._storage.now()
        # A writer's own objects aren't needed yet; marking them would be harmless, and noise.
        young = min((lease.started for lease in writers), default=math.inf) - YOUNG_MARGIN_S
        unneeded: dict[str, int] = {}
        for name, info in stored.items():
            kind = _kind(name)
            if kind is None:
                self._report.foreign += name.split("/")[0] not in ("kvsnap.json", "refs", "leases", "gc")
            elif name in needed:
                self._report.kept_objects += 1
                self._report.kept_bytes += info.nbytes
            elif name not in listed and info.modified < young:
                unneeded[name] = info.nbytes
        self._report.num_snapshots = len(snapshots)
        self._report.marked_objects = len(unneeded)
        self._report.marked_bytes = sum(unneeded.values())
        self._write_lists("unneeded", unneeded)
        self._sweep()
        self._remove_leftovers(now)

    def _lists(self) -> list[GcList]:
        lists = read_lists(self._storage) + self._planned
        return sorted(lists, key=lambda item: (item.reason, item.marked, item.id))

    def _writers(self) -> list[LeaseRecord]:
        """Writers that live; the leases of the dead are broken."""
        live = []
        for lease in read_leases(self._storage):
            if lease.is_live or not (self._lease is None or break_lease(self._storage, lease)):
                live.append(lease)
            elif (text := lease.describe()) not in self._report.broken_leases:
                self._report.broken_leases.append(text)
        self._report.writers = [lease.describe() for lease in live]
        return live

    def _snapshots(self, lists: list[GcList]) -> dict[Digest, Manifest]:
        """What must stay."""
        try:
            return reachable_snapshots(self._repository, lists).snapshots
        except IncompatibleError as error:
            raise IncompatibleError(f"nothing is pruned: {error}", error.fields) from error
        except CorruptChunkError as error:
            raise CorruptChunkError(f"nothing is pruned: {error}") from error

    def _retire(self, untagged_s: float, snapshots: dict[Digest, Manifest]) -> None:
        """Remove those of the snapshots that nobody has a name for, if they are old."""
        named = {snapshot for ref in self._repository.refs().values() for snapshot in _kept_for(ref)}
        now = self._storage.now()
        old: dict[str, int] = {}
        for snapshot in sorted(snapshots.keys() - named):
            name = manifest_name(snapshot)
            info = self._storage.head(name)
            if now - info.modified > untagged_s:
                old[name] = info.nbytes
                self._report.retired.append(snapshot)
        self._write_lists("removed", old)
        for snapshot in self._report.retired:
            del snapshots[snapshot]

    def _write_lists(self, reason: Reason, objects: Mapping[str, int]) -> None:
        names = sorted(objects, key=_order)
        for at in range(0, len(names), MAX_OBJECTS):
            part = {name: objects[name] for name in names[at : at + MAX_OBJECTS]}
            if self._lease is None:
                now = int(self._storage.now())
                planned = GcList(id=f"planned-{reason}-{at}", reason=reason, marked=now, sweeper=None, objects=part)
                self._planned.append(planned)
            else:
                self._lease.check()
                new_list(self._storage, reason, part)

    def _sweep(self) -> None:
        """Delete what is on lists that are due."""
        lists = self._lists()
        total = sum(item.nbytes for item in lists)
        # Leases before manifests: whoever doesn't know a list and is no writer any more has published, or never will.
        writers = self._writers()
        needed = _names(self._snapshots(lists))
        now = self._storage.now()
        for item in lists:
            is_known = all(item.id in lease.seen for lease in writers)
            if not is_known or now - item.marked < self._grace_s:
                hit = [nbytes for name, nbytes in item.objects.items() if name not in needed]
                self._report.waiting_objects += len(hit)
                self._report.waiting_bytes += sum(hit)
            else:
                self._sweep_list(item, needed)
            if self._progress is not None:
                self._progress(self._report.deleted_bytes + self._report.waiting_bytes, total)

    def _sweep_list(self, item: GcList, needed: set[str]) -> None:
        if self._lease is None:
            objects = {name: nbytes for name, nbytes in item.objects.items() if name not in needed}
            self._report.deleted_objects += len(objects)
            self._report.deleted_bytes += sum(objects.values())
            return
        while True:
            objects = {
                name: nbytes for name, nbytes in item.objects.items() if name not in needed and _kind(name) is not None
            }
            self._lease.check()
            if replace_list(self._storage, item, objects, sweeper=self._lease.id):
                break
            found = read_list(self._storage, item.id)
            if found is None:
                return
            item = found
        for kind in range(len(_KINDS)):
            self._delete([name for name in sorted(objects) if _kind(name) == kind])
        self._lease.check()
        self._storage.delete(item.name)
        self._report.deleted_objects += len(objects)
        self._report.deleted_bytes += sum(objects.values())

    def _delete(self, names: list[str]) -> None:
        """Delete while the lease is surely held, which is looked at before each try."""
        lease = self._lease
        assert lease is not None

        def delete(name: str) -> None:
            self._storage.delete_while(name, lease.check)

        with ThreadPoolExecutor(THREADS, "kvsnap-prune", initializer=widen_affinity) as pool:
            for _ in pool.map(delete, names):
                pass

    def _remove_leftovers(self, now: float) -> None:
        dry_run = self._lease is None
        self._report.leftovers = self._storage.sweep(dry_run=dry_run)
        for info in self._storage.list("gc/"):
            if info.name.startswith(PROBE_PREFIX) and now - info.modified > PROBE_MAX_AGE_S:
                self._report.leftovers += 1
                if not dry_run:
                    self._storage.delete(info.name)


def _kept_for(ref: Ref) -> set[Digest]:
    """What a ref names, named before its last move, and, where it was rolled back, what that took out of use.

    The latter so that it can be rolled forward; and gone, it would be new to who exported it, and come back by itself.
    """
    kept = {ref.snapshot, *([] if ref.previous is None else [ref.previous])}
    states = [state.snapshot for state in ref.history]
    if ref.snapshot in states:
        kept.update(states[: states.index(ref.snapshot)])
    return kept


def _names(snapshots: Mapping[Digest, Manifest]) -> set[str]:
    """The objects that these snapshots need."""
    names: set[str] = set()
    for snapshot, manifest in snapshots.items():
        names |= {manifest_name(snapshot), signature_name(snapshot), catalog_name(manifest.catalog.digest)}
        names.update(shard_name(shard.digest) for shard in manifest.shards)
    return names


def _kind(name: str) -> int | None:
    return next((i for i, pattern in enumerate(_KINDS) if pattern.fullmatch(name)), None)


def _order(name: str) -> tuple[int, str]:
    return _kind(name) or 0, name
