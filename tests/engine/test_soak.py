"""Many kills of one engine under load (`make soak`). KVSNAP_SOAK_KILLS: how many; KVSNAP_SOAK_SEED repeats a run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path

import pytest

from tests.disk_fakes import disk_use
from tools.client import Client, Completion, ServerError
from tools.prompts import random_prompt
from tools.serving import Server, kvsnap

pytestmark = [pytest.mark.engine, pytest.mark.soak]

KILLS = int(os.environ.get("KVSNAP_SOAK_KILLS", "20"))
SEED = int(os.environ.get("KVSNAP_SOAK_SEED", str(time.time_ns() % 100_000)))
CAP_BYTES = 96 << 20
"""About 45 chunks of the tiny model in float32: the disk tier evicts all the time."""
BLOCK = 128
CHUNK = 256
ANCHOR = random_prompt(800, 4 * CHUNK + BLOCK + 1)
ANCHOR_HIT = 4 * CHUNK + BLOCK
ANCHOR_HITS = 8
"""More in each life: far more than the load asks for any one of its prompts."""


def settings(cache_dir: Path, dram_dir: Path) -> dict[str, object]:
    """Small tiers, everything written at once: as much motion as possible."""
    return {
        "cache_dir": str(cache_dir),
        "dram": "64MiB",
        "dram_dir": str(dram_dir),
        "disk": CAP_BYTES,
        "persist": "all",
        "load_policy": "always",
        "lookup_seconds": 30,
    }


@contextmanager
def load(server: Server, seed: int) -> Iterator[None]:
    """Prompts that come again and ones that don't, three at a time, some of them aborted."""
    over = threading.Event()

    def work(number: int) -> None:
        rng = random.Random(seed + number)
        while not over.is_set():
            client = Client(server.port, timeout_s=60)
            prompt = random_prompt(900 + rng.randrange(60), CHUNK * rng.randrange(1, 7) + rng.randrange(CHUNK))
            try:
                if rng.random() < 0.2:
                    client.start_and_abort(prompt, after_s=rng.random() / 4, max_tokens=300)
                else:
                    client.complete(prompt, max_tokens=rng.randrange(1, 40))
            except (OSError, HTTPException, ServerError, ValueError):
                time.sleep(0.05)
            finally:
                client.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=120)


def assert_within_cap(cache_dir: Path) -> None:
    """A walk takes time, and may count a shard that goes behind it and one that comes before it: look thrice."""
    used = [disk_use(cache_dir) for _ in range(3)]
    assert min(used) <= CAP_BYTES


def ask_anchor(server: Server) -> tuple[Completion, int]:
    """The prompt that every life asks for, with vLLM's own cache empty; tokens that kvsnap served."""
    client = server.client()
    assert client.reset_prefix_cache()
    before = client.metrics().prompt_tokens()
    answer = client.complete(ANCHOR, max_tokens=8, logprobs=5)
    after = client.metrics().prompt_tokens()
    return answer, sum(after[source] - before.get(source, 0) for source in ("host", "disk"))


def assert_is_sound(cache_dir: Path) -> None:
    """Nothing damaged, within the cap."""
    checked = kvsnap("verify", "--cache-dir", cache_dir, "--read-data")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert_within_cap(cache_dir)


def test_kills_at_random_moments(tiny_model: Path, folder: Path, shm_folder: Path) -> None:
    """Invariant 8, D10, D11: each restart hits, nothing is damaged, no temporary file stays, `du` is within the cap.

    Both tiers are far too small for the load. The anchor is asked for often enough to be hotter than all of that, so
    its eviction is no excuse.
    """
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    cache_dir, dram_dir = folder / "cache", shm_folder / "dram"
    dram_dir.mkdir()
    native: Completion | None = None
    for life in range(KILLS + 1):
        with Server(tiny_model, folder, connector=settings(cache_dir, dram_dir), name=f"life-{life}") as server:
            if native is None:
                server.client().complete(ANCHOR, max_tokens=8, logprobs=5)
                native = server.client().complete(ANCHOR, max_tokens=8, logprobs=5)
            answer, served = ask_anchor(server)
            assert served == ANCHOR_HIT, f"life {life} served {served} tokens"
            assert answer.tokens == native.tokens
            assert answer.choices[0].logprobs[0] == native.choices[0].logprobs[0]
            assert len(list(cache_dir.glob("*/tmp/*"))) == 1, "only the living writer's folder"
            for _ in range(ANCHOR_HITS):
                ask_anchor(server)
            with load(server, SEED + life):
                over = time.monotonic() + rng.uniform(0.2, 6.0)
                while time.monotonic() < over:
                    assert_within_cap(cache_dir)
                    time.sleep(0.05)
                victims = rng.choice(["all", "EngineCore", "Worker"])
                if victims != "all":
                    server.kill_pid(server.pids_named(victims)[0])
                    time.sleep(rng.uniform(0, 0.3))
                server.kill()
        assert_is_sound(cache_dir)


def test_worker_outlives_its_engine(tiny_model: Path, folder: Path, shm_folder: Path) -> None:
    """Invariant 8: a stopped worker of a killed engine goes on beside the next engine; no wrong byte."""
    cache_dir, dram_dir = folder / "outlived", shm_folder / "outlived"
    dram_dir.mkdir()
    options = settings(cache_dir, dram_dir)
    with Server(tiny_model, folder, connector=options, name="old") as old:
        old.client().complete(ANCHOR, max_tokens=8, logprobs=5)
        native = old.client().complete(ANCHOR, max_tokens=8, logprobs=5)
        with load(old, 1):
            time.sleep(2.0)
            (worker,) = old.pids_named("Worker")
            old.kill_pid(worker, signal.SIGSTOP)
            for pid in old.pids():
                if pid != worker:
                    old.kill_pid(pid)
        with Server(tiny_model, folder, connector=options, name="new") as new:
            first, served = ask_anchor(new)
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGCONT)
            with load(new, 2):
                time.sleep(3.0)
            again, served_again = ask_anchor(new)

            assert served_again == ANCHOR_HIT
            assert {first.tokens, again.tokens} == {native.tokens}
            assert again.choices[0].logprobs[0] == native.choices[0].logprobs[0]
            print(f"served right after the start: {served} tokens")
    assert_is_sound(cache_dir)
