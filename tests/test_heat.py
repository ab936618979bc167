"""How warm chunks are that came from elsewhere: from an import, from another engine, from the life before."""

from __future__ import annotations

import time
from pathlib import Path

from kvsnap.cache import TieredCache
from kvsnap.keys import ChunkKey
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.tiers.disk import DiskTier
from tests.snapshot_fakes import chain, prompt, store
from tests.test_disk_eviction import CHUNK, NS, Prompts, assert_prefix_closed, opened

MIB = 1 << 20
HOT_HITS = 50
YESTERDAY = time.time() - 86_400


def on_disk(cache: TieredCache) -> set[ChunkKey]:
    return {chunk.key for chunk in cache.residency.index if chunk.shard is not None}


def leaders_snapshot(folder: Path) -> tuple[str, list[set[ChunkKey]]]:
    """Eight prompts of four chunks, 8 MiB; the first was hit often, the others never. The keys of each."""
    prompts = [chain(NS, prompt(seed, 256)) for seed in range(8)]
    store(folder / "leader", NS, *prompts)
    with DiskTier(folder / "leader", NS) as disk:
        disk.store_usage([(chunk.key, HOT_HITS, YESTERDAY) for chunk in prompts[0]])
    export_snapshot(folder / "leader", str(folder / "repo"), tag="prod")
    return str(folder / "repo"), [{chunk.key for chunk in chunks} for chunks in prompts]


def fill(cache: TieredCache, chunks: int, seed: int) -> set[ChunkKey]:
    """Chunks of the engine's own."""
    prompts = Prompts(cache, seed)
    keys = set()
    for _ in range(chunks):
        keys.add(prompts.store().key)
        prompts.write()
    return keys


def test_an_import_into_a_full_directory_stays(tmp_path: Path) -> None:
    """The engine makes room as it notices the shards: by what nobody used for a day, not by what has just come."""
    repo, prompts = leaders_snapshot(tmp_path)
    snapshot = set().union(*prompts)
    with opened(tmp_path / "replica", cap=16 * MIB) as cache:
        old = fill(cache, 14 * MIB // CHUNK, seed=1)
        for chunk in cache.residency.index:
            chunk.last_use = YESTERDAY

        import_snapshot(
            repo, "prod", tmp_path / "replica", expect=NS, tier=cache.disk,
            progress=lambda done, total: cache.writer.read_directory(),
        )  # fmt: skip
        cache.writer.read_directory()
        cache.writer.eviction.trim()

        assert snapshot <= on_disk(cache)
        assert old & on_disk(cache)  # no more than was needed
        assert old - on_disk(cache)
        assert_prefix_closed(cache)


def test_what_was_hot_where_it_comes_from_stays_longest(tmp_path: Path) -> None:
    """A live engine takes over the hits that an import writes down, for chunks that it knows or does not know yet."""
    repo, prompts = leaders_snapshot(tmp_path)
    with opened(tmp_path / "replica", cap=16 * MIB) as cache:
        import_snapshot(repo, "prod", tmp_path / "replica", expect=NS)
        cache.writer.read_directory()

        fill(cache, 12 * MIB // CHUNK, seed=1)
        cache.writer.eviction.trim()

        hits = {chunk.key: chunk.hits for chunk in cache.residency.index}
        assert {hits[key] for key in prompts[0]} == {HOT_HITS}
        assert prompts[0] <= on_disk(cache)
        assert not set().union(*prompts[1:]) <= on_disk(cache)


def test_two_engines_write_down_what_both_know(tmp_path: Path) -> None:
    """The last one to write doesn't wipe out what the other has seen; each evicts by both."""
    with opened(tmp_path) as one, opened(tmp_path) as two:
        chunk = Prompts(one).store()
        one.flush(0.0)
        Prompts(one, seed=1).write()
        two.writer.read_directory()
        theirs = two.residency.index.get(chunk.key)
        assert theirs is not None
        for _ in range(3):
            two.touch([theirs], hit=True)

        two.flush(5.0)
        one.flush(5.0)

        assert one.disk is not None
        assert one.disk.load_usage()[chunk.key][0] == 3
        assert chunk.hits == 3


def test_a_chunk_that_nobody_used_counts_from_when_it_was_written(tmp_path: Path) -> None:
    """After a restart, too; and it needs no row in the usage file."""
    with opened(tmp_path) as cache:
        chunk = Prompts(cache).store()
        time.sleep(0.05)  # the file system's clock is a coarse one
        Prompts(cache, seed=1).write()
        cache.flush(5.0)
        assert cache.disk is not None
        assert cache.disk.load_usage() == {}

    with opened(tmp_path) as again:
        found = again.residency.index.get(chunk.key)
        assert found is not None
        assert abs(found.last_use - chunk.last_use) < 60
        assert found.hits == 0
