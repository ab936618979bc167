"""Serving from a snapshot before it has been imported: single chunks, fetched and verified on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.errors import StorageError
from kvsnap.keys import ChunkKey
from kvsnap.remote import RemoteSnapshot
from kvsnap.repository import Repository, shard_name
from kvsnap.snapshot_export import export_snapshot
from tests.connector.toy_engine import ToyEngine, request
from tests.connector.toy_engine import random_tokens as tokens
from tests.disk_fakes import make_namespace
from tests.waiting import wait_for

Start = Callable[..., ToyEngine]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A snapshot `base` of two prompts of four chunks that share the first two."""
    (tmp_path / "shm-of-the-leader").mkdir()
    engine = ToyEngine(make_namespace(ranks=2), tmp_path / "leader", tmp_path / "shm-of-the-leader", slots=16)
    engine.run(request("a", tokens(128) + tokens(128, 1)), request("b", tokens(128) + tokens(128, 2)))
    engine.stop()
    export_snapshot(tmp_path / "leader", str(tmp_path / "repository"), tag="base")
    return tmp_path / "repository"


@pytest.fixture
def replica(tmp_path: Path, repository: Path) -> Iterator[ToyEngine]:
    """An engine with nothing of its own that may fetch from the snapshot."""
    (tmp_path / "shm").mkdir()
    engine = ToyEngine(
        make_namespace(ranks=2), tmp_path / "replica", tmp_path / "shm", slots=16, num_blocks=128, prefix_caching=False
    )
    engine.cache.remote = open_snapshot(repository)
    yield engine
    engine.kill()


def open_snapshot(path: Path) -> RemoteSnapshot:
    opened = Repository.open(str(path))
    manifest = opened.manifest(opened.resolve("base"))
    return RemoteSnapshot(opened.storage, [shard_name(s.digest) for s in manifest.shards], opened.catalog(manifest))


def test_only_what_a_prompt_needs_is_fetched(replica: ToyEngine) -> None:
    replica.run(req := request("r", tokens(128) + tokens(128, 1) + [7]))

    assert req.loaded_tokens == 256
    assert replica.cache.counts["fetched"] == 4
    assert replica.cache.counts["hit_tokens_disk"] == 256


def test_many_waiters_fetch_a_chunk_once(replica: ToyEngine) -> None:
    waiters = [request(f"r{i}", tokens(128) + tokens(128, 1 + i % 2) + [i]) for i in range(8)]

    replica.run(*waiters)

    assert [req.loaded_tokens for req in waiters] == [256] * 8
    assert replica.cache.counts["fetched"] == 6


def test_a_fetched_chunk_is_an_ordinary_one_from_then_on(replica: ToyEngine) -> None:
    """It is written when it is hit, so that the next restart has it."""
    replica.run(request("r", tokens(128) + tokens(128, 1) + [7]))
    replica.cache.remote = None
    replica.cache.flush(10.0)
    replica.cache.clear("dram")

    replica.run(again := request("s", tokens(128) + tokens(128, 1) + [8]))

    assert again.loaded_tokens == 256
    assert replica.cache.counts["promoted"] == 4


def test_a_damaged_chunk_ends_the_hit(replica: ToyEngine, repository: Path) -> None:
    """Invariant 1: the catalog's BLAKE3 decides, and a bad chunk is asked for once."""
    remote = replica.cache.remote
    assert remote is not None
    bad = remote.find(replica_key(replica, tokens(128) + tokens(128, 1), 2), 64)
    assert bad is not None
    shard = next(path for path in sorted(repository.rglob("*.safetensors")))
    data = bytearray(shard.read_bytes())
    data[int(remote._catalog.offset[bad]) + 5] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(data)

    replica.run(first := request("r", tokens(128) + tokens(128, 1) + [7]))
    replica.run(second := request("s", tokens(128) + tokens(128, 1) + [8]))

    assert first.loaded_tokens == 128
    assert second.loaded_tokens == 256  # the first one computed and stored the rest
    assert replica.cache.counts["damaged_fetches"] == 1


def test_a_dead_store_costs_a_miss_and_is_left_alone(replica: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """B12 and invariant 2: requests are computed; after three failures the store has a rest."""
    calls = 0

    def fail(*args: object) -> int:
        nonlocal calls
        calls += 1
        raise StorageError("the object store is down")

    assert replica.cache.remote is not None
    monkeypatch.setattr(replica.cache.remote._storage, "read_into", fail)

    requests = [request(f"r{i}", tokens(128) + tokens(128, 1) + [i], wants_store=False) for i in range(5)]
    for req in requests:
        replica.run(req)

    assert [req.loaded_tokens for req in requests] == [0] * 5
    assert 3 <= calls <= 12


def test_a_silent_store_keeps_nobody_from_the_disk(replica: ToyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """B12: a store that swallows requests blocks those who wait for it, not the reads of the disk tier."""
    remote = replica.cache.remote
    assert remote is not None
    replica.run(request("mine", tokens(256, 9)))
    replica.cache.flush(10.0)
    replica.cache.clear("dram")
    gate, asked = threading.Event(), threading.Event()

    def hang(*args: object) -> int:
        asked.set()
        assert gate.wait(30)
        raise StorageError("the object store is down")

    monkeypatch.setattr(remote._storage, "read_into", hang)
    try:
        replica.submit(request("theirs", tokens(128) + tokens(128, 1) + [7]))
        replica.step()
        assert asked.wait(10)
        replica.submit(mine := request("again", [*tokens(256, 9), 8]))
        wait_for(lambda: replica.step() is not None and mine not in replica.waiting)
        assert mine.loaded_tokens == 256
    finally:
        gate.set()
    replica.run()


def test_short_and_foreign_keys_are_not_found(replica: ToyEngine) -> None:
    remote = replica.cache.remote
    assert remote is not None
    key = replica_key(replica, tokens(128) + tokens(128, 1), 1)

    assert remote.find(key, 64) is not None
    assert remote.find(key, 48) is None
    assert remote.find(ChunkKey(bytes(32)), 64) is None


def replica_key(engine: ToyEngine, ids: list[int], i: int) -> ChunkKey:
    state = engine.planner._state(request("probe", ids))
    state.chain.extend(ids)
    engine.planner.finished("probe")
    return state.chain.keys[i]
