"""For tests of a storage and of what is built on one: a conformance suite, and a storage that fails on demand.

A storage of your own passes when a class derived from `StorageSuite`, with a fixture
`storage` that gives an empty one, does. Needs pytest.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

import pytest

from kvsnap.errors import ConfigError, CorruptChunkError, NotFoundError, StorageError
from kvsnap.storage import ObjectInfo, Reader, ShortReadError, Storage
from kvsnap.storage.wrapper import WrapperStorage

T = TypeVar("T")

MIB = 1 << 20
WRONG_NAMES = (
    "", "/", "/etc/passwd", "..", "../x", "a/../x", "a//b", "a/", ".x", "a/.x", "a\\b", "a\0b", "a\n", "ä", "a b",
    "x" * 300, "/".join("a" * 20),
)  # fmt: skip
"""Names that every storage refuses: they would lead out of it, or mean another file elsewhere."""


class StorageSuite:
    """What every `Storage` does. Subclass it and provide an empty `storage` fixture."""

    def test_put_if_absent_never_replaces(self, storage: Storage) -> None:
        assert storage.put_if_absent("a/b", b"first")
        assert not storage.put_if_absent("a/b", b"second")

        assert storage.get("a/b", max_bytes=100) == b"first"

    def test_put_replaces(self, storage: Storage) -> None:
        storage.put("refs/x", b"first")
        storage.put("refs/x", b"second")

        assert storage.get("refs/x", max_bytes=100) == b"second"

    def test_put_copies(self, storage: Storage) -> None:
        """Slots are reused; a stored object must not change with the buffer it came from."""
        buffer = bytearray(b"chunk")

        def pieces() -> Iterator[memoryview]:
            for text in (b"one", b"two"):
                buffer[:3] = text
                yield memoryview(buffer)[:3]

        storage.put_stream(pieces, lambda: "stream")
        storage.put_if_absent("absent", memoryview(buffer))
        storage.put("put", memoryview(buffer))
        version = storage.get_versioned("put", max_bytes=100).version
        storage.put_if_match("put", memoryview(buffer), version)
        buffer[:] = bytes(len(buffer))

        assert storage.get("stream", max_bytes=100) == b"onetwo"
        assert storage.get("absent", max_bytes=100) == b"twonk"
        assert storage.get("put", max_bytes=100) == b"twonk"

    def test_a_stream_is_named_when_it_has_passed(self, storage: Storage) -> None:
        digest = hashlib.sha256()

        def pieces() -> Iterator[bytes]:
            nonlocal digest
            digest = hashlib.sha256()
            for piece in (b"one", b"", b"two"):
                digest.update(piece)
                yield piece

        def name() -> str:
            return f"shards/{digest.hexdigest()}"

        assert storage.put_stream(pieces, name) is True
        assert storage.put_stream(pieces, name) is False
        assert storage.get(name(), max_bytes=100) == b"onetwo"

    def test_a_stream_of_known_name(self, storage: Storage) -> None:
        data = bytes(range(256)) * 8
        sha256 = hashlib.sha256(data).hexdigest()

        def put() -> bool:
            return storage.put_known("x", lambda: [data[:1000], data[1000:]], nbytes=len(data), sha256=sha256)

        assert (put(), put()) == (True, False)
        assert storage.get("x", max_bytes=len(data)) == data

    def test_a_stream_that_fails_stores_nothing(self, storage: Storage) -> None:
        def broken() -> Iterator[bytes]:
            yield b"one"
            raise CorruptChunkError("bad chunk")

        def refuse() -> str:
            raise CorruptChunkError("bad digest")

        with pytest.raises(CorruptChunkError, match="bad chunk"):
            storage.put_stream(broken, lambda: "x")
        with pytest.raises(CorruptChunkError, match="bad chunk"):
            storage.put_known("x", broken, nbytes=3, sha256="00" * 32)
        with pytest.raises(CorruptChunkError, match="bad digest"):
            storage.put_stream(lambda: [b"one"], refuse)

        assert storage.is_empty()

    def test_large_objects_stream(self, storage: Storage) -> None:
        piece = random.Random(1).randbytes(MIB)
        found = bytearray()
        buffer = memoryview(bytearray(MIB + 7))

        storage.put_stream(lambda: [piece] * 3, lambda: "shards/large")
        with storage.open_read("shards/large") as reader:
            while count := reader.readinto(buffer):
                found += buffer[:count]

        assert found == piece * 3
        assert storage.head("shards/large").nbytes == 3 * MIB

    def test_an_empty_object(self, storage: Storage) -> None:
        assert storage.put_if_absent("x", b"") is True
        assert storage.put_stream(list, lambda: "y") is True

        assert storage.get("x", max_bytes=0) == b""
        assert storage.read_into("y", memoryview(bytearray(4)), 0) == 0
        with storage.open_read("y") as reader:
            assert reader.readinto(memoryview(bytearray(4))) == 0

    def test_one_of_many_racing_writers_wins(self, storage: Storage) -> None:
        """The object is one writer's, whole; all others are told."""
        won = _race(lambda i: storage.put_if_absent("shards/aa/x", bytes([i]) * 100_000))

        assert len(won) == 1
        assert storage.get("shards/aa/x", max_bytes=MIB) == bytes(won) * 100_000

    def test_compare_and_swap(self, storage: Storage) -> None:
        assert storage.put_if_match("refs/x", b"zero", "no such version") is False
        assert storage.put_if_match("refs/x", b"first", None) is True
        assert storage.put_if_match("refs/x", b"other", None) is False
        first = storage.get_versioned("refs/x", max_bytes=100)

        assert storage.put_if_match("refs/x", b"second", first.version) is True
        assert storage.put_if_match("refs/x", b"third", first.version) is False
        second = storage.get_versioned("refs/x", max_bytes=100)

        assert (first.data, second.data) == (b"first", b"second")
        assert storage.get("refs/x", max_bytes=100) == b"second"

    def test_put_and_delete_outdate_a_version(self, storage: Storage) -> None:
        storage.put("refs/x", b"first")
        version = storage.get_versioned("refs/x", max_bytes=100).version

        storage.put("refs/x", b"second")
        assert storage.put_if_match("refs/x", b"third", version) is False
        storage.delete("refs/x")
        assert storage.put_if_match("refs/x", b"third", version) is False

        assert storage.is_empty()

    def test_one_of_many_racing_swaps_wins(self, storage: Storage) -> None:
        storage.put("refs/x", b"start")
        version = storage.get_versioned("refs/x", max_bytes=100).version

        won = _race(lambda i: storage.put_if_match("refs/x", bytes([i]) * 1000, version))

        assert len(won) == 1
        assert storage.get("refs/x", max_bytes=MIB) == bytes(won) * 1000

    def test_reads_ranges_into_a_buffer(self, storage: Storage) -> None:
        storage.put_if_absent("x", b"0123456789")
        buffer = bytearray(6)

        assert storage.read_into("x", memoryview(buffer)[1:5], 3) == 4
        assert bytes(buffer) == b"\x003456\x00"
        assert storage.read_into("x", memoryview(buffer), 8) == 2
        assert storage.read_into("x", memoryview(buffer), 10) == 0
        assert storage.read_into("x", memoryview(buffer), 50) == 0
        assert storage.read_into("x", memoryview(bytearray()), 0) == 0

    def test_streams_ranges(self, storage: Storage) -> None:
        storage.put_if_absent("x", b"0123456789")
        buffer = memoryview(bytearray(3))

        for offset, nbytes, expected in (
            (0, None, b"0123456789"),
            (3, None, b"3456789"),
            (3, 4, b"3456"),
            (8, 100, b"89"),
            (10, 5, b""),
            (2, 0, b""),
        ):
            found = b""
            with storage.open_read("x", offset=offset, nbytes=nbytes) as reader:
                while count := reader.readinto(buffer):
                    found += buffer[:count]
            assert found == expected

    def test_lists_in_order_below_a_prefix(self, storage: Storage) -> None:
        """Order is that of the names' bytes: a dash comes before a slash."""
        for name in ("shards/b/2", "shards/a/1", "shards/a-1", "refs/x", "shards/b/1", "shardsx"):
            storage.put_if_absent(name, b"12")

        assert [(info.name, info.nbytes) for info in storage.list("shards/")] == [
            ("shards/a-1", 2),
            ("shards/a/1", 2),
            ("shards/b/1", 2),
            ("shards/b/2", 2),
        ]
        assert [info.name for info in storage.list("")][::5] == ["refs/x", "shardsx"]
        assert list(storage.list("nothing/")) == []

    def test_the_storage_has_one_clock(self, storage: Storage) -> None:
        """Prune's grace compares the two; S3 tells whole seconds."""
        before = storage.now()
        storage.put_if_absent("x", b"1")
        after = storage.now()

        modified = storage.head("x").modified

        assert before - 1.5 <= modified <= after + 1.5
        assert abs(next(iter(storage.list(""))).modified - modified) <= 1

    def test_what_is_not_there(self, storage: Storage) -> None:
        buffer = memoryview(bytearray(1))
        for act in (
            lambda: storage.head("a/x"),
            lambda: storage.get("a/x", max_bytes=1),
            lambda: storage.get_versioned("a/x", max_bytes=1),
            lambda: storage.read_into("a/x", buffer, 0),
            lambda: storage.read_into("a/x", buffer[:0], 0),
            lambda: storage.open_read("a/x").__enter__(),
            lambda: storage.open_read("a/x", offset=1, nbytes=0).__enter__(),
        ):
            with pytest.raises(NotFoundError, match="a/x"):
                act()
        assert storage.delete("a/x") is False

    def test_deletes(self, storage: Storage) -> None:
        storage.put_if_absent("a/x", b"")

        assert storage.delete("a/x") is True
        assert list(storage.list("")) == []

    def test_deletes_only_while_it_may(self, storage: Storage) -> None:
        """A prune whose lease is over must not go on."""

        def refuse() -> None:
            raise CorruptChunkError("not any more")

        storage.put_if_absent("a/x", b"")
        with pytest.raises(CorruptChunkError, match="not any more"):
            storage.delete_while("a/x", refuse)
        assert storage.head("a/x").nbytes == 0

        assert storage.delete_while("a/x", lambda: None) is True
        assert list(storage.list("")) == []

    def test_too_large_an_object_is_refused(self, storage: Storage) -> None:
        """Sizes are compared before anything is allocated."""
        storage.put_if_absent("x", b"123456")

        with pytest.raises(CorruptChunkError, match="at most 5"):
            storage.get("x", max_bytes=5)
        with pytest.raises(CorruptChunkError, match="at most 5"):
            storage.get_versioned("x", max_bytes=5)

    def test_names_are_plain(self, storage: Storage) -> None:
        """What a stranger's manifest names must not lead out of the repository."""
        calls: tuple[Callable[[str], object], ...] = (
            lambda name: storage.put(name, b""),
            lambda name: storage.put_if_absent(name, b""),
            lambda name: storage.put_if_match(name, b"", "1"),
            lambda name: storage.put_stream(lambda: [b""], lambda: name),
            lambda name: storage.put_known(name, lambda: [b""], nbytes=0, sha256=hashlib.sha256().hexdigest()),
            lambda name: storage.head(name),
            lambda name: storage.get(name, max_bytes=1),
            lambda name: storage.read_into(name, memoryview(bytearray(1)), 0),
            lambda name: storage.open_read(name).__enter__(),
            lambda name: storage.delete(name),
        )
        for name in WRONG_NAMES:
            for call in calls:
                with pytest.raises(ConfigError, match="name"):
                    call(name)
        assert storage.is_empty()

    def test_sweeping_harms_nothing(self, storage: Storage) -> None:
        storage.put_if_absent("x", b"1")

        assert storage.sweep(dry_run=True) == 0
        assert storage.sweep() == 0
        assert storage.get("x", max_bytes=1) == b"1"


def _race(act: Callable[[int], bool], threads: int = 8) -> list[int]:
    """The numbers of the threads for which `act` said True."""
    won: list[int] = []
    start = threading.Barrier(threads)

    def run(i: int) -> None:
        start.wait()
        if act(i):
            won.append(i)

    running = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return won


class Fault(Enum):
    """What `FaultyStorage` can do to a call."""

    ERROR_BEFORE = "error before"
    """It fails; nothing happened."""
    ERROR_AFTER = "error after"
    """It happened, and is reported as failed."""
    DROP = "dropped response"
    """It happened; the answer never came, and a time-out says so."""
    SLOW_DOWN = "503"
    """The store is too busy; nothing happened."""
    TRUNCATE = "truncated body"
    """Half of the bytes, then the error of a storage that noticed."""
    TRUNCATE_SILENTLY = "truncated body, unnoticed"
    """Half of the bytes, and then the end, as from a storage that lost the rest."""
    DELAY = "delay"
    """It takes `FaultyStorage.delay_s` longer."""
    DUPLICATE = "duplicate"
    """It is done twice; the second answer counts, as when an SDK sent a request again by itself."""


class Call(NamedTuple):
    """A call that a `FaultyStorage` has seen."""

    operation: str
    """Name of the method."""
    name: str
    """Object or prefix; empty for a `put_stream`, whose name comes last."""


@dataclass(slots=True, kw_only=True)
class Rule:
    """Which calls meet which fault."""

    fault: Fault
    operation: str = "*"
    """Name of the method, may hold wildcards."""
    name: str = "*"
    """Object or prefix, may hold wildcards."""
    skip: int = 0
    """Matching calls that pass before the first fault."""
    times: int | None = 1
    """Faults in all; None: for ever."""

    def strikes(self, call: Call) -> bool:
        """Whether this call is hit; counts it."""
        if not (fnmatchcase(call.operation, self.operation) and fnmatchcase(call.name, self.name)):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.times is not None:
            if not self.times:
                return False
            self.times -= 1
        return True


ANY_FAULT = (Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.DROP, Fault.SLOW_DOWN, Fault.TRUNCATE, Fault.DUPLICATE)
"""Those that a storage as good as its word may show, without the slow ones."""


class FaultyStorage(WrapperStorage):
    """Fails as told by `rules` (the first that strikes), else by chance at `rate`, the same for the same `seed`.

    Attributes:
        calls: All calls so far, in order: what a test of the number of requests counts.
        faults: Those of them that were hit, and how.
    """

    def __init__(
        self,
        inner: Storage,
        rules: Sequence[Rule] = (),
        *,
        rate: float = 0.0,
        seed: int = 0,
        chance: Sequence[Fault] = ANY_FAULT,
        delay_s: float = 0.01,
    ) -> None:
        super().__init__(inner)
        self.rules = list(rules)
        self.rate = rate
        self.delay_s = delay_s
        self.calls: list[Call] = []
        self.faults: list[tuple[Call, Fault]] = []
        self._rng = random.Random(seed)
        self._chance = tuple(chance)
        self._lock = threading.Lock()

    def _choose(self, call: Call) -> Fault | None:
        with self._lock:
            self.calls.append(call)
            fault = next((rule.fault for rule in self.rules if rule.strikes(call)), None)
            if fault is None and self._rng.random() < self.rate:
                fault = self._rng.choice(self._chance)
            if fault is not None:
                self.faults.append((call, fault))
            return fault

    def _call(self, operation: str, name: str, act: Callable[[], T]) -> T:
        return self._suffer(Call(operation, name), self._choose(Call(operation, name)), act)

    def _suffer(self, call: Call, fault: Fault | None, act: Callable[[], T]) -> T:
        what = f"{call.operation} {call.name}: injected {'' if fault is None else fault.value}"
        if fault in (Fault.ERROR_BEFORE, Fault.SLOW_DOWN):
            raise StorageError(what)
        if fault is Fault.DELAY:
            time.sleep(self.delay_s)
        result = act()
        if fault in (Fault.ERROR_AFTER, Fault.DROP):
            raise StorageError(what)
        if fault is Fault.TRUNCATE and call.operation in ("get", "get_versioned"):
            raise ShortReadError(what)
        return act() if fault is Fault.DUPLICATE else result

    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        call = Call("read_into", name)
        fault = self._choose(call)
        found = self._suffer(call, fault, lambda: self.inner.read_into(name, buffer, offset))
        if fault is Fault.TRUNCATE:
            raise ShortReadError(f"read_into {name}: injected {fault.value}")
        return found // 2 if fault is Fault.TRUNCATE_SILENTLY else found

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._call("list", prefix, lambda: [*self.inner.list(prefix)]))

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        call = Call("open_read", name)
        fault = self._choose(call)
        if fault in (Fault.TRUNCATE, Fault.TRUNCATE_SILENTLY):
            rest = max(self.inner.head(name).nbytes - offset, 0)
            half = (rest if nbytes is None else min(rest, nbytes)) // 2
            with self.inner.open_read(name, offset=offset, nbytes=half) as reader:
                yield _BrokenReader(reader, None if fault is Fault.TRUNCATE_SILENTLY else f"{name}: {fault.value}")
            return
        self._suffer(call, None if fault is Fault.DUPLICATE else fault, lambda: None)
        with self.inner.open_read(name, offset=offset, nbytes=nbytes) as reader:
            yield reader


class _BrokenReader:
    def __init__(self, inner: Reader, complaint: str | None) -> None:
        self._inner = inner
        self._complaint = complaint

    def readinto(self, buffer: memoryview, /) -> int:
        found = self._inner.readinto(buffer)
        if not found and len(buffer) and self._complaint is not None:
            raise ShortReadError(f"read {self._complaint}, injected")
        return found
