"""Stands in for `kvsnap_connector.offline`: the same lines on its pipes, the fake server's cache behind them.

Its first argument that starts with `fake:` says how it behaves.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from tests.warmup.fake_server import FakeServer


def main() -> None:
    behaviour = next((arg[5:] for arg in sys.argv if arg.startswith("fake:")), "")
    if behaviour == "dies":
        print("the model file is broken", file=sys.stderr)
        sys.exit(1)
    if behaviour == "refuses":
        send(id=0, refused="no such flag")
        sys.exit(1)
    if behaviour == "loads":  # as an engine does: its input isn't read before it is up
        print(os.getpid(), file=sys.stderr, flush=True)
        time.sleep(600)
    if behaviour == "never ready":
        sys.stdin.read()
        return
    fake = FakeServer()
    print("not for the parent")
    send(id=0, ready={"model": "fake", "cache_dir": None})
    offset = 0.0
    for line in sys.stdin:
        request = json.loads(line)
        number, path, body = request["id"], request["path"], request["body"]
        if path.startswith("/kvsnap/clock"):
            offset = float(path.rpartition("=")[2])
            reply(number, 200, "")
        elif path == "/v1/models":
            reply(number, 200, json.dumps({"data": [{"id": "fake"}]}))
        elif path == "/metrics":
            reply(number, 200, fake.metrics())
        elif path == "/reset_prefix_cache":
            reply(number, 200, json.dumps({"success": True}))
        elif path == "/tokenize":
            if behaviour == "clock":
                year = time.gmtime(time.time() + offset).tm_year
                fake.template = lambda text, year=year: f"It is the year {year}. {text}"  # type: ignore[misc]
            reply(number, 200, json.dumps({"tokens": fake.render(path, body)}))
        elif path.startswith("/v1/"):
            if behaviour == "hangs at work":
                print(os.getpid(), file=sys.stderr, flush=True)
                continue
            if behaviour == "dies at work":
                sys.exit(9)
            threading.Thread(target=generate, args=(fake, number, path, body), daemon=True).start()
        else:
            reply(number, 404, "{}")


def generate(fake: FakeServer, number: int, path: str, body: dict[str, Any]) -> None:
    ids = fake.render(path, body)
    cached = fake.compute(ids)
    usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": cached}}
    event = json.dumps({"choices": [{"text": "x"}], "usage": usage})
    send(id=number, status=200)
    text = f"data: {event}\n\ndata: [DONE]\n\n"
    send(id=number, data=text[:20])
    send(id=number, data=text[20:])
    send(id=number, end=True)


def reply(number: int, status: int, text: str) -> None:
    send(id=number, status=status)
    if text:
        send(id=number, data=text)
    send(id=number, end=True)


_lock = threading.Lock()


def send(**message: Any) -> None:
    with _lock:
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
