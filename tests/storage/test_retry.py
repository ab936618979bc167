"""Retries and injected faults: what is repeated, how often, and what an own write looks like afterwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvsnap.errors import ConfigError, CorruptChunkError, NotFoundError, StorageError
from kvsnap.leases import LeaseLostError
from kvsnap.storage import (
    MemoryStorage,
    ObjectInfo,
    Reader,
    RefusedError,
    RetryPolicy,
    RetryStorage,
    ShortReadError,
)
from kvsnap.storage.retry import is_permanent
from kvsnap.storage.wrapper import WrapperStorage
from kvsnap.testing import Call, Fault, FaultyStorage, Rule


def retrying(*rules: Rule, tries: int = 4, **policy: float) -> tuple[RetryStorage, FaultyStorage, list[float]]:
    """A storage, the faulty one below it, and the pauses it makes (without making them)."""
    pauses: list[float] = []
    faulty = FaultyStorage(MemoryStorage(), rules)
    settings = RetryPolicy(tries=tries, **policy)
    return RetryStorage(faulty, settings, sleep=pauses.append, rng=random.Random(1)), faulty, pauses


def test_what_is_worth_another_try() -> None:
    by_chance = (StorageError, ShortReadError)
    for_good = (RefusedError, NotFoundError, ConfigError, CorruptChunkError, ValueError)

    assert [is_permanent(kind("x")) for kind in by_chance] == [False] * 2
    assert [is_permanent(kind("x")) for kind in for_good] == [True] * 5


def test_pauses_grow_are_random_and_bounded() -> None:
    """D15: who waits the same time comes back at the same time."""
    rule = Rule(fault=Fault.SLOW_DOWN, times=None)
    storage, faulty, pauses = retrying(rule, tries=9, first_pause_s=1, longest_pause_s=8, deadline_s=1000)

    with pytest.raises(StorageError, match="503"):
        storage.put("x", b"")

    bounds = [1, 2, 4, 8, 8, 8, 8, 8]
    assert len(faulty.calls) == 9
    assert len(pauses) == len(bounds)
    assert all(0 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert max(pauses) > 2
    assert len(set(pauses)) == len(pauses)


def test_who_waits_for_long_is_told_why_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs costs a minute and more until the error."""
    storage, _, pauses = retrying(Rule(fault=Fault.SLOW_DOWN, times=3), tries=9, first_pause_s=0)
    monkeypatch.setattr("kvsnap.storage.retry._SILENT_S", -1.0)

    storage.put("x", b"")

    assert len(pauses) == 3
    (told,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "put x has not succeeded for 0 s, trying again" in told
    assert "503" in told


def test_time_is_bounded_too() -> None:
    storage, faulty, _ = retrying(Rule(fault=Fault.SLOW_DOWN, times=None), tries=100, first_pause_s=9, deadline_s=0)

    with pytest.raises(StorageError, match="503"):
        storage.head("x")

    assert len(faulty.calls) == 1


def test_a_conflict_is_only_a_conflict_when_the_bytes_are_anothers() -> None:
    storage, faulty, _ = retrying(
        Rule(fault=Fault.DROP, operation="put_if_absent", name="mine"),
        Rule(fault=Fault.ERROR_BEFORE, operation="put_if_absent", name="theirs"),
        Rule(fault=Fault.DROP, operation="put_if_match"),
    )
    faulty.inner.put("theirs", b"other")
    faulty.inner.put("ref", b"old")

    assert storage.put_if_absent("mine", b"data") is True
    assert storage.put_if_absent("mine", b"data") is False
    assert storage.put_if_absent("theirs", b"data") is False
    version = storage.get_versioned("ref", max_bytes=9).version
    assert storage.put_if_match("ref", b"new", version) is True
    assert storage.put_if_match("ref", b"newer", version) is False


def test_a_deletion_with_a_lost_answer_counts() -> None:
    storage, faulty, _ = retrying(Rule(fault=Fault.DROP, operation="delete"))
    faulty.inner.put("x", b"")

    assert storage.delete("x") is True
    assert storage.delete("x") is False


def test_reads_go_on_where_they_broke() -> None:
    storage, faulty, _ = retrying(Rule(fault=Fault.TRUNCATE, operation="open_read", times=2))
    faulty.inner.put("x", bytes(range(200)))
    buffer = memoryview(bytearray(7))
    found = b""

    with storage.open_read("x", offset=10, nbytes=180) as reader:
        while count := reader.readinto(buffer):
            found += buffer[:count]

    assert found == bytes(range(10, 190))


def test_reads_that_keep_breaking_end() -> None:
    storage, faulty, _ = retrying(Rule(fault=Fault.TRUNCATE, times=None))
    faulty.inner.put("x", bytes(200))
    buffer = memoryview(bytearray(500))

    with storage.open_read("x") as reader, pytest.raises(ShortReadError):
        sum(iter(lambda: reader.readinto(buffer), 0))
    with pytest.raises(ShortReadError):
        storage.get("x", max_bytes=500)


def test_a_rule_strikes_what_it_names() -> None:
    faulty = FaultyStorage(
        MemoryStorage(),
        [Rule(fault=Fault.ERROR_AFTER, operation="put", name="refs/*", skip=1, times=1), Rule(fault=Fault.DELAY)],
        delay_s=0,
    )

    faulty.put("shards/x", b"")
    faulty.put("refs/x", b"1")
    with pytest.raises(StorageError, match="put refs/x: injected error after"):
        faulty.put("refs/x", b"2")
    faulty.put("refs/x", b"3")

    assert faulty.calls == [Call("put", "shards/x"), *[Call("put", "refs/x")] * 3]
    assert [fault for _, fault in faulty.faults] == [Fault.DELAY, Fault.ERROR_AFTER]


def test_a_duplicate_is_done_twice() -> None:
    """As an SDK does after a lost answer: the second answer is what one sees."""
    faulty = FaultyStorage(MemoryStorage(), [Rule(fault=Fault.DUPLICATE)])

    assert faulty.put_if_absent("x", b"1") is False


def test_an_unnoticed_truncation_looks_like_the_end() -> None:
    faulty = FaultyStorage(MemoryStorage(), [Rule(fault=Fault.TRUNCATE_SILENTLY, times=None)])
    faulty.inner.put("x", b"123456")
    buffer = memoryview(bytearray(9))

    assert faulty.read_into("x", buffer, 0) == 3
    with faulty.open_read("x") as reader:
        assert (reader.readinto(buffer), reader.readinto(buffer)) == (3, 0)


def test_chance_repeats_itself_with_its_seed() -> None:
    def faults(seed: int) -> list[tuple[Call, Fault]]:
        storage = FaultyStorage(MemoryStorage(), rate=0.5, seed=seed)
        for i in range(30):
            try:
                storage.put(str(i), b"")
            except StorageError:
                continue
        return storage.faults

    assert faults(1) == faults(1)
    assert faults(1) != faults(2)


def test_a_long_read_has_every_try_before_it_again_once_it_got_on() -> None:
    """A large object over a link that breaks now and then ends, too."""
    size = 8 << 20
    inner = MemoryStorage()
    inner.put("x", bytes(size))

    class BreaksEveryTwoMiB(WrapperStorage):
        @contextmanager
        def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
            with super().open_read(name, offset=offset, nbytes=nbytes) as reader:
                yield Breaking(reader)

    class Breaking:
        def __init__(self, reader: Reader) -> None:
            self.reader, self.left = reader, 2 << 20

        def readinto(self, buffer: memoryview, /) -> int:
            if not self.left:
                raise StorageError("connection reset")
            found = self.reader.readinto(buffer[: min(self.left, 1 << 19)])
            self.left -= found
            return found

    storage = RetryStorage(BreaksEveryTwoMiB(inner), RetryPolicy(tries=2), sleep=lambda seconds: None)

    with storage.open_read("x") as reader:
        buffer = memoryview(bytearray(size))
        done = 0
        while found := reader.readinto(buffer[done:]):
            done += found

    assert done == size
    assert storage.retries == 4


def test_a_deletion_that_must_not_happen_any_more_is_not_tried_again() -> None:
    """A prune's lease runs out between two tries."""
    checks = 0

    class Busy(MemoryStorage):
        def delete(self, name: str) -> bool:
            raise StorageError("503")

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 3:
            raise LeaseLostError("the lease is lost")

    storage = RetryStorage(Busy(), sleep=lambda seconds: None)

    with pytest.raises(LeaseLostError):
        storage.delete_while("x", check)
    assert (checks, storage.retries) == (3, 2)


def test_a_listing_that_breaks_off_names_everything_once() -> None:
    class BreaksOnce(MemoryStorage):
        is_broken = False

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            for number, info in enumerate(super().list(prefix)):
                if number == 2 and not self.is_broken:
                    self.is_broken = True
                    raise StorageError("connection reset")
                yield info

    inner = BreaksOnce()
    for name in "abcd":
        inner.put(name, b"")

    assert [info.name for info in RetryStorage(inner, sleep=lambda seconds: None).list("")] == list("abcd")
