"""An offline engine for jobs: vLLM's API server in this process, without a port; requests come as JSON lines.

    python -m kvsnap_connector.offline --model MODEL [flags of `vllm serve`]

Standard input holds `{"id", "method", "path", "body"}`; standard output gets `{"id": 0, "ready": {...}}` or
`{"id": 0, "refused": "..."}` once, then `{"id", "status"}`, `{"id", "data"}` and `{"id", "end"}`. Everything else
that prints goes to standard error. End of input ends the engine. What renders and caches is vLLM's own server code
with the same flags, so prompts get the same tokens, and the KV the same identity, as under `vllm serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, tzinfo
from typing import Any, TextIO

from kvsnap_connector.plugin import NAME

CLOCK_PATH = "/kvsnap/clock"


class RefusedError(Exception):
    """The flags are wrong; for people."""


class Replies:
    """Writes one JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def send(self, **message: Any) -> None:
        """Write one; a reader that has gone is none of our business, the end of input follows."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()


def main() -> None:
    """Serve until standard input ends."""
    replies = Replies(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # vLLM and its children print to stdout
    os.environ.pop("VLLM_API_KEY", None)  # nobody but the parent is on the pipe
    try:
        asyncio.run(_serve(sys.argv[1:], replies))
    except RefusedError as error:
        replies.send(id=0, refused=str(error))
        sys.exit(1)


async def _serve(flags: list[str], replies: Replies) -> None:
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app

    args = _parse(flags)
    requests = _read_stdin()
    async with build_async_engine_client(args) as engine:
        tasks = await engine.get_supported_tasks()
        app = build_app(args, tasks, engine.model_config)
        await init_app_state(engine, app.state, args, tasks)
        extra = engine.vllm_config.kv_transfer_config.kv_connector_extra_config
        replies.send(id=0, ready={"model": args.model, "cache_dir": extra.get("cache_dir")})
        running = set()
        async for request in requests:
            task = asyncio.create_task(_answer(app, request, replies))
            running.add(task)
            task.add_done_callback(running.discard)
        for task in running:
            task.cancel()


def _parse(flags: list[str]) -> Any:
    """vLLM's own reading of the server's flags."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    try:
        args = parser.parse_args(flags)
        if getattr(args, "model_tag", None):
            args.model = args.model_tag
        validate_parsed_serve_args(args)
    except SystemExit as error:
        raise RefusedError(f"vLLM doesn't take these flags: {' '.join(flags)}; see its words above") from error
    transfer = args.kv_transfer_config
    if transfer is None or transfer.kv_connector != NAME:
        raise RefusedError(f"--kv-transfer-config names no {NAME}, so nothing would be stored")
    # it has to store, and to load for the proofs, whatever the server's part is; none of this is part of the identity
    transfer.kv_role = "kv_both"
    transfer.kv_connector_extra_config |= {"load_policy": "always", "lookup_seconds": 60}
    args.enable_prompt_tokens_details = True
    args.api_key = None
    args.api_server_count = 1
    args.disable_log_stats = False  # its counters tell where hits came from
    return args


async def _read_stdin() -> AsyncIterator[dict[str, Any]]:
    """Requests from a thread that reads lines, until the input ends."""
    loop = asyncio.get_running_loop()
    found: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            with contextlib.suppress(ValueError):
                loop.call_soon_threadsafe(found.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(found.put_nowait, None)

    threading.Thread(target=read, name="kvsnap-stdin", daemon=True).start()
    while (request := await found.get()) is not None:
        yield request


async def _answer(app: Any, request: dict[str, Any], replies: Replies) -> None:
    """Have the application answer one request, as a web server would."""
    number = request["id"]
    path, _, query = str(request["path"]).partition("?")
    body = b"" if request.get("body") is None else json.dumps(request["body"]).encode()
    is_started = False
    if path == CLOCK_PATH:
        set_clock(float(query.partition("=")[2]))
        replies.send(id=number, status=200)
        replies.send(id=number, end=True)
        return

    is_read = False

    async def receive() -> dict[str, Any]:
        nonlocal is_read
        if is_read:
            await asyncio.Event().wait()  # the client never hangs up
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal is_started
        if message["type"] == "http.response.start":
            is_started = True
            replies.send(id=number, status=message["status"])
        elif message["type"] == "http.response.body":
            if message.get("body"):
                replies.send(id=number, data=bytes(message["body"]).decode(errors="replace"))
            if not message.get("more_body", False):
                replies.send(id=number, end=True)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request["method"],
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(b"host", b"offline"), (b"content-type", b"application/json")],
        "client": ("offline", 0),
        "server": ("offline", 80),
    }
    try:
        await app(scope, receive, send)
    except Exception as error:
        if not is_started:
            replies.send(id=number, status=500)
        replies.send(id=number, data=json.dumps({"error": f"{type(error).__name__}: {error}"}))
        replies.send(id=number, end=True)


def set_clock(offset_s: float) -> None:
    """Move the clock that chat templates see (`strftime_now` of transformers)."""
    import transformers.utils.chat_template_utils as templates

    class Moved(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Any:
            return datetime.now(tz) + timedelta(seconds=offset_s)

    templates.datetime = Moved if offset_s else datetime


if __name__ == "__main__":
    main()
