"""A small client of one vLLM server on this machine: completions with a measured time to first token, metrics."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

MODEL_NAME = "model"
IDLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion of a prompt."""

    tokens: tuple[int, ...]
    """The sampled token ids."""
    text: str
    """The same as text."""
    logprobs: tuple[dict[str, float], ...]
    """Per sampled token its top candidates and their log probabilities; empty if none were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one request gave."""

    ttft_s: float
    """Seconds from sending the request to the first token's arrival."""
    total_s: float
    """Seconds from sending the request to the end of the answer."""
    choices: tuple[Choice, ...]
    """One for each of `n`."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """The first choice's token ids."""
        return self.choices[0].tokens

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class ServerError(Exception):
    """The server answered with an error, or not at all."""


class Client:
    """Talks to one server over one kept-alive connection. Not for several threads: give each its own."""

    def __init__(self, port: int, *, timeout_s: float = 600.0) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._used = 0.0

    def close(self) -> None:
        """Close the connection. A request under way is thereby aborted on the server."""
        self._connection.close()

    def get(self, path: str) -> tuple[int, str]:
        """Status and body of a GET."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """Status and body of a POST."""
        return self._exchange("POST", path, body)

    def complete(
        self, prompt: Sequence[int], *, max_tokens: int = 16, logprobs: int | None = None, n: int = 1, **options: Any
    ) -> Completion:
        """Send token ids, stream the answer.

        Greedy and to full length unless `options` (fields of /v1/completions) say otherwise.

        Raises:
            ServerError: the answer wasn't a stream of tokens.
        """
        started = time.perf_counter()
        response = self._start(prompt, max_tokens=max_tokens, logprobs=logprobs, n=n, **options)
        first: float | None = None
        tokens: list[list[int]] = [[] for _ in range(n)]
        texts: list[list[str]] = [[] for _ in range(n)]
        tops: list[list[dict[str, float]]] = [[] for _ in range(n)]
        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            if "error" in event:
                raise ServerError(str(event["error"]))
            for choice in event["choices"]:
                new = choice.get("token_ids") or []
                if new and first is None:
                    first = time.perf_counter()
                tokens[choice["index"]].extend(new)
                texts[choice["index"]].append(choice["text"])
                if choice.get("logprobs"):
                    tops[choice["index"]].extend(choice["logprobs"]["top_logprobs"])
        response.read()
        self._used = time.monotonic()
        if first is None:
            raise ServerError("the answer had no token")
        ended = time.perf_counter()
        return Completion(
            ttft_s=first - started,
            total_s=ended - started,
            choices=tuple(
                Choice(tokens=tuple(tokens[i]), text="".join(texts[i]), logprobs=tuple(tops[i])) for i in range(n)
            ),
        )

    def start_and_abort(self, prompt: Sequence[int], *, after_s: float, **options: Any) -> None:
        """Send a request and hang up after a while, whatever state it is in by then. Closes the connection."""
        self._send(prompt, **options)
        time.sleep(after_s)
        self.close()

    def reset_prefix_cache(self, *, external: bool = False) -> bool:
        """Empty vLLM's own prefix cache (and the connector's, if `external`); tries again while blocks are held."""
        for _ in range(50):
            status, body = self.post(f"/reset_prefix_cache?reset_external={str(external).lower()}")
            if status == 200 and json.loads(body).get("success", True):
                return True
            time.sleep(0.02)
        return False

    def metrics(self) -> Metrics:
        """The server's metrics now."""
        status, body = self.get("/metrics")
        if status != 200:
            raise ServerError(f"/metrics answered {status}")
        return Metrics.parse(body)

    def _send(
        self, prompt: Sequence[int], *, max_tokens: int = 16, logprobs: int | None = None, n: int = 1, **options: Any
    ) -> None:
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            "n": n,
            "logprobs": logprobs,
            **options,
        }
        self._drop_if_idle()
        if self._connection.sock is None:
            self._connection.connect()
            connected = cast("socket.socket", self._connection.sock)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})

    def _start(self, prompt: Sequence[int], **options: Any) -> http.client.HTTPResponse:
        self._send(prompt, **options)
        response = self._connection.getresponse()
        if response.status != 200:
            raise ServerError(f"/v1/completions answered {response.status}: {response.read().decode()[:2000]}")
        return response

    def _drop_if_idle(self) -> None:
        """The server closes a connection that was idle for some seconds; don't run into that."""
        if time.monotonic() - self._used > IDLE_SECONDS:
            self._connection.close()

    def _exchange(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self._drop_if_idle()
        try:
            self._connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = self._connection.getresponse()
            text = response.read().decode()
            self._used = time.monotonic()
            return response.status, text
        except (OSError, http.client.HTTPException):
            self._connection.close()
            raise


_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape of a server's /metrics."""

    samples: tuple[tuple[str, dict[str, str], float], ...]
    """(name, labels, value) each."""

    @classmethod
    def parse(cls, text: str) -> Metrics:
        """Read Prometheus' text format; comments and timestamps are dropped."""
        found = []
        for line in text.splitlines():
            match = _SAMPLE.match(line)
            if match:
                labels = dict(_LABEL.findall(match["labels"] or ""))
                found.append((match["name"], labels, float(match["value"])))
        return cls(tuple(found))

    def total(self, name: str, **labels: str) -> float:
        """The sum over all samples of that name that have these labels; 0 if there is none."""
        return sum(
            value for n, have, value in self.samples if n == name and all(have.get(k) == v for k, v in labels.items())
        )

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sums of a metric for each value of one label."""
        sums: dict[str, float] = {}
        for n, have, value in self.samples:
            if n == name and label in have:
                sums[have[label]] = sums.get(have[label], 0.0) + value
        return sums

    def prompt_tokens(self) -> dict[str, int]:
        """Where prompt tokens came from so far: `computed`, and vLLM's cache sources (`device`, `host`, `disk`)."""
        cached = self.by_label("vllm:prompt_tokens_cached_by_source_total", "source")
        counts = {source: int(value) for source, value in cached.items()}
        counts["computed"] = int(self.total("vllm:prompt_tokens_total")) - sum(counts.values())
        return counts
