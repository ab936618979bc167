"""A writer's side of the bargain with prune: nothing that it relies on is deleted.

A writer takes a lease first, then reads the lists of what is to be deleted, and says in
its lease which ones it knows. A prune deletes what is on a list only when every lease
that lives knows that list; and whoever knows it takes off what it needs, before it names
it in a manifest (`keep`). So of a writer and a prune that want the same object, one always
sees the other, whatever the clocks say and however slow either is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from kvsnap.canonical import sha256_hex
from kvsnap.errors import StorageError
from kvsnap.gc_lists import GcList, read_list, read_lists, replace_list
from kvsnap.leases import LEASE_S, PRUNE_LEASE, Lease, LeaseLostError, break_lease, read_lease
from kvsnap.manifest import Digest, decode_manifest
from kvsnap.repository import Repository, catalog_name, manifest_name
from kvsnap.signing import Signature, signature_name, store_signature

log = logging.getLogger(__name__)

T = TypeVar("T")

_LEASES = 3
"""Whoever loses so many gives up."""
_POLL_S = 0.1
_LONGEST_POLL_S = 2.0
SWEEP_TIMEOUT_S = 900.0
"""How long a writer waits for a prune that deletes what the writer wants."""


class WriteSession:
    """Held while something is written to a repository: a lease, and what is known of prunes."""

    def __init__(self, repository: Repository, kind: str, *, duration_s: int = LEASE_S) -> None:
        self._storage = repository.storage
        self._kind = kind
        self._duration_s = duration_s
        self._kept: set[str] = set()
        self._lease: Lease | None = None
        self.lists: list[GcList] = []
        """What was to be deleted when the session began."""

    def __enter__(self) -> WriteSession:
        self._lease = Lease.acquire(self._storage, self._kind, duration_s=self._duration_s)
        try:
            self.lists = read_lists(self._storage)
            if self.lists:
                self._lease.renew([item.id for item in self.lists])
            self._lease.__enter__()
        except BaseException:
            self._lease.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._lease is not None:
            self._lease.release()

    def renew(self) -> None:
        """Renew the lease right before something is published.

        Raises:
            LeaseLostError: it is lost; start over.
        """
        assert self._lease is not None
        self._lease.renew()

    def check(self) -> None:
        """Whether the lease was held all the time, asked right after something was published.

        Raises:
            LeaseLostError: it may have run out meanwhile.
        """
        assert self._lease is not None
        self._lease.check()

    def keep(self, names: Iterable[str]) -> set[str]:
        """Have no prune delete these objects as long as the session lives. Call it before a manifest names them.

        Returns:
            Those that a prune has deleted, or may have: look whether they are still there, and
            store them again if not. What is stored from now on stays.

        Raises:
            StorageError: a prune that lives doesn't get done with them.
        """
        wanted = set(names) - self._kept
        doubtful: set[str] = set()
        for item in self.lists:
            if hit := wanted & item.objects.keys():
                doubtful |= self._take_off(item.id, hit)
        self._kept |= wanted
        return doubtful

    def _take_off(self, list_id: str, names: set[str]) -> set[str]:
        """Take names off a list; those that may be gone."""
        deadline, poll = time.monotonic() + SWEEP_TIMEOUT_S, _POLL_S
        while True:
            item = read_list(self._storage, list_id)
            if item is None:
                return names
            hit = names & item.objects.keys()
            if item.sweeper is not None and hit and not self._is_dead(item.sweeper):
                if time.monotonic() > deadline:
                    raise StorageError(
                        f"a prune of {self._storage.url} has been deleting for {SWEEP_TIMEOUT_S:.0f} s what this "
                        f"{self._kind} needs; run it again when the prune is done"
                    )
                time.sleep(poll)
                poll = min(poll * 2, _LONGEST_POLL_S)
                continue
            rest = {name: nbytes for name, nbytes in item.objects.items() if name not in hit}
            if not hit or replace_list(self._storage, item, rest):
                return names if item.sweeper is not None else names - hit

    def _is_dead(self, sweeper: str) -> bool:
        """Whether the prune of this lease deletes nothing any more; makes sure of it where it seems dead."""
        lease = read_lease(self._storage, PRUNE_LEASE)
        if lease is None or lease.id != sweeper:
            return True
        if lease.is_live:
            return False
        log.warning("kvsnap: %s ended before it was done; going on without it", lease.describe())
        return break_lease(self._storage, lease)


def under_lease(repository: Repository, kind: str, act: Callable[[WriteSession], T]) -> T:
    """Do `act` in a session; again in a new one when the lease ran out, since what it relied on may be gone."""
    for left in reversed(range(_LEASES)):
        try:
            with WriteSession(repository, kind) as session:
                return act(session)
        except LeaseLostError as error:
            if not left:
                raise LeaseLostError(f"{error}, and so were those before; run it again") from error
            log.warning("kvsnap: %s: looking again at what is there", error)
    raise AssertionError("unreachable")


def publish_snapshot(
    repository: Repository,
    session: WriteSession,
    *,
    catalog: bytes,
    manifest: bytes,
    signature: Signature | None = None,
) -> Digest:
    """Publish a snapshot whose shards are there and kept, its signature before it can be listed; its id.

    Raises:
        LeaseLostError: the lease ran out. The snapshot may be there, and lack what a prune took meanwhile: start over.
        IncompatibleError: nobody could read such a manifest, and it would stop every prune. Nothing was published.
    """
    snapshot = Digest(sha256_hex(manifest))
    decode_manifest(manifest, expect=snapshot)
    names = (catalog_name(Digest(sha256_hex(catalog))), manifest_name(snapshot))
    session.keep((*names, signature_name(snapshot)))
    repository.put_object(names[0], catalog)
    if signature is not None:
        store_signature(repository.storage, snapshot, signature)
    session.renew()
    repository.put_object(names[1], manifest)
    session.check()
    return snapshot
