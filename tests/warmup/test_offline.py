"""The engine in a child process: the same job over pipes; whatever becomes of the child, the parent hears of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvsnap.errors import ConfigError, StorageError
from kvsnap.warmup import offline
from kvsnap.warmup.job import Options, Warmup
from kvsnap.warmup.offline import OfflineTransport, server_flags
from kvsnap.warmup.prompts import CHAT, COMPLETIONS, Prompt
from kvsnap.warmup.report import WarmupReport
from kvsnap.warmup.server import Server
from kvsnap.warmup.transport import RequestError

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = Prompt(source="p:1", url=COMPLETIONS, body={"prompt": "x" * 40})
CHAT_PROMPT = Prompt(source="p:2", url=CHAT, body={"messages": [{"role": "user", "content": "y" * 40}]})


@pytest.fixture(autouse=True)
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[OfflineTransport]]:
    """Children are fakes, and none outlives a test."""
    started: list[OfflineTransport] = []
    monkeypatch.setattr(offline, "CHILD", "tests.warmup.fake_child")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    yield started
    for transport in started:
        transport.close()


def run(started: list[OfflineTransport], *flags: str, budget_s: float | None = None) -> WarmupReport:
    transport = OfflineTransport(flags)
    started.append(transport)
    options = Options(
        budget_s=budget_s,
        start=lambda left_s: transport.start(timeout_s=30.0 if left_s is None else left_s),
        set_clock=transport.set_clock,
        prove_tiers=True,
    )
    job = Warmup(Server(transport, timeout_s=10.0), [TEXT, CHAT_PROMPT], options, now=datetime.now(UTC))
    return job.run()


def test_same_job_over_pipes(child: list[OfflineTransport]) -> None:
    report = run(child)

    assert (report.state, report.num_warmed, report.num_prompts) == ("warm", 2, 2)
    assert report.target == "the offline engine of fake"
    assert report.cached_by_source == {"device": report.proved_tokens}


def test_clock_of_the_template_is_moved(child: list[OfflineTransport]) -> None:
    """C04: rendered at two dates, the prompts differ where the template writes the year."""
    report = run(child, "fake:clock")

    assert [(f.kind, f.origin) for f in report.volatile] == [("change", "template")]
    assert report.volatile[0].position in range(15, 19)


def test_child_that_dies_at_the_start(child: list[OfflineTransport]) -> None:
    with pytest.raises(StorageError, match="ended before it was ready:\nthe model file is broken"):
        run(child, "fake:dies")


def test_child_that_refuses_its_flags(child: list[OfflineTransport]) -> None:
    with pytest.raises(ConfigError, match="no such flag"):
        run(child, "fake:refuses")


def test_child_that_dies_at_work(child: list[OfflineTransport]) -> None:
    with pytest.raises(RequestError, match="has ended"):
        run(child, "fake:dies at work")


def test_budget_bounds_the_start(child: list[OfflineTransport]) -> None:
    started = time.monotonic()

    report = run(child, "fake:never ready", budget_s=0.2)

    assert (report.state, report.num_left) == ("cold", 2)
    assert time.monotonic() - started < 5


def test_budget_ends_an_engine_that_still_loads(child: list[OfflineTransport]) -> None:
    """It has nothing to lose, and would take the end of its input for minutes of loading."""
    transport = OfflineTransport(["fake:loads"])
    with pytest.raises(RequestError, match=r"wasn't ready within 0\.2 s"):
        transport.start(timeout_s=0.2)
    started = time.monotonic()

    assert transport.flush(60.0) == []
    transport.close()

    assert time.monotonic() - started < 10
    assert transport._process is not None
    assert transport._process.returncode == -signal.SIGKILL


def test_end_of_input_ends_the_child(child: list[OfflineTransport]) -> None:
    """D22: the job may be killed at any moment; its engine sees the end of its input and goes too."""
    transport = OfflineTransport([])
    transport.start(timeout_s=30)
    process = transport._process
    assert process is not None
    assert process.stdin is not None

    process.stdin.close()

    assert process.wait(timeout=10) == 0
    transport.close()


def test_flags_say_where_to_store(tmp_path: Path) -> None:
    given = ["--dtype", "float32", "--kv-transfer-config", "{}"]

    assert server_flags("m", given, None) == ["--model", "m", *given]
    assert "kvsnap_connector" in server_flags("m", [], tmp_path)[-1]
    with pytest.raises(ConfigError, match="give --cache-dir"):
        server_flags("m", ["--dtype", "float32"], None)
