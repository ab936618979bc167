"""S3 storage against moto's server: the suite, parts, encryption, and errors that say what to do."""

from __future__ import annotations

import base64
import hashlib
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.errors import ConfigError, CorruptChunkError, NotFoundError
from kvsnap.namespace import Namespace
from kvsnap.storage import (
    RefusedError,
    RetryStorage,
    S3Options,
    S3Storage,
    Storage,
    open_storage,
    parse_s3_url,
    probe_storage,
)
from kvsnap.testing import StorageSuite
from tests.repository_fakes import race

pytest.importorskip("boto3")

MIB = 1 << 20
SHARD = "shards/00/" + "0" * 64 + ".safetensors"
_prefixes = (f"p{i}/x" for i in itertools.count())


@pytest.fixture
def s3(endpoint: str, bucket: str) -> Iterator[S3Storage]:
    """An empty prefix of its own."""
    location, options = parse_s3_url(
        f"s3://{bucket}/{next(_prefixes)}",
        S3Options(endpoint=endpoint, single_put_bytes=11 * MIB, part_bytes=5 * MIB),
    )
    storage = S3Storage(location, options)
    yield storage
    storage.close()


def raw(storage: S3Storage, operation: str, name: str, **arguments: Any) -> Any:
    """Ask the store itself."""
    return getattr(storage._s3(), operation)(Bucket="kvsnap-test", Key=storage._key(name), **arguments)


class TestS3Storage(StorageSuite):
    @pytest.fixture
    def storage(self, s3: S3Storage) -> Storage:
        return s3


class TestOpenedS3Storage(StorageSuite):
    """As users get it: by URL, behind retries."""

    @pytest.fixture
    def storage(self, endpoint: str, bucket: str) -> Iterator[Storage]:
        storage = open_storage(f"s3://{bucket}/{next(_prefixes)}?endpoint={endpoint}&region=us-east-1")
        yield storage
        storage.close()


def test_an_object_is_stored_with_its_sha256(s3: S3Storage) -> None:
    """Anybody can check it without reading it."""
    s3.put_stream(lambda: [b"one", b"two"], lambda: "x")

    found = raw(s3, "head_object", "x", ChecksumMode="ENABLED")

    assert base64.b64decode(found["ChecksumSHA256"]) == hashlib.sha256(b"onetwo").digest()


def test_large_objects_go_in_parts(s3: S3Storage) -> None:
    data = random.Random(2).randbytes(12 * MIB)
    sha256 = hashlib.sha256(data).hexdigest()

    def put() -> bool:
        pieces = [data[i : i + 3 * MIB] for i in range(0, len(data), 3 * MIB)]
        return s3.put_known("x", lambda: pieces, nbytes=len(data), sha256=sha256)

    assert put() is True
    assert put() is False
    assert raw(s3, "head_object", "x")["ETag"].endswith('-3"')
    assert hashlib.sha256(s3.get("x", max_bytes=len(data))).hexdigest() == sha256


def test_parts_of_a_failed_upload_are_removed(s3: S3Storage) -> None:
    """D02"""

    def broken() -> Iterator[bytes]:
        yield bytes(6 * MIB)
        raise NotFoundError("the shard has vanished")

    with pytest.raises(NotFoundError, match="vanished"):
        s3.put_known("x", broken, nbytes=12 * MIB, sha256="00" * 32)

    assert "Uploads" not in s3._s3().list_multipart_uploads(Bucket="kvsnap-test")
    assert s3.is_empty()


def test_sweep_aborts_uploads_that_are_a_day_old(s3: S3Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """D02: a killed exporter aborts nothing; and a fresh upload may be somebody's."""
    # moto gives all uploads one date, of 2010
    raw(s3, "create_multipart_upload", SHARD)
    started = s3._s3().list_multipart_uploads(Bucket="kvsnap-test")["Uploads"][0]["Initiated"].timestamp()
    with monkeypatch.context() as patch:
        patch.setattr(s3, "now", lambda: started + 3600)
        assert s3.sweep() == 0

    assert s3.sweep(dry_run=True) == 1
    assert s3.sweep() == 1
    assert s3.sweep() == 0


def test_sweep_leaves_uploads_of_others(s3: S3Storage) -> None:
    """They may share the bucket, and without a prefix everything in it is below ours."""
    names = ("photos/a.jpg", "x", "shards/notes.txt", f"old/{SHARD}", f"{SHARD}/x")
    uploads = [raw(s3, "create_multipart_upload", name)["UploadId"] for name in names]

    assert s3.sweep(dry_run=True) == 0
    assert s3.sweep() == 0

    for name, upload in zip(names, uploads, strict=True):
        raw(s3, "abort_multipart_upload", name, UploadId=upload)


@pytest.mark.parametrize(("query", "found"), [("sse=AES256", "AES256"), ("sse=aws:kms&kms_key=k1", "aws:kms")])
def test_every_write_asks_for_encryption(s3: S3Storage, endpoint: str, bucket: str, query: str, found: str) -> None:
    location, options = parse_s3_url(
        f"s3://{bucket}/{next(_prefixes)}?endpoint={endpoint}&{query}",
        {"single_put_bytes": 5 * MIB, "part_bytes": 5 * MIB},
    )
    storage = S3Storage(location, options)
    data = bytes(6 * MIB)

    storage.put("put", b"1")
    storage.put_if_absent("absent", b"1")
    storage.put_if_match("put", b"2", storage.get_versioned("put", max_bytes=9).version)
    storage.put_known("parts", lambda: [data], nbytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    storage.put_known("known", lambda: [b"1"], nbytes=1, sha256=hashlib.sha256(b"1").hexdigest())
    s3.put("copied", b"1")
    storage.copy_from(s3, "copied", nbytes=1)

    for name in ("put", "absent", "parts", "known", "copied"):
        assert raw(storage, "head_object", name)["ServerSideEncryption"] == found
    storage.close()


def test_copies_inside_the_store(s3: S3Storage, endpoint: str, bucket: str) -> None:
    location, options = parse_s3_url(f"s3://{bucket}/{next(_prefixes)}", {"endpoint": endpoint})
    other = RetryStorage(S3Storage(location, options))
    s3.put_if_absent("x", b"123")

    assert other.copy_from(RetryStorage(s3), "x", nbytes=3) is True
    assert other.copy_from(s3, "x", nbytes=3) is False
    assert other.get("x", max_bytes=3) == b"123"
    other.close()


def test_copies_nothing_of_another_size(s3: S3Storage, endpoint: str, bucket: str) -> None:
    """A shard that is cut short must not get the name of the whole one; and it is the source that is to blame."""
    location, options = parse_s3_url(f"s3://{bucket}/{next(_prefixes)}", {"endpoint": endpoint})
    other = S3Storage(location, options)
    s3.put_if_absent("x", b"123")

    with pytest.raises(CorruptChunkError, match=rf"{s3.url}/x is damaged: expected 4 bytes, found 3"):
        other.copy_from(s3, "x", nbytes=4)
    with pytest.raises(NotFoundError, match=rf"{s3.url}/y"):
        other.copy_from(s3, "y", nbytes=4)

    assert other.is_empty()
    other.close()


def test_probe(s3: S3Storage) -> None:
    """moto keeps conditions; it doesn't compare checksums."""
    found = probe_storage(s3)

    assert (found.conditional_create, found.conditional_replace, found.ranges) == (True, True, True)
    assert s3.is_empty()


def test_a_missing_bucket_is_no_missing_object(endpoint: str) -> None:
    storage = open_storage("s3://no-such-bucket/x", {"endpoint": endpoint})

    for act in (
        lambda: storage.head("a"),
        lambda: storage.get("a", max_bytes=1),
        lambda: storage.put_if_absent("a", b""),
        lambda: storage.put_stream(lambda: [b""], lambda: "a"),
        lambda: list(storage.list("")),
        storage.is_empty,
        storage.now,
    ):
        with pytest.raises(RefusedError, match="bucket no-such-bucket does not exist at http"):
            act()
    storage.close()


def test_no_credentials(endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    storage = open_storage(f"s3://{bucket}/x", {"endpoint": endpoint})

    with pytest.raises(RefusedError, match="AWS_ACCESS_KEY_ID"):
        storage.head("a")
    storage.close()


def test_endpoint_from_the_environment(endpoint: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    storage = open_storage(f"s3://{bucket}/{next(_prefixes)}")

    assert storage.is_empty()
    storage.close()


@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_region_from_the_environment(bucket: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The URL wins over it."""
    monkeypatch.setenv(name, "eu-central-1")
    found = []

    for url in (f"s3://{bucket}/x", f"s3://{bucket}/x?region=eu-west-3"):
        storage = S3Storage(*parse_s3_url(url))
        found.append(storage._s3().meta.region_name)
        storage.close()

    assert found == ["eu-central-1", "eu-west-3"]


def test_an_unknown_profile_is_a_wrong_configuration(bucket: str) -> None:
    with pytest.raises(ConfigError, match="nobody"):
        open_storage(f"s3://{bucket}/x?profile=nobody").is_empty()


def test_without_boto3_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an extra; importing `kvsnap.storage` must not need it."""
    monkeypatch.setitem(sys.modules, "boto3", None)

    with pytest.raises(ConfigError, match=r"pip install kvsnap\[s3\]"):
        open_storage("s3://bucket/x").is_empty()


def test_two_exporters_and_a_prune(endpoint: str, bucket: str, cache: Path, ns: Namespace) -> None:
    """Invariant 5, D09: by what the store does with conditions, since nobody holds a lock there."""
    race(open_storage(f"s3://{bucket}/{next(_prefixes)}?endpoint={endpoint}"), cache, ns)
