"""Snapshots in an S3 that has a bad day: many replicas at once, a store that is down, uploads that break off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvsnap.errors import StorageError
from kvsnap.namespace import Namespace
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.snapshot_sync import SnapshotSync
from kvsnap.storage import RetryPolicy, RetryStorage, S3Options, Storage, open_storage
from tests.disk_fakes import make_namespace
from tests.snapshot_fakes import break_reads, chain, chunks_at, filled_cache, prompt, store
from tests.storage.fake_s3 import BUCKET, FakeS3, Request, Trouble, fake_s3

pytest.importorskip("boto3")

REPLICAS = 20
RATE = 50.0
QUICK = RetryPolicy(tries=2, first_pause_s=0.001, longest_pause_s=0.01)


@pytest.fixture(autouse=True)
def no_pause_of_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second try comes up to a second later."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.0)


@pytest.fixture
def ns() -> Namespace:
    return make_namespace()


@pytest.fixture
def leader(tmp_path: Path, ns: Namespace) -> Path:
    """Four shards."""
    filled_cache(tmp_path / "leader")
    store(tmp_path / "leader", ns, *(chain(ns, prompt(seed, 128)) for seed in (7, 8)))
    return tmp_path / "leader"


@pytest.fixture
def state() -> Iterator[FakeS3]:
    with fake_s3() as state:
        yield state


def opened(state: FakeS3, retry: RetryPolicy | None = None) -> Storage:
    options = S3Options(endpoint=state.endpoint) if retry is None else S3Options(endpoint=state.endpoint, retry=retry)
    return open_storage(f"s3://{BUCKET}/p", options)


def test_twenty_replicas_import_at_once(leader: Path, ns: Namespace, state: FakeS3, tmp_path: Path) -> None:
    """D15: 503 above 50 requests a second, the default patience: all succeed, and no shard costs a HEAD."""
    with_retries = opened(state)
    export_snapshot(leader, with_retries, tag="prod")
    with_retries.close()
    state.requests.clear()
    state.settings.rate = RATE

    def replicate(number: int) -> int:
        storage = opened(state)
        try:
            return import_snapshot(storage, "prod", tmp_path / f"replica-{number}").num_chunks
        finally:
            storage.close()

    with ThreadPoolExecutor(REPLICAS) as pool:
        chunks = list(pool.map(replicate, range(REPLICAS)))

    expected = chunks_at(leader, ns)
    assert chunks == [len(expected)] * REPLICAS
    assert chunks_at(tmp_path / "replica-7", ns) == expected
    assert state.refused > 0
    assert Counter(r.method for r in state.requests if "/shards/" in r.key).keys() == {"GET"}


def test_a_store_that_is_down_is_said_at_once(leader: Path, tmp_path: Path) -> None:
    """An import fails, a sync says so and goes on when it is back; neither hangs, neither touches the directory."""
    with fake_s3() as state:
        storage = opened(state, QUICK)
        export_snapshot(leader, storage, tag="prod")
        state.settings.troubles = [Trouble("*", 503, times=None)]
        state.settings.troubles = [Trouble(method, 503, times=None) for method in ("GET", "HEAD")]
        sync = SnapshotSync(storage, "prod", tmp_path / "replica")

        with pytest.raises(StorageError):
            import_snapshot(storage, "prod", tmp_path / "replica")
        down = sync.round()

        assert (down.outcome, down.is_refused) == ("failed", False)
        assert not (tmp_path / "replica").exists()
        state.settings.troubles = []
        assert sync.round().outcome == "synced"
        sync.close()


def test_an_export_that_breaks_off_is_finished_by_the_next(leader: Path, ns: Namespace, state: FakeS3) -> None:
    """D02: at a shard, then at the manifest; nothing is listed, and nothing is sent twice."""
    storage = opened(state, QUICK)
    broken = [
        Trouble("PUT", "drop", "p/shards/*", times=None),
        Trouble("PUT", "drop", "p/manifests/*", times=None),
    ]
    sent: Counter[str] = Counter()
    for trouble in broken:
        state.settings.troubles = [trouble]
        with pytest.raises(StorageError):
            export_snapshot(leader, storage, tag="prod")
        assert not [name for name in state.objects if "/manifests/" in name or "/refs/" in name]
    state.settings.troubles = []
    state.requests.clear()

    report = export_snapshot(leader, storage, tag="prod")

    sent.update(r.key for r in state.requests if r.method == "PUT" and "/shards/" in r.key)
    assert report.sent_shards == 0
    assert not sent
    assert report.num_shards == 4
    storage.close()


def test_a_disk_that_fails_is_not_the_stores_fault(
    leader: Path, ns: Namespace, state: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashed well, unreadable when it is sent: left out at once, not tried again as if the store had failed."""
    added = store(leader, ns, chain(ns, prompt(9, 128)))[0]
    break_reads(monkeypatch, added.path, good_passes=1)
    storage = opened(state)
    assert isinstance(storage, RetryStorage)

    report = export_snapshot(leader, storage, tag="prod")

    assert (report.num_shards, storage.retries) == (4, 0)
    assert len(report.damaged) == 1
    assert f"shard {added.path} can't be read: " in report.damaged[0]
    assert import_snapshot(storage, "prod", tmp_path / "other").num_chunks == report.num_chunks == 11
    storage.close()


def test_an_import_reads_no_more_of_the_listing_than_it_looks_at(
    leader: Path, state: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened(state)
    export_snapshot(leader, storage, tag="prod")
    state.settings.keeps_order, state.settings.page_keys = True, 1
    monkeypatch.setattr("kvsnap.snapshot_import.MAX_LISTED", 2)
    state.requests.clear()

    report = import_snapshot(storage, "prod", tmp_path / "other")

    assert report.imported_shards == report.total_shards == 4
    assert state.requests.count(Request("GET", "")) == 2
    assert "HEAD" not in {request.method for request in state.requests}
    storage.close()
