"""Several lives of one cache directory: killed servers, restarts, damage, other models, replicas.

The first server stores (`kv_producer`) and is killed under load; each test then starts another one, on its directory or
on a copy of it.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from kvsnap.keys import KeyChain, root_key
from kvsnap.shard import read_header
from tools.client import Client, Completion, ServerError
from tools.prompts import random_prompt
from tools.serving import Server, kvsnap, kvsnap_json

pytestmark = pytest.mark.engine

BLOCK = 128
CHUNK = 256
PROMPT_TOKENS = 5 * CHUNK + BLOCK + 9
HIT_TOKENS = 5 * CHUNK + BLOCK
FLUSHED = [random_prompt(600 + i, PROMPT_TOKENS) for i in range(3)]
UNFLUSHED = random_prompt(650, PROMPT_TOKENS)


@dataclass
class FirstLife:
    """What the first server left behind."""

    cache_dir: Path
    dram_dir: Path
    cold: dict[int, Completion] = field(default_factory=dict)
    """By number of the prompt (UNFLUSHED is the last): everything computed."""
    native: dict[int, Completion] = field(default_factory=dict)
    """With a hit of vLLM's own prefix cache."""


def options(cache_dir: Path, dram_dir: Path, **more: Any) -> dict[str, Any]:
    """kvsnap's options for these tests."""
    dram_dir.mkdir(exist_ok=True)
    return {
        "cache_dir": str(cache_dir),
        "dram": "1GiB",
        "dram_dir": str(dram_dir),
        "disk": "1GiB",
        "load_policy": "always",
        "lookup_seconds": 30,
        **more,
    }


def ask(client: Client, prompt: Sequence[int], **more: Any) -> Completion:
    """Eight greedy tokens and the candidates of each."""
    return client.complete(prompt, max_tokens=8, logprobs=5, **more)


def same(one: Completion, other: Completion) -> bool:
    """The same tokens, and the same log probabilities of the first."""
    return one.tokens == other.tokens and one.choices[0].logprobs[0] == other.choices[0].logprobs[0]


def served(client: Client, prompt: Sequence[int], **more: Any) -> tuple[Completion, Counter[str]]:
    """Answer with an empty prefix cache of vLLM's own, and the prompt's tokens by source."""
    assert client.reset_prefix_cache()
    before = Counter(client.metrics().prompt_tokens())
    answer = ask(client, prompt, **more)
    return answer, Counter(client.metrics().prompt_tokens()) - before


@contextmanager
def load(server: Server, seed: int) -> Iterator[None]:
    """Long prompts without a pause, two at a time, until the server is gone or the context ends."""
    over = threading.Event()

    def work(number: int) -> None:
        client = Client(server.port, timeout_s=60)
        with suppress(OSError, HTTPException, ServerError, ValueError):
            while not over.is_set():
                number += 2
                client.complete(random_prompt(number, 6 * CHUNK), max_tokens=2)
        client.close()

    threads = [threading.Thread(target=work, args=(seed + i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(timeout=90)


def kill_under_load(server: Server, seed: int) -> None:
    """`kill -9` in the middle of work."""
    with load(server, seed):
        time.sleep(1.5)
        server.kill()


def stored_keys(cache_dir: Path) -> list[str]:
    """Keys of all chunks in all shards."""
    return [chunk.key.hex() for path in cache_dir.glob("*/shards/*") for chunk in read_header(path, expect=None).chunks]


@pytest.fixture(scope="module")
def first(tiny_model: Path, folder: Path, shm_folder: Path) -> FirstLife:
    """A server that only stores: three prompts on disk, one more in DRAM alone; killed under load."""
    life = FirstLife(folder / "cache", shm_folder / "first")
    settings = options(life.cache_dir, life.dram_dir)
    with Server(tiny_model, folder, connector=settings, role="kv_producer", name="first") as server:
        client = server.client()
        for number, prompt in enumerate([*FLUSHED, UNFLUSHED]):
            if number == len(FLUSHED):
                kvsnap_json("flush", "--cache-dir", life.cache_dir, runtime_dir=server.runtime_dir)
            life.cold[number] = ask(client, prompt)
            life.native[number] = ask(client, prompt)
        again, sources = served(client, FLUSHED[0])
        assert same(again, life.cold[0])
        assert sources == {"computed": PROMPT_TOKENS}, "a producer never loads"
        for tenths in range(6):  # B02: hang up while it is waiting, computing, decoding
            server.client().start_and_abort(random_prompt(680 + tenths, 4000), after_s=tenths / 10, max_tokens=200)
        assert same(served(client, FLUSHED[0])[0], life.cold[0])
        kill_under_load(server, 10_000)
    return life


def test_restart_finds_both_tiers(first: FirstLife, tiny_model: Path, folder: Path) -> None:
    """C02, invariant 8: after `kill -9` all is there again, nothing is written twice, nothing is damaged."""
    settings = options(first.cache_dir, first.dram_dir)
    with Server(tiny_model, folder, connector=settings, name="restarted") as server:
        client = server.client()
        for number, prompt in enumerate([*FLUSHED, UNFLUSHED]):
            answer, sources = served(client, prompt)

            assert sources == {"host": HIT_TOKENS, "computed": PROMPT_TOKENS - HIT_TOKENS}
            assert same(answer, first.native[number])
        for tenths in range(4):  # B02: hang up while it loads
            server.client().start_and_abort(FLUSHED[0], after_s=tenths / 50, max_tokens=200)
        assert same(served(client, FLUSHED[1])[0], first.native[1])
        kvsnap_json("flush", "--cache-dir", first.cache_dir, runtime_dir=server.runtime_dir)
        assert max(Counter(stored_keys(first.cache_dir)).values()) == 1
        (worker,) = server.pids_named("Worker")
        with load(server, 20_000):
            time.sleep(1.0)
            server.kill_pid(worker)
        server.kill()
    assert kvsnap("verify", "--cache-dir", first.cache_dir, "--read-data").returncode == 0


def test_damage_and_another_path(
    first: FirstLife, tiny_model: Path, folder: Path, shm_folder: Path, tmp_path: Path
) -> None:
    """A28, C09: the model under another path hits; a flipped byte is a miss, set aside, and healed by the next run."""
    cache_dir, model = tmp_path / "cache", tmp_path / "elsewhere"
    shutil.copytree(first.cache_dir, cache_dir)
    shutil.copytree(tiny_model, model)
    damaged = flip_byte(cache_dir, FLUSHED[1], at=1)
    settings = options(cache_dir, shm_folder / "damaged")
    with Server(model, folder, connector=settings, name="damaged") as server:
        client = server.client()
        found = []
        for number, prompt in enumerate(FLUSHED):
            answer, sources = served(client, prompt)
            found.append(sources["disk"] + sources["host"])
            assert answer.tokens == first.cold[number].tokens
        assert found == [HIT_TOKENS, CHUNK, HIT_TOKENS]
        assert [path.name for path in cache_dir.glob("*/quarantine/*")] != []
        assert not damaged.exists()

        for number, prompt in enumerate(FLUSHED):
            answer, sources = served(client, prompt)
            assert sources["disk"] + sources["host"] == HIT_TOKENS
            assert answer.tokens == first.cold[number].tokens
        kill_under_load(server, 30_000)
    assert kvsnap("verify", "--cache-dir", cache_dir, "--read-data").returncode == 0


def flip_byte(cache_dir: Path, prompt: Sequence[int], *, at: int) -> Path:
    """Damage chunk `at` of a prompt on disk; returns its shard."""
    (namespace,) = [json.loads(path.read_text()) for path in cache_dir.glob("*/namespace.json")]
    chain = KeyChain(root_key(namespace["identity"], CHUNK), CHUNK, BLOCK)
    chain.extend(prompt)
    for path in cache_dir.glob("*/shards/*"):
        for chunk in read_header(path, expect=None).chunks:
            if chunk.key == chain.keys[at]:
                with path.open("r+b") as file:
                    file.seek(chunk.offset + chunk.nbytes // 2)
                    byte = file.read(1)[0]
                    file.seek(-1, os.SEEK_CUR)
                    file.write(bytes([byte ^ 0x10]))
                return path
    raise AssertionError("the chunk is in no shard")


@pytest.fixture(scope="module")
def snapshot(first: FirstLife, folder: Path) -> str:
    """URL@REF of a snapshot of what the first life left on disk."""
    repository = folder / "repository"
    kvsnap_json("export", "--cache-dir", first.cache_dir, "--to", repository, "--tag", "base")
    return f"{repository}@base"


def test_replica_is_warm_when_ready(
    first: FirstLife, snapshot: str, tiny_model: Path, folder: Path, shm_folder: Path, tmp_path: Path
) -> None:
    """A consumer on an empty host with `snapshot` hits from DRAM in its first request, and stores nothing."""
    settings = options(tmp_path / "cache", shm_folder / "replica", snapshot=snapshot, snapshot_required=True)
    new = random_prompt(700, PROMPT_TOKENS)
    with Server(tiny_model, folder, connector=settings, role="kv_consumer", name="replica") as server:
        client = server.client()
        for number, prompt in enumerate(FLUSHED):
            answer, sources = served(client, prompt)
            assert sources["host"] == HIT_TOKENS
            assert same(answer, first.native[number])
        served(client, new)
        assert served(client, new)[1] == {"computed": PROMPT_TOKENS}, "a consumer never stores"


def test_other_weights_at_the_same_path_never_hit(
    first: FirstLife, snapshot: str, tiny_model: Path, folder: Path, shm_folder: Path, tmp_path: Path
) -> None:
    """A01, A02: the weights were replaced under the same name; nothing hits, and the snapshot is refused by field."""
    import torch
    from safetensors.torch import load_file, save_file

    cache_dir, model = tmp_path / "cache", tmp_path / "model"
    shutil.copytree(first.cache_dir, cache_dir)
    shutil.copytree(tiny_model, model)
    weights = load_file(model / "model.safetensors")
    name = next(n for n in sorted(weights) if "q_proj" in n)
    weights[name] = weights[name] + 0.01 * torch.ones_like(weights[name])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    settings = options(cache_dir, shm_folder / "other-weights", snapshot=snapshot)
    with Server(model, folder, connector=settings, name="other-weights") as server:
        client = server.client()
        assert served(client, FLUSHED[0])[1] == {"computed": PROMPT_TOKENS}
        assert served(client, FLUSHED[0])[1]["host"] == HIT_TOKENS, "its own chunks do hit"
        refusal = next(line for line in server.log().splitlines() if "snapshot" in line and "can't be used" in line)
        assert "weights" in refusal


def test_other_rope_never_hits(
    first: FirstLife, snapshot: str, tiny_model: Path, folder: Path, shm_folder: Path, tmp_path: Path
) -> None:
    """A03: the same checkpoint under another RoPE factor."""
    cache_dir = tmp_path / "cache"
    shutil.copytree(first.cache_dir, cache_dir)
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    settings = options(cache_dir, shm_folder / "other-rope", snapshot=snapshot)
    arguments = ["--hf-overrides", json.dumps(rope)]
    with Server(tiny_model, folder, connector=settings, args=arguments, name="other-rope") as server:
        assert served(server.client(), FLUSHED[0])[1] == {"computed": PROMPT_TOKENS}
        refusal = next(line for line in server.log().splitlines() if "snapshot" in line and "can't be used" in line)
        assert "rope_parameters" in refusal
