"""Faults that others met in tiered caches, re-enacted on planner, cache and both tiers by a toy engine."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.cache import CacheOptions
from kvsnap.tiers.disk import Shard
from tests.connector.toy_engine import ToyEngine, random_tokens, request, toy_engines
from tests.waiting import wait_for

BLOCK = 16
CHUNK = 64
PROMPT = 3 * CHUNK + BLOCK + 1
USABLE = 3 * CHUNK + BLOCK
EAGER = CacheOptions(persist="all", shard_seconds=0.0, shard_bytes=1)

Start = Callable[..., ToyEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with toy_engines(tmp_path) as make:
        yield make


class TestA14WeightsChangeInPlace:
    """A14: the reset hook makes what old weights computed unreachable. The toy engine checks every loaded byte."""

    def test_old_chunks_are_gone_and_new_ones_are_kept(self, start: Start) -> None:
        engine = start()
        engine.run(request("old", random_tokens(PROMPT)))
        engine.cache.clear("disk")

        engine.change_weights()
        engine.reset()
        engine.run(first := request("new", random_tokens(PROMPT)))
        engine.reset(connector=False)
        engine.run(second := request("again", random_tokens(PROMPT)))

        assert (first.loaded_tokens, second.loaded_tokens) == (0, USABLE)

    def test_a_request_that_runs_through_the_change_stores_nothing(self, start: Start) -> None:
        """Its first chunks are of the old weights, its later ones of both."""
        engine = start(step_tokens=CHUNK, prefix_caching=False)
        engine.submit(request("through", random_tokens(PROMPT), max_tokens=2 * CHUNK))
        engine.step()
        engine.step()

        engine.change_weights()
        engine.reset(preempt=False)
        engine.run()
        engine.run(after := request("after", random_tokens(PROMPT)))

        assert after.loaded_tokens == 0

    def test_unreachable_after_a_restart_too(self, start: Start) -> None:
        """Killed right after the reset: the epoch is in the file."""
        engine = start(options=CacheOptions(persist="none"))
        engine.run(request("old", random_tokens(PROMPT)))
        wait_for(lambda: not engine.cache.has_pending_copies)
        engine.reset()
        engine.kill()

        second = start()
        second.version = engine.version + 1
        second.run(after := request("after", random_tokens(PROMPT)))

        assert after.loaded_tokens == 0
        assert second.cache.status()["counts"]["attach_found"] == 0


class TestC13Clear:
    """C13: clear says how much it removed, and what it removed stays away, also after a restart."""

    def test_everything(self, start: Start) -> None:
        engine = start()
        engine.run(request("a", random_tokens(PROMPT)))
        engine.cache.flush(10.0)

        removed = engine.cache.clear("all")
        engine.reset(connector=False)
        engine.run(live := request("b", random_tokens(PROMPT), wants_store=False))
        engine.kill()
        second = start()
        second.run(restarted := request("c", random_tokens(PROMPT)))

        assert removed["dram_chunks"] == 4
        assert removed["disk_chunks"] == 4
        assert removed["disk_bytes"] > 0
        assert (live.loaded_tokens, restarted.loaded_tokens) == (0, 0)

    def test_what_a_request_reads_meanwhile_does_not_come_back(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """DRAM is empty already, the shards go one by one, and one of the last is asked for."""
        engine = start(prefix_caching=False)
        engine.run(request("a", random_tokens(PROMPT)))
        engine.cache.flush(10.0)
        shards = engine.cache.shards
        forget = shards.forget

        def late(shard_id: str) -> int:
            chunks = [chunk for chunk in engine.cache.residency.index if chunk.shard is not None]
            engine.cache.promote(chunks)
            deadline = time.monotonic() + 0.5
            while engine.cache.is_moving(chunks) and time.monotonic() < deadline:
                engine.cache.lock.release()
                time.sleep(0.005)
                engine.cache.lock.acquire()
            return forget(shard_id)

        monkeypatch.setattr(shards, "forget", late)

        engine.cache.clear("all")

        assert len(engine.cache.residency.index) == 0
        assert engine.cache.promote([]) == 0
        engine.run(again := request("b", random_tokens(PROMPT), wants_store=False))
        assert again.loaded_tokens == 0

    @pytest.mark.parametrize(("tier", "count"), [("dram", "dram_chunks"), ("disk", "disk_chunks")])
    def test_one_tier_leaves_the_other(self, start: Start, tier: str, count: str) -> None:
        engine = start(prefix_caching=False)
        engine.run(request("a", random_tokens(PROMPT)))
        engine.cache.flush(10.0)

        removed = engine.cache.clear(tier)
        engine.run(again := request("b", random_tokens(PROMPT)))

        assert set(removed) & {"dram_chunks", "disk_chunks"} == {count}
        assert removed[count] == 4
        assert again.loaded_tokens == USABLE
        assert engine.cache.counts["hit_tokens_disk"] == (USABLE if tier == "dram" else 0)

    def test_nothing_is_said_to_be_removed_twice(self, start: Start) -> None:
        engine = start()
        engine.run(request("a", random_tokens(PROMPT)))
        engine.cache.flush(10.0)
        engine.cache.clear("all")

        assert not any(engine.cache.clear("all").values())


def test_disk_is_read_once_after_a_restart(start: Start, tmp_path: Path) -> None:
    """C14: the first of three requests promotes; the others find it in DRAM."""
    engine = start()
    engine.run(request("a", random_tokens(PROMPT)))
    engine.stop()
    for file in (tmp_path / "shm").iterdir():
        file.unlink()
    second = start(prefix_caching=False)

    loaded = []
    for name in "bcd":
        second.run(req := request(name, random_tokens(PROMPT)))
        loaded.append(req.loaded_tokens)

    assert loaded == [USABLE] * 3
    assert second.cache.counts["promoted"] == 4
    assert second.cache.counts["hit_tokens_disk"] == USABLE
    assert second.cache.counts["hit_tokens_host"] == 2 * USABLE


@pytest.mark.parametrize(
    ("length", "hit", "reason"),
    [
        (BLOCK - 1, 0, "prompt below minimum: 17 tokens"),
        (BLOCK, 0, "prompt below minimum: 17 tokens"),
        (BLOCK + 1, BLOCK, "not in the tiers"),
        (CHUNK - 1, CHUNK - BLOCK, "not in the tiers"),
        (CHUNK, CHUNK - BLOCK, "not in the tiers"),
        (CHUNK + 1, CHUNK, "not in the tiers"),
    ],
)
def test_short_prompts_are_no_plain_misses(start: Start, length: int, hit: int, reason: str) -> None:
    """C03: what can't be cached is counted apart, with the minimum; a prompt below a chunk can be."""
    engine = start(prefix_caching=False)

    engine.run(request("a", random_tokens(length)))
    first = Counter(engine.planner.misses)
    engine.run(again := request("b", random_tokens(length)))

    assert first == {reason: 1}
    assert again.loaded_tokens == hit
    stats = engine.planner.take_stats()
    assert stats.get("miss_prompt_below_minimum", 0) == (0 if hit else 2)
    assert stats.get("miss_not_in_the_tiers", 0) == (1 if hit else 0)


class TestB07FullDisk:
    """B07: a real file system that is full, below the cap, because of others."""

    @pytest.fixture
    def small_disk(self, tmp_path: Path) -> Iterator[Path]:
        """A tmpfs of 4 MiB."""
        folder = tmp_path / "small"
        folder.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"can't mount a tmpfs: {done.stderr.strip()}")
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)

    def test_stores_pause_and_resume(self, start: Start, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing of its own could make room."""
        monkeypatch.setattr("kvsnap.writer._PAUSE_S", (0.5,))
        engine = start(cache_dir=small_disk / "cache", disk_cap=1 << 30, options=EAGER, slots=8, prefix_caching=False)
        fill(small_disk / "of others")
        counts = engine.cache.counts

        for i in range(40):  # serving goes on, and every loaded byte is right
            engine.run(request(f"during {i}", random_tokens(PROMPT, 100 + i)))
        wait_for(lambda: counts["write_errors"] + counts["writes_without_room"] > 0)
        engine.run(request("cold", random_tokens(PROMPT, 1)))
        engine.run(hit := request("hit", random_tokens(PROMPT, 1)))
        waiting, written = engine.cache.writer.status()["waiting"], counts["written_chunks"]
        left = leftovers(small_disk / "cache")
        (small_disk / "of others").unlink()
        wait_for(lambda: engine.cache.flush(5.0)["unsaved_chunks"] == 0)

        assert hit.loaded_tokens == USABLE
        assert waiting <= 16  # twice the slots: memory stays flat
        assert written == 0
        assert counts["written_chunks"] >= 4
        assert left == leftovers(small_disk / "cache") == []
        assert not counts["background_errors"]

    def test_own_shards_make_room(self, start: Start, small_disk: Path) -> None:
        """Evict and try again: what is newer takes the place of what is older."""
        engine = start(cache_dir=small_disk / "cache", disk_cap=1 << 30, options=EAGER)
        engine.run(request("older", random_tokens(PROMPT, 1)))
        engine.cache.flush(5.0)
        engine.cache.clear("dram")
        older = shards(small_disk)
        fill(small_disk / "of others")

        engine.run(request("newer", random_tokens(PROMPT, 2)))
        wait_for(lambda: engine.cache.flush(5.0)["unsaved_chunks"] == 0)
        engine.cache.clear("dram")
        engine.reset(connector=False)
        engine.run(again := request("again", random_tokens(PROMPT, 2)))

        assert len(older) == 4
        assert not set(older) <= set(shards(small_disk))
        assert again.loaded_tokens > 0
        assert leftovers(small_disk / "cache") == []

    def test_what_is_on_a_full_disk_is_served(self, start: Start, small_disk: Path) -> None:
        """Full, and then restarted: nothing that was durable is lost."""
        engine = start(cache_dir=small_disk / "cache", options=EAGER)
        engine.run(request("a", random_tokens(PROMPT)))
        engine.stop()
        fill(small_disk / "of others")

        second = start(cache_dir=small_disk / "cache", options=EAGER)
        second.cache.clear("dram")
        second.run(again := request("b", random_tokens(PROMPT)))

        assert again.loaded_tokens == USABLE
        assert leftovers(small_disk / "cache") == []


def fill(path: Path) -> None:
    """A file that leaves nothing free."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def shards(folder: Path) -> list[Path]:
    """The published shards below a folder."""
    return sorted(folder.rglob("shards/*.safetensors"))


def leftovers(cache_dir: Path) -> list[str]:
    """Temporary files other than the writers' locks."""
    return [str(path) for path in cache_dir.rglob("tmp/*/*") if path.is_file() and path.name != "lock"]


class TestB09SlowDisk:
    """B09: writes that don't end hold up no step; what finds no slot is dropped, and counted."""

    SLOTS = 8

    def test_the_engine_never_waits(self, start: Start) -> None:
        engine = start(slots=self.SLOTS, prefix_caching=False, options=EAGER)
        assert engine.disk is not None
        gate, write = threading.Event(), engine.disk.write

        def slow(*args: Any) -> Shard | None:
            assert gate.wait(30)
            return write(*args)

        engine.disk.write = slow  # type: ignore[assignment, method-assign]
        longest, waiting = 0.0, 0
        for i in range(40):
            engine.submit(request(f"r{i}", random_tokens(2 * CHUNK + 1, i)))
            while engine.waiting or engine.running:
                began = time.monotonic()
                engine.step()
                longest = max(longest, time.monotonic() - began)
                waiting = max(waiting, engine.cache.writer.status()["waiting"])
        counts = Counter(engine.cache.counts)
        gate.set()
        wait_for(lambda: engine.cache.flush(5.0)["unsaved_chunks"] == 0)
        engine.run(request("after", random_tokens(2 * CHUNK + 1, 99)))
        engine.run(again := request("again", random_tokens(2 * CHUNK + 1, 99)))

        assert longest < 1.0  # a write that is waited for takes as long as the gate
        assert waiting <= self.SLOTS
        assert counts["stores"] == self.SLOTS
        assert counts["stores_skipped_no_slot"] >= 32
        assert counts["written_chunks"] == 0
        assert engine.cache.counts["written_chunks"] >= self.SLOTS
        assert again.loaded_tokens == 2 * CHUNK


class TestB15Counters:
    """B15: a number that goes down ends vLLM's metrics, a negative hit its scheduler."""

    def test_the_engine_holds_more_than_the_tiers(self, start: Start) -> None:
        engine = start(options=CacheOptions(persist="none"))
        engine.run(request("a", random_tokens(PROMPT)))
        engine.cache.clear("all")  # its own prefix cache has all blocks still
        planned = request("b", random_tokens(PROMPT))
        engine.planner.new_request(planned)

        answers = [engine.planner.match(planned, local)[0] for local in range(0, USABLE + CHUNK, BLOCK)]

        assert set(answers) == {0}

    @pytest.mark.parametrize("seed", range(3))
    def test_nothing_ever_goes_down(self, start: Start, seed: int) -> None:
        """Through aborts, preemptions, resets and clears; and the sources of a hit add up to it."""
        engine = start(slots=6, options=EAGER)
        rng = random.Random(seed)
        seen: list[int] = []
        for i in range(60):
            req = engine.submit(request(f"r{i}", random_tokens(rng.randrange(1, 5 * CHUNK), rng.randrange(4))))
            for _ in range(rng.randrange(4)):
                engine.step()
            act = rng.randrange(8)
            if act == 0:
                engine.abort(req)
            elif act == 1 and engine.running:
                engine.preempt(rng.choice(engine.running))
            elif act == 2:
                engine.reset()
            elif act == 3:
                engine.cache.clear(rng.choice(["dram", "disk", "all"]))
            elif act == 4:
                engine.reset(connector=False)
            sources = engine.planner.hit_sources(req.request_id, req.loaded_tokens)
            assert sum(sources.values()) == req.loaded_tokens
            seen += [*engine.planner.take_stats().values(), *sources.values()]
        engine.run()

        assert min(seen) >= 0
        assert min(engine.cache.counts.values()) >= 0
