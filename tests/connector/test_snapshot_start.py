"""A configured `snapshot` that can't be used: what the configuration asks for happens, with one line that says why."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvsnap.config import Config
from kvsnap.errors import ConfigError, StorageError
from kvsnap.namespace import Namespace
from kvsnap.refs import remove
from kvsnap.remote import RemoteSnapshot
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import RefusedError
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.dram import DramRegion
from kvsnap_connector.scheduler import SchedulerHalf
from kvsnap_connector.snapshot import import_into, open_remote
from tests.disk_fakes import make_namespace
from tests.snapshot_fakes import filled_cache, flip
from tests.storage.fake_s3 import BUCKET
from tests.waiting import wait_for

CHUNKS = 7  # of `filled_cache`


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    filled_cache(tmp_path / "leader")
    export_snapshot(tmp_path / "leader", str(tmp_path / "repo"), tag="prod")
    return tmp_path / "repo"


@contextmanager
def started(folder: Path, ns: Namespace, snapshot: str, **options: object) -> Iterator[SchedulerHalf]:
    """A scheduler half with one worker, as it is once the engine is ready."""
    (folder / "shm").mkdir(exist_ok=True)
    settings = {"cache_dir": str(folder / "cache"), "dram": "4MiB", "dram_dir": str(folder / "shm"), "disk": "64MiB"}
    config = Config.parse({**settings, "snapshot": snapshot, **options})
    half = SchedulerHalf(namespace=ns, config=config, engine_id="test", world_size=1)
    assert half.tier is not None
    region = DramRegion.attach(half.tier.path, half.tier.nonce, rank=0, slice_index=0)
    try:
        half.start({0: None})
        yield half
    finally:
        region.close()
        half.shutdown()


def chunks(half: SchedulerHalf) -> int:
    found: int = half.cache.status()["disk"]["chunks"]
    return found


def no_ref(repo: Path) -> str:
    remove(str(repo), "prod")
    return f"{repo}@prod"


def no_repository(repo: Path) -> str:
    return f"{repo}-of-somebody-else@prod"


def no_manifest(repo: Path) -> str:
    next(repo.glob("manifests/*.json")).unlink()
    return f"{repo}@prod"


def half_a_snapshot(repo: Path) -> str:
    max(repo.glob("shards/*/*"), key=lambda path: path.stat().st_size).unlink()
    return f"{repo}@prod"


def flipped_byte(repo: Path) -> str:
    flip(max(repo.glob("shards/*/*"), key=lambda path: path.stat().st_size), -4097)
    return f"{repo}@prod"


def no_catalog(repo: Path) -> str:
    next(repo.glob("catalogs/*")).unlink()
    return f"{repo}@prod"


def dead_s3(repo: Path) -> str:
    pytest.importorskip("boto3")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"s3://{BUCKET}/p?endpoint=http://127.0.0.1:{port}&region=us-east-1@prod"


TROUBLES: dict[Callable[[Path], str], str] = {
    no_ref: "no ref",
    no_repository: "there is no kvsnap repository",
    no_manifest: "is missing",
    half_a_snapshot: "is missing",
    flipped_byte: "damaged",
    no_catalog: "is missing",
    dead_s3: "127.0.0.1",
}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that is down is asked as often as ever, without the pauses."""
    monkeypatch.setattr("kvsnap.storage.retry.random.Random.uniform", lambda self, low, high: 0.0)
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.0)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.mark.parametrize("preload", ["blocking", "background"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_starts_cold_and_says_why(
    trouble: Callable[[Path], str], preload: str, repo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariants 2 and 9: `snapshot_required` is false."""
    url = trouble(repo)
    caplog.set_level(logging.INFO)

    with started(tmp_path, make_namespace(), url, preload=preload) as half:
        assert half.off_reason is None
        if preload == "blocking" or trouble not in (half_a_snapshot, flipped_byte):
            (line,) = [r.getMessage() for r in caplog.records if "can't be used" in r.getMessage()]
            assert TROUBLES[trouble] in line
            assert "\n" not in line
        assert chunks(half) < CHUNKS


@pytest.mark.parametrize("trouble", TROUBLES)
def test_refuses_to_start_where_it_is_required(trouble: Callable[[Path], str], repo: Path, tmp_path: Path) -> None:
    url = trouble(repo)

    with (
        pytest.raises(ConfigError, match="snapshot_required") as refused,
        started(tmp_path, make_namespace(), url, snapshot_required=True),
    ):
        pass

    assert TROUBLES[trouble] in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("is_required", [False, True])
def test_another_identity(repo: Path, tmp_path: Path, is_required: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A01: refused by field, and nothing of it is here."""
    ns = make_namespace(tag="another model")

    if is_required:
        with (
            pytest.raises(ConfigError, match="identity_tag"),
            started(tmp_path, ns, f"{repo}@prod", snapshot_required=True),
        ):
            pass
    else:
        with started(tmp_path, ns, f"{repo}@prod") as half:
            assert chunks(half) == 0
        assert any("identity_tag" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert not list((tmp_path / "cache").glob("*/shards/*"))


def test_a_budget_that_is_too_small_means_a_part(repo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Invariant 7: one chunk is read ahead, all others stay on disk; ready all the same."""
    caplog.set_level(logging.INFO)
    ns = make_namespace()
    one = ns.geometry.chunk_bytes(ns.chunk_tokens)

    with started(tmp_path, ns, f"{repo}@prod", preload_bytes=one) as half:
        status = half.cache.status()
        assert (status["dram"]["chunks"], status["disk"]["chunks"]) == (1, CHUNKS)


@pytest.mark.parametrize("is_required", [False, True])
def test_an_import_that_takes_too_long_goes_on_beside_the_engine(
    repo: Path, tmp_path: Path, is_required: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 7: `preload_seconds` bounds the import too. Until it is through, chunks are fetched one by one."""
    caplog.set_level(logging.INFO)
    gate = threading.Event()

    def slow(*args: Any) -> str:
        assert gate.wait(30)
        return import_into(*args)

    monkeypatch.setattr("kvsnap_connector.warm_start.import_into", slow)
    options = {"snapshot_required": is_required, "preload_seconds": 0.1}

    with started(tmp_path, make_namespace(), f"{repo}@prod", **options) as half:
        assert chunks(half) == 0
        assert half.cache.remote is not None
        gate.set()
        wait_for(lambda: chunks(half) == CHUNKS and half.cache.remote is None)
        wait_for(lambda: half.cache.status()["dram"]["chunks"] == CHUNKS)

    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "preload_seconds (0.1 s)" in line


def test_several_engines_download_once(repo: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What another engine has imported into the directory is there."""
    import_snapshot(str(repo), "prod", tmp_path / "cache")
    caplog.set_level(logging.INFO)

    with started(tmp_path, make_namespace(), f"{repo}@prod", snapshot_required=True) as half:
        assert chunks(half) == CHUNKS

    assert any("0 shards, 0 MiB imported now" in record.getMessage() for record in caplog.records)


def test_a_store_that_was_down_at_the_start_is_asked_again(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B12: with `preload: background` an engine that started cold gets its snapshot once the store is back."""
    caplog.set_level(logging.INFO)
    outages = ["first try", "second try", "third try"]

    def open_later(url: str, tier: DiskTier) -> RemoteSnapshot:
        if outages:
            raise StorageError(f"503 at the {outages.pop(0)}")
        return open_remote(url, tier)

    monkeypatch.setattr("kvsnap_connector.warm_start.open_remote", open_later)
    monkeypatch.setattr("kvsnap_connector.warm_start.RETRY_PAUSES_S", (0.0, 0.01))

    with started(tmp_path, make_namespace(), f"{repo}@prod", preload="background") as half:
        deadline = time.monotonic() + 20
        while (chunks(half) < CHUNKS or half.cache.remote is not None) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert chunks(half) == CHUNKS
        assert half.cache.remote is None
    (line,) = [r.getMessage() for r in caplog.records if "can't be used" in r.getMessage()]
    assert "first try" in line


def test_what_will_not_pass_is_not_asked_again(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def open_never(url: str, tier: DiskTier) -> RemoteSnapshot:
        asked.append(url)
        raise RefusedError("no access")

    monkeypatch.setattr("kvsnap_connector.warm_start.open_remote", open_never)
    monkeypatch.setattr("kvsnap_connector.warm_start.RETRY_PAUSES_S", (0.0,))

    with started(tmp_path, make_namespace(), f"{repo}@prod", preload="background"):
        time.sleep(0.2)

    assert len(asked) == 1
