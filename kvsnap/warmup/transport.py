"""Requests to a running server, with the standard library; bounded in time, and ended from outside at any moment."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import urlsplit

from kvsnap.errors import ConfigError, KvsnapError

MAX_ERROR_BYTES = 4000
CONNECT_TIMEOUT_S = 10.0


class RequestError(KvsnapError):
    """The server refused a request, or didn't answer.

    Attributes:
        status: The HTTP status; None where there was no answer.
        is_timeout: No answer in time; the server may be busy with it.
    """

    def __init__(self, message: str, *, status: int | None = None, is_timeout: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.is_timeout = is_timeout


class Transport(Protocol):
    """Where the OpenAI-compatible API of one vLLM is reached. Used from several threads."""

    name: str
    """What it reaches, for people."""

    def lines(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> contextlib.AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """Send one request; its status, and the lines of the answer as they come.

        Raises:
            RequestError: no answer; also while the lines are read.
        """
        ...

    def hang_up(self) -> None:
        """End all requests under way, at once: what waits in `lines` raises. No more can be sent."""
        ...

    def close(self) -> None:
        """Let go of it in good order."""
        ...


class HttpTransport:
    """A server at a URL: one kept-alive connection per thread.

    Args:
        url: `http(s)://host:port`, with or without a path, with or without `/v1`.
        api_key: Sent as bearer token; appears in no message.

    Raises:
        ConfigError: not such a URL.
    """

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
            raise ConfigError(f"{url} is no URL of a server, expected http://HOST:PORT or https://HOST:PORT")
        if parts.username or parts.password:
            raise ConfigError("the URL of the server holds a user name or password; give the key with --api-key")
        self._host, self._port = parts.hostname, port
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._is_tls = parts.scheme == "https"
        self._headers = {"Content-Type": "application/json", "Accept": "*/*"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise ConfigError("the API key holds characters that a header can't carry")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._local = threading.local()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._is_aborted = False
        self.name = f"{parts.scheme}://{parts.netloc}{self._base}"

    @contextlib.contextmanager
    def lines(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        deadline = time.monotonic() + timeout_s
        is_done = False
        try:
            response = self._send(method, path, body, deadline)
            yield response.status, self._read_lines(response, deadline)
            is_done = response.isclosed() and not response.will_close
        except TimeoutError:
            text = f"{self.name}{path} gave no answer within {timeout_s:.3g} s"
            raise RequestError(text, is_timeout=True) from None
        except (OSError, http.client.HTTPException) as error:
            if self._is_aborted:
                raise RequestError("the request was ended") from None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise RequestError(f"{self.name}{path} gave no answer: {reason}") from None
        finally:
            if not is_done:
                self._drop()

    def hang_up(self) -> None:
        with self._lock:
            self._is_aborted = True
            sockets = list(self._sockets)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline: float
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        is_fresh = getattr(self._local, "connection", None) is None
        for _ in range(2):
            connection, sock = self._connected(deadline)
            try:
                sock.settimeout(max(deadline - time.monotonic(), 0.001))
                connection.request(method, self._base + path, data, self._headers)
                return connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                # a kept-alive connection that the server closed meanwhile; nothing was answered on it
                self._drop()
                if is_fresh:
                    raise
                is_fresh = True
        raise AssertionError("unreachable")

    def _connected(self, deadline: float) -> tuple[http.client.HTTPConnection, socket.socket]:
        if self._is_aborted:
            raise ConnectionAbortedError
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            timeout = max(min(CONNECT_TIMEOUT_S, deadline - time.monotonic()), 0.001)
            if self._is_tls:
                context = ssl.create_default_context()
                connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout, context=context)
            else:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
            connection.connect()
            sock: socket.socket = connection.sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets.add(sock)
            self._local.connection, self._local.sock = connection, sock
            if self._is_aborted:
                raise ConnectionAbortedError
        return connection, self._local.sock

    def _drop(self) -> None:
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            with self._lock:
                self._sockets.discard(self._local.sock)
            connection.close()
            self._local.connection = self._local.sock = None

    def _read_lines(self, response: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
        sock = self._local.sock
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if sock.fileno() >= 0:  # closed by http.client once an answer without keep-alive was read
                sock.settimeout(left)
            line = response.readline()
            if not line:
                return
            yield line
