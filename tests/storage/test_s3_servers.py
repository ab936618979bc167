"""Second and third opinions: real servers that speak S3, where they are installed (see `s3_servers`).

KVSNAP_TEST_S3_URL names a bucket with the AWS environment's credentials.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvsnap.storage import Storage, open_storage, probe_storage
from kvsnap.testing import StorageSuite
from tests.storage.s3_servers import make_buckets, ministack_server, rclone_server

pytest.importorskip("boto3")
pytestmark = pytest.mark.s3


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with rclone_server(tmp_path_factory.mktemp("rclone")) as endpoint:
        make_buckets(endpoint, "bucket")
        yield endpoint


@pytest.fixture(scope="module")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with ministack_server(tmp_path_factory.mktemp("ministack")) as endpoint:
        make_buckets(endpoint, "bucket")
        yield endpoint


@contextmanager
def prefix_at(endpoint: str) -> Iterator[Storage]:
    storage = open_storage(f"s3://bucket/{secrets.token_hex(4)}", {"endpoint": endpoint})
    yield storage
    storage.close()


class TestRclone(StorageSuite):
    """A single writer, as the probe says."""

    test_one_of_many_racing_writers_wins = None  # type: ignore[assignment]
    test_one_of_many_racing_swaps_wins = None  # type: ignore[assignment]

    @pytest.fixture
    def storage(self, rclone: str) -> Iterator[Storage]:
        with prefix_at(rclone) as storage:
            storage.use(probe_storage(storage))
            yield storage


def test_rclone_ignores_conditions(rclone: str) -> None:
    with prefix_at(rclone) as storage:
        found = probe_storage(storage)

        assert (found.conditional_create, found.conditional_replace, found.ranges) == (False, False, True)
        assert storage.is_empty()


class TestMinistack(StorageSuite):
    @pytest.fixture
    def storage(self, ministack: str) -> Iterator[Storage]:
        with prefix_at(ministack) as storage:
            yield storage


def test_ministack_keeps_conditions(ministack: str) -> None:
    with prefix_at(ministack) as storage:
        found = probe_storage(storage)

        assert (found.conditional_create, found.conditional_replace, found.ranges) == (True, True, True)
        assert storage.is_empty()


class TestBucket(StorageSuite):
    """Whatever KVSNAP_TEST_S3_URL names."""

    @pytest.fixture(autouse=True)
    def aws_environment(self) -> None:
        """The user's own."""

    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        url = os.environ.get("KVSNAP_TEST_S3_URL")
        if url is None:
            pytest.skip("KVSNAP_TEST_S3_URL names no bucket")
        base, question, query = url.partition("?")
        storage = open_storage(f"{base.rstrip('/')}/{secrets.token_hex(8)}{question}{query}")
        yield storage
        for info in storage.list(""):
            storage.delete(info.name)
        storage.close()
