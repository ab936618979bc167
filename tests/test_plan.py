"""Which shards are taken: budgets hold, and what is live is prefix-closed, whatever the table."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.plan import ShardChoice, choose_shards, heat_order, live_rows

Table = tuple[list[int], list[int], list[int]]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Parent of each row (earlier, -1 for roots), in order of depth; shard of each row; bytes of each shard."""
    num_rows = draw(st.integers(0, 30))
    depths = sorted(draw(st.lists(st.integers(0, 4), min_size=num_rows, max_size=num_rows)))
    parents: list[int] = []
    actual: list[int] = []
    for wanted in depths:
        above = [row for row, depth in enumerate(actual) if depth == wanted - 1]
        if above:
            parents.append(draw(st.sampled_from(above)))
            actual.append(wanted)
        else:
            parents.append(-1)
            actual.append(0)
    order = sorted(range(num_rows), key=lambda row: actual[row])
    at = {row: i for i, row in enumerate(order)}
    parents = [-1 if parents[row] < 0 else at[parents[row]] for row in order]
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    shards = draw(st.lists(st.integers(0, len(sizes) - 1), min_size=num_rows, max_size=num_rows))
    return parents, shards, sizes


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def choose(table: Table, order: list[int], max_bytes: int | None) -> ShardChoice:
    parents, shards, sizes = table
    return choose_shards(
        order,
        sizes,
        np.array(shards, np.int64),
        np.array(parents, np.int64),
        np.array(depths_of(parents), np.int64),
        max_bytes=max_bytes,
    )


@given(tables(), st.integers(0, 40))
def test_budget_holds_and_live_rows_are_prefix_closed(table: Table, budget: int) -> None:
    """Invariants 6 and 7"""
    parents, shards, sizes = table

    choice = choose(table, list(range(len(sizes))), budget)

    assert choice.nbytes == sum(sizes[i] for i in choice.shards) <= budget
    assert len(set(choice.shards)) == len(choice.shards)
    for row, is_live in enumerate(choice.live.tolist()):
        has_parent = parents[row] < 0 or choice.live[parents[row]]
        assert is_live == (shards[row] in choice.shards and bool(has_parent))


@given(tables())
def test_without_a_budget_everything_is_taken(table: Table) -> None:
    choice = choose(table, list(range(len(table[2]))), None)

    assert sorted(choice.shards) == list(range(len(table[2])))
    assert choice.live.all()


@given(tables(), st.data())
def test_what_is_not_offered_is_not_taken(table: Table, data: st.DataObject) -> None:
    offered = data.draw(st.permutations(range(len(table[2]))))[: data.draw(st.integers(0, len(table[2])))]

    assert set(choose(table, offered, None).shards) <= set(offered)


def test_hotter_shards_come_first_with_those_that_they_need() -> None:
    """Shard 2 is the hottest and needs 1; shard 0 needs nothing."""
    table = ([-1, -1, 1], [0, 1, 2], [5, 5, 5])

    assert choose(table, [2, 0, 1], 10).shards == (1, 2)
    assert choose(table, [2, 0, 1], 9).shards == (0,)


def test_a_part_of_a_tangle_is_better_than_nothing() -> None:
    """Two shards need each other, and both don't fit: the one that has a root still helps."""
    table = ([-1, -1, 0, 1], [0, 1, 1, 0], [5, 5])

    choice = choose(table, [0, 1], 5)

    assert choice.shards == (0,)
    assert choice.live.tolist() == [True, False, False, False]


def test_a_long_chain_needs_no_recursion() -> None:
    parents = list(range(-1, 4999))
    depth = np.arange(5000)

    live = live_rows(np.array(parents), depth, np.ones(5000, bool))
    choice = choose_shards(range(5000), [1] * 5000, depth, np.array(parents), depth, max_bytes=5000)

    assert live.all()
    assert choice.shards == tuple(range(5000))


def test_order_of_heat() -> None:
    hits = np.array([0, 4, 4, 0])
    last_use = np.array([9, 1, 2, 8])
    depth = np.array([0, 0, 0, 0])
    shard = np.array([0, 1, 2, 3])

    assert heat_order(hits, last_use, depth, shard, ["a", "b", "c", "d"], recent=False) == [2, 1, 0, 3]
    assert heat_order(hits, last_use, depth, shard, ["a", "b", "c", "d"], recent=True) == [0, 3, 2, 1]
