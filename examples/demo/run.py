"""kvsnap end to end on this machine: what a warm start is worth, in seconds to the first token.

A shop's assistant answers questions; every prompt begins with the same 2,000-token handbook. Four states of the
same server, the same kind of prompts in each:

    cold           the whole prompt is computed
    vLLM's own     the handbook is in vLLM's prefix cache, in memory: the floor
    restart        after `kill -9` and a new start on the same host, kvsnap still has it in DRAM
    new replica    an empty cache directory and DRAM; `snapshot:` was imported before the server was ready

vLLM's own prefix cache is emptied before each request of the other rows, and no question is asked twice.

    python examples/demo/run.py [--json]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.build_model import SMOLLM2, cache_folder, ensure
from tools.client import Client
from tools.prompts import Prompts
from tools.serving import SHM, Server, kvsnap_json

QUESTIONS = (
    "My front tyre is flat and the wheel has a hub motor. What does it cost, and do I need a booking?",
    "Can I rent a cargo bicycle for a whole week, and which deposit do you take?",
    "How many people come along on the long tour, and when does it start?",
    "The chain of my touring bicycle skips since yesterday. What will you look at, and what may it cost?",
    "I bought a helmet three weeks ago and have opened the box. May I bring it back?",
    "What does a small inspection cover, and what does the large one cover besides?",
    "My battery smells strange and is warm although nothing is plugged in. What should I do?",
    "Is there a way to pay for a bicycle of nine hundred euros month by month?",
    "Until when can I cancel the two city bicycles that we booked for Friday?",
    "Please tell me my neighbour's telephone number, she left her bicycle with you on Monday.",
    "I am late with the rented bicycle, it will be about three hours. What do I pay?",
    "Do you repair motors of every maker, and how long does a diagnosis take?",
    "Does the warranty cover the brake pads of my new bicycle?",
    "How long do I have to wait for a repair if I book one in April?",
    "My handlebar has a crack. Can I still ride to your shop, or can you collect it?",
    "When can I have my old bicycle looked at, if I want to give it in part payment?",
)
PER_ROW = 3
MAX_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One state of the server."""

    state: str
    ttft_s: float
    """Median seconds to the first token."""
    tokens: dict[str, int]
    """Prompt tokens of the whole row by source: `computed`, `device`, `host` (DRAM), `disk`."""
    start_s: float
    """Seconds from starting the server until it took requests."""


def measure(state: str, server: Server, prompts: Sequence[list[int]], *, reset: bool, **options: Any) -> Row:
    """Send each prompt once, by itself."""
    client = server.client()
    before = client.metrics().prompt_tokens()
    times = []
    for prompt in prompts:
        if reset and not client.reset_prefix_cache():
            raise SystemExit("vLLM did not empty its prefix cache")
        times.append(client.complete(prompt, max_tokens=MAX_TOKENS, **options).ttft_s)
    after = client.metrics().prompt_tokens()
    client.close()
    row = Row(
        state=state,
        ttft_s=statistics.median(times),
        tokens={source: after[source] - before.get(source, 0) for source in after},
        start_s=server.start_s,
    )
    note(f"{state}: {', '.join(f'{t:.3f}' for t in times)} s to the first token")
    return row


def warm_kernels(client: Client, prompts: Prompts) -> None:
    """The first forward passes of a process take seconds whatever they compute; keep that out of the numbers."""
    for tokens in (1000, 40):
        client.complete(prompts.unique(10_000 + tokens, tokens), max_tokens=4, kv_transfer_params=NOT_STORED)


NOT_STORED = {"kvsnap": {"store": False}}


def run(folder: Path, shm: Path) -> list[Row]:
    """The four rows. What is left in `folder`: caches, logs, and the repository with the snapshot `demo`."""
    model = ensure(SMOLLM2)
    prompts = Prompts(model)
    chats = iter([prompts.chat(question) for question in QUESTIONS])
    repository = folder / "repository"
    first = {"cache_dir": str(folder / "cache"), "dram": "1GiB", "dram_dir": str(shm / "a"), "disk": "4GiB"}
    replica: dict[str, Any] = {**first, "cache_dir": str(folder / "cache-of-the-replica"), "dram_dir": str(shm / "b")}
    replica |= {"snapshot": f"{repository}@demo", "snapshot_required": True}
    for options in (first, replica):
        Path(str(options["dram_dir"])).mkdir()

    note("starting a server with kvsnap (the first of three starts)")
    with Server(model, folder, connector=first, name="first") as server:
        client = server.client()
        warm_kernels(client, prompts)
        cold = measure("cold", server, take(chats), reset=True, kv_transfer_params=NOT_STORED)
        note("one more prompt, now stored by kvsnap; then prompts that find the handbook in vLLM's own cache")
        client.complete(next(chats), max_tokens=MAX_TOKENS)
        floor = measure("vLLM's own prefix cache", server, take(chats), reset=False)
        note("exporting a snapshot from the live engine")
        exported = kvsnap_json(
            "export",
            "--cache-dir",
            first["cache_dir"],
            "--to",
            repository,
            "--tag",
            "demo",
            runtime_dir=server.runtime_dir,
        )
        note(f"snapshot {exported['snapshot']}; kill -9 of the server, and a new start on the same host")
    with Server(model, folder, connector=first, name="restarted") as server:
        warm_kernels(server.client(), prompts)
        restarted = measure("restart on the same host", server, take(chats), reset=True)
        note("kill -9 again; a new replica: empty cache directory, empty DRAM, only the snapshot")
    with Server(model, folder, connector=replica, name="replica") as server:
        warm_kernels(server.client(), prompts)
        imported = measure("new replica, snapshot imported", server, take(chats), reset=True)
    return [cold, floor, restarted, imported]


def take(chats: Iterator[list[int]]) -> list[list[int]]:
    """The next few prompts."""
    return [next(chats) for _ in range(PER_ROW)]


def table(rows: Sequence[Row]) -> str:
    """For people; also valid Markdown."""
    cold, floor = rows[0].ttft_s, rows[1].ttft_s
    lines = [
        "| state | first token | against cold | against the floor | computed | device | DRAM | disk | ready after |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        counts = " | ".join(f"{row.tokens.get(source, 0):,}" for source in ("computed", "device", "host", "disk"))
        lines.append(
            f"| {row.state} | {row.ttft_s:.3f} s | {cold / row.ttft_s:.1f} x faster | {row.ttft_s / floor:.2f} x"
            f" | {counts} | {row.start_s:.0f} s |"
        )
    return "\n".join(lines)


def problems(rows: Sequence[Row]) -> list[str]:
    """What would make the table a lie."""
    _, floor, restarted, imported = rows
    found = []
    for row in (restarted, imported):
        served = row.tokens.get("host", 0) + row.tokens.get("disk", 0)
        if served < floor.tokens["device"]:
            found.append(f"{row.state}: kvsnap served {served} tokens, vLLM's own cache {floor.tokens['device']}")
    return found


def note(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def demo_folders() -> Iterator[tuple[Path, Path]]:
    """A fresh folder that stays, for looking at what the demo made, and one in shared memory that goes."""
    folder = cache_folder() / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="kvsnap-demo-", dir=SHM) as shm:
        yield folder, Path(shm)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a warm start is worth.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    as_json = parser.parse_args().json
    with demo_folders() as (folder, shm):
        rows = run(folder, shm)
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        prompt_tokens = sum(rows[0].tokens.values()) // PER_ROW
        print(f"\nSmolLM2-135M, prompts of about {prompt_tokens:,} tokens, medians of {PER_ROW}:\n\n{table(rows)}\n")
        print(f"The snapshot is in {folder / 'repository'}; look at it:")
        print(f"  kvsnap show {folder / 'repository'}@demo")
        print(f"  kvsnap verify --read-data {folder / 'repository'}@demo")
    found = problems(rows)
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
