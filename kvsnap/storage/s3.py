"""Objects in an S3 bucket, on AWS or on a store that speaks its protocol.

Plain calls of a boto3 client, no transfer manager: a write is one PUT with its SHA-256 (in
parts beyond 5 GiB), a read one GET. `If-None-Match` and `If-Match` make creation and
compare-and-swap one step. Listings show only finished objects, so an interrupted write is
nothing, but for the parts of a multipart upload, which `sweep` aborts after a day.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

from kvsnap.errors import CorruptChunkError, NotFoundError, StorageError
from kvsnap.storage.base import (
    ALL_CAPABILITIES,
    Buffer,
    Capabilities,
    ObjectInfo,
    Reader,
    RefusedError,
    Storage,
    Versioned,
    is_valid_name,
    validate_name,
)
from kvsnap.storage.retry import holds
from kvsnap.storage.s3_body import BodyReader, EmptyReader, PieceBody, regroup
from kvsnap.storage.s3_errors import code_of, is_conflict, is_no_key, no_bucket, status_of, translate, was_retried
from kvsnap.storage.s3_options import GIB, S3Location, S3Options, make_client

log = logging.getLogger(__name__)

UPLOAD_MAX_AGE_S = 86400.0
"""A multipart upload that began longer ago is taken for dead."""
MAX_PARTS = 10_000
MAX_COPY_BYTES = 5 * GIB

_IN_PARTS = re.compile(r"(?:shards/[0-9a-f]{2}|catalogs|manifests)/[0-9a-f]{64}\.[a-z]+", re.ASCII)
"""What kvsnap may have begun to upload: under an own prefix, or none, others upload too."""


class S3Storage(Storage):
    """A `Storage` in the bucket at `location`. Connects at the first request; the bucket must exist."""

    needs_name_first = True

    def __init__(self, location: S3Location, options: S3Options | None = None) -> None:
        self.location = location
        self.options = options or S3Options()
        self.url = location.url
        self._bucket = location.bucket
        self._lock = threading.Lock()
        self._client: Any = None
        self._capabilities = ALL_CAPABILITIES
        self._bucket_seen = False

    def put_if_absent(self, name: str, data: Buffer) -> bool:
        body = bytes(data)
        if not self._capabilities.conditional_create and self._exists(name):
            return False
        return self._create(name, lambda: self._put(name, body, _sha256(body), self._if_absent()), body)

    def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
        digest, nbytes = hashlib.sha256(), 0
        for piece in pieces():
            digest.update(piece)
            nbytes += len(memoryview(piece).cast("B"))
        return self.put_known(name(), pieces, nbytes=nbytes, sha256=digest.hexdigest())

    def put_known(self, name: str, pieces: Callable[[], Iterable[Buffer]], *, nbytes: int, sha256: str) -> bool:
        if self._exists(name):
            return False
        if nbytes > self.options.single_put_bytes:
            return self._create(name, lambda: self._put_parts(name, pieces, nbytes), None)
        checksum = base64.b64encode(bytes.fromhex(sha256)).decode()
        body = PieceBody(pieces, nbytes)
        try:
            return self._create(name, lambda: self._put(name, body, checksum, self._if_absent()), None)
        except Exception:
            if body.error is not None:  # the producer's, not the store's
                raise body.error from None
            raise
        finally:
            body.close()

    def put(self, name: str, data: Buffer) -> None:
        body = bytes(data)
        with self._edge(name):
            self._put(name, body, _sha256(body), {})

    def get(self, name: str, *, max_bytes: int) -> bytes:
        return self.get_versioned(name, max_bytes=max_bytes).data

    def get_versioned(self, name: str, *, max_bytes: int) -> Versioned:
        reader, answer = self._get(name, {})
        with closing(reader):
            if reader.left > max_bytes:
                raise CorruptChunkError(f"{self._what(name)} has {reader.left} bytes, at most {max_bytes} are expected")
            buffer = bytearray(reader.left)
            reader.readinto(memoryview(buffer))
        return Versioned(bytes(buffer), str(self._told(answer, "ETag", name)))

    def put_if_match(self, name: str, data: Buffer, version: str | None) -> bool:
        if version is None:
            return self.put_if_absent(name, data)
        body = bytes(data)
        condition = {"IfMatch": version}
        if not self._capabilities.conditional_replace:
            condition = {}
            try:
                with self._edge(name):
                    found = self._s3().head_object(Bucket=self._bucket, Key=self._key(name))
            except NotFoundError:
                return False
            if self._told(found, "ETag", name) != version:
                return False
        return self._create(name, lambda: self._put(name, body, _sha256(body), condition), body)

    def read_into(self, name: str, buffer: memoryview, offset: int) -> int:
        if not len(buffer):
            self.head(name)
            return 0
        with self.open_read(name, offset=offset, nbytes=len(buffer)) as reader:
            return reader.readinto(buffer)

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        condition = {}
        if offset or nbytes is not None:
            condition["Range"] = f"bytes={offset}-" + ("" if nbytes is None else str(offset + max(nbytes, 1) - 1))
        try:
            reader, answer = self._get(name, condition)
        except _BeyondTheEndError:
            yield EmptyReader()
            return
        with closing(reader):
            if condition and not self._is_range(name, answer, offset):
                reader.skip(offset)
            if nbytes is not None:
                reader.limit(nbytes)
            yield reader

    def head(self, name: str) -> ObjectInfo:
        try:
            with self._edge(name):
                found = self._s3().head_object(Bucket=self._bucket, Key=self._key(name))
        except NotFoundError:
            self._check_bucket()
            raise
        self._bucket_seen = True
        nbytes, modified = (self._told(found, field, name) for field in ("ContentLength", "LastModified"))
        return ObjectInfo(name=name, nbytes=int(nbytes), modified=modified.timestamp())

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """A request per page, when it is asked for. From where a store doesn't keep to S3's order, all at once."""
        if prefix:
            validate_name(prefix.removesuffix("/"))
        last = ""
        pages = self._listed(prefix)
        for page in pages:
            names = [last, *(info.name for info in page)]
            if names != sorted(names):
                yield from sorted(chain(page, chain.from_iterable(pages)), key=attrgetter("name"))
                return
            yield from page
            last = names[-1]

    def delete(self, name: str) -> bool:
        return self.delete_while(name, lambda: None)

    def delete_while(self, name: str, check: Callable[[], None]) -> bool:
        if not self._exists(name):
            return False
        check()
        with self._edge(name):
            self._s3().delete_object(Bucket=self._bucket, Key=self._key(name))
        return True

    def capabilities(self) -> Capabilities:
        return self._capabilities

    def use(self, capabilities: Capabilities) -> None:
        self._capabilities = capabilities

    def now(self) -> float:
        """The `Date` of an answer; to the second, as `modified` is."""
        text = self._first_page()["ResponseMetadata"]["HTTPHeaders"].get("date", "")
        try:
            return parsedate_to_datetime(text).timestamp()
        except ValueError:
            raise StorageError(f"{self.url}: {self._endpoint()} gives no date with its answers") from None

    def refuses_wrong_checksum(self, name: str) -> bool:
        with self._edge(name):
            try:
                self._put(name, b"x", base64.b64encode(bytes(32)).decode(), {})
            except Exception as error:
                if 400 <= status_of(error) < 500 and status_of(error) != 403:
                    return True
                raise
        return False

    def copy_from(self, source: Storage, name: str, *, nbytes: int) -> bool | None:
        if not isinstance(source, S3Storage) or source._endpoint() != self._endpoint() or nbytes > MAX_COPY_BYTES:
            return None
        if self._exists(name):
            return False
        if (found := source.head(name).nbytes) != nbytes:
            raise CorruptChunkError(
                f"{source._what(name)} is damaged: expected {nbytes} bytes, found {found}; delete it, then export the "
                "snapshot again"
            )
        origin = {"Bucket": source.location.bucket, "Key": source._key(name)}
        arguments = {"ChecksumAlgorithm": "SHA256"} | self.options.encryption()
        try:
            with self._edge(name):
                self._s3().copy_object(Bucket=self._bucket, Key=self._key(name), CopySource=origin, **arguments)
        except RefusedError:  # who may write here need not be allowed to read there
            return None
        return True

    def is_empty(self) -> bool:
        return not self._first_page().get("Contents")

    def sweep(self, *, dry_run: bool = False) -> int:
        """Abort kvsnap's multipart uploads that began more than a day ago, by the store's clock."""
        swept = 0
        oldest: float | None = None
        try:
            for page in self._pages("list_multipart_uploads", ""):
                for upload in page.get("Uploads", ()):
                    if not _IN_PARTS.fullmatch(str(upload["Key"]).removeprefix(self.location.prefix)):
                        continue
                    if oldest is None:
                        oldest = self.now() - UPLOAD_MAX_AGE_S
                    if upload["Initiated"].timestamp() < oldest:
                        swept += 1
                        if not dry_run:
                            self._abort(str(upload["Key"]), str(upload["UploadId"]))
        except RefusedError as error:  # a store or a policy without this is good enough for everything else
            log.info("kvsnap: unfinished uploads are not looked for: %s", error)
        return swept

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()

    def _s3(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = make_client(self.options)
            return self._client

    def _endpoint(self) -> str:
        return str(self._s3().meta.endpoint_url)

    def _key(self, name: str) -> str:
        return self.location.prefix + validate_name(name)

    def _what(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url

    def _if_absent(self) -> dict[str, str]:
        return {"IfNoneMatch": "*"} if self._capabilities.conditional_create else {}

    def _exists(self, name: str) -> bool:
        try:
            self.head(name)
        except NotFoundError:
            return False
        return True

    def _check_bucket(self) -> None:
        """A HEAD can't tell a missing object from a missing bucket."""
        if not self._bucket_seen:
            try:
                with self._edge(""):
                    self._s3().head_bucket(Bucket=self._bucket)
            except NotFoundError:
                raise no_bucket(self.url, self._bucket, self._endpoint()) from None
            self._bucket_seen = True

    @contextmanager
    def _edge(self, name: str) -> Iterator[None]:
        """Turn what the SDK raises into kvsnap's errors; only conflicts and `_BeyondTheEndError` pass."""
        from botocore.exceptions import BotoCoreError, ClientError
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ClientError as error:
            if status_of(error) == 416:
                raise _BeyondTheEndError from None
            raise translate(error, self._what(name), self._bucket, self._endpoint()) from error
        except (BotoCoreError, HTTPError, OSError) as error:
            raise translate(error, self._what(name), self._bucket, self._endpoint()) from error

    def _get(self, name: str, condition: Mapping[str, str]) -> tuple[BodyReader, Mapping[str, Any]]:
        """An answer and its body, to be closed by the caller."""
        with self._edge(name):
            answer = self._s3().get_object(Bucket=self._bucket, Key=self._key(name), **condition)
        self._bucket_seen = True
        nbytes = int(self._told(answer, "ContentLength", name))
        return BodyReader(answer["Body"], nbytes, self._what(name), lambda: self._edge(name)), answer

    def _is_range(self, name: str, answer: Mapping[str, Any], offset: int) -> bool:
        """Whether an answer holds the range that begins at `offset`; False: the whole object."""
        found = str(answer.get("ContentRange") or "")  # rclone answers 200 with the range, and says so here
        if found and not found.startswith(f"bytes {offset}-"):
            raise StorageError(f"{self._what(name)}: asked for bytes from {offset} on, {self._endpoint()} sent {found}")
        if found or answer["ResponseMetadata"]["HTTPStatusCode"] == 206:
            return True
        if self._capabilities.ranges:
            raise RefusedError(f"{self._what(name)}: {self._endpoint()} ignores ranges and sent all of it")
        return False

    def _create(self, name: str, write: Callable[[], None], data: bytes | None) -> bool:
        """Do a conditional write; False if the condition did not hold, unless an own, earlier try is why."""
        with self._edge(name):
            try:
                write()
            except Exception as error:
                if not is_conflict(error) and not is_no_key(error):
                    raise
                return was_retried(error) and (data is None or holds(self, name, data))
        return True

    def _put(self, name: str, body: bytes | PieceBody, checksum: str, condition: Mapping[str, str]) -> None:
        answer = self._s3().put_object(
            Bucket=self._bucket,
            Key=self._key(name),
            Body=body,
            ContentLength=len(body),
            ChecksumAlgorithm="SHA256",
            ChecksumSHA256=checksum,
            **condition,
            **self.options.encryption(),
        )
        self._told(answer, "ETag", name)

    def _put_parts(self, name: str, pieces: Callable[[], Iterable[Buffer]], nbytes: int) -> None:
        """In parts, each held in memory while it is sent."""
        where = {"Bucket": self._bucket, "Key": self._key(name)}
        client = self._s3()
        upload = client.create_multipart_upload(**where, ChecksumAlgorithm="SHA256", **self.options.encryption())
        where["UploadId"] = self._told(upload, "UploadId", name)
        try:
            parts = []
            part_bytes = max(self.options.part_bytes, -(-nbytes // MAX_PARTS))
            for number, part in enumerate(regroup(pieces(), nbytes, part_bytes), 1):
                checksum = _sha256(part)
                body = PieceBody(partial(_single, part), len(part))
                sent = client.upload_part(
                    **where, PartNumber=number, Body=body, ContentLength=len(part), ChecksumSHA256=checksum
                )
                etag = self._told(sent, "ETag", name)
                parts.append({"PartNumber": number, "ETag": etag, "ChecksumSHA256": checksum})
            try:
                done = client.complete_multipart_upload(**where, MultipartUpload={"Parts": parts}, **self._if_absent())
                self._told(done, "ETag", name)
            except Exception as error:
                # the SDK's second try finds no upload where the first one's answer got lost
                if not (code_of(error) == "NoSuchUpload" and was_retried(error) and self.head(name).nbytes == nbytes):
                    raise
        except BaseException:
            self._abort(where["Key"], where["UploadId"])
            raise

    def _abort(self, key: str, upload_id: str) -> None:
        with suppress(StorageError, NotFoundError), self._edge(""):
            self._s3().abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id)

    def _listed(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        """The pages of a listing."""
        start = self.location.prefix
        for page in self._pages("list_objects_v2", prefix):
            found = []
            for entry in page.get("Contents", ()):
                name = str(entry["Key"]).removeprefix(start)
                if is_valid_name(name) and str(entry["Key"]) == start + name:
                    modified = entry["LastModified"].timestamp()
                    found.append(ObjectInfo(name=name, nbytes=int(entry["Size"]), modified=modified))
            yield found

    def _pages(self, operation: str, prefix: str) -> Iterator[Mapping[str, Any]]:
        with self._edge(prefix):
            pages = iter(
                self._s3().get_paginator(operation).paginate(Bucket=self._bucket, Prefix=self.location.prefix + prefix)
            )
        while True:
            with self._edge(prefix):
                page = next(pages, None)
            if page is None:
                return
            self._told(page, "IsTruncated", prefix)
            yield page

    def _first_page(self) -> Mapping[str, Any]:
        """A listing of one object at most."""
        with self._edge(""):
            answer: Mapping[str, Any] = self._s3().list_objects_v2(
                Bucket=self._bucket, Prefix=self.location.prefix, MaxKeys=1
            )
        self._told(answer, "IsTruncated", "")
        return answer

    def _told(self, answer: Mapping[str, Any], field: str, name: str) -> Any:
        """A field that every answer of this kind has.

        A login page that some proxy sends with status 200 would else pass for an empty listing or a finished write,
        and a prune would believe it.
        """
        if (found := answer.get(field)) is None:
            raise StorageError(
                f"{self._what(name)}: what {self._endpoint()} answered is not S3's, it has no {field}; is a proxy in "
                "between?"
            )
        return found


class _BeyondTheEndError(Exception):
    """A range begins at or after the object's end (416)."""


def _single(part: Buffer) -> list[Buffer]:
    return [part]


def _sha256(data: Buffer) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
