"""The planner with real tiers, driven by a toy engine: what is loaded is what must be there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.cache import CacheOptions
from kvsnap.preload import Preload
from tests.connector.toy_engine import ToyEngine, request
from tests.connector.toy_engine import random_tokens as tokens
from tests.disk_fakes import make_namespace
from tests.waiting import wait_for

Start = Callable[..., ToyEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts engines on one cache directory and one DRAM directory; ends them all."""
    engines: list[ToyEngine] = []
    dram_dir = tmp_path / "shm"
    dram_dir.mkdir()

    def make(**kwargs: object) -> ToyEngine:
        namespace = kwargs.pop("namespace", None) or make_namespace()
        engine = ToyEngine(namespace, tmp_path / "cache", dram_dir, **kwargs)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.kill()


@pytest.mark.parametrize("length", [15, 16, 17, 63, 64, 65, 128, 144, 200])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_second_request_loads_all_whole_blocks(start: Start, length: int, prefix_caching: bool) -> None:
    """B01: a prompt that is a multiple of the block, or of the chunk, leaves one block to compute."""
    engine = start(prefix_caching=prefix_caching)
    engine.run(request("a", tokens(length)))
    engine.reset(connector=False)

    again = request("b", tokens(length))
    engine.run(again)

    assert again.loaded_tokens == (length - 1) // 16 * 16


def test_hit_ends_inside_a_chunk(start: Start) -> None:
    """Two prompts that share 40 of 64 tokens share two 16-token blocks."""
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(64) + tokens(64, 1)))

    other = request("b", tokens(64) + tokens(40, 1) + tokens(60, 2))
    engine.run(other)

    assert other.loaded_tokens == 64 + 32


def test_short_chunk_is_found_by_a_longer_prompt(start: Start) -> None:
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(40)))

    longer = request("b", tokens(100))
    engine.run(longer)

    assert longer.loaded_tokens == 32


def test_local_hit_is_extended_not_overwritten(start: Start) -> None:
    """A19: the engine's own hit ends in the middle of a chunk; only the blocks after it are loaded."""
    engine = start(num_blocks=32)
    engine.run(request("a", tokens(128)))
    for key, block in list(engine.hashed.items())[3:]:
        del engine.hashed[key]
        assert block

    again = request("b", tokens(128))
    engine.run(again)

    assert again.loaded_tokens == 112 - 48


def test_salts_are_separate(start: Start) -> None:
    """A10: only an equal salt hits."""
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(128), salt="x"))
    others = [request("b", tokens(128), salt="y"), request("c", tokens(128)), request("d", tokens(128), salt="x")]

    engine.run(*others)

    assert [other.loaded_tokens for other in others] == [0, 0, 112]


def test_uncacheable_request_neither_loads_nor_stores(start: Start) -> None:
    """A13: no hit, nothing stored, never a negative number, and the reason can be read."""
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(128), cacheable="prompt embeds"))
    plain = request("b", tokens(128))
    engine.run(plain, request("c", tokens(128), cacheable="prompt embeds"))

    assert plain.loaded_tokens == 0
    assert engine.planner.misses["request not cacheable: prompt embeds"] == 2


def test_store_false_keeps_a_prompt_out(start: Start) -> None:
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(128), wants_store=False))

    again = request("b", tokens(128))
    engine.run(again)

    assert again.loaded_tokens == 0


def test_restart_attaches_the_dram_tier(start: Start) -> None:
    """Invariant 8: killed at once after a store, the next engine hits; nothing reached the disk."""
    engine = start()
    engine.run(request("a", tokens(200)))
    wait_for(lambda: engine.cache.status()["counts"].get("stored") == 3 and all_hashed(engine))
    engine.kill()

    second = start()
    again = request("b", tokens(200))
    second.run(again)

    assert again.loaded_tokens == 192
    assert second.cache.counts["promoted"] == 0


def test_restart_without_dram_reads_the_disk(start: Start, tmp_path: Path) -> None:
    """C02: the index is rebuilt from the shards; nothing is written twice."""
    engine = start()
    engine.run(request("a", tokens(200)))
    engine.stop()
    shards = sorted((tmp_path / "cache").rglob("*.safetensors"))
    for file in (tmp_path / "shm").iterdir():
        file.unlink()

    second = start()
    again = request("b", tokens(200))
    second.run(again)
    second.stop()

    assert again.loaded_tokens == 192
    assert second.cache.counts["hit_tokens_disk"] == 192
    assert sorted((tmp_path / "cache").rglob("*.safetensors")) == shards


def test_disk_hit_is_promoted_once(start: Start) -> None:
    """C14: asked three times, read once."""
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(200)))
    engine.cache.flush(10.0)
    engine.cache.clear("dram")

    for name in "bcd":
        engine.run(request(name, tokens(200)))

    assert engine.cache.counts["promoted"] == 3
    assert engine.cache.counts["hit_tokens_host"] == 2 * 192


def test_eviction_takes_the_tail_first(start: Start) -> None:
    """C06 and invariant 6: after evictions the usable prefix is what is resident, not zero."""
    engine = start(slots=8, prefix_caching=False, options=CacheOptions(persist="none"))
    engine.run(request("a", tokens(8 * 64)))
    engine.run(request("b", tokens(2 * 64, 1)))

    again = request("c", tokens(8 * 64))
    engine.run(again)

    assert again.loaded_tokens == 6 * 64


def test_cold_chunks_sink_to_disk(start: Start) -> None:
    """Four times more prompts than slots: the DRAM tier overflows to disk, and all of them hit."""
    engine = start(slots=8, prefix_caching=False, options=CacheOptions(shard_seconds=0.0))
    for seed in range(16):
        engine.run(request(f"a{seed}", tokens(128, seed)))
        engine.cache.flush(10.0)

    again = [request(f"b{seed}", tokens(128, seed)) for seed in range(16)]
    for req in again:
        engine.run(req)

    assert [req.loaded_tokens for req in again] == [112] * 16


def test_damaged_shard_is_a_miss_and_heals(start: Start, tmp_path: Path) -> None:
    """A28: one flipped byte: right output, the shard in quarantine, and stored again when it comes by."""
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(200)))
    engine.cache.flush(10.0)
    engine.cache.clear("dram")
    (shard,) = (tmp_path / "cache").rglob("shards/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5000] ^= 1
    shard.chmod(0o600)
    shard.write_bytes(data)

    engine.run(first := request("b", tokens(200)))
    wait_for(lambda: engine.cache.counts["quarantined_shards"] == 1)
    engine.cache.flush(10.0)
    engine.cache.clear("dram")
    engine.run(second := request("c", tokens(200)))

    assert first.loaded_tokens == 128  # the chunks before the damaged one
    assert second.loaded_tokens == 192
    assert len(list((tmp_path / "cache").rglob("quarantine/*"))) == 1


@pytest.mark.parametrize("damage", ["delete", "truncate", "chmod", "directory"])
def test_bad_file_is_a_miss_once(start: Start, tmp_path: Path, damage: str) -> None:
    """B05 and B06: whatever happened to the file, the request is computed, and the file is not asked again."""
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(200)))
    engine.cache.flush(10.0)
    engine.cache.clear("dram")
    (shard,) = (tmp_path / "cache").rglob("shards/*.safetensors")
    if damage == "truncate":
        shard.chmod(0o600)
        shard.write_bytes(shard.read_bytes()[:4096])
    else:
        shard.rename(shard.with_suffix(".gone"))
        if damage == "chmod":
            shard.symlink_to("nowhere")  # as root no mode stops a read; a dangling link does
        elif damage == "directory":
            shard.mkdir()

    engine.run(first := request("b", tokens(200)))
    engine.run(second := request("c", tokens(200)))

    assert first.loaded_tokens == 0
    assert second.loaded_tokens == 192  # from DRAM, stored by the first


def test_reset_makes_everything_unreachable(start: Start) -> None:
    """A14: also for an engine that attaches the file later."""
    engine = start()
    engine.run(request("a", tokens(200)))
    engine.cache.clear("disk")
    engine.reset()
    engine.run(after := request("b", tokens(200)))
    assert after.loaded_tokens == 0
    engine.reset()
    engine.kill()

    second = start()
    second.run(later := request("c", tokens(200)))

    assert later.loaded_tokens == 0


def test_blocks_computed_before_a_reset_are_not_stored(start: Start) -> None:
    engine = start()
    engine.run(request("a", tokens(128)))
    engine.planner.reset()  # the connector alone: the engine's own cache still has the blocks

    engine.run(request("b", tokens(144)))
    engine.reset(connector=False)
    engine.run(again := request("c", tokens(144)))

    assert again.loaded_tokens == 0


def test_preempted_request_resumes_from_dram(start: Start) -> None:
    """A21: what was stored before the preemption is loaded after it."""
    engine = start(prefix_caching=False, step_tokens=64)
    req = engine.submit(request("a", tokens(200)))
    engine.step()
    engine.step()
    engine.preempt(req)

    engine.run()

    assert req.loaded_tokens == 128


def test_aborts_at_any_point_leave_no_pin(start: Start) -> None:
    """B02 and B04: after many aborts every slot can be had again."""
    engine = start(slots=8, prefix_caching=False, options=CacheOptions(persist="none"))
    for i in range(60):
        req = engine.submit(request(f"a{i}", tokens(200, i % 3)))
        for _ in range(i % 4):
            engine.step()
        engine.abort(req)
    engine.step()

    assert engine.cache.clear("dram")["dram_chunks"] > 0
    assert engine.cache.residency.num_free == 8


def test_two_ranks_agree(start: Start) -> None:
    """A24: each rank has its own slice; a chunk is there for both or for neither."""
    engine = start(namespace=make_namespace(ranks=2), prefix_caching=False)
    engine.run(request("a", tokens(200)))
    engine.run(again := request("b", tokens(200)))

    assert again.loaded_tokens == 192


def test_one_rank_that_refuses_voids_the_store(start: Start) -> None:
    """A16: the ranks can't disagree on the length of a hit."""
    engine = start(namespace=make_namespace(ranks=2), prefix_caching=False)
    engine.workers[1].distrust(10**6)
    engine.run(request("a", tokens(200)))
    engine.workers[1]._distrusted_seq = 0
    num_free = engine.cache.residency.num_free
    engine.run(again := request("b", tokens(200)))

    assert again.loaded_tokens == 0
    assert num_free == engine.cache.residency.num_slots


def test_a_child_of_an_unstored_chunk_is_not_stored(start: Start) -> None:
    """Invariant 6: when no slot can be had, the later chunks of that request are skipped too."""
    engine = start(slots=4, prefix_caching=False, options=CacheOptions(persist="all"), threads=False)
    engine.run(request("a", tokens(8 * 64)))

    engine.run(again := request("b", tokens(8 * 64)))

    assert again.loaded_tokens == 4 * 64
    assert engine.cache.counts["stores_skipped_no_slot"] >= 1


def test_waits_end_without_the_disk(start: Start) -> None:
    """Invariant 2: a disk that never answers costs lookup_seconds, not the request."""
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(200)))
    engine.cache.flush(10.0)
    engine.cache.clear("dram")
    engine.cache.promoter.submit = lambda jobs: None  # type: ignore[method-assign]
    engine.planner._lookup_seconds = 0.05

    engine.run(slow := request("b", tokens(200)))

    assert slow.loaded_tokens == 0
    assert engine.planner.misses["promotion took longer than lookup_seconds"] == 1


def test_slow_disk_is_not_waited_for(start: Start) -> None:
    """B17: where reading is predicted slower than computing, the request is computed."""
    engine = start(prefix_caching=False, load_policy="auto")
    engine.run(request("a", tokens(200)))
    engine.cache.flush(10.0)
    engine.cache.clear("dram")
    engine.cache.rates.disk_bytes_per_s = 1000.0
    engine.cache.rates.prefill_tokens_per_s = 1e6

    engine.run(slow := request("b", tokens(200)))

    assert slow.loaded_tokens == 0
    assert engine.planner.misses["reading predicted slower than computing"] == 1


def test_nothing_computed_from_lost_blocks_is_stored(start: Start) -> None:
    """A17: a load fails in the step that stores what was computed on top of it."""
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(64) + tokens(64, 1)))
    engine.fails_load = lambda rank, block_ids: len(block_ids) == 2  # the two shared blocks of the second chunk

    engine.run(broken := request("b", tokens(64) + tokens(40, 1) + tokens(160, 2)))
    engine.fails_load = lambda rank, block_ids: False
    engine.run(after := request("c", tokens(64) + tokens(40, 1) + tokens(160, 2)))

    assert broken.loaded_tokens == 96
    assert after.loaded_tokens == 256  # stored anew once the blocks were computed


def test_a_memo_never_outlives_its_promise(start: Start) -> None:
    """The engine's own hit covers the prompt for a moment, then it is gone again."""
    engine = start()
    engine.run(request("a", tokens(128)))
    req = request("b", tokens(128))
    engine.planner.new_request(req)
    assert engine.planner.match(req, 0) == (112, False)
    assert engine.planner.match(req, 112) == (0, False)

    again = engine.planner.match(req, 0)

    assert again == (112, False)
    assert engine.planner._requests["b"].promise is not None


def test_clear_between_plan_and_store_gives_the_slots_back(start: Start) -> None:
    """A store that is refused still ends: its slot is not held for ever."""
    engine = start(prefix_caching=False, threads=False, step_tokens=512)
    req = engine.submit(request("a", tokens(200)))
    plan_step = engine.planner.plan_step

    def plan_then_clear(*args: object) -> object:
        plan = plan_step(*args)  # type: ignore[arg-type]
        engine.cache.clear("dram")
        return plan

    engine.planner.plan_step = plan_then_clear  # type: ignore[method-assign, assignment]
    engine.step()

    assert req.computed == 200
    assert not engine.cache.has_pending_copies
    assert engine.cache.residency.num_free == engine.cache.residency.num_slots


def test_speed_of_prefill_with_two_steps_in_flight(start: Start) -> None:
    """B17: a step that is planned before the one before it is done doesn't look infinitely fast."""
    engine = start()
    planner = engine.planner
    rows = [("nobody", 0, 1024, list)]
    planner.plan_step(rows)
    planner.plan_step(rows)
    time.sleep(0.02)
    planner.step_done()
    planner.plan_step(rows)
    time.sleep(0.02)
    planner.step_done()

    assert planner.cache.rates.prefill_tokens_per_s < 1024 / 0.015


def test_a_resumed_request_may_wait_for_the_disk_again(start: Start) -> None:
    """A21: under pressure, resuming from disk is what the tier is for."""
    engine = start(prefix_caching=False, step_tokens=64)
    engine.run(request("a", tokens(200)))
    engine.cache.flush(10.0)
    engine.cache.clear("dram")
    req = engine.submit(request("b", tokens(200), max_tokens=3))
    while not req.loaded_tokens:
        engine.step()
    engine.preempt(req)
    engine.cache.clear("dram")
    engine.planner._requests["b"].deadline = 1e-9  # as if the first wait had run out long ago
    engine.planner.preempted(["b"])

    engine.run()

    assert req.loaded_tokens == 2 * 192


def test_covered_short_chunk_counts_again_without_its_cover(start: Start) -> None:
    engine = start(prefix_caching=False)
    engine.run(request("a", tokens(40)))
    engine.run(request("b", tokens(64)))
    index = engine.cache.residency.index
    (short,) = [chunk for chunk in index if chunk.tokens == 32]
    assert short.is_covered

    (cover,) = [chunk for chunk in index if chunk.tokens == 64]
    with engine.cache.lock:
        engine.cache.residency.vacate(cover)

    assert not short.is_covered


def test_preload_goes_on_when_its_time_is_up(start: Start) -> None:
    engine = start(slots=12, prefix_caching=False)
    engine.run(request("a", tokens(8 * 64)))
    engine.cache.flush(10.0)
    engine.cache.clear("dram")

    Preload(engine.cache, 1 << 30)

    wait_for(lambda: sum(c.slot >= 0 for c in engine.cache.residency.index) == 8)


def all_hashed(engine: ToyEngine) -> bool:
    """Whether every chunk in DRAM has its checksum."""
    return all(chunk.dram_xxh3 for chunk in engine.cache.residency.index if chunk.slot >= 0)
