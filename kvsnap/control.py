"""The control socket: a live engine answers `status`, `flush` and `clear` of the same user.

One request and one answer per connection, each one line of JSON:

    {"args": {…}, "command": "flush"}
    {"ok": true, "result": {…}}      or      {"error": "…", "ok": false}

The socket lies in the runtime directory, has mode 0600, and the peer's uid is checked
too. Requests are short and bounded in time, so that no client can hold the engine up.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvsnap.errors import ConfigError, KvsnapError, NotFoundError, StorageError
from kvsnap.runtime import widen_affinity

MAX_PATH_BYTES = 107
"""A Unix socket's path holds so many bytes (sys/un.h), the final zero not counted."""
MAX_REQUEST_BYTES = 64 << 10
MAX_ANSWER_BYTES = 64 << 20
REQUEST_TIMEOUT_S = 5.0
"""A client must have sent its whole request by then."""
MAX_CONNECTIONS = 8

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class ControlServer:
    """Serves a control socket from threads of its own until `close`.

    Handlers are called with the request's `args` in such a thread, several at once; what
    they raise goes to the client as text and nowhere else.

    Raises:
        ConfigError: the path is too long for a socket.
        StorageError: the socket can't be made.
    """

    def __init__(self, socket_path: Path, handlers: Mapping[str, Handler]) -> None:
        self.path = socket_path
        self._handlers = dict(handlers)
        self._room = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._closed = threading.Event()
        self._socket = _listen(socket_path)
        self._inode = socket_path.stat().st_ino
        self._thread = threading.Thread(target=self._accept, name="kvsnap-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and remove the socket. Requests that run are not waited for. May be repeated."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=REQUEST_TIMEOUT_S)
        self._socket.close()
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    def _accept(self) -> None:
        widen_affinity()
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed.is_set():
                    return
                time.sleep(0.05)  # out of file descriptors; the client waits in the backlog
                continue
            if not self._room.acquire(blocking=False):
                _answer(connection, _failure("the engine is busy with other requests; try again"))
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), name="kvsnap-control", daemon=True).start()
            except RuntimeError:  # no thread to be had
                self._room.release()
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        widen_affinity()
        try:
            _answer(connection, self._handle(connection))
        finally:
            self._room.release()

    def _handle(self, connection: socket.socket) -> dict[str, Any]:
        try:
            if (uid := _peer_uid(connection)) != os.getuid():
                return _failure(f"user {uid} may not control an engine of user {os.getuid()}")
            request = json.loads(_read_line(connection, MAX_REQUEST_BYTES, REQUEST_TIMEOUT_S))
            command, args = request["command"], request["args"]
            handler = self._handlers.get(command)
            if handler is None or not isinstance(args, dict):
                return _failure(f"the engine has no command {command!r:.40}")
        except (KvsnapError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return _failure(f"the request can't be read: {error}")
        try:
            result = handler(args)
            json.dumps(result)
        except Exception as error:  # whatever it is, it is the client's to see, never the engine's to die of
            return _failure(str(error) or type(error).__name__)
        return {"ok": True, "result": result}


def call(socket_path: Path, command: str, args: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Ask a live engine; its answer.

    Raises:
        NotFoundError: nobody listens there.
        StorageError: no answer within `timeout_s`, or not one of a kvsnap engine.
        KvsnapError: the engine refused or failed; the message is its own.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(_checked(socket_path)))
            request = json.dumps({"args": dict(args), "command": command}).encode() + b"\n"
            with contextlib.suppress(BrokenPipeError):  # an engine that refuses answers before it has read
                connection.sendall(request)
            answer = json.loads(_read_line(connection, MAX_ANSWER_BYTES, timeout_s))
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotFoundError(f"no engine listens on {socket_path}; it has stopped") from None
    except TimeoutError:
        raise StorageError(f"the engine on {socket_path} did not answer {command} within {timeout_s:g} s") from None
    except (OSError, ValueError, RecursionError) as error:
        raise StorageError(f"the engine on {socket_path} gave no answer to {command}: {error}") from error
    if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
        raise StorageError(f"what listens on {socket_path} is not a kvsnap engine")
    if not answer["ok"]:
        raise KvsnapError(str(answer.get("error")))
    result = answer.get("result")
    if not isinstance(result, dict):
        raise StorageError(f"what listens on {socket_path} is not a kvsnap engine")
    return result


def _listen(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        os.fchmod(server.fileno(), 0o600)  # the file gets its mode from the socket, no moment with a wider one
        with contextlib.suppress(FileNotFoundError):
            _checked(path).unlink()
        server.bind(str(path))
        os.chmod(path, 0o600)
        server.listen(MAX_CONNECTIONS)
    except OSError as error:
        server.close()
        raise StorageError(f"control socket {path} can't be made: {error}") from error
    except ConfigError:
        server.close()
        raise
    return server


def _checked(path: Path) -> Path:
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(
            f"control socket {path} has a path of {len(os.fsencode(path))} bytes, a socket takes {MAX_PATH_BYTES}; "
            "set KVSNAP_RUNTIME_DIR to a short directory"
        )
    return path


def _peer_uid(connection: socket.socket) -> int:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _pid, uid, _gid = struct.unpack("3i", data)
    return int(uid)


def _read_line(connection: socket.socket, most: int, timeout_s: float) -> bytes:
    """One line, its end not included; bounded in bytes and, as a whole, in time."""
    deadline = time.monotonic() + timeout_s
    data = bytearray()
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        connection.settimeout(left)
        piece = connection.recv(1 << 16)
        if not piece:
            raise ConnectionResetError("the connection was closed early")
        data += piece
        if len(data) > most:
            raise ValueError(f"more than {most} bytes")
    return bytes(data)


def _answer(connection: socket.socket, answer: dict[str, Any]) -> None:
    with contextlib.suppress(OSError), connection:
        connection.settimeout(REQUEST_TIMEOUT_S)
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _failure(text: str) -> dict[str, Any]:
    return {"error": text, "ok": False}
