"""Prompts that share a start stay together, whatever the number of workers; shared tokens count once."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvsnap.warmup.estimate import estimate, resident_keys
from kvsnap.warmup.grouping import distinct_tokens, group, group_key, shard, usable_tokens
from tests.disk_fakes import make_namespace
from tests.snapshot_fakes import chain, prompt, store


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 7))
def test_shards_cover_everything_once_and_keep_groups_whole(keys: list[int], count: int) -> None:
    groups = group(keys)

    parts = [shard(groups, index, count) for index in range(count)]

    assert sorted(i for part in parts for members in part for i in members) == list(range(len(keys)))
    for part in parts:
        mine = {keys[i] for members in part for i in members}
        assert sum(keys.count(key) for key in mine) == sum(len(members) for members in part)


def test_group_key_is_the_common_start() -> None:
    start = list(range(300))
    a, b, c = [*start[:256], 1], [*start[:256], 2], [*start[:255], 3, 4]

    def key(ids: list[int], salt: str | None = None) -> object:
        return group_key(ids, salt=salt, model="m")

    assert key(a) == key(b)
    assert key(a) != key(c)
    assert key(a) != key(a, "tenant")


def test_shared_blocks_count_once() -> None:
    shared = list(range(40))
    prompts = [(shared + [100] * 8, None), (shared + [200] * 30, None), (shared, "tenant")]

    assert distinct_tokens(prompts, 16) == 32 + 16 + 32 + 32


def test_a_hit_is_whole_blocks_and_never_the_last_token() -> None:
    assert [usable_tokens(n, 16) for n in (0, 1, 16, 17, 32, 33)] == [0, 0, 0, 16, 16, 32]


def test_estimate_knows_what_is_on_disk(tmp_path: Path) -> None:
    """Exactly what an engine stores: full chunks and one short one, shared ones once, resident ones not again."""
    ns = make_namespace()
    ids, other = prompt(1, 3 * 64 + 40, shared=64), prompt(2, 2 * 64, shared=64)
    (written,) = store(tmp_path, ns, chain(ns, ids[: 2 * 64]))
    directory = tmp_path / ns.dirname

    found = estimate(ns, resident_keys(directory, ns), [(ids, None), (other, None)])

    assert len(written.entries) == 2
    assert found.resident_tokens == 128
    assert found.tokens == 3 * 64 + 32 + 64
    assert found.missing_bytes == sum(ns.geometry.chunk_bytes(tokens) for tokens in (64, 32, 64))
