"""A warm-up of a server that caches, lies, is slow, refuses, hangs or goes away."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Any

import pytest

from kvsnap.engines import FLUSH_TIMEOUT_S
from kvsnap.errors import ConfigError
from kvsnap.warmup import server as server_module
from kvsnap.warmup.job import LEAST_FLUSH_S, Options, Warmup
from kvsnap.warmup.prompts import CHAT, COMPLETIONS, Prompt
from kvsnap.warmup.report import WarmupPlan, WarmupReport
from kvsnap.warmup.server import Server
from kvsnap.warmup.transport import HttpTransport, RequestError
from tests.warmup.fake_server import FakeServer, running

NOW = datetime(2026, 3, 5, 14, 30, tzinfo=UTC)
SYSTEM = "You are a helpful shop assistant with a long handbook. "


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FIRST_DELAY_S", 0.001)


def text(number: int, body: str) -> Prompt:
    return Prompt(source=f"p.jsonl:{number}", url=COMPLETIONS, body={"prompt": body})


def chat(number: int, question: str, **body: Any) -> Prompt:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return Prompt(source=f"p.jsonl:{number}", url=CHAT, body={"messages": messages, **body})


def texts(count: int) -> list[Prompt]:
    return [text(i, f"{i:04}" + "-" * 60) for i in range(count)]


def job(fake: FakeServer, prompts: list[Prompt], transport: HttpTransport, timeout_s: float, **options: Any) -> Warmup:
    return Warmup(Server(transport, timeout_s=timeout_s), prompts, Options(**options), now=NOW)


def run(
    fake: FakeServer, prompts: list[Prompt], *, timeout_s: float = 10.0, api_key: str | None = None, **options: Any
) -> WarmupReport:
    transport = HttpTransport(fake.url, api_key=api_key)
    try:
        return job(fake, prompts, transport, timeout_s, **options).run()
    finally:
        transport.close()


def plan(fake: FakeServer, prompts: list[Prompt]) -> WarmupPlan:
    transport = HttpTransport(fake.url)
    try:
        return job(fake, prompts, transport, 10.0).plan()
    finally:
        transport.close()


def test_computes_once_and_proves_by_a_second_request(fake: FakeServer) -> None:
    prompts = [chat(1, "why"), chat(2, "how", tools=[{"type": "function"}]), text(3, "x" * 40)]

    report = run(fake, prompts)

    assert (report.state, report.num_prompts, report.num_warmed, report.proof) == ("warm", 3, 3, "usage")
    assert sorted(path for path, _ in fake.sent) == [CHAT] * 4 + [COMPLETIONS] * 2
    assert all(body["max_tokens"] == 1 and body["model"] == "fake" for body in fake.bodies)
    assert report.prompt_tokens == sum(len(ids) for _, ids in fake.sent) // 2
    assert report.computed_tokens <= report.prompt_tokens
    assert report.proved_tokens >= report.prompt_tokens - 3 * 16
    assert report.ttft_before_s is not None
    assert report.ttft_after_s is not None


def test_skips_what_is_resident(fake: FakeServer) -> None:
    """The first request itself is the proof, so there is no second one."""
    run(fake, texts(3))
    fake.sent.clear()

    report = run(fake, texts(4))

    assert (report.state, report.num_resident, report.num_warmed) == ("warm", 3, 1)
    assert len(fake.sent) == 5


def test_equal_and_short_prompts_are_not_sent(fake: FakeServer) -> None:
    """The same tokens written in another way are the same prompt; less than a block can't be kept."""
    ids = Prompt(source="p.jsonl:2", url=COMPLETIONS, body={"prompt": [ord("x")] * 40})

    report = run(fake, [text(1, "x" * 40), ids, text(3, "short")])

    assert (report.num_prompts, report.num_duplicates, report.num_short, report.num_warmed) == (2, 1, 1, 1)
    assert len(fake.sent) == 2
    assert "shorter than one block" in report.warnings[0]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("documents", [[{"text": "Of returns"}], [{"text": "Of refunds"}]]),
        ("reasoning_effort", ["low", "high"]),
        ("response_format", [{"type": "json_object"}, {"type": "text"}]),
        ("tool_choice", ["none", "auto"]),
    ],
)
def test_what_tokenize_can_not_tell_apart_is_sent(fake: FakeServer, name: str, values: list[Any]) -> None:
    """vLLM renders these fields, but its /tokenize doesn't have them."""
    prompts = [chat(i, "why", **{name: value}) for i, value in enumerate(values)]

    report = run(fake, [*prompts, chat(2, "why"), chat(3, "why")])

    assert (report.state, report.num_prompts, report.num_duplicates, report.num_warmed) == ("warm", 3, 1, 3)
    sent = {str(body.get(name)) for body in fake.bodies}
    assert sent == {str(value) for value in [*values, None]}


def test_short_but_for_its_documents_is_sent(fake: FakeServer) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "add_generation_prompt": False}
    long = Prompt(source="p.jsonl:1", url=CHAT, body={**body, "documents": [{"text": "Of returns " * 9}]})
    short = Prompt(source="p.jsonl:2", url=CHAT, body=body)

    report = run(fake, [long, short])

    assert (report.num_warmed, report.num_short) == (1, 1)


def test_common_start_is_computed_once(fake: FakeServer) -> None:
    """The first prompt of a group goes ahead alone; the others find its prefix."""
    fake.delay_s = 0.01
    prompts = [text(i, SYSTEM * 6 + f"{i}" * 20) for i in range(4)]

    report = run(fake, prompts, concurrency=4)

    shared = len(SYSTEM * 6) // 16 * 16
    assert report.computed_tokens <= report.prompt_tokens - 3 * shared
    assert fake.most_at_once > 1


def test_no_hit_is_no_proof(fake: FakeServer) -> None:
    """An engine that drops what it computed is not warm, whatever it answers."""
    fake.keeps = False

    report = run(fake, texts(2))

    assert (report.state, report.num_unproved, report.num_warmed) == ("cold", 2, 0)
    assert report.failures[0].reason == "the second request had 0 of 48 tokens in whole blocks cached"


def test_counters_are_the_proof_where_usage_has_none(fake: FakeServer) -> None:
    """Without --enable-prompt-tokens-details: one request at a time, and it is said."""
    fake.tells_details = False
    run(fake, texts(1))
    fake.most_at_once = 0

    report = run(fake, texts(4), concurrency=4)

    assert (report.state, report.proof, report.num_resident, report.num_warmed) == ("warm", "metrics", 1, 3)
    assert fake.most_at_once == 1
    assert any("--enable-prompt-tokens-details" in warning for warning in report.warnings)
    assert report.cached_by_source == {"device": 3 * 48}


def test_no_usage_and_no_counters_prove_nothing(fake: FakeServer) -> None:
    fake.tells_details = fake.has_metrics = False

    with pytest.raises(ConfigError, match="block size"):
        run(fake, texts(1))
    with pytest.raises(ConfigError, match="nothing can be proved"):
        run(fake, texts(1), block_tokens=16)


def test_proofs_of_the_tiers_empty_vllms_own_cache(fake: FakeServer) -> None:
    """Here nothing is behind vLLM's cache, so nothing is a hit afterwards: the device alone proves no tier."""
    with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE"):
        run(fake, texts(1), prove_tiers=True)
    fake.has_reset = True
    run(fake, texts(2))
    fake.keeps = False

    report = run(fake, texts(2), prove_tiers=True)

    assert (report.state, report.num_unproved) == ("cold", 2)


def test_overload_is_waited_out(fake: FakeServer) -> None:
    fake.statuses = [503, 429, 503]

    assert run(fake, texts(2), concurrency=1).state == "warm"


def test_refused_prompt_fails_alone(fake: FakeServer) -> None:
    fake.refuses = "0001"

    report = run(fake, texts(3))

    assert (report.state, report.num_failed, report.num_warmed) == ("cold", 1, 2)
    assert report.failures[0].source == "p.jsonl:1"
    assert report.failures[0].reason.endswith("/v1/completions answered 400: no, 400")


def test_engine_failure_fails_the_prompt(fake: FakeServer) -> None:
    fake.statuses = [500]

    report = run(fake, texts(2), concurrency=1)

    assert (report.num_failed, report.num_warmed) == (1, 1)


def test_wrong_key_ends_at_once(fake: FakeServer) -> None:
    fake.api_key = "secret"

    with pytest.raises(RequestError, match="answered 401: invalid key; give the server's key") as caught:
        run(fake, texts(2), api_key="other-secret")

    assert "other-secret" not in str(caught.value)
    assert run(fake, texts(1), api_key="secret").state == "warm"


def test_missing_endpoint_ends_at_once(fake: FakeServer) -> None:
    fake.statuses = [404] * 10

    with pytest.raises(RequestError, match="404"):
        run(fake, texts(5))

    assert len(fake.sent) == 1


def test_unknown_model_is_named(fake: FakeServer) -> None:
    prompt = Prompt(source="p.jsonl:9", url=COMPLETIONS, body={"prompt": "x" * 40}, model="gpt-x")

    with pytest.raises(ConfigError, match=r"p\.jsonl:9 is for model gpt-x, the server has fake"):
        run(fake, [prompt])
    with pytest.raises(ConfigError, match="serves no model other; it serves fake"):
        run(fake, texts(1), model="other")


def test_nobody_listens() -> None:
    with running(FakeServer()) as gone:
        pass

    with pytest.raises(RequestError, match="gave no answer: Connection refused"):
        run(gone, texts(1))


def test_waits_for_a_server_that_is_not_up() -> None:
    with running(FakeServer()) as gone:
        pass
    started = time.monotonic()

    with pytest.raises(RequestError):
        run(gone, texts(1), wait_s=0.05)

    assert time.monotonic() - started >= 0.05


def test_broken_answer_is_a_failure(fake: FakeServer) -> None:
    fake.breaks_off = True

    with pytest.raises(RequestError, match="gave no usage"):
        run(fake, texts(1))


def test_request_that_hangs_fails_alone(fake: FakeServer) -> None:
    """`timeout_s` bounds each; the rest goes on."""
    fake.hangs_after = 4

    report = run(fake, texts(2), concurrency=1, timeout_s=0.1)

    assert (report.state, report.num_failed, report.is_budget_spent) == ("cold", 1, False)
    assert "gave no answer within 0.1 s" in report.failures[0].reason


def test_answer_that_trickles_is_bounded(fake: FakeServer) -> None:
    """Each byte comes in time, the answer never does."""
    fake.trickles = True
    started = time.monotonic()

    report = run(fake, texts(1), timeout_s=0.2)

    assert (report.state, report.num_failed) == ("cold", 1)
    assert time.monotonic() - started < 5


def test_connections_are_kept(fake: FakeServer) -> None:
    """As many as there are requests at once, whatever the number of requests."""
    run(fake, texts(5), concurrency=1)

    assert len(fake.connections) == 1


def test_budget_ends_a_hanging_server(fake: FakeServer) -> None:
    """Nothing that hangs keeps it any longer; what was not reached is counted, not failed."""
    fake.hangs_after = 3
    started = time.monotonic()

    report = run(fake, texts(10), concurrency=2, budget_s=0.3)

    assert time.monotonic() - started < 2
    assert (report.state, report.is_budget_spent, report.num_failed) == ("cold", True, 0)
    assert report.num_left == 10
    assert report.budget_s == 0.3


def test_budget_ends_a_server_that_accepts_and_says_nothing(fake: FakeServer) -> None:
    fake.hangs_after = 1

    report = run(fake, texts(1), budget_s=0.1)

    assert (report.state, report.num_left) == ("cold", 1)


class Refusing:
    """A transport whose server isn't up, and that takes its time to find that out."""

    name = "http://server"

    def lines(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        time.sleep(0.05)
        raise RequestError("http://server gave no answer: Connection refused")

    def hang_up(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("budget_s", [0.01, 0.07])
def test_budget_ends_the_wait_for_a_server_that_is_not_up(budget_s: float) -> None:
    """As any other end of the budget: the job fails open, and says what it waited for."""
    options = Options(wait_s=60.0, budget_s=budget_s)

    report = Warmup(Server(Refusing(), timeout_s=10.0), texts(2), options, now=NOW).run()

    assert (report.state, report.is_budget_spent, report.num_left, report.num_failed) == ("cold", True, 2, 0)
    assert report.warnings == ("the budget ran out: http://server gave no answer: Connection refused",)


def test_server_that_is_not_up_when_the_wait_is_over_is_an_error() -> None:
    options = Options(wait_s=0.01, budget_s=60.0)

    with pytest.raises(RequestError, match="Connection refused"):
        Warmup(Server(Refusing(), timeout_s=10.0), texts(2), options, now=NOW).run()


@pytest.mark.parametrize(
    ("budget_s", "least_s", "most_s"),
    [(None, FLUSH_TIMEOUT_S, FLUSH_TIMEOUT_S), (60.0, 50.0, 60.0), (0.3, LEAST_FLUSH_S, LEAST_FLUSH_S)],
)
def test_flush_has_what_is_left_of_the_budget(
    fake: FakeServer, budget_s: float | None, least_s: float, most_s: float
) -> None:
    """But time enough for what was computed within it."""
    if budget_s == 0.3:
        fake.hangs_after = 1
    given: list[float] = []

    def flush(timeout_s: float) -> list[str]:
        given.append(timeout_s)
        return []

    run(fake, texts(1), budget_s=budget_s, flush=flush)

    assert least_s <= given[0] <= most_s


def test_budget_keeps_what_is_proved(fake: FakeServer) -> None:
    """Prompts that were resident at their first request are proved already."""
    run(fake, texts(3))
    fake.hangs_after = len(fake.sent) + 4

    report = run(fake, texts(6), concurrency=1, budget_s=1.0)

    assert (report.num_resident, report.num_left) == (3, 3)


def test_shards_split_by_common_start(fake: FakeServer) -> None:
    """Three groups over two workers: each prompt once, a group never torn."""
    starts = ["a" * 300, "b" * 300, "c" * 300]
    prompts = [text(i, starts[i % 3] + f"{i:020}") for i in range(6)]

    reports = [run(fake, prompts, shard=(i, 2)) for i in range(2)]

    assert [r.num_prompts for r in reports] == [4, 2]
    assert [r.num_groups for r in reports] == [2, 1]
    assert [r.shard for r in reports] == ["0/2", "1/2"]
    letters = [chr(ids[0]) for _, ids in fake.sent]
    assert [key for key, _ in itertools.groupby(sorted(letters))] == ["a", "b", "c"]


def test_more_shards_than_groups_is_said(fake: FakeServer) -> None:
    report = run(fake, texts(1), shard=(3, 4))

    assert (report.state, report.num_prompts, fake.sent) == ("warm", 0, [])
    assert "1 groups of prompts with a common start for 4 shards" in report.warnings[0]


def test_shards_need_tokens(fake: FakeServer) -> None:
    fake.has_tokenize = False

    with pytest.raises(ConfigError, match="has no /tokenize"):
        run(fake, texts(2), shard=(0, 2))
    assert run(fake, texts(2)).state == "warm"


def test_dry_run_sends_nothing(fake: FakeServer) -> None:
    shared = SYSTEM * 6

    found = plan(fake, [text(1, shared), text(2, shared + "x" * 20), text(3, "short")])

    assert fake.sent == []
    assert (found.num_prompts, found.num_short) == (3, 1)
    assert found.store_tokens == (len(shared) + 20) // 16 * 16
    assert found.compute_tokens == found.store_tokens
    assert (found.resident_tokens, found.store_bytes) == (None, None)


def test_clock_in_the_template_is_found(fake: FakeServer) -> None:
    """C04: the template writes today's date; position and loss are those of the rendered prompt."""
    fake.template = lambda text: f"Today Date: 05 Mar 2026\n{text}"

    report = run(fake, [chat(1, "why"), chat(2, "how")])

    (found,) = report.volatile
    length = len(fake.sent[0][1])
    assert (found.kind, found.origin, found.num_prompts, found.position) == ("date", "template", 2, 12)
    assert found.lost_tokens in (length, length + 1, length - 1)


def test_date_in_the_prompt_is_found(fake: FakeServer) -> None:
    report = run(fake, [text(1, "x" * 40 + " It is 2026-03-05.")])

    (found,) = report.volatile
    assert (found.origin, found.position, found.lost_tokens) == ("prompt", 47, 58 - 32)


def test_template_that_changes_with_every_rendering(fake: FakeServer) -> None:
    """C04: a counter (or a clock with seconds, or a random id): two renderings differ, and nothing is a hit."""
    ticks = itertools.count(100_000)
    fake.template = lambda text: f"{next(ticks)} {text}"

    report = run(fake, [chat(1, "why")])

    assert (report.state, report.num_unproved) == ("cold", 1)
    assert (report.volatile[0].kind, report.volatile[0].origin, report.volatile[0].position) == (
        "change",
        "template",
        5,
    )
