"""`kvsnap warmup` on the real engine: a running server first, then an offline engine with the same flags.

The server reports no cached tokens for each request, so its counters are the proof; the offline engine does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.snapshot_import import import_snapshot
from tools.prompts import random_prompt
from tools.serving import Server, best_dtype, engine_environment, kvsnap, kvsnap_json

pytestmark = pytest.mark.engine

BLOCK = 128  # the CPU backend's
SYSTEM = "You are the assistant of a shop. Answer from the handbook only, and name the page. " * 30
TOOLS = [{"type": "function", "function": {"name": "find_page", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def options(folder: Path, shm_folder: Path) -> dict[str, Any]:
    """kvsnap's options, of both engines."""
    return {
        "cache_dir": str(folder / "cache"),
        "dram": "256MiB",
        "dram_dir": str(shm_folder),
        "disk": "1GiB",
        "load_policy": "always",
        "lookup_seconds": 30,
    }


@pytest.fixture(scope="module")
def prompts(folder: Path) -> Path:
    """Chats that share a system prompt, a text, token ids, and one that is too short."""
    path = folder / "prompts.jsonl"
    lines: list[dict[str, Any]] = [
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": f"Question {i}: where? " * 20},
            ]
        }
        for i in range(3)
    ]
    lines[2] |= {"tools": TOOLS, "tool_choice": "none"}
    lines.append({"prompt": "Once upon a time there was a cache. " * 60})
    lines.append({"token_ids": list(range(1000, 1000 + 3 * BLOCK + 1))})
    lines.append({"prompt": "Hi"})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def server(tiny_model: Path, folder: Path, options: dict[str, Any]) -> Iterator[Server]:
    with Server(tiny_model, folder, connector=options) as server:
        yield server


def test_running_server(server: Server, prompts: Path, options: dict[str, Any], folder: Path) -> None:
    """Computed, then loaded from kvsnap's tiers; the second run finds all resident; C07: exported from the root."""
    url = f"http://127.0.0.1:{server.port}"
    ready, cache_dir = folder / "ready", options["cache_dir"]
    common = ["warmup", prompts, "--url", url, "--cache-dir", cache_dir]

    plan = kvsnap_json(*common, "--dry-run", runtime_dir=server.runtime_dir)
    report = kvsnap_json(*common, "--prove-tiers", "--ready-file", ready, runtime_dir=server.runtime_dir)
    again = kvsnap_json(*common, "--export", folder / "repo", "--tag", "warm", runtime_dir=server.runtime_dir)

    assert (plan["num_prompts"], plan["num_short"], plan["resident_tokens"]) == (6, 1, 0)
    assert (report["state"], report["num_warmed"] + report["num_resident"], report["num_short"]) == ("warm", 5, 1)
    assert report["proof"] == "metrics"
    assert report["cached_by_source"]["host"] >= 5 * BLOCK
    assert report["dram_bytes"] == plan["store_bytes"]
    assert report["ttft_before_s"] > 0
    assert report["ttft_after_s"] > 0
    assert any("--enable-prompt-tokens-details" in warning for warning in report["warnings"])
    assert json.loads(ready.read_text())["state"] == "warm"
    assert (again["state"], again["num_resident"], again["computed_tokens"] < 5 * BLOCK) == ("warm", 5, True)
    imported = import_snapshot(str(folder / "repo"), "warm", folder / "other")
    assert imported.num_tokens == plan["store_tokens"]


def test_reset_external_forgets_what_old_weights_computed(server: Server) -> None:
    """A14: the route that goes with a weight update. What only DRAM held is unreachable, what comes after is kept."""
    client = server.client()
    prompt = random_prompt(910, 3 * BLOCK + 1)

    def loaded() -> float:
        assert client.reset_prefix_cache()
        before = client.metrics().prompt_tokens()
        client.complete(prompt, max_tokens=1)
        after = client.metrics().prompt_tokens()
        return sum(after.get(tier, 0) - before.get(tier, 0) for tier in ("host", "disk"))

    client.complete(prompt, max_tokens=1)
    assert client.reset_prefix_cache(external=True)

    assert [loaded(), loaded()] == [0, 3 * BLOCK]


def test_offline_engine_has_the_servers_identity(
    server: Server,
    tiny_model: Path,
    prompts: Path,
    options: dict[str, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the server stored is resident for an offline engine with the same flags; what that adds is on disk after."""
    server.kill()
    more = folder / "more.txt"
    more.write_text("A handbook of another shop. " * 100)
    config = {
        "kv_connector": "KVSnapConnector",
        "kv_connector_module_path": "kvsnap_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": options,
    }
    flags = ["--dtype", best_dtype(), "--enforce-eager", "--kv-transfer-config", json.dumps(config)]
    log = folder / "warmup-engine.log"
    for name, value in engine_environment(server.runtime_dir).items():
        monkeypatch.setenv(name, value)

    arguments: list[str | Path] = ["warmup", "--model", tiny_model, "--cache-dir", options["cache_dir"], "--json"]
    arguments += ["--engine-log", log, prompts, more, "--text-as", "system", "--", *flags]
    done = kvsnap(*arguments, runtime_dir=server.runtime_dir)

    assert done.returncode == 0, done.stderr + log.read_text()[-6000:]
    report = json.loads(done.stdout)
    assert (report["state"], report["num_resident"], report["num_warmed"], report["num_short"]) == ("warm", 5, 1, 1)
    assert report["proof"] == "usage"
    sources = report["cached_by_source"]  # `device`: what prompts share is loaded by the first of them
    assert sources["host"] + sources.get("disk", 0) >= 8 * BLOCK
    assert sum(sources.values()) == report["proved_tokens"]
    assert report["disk_bytes"] > 0
    assert report["warnings"] == [w for w in report["warnings"] if "shorter than one block" in w]
    status = kvsnap_json("status", "--cache-dir", options["cache_dir"], runtime_dir=server.runtime_dir)
    assert len(status["namespaces"]) == 1
    assert status["engines"] == []
