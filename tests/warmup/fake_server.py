"""A server as warm-ups see vLLM: its endpoints, a prefix cache, counters; one token per character, 16 to a block."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK = 16
GENERATE = ("/v1/completions", "/v1/chat/completions")
BEYOND_TOKENIZE = ("documents", "reasoning_effort", "response_format", "tool_choice")
"""What a chat template may write that /tokenize has no fields for."""


@dataclass
class FakeServer:
    """State and behaviour; change the fields to make it behave otherwise."""

    models: tuple[str, ...] = ("fake",)
    api_key: str | None = None
    tells_details: bool = True
    has_metrics: bool = True
    has_tokenize: bool = True
    has_reset: bool = False
    keeps: bool = True
    """False: nothing is ever a hit."""
    statuses: list[int] = field(default_factory=list)
    """What the next generations are answered with, instead of 200."""
    refuses: str | None = None
    """A prompt with this text in it is a bad request."""
    breaks_off: bool = False
    """Answers end before their usage."""
    delay_s: float = 0.0
    trickles: bool = False
    """Answers come a byte at a time, without an end."""
    hangs_after: int | None = None
    """Generations from this one on never answer."""
    template: Callable[[str], str] = lambda text: text
    port: int = 0
    sent: list[tuple[str, list[int]]] = field(default_factory=list)
    """Path and tokens of all generations, in order of arrival."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: set[tuple[str, int]] = field(default_factory=set)
    most_at_once: int = 0
    blocks: set[tuple[int, ...]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    release: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    now: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def render(self, path: str, body: dict[str, Any]) -> list[int]:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str):
            return [ord(char) for char in prompt]
        tools = json.dumps(body["tools"]) if body.get("tools") else ""
        text = tools + "".join(f"<{m['role']}>{m['content']}\n" for m in body["messages"])
        text += "<assistant>" if body.get("add_generation_prompt", True) else ""
        text = "".join(f"{name}={body[name]}" for name in BEYOND_TOKENIZE if name in body) + text
        return [ord(char) for char in self.template(text)]

    def metrics(self) -> str:
        return "".join(
            f"{line}\n"
            for line in (
                "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.",
                f'vllm:cache_config_info{{block_size="{BLOCK}",engine="0"}} 1.0',
                f'vllm:prompt_tokens_total{{engine="0"}} {self.counts["prompt"]}',
                f'vllm:prompt_tokens_cached_total{{engine="0"}} {self.counts["cached"]}',
                f'vllm:prompt_tokens_cached_by_source_total{{source="device"}} {self.counts["cached"]}',
            )
        )

    def compute(self, ids: list[int]) -> int:
        """Cached tokens of a prompt; what it lacked is there afterwards."""
        with self.lock:
            cached = 0
            for end in range(BLOCK, len(ids), BLOCK):
                if tuple(ids[:end]) not in self.blocks:
                    break
                cached = end
            if self.keeps:
                self.blocks.update(tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK))
            self.counts.update(prompt=len(ids), cached=cached)
            return cached


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Http

    def do_GET(self) -> None:
        self._serve({})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._serve(json.loads(data) if data else {})

    def _serve(self, body: dict[str, Any]) -> None:
        fake = self.server.fake
        fake.connections.add(self.client_address)
        if fake.api_key is not None and self.headers.get("Authorization") != f"Bearer {fake.api_key}":
            self._answer(401, {"error": {"message": "invalid key"}})
        elif self.path == "/v1/models":
            self._answer(200, {"data": [{"id": model} for model in fake.models]})
        elif self.path == "/metrics" and fake.has_metrics:
            self._answer(200, fake.metrics())
        elif self.path == "/tokenize" and fake.has_tokenize:
            ids = fake.render(self.path, body)
            pieces = [chr(i).replace(" ", "\u0120").replace("\n", "\u010a") for i in ids]
            self._answer(200, {"tokens": ids, "count": len(ids), "token_strs": pieces})
        elif self.path == "/reset_prefix_cache" and fake.has_reset:
            fake.blocks.clear()
            self._answer(200, {"success": True})
        elif self.path in GENERATE:
            self._generate(fake, body)
        else:
            self._answer(404, {"detail": "Not Found"})

    def _generate(self, fake: FakeServer, body: dict[str, Any]) -> None:
        ids = fake.render(self.path, body)
        with fake.lock:
            fake.sent.append((self.path, ids))
            fake.bodies.append(body)
            number = len(fake.sent)
            fake.now += 1
            fake.most_at_once = max(fake.most_at_once, fake.now)
            status = fake.statuses.pop(0) if fake.statuses else 200
        try:
            if fake.hangs_after is not None and number >= fake.hangs_after:
                fake.release.wait(30)
                self.close_connection = True
                return
            if fake.trickles:
                self._trickle(fake)
                return
            time.sleep(fake.delay_s)
            if fake.refuses and fake.refuses in "".join(map(chr, ids)):
                status = 400
            if status != 200:
                self._answer(status, {"error": {"message": f"no, {status}"}})
                return
            cached = fake.compute(ids)
        finally:
            with fake.lock:
                fake.now -= 1
        choice = {"index": 0, "text": "x", "delta": {"role": "assistant", "content": "x"}, "prompt_token_ids": ids}
        usage: dict[str, Any] = {"prompt_tokens": len(ids), "completion_tokens": 1}
        if fake.tells_details:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}][: 1 if fake.breaks_off else 2]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        self._answer(200, text)

    def _trickle(self, fake: FakeServer) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        while not fake.release.wait(0.01):
            self.wfile.write(b"d")

    def _answer(self, status: int, body: dict[str, Any] | str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    fake: FakeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the game."""


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Have it listen on a loopback port."""
    http = Http(("127.0.0.1", 0), Handler)
    http.fake = fake
    fake.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.release.set()
        http.shutdown()
        http.server_close()
        thread.join()
