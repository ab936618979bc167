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
        is_final: There is nobody to ask again.
    """

    def __init__(
        self, message: str, *, status: int | None = None, is_timeout: bool = False, is_final: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.is_timeout = is_timeout
        self.is_final = is_final


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
    """A server at a URL; connections are kept and used again.

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
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._has_hung_up = False
        self.name = f"{parts.scheme}://{parts.netloc}{self._base}"

    @contextlib.contextmanager
    def lines(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        deadline = time.monotonic() + timeout_s
        data = None if body is None else json.dumps(body).encode()
        connection: _Connection | None = None
        try:
            connection, response = self._send(method, path, data, deadline)
            yield response.status, connection.lines(response, deadline)
            self._give_back(connection, is_good=response.isclosed() and not response.will_close)
            connection = None
        except TimeoutError:
            text = f"{self.name}{path} gave no answer within {timeout_s:.3g} s"
            raise RequestError(text, is_timeout=True) from None
        except (OSError, http.client.HTTPException) as error:
            if self._has_hung_up:
                raise RequestError("the request was ended", is_final=True) from None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise RequestError(f"{self.name}{path} gave no answer: {reason}") from None
        finally:
            if connection is not None:
                self._give_back(connection, is_good=False)

    def hang_up(self) -> None:
        with self._lock:
            self._has_hung_up = True
            for connection in self._busy:
                with contextlib.suppress(OSError):
                    connection.socket.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def close(self) -> None:
        self.hang_up()
        with self._lock:
            while self._idle:
                self._idle.pop().close()

    def _send(
        self, method: str, path: str, data: bytes | None, deadline: float
    ) -> tuple[_Connection, http.client.HTTPResponse]:
        while True:
            connection = self._take(deadline)
            try:
                return connection, connection.send(method, self._base + path, data, self._headers, deadline)
            except BaseException as error:
                self._give_back(connection, is_good=False)
                # a kept connection that the server closed meanwhile: nothing was answered on it
                is_stale = isinstance(error, http.client.RemoteDisconnected | BrokenPipeError | ConnectionResetError)
                if not is_stale or not connection.is_used or self._has_hung_up:
                    raise

    def _take(self, deadline: float) -> _Connection:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = _Connection(self._host, self._port, is_tls=self._is_tls, deadline=deadline)
        with self._lock:
            if self._has_hung_up:
                connection.close()
                raise ConnectionAbortedError
            self._busy.add(connection)
        return connection

    def _give_back(self, connection: _Connection, *, is_good: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if is_good and not self._has_hung_up:
                connection.is_used = True
                self._idle.append(connection)
            else:
                connection.close()


class _Connection:
    """One connection; used by one thread at a time."""

    def __init__(self, host: str, port: int | None, *, is_tls: bool, deadline: float) -> None:
        timeout_s = max(min(CONNECT_TIMEOUT_S, deadline - time.monotonic()), 0.001)
        self.is_used = False
        """Whether an answer came over it before."""
        if is_tls:
            context = ssl.create_default_context()
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=timeout_s, context=context
            )
        else:
            self._http = http.client.HTTPConnection(host, port, timeout=timeout_s)
        self._http.connect()
        self.socket: socket.socket = self._http.sock
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(
        self, method: str, path: str, data: bytes | None, headers: Mapping[str, str], deadline: float
    ) -> http.client.HTTPResponse:
        """Send one request and read the head of its answer."""
        self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
        self._http.request(method, path, data, dict(headers))
        return self._http.getresponse()

    def lines(self, response: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
        """The body, line by line."""
        rest = b""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if self.socket.fileno() >= 0:  # closed by http.client once an answer without keep-alive was read
                self.socket.settimeout(left)
            data = response.read1(1 << 16)  # one read each: what trickles in is bounded too
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            yield from (line + b"\n" for line in whole)
        if rest:
            yield rest
        response.read()  # lets go of the connection

    def close(self) -> None:
        """Close it, with an answer that is still under way."""
        self._http.close()
