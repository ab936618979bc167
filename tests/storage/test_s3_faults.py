"""S3 storage against a store that misbehaves: what is repeated, what is reported, what is never believed."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import islice
from pathlib import Path

import pytest

from kvsnap.errors import CorruptChunkError, StorageError
from kvsnap.namespace import Namespace
from kvsnap.repository_prune import prune_repository
from kvsnap.snapshot_export import export_snapshot
from kvsnap.storage import (
    Capabilities,
    RefusedError,
    RetryPolicy,
    S3Options,
    ShortReadError,
    Storage,
    open_storage,
    probe_storage,
    s3_body,
)
from kvsnap.testing import StorageSuite
from tests.storage.fake_s3 import BUCKET, FakeS3, Request, Trouble, etag, fake_s3

pytest.importorskip("boto3")

FAST = RetryPolicy(tries=4, first_pause_s=0.001, longest_pause_s=0.01)


@contextmanager
def opened(endpoint: str, retry: RetryPolicy = FAST, **options: float) -> Iterator[Storage]:
    storage = open_storage(f"s3://{BUCKET}/p", S3Options(endpoint=endpoint, retry=retry, **options))  # type: ignore[arg-type]
    try:
        yield storage
    finally:
        storage.close()


@pytest.fixture
def store() -> Iterator[FakeS3]:
    with fake_s3() as state:
        yield state


@pytest.fixture
def storage(store: FakeS3) -> Iterator[Storage]:
    with opened(store.endpoint) as storage:
        yield storage


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's own pause between its two tries is up to a second; what matters here is that there are two."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.0)


class TestSingleWriterOnAStoreWithoutConditions(StorageSuite):
    """With `use`, a single writer sees the same as on a good store (so the races are left out)."""

    test_one_of_many_racing_writers_wins = None  # type: ignore[assignment]
    test_one_of_many_racing_swaps_wins = None  # type: ignore[assignment]
    test_the_storage_has_one_clock = None  # type: ignore[assignment]

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        with fake_s3(conditions=False, ranges=False) as state, opened(state.endpoint) as storage:
            storage.use(
                Capabilities(conditional_create=False, conditional_replace=False, ranges=False, checksums=False)
            )
            yield storage


@pytest.mark.parametrize("missing", [(), ("conditions",), ("ranges",), ("checksums",)])
def test_the_probe_sees_what_a_store_ignores(missing: tuple[str, ...]) -> None:
    with fake_s3(**dict.fromkeys(missing, False)) as state, opened(state.endpoint) as storage:
        found = probe_storage(storage)

        assert found == Capabilities(
            conditional_create="conditions" not in missing,
            conditional_replace="conditions" not in missing,
            ranges="ranges" not in missing,
            checksums="checksums" not in missing,
        )
        assert state.objects == {}
        assert len(state.requests) < 40


def test_ignored_ranges_are_an_error_until_they_are_known(storage: Storage, store: FakeS3) -> None:
    """The bytes would be those of another place."""
    store.settings.ranges = False
    storage.put("x", b"0123456789")

    with pytest.raises(RefusedError, match="ignores ranges"):
        storage.read_into("x", memoryview(bytearray(2)), 4)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("times", [1, 2], ids=["SDK", "kvsnap"])
def test_an_own_write_with_a_lost_answer_is_no_conflict(storage: Storage, store: FakeS3, times: int) -> None:
    """The second try meets the first one's object. Whether the SDK or kvsnap tries again makes no difference."""
    store.settings.troubles = [Trouble("PUT", "drop_after", "p/lease", times)]
    assert storage.put_if_absent("lease", b"mine") is True

    store.settings.troubles = [Trouble("PUT", "drop_after", "p/ref", times)]
    assert storage.put_if_match("ref", b"one", None) is True
    version = storage.get_versioned("ref", max_bytes=99).version
    store.settings.troubles = [Trouble("PUT", "drop_after", "p/ref", times)]
    assert storage.put_if_match("ref", b"two", version) is True

    store.settings.troubles = [Trouble("PUT", "drop_after", "p/x", times)]
    storage.put_stream(lambda: [b"1", b"2"], lambda: "x")
    assert store.objects == {"p/lease": b"mine", "p/ref": b"two", "p/x": b"12"}


@pytest.mark.usefixtures("quick")
def test_another_writer_meanwhile_is_a_conflict(storage: Storage, store: FakeS3) -> None:
    store.objects["p/lease"] = b"theirs"
    store.settings.troubles = [Trouble("PUT", "drop", "p/lease", 2)]

    assert storage.put_if_absent("lease", b"mine") is False
    assert store.objects["p/lease"] == b"theirs"


@pytest.mark.usefixtures("quick")
def test_an_interrupted_upload_is_nothing_and_is_repeated(storage: Storage, store: FakeS3) -> None:
    """D02: the body is made anew from its pieces for each try."""
    data = random.Random(3).randbytes(1 << 20)
    store.settings.troubles = [Trouble("PUT", "drop", times=3)]

    assert storage.put_stream(lambda: [data[:1000], data[1000:]], lambda: "x") is True

    assert store.objects == {"p/x": data}
    assert store.requests.count(Request("PUT", "p/x")) == 4


def test_what_is_there_is_not_sent_again(storage: Storage, store: FakeS3) -> None:
    """D02: the second export sends only what is missing."""
    store.objects["p/x"] = b"12"

    assert storage.put_stream(lambda: [b"12"], lambda: "x") is False

    assert [request.method for request in store.requests] == ["HEAD"]


def test_a_body_cut_short_goes_on_where_it_broke(storage: Storage, store: FakeS3) -> None:
    data = random.Random(4).randbytes(1 << 20)
    store.objects["p/x"] = data
    store.settings.troubles = [Trouble("GET", "truncate", times=2)]
    found = bytearray()
    buffer = memoryview(bytearray(100_000))

    with storage.open_read("x") as reader:
        while count := reader.readinto(buffer):
            found += buffer[:count]

    assert found == data
    assert store.requests == [Request("GET", "p/x")] * 3


def test_a_body_that_stays_short_is_an_error(storage: Storage, store: FakeS3) -> None:
    """D03: never an end of the object."""
    store.objects["p/x"] = bytes(1000)
    store.settings.troubles = [Trouble("GET", "truncate", times=None)]
    buffer = memoryview(bytearray(2000))

    with storage.open_read("x") as reader, pytest.raises(ShortReadError, match="p/x"):
        reader.readinto(buffer)
    with pytest.raises(ShortReadError, match="p/x"):
        storage.read_into("x", buffer, 0)
    with pytest.raises(ShortReadError, match="p/x"):
        storage.get("x", max_bytes=1000)


@pytest.mark.parametrize(
    "ask",
    [
        lambda storage: list(storage.list("refs/")),
        lambda storage: storage.is_empty(),
        lambda storage: storage.now(),
        lambda storage: storage.sweep(),
        lambda storage: storage.head("x"),
        lambda storage: storage.get("x", max_bytes=100),
        lambda storage: storage.put("x", b"new"),
        lambda storage: storage.put_if_absent("y", b"new"),
        lambda storage: storage.put_if_match("x", b"new", etag(b"old")),
        lambda storage: storage.put_known("y", lambda: [b"new"], nbytes=3, sha256=sha256(b"new").hexdigest()),
    ],
)
def test_a_login_page_is_no_answer(storage: Storage, store: FakeS3, ask: Callable[[Storage], object]) -> None:
    """It comes with status 200, from a proxy: no empty listing, and no write that was done."""
    store.objects["p/x"] = b"old"
    store.settings.troubles = [Trouble(method, "login", times=None) for method in ("GET", "PUT", "HEAD")]

    with pytest.raises(StorageError, match="is a proxy in between"):
        ask(storage)


@pytest.mark.parametrize(("status", "match"), [(403, "access denied.*s3:PutObject"), (507, "no room left")])
def test_refused_writes_are_reported_at_once(storage: Storage, store: FakeS3, status: int, match: str) -> None:
    """D14: not tried for ever, and not swallowed."""
    store.settings.troubles = [Trouble("PUT", status, times=None)]

    with pytest.raises(RefusedError, match=match):
        storage.put_if_absent("x", b"1")
    with pytest.raises(RefusedError, match="s3://bucket/p/x"):
        storage.put_stream(lambda: [b"1"], lambda: "x")

    assert store.requests.count(Request("PUT", "p/x")) <= 4


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("status", [500, 503])
def test_a_store_that_fails_for_a_while(storage: Storage, store: FakeS3, status: int) -> None:
    store.settings.troubles = [Trouble("PUT", status, times=3), Trouble("GET", status, times=3)]

    assert storage.put_if_absent("x", b"1") is True
    assert storage.get("x", max_bytes=1) == b"1"


@pytest.mark.usefixtures("quick")
def test_a_store_that_keeps_failing(storage: Storage, store: FakeS3) -> None:
    store.settings.troubles = [Trouble("PUT", 503, times=None)]

    with pytest.raises(StorageError, match=r"busy.*503 SlowDown"):
        storage.put_if_absent("x", b"1")


@pytest.mark.usefixtures("quick")
def test_a_store_that_is_down_and_comes_back() -> None:
    """B12: a clear message in bounded time; nothing needs a restart afterwards."""
    with fake_s3() as state, opened(state.endpoint) as storage:
        storage.put("x", b"1")
        port = int(state.endpoint.rpartition(":")[2])
    with opened(f"http://127.0.0.1:{port}") as storage:
        started = time.monotonic()
        with pytest.raises(StorageError, match=f"127.0.0.1:{port} can't be reached; check endpoint"):
            storage.get("x", max_bytes=1)
        assert time.monotonic() - started < 5
        with fake_s3(port=port) as state:
            state.objects["p/x"] = b"2"

            assert storage.get("x", max_bytes=1) == b"2"


@pytest.mark.usefixtures("quick")
def test_silence_is_bounded(store: FakeS3) -> None:
    """B12"""
    store.settings.troubles = [Trouble("GET", "silence", times=None)]
    with opened(store.endpoint, RetryPolicy(tries=1), read_timeout_s=0.05) as storage:
        started = time.monotonic()

        with pytest.raises(StorageError, match="did not answer in time"):
            storage.get("x", max_bytes=1)

        assert time.monotonic() - started < 5


def test_what_the_producer_raises_is_not_the_stores_fault(storage: Storage, store: FakeS3) -> None:
    calls = 0

    def pieces() -> Iterator[bytes]:
        nonlocal calls
        calls += 1
        yield b"1"
        if calls > 1:
            raise CorruptChunkError("it changed under our hands")

    with pytest.raises(CorruptChunkError, match="under our hands"):
        storage.put_stream(pieces, lambda: "x")
    for nbytes in (1, 3):
        with pytest.raises(CorruptChunkError, match=f"expected {nbytes} bytes"):
            storage.put_known("x", lambda: [b"12"], nbytes=nbytes, sha256="00" * 32)
    assert store.objects == {}


@pytest.mark.usefixtures("quick")
def test_twenty_readers_of_a_store_with_a_limit() -> None:
    """D15: jitter lets all through, and no HEAD is spent on an object that is read whole."""
    patient = RetryPolicy(tries=40, first_pause_s=0.05, longest_pause_s=0.4)
    with fake_s3(rate=150) as state, opened(state.endpoint, patient) as storage:
        state.objects = {f"p/{i}": bytes([i]) * 1000 for i in range(10)}
        good: list[int] = []

        def pull() -> None:
            buffer = memoryview(bytearray(1000))
            for i in range(10):
                with storage.open_read(str(i)) as reader:
                    if reader.readinto(buffer) == 1000 and buffer == bytes([i]) * 1000:
                        good.append(i)

        threads = [threading.Thread(target=pull) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(good) == 200
        assert state.refused > 0
        assert {request.method for request in state.requests} == {"GET"}


class TestListing:
    """By pages, however a store orders them."""

    def test_asks_for_a_page_when_it_is_read(self, storage: Storage, store: FakeS3) -> None:
        """Whoever wants only the start of a long listing doesn't wait, or pay, for the rest."""
        store.settings.keeps_order, store.settings.page_keys = True, 3
        store.objects = {f"p/shards/{i}": b"" for i in range(10)}

        assert [info.name for info in islice(storage.list("shards/"), 6)] == [f"shards/{i}" for i in range(6)]

        assert store.requests == [Request("GET", "")] * 2

    def test_is_sorted_where_the_store_has_no_order(self, storage: Storage, store: FakeS3) -> None:
        store.settings.page_keys = 3
        store.objects = {f"p/{i}": b"" for i in range(10)}

        assert [info.name for info in storage.list("")] == [str(i) for i in range(10)]

    def test_loses_nothing_where_the_order_ends(self, storage: Storage, store: FakeS3) -> None:
        """What a prune doesn't see of the manifests, it would take for unneeded."""
        store.settings.page_keys = 3
        store.objects = {f"p/{name}": b"" for name in reversed("bcdfeag")}

        assert sorted(info.name for info in storage.list("")) == list("abcdefg")


def test_a_deletion_is_checked_right_before_it_is_sent(storage: Storage, store: FakeS3) -> None:
    """Not before the HEAD, which may take its time."""
    store.objects["p/x"] = b"1"
    before: list[list[str]] = []

    storage.delete_while("x", lambda: before.append([request.method for request in store.requests]))

    assert before == [["HEAD"]]
    assert [request.method for request in store.requests] == ["HEAD", "DELETE"]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_bodies_are_read_by_few_connections(
    store: FakeS3, storage: Storage, monkeypatch: pytest.MonkeyPatch, is_hidden: bool
) -> None:
    """Read to the end, a connection serves the next request; also with an SDK that hides its answer below its body."""
    if is_hidden:
        monkeypatch.setattr(s3_body, "_uncopied", lambda body: None)
    data = random.Random(1).randbytes(300_000)
    storage.put("a", data)
    before = store.connections

    for _ in range(5):
        assert storage.get("a", max_bytes=len(data)) == data
        with storage.open_read("a", offset=1000, nbytes=5000) as reader:
            buffer = memoryview(bytearray(6000))
            assert reader.readinto(buffer) == 5000
            assert buffer[:5000] == data[1000:6000]

    assert store.connections == before
    with storage.open_read("a") as reader:
        reader.readinto(memoryview(bytearray(10)))
    assert storage.get("a", max_bytes=len(data)) == data
    assert store.connections == before + 1  # what was left unread goes with its connection


def test_the_sdks_answer_is_where_it_was(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """If botocore or urllib3 move it, reading goes on, with a copy more: this says so."""
    found: list[object] = []
    uncopied = s3_body._uncopied

    def seen(body: object) -> http.client.HTTPResponse | None:
        found.append(uncopied(body))
        return uncopied(body)

    monkeypatch.setattr(s3_body, "_uncopied", seen)
    storage.put("a", b"x" * 100)

    storage.get("a", max_bytes=100)

    assert [type(response) for response in found] == [http.client.HTTPResponse]


def test_a_login_page_prunes_nothing(storage: Storage, store: FakeS3, cache: Path, ns: Namespace) -> None:
    """Invariant 5: a listing of refs or manifests that is no listing would mean that nobody needs anything."""
    export_snapshot(cache, storage, tag="prod")
    before = dict(store.objects)
    store.settings.troubles = [Trouble("GET", "login", key="", times=None)]

    with pytest.raises(StorageError, match="is a proxy in between"):
        prune_repository(storage, grace_s=0, untagged_s=0)

    assert {name: data for name, data in store.objects.items() if "/leases/" not in name} == before
