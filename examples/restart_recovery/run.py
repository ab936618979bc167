"""Restart recovery: a server is killed, and the next one on the host has everything again. Nothing to configure.

cold             nothing of the prompt is cached
before           the handbook is in kvsnap's DRAM tier
after kill -9    a new server attached the DRAM file that outlived the old one; nobody had flushed anything
after a reboot   the DRAM file is gone too; the disk tier is there

python examples/restart_recovery/run.py [--json]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.common import (
    MAX_TOKENS,
    NOT_STORED,
    Chats,
    Row,
    example,
    json_of,
    measure,
    not_hits,
    note,
    options,
    warm_kernels,
)
from tools.serving import Server, dram_files

PER_ROW = 3


def run(folder: Path, shm: Path, model: Path) -> tuple[list[Row], list[str]]:
    """The rows, and what is wrong with them."""
    chats = Chats(model)
    settings = options(folder, shm, "host")
    cache_dir = settings["cache_dir"]

    note("starting a server")
    with Server(model, folder, connector=settings, name="first") as server:
        client = server.client()
        warm_kernels(client, chats.prompts)
        cold = measure("cold", server, chats.strangers(2), reset=True, kv_transfer_params=NOT_STORED)
        client.complete(chats.take(1)[0], max_tokens=MAX_TOKENS)
        before = measure("before, from DRAM", server, chats.take(PER_ROW), reset=True)
        note("kill -9 of all its processes")
    note("a new server on the same host")
    with Server(model, folder, connector=settings, name="second") as server:
        warm_kernels(server.client(), chats.prompts)
        killed = measure("after kill -9", server, chats.take(PER_ROW), reset=True)
        json_of("flush", "--cache-dir", cache_dir, runtime_dir=server.runtime_dir)
        note("kill -9 again, and remove the DRAM file as a reboot of the host does")
    for file in dram_files(Path(settings["dram_dir"])):
        file.unlink()
    with Server(model, folder, connector={**settings, "preload": "off"}, name="third") as server:
        warm_kernels(server.client(), chats.prompts)
        rebooted = measure("after a reboot", server, chats.take(PER_ROW), reset=True)
        status = json_of("status", "--cache-dir", cache_dir, runtime_dir=server.runtime_dir)
        (namespace,) = status["namespaces"]
        note(f"{namespace['num_chunks']} chunks on disk, {namespace['real_bytes'] >> 20} MiB")

    problems = not_hits([before, killed, rebooted], PER_ROW)
    if not rebooted.tokens.get("disk"):
        problems.append("after a reboot: nothing came from disk")
    return [cold, before, killed, rebooted], problems


if __name__ == "__main__":
    example("restart_recovery", run)
