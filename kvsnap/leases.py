"""Leases: who is writing to a repository right now. Objects under `leases/`.

Whoever writes (an export, a copy, a prune) holds a lease and renews it while it runs. A
lease whose holder died runs out by the *storage's* clock: the time of the object's last
write plus the duration in it. The holder itself counts by a clock of its own that never
stops (boot time), from before its last renewal was sent, and gives up a margin earlier;
so it knows that its lease is gone before anybody else may act on that. Whoever acts on a
lease that has run out breaks it first: then a late renewal finds another version and fails.

Readers never look at leases.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from kvsnap.canonical import canonical_json
from kvsnap.errors import CorruptChunkError, KvsnapError, NotFoundError, StorageError
from kvsnap.rounds import StoppedError
from kvsnap.runtime import process_start_time, widen_affinity
from kvsnap.storage import Storage
from kvsnap.storage.base import RefusedError

log = logging.getLogger(__name__)

LEASE_S = 300
"""How long a lease holds after its last renewal [s]."""
PRUNE_LEASE = "leases/prune.json"
"""There is one prune at a time, so its lease has one name."""
MAX_LEASE_BYTES = 1 << 20
_MARGIN = 0.2
"""Share of the duration by which a holder gives up before others may act."""
_SKEW_S = 60.0
"""A lease from further in the future was written before somebody set the storage's clock back."""
_HEARTBEAT = 0.2
"""Share of the duration after which it renews."""


class LeaseLostError(RefusedError):
    """The own lease ran out or was broken: what was relied on may be gone. Start over under a new one."""


class BusyError(RefusedError):
    """Somebody else holds the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """What a lease says, and how the storage sees it."""

    name: str
    """Of the object."""
    id: str
    """Random, of one holder."""
    kind: str
    """What the holder does: `export`, `copy`, `merge`, `tag`, `sign`, `prune`."""
    owner: str
    """User, host and process; for people."""
    process: str
    """Names the process on its machine, so that another one there sees whether it lives."""
    duration_s: int
    seen: tuple[str, ...]
    """Ids of the lists under `gc/` that the holder knows."""
    started: float
    """When it was taken, by the storage's clock [Unix time, s]."""
    age_s: float
    """Since the last renewal, by the storage's clock; below 0 where that clock was set back since."""
    version: str

    @property
    def is_live(self) -> bool:
        """Whether its holder may still act."""
        return self.age_s < self.duration_s and not is_dead_here(self.process)

    def describe(self) -> str:
        """For messages: who, and since when."""
        return f"{self.kind} by {self.owner}, last heard of {max(self.age_s, 0):.0f} s ago"


def read_lease(storage: Storage, name: str) -> LeaseRecord | None:
    """One lease; None if there is none, or it was given back.

    Raises:
        CorruptChunkError: it makes no sense.
        StorageError: the storage failed.
    """
    try:
        data, version = storage.get_versioned(name, max_bytes=MAX_LEASE_BYTES)
        # Renewed between the two requests, it looks younger than this version is: the safe side.
        modified = storage.head(name).modified
    except NotFoundError:
        return None
    try:
        obj = json.loads(data)
        duration = obj["duration"]
        if duration == 0:
            return None
        return LeaseRecord(
            name=name,
            id=_text(obj["id"]),
            kind=_text(obj["kind"]),
            owner=_text(obj["owner"]),
            process=_text(obj["process"]),
            duration_s=_count(duration),
            seen=tuple(_text(item) for item in obj["seen"]),
            started=_count(obj["started"]),
            age_s=storage.now() - modified,
            version=version,
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptChunkError(f"lease {name} in {storage.url} makes no sense ({error}); delete it") from None


def read_leases(storage: Storage) -> list[LeaseRecord]:
    """All leases but that of a prune, dead ones included."""
    names = [info.name for info in storage.list("leases/") if info.name != PRUNE_LEASE]
    return [lease for name in names if (lease := read_lease(storage, name)) is not None]


def break_lease(storage: Storage, lease: LeaseRecord) -> bool:
    """Make a lease that is not live useless to its holder, should it live after all; False if it was renewed.

    Afterwards nothing that the holder does under the lease can succeed.
    """
    done = storage.put_if_match(lease.name, _encode(lease, duration_s=0, write_id=_new_id()), lease.version)
    if done and lease.name != PRUNE_LEASE:
        storage.delete(lease.name)  # a name is never used again, so nobody else's lease can be hit
    return done


class Lease:
    """A lease of this process, renewed by a thread of its own while the block runs."""

    def __init__(self, storage: Storage, record: LeaseRecord, renewed: float) -> None:
        self._storage = storage
        self._record = record
        self._renewed = renewed
        self._lock = threading.Lock()
        self._is_lost = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(cls, storage: Storage, kind: str, *, duration_s: int = LEASE_S, name: str | None = None) -> Lease:
        """Take a lease: one of its own, or with `name` that one, which has one holder at a time.

        Raises:
            BusyError: somebody else has it; names them and their age.
            StorageError: the storage failed.
        """
        held = None if name is None else read_lease(storage, name)
        if held is not None and held.is_live:
            left = held.duration_s - held.age_s
            hint = f"wait, its lease runs out in {left:.0f} s"
            if held.age_s < -_SKEW_S:
                hint = (
                    f"its lease {held.name} was written {-held.age_s:.0f} s in the future of the storage's clock: if "
                    "nobody is at work there, delete it"
                )
            raise BusyError(f"{storage.url} is in use: {held.describe()}; {hint}")
        lease_id = _new_id()
        record = LeaseRecord(
            name=name or f"leases/{lease_id}.json",
            id=lease_id,
            kind=kind,
            owner=_owner(),
            process=_this_process(),
            duration_s=duration_s,
            seen=(),
            started=float(int(storage.now())),
            age_s=0.0,
            version="",
        )
        expected = held.version if held is not None else None if name is None else _version_of(storage, name)
        renewed = _clock()
        version = _swap(storage, record.name, record, expected)
        if version is None:
            why = f"another {kind} started at the same moment"
            if name is None:
                why = f"the lease of this {kind}, which stood still meanwhile, was taken for a dead one's"
            raise BusyError(f"{storage.url} is in use: {why}; try again")
        return cls(storage, replace(record, version=version), renewed)

    @property
    def id(self) -> str:
        """Of this holder."""
        return self._record.id

    @property
    def started(self) -> float:
        """By the storage's clock [Unix time, s]."""
        return self._record.started

    def renew(self, seen: Sequence[str] | None = None) -> None:
        """Renew it now, and say which lists under `gc/` are known.

        Raises:
            LeaseLostError: it is lost.
            StorageError: the storage failed; it may be held still.
        """
        with self._lock:
            self._check()
            record = self._record if seen is None else replace(self._record, seen=tuple(seen))
            sent = _clock()
            version = _swap(self._storage, record.name, record, record.version)
            if version is None:
                # An earlier renewal may have happened although it failed; then the lease is still this one.
                found = read_lease(self._storage, record.name)
                if found is not None and found.id == record.id:
                    version = _swap(self._storage, record.name, record, found.version)
            if version is None:
                self._is_lost = True
                self._check()
            self._record = replace(record, version=version or "")
            self._renewed = sent

    def check(self) -> None:
        """Go on only if the lease is surely held.

        Raises:
            LeaseLostError: it may not be.
        """
        with self._lock:
            self._check()

    def _check(self) -> None:
        age = _clock() - self._renewed
        if age > self._record.duration_s * (1 - _MARGIN):
            self._is_lost = True
        if self._is_lost:
            raise LeaseLostError(
                f"the lease of this {self._record.kind} on {self._storage.url} is lost (renewed {age:.0f} s ago, it "
                f"holds {self._record.duration_s} s)"
            )

    def release(self) -> None:
        """Give it back. Failing to do so only means that it runs out later."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock, suppress(KvsnapError):
            if self._record.name == PRUNE_LEASE:
                given_back = _encode(self._record, duration_s=0, write_id=_new_id())
                self._storage.put_if_match(self._record.name, given_back, self._record.version)
            else:
                self._storage.delete(self._record.name)

    def __enter__(self) -> Lease:
        self._thread = threading.Thread(target=self._beat, name="kvsnap-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def _beat(self) -> None:
        widen_affinity()
        while not self._stop.wait(self._record.duration_s * _HEARTBEAT):
            try:
                self.renew()
            except LeaseLostError as error:  # which the holder is about to find out
                log.info("kvsnap: %s", error)
                return
            except StoppedError:  # the holder is told, too
                return
            except StorageError as error:
                log.warning("kvsnap: the lease could not be renewed, trying again: %s", error)


def is_dead_here(process: str) -> bool:
    """Whether a process that a lease names was one of this machine and is gone. False when in doubt."""
    host, _, rest = process.rpartition("/")
    pid, _, start = rest.partition(":")
    if host != _machine() or not pid.isdecimal() or not start.isdecimal():
        return False
    return process_start_time(int(pid)) != int(start)


def swap(storage: Storage, name: str, data: bytes, version: str | None) -> bool:
    """`put_if_match` of data that holds a write id: an own write whose answer got lost counts as done.

    An SDK, or a proxy, may repeat a request by itself: then the first try was the one that
    replaced the object, and the second is told that it has changed.

    Raises:
        StorageError: the storage failed, and the write did not happen.
    """
    try:
        if storage.put_if_match(name, data, version):
            return True
    except RefusedError:
        raise
    except StorageError as error:
        if not _holds(storage, name, data):
            raise error from None
        return True
    return _holds(storage, name, data)


def _holds(storage: Storage, name: str, data: bytes) -> bool:
    try:
        return storage.get(name, max_bytes=len(data)) == data
    except (NotFoundError, CorruptChunkError):
        return False


def _swap(storage: Storage, name: str, record: LeaseRecord, version: str | None) -> str | None:
    """Write a lease; its new version, or None when somebody else has changed it."""
    data = _encode(record, duration_s=record.duration_s, write_id=_new_id())
    if not swap(storage, name, data, version):
        return None
    try:
        found = storage.get_versioned(name, max_bytes=MAX_LEASE_BYTES)
    except NotFoundError:
        return None
    return found.version if found.data == data else None


def _version_of(storage: Storage, name: str) -> str | None:
    try:
        return storage.get_versioned(name, max_bytes=MAX_LEASE_BYTES).version
    except NotFoundError:
        return None


def _encode(lease: LeaseRecord, *, duration_s: int, write_id: str) -> bytes:
    return canonical_json(
        {
            "duration": duration_s,
            "id": lease.id,
            "kind": lease.kind,
            "owner": lease.owner,
            "process": lease.process,
            "seen": list(lease.seen),
            "started": int(lease.started),
            "write_id": write_id,
        }
    )


def _clock() -> float:
    """Seconds that also pass while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _new_id() -> str:
    return secrets.token_hex(16)


def _owner() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()} (pid {os.getpid()})"


def _machine() -> str:
    """This boot of this machine, and the space of process ids that this process sees."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown-{socket.gethostname()}"


def _this_process() -> str:
    pid = os.getpid()
    return f"{_machine()}/{pid}:{process_start_time(pid) or ''}"


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError(f"{value!r:.40} is no short text")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r:.40} is no count")
    return value
