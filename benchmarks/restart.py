"""What a restart, a new replica and the control cost, on a real server: SmolLM2-135M, prompts of 2,200 tokens.

Rows, in this order; `--rows` chooses some:

    restart    restart_dram_over_before: the first requests after `kill -9`, from DRAM, against DRAM hits before it
    replica    replica_p50_ratio, replica_p95_ratio: the first 50 requests to a new replica against those to its leader
    control    control_throughput: prompts that share nothing, against a server without the connector
    agents     agents_cached_share_ratio: agent runs, interleaved, restart at half; needs a folder of traces
    attach     attach_4gib_extra_s     (no engine; see benchmarks.restart_tiers)
    preload    preload_over_raw        (no engine)

    python -m benchmarks.restart [--rows restart,replica] [--traces FOLDER]
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.agents import MAX_TOKENS, TRACES, cached_share, interleaved, read_runs, traces_folder
from benchmarks.report import emit, note
from benchmarks.restart_tiers import measure_attach, measure_preload
from tools.build_model import SMOLLM2, cache_folder, ensure
from tools.client import Client
from tools.prompts import Prompts
from tools.serving import SHM, Server, kvsnap_json

SHARED = 2_048
"""Tokens that prompts have in common, where they have any: whole chunks."""
TOKENS = 2_200
PREFIXES = 5
RESTARTS = 2
FIRST_REQUESTS = 50
PAIRS = 7
ABREAST = 4
"""Requests of the control, all at the same time."""
CONTROL_TOKENS = 1_100
NEXT_REQUESTS = 100
NOT_STORED = {"kvsnap": {"store": False}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the servers of one row keep their things."""

    model: Path
    folder: Path
    shm: Path
    prompts: Prompts
    traces: Path | None

    def options(self, name: str, **more: Any) -> dict[str, Any]:
        """kvsnap's options of a host."""
        (self.shm / name).mkdir(exist_ok=True)
        cache_dir = str(self.folder / f"cache-{name}")
        found = {"cache_dir": cache_dir, "dram": "6GiB", "dram_dir": str(self.shm / name), "disk": "16GiB"}
        return {**found, "lookup_seconds": 10, **more}

    def server(self, name: str, connector: dict[str, Any] | None, host: str = "", **env: str) -> Server:
        """A server; `name` also names its log."""
        return Server(self.model, self.folder, connector=connector, name=f"{host}{name}", env=env)

    def prompt(self, prefix: int, number: int) -> list[int]:
        """A prompt with the shared prefix `prefix` and an end of its own."""
        end = self.prompts.unique(1000 + number, TOKENS - SHARED)
        return self.prompts.unique(prefix, SHARED) + end


def warm_kernels(client: Client, place: Place) -> None:
    """The first passes of a process are slow whatever they compute; nothing of this is stored, or found by others."""
    for i, tokens in enumerate((TOKENS, TOKENS, 160)):
        client.complete(place.prompts.unique(90_000 + i, tokens), max_tokens=2, kv_transfer_params=NOT_STORED)


def ttft(client: Client, prompt: Sequence[int], *, from_dram: bool = False) -> float:
    """Seconds to the first token; of a hit in DRAM, if that is asked for."""
    if not from_dram:
        return client.complete(prompt, max_tokens=2).ttft_s
    if not client.reset_prefix_cache():
        raise RuntimeError("vLLM did not empty its prefix cache")
    before = client.metrics().prompt_tokens()
    seconds = client.complete(prompt, max_tokens=2).ttft_s
    found = client.metrics().prompt_tokens()
    if found.get("host", 0) - before.get("host", 0) < SHARED:
        raise RuntimeError(f"expected {SHARED} tokens from DRAM; before {before}, after {found}")
    return seconds


def measure_restart(place: Place) -> None:
    """For each prefix the first request after a restart, against the median of hits before it."""
    options = place.options("host")
    ratios = []
    number = 0

    def hits(client: Client, prefix: int) -> float:
        nonlocal number
        number += 1
        return ttft(client, place.prompt(prefix, number), from_dram=True)

    for life in range(RESTARTS):
        with place.server(f"life-{life}", options) as server:
            client = server.client()
            warm_kernels(client, place)
            for prefix in range(PREFIXES):
                ttft(client, place.prompt(prefix, 500 + prefix))
            before = [statistics.median(hits(client, prefix) for _ in range(3)) for prefix in range(PREFIXES)]
        with place.server(f"life-{life}-again", options) as server:
            client = server.client()
            warm_kernels(client, place)
            after = [hits(client, prefix) for prefix in range(PREFIXES)]
        ratios += [b / a for a, b in zip(before, after, strict=True)]
        note(f"  before {[round(s, 3) for s in before]}, after {[round(s, 3) for s in after]} s")
    emit("restart_dram_over_before", statistics.median(ratios), at_most=1.3)


def measure_replica(place: Place) -> None:
    """Both servers get the same 50 requests, by turns; the leader has served their prefixes before."""
    leading = place.options("leader")
    repository = place.folder / "repository"
    with place.server("leader", leading) as leader:
        client = leader.client()
        warm_kernels(client, place)
        for prefix in range(PREFIXES):
            ttft(client, place.prompt(prefix, 500 + prefix))
        cache_dir = leading["cache_dir"]
        export = ["export", "--cache-dir", cache_dir, "--to", str(repository), "--tag", "prod"]
        kvsnap_json(*export, runtime_dir=leader.runtime_dir)
        new = place.options("replica", snapshot=f"{repository}@prod", snapshot_required=True)
        with place.server("replica", new) as replica:
            clients = {"leader": client, "replica": replica.client()}
            times: dict[str, list[float]] = {name: [] for name in clients}
            for number in range(FIRST_REQUESTS):
                prompt = place.prompt(number % PREFIXES, number)
                for name in sorted(clients, reverse=number % 2 == 0):
                    times[name].append(ttft(clients[name], prompt))
            found = clients["replica"].metrics().prompt_tokens()
            if found["computed"] > FIRST_REQUESTS * (TOKENS - SHARED + 128):
                raise RuntimeError(f"the replica computed {found['computed']} tokens: it was not warm")
    for name, share, limit in (("replica_p50_ratio", 0.5, 1.15), ("replica_p95_ratio", 0.95, 1.3)):
        ours, theirs = (percentile(times[who], share) for who in ("replica", "leader"))
        note(f"  {name}: {ours:.3f} s on the replica, {theirs:.3f} s on the leader")
        emit(name, ours / theirs, at_most=limit)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many of the values don't exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def measure_control(place: Place) -> None:
    """Batches of prompts that nobody has seen, to the two servers by turns.

    Both compute on all cores. By itself vLLM keeps one core free, and a second one where there is any connector:
    on two cores it then keeps none, and would be twice as fast with one.
    """
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = place.options("host", dram="2GiB")
    with place.server("with", options, **cores) as ours, place.server("without", None, **cores) as theirs:
        for server in (ours, theirs):
            for i in range(2):
                server.client().complete(place.prompts.unique(90_000 + i, CONTROL_TOKENS), max_tokens=2)
        ratios = []
        used = 0
        for number in range(PAIRS):
            seconds = {}
            for server in (ours, theirs) if number % 2 else (theirs, ours):
                batch = [place.prompts.unique(used + i, CONTROL_TOKENS) for i in range(ABREAST)]
                used += len(batch)
                seconds[server] = batch_seconds(server, batch)
            ratios.append(seconds[theirs] / seconds[ours])
            note(f"  {seconds[ours]:.2f} s with the connector, {seconds[theirs]:.2f} s without")
    emit("control_throughput", statistics.median(ratios), at_least=0.97)


def batch_seconds(server: Server, batch: Sequence[list[int]]) -> float:
    """How long a server takes for all of them at once."""
    clients = [server.client() for _ in batch]
    with ThreadPoolExecutor(len(batch)) as pool:
        began = time.perf_counter()
        for done in [pool.submit(c.complete, p, max_tokens=8) for c, p in zip(clients, batch, strict=True)]:
            done.result()
        return time.perf_counter() - began


def measure_agents(place: Place) -> None:
    """The same requests to two hosts; one of them is killed and started again at half."""
    if place.traces is None:
        note(f"  skipped: no folder of traces (--traces, or the environment variable {TRACES})")
        return
    encoded = [[place.prompts.encode(text) for text in run] for run in read_runs(place.traces)]
    requests = list(interleaved([[ids for ids in run if len(ids) < MAX_TOKENS] for run in encoded]))
    half = len(requests) // 2
    first, following = requests[:half], requests[half : half + NEXT_REQUESTS]
    shares = {}
    for host in ("restarted", "undisturbed"):
        options = place.options(host)
        with place.server("first", options, host) as server:
            cached_share(server.client(), first)
            if host == "undisturbed":
                shares[host] = cached_share(server.client(), following)
        if host == "restarted":
            with place.server("again", options, host) as server:
                shares[host] = cached_share(server.client(), following)
        note(f"  {host}: {shares[host]:.1%} of the prompt tokens of {len(following)} requests came from caches")
    emit("agents_cached_share_ratio", shares["restarted"] / shares["undisturbed"], at_least=0.95)


ROWS: dict[str, Callable[[Place], None]] = {
    "restart": measure_restart,
    "replica": measure_replica,
    "control": measure_control,
    "agents": measure_agents,
    "attach": lambda place: measure_attach(place.folder, place.shm),
    "preload": lambda place: measure_preload(place.folder, place.shm),
}


@contextmanager
def place_for(model: Path, traces: Path | None) -> Iterator[Place]:
    """Fresh folders, gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="restart-", dir=cache_folder()) as folder,
        tempfile.TemporaryDirectory(prefix="kvsnap-bench-", dir=SHM) as shm,
    ):
        yield Place(model=model, folder=Path(folder), shm=Path(shm), prompts=Prompts(model), traces=traces)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a restart and a new replica cost.")
    parser.add_argument("--rows", default=",".join(ROWS), help=f"which, of {', '.join(ROWS)}")
    parser.add_argument("--traces", type=Path, help=f"folder of agent runs as JSONL (else ${TRACES})")
    arguments = parser.parse_args()
    wanted = arguments.rows.split(",")
    if unknown := set(wanted) - set(ROWS):
        parser.error(f"no rows {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no server outlives us
    model = ensure(SMOLLM2)
    for name, measure in ROWS.items():
        if name in wanted:
            note(name)
            with place_for(model, traces_folder(arguments.traces)) as place:
                measure(place)


if __name__ == "__main__":
    main()
