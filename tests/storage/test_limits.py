"""Limits: so many bytes a second for shards, whatever the threads do, and no wait for small requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvsnap.errors import ConfigError
from kvsnap.storage import LimitStorage, LocalStorage, MemoryStorage, Storage, open_storage, parse_s3_url
from kvsnap.storage.limits import Throttle
from kvsnap.testing import StorageSuite

MIB = 1 << 20


class Time:
    """A clock that only sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def throttle(self, bytes_per_s: int) -> Throttle:
        return Throttle(bytes_per_s, clock=lambda: self.now, sleep=self.sleep)


class TestLimitStorage(StorageSuite):
    """A limit that nothing reaches changes nothing, but for the size of the parts."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LimitStorage(LocalStorage(tmp_path / "root"), 1 << 40)


class TestSmallParts(StorageSuite):
    """Every transfer goes in many small parts."""

    @pytest.fixture
    def storage(self) -> Storage:
        return LimitStorage(MemoryStorage(), 8 * 4096, sleep=lambda seconds: None)


def test_what_was_let_through_is_paid_for_before_more_goes() -> None:
    time = Time()
    throttle = time.throttle(MIB)

    throttle.take(2 * MIB)
    assert time.now == 0
    throttle.take(MIB)
    assert time.now == 2
    time.now = 10
    throttle.take(MIB)
    assert time.now == 10  # idle seconds are not saved up, and not charged either
    throttle.take(1)
    assert time.now == 11


def test_threads_share_one_rate() -> None:
    slept: list[float] = []
    throttle = Throttle(MIB, clock=lambda: 0.0, sleep=slept.append)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(throttle.take, [MIB] * 8))

    assert sorted(slept) == [1, 2, 3, 4, 5, 6, 7]


def test_shards_wait_and_small_requests_do_not() -> None:
    slept: list[float] = []
    storage = LimitStorage(MemoryStorage(), MIB, sleep=slept.append)

    storage.put("lease", b"x" * MIB)
    storage.put_if_absent("manifest", b"x" * MIB)
    storage.get("manifest", max_bytes=MIB)
    storage.head("manifest")
    assert slept == []

    storage.put_stream(lambda: [b"x" * MIB] * 2, lambda: "shard")
    assert len(slept) == 15  # sixteen parts of an eighth of a second, of which the first goes at once
    slept.clear()
    with storage.open_read("shard") as reader:
        buffer = memoryview(bytearray(2 * MIB))
        sizes = []
        while found := reader.readinto(buffer):
            sizes.append(found)
    assert sizes == [MIB // 8] * 16
    assert len(slept) == 15


def test_a_wait_ends_where_sleep_raises() -> None:
    class Stopped(Exception):
        pass

    def stop(seconds: float) -> None:
        raise Stopped

    storage = LimitStorage(MemoryStorage(), MIB, sleep=stop)

    with pytest.raises(Stopped):
        storage.put_stream(lambda: [b"x" * MIB] * 2, lambda: "shard")
    with pytest.raises(Exception, match="shard"):
        storage.head("shard")


def test_the_url_sets_it() -> None:
    _, options = parse_s3_url("s3://bucket/models?max_rate=50MiB")
    assert options.max_rate == 50 * MIB
    assert parse_s3_url("s3://bucket/models")[1].max_rate is None

    for wrong in ("fast", "10%", "-1"):
        with pytest.raises(ConfigError, match="size"):
            parse_s3_url(f"s3://bucket/models?max_rate={wrong}")
    with pytest.raises(ConfigError, match="at least 65536"):
        parse_s3_url("s3://bucket/models?max_rate=10k")


def test_a_bucket_with_a_limit_is_limited() -> None:
    pytest.importorskip("boto3")
    limited = open_storage("s3://bucket/models?max_rate=1MiB&region=us-east-1")
    free = open_storage("s3://bucket/models?region=us-east-1")

    assert isinstance(limited.inner, LimitStorage)  # type: ignore[attr-defined]
    assert not isinstance(free.inner, LimitStorage)  # type: ignore[attr-defined]
