"""What a warm-up needs of vLLM's OpenAI-compatible API."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsnap.errors import ConfigError
from kvsnap.warmup.prompts import CHAT, TOKENIZE_FIELDS, Prompt
from kvsnap.warmup.transport import MAX_ERROR_BYTES, RequestError, Transport

RETRY_STATUSES = {429, 502, 503, 504}
FATAL_STATUSES = {401, 403, 404}
RETRIES = 5
FIRST_DELAY_S = 0.1
SETTLE_SECONDS = 3.0
_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one request told of its prompt."""

    ttft_s: float
    """From sending to the first token."""
    prompt_tokens: int
    cached_tokens: int | None
    """Prompt tokens that were not computed, as vLLM counts them; None where it doesn't say."""
    token_ids: tuple[int, ...] | None
    """The prompt as it was rendered, where the server tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """A prompt's tokens."""

    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """Each token's text as the vocabulary has it; empty where not asked for."""


@dataclass(frozen=True, slots=True)
class Counters:
    """The server's counters of prompt tokens."""

    prompt: float
    cached: float
    by_source: Mapping[str, float]
    """Cached ones by where they came from: `device`, and the connector's tiers `host` and `disk`."""


class Server:
    """One vLLM. Used from several threads."""

    def __init__(self, transport: Transport, *, timeout_s: float, deadline: float | None = None) -> None:
        self.transport = transport
        self.deadline = deadline
        """No request is waited for any longer (monotonic clock)."""
        self._timeout_s = timeout_s
        self.models: tuple[str, ...] = ()
        """Names that it serves; known after `connect`."""
        self.model = ""
        """The one that prompts without a name are for."""

    def connect(self, model: str | None, *, wait_s: float = 0.0) -> None:
        """Find out what it serves; try again for `wait_s` while it isn't up.

        Raises:
            RequestError: it doesn't answer, or refuses. `is_timeout` where that is how the time for all ended.
            ConfigError: it doesn't serve `model`.
        """
        deadline = time.monotonic() + wait_s
        if self.deadline is not None:
            deadline = min(deadline, self.deadline)
        reason: RequestError | None = None
        while True:
            try:
                found = self._json("GET", "/v1/models", None, what="the list of models")
                break
            except RequestError as error:
                reason = reason if reason is not None and error.is_timeout else error
                if error.status in FATAL_STATUSES:
                    raise
                if self.deadline is not None and time.monotonic() >= self.deadline:
                    raise RequestError(str(reason), status=reason.status, is_timeout=True) from None
                if time.monotonic() >= deadline:
                    raise
                time.sleep(min(0.5, max(deadline - time.monotonic(), 0.0)))
        try:
            self.models = tuple(str(entry["id"]) for entry in found["data"])
        except (KeyError, TypeError):
            raise RequestError(f"{self.transport.name}/v1/models is not the answer of a vLLM server") from None
        if not self.models:
            raise RequestError(f"{self.transport.name} serves no model")
        if model is not None and model not in self.models:
            raise ConfigError(f"{self.transport.name} serves no model {model}; it serves {', '.join(self.models)}")
        self.model = model or self.models[0]

    def block_tokens(self) -> int | None:
        """Tokens of one KV block; None where the server has no metrics."""
        try:
            samples = self._metrics()
        except RequestError as error:
            if error.status is None:
                raise
            return None
        for name, labels, _ in samples:
            if name == "vllm:cache_config_info" and labels.get("block_size", "").isdigit():
                return int(labels["block_size"]) or None
        return None

    def counters(self) -> Counters | None:
        """Prompt tokens so far; None where the server has no such metrics."""
        try:
            samples = self._metrics()
        except RequestError as error:
            if error.status is None:
                raise
            return None
        sums: dict[str, float] = {}
        by_source: dict[str, float] = {}
        for name, labels, value in samples:
            sums[name] = sums.get(name, 0.0) + value
            if name == "vllm:prompt_tokens_cached_by_source_total" and "source" in labels:
                by_source[labels["source"]] = by_source.get(labels["source"], 0.0) + value
        if "vllm:prompt_tokens_total" not in sums or "vllm:prompt_tokens_cached_total" not in sums:
            return None
        return Counters(sums["vllm:prompt_tokens_total"], sums["vllm:prompt_tokens_cached_total"], by_source)

    def tokenize(self, prompt: Prompt, *, with_pieces: bool = False) -> Rendered | None:
        """Render and tokenise as a request would be; None where the server doesn't offer it.

        Raises:
            RequestError: it refused this prompt.
        """
        if (ids := prompt.token_ids) is not None:
            return Rendered(token_ids=tuple(ids), pieces=())
        body: dict[str, Any] = {"model": self._model_of(prompt), "return_token_strs": with_pieces}
        body |= {field: prompt.body[field] for field in TOKENIZE_FIELDS if field in prompt.body}
        body["messages" if prompt.url == CHAT else "prompt"] = prompt.body[
            "messages" if prompt.url == CHAT else "prompt"
        ]
        try:
            found = self._json("POST", "/tokenize", body, what="the tokens")
        except RequestError as error:
            if error.status in (404, 405, 501):
                return None
            raise
        try:
            pieces = tuple(str(piece) for piece in found.get("token_strs") or ())
            return Rendered(token_ids=tuple(int(i) for i in found["tokens"]), pieces=pieces)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise RequestError(f"{self.transport.name}/tokenize is not the answer of a vLLM server") from None

    def chat_template(self) -> str | None:
        """The text of the chat template, where the server shows it (--enable-tokenizer-info-endpoint)."""
        try:
            found = self._json("GET", "/tokenizer_info", None, what="the chat template")
        except RequestError:
            return None
        template = found.get("chat_template") if isinstance(found, dict) else None
        return template if isinstance(template, str) else None

    def reset_prefix_cache(self) -> bool:
        """Empty vLLM's own prefix cache, not the connector's tiers; False where the server doesn't offer it."""
        for attempt in range(50):
            try:
                found = self._json("POST", "/reset_prefix_cache", None, what="the reset")
            except RequestError as error:
                if error.status in (404, 405):
                    return False
                raise
            if found.get("success", True):
                return True
            time.sleep(min(0.02 * (attempt + 1), 0.2))
        return False

    def send(self, prompt: Prompt) -> Answer:
        """Have one token generated. Tries again while the server is overloaded.

        Raises:
            RequestError: refused, or no answer.
        """
        delay = FIRST_DELAY_S
        for attempt in range(RETRIES):
            try:
                return self._send_once(prompt)
            except RequestError as error:
                is_passing = error.status in RETRY_STATUSES or (error.status is None and not error.is_timeout)
                if not is_passing or error.is_final or attempt == RETRIES - 1:
                    raise
            time.sleep(delay)
            delay *= 2
        raise AssertionError("unreachable")

    def cached_by_counters(self, before: Counters, prompt_tokens: int) -> int | None:
        """Cached tokens of the one request since `before`, by the server's counters; None if they don't move.

        The counters follow an answer by a moment, so this waits until they have all its prompt tokens.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            now = self.counters()
            if now is None:
                return None
            if now.prompt - before.prompt >= prompt_tokens:
                return min(int(now.cached - before.cached), prompt_tokens)
            time.sleep(0.02)
        return None

    def _time_left(self, most_s: float) -> float:
        left = most_s if self.deadline is None else min(most_s, self.deadline - time.monotonic())
        if left <= 0:
            raise RequestError(f"there is no time left to ask {self.transport.name}", is_timeout=True)
        return min(left, self._timeout_s)

    def _model_of(self, prompt: Prompt) -> str:
        return prompt.model or self.model

    def _send_once(self, prompt: Prompt) -> Answer:
        body = {
            **prompt.body,
            "model": self._model_of(prompt),
            "max_tokens": 1,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        started = time.perf_counter()
        first: float | None = None
        usage: Mapping[str, Any] | None = None
        ids: tuple[int, ...] | None = None
        with self.transport.lines("POST", prompt.url, body, timeout_s=self._time_left(self._timeout_s)) as (
            status,
            lines,
        ):
            if status != 200:
                raise _refusal(status, b"".join(lines), f"{self.transport.name}{prompt.url}")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    continue  # to the end, so that the connection can be used again
                event = _parsed(data, self.transport.name)
                if "error" in event:
                    raise RequestError(f"the server failed: {_message(event)}", status=500)
                if first is None and any(_has_token(choice) for choice in event.get("choices") or ()):
                    first = time.perf_counter()
                if event.get("prompt_token_ids"):
                    ids = tuple(event["prompt_token_ids"])
                for choice in event.get("choices") or ():
                    if choice.get("prompt_token_ids"):
                        ids = tuple(choice["prompt_token_ids"])
                usage = event.get("usage") or usage
        if usage is None:
            raise RequestError(f"{self.transport.name}{prompt.url} gave no usage, expected that of a vLLM server")
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Answer(
            ttft_s=(first if first is not None else time.perf_counter()) - started,
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=None if cached is None else int(cached),
            token_ids=ids,
        )

    def _metrics(self) -> list[tuple[str, dict[str, str], float]]:
        text = self._whole("GET", "/metrics", None).decode(errors="replace")
        return [
            (match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"]))
            for line in text.splitlines()
            if line.startswith("vllm:") and (match := _SAMPLE.match(line))
        ]

    def _json(self, method: str, path: str, body: Mapping[str, Any] | None, *, what: str) -> Any:
        data = self._whole(method, path, body)
        try:
            return json.loads(data)
        except ValueError:
            raise RequestError(f"{self.transport.name}{path}: expected {what} as JSON, found {data[:60]!r}") from None

    def _whole(self, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        with self.transport.lines(method, path, body, timeout_s=self._time_left(60.0)) as (status, lines):
            data = b"".join(lines)
        if status != 200:
            raise _refusal(status, data, self.transport.name + path)
        return data


def _has_token(choice: Mapping[str, Any]) -> bool:
    """Whether an event carries the sampled token; a chat's first event carries only the role."""
    if choice.get("token_ids") or choice.get("text") or choice.get("finish_reason"):
        return True
    delta = choice.get("delta") or {}
    return any(value for name, value in delta.items() if name != "role")


def _parsed(data: bytes, name: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise RequestError(f"{name} sent an event that is no JSON object: {data[:60]!r}")
    return event


def _refusal(status: int, data: bytes, where: str) -> RequestError:
    text = data[:MAX_ERROR_BYTES].decode(errors="replace").strip()
    with contextlib.suppress(ValueError, AttributeError):
        text = _message(json.loads(data))
    hint = ""
    if status in (401, 403):
        hint = "; give the server's key with --api-key or KVSNAP_API_KEY"
    return RequestError(f"{where} answered {status}: {text[:300] or 'nothing more'}{hint}", status=status)


def _message(event: Any) -> str:
    error = event.get("error", event.get("detail", event))
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
