"""A small S3 in this process that misbehaves when told to. Listens on 127.0.0.1 only."""

from __future__ import annotations

import base64
import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
_DATE = "Tue, 10 Nov 2026 20:48:33 GMT"
_CODES = {403: "AccessDenied", 500: "InternalError", 503: "SlowDown", 507: "InsufficientStorage", 501: "NotImplemented"}


class Request(NamedTuple):
    """One request as it came in."""

    method: str
    key: str
    """Empty for a listing."""


@dataclass(slots=True)
class Trouble:
    """What happens to requests of `method` for keys like `key`.

    `what`: a status (answered instead of acting), `drop` (no answer, nothing done), `drop_after` (done, no answer),
    `truncate` (half of the body, then the connection closes), `silence` (no answer until the server stops), `login`
    (a page of some proxy, with status 200).
    """

    method: str
    what: int | str
    key: str = "*"
    times: int | None = 1
    """None: for ever."""


@dataclass(slots=True)
class Settings:
    """How the store behaves."""

    conditions: bool = True
    ranges: bool = True
    checksums: bool = True
    keeps_order: bool = False
    """Whether listings are in order, as those of AWS are."""
    page_keys: int = 1000
    """Objects in a page of a listing."""
    rate: float | None = None
    """Requests per second; above it 503 SlowDown."""
    troubles: list[Trouble] = field(default_factory=list)


class FakeS3:
    """The store's state."""

    def __init__(self, endpoint: str, settings: Settings) -> None:
        self.endpoint = endpoint
        self.settings = settings
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.connections = 0
        self.refused = 0
        """Requests answered 503 for coming too fast."""
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._tokens = 0.0
        self._refilled = time.monotonic()

    def trouble(self, request: Request) -> int | str | None:
        with self._lock:
            self.requests.append(request)
            if self.settings.rate is not None:
                now = time.monotonic()
                self._tokens = min(5.0, self._tokens + (now - self._refilled) * self.settings.rate)
                self._refilled = now
                if self._tokens < 1:
                    self.refused += 1
                    return 503
                self._tokens -= 1
            for trouble in self.settings.troubles:
                if trouble.method == request.method and fnmatchcase(request.key, trouble.key) and trouble.times != 0:
                    if trouble.times is not None:
                        trouble.times -= 1
                    return trouble.what
        return None

    def put(self, key: str, data: bytes, headers: dict[str, str]) -> tuple[int, str]:
        """Status, and S3's code if that is an error."""
        with self._lock:
            found = self.objects.get(key)
            checksum = headers.get("x-amz-checksum-sha256")
            digest = base64.b64encode(hashlib.sha256(data).digest()).decode()
            if self.settings.checksums and checksum not in (None, digest):
                return 400, "BadDigest"
            if self.settings.conditions:
                wanted = headers.get("if-match")
                if wanted is not None and found is None:
                    return 404, "NoSuchKey"
                if wanted is not None and found is not None and etag(found) != wanted:
                    return 412, "PreconditionFailed"
                if headers.get("if-none-match") == "*" and found is not None:
                    return 412, "PreconditionFailed"
            self.objects[key] = data
            return 200, ""


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


@contextmanager
def fake_s3(*, port: int = 0, **settings: object) -> Iterator[FakeS3]:
    """A running store with the bucket `bucket`; keywords as `Settings` has them."""
    server = _Server(("127.0.0.1", port), _Handler)
    server.state = FakeS3(f"http://127.0.0.1:{server.server_address[1]}", Settings(**settings))  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server.state
    finally:
        server.state.stopped.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    state: FakeS3


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.state.connections += 1
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_PUT(self) -> None:
        self._handle("PUT")

    def do_GET(self) -> None:
        self._handle("GET")

    def do_HEAD(self) -> None:
        self._handle("HEAD")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def _handle(self, method: str) -> None:
        state = self.server.state
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = urlsplit(self.path)
        key = unquote(parts.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        trouble = state.trouble(Request(method, key))
        if isinstance(trouble, int):
            self._error(trouble, _CODES[trouble])
            return
        if trouble == "silence":
            state.stopped.wait(30)
        if trouble in ("drop", "silence"):
            self.close_connection = True
            return
        if trouble == "login":
            self._answer(200, b"<html><body>login</body></html>", {"Content-Type": "text/html"})
            return
        if method == "PUT":
            status, code = state.put(key, data, {name.lower(): value for name, value in self.headers.items()})
            if trouble == "drop_after":
                self.close_connection = True
            elif code:
                self._error(status, code)
            else:
                self._answer(200, b"", {"ETag": etag(data)})
        elif method == "DELETE":
            state.objects.pop(key, None)
            self._answer(204, b"", {})
        elif not key:
            self._list(parse_qs(parts.query))
        elif key not in state.objects:
            self._error(404, "NoSuchKey")
        else:
            self._send(state.objects[key], cut=trouble == "truncate")

    def _send(self, data: bytes, *, cut: bool) -> None:
        headers = {"ETag": etag(data), "Last-Modified": _DATE}
        wanted = self.headers.get("range")
        if wanted is None or not self.server.state.settings.ranges:
            self._answer(200, data, headers, cut=cut)
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        if not part:
            self._error(416, "InvalidRange")
            return
        headers["Content-Range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
        self._answer(206, part, headers, cut=cut)

    def _list(self, query: dict[str, list[str]]) -> None:
        state, prefix = self.server.state, query.get("prefix", [""])[0]
        found = [key for key in reversed(state.objects) if key.startswith(prefix)]
        if state.settings.keeps_order:
            found.sort()
        start = int(query.get("continuation-token", ["0"])[0])
        end = start + state.settings.page_keys
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-10T20:48:33.000Z</LastModified>"
            f"<ETag>{escape(etag(state.objects[key]))}</ETag><Size>{len(state.objects[key])}</Size></Contents>"
            for key in found[start:end]
        )
        is_cut = str(end < len(found)).lower()
        more = f"<IsTruncated>{is_cut}</IsTruncated><NextContinuationToken>{end}</NextContinuationToken>"
        name = "ListMultipartUploadsResult" if "uploads" in query else "ListBucketResult"
        text = f"<{name}><Name>{BUCKET}</Name>{more}{entries}</{name}>"
        self._answer(200, text.encode(), {"Content-Type": "application/xml"})

    def _error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>because</Message></Error>"
        self._answer(status, text.encode(), {"Content-Type": "application/xml"})

    def _answer(self, status: int, data: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)
        if cut:
            self.close_connection = True
