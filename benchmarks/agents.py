"""Replays coding-agent runs, interleaved in time, and looks what a restart costs them.

A folder of traces holds JSONL files: a request a line, with `input` (the prompt as text), `session_id` and `timestamp`.
The runs take turns, request by request: replayed one after another, a restart would cost nothing anyway.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from tools.client import Client

TRACES = "KVSNAP_TRACES"
"""Environment variable: the folder of traces, where none is given."""
MAX_TOKENS = 8_192
MAX_NEW = 1


def traces_folder(given: Path | None) -> Path | None:
    """The folder to read: `given`, else what the environment says; None: neither."""
    if given is None and os.environ.get(TRACES):
        given = Path(os.environ[TRACES])
    return given


def read_runs(folder: Path) -> list[list[str]]:
    """The prompts of each run, in order of time.

    Raises:
        FileNotFoundError: there is none.
    """
    found = defaultdict(list)
    for path in sorted(folder.rglob("*.jsonl")):
        with path.open() as lines:
            for line in lines:
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("input"), str):
                    found[str(row.get("session_id", path.name))].append((row.get("timestamp", 0), row["input"]))
    if not found:
        raise FileNotFoundError(f"{folder} holds no agent runs (JSONL with input and session_id)")
    return [[text for _, text in sorted(rows, key=lambda row: row[0])] for _, rows in sorted(found.items())]


def interleaved(runs: Sequence[Sequence[list[int]]], *, abreast: int = 6) -> Iterator[list[int]]:
    """Requests of a few runs at a time in turn, as a server with that many users sees them."""
    for start in range(0, len(runs), abreast):
        for turn in zip_longest(*runs[start : start + abreast]):
            yield from (prompt for prompt in turn if prompt is not None)


def cached_share(client: Client, prompts: Sequence[list[int]]) -> float:
    """Send the prompts one after another; the share of their tokens that came from any cache."""
    before = client.metrics().prompt_tokens()
    for prompt in prompts:
        client.complete(prompt, max_tokens=MAX_NEW)
    after = client.metrics().prompt_tokens()
    new = {source: after[source] - before.get(source, 0) for source in after}
    return 1 - new["computed"] / sum(new.values())
