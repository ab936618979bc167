"""Leases: the storage's clock ends them, their holders never act on one that may be over."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from kvsnap import leases
from kvsnap.errors import CorruptChunkError, StorageError
from kvsnap.leases import (
    PRUNE_LEASE,
    BusyError,
    Lease,
    LeaseLostError,
    break_lease,
    is_dead_here,
    read_lease,
    read_leases,
    swap,
)
from kvsnap.rounds import Stop
from kvsnap.storage import MemoryStorage, RetryStorage
from kvsnap.testing import Fault, FaultyStorage, Rule
from tests.repository_fakes import MAX, TimedStorage, names_in
from tests.waiting import wait_for


@pytest.fixture
def storage() -> TimedStorage:
    return TimedStorage()


class Clock:
    """The holder's own clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.time = 1000.0
        monkeypatch.setattr(leases, "_clock", lambda: self.time)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class TestOneHolder:
    def test_a_second_prune_is_told_who_runs_and_since_when(self, storage: TimedStorage) -> None:
        """D08: the message names owner and age."""
        Lease.acquire(storage, "prune", name=PRUNE_LEASE)
        storage.time += 42

        with pytest.raises(BusyError, match=rf"prune by .*pid {os.getpid()}.*42 s ago.*258 s"):
            Lease.acquire(storage, "prune", name=PRUNE_LEASE)

    def test_a_lease_from_the_future_is_called_that(self, storage: TimedStorage) -> None:
        """Somebody set the clock back: to wait for the lease to run out may take years."""
        Lease.acquire(storage, "prune", name=PRUNE_LEASE)
        storage.time -= 1e6

        with pytest.raises(BusyError, match=f"{PRUNE_LEASE} was written 1000000 s in the future .* delete it"):
            Lease.acquire(storage, "prune", name=PRUNE_LEASE)

    def test_a_lease_that_ran_out_is_taken_over(self, storage: TimedStorage) -> None:
        """D08: by the storage's clock, so it doesn't matter on which host the holder died."""
        first = Lease.acquire(storage, "prune", name=PRUNE_LEASE)
        storage.time += 301

        second = Lease.acquire(storage, "prune", name=PRUNE_LEASE)

        assert second.id != first.id
        with pytest.raises(LeaseLostError):
            first.renew()
        second.renew()

    def test_a_process_that_is_gone_from_this_machine_holds_nothing(self, storage: TimedStorage) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        process = leases._this_process().replace(f"/{os.getpid()}:", f"/{pid}:")
        os.waitpid(pid, 0)

        assert is_dead_here(process)
        assert not is_dead_here(leases._this_process())
        assert not is_dead_here(f"elsewhere/{process}")

    def test_one_that_was_given_back_is_free(self, storage: TimedStorage) -> None:
        with Lease.acquire(storage, "prune", name=PRUNE_LEASE):
            assert read_lease(storage, PRUNE_LEASE) is not None

        assert read_lease(storage, PRUNE_LEASE) is None
        Lease.acquire(storage, "prune", name=PRUNE_LEASE)

    def test_many_exports_hold_one_each(self, storage: TimedStorage) -> None:
        with Lease.acquire(storage, "export"), Lease.acquire(storage, "export"):
            assert [lease.kind for lease in read_leases(storage)] == ["export", "export"]

        assert names_in(storage) == []


class TestHolder:
    def test_gives_up_before_anybody_else_may_act(self, storage: TimedStorage, clock: Clock) -> None:
        lease = Lease.acquire(storage, "export")
        clock.time += 239
        storage.time += 239
        lease.check()

        clock.time += 2
        storage.time += 2

        found = read_leases(storage)
        assert found[0].is_live
        with pytest.raises(LeaseLostError, match="renewed 241 s ago, it holds 300 s"):
            lease.check()
        with pytest.raises(LeaseLostError):
            lease.renew()

    def test_renewing_keeps_it(self, storage: TimedStorage, clock: Clock) -> None:
        lease = Lease.acquire(storage, "export")
        for _ in range(10):
            clock.time += 200
            storage.time += 200
            lease.renew()

        assert read_leases(storage)[0].age_s == 0

    def test_a_broken_lease_can_not_be_renewed(self, storage: TimedStorage) -> None:
        lease = Lease.acquire(storage, "export")
        assert break_lease(storage, read_leases(storage)[0])

        with pytest.raises(LeaseLostError):
            lease.renew()
        with pytest.raises(LeaseLostError):
            lease.check()

    def test_one_renewed_meanwhile_is_not_broken(self, storage: TimedStorage) -> None:
        lease = Lease.acquire(storage, "export")
        seen = read_leases(storage)[0]
        lease.renew()

        assert not break_lease(storage, seen)
        lease.renew()

    def test_heart_beats_while_the_block_runs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(leases, "_HEARTBEAT", 0.0001)
        storage = MemoryStorage()
        with Lease.acquire(storage, "export"):
            name = names_in(storage)[0]
            first = storage.get(name, max_bytes=MAX)
            deadline = time.monotonic() + 30
            while storage.get(name, max_bytes=MAX) == first and time.monotonic() < deadline:
                time.sleep(0.01)

            assert storage.get(name, max_bytes=MAX) != first

    def test_a_heart_that_waits_for_another_try_ends_quietly_when_somebody_says_stop(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """SIGTERM while the store is busy: no traceback of a thread of ours on the terminal."""
        monkeypatch.setattr(leases, "_HEARTBEAT", 0.0001)
        noise: list[threading.ExceptHookArgs] = []
        monkeypatch.setattr(threading, "excepthook", noise.append)
        stop = Stop()
        faulty = FaultyStorage(MemoryStorage())
        lease = Lease.acquire(RetryStorage(faulty, sleep=stop.sleep), "export")
        faulty.rules = [Rule(fault=Fault.SLOW_DOWN, operation="put_if_match", times=None)]

        stop.set()
        with lease:
            wait_for(lambda: "kvsnap-lease" not in {thread.name for thread in threading.enumerate()})

        assert noise == []
        assert [fault for _, fault in faulty.faults] == [Fault.SLOW_DOWN]
        assert names_in(faulty.inner) == []

    @pytest.mark.parametrize("fault", [Fault.ERROR_AFTER, Fault.DROP, Fault.DUPLICATE])
    def test_a_renewal_whose_answer_is_lost_is_one(self, storage: TimedStorage, fault: Fault) -> None:
        faulty = FaultyStorage(storage, [Rule(fault=fault, operation="put_if_match", name="leases/*")])
        lease = Lease.acquire(faulty, "export")
        lease.renew()

        faulty.rules = [Rule(fault=fault, operation="put_if_match", name="leases/*")]
        lease.renew()
        lease.renew()

    def test_a_renewal_that_happened_although_nobody_could_tell(self, storage: TimedStorage) -> None:
        """The write lands, its answer is lost, and reading it back fails too."""
        faulty = FaultyStorage(storage)
        lease = Lease.acquire(faulty, "export")
        faulty.rules = [
            Rule(fault=Fault.ERROR_AFTER, operation="put_if_match"),
            Rule(fault=Fault.ERROR_BEFORE, operation="get"),
        ]
        with pytest.raises(StorageError):
            lease.renew()

        lease.renew()


class TestSwap:
    @pytest.mark.parametrize("fault", [Fault.ERROR_AFTER, Fault.DROP, Fault.DUPLICATE])
    def test_an_own_write_is_no_conflict(self, fault: Fault) -> None:
        """An SDK's own retry after a lost response is told 'changed meanwhile' by its own first try."""
        storage = FaultyStorage(MemoryStorage(), [Rule(fault=fault, operation="put_if_match")])

        assert swap(storage, "refs/a", b"write 1", None)
        assert not swap(storage, "refs/a", b"write 2", None)

    def test_a_write_that_did_not_happen_is_an_error(self) -> None:
        storage = FaultyStorage(MemoryStorage(), [Rule(fault=Fault.ERROR_BEFORE, operation="put_if_match")])

        with pytest.raises(StorageError, match="injected"):
            swap(storage, "refs/a", b"write 1", None)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"duration": "x"}', b"[" * 100_000, b'{"duration": true}'])
def test_garbage_is_refused_and_named(storage: TimedStorage, data: bytes) -> None:
    storage.put("leases/aa.json", data)

    with pytest.raises(CorruptChunkError, match=r"leases/aa.json .* makes no sense"):
        read_leases(storage)


def test_says_what_the_page_says(storage: TimedStorage) -> None:
    lease = Lease.acquire(storage, "export")
    lease.renew(["a" * 32])

    obj = json.loads(storage.get(names_in(storage)[0], max_bytes=MAX))
    assert obj["seen"] == ["a" * 32]
    assert obj["started"] == int(storage.time)
