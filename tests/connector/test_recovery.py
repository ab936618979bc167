"""What comes back by itself: a store that was down, hot chunks that no engine wrote; and who goes first meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap import promoter, shard
from kvsnap.cache import CacheOptions
from kvsnap.errors import StorageError
from kvsnap.index import ABSENT
from kvsnap.preload import Preload, hottest_on_disk
from kvsnap.remote import RemoteSnapshot
from kvsnap.repository import Repository, shard_name
from kvsnap.shard import ChunkEntry
from kvsnap.snapshot_export import export_snapshot
from kvsnap_connector.warm_start import ProgressLines
from tests.connector.toy_engine import ToyEngine, random_tokens, request, toy_engines
from tests.disk_fakes import make_namespace
from tests.waiting import wait_for

CHUNK = 64
MIB = 1 << 20

Start = Callable[..., ToyEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with toy_engines(tmp_path, prefix_caching=False) as make:
        yield make


def test_a_store_that_was_down_is_asked_again(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B12: the breaker closes by itself; no restart."""
    leader = start()
    leader.run(request("a", random_tokens(4 * CHUNK)))
    leader.stop()
    export_snapshot(tmp_path / "cache", str(tmp_path / "repository"), tag="base")
    opened = Repository.open(str(tmp_path / "repository"))
    manifest = opened.manifest(opened.resolve("base"))
    names = [shard_name(shard.digest) for shard in manifest.shards]
    monkeypatch.setattr("kvsnap.remote._DOWN_S", 0.2)
    (tmp_path / "other").mkdir()
    replica = ToyEngine(make_namespace(), tmp_path / "replica", tmp_path / "other", slots=16, prefix_caching=False)
    remote = replica.cache.remote = RemoteSnapshot(opened.storage, names, opened.catalog(manifest))
    calls = 0

    def fail(*args: object) -> int:
        nonlocal calls
        calls += 1
        raise StorageError("the object store is down")

    try:
        with monkeypatch.context() as down:
            down.setattr(opened.storage, "read_into", fail)
            while time.monotonic() >= remote._down_until:
                replica.run(cold := request(f"cold {calls}", [*random_tokens(4 * CHUNK), calls], wants_store=False))
                assert cold.loaded_tokens == 0
        wait_for(lambda: time.monotonic() >= remote._down_until)
        replica.run(warm := request("warm", [*random_tokens(4 * CHUNK), 7]))
    finally:
        replica.kill()

    assert calls >= 3
    assert warm.loaded_tokens == 4 * CHUNK


def test_hot_chunks_that_were_never_written_are_soon_after_an_attach(start: Start) -> None:
    """Killed before its writer came to it, as after `kill -9`; the next engine needs no request for it."""
    first = start(options=CacheOptions(persist="none"))
    first.run(request("a", random_tokens(3 * CHUNK + 1)), request("cold", random_tokens(CHUNK + 1, 1)))
    wait_for(lambda: not first.cache.has_pending_copies)
    first.run(hit := request("b", random_tokens(3 * CHUNK + 1)))
    assert hit.loaded_tokens == 3 * CHUNK
    wait_for(lambda: all(chunk.dram_xxh3 for chunk in first.cache.residency.index))
    first.kill()

    second = start(options=CacheOptions(shard_seconds=0.05))
    wait_for(lambda: second.cache.counts["written_chunks"] >= 3)

    assert second.cache.counts["attach_found"] == 4
    assert second.cache.counts["written_chunks"] == 3  # not the one that nobody hit


def test_a_request_goes_before_what_a_preload_has_queued(start: Start, tmp_path: Path) -> None:
    """`preload: background`: its own chunks are the next to be read, wherever they stand in the queue."""
    engine = start(slots=32)
    for seed in range(8):
        engine.run(request(f"r{seed}", random_tokens(2 * CHUNK + 1, seed)))
    engine.stop()
    for file in (tmp_path / "shm").iterdir():
        file.unlink()
    second = start(slots=32, options=CacheOptions(num_readers=1))
    assert second.disk is not None
    gate, began = threading.Event(), threading.Event()
    order: list[bytes] = []
    read_chunk = second.disk.read_chunk

    def recorded(shard: str, entry: ChunkEntry, views: list[memoryview]) -> bool:
        order.append(bytes(entry.key))
        began.set()
        assert gate.wait(30)
        return read_chunk(shard, entry, views)

    second.disk.read_chunk = recorded  # type: ignore[assignment, method-assign]
    wanted = hottest_on_disk(second.cache, 1 << 30)
    assert len(wanted) == 16
    assert {chunk.state for chunk in wanted} == {ABSENT}
    second.cache.promoter.preload(wanted)
    assert began.wait(30)
    last = next(seed for seed in range(8) if _keys(second, seed)[-1] == bytes(wanted[-1].key))

    second.submit(req := request("urgent", random_tokens(2 * CHUNK + 1, last)))
    second.step()
    gate.set()
    second.run()
    wait_for(lambda: not second.cache.promoter.num_later)

    assert req.loaded_tokens == 2 * CHUNK
    assert order[1:3] == _keys(second, last)
    assert sorted(order) == sorted(bytes(chunk.key) for chunk in wanted)


def all_hashed(engine: ToyEngine) -> bool:
    """Whether something is in DRAM, and every checksum is computed."""
    chunks = list(engine.cache.residency.index)
    return bool(chunks) and all(chunk.dram_xxh3 for chunk in chunks)


def _keys(engine: ToyEngine, seed: int) -> list[bytes]:
    from kvsnap.keys import KeyChain, root_key

    ns = engine.namespace
    chain = KeyChain(root_key(ns.identity.hash(), ns.chunk_tokens), ns.chunk_tokens, ns.layout.block_tokens)
    chain.extend(random_tokens(2 * CHUNK, seed))
    return [bytes(key) for key in chain.keys]


def test_with_persist_all_an_attach_writes_the_rest(start: Start) -> None:
    """Hit or not: what the engine that died had not written yet."""
    first = start(options=CacheOptions(persist="none"))
    first.run(request("a", random_tokens(3 * CHUNK + 1)))
    wait_for(lambda: all_hashed(first))
    first.kill()

    second = start(options=CacheOptions(persist="all", shard_seconds=0.05))

    wait_for(lambda: second.cache.counts["written_chunks"] == 3)


def test_a_preload_does_not_wait_for_the_checks_of_an_attach(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can take a minute in a large tier; a request has the chunks that it needs checked ahead of all others."""
    first = start()
    first.run(request("a", random_tokens(3 * CHUNK + 1)))
    wait_for(lambda: all_hashed(first))
    first.kill()
    gate = threading.Event()
    real = shard.checksum

    def slow(views: list[memoryview]) -> bytes:
        assert gate.wait(30)
        return real(views)

    monkeypatch.setattr(promoter, "checksum", slow)
    second = start()

    try:
        assert second.cache.counts["attach_found"] == 3
        assert Preload(second.cache, 1 << 30).wait(20.0)
        assert second.cache.promoter.num_later > 0
    finally:
        gate.set()
    wait_for(lambda: second.cache.counts["attached"] == 3)


@pytest.mark.parametrize(("done", "left"), [(0, "all of it is left"), (10, "about")])
def test_a_preload_says_what_remains(
    done: int, left: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line every few seconds, however often it is told, and one with the result."""
    caplog.set_level(logging.INFO)
    lines = ProgressLines(logging.getLogger("kvsnap"), "preload")
    lines(done * MIB, 40 * MIB)
    assert not caplog.records

    monkeypatch.setattr(lines, "_next", 0.0)
    lines(done * MIB, 40 * MIB)
    lines(done * MIB, 40 * MIB)
    lines.end(7, 40 * MIB)

    line, result = [record.getMessage() for record in caplog.records]
    assert f"{done} of 40 MiB, {100 * done // 40} %" in line
    assert "GB/s" in line
    assert left in line
    assert line.endswith("left")
    assert "preloaded 7 chunks, 40 MiB" in result
