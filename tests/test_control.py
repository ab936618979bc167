"""The control socket: answers its own user, and nothing that a client does hurts the engine."""

from __future__ import annotations

import json
import socket
import stat
import threading
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap import control
from kvsnap.control import ControlServer, call
from kvsnap.errors import ConfigError, KvsnapError, NotFoundError, StorageError


def fail(args: dict[str, Any]) -> dict[str, Any]:
    raise RuntimeError("no disk today")


@pytest.fixture
def path(own_runtime_dir: Path) -> Path:
    return own_runtime_dir / "e.sock"


@pytest.fixture
def release() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def server(path: Path, release: threading.Event) -> Iterator[ControlServer]:
    def wait(args: dict[str, Any]) -> dict[str, Any]:
        release.wait(10)
        return {}

    server = ControlServer(
        path,
        {"echo": lambda args: {"args": args}, "fail": fail, "wait": wait, "odd": lambda args: {"x": object()}},
    )
    yield server
    server.close()


def raw(path: Path, data: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(path))
        client.sendall(data)
        answer: dict[str, Any] = json.loads(client.makefile("rb").readline())
        return answer


def test_answers_with_what_the_handler_returns(server: ControlServer, path: Path) -> None:
    assert call(path, "echo", {"tier": "dram"}, 5) == {"args": {"tier": "dram"}}


def test_only_the_owner_may_connect(server: ControlServer, path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_users_process_is_refused(server: ControlServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode keeps others out already; the peer's uid is checked all the same."""
    monkeypatch.setattr(control, "_peer_uid", lambda connection: 4711)

    with pytest.raises(KvsnapError, match="user 4711 may not"):
        call(path, "echo", {}, 5)


def test_a_refusal_that_comes_before_the_request_is_sent(path: Path) -> None:
    """The engine has answered and closed while the client was about to send."""

    def refuse() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b'{"error": "you may not", "ok": false}\n')

    class Late(UserDict[str, Any]):
        def keys(self) -> Any:
            refusing.join()
            return super().keys()

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        refusing = threading.Thread(target=refuse)
        refusing.start()
        with pytest.raises(KvsnapError, match="you may not"):
            call(path, "echo", Late(), 5)


def test_what_a_handler_raises_goes_to_the_client_only(server: ControlServer, path: Path) -> None:
    """Invariant 2"""
    for command, message in (("fail", "no disk today"), ("odd", "not JSON serializable"), ("nothing", "no command")):
        with pytest.raises(KvsnapError, match=message):
            call(path, command, {}, 5)

    assert call(path, "echo", {}, 5) == {"args": {}}


@pytest.mark.parametrize(
    "data",
    [b"\n", b"hello\n", b"[]\n", b"{}\n", b'{"command":["x"],"args":{}}\n', b'{"command":"echo","args":3}\n',
     b"[" * 30_000 + b"\n", b"x" * (control.MAX_REQUEST_BYTES + 1)],
)  # fmt: skip
def test_garbage_gets_an_error(server: ControlServer, path: Path, data: bytes) -> None:
    assert raw(path, data)["ok"] is False
    assert call(path, "echo", {}, 5) == {"args": {}}


def test_a_silent_client_holds_nobody_up(server: ControlServer, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))

        assert call(path, "echo", {}, 5) == {"args": {}}


def test_requests_are_bounded_in_number(server: ControlServer, path: Path, release: threading.Event) -> None:
    """Invariant 7"""
    clients = [socket.socket(socket.AF_UNIX) for _ in range(control.MAX_CONNECTIONS)]
    for client in clients:
        client.connect(str(path))
        client.sendall(b'{"args":{},"command":"wait"}\n')

    with pytest.raises(KvsnapError, match="busy"):
        call(path, "echo", {}, 5)

    release.set()
    for client in clients:
        assert client.recv(100)
        client.close()


def test_a_slow_answer_is_given_up(server: ControlServer, path: Path) -> None:
    with pytest.raises(StorageError, match=r"did not answer wait within 0\.05 s"):
        call(path, "wait", {}, 0.05)


def test_nobody_there_is_not_found(path: Path) -> None:
    with pytest.raises(NotFoundError, match="has stopped"):
        call(path, "echo", {}, 5)
    path.touch()
    with pytest.raises(NotFoundError, match="has stopped"):
        call(path, "echo", {}, 5)


def test_a_dead_engines_socket_is_replaced(path: Path) -> None:
    """Crash-only: nobody removed it."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    server = ControlServer(path, {"echo": lambda args: {}})

    assert call(path, "echo", {}, 5) == {}
    server.close()
    assert not path.exists()


def test_close_leaves_a_successors_socket(server: ControlServer, path: Path) -> None:
    successor = ControlServer(path, {"echo": lambda args: {"new": True}})

    server.close()
    server.close()

    assert call(path, "echo", {}, 5) == {"new": True}
    successor.close()


def test_a_path_that_is_too_long_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"107.*KVSNAP_RUNTIME_DIR"):
        ControlServer(tmp_path / ("x" * 120), {})
