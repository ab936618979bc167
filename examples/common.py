"""What the examples share: fresh folders, the command line tool from this tree, rows and tables."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from examples.demo.run import MAX_TOKENS, NOT_STORED, QUESTIONS, Row, measure, note, warm_kernels
from tools.build_model import SMOLLM2, cache_folder, ensure
from tools.prompts import Prompts
from tools.serving import SHM, Server, engine_environment, kvsnap_command

__all__ = [
    "MAX_TOKENS",
    "NOT_STORED",
    "Chats",
    "Row",
    "command",
    "example",
    "json_of",
    "measure",
    "note",
    "options",
    "start_command",
    "table",
    "warm_kernels",
]

HIT_TOKENS = 1_900
"""A request that finds the handbook, whole blocks of it, is served at least so many tokens."""


class Chats:
    """Prompts that share a 2,000-token handbook; no question is asked twice before all were."""

    def __init__(self, model: Path) -> None:
        self.prompts = Prompts(model)
        self._questions = cycle(QUESTIONS)
        self._unique = 0

    def question(self) -> str:
        """The next one."""
        return next(self._questions)

    def take(self, count: int) -> list[list[int]]:
        """Chats that begin with the handbook."""
        return [self.prompts.chat(question) for question in islice(self._questions, count)]

    def strangers(self, count: int) -> list[list[int]]:
        """Prompts as long that share nothing with any other."""
        self._unique += count
        return [self.prompts.unique(self._unique - i, 2_100) for i in range(count)]


def options(folder: Path, shm: Path, name: str, **more: Any) -> dict[str, Any]:
    """kvsnap's options for one host: its cache directory, and its own piece of shared memory."""
    (shm / name).mkdir(exist_ok=True)
    return {
        "cache_dir": str(folder / f"cache-{name}"),
        "dram": "1GiB",
        "dram_dir": str(shm / name),
        "disk": "4GiB",
        "lookup_seconds": 10,
        **more,
    }


def start_command(*arguments: str | Path, runtime_dir: Path) -> subprocess.Popen[str]:
    """Start a command of kvsnap that goes on, such as `sync --follow`; its stdout is a pipe."""
    return subprocess.Popen(
        kvsnap_command(*arguments), env=engine_environment(runtime_dir), stdout=subprocess.PIPE, text=True
    )


def command(*arguments: str | Path, runtime_dir: Path) -> str:
    """Run a command of kvsnap, and show it; what it printed.

    Raises:
        SystemExit: its exit status wasn't 0.
    """
    note(f"$ kvsnap {' '.join(map(str, arguments))}")
    done = subprocess.run(
        kvsnap_command(*arguments),
        env=engine_environment(runtime_dir),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"kvsnap {arguments[0]} exited with {done.returncode}\n{done.stdout}")
    return done.stdout


def json_of(*arguments: str | Path, runtime_dir: Path) -> Any:
    """Run a command of kvsnap with --json; the object that it printed."""
    return json.loads(command(*arguments, "--json", runtime_dir=runtime_dir))


def first_ask(state: str, server: Server, prompt: list[int]) -> Row:
    """The very first request to a server: whatever is slow about first passes is in it."""
    return measure(state, server, [prompt], reset=False)


def table(rows: Sequence[Row]) -> str:
    """For people; also valid Markdown."""
    lines = [
        "| state | first token | against cold | computed | device | DRAM | disk |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        counts = " | ".join(f"{row.tokens.get(source, 0):,}" for source in ("computed", "device", "host", "disk"))
        against = f"{rows[0].ttft_s / row.ttft_s:.1f} x faster"
        lines.append(f"| {row.state} | {row.ttft_s:.3f} s | {against} | {counts} |")
    return "\n".join(lines)


def served(row: Row) -> int:
    """Prompt tokens of a row that came from kvsnap's tiers."""
    return row.tokens.get("host", 0) + row.tokens.get("disk", 0)


def not_hits(rows: Sequence[Row], requests: int) -> list[str]:
    """Rows whose requests were no hits, in words."""
    return [
        f"{row.state}: kvsnap served {served(row)} tokens of {requests} requests"
        for row in rows
        if served(row) < HIT_TOKENS * requests
    ]


@contextmanager
def example_folders(name: str) -> Iterator[tuple[Path, Path]]:
    """A fresh folder that stays, for looking at what the example made, and one in shared memory that goes."""
    folder = cache_folder() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvsnap-example-", dir=SHM) as shm:
        yield folder, Path(shm)


Run = Callable[[Path, Path, Path], tuple[Sequence[Row], Sequence[str]]]
"""(folder, folder in shared memory, model) -> rows of the table, and what would make it a lie."""


def example(name: str, run: Run) -> None:
    """The main program of an example."""
    parser = argparse.ArgumentParser(description=f"Run the example {name}.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    as_json = parser.parse_args().json
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no server outlives us
    model = ensure(SMOLLM2)
    with example_folders(name) as (folder, shm):
        rows, problems = run(folder, shm, model)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print(f"\nSmolLM2-135M, prompts of about 2,100 tokens; tokens by where they came from:\n\n{table(rows)}\n")
        print(f"Caches, logs and snapshots are in {folder}")
    if problems:
        raise SystemExit("\n".join(problems))
