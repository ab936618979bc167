"""Sharing among replicas: one exports, the other follows; a ref decides what goes live, and takes it back.

Two servers that share nothing but a repository. Beside the leader runs `kvsnap export --every 1s --tag canary`, beside
the follower `kvsnap sync …@prod --follow`. Promotion and roll back are `kvsnap tag`.

    cold                      nothing of the prompt is cached
    follower, promoted        `prod` names the snapshot: the running server has chunks that it never computed
    follower, rolled back     `prod` names the first snapshot again; nothing is taken away from a running server

    python examples/cross_replica/run.py [--json]
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    start_command,
    warm_kernels,
)
from tools.serving import Server

PER_ROW = 3
NOTICED_S = 2.0
"""A live engine looks for new shards in its directory at least so often."""


class Lines:
    """The JSON lines of a command that goes on."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self.child = child

    def until(self, outcome: str, snapshot: str | None = None) -> Any:
        """Read on to the first line with this outcome (and snapshot)."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            found = json.loads(line)
            if found["outcome"] == outcome and snapshot in (None, found.get("snapshot")):
                return found
        raise SystemExit("a command that should go on ended")


@contextmanager
def going_on(*arguments: str | Path, runtime_dir: Path) -> Iterator[Lines]:
    """A command in the background; ends by SIGTERM."""
    note(f"$ kvsnap {' '.join(map(str, arguments))} &")
    child = start_command(*arguments, "--json", runtime_dir=runtime_dir)
    try:
        yield Lines(child)
    finally:
        child.terminate()
        child.communicate(timeout=60)


def run(folder: Path, shm: Path, model: Path) -> tuple[list[Row], list[str]]:
    """The rows, and what is wrong with them."""
    chats = Chats(model)
    url = folder / "repository"
    hosts = {name: options(folder, shm, name) for name in ("leader", "follower")}
    note("starting two servers")
    leader, follower = (Server(model, folder, connector=hosts[name], name=name) for name in hosts)
    run_dir = follower.runtime_dir
    try:
        for server in (leader, follower):
            server.launch()
        for server in (leader, follower):
            server.wait_ready()
            warm_kernels(server.client(), chats.prompts)
        cold = measure("cold", follower, chats.strangers(2), reset=True, kv_transfer_params=NOT_STORED)

        note("the leader serves its first chat, and exports")
        leader.client().complete(chats.take(1)[0], max_tokens=MAX_TOKENS)
        export = (
            "export",
            "--cache-dir",
            hosts["leader"]["cache_dir"],
            "--to",
            url,
            "--tag",
            "canary",
            "--every",
            "1s",
        )
        sync = ("sync", f"{url}@prod", "--cache-dir", hosts["follower"]["cache_dir"], "--follow", "--interval", "0.5s")
        with (
            going_on(*export, runtime_dir=leader.runtime_dir) as exports,
            going_on(*sync, runtime_dir=run_dir) as syncs,
        ):
            first = exports.until("exported")["report"]["snapshot"]
            syncs.until("failed")  # there is no `prod` yet, which it says; and goes on
            began = time.monotonic()
            json_of("tag", f"{url}@canary", "prod", runtime_dir=run_dir)
            synced = syncs.until("synced", first)
            note(
                f"{synced['report']['num_chunks']} chunks on the follower {time.monotonic() - began:.1f} s after `tag`"
            )
            time.sleep(NOTICED_S)
            promoted = measure("follower, promoted", follower, chats.take(PER_ROW), reset=True)

            note("the leader learns something new; canary moves, prod doesn't; then prod does, and is rolled back")
            leader.client().complete(chats.strangers(1)[0], max_tokens=MAX_TOKENS)
            second = exports.until("exported")["report"]["snapshot"]
            json_of("tag", f"{url}@canary", "prod", runtime_dir=run_dir)
            more = syncs.until("synced", second)["report"]
            json_of("tag", f"{url}@prod", "--back", "1", runtime_dir=run_dir)
            back = syncs.until("synced", first)["report"]
            rolled_back = measure("follower, rolled back", follower, chats.take(PER_ROW), reset=True)
        history = json_of("tag", f"{url}@prod", "--history", runtime_dir=run_dir)["history"]
    finally:
        leader.kill()
        follower.kill()

    problems = not_hits([promoted, rolled_back], PER_ROW)
    if [row["snapshot"] for row in history] != [first, second, first]:
        problems.append(f"prod's history is {history}")
    if more["imported_shards"] == 0 or more["present_shards"] == 0:
        problems.append(f"the second snapshot was no increment: {more}")
    if back["imported_shards"]:
        problems.append("the roll back downloaded something")
    return [cold, promoted, rolled_back], problems


if __name__ == "__main__":
    example("cross_replica", run)
