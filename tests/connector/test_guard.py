"""A fault of the cache is never a fault of a request (invariant 2)."""

from __future__ import annotations

import logging

import pytest

from kvsnap_connector.guard import MAX_ERRORS, Guard


def fail() -> int:
    raise OSError("gone")


@pytest.fixture(autouse=True)
def serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSNAP_STRICT", raising=False)


def test_an_error_becomes_the_neutral_answer() -> None:
    guard = Guard()

    assert guard.call("hook", fail, 7) == 7
    assert guard.call("hook", lambda: 3, 7) == 3
    assert not guard.is_off


def test_one_kind_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()

    for _ in range(3):
        guard.call("hook", fail, 0)
    guard.call("another", fail, 0)

    assert [record.message.split(" failed")[0] for record in caplog.records] == ["kvsnap: hook", "kvsnap: another"]
    assert guard.num_errors == 4


def test_too_many_errors_turn_it_off(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()

    for _ in range(MAX_ERRORS):
        guard.call("hook", fail, 0)

    assert guard.is_off
    assert guard.call("hook", lambda: 3, 7) == 7
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.WARNING]
    assert "20 errors, the last one in hook: gone" in caplog.text


def test_strict_mode_shows_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSNAP_STRICT", "1")

    with pytest.raises(OSError, match="gone"):
        Guard().call("hook", fail, 0)


def test_it_says_once_why_it_is_off(caplog: pytest.LogCaptureFixture) -> None:
    guard = Guard()

    guard.turn_off("Mamba")
    guard.turn_off("again")

    assert [record.message for record in caplog.records] == ["kvsnap: turned off: Mamba"]
