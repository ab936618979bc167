"""A minimal S3 on loopback: one bucket, whose objects are the files of a folder. Reads only; nothing is copied twice.

    python -m benchmarks.object_server FOLDER     # prints its port; ends when stdin does

Like S3 it sends along the SHA-256 that an object was stored with, when it is asked for a checksum (boto3 does by
default, and then checks the body against it). GET /-/log answers the requests so far, one `METHOD key` a line.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bench"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class ObjectServer(ThreadingHTTPServer):
    """Serves `folder`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.log: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ObjectServer

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self._serve(with_body=False)

    def do_GET(self) -> None:
        self._serve(with_body=True)

    def _serve(self, *, with_body: bool) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if bucket == "-":
            self._answer(200, "\n".join(self.server.log).encode())
            return
        self.server.log.append(f"{self.command} {key}")
        if not key:
            self._answer(200, self._listing(parse_qs(parts.query).get("prefix", [""])[0]))
            return
        path = self.server.folder / key
        if not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code><Message>none</Message></Error>" if with_body else b"")
            return
        self._send_file(path, with_body=with_body)

    def _send_file(self, path: Path, *, with_body: bool) -> None:
        size = path.stat().st_size
        start, end, status = 0, size, 200
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if wanted:
            start, status = int(wanted[1]), 206
            end = min(size, int(wanted[2]) + 1) if wanted[2] else size
        self.send_response(status)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{path.name[:32]}"')
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        elif self.headers.get("x-amz-checksum-mode") == "ENABLED" and _DIGEST.fullmatch(path.stem):
            self.send_header("x-amz-checksum-sha256", base64.b64encode(bytes.fromhex(path.stem)).decode())
            self.send_header("x-amz-checksum-type", "FULL_OBJECT")
        self.end_headers()
        if not with_body:
            return
        self.wfile.flush()
        fd = os.open(path, os.O_RDONLY)
        try:
            while start < end and (sent := os.sendfile(self.connection.fileno(), fd, start, end - start)):
                start += sent
        finally:
            os.close(fd)

    def _listing(self, prefix: str) -> bytes:
        rows = [
            f"<Contents><Key>{path.relative_to(self.server.folder)}</Key><Size>{path.stat().st_size}</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for path in sorted(self.server.folder.rglob("*"))
            if path.is_file() and str(path.relative_to(self.server.folder)).startswith(prefix)
        ]
        head = f"<IsTruncated>false</IsTruncated><KeyCount>{len(rows)}</KeyCount>"
        return f"<ListBucketResult>{head}{''.join(rows)}</ListBucketResult>".encode()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    server = ObjectServer(Path(sys.argv[1]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()


if __name__ == "__main__":
    main()
