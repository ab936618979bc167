"""Pre-deploy warm-up: a job computes the known prefixes once, before the deploy; new replicas are warm when ready.

1. `kvsnap warmup --model`   an engine with the server's flags, no server: computes, proves the hits, exports
2. `kvsnap verify`           reads every byte back
3. `kvsnap tag`              promotes `canary` to `prod`
4. the deploy                a server with `snapshot: …@prod`; it refuses connections until it is warm

python examples/predeploy_warmup/run.py [--json]
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common import (
    NOT_STORED,
    Chats,
    Row,
    command,
    example,
    first_ask,
    json_of,
    measure,
    not_hits,
    note,
    options,
)
from tools.prompts import HANDBOOK
from tools.serving import Server, best_dtype, connector_config

PER_ROW = 3


def run(folder: Path, shm: Path, model: Path) -> tuple[list[Row], list[str]]:
    """The rows, and what is wrong with them."""
    chats = Chats(model)
    repository = folder / "repository"
    warm_up(folder, shm, model, chats.question())
    command("verify", f"{repository}@canary", "--read-data", runtime_dir=folder / "run")
    json_of("tag", f"{repository}@canary", "prod", runtime_dir=folder / "run")

    replica = options(folder, shm, "replica", snapshot=f"{repository}@prod", snapshot_required=True)
    note("the deploy: a replica with an empty cache directory")
    server = Server(model, folder, connector=replica, name="replica")
    try:
        refused = refused_until_ready(server)
        was_warm = "kvsnap: preloaded" in server.log()
        server.wait_ready()
        note(f"{refused} connections refused until it was warm")
        first = first_ask("replica, its first request", server, chats.take(1)[0])
        more = measure("replica, the next ones", server, chats.take(PER_ROW), reset=True)
        cold = measure("cold", server, chats.strangers(2), reset=True, kv_transfer_params=NOT_STORED)
    finally:
        server.kill()
    problems = not_hits([first], 1) + not_hits([more], PER_ROW)
    if not refused or not was_warm:
        problems.append(f"the replica took connections before it was warm ({refused} refused)")
    return [cold, first, more], problems


def warm_up(folder: Path, shm: Path, model: Path, question: str) -> None:
    """The job. What it is given are prompts as people have them: a chat's messages."""
    prompts = folder / "prompts.jsonl"
    messages = [{"role": "system", "content": HANDBOOK.read_text()}, {"role": "user", "content": question}]
    prompts.write_text(json.dumps({"messages": messages}) + "\n")
    job = options(folder, shm, "job")
    flags = ["--dtype", best_dtype(), "--enforce-eager"]
    flags += ["--kv-transfer-config", json.dumps(connector_config(job))]
    report = json.loads(
        command(
            "warmup",
            prompts,
            "--model",
            model,
            "--cache-dir",
            job["cache_dir"],
            "--engine-log",
            folder / "warmup-engine.log",
            "--ready-file",
            folder / "ready.json",
            "--export",
            folder / "repository",
            "--tag",
            "canary",
            "--json",
            "--",
            *flags,
            runtime_dir=folder / "run",
        )
    )
    note(f"{report['state']}: {report['proved_tokens']} of {report['prompt_tokens']} tokens proved as hits")


def is_open(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def refused_until_ready(server: Server) -> int:
    """Launch, ask for connections all the time until one is taken; how many were refused."""
    server.launch()
    refused = 0
    while not is_open(server.port):
        if server.exit_code() is not None:
            raise SystemExit(f"the replica ended:\n{server.log_tail()}")
        refused += 1
        time.sleep(0.05)
    return refused


if __name__ == "__main__":
    example("predeploy_warmup", run)
