"""Which chunks die and which shards go: pure, against a slow and simple reading of the rule."""

from __future__ import annotations

import heapq
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.eviction_plan import DiskView, EvictionPlan, plan_eviction

HEADER = 4096


def make_view(
    rows: list[tuple[int, float, int]],
    *,
    chunk_bytes: int = 100_000,
    dead: dict[int, int] | None = None,
    pinned: frozenset[int] = frozenset(),
) -> DiskView:
    """Rows of (parent row or -1, score, shard); `dead` chunks lie in a shard besides."""
    num_shards = 1 + max([shard for _, _, shard in rows] + list(dead or {}), default=-1)
    depth: list[int] = []
    for parent, _, _ in rows:
        depth.append(0 if parent < 0 else depth[parent] + 1)
    counts = [sum(s == shard for _, _, s in rows) + (dead or {}).get(shard, 0) for shard in range(num_shards)]
    data = [chunk_bytes * count for count in counts]
    return DiskView(
        score=np.array([score for _, score, _ in rows], dtype=np.float64),
        parent=np.array([parent for parent, _, _ in rows], dtype=np.int64),
        depth=np.array(depth, dtype=np.int64),
        shard=np.array([shard for _, _, shard in rows], dtype=np.int64),
        nbytes=np.full(len(rows), chunk_bytes, dtype=np.int64),
        is_pinned=np.array([row in pinned for row in range(len(rows))], dtype=np.bool_),
        shard_real_bytes=np.array([size + HEADER if size else HEADER for size in data], dtype=np.int64),
        shard_data_bytes=np.array(data, dtype=np.int64),
    )


@st.composite
def views(draw: st.DrawFn) -> DiskView:
    count = draw(st.integers(0, 40))
    num_shards = draw(st.integers(1, 6))
    rows = [
        (
            draw(st.integers(-1, row - 1)),
            draw(st.one_of(st.just(-math.inf), st.floats(0, 2e9), st.integers(0, 3).map(float))),
            draw(st.integers(0, num_shards - 1)),
        )
        for row in range(count)
    ]
    dead = draw(st.dictionaries(st.integers(0, num_shards - 1), st.integers(1, 9), max_size=num_shards))
    pinned = frozenset(draw(st.sets(st.integers(0, count - 1), max_size=3))) if count else frozenset()
    return make_view(rows, dead=dead, pinned=pinned)


def leaves_first(view: DiskView) -> list[int]:
    """The coldest leaf, again and again, the slow way."""
    parents = view.parent.tolist()
    children = [parents.count(row) for row in range(len(parents))]
    heap = [(view.score[row], -view.depth[row], row) for row in range(len(parents)) if not children[row]]
    heapq.heapify(heap)
    order = []
    while heap:
        _, _, row = heapq.heappop(heap)
        if view.is_pinned[row]:
            continue
        order.append(row)
        if parents[row] >= 0:
            children[parents[row]] -= 1
            if not children[parents[row]]:
                heapq.heappush(heap, (view.score[parents[row]], -view.depth[parents[row]], parents[row]))
    return order


def alive_bytes(view: DiskView, dead: set[int]) -> list[int]:
    return [
        sum(int(view.nbytes[row]) for row in range(len(view.shard)) if view.shard[row] == shard and row not in dead)
        for shard in range(len(view.shard_real_bytes))
    ]


def gain(view: DiskView, shard: int, alive: int, compact_below: float) -> float:
    real, data = int(view.shard_real_bytes[shard]), int(view.shard_data_bytes[shard])
    if alive == 0:
        return real
    return max(0.0, real - real * (alive / data) - HEADER) if alive < compact_below * data else 0.0


shares = st.sampled_from([0.0, 0.5])


class TestPlan:
    @settings(max_examples=50)
    @given(views(), st.integers(0, 5_000_000), shares)
    def test_what_is_left_has_whole_chains(self, view: DiskView, needed: int, share: float) -> None:
        """Invariant 6: a chunk never stays without its parent; children come before their parents in the order."""
        victims = plan_eviction(view, needed, compact_below=share).victims.tolist()

        position = {row: i for i, row in enumerate(victims)}
        for row, parent in enumerate(view.parent.tolist()):
            if parent in position:
                assert position[row] < position[parent]

    @settings(max_examples=50)
    @given(views(), st.integers(0, 5_000_000), shares)
    def test_frees_enough_if_there_is_enough(self, view: DiskView, needed: int, share: float) -> None:
        """Invariant 7."""
        plan = plan_eviction(view, needed, compact_below=share)

        alive = alive_bytes(view, set(plan.victims.tolist()))
        freed = sum(gain(view, shard, alive[shard], share) for shard in plan.shards)
        most = sum(gain(view, s, a, share) for s, a in enumerate(alive_bytes(view, set(leaves_first(view)))))
        assert freed >= min(needed, most) - 1
        assert plan.freed_bytes == pytest.approx(freed, abs=1)

    @settings(max_examples=50)
    @given(views(), st.integers(0, 5_000_000), shares)
    def test_the_victims_are_the_coldest_leaves(self, view: DiskView, needed: int, share: float) -> None:
        """C06: against the slow reading. Nothing dies beyond the point where enough could be had."""
        plan = plan_eviction(view, needed, compact_below=share)

        slow = leaves_first(view)
        count = 0
        while count < len(slow) and _most(view, slow[:count], share) < needed:
            count += 1
        allowed = max((_latest_of(view, row) for row in slow[:count]), default=-math.inf)
        victims = set(plan.victims.tolist())
        assert all(_latest_of(view, row) <= allowed for row in victims)
        assert not victims & {row for row in range(len(view.shard)) if view.is_pinned[row]}

    @settings(max_examples=50)
    @given(views(), st.integers(0, 5_000_000), shares)
    def test_nothing_dies_for_nothing(self, view: DiskView, needed: int, share: float) -> None:
        """A victim lies in a shard that goes, or below a chunk that does."""
        plan = plan_eviction(view, needed, compact_below=share)

        victims = set(plan.victims.tolist())
        for row in victims:
            assert view.shard[row] in plan.shards or view.parent[row] in victims
        if needed <= 0:
            assert not victims
            assert not plan.shards

    @settings(max_examples=50)
    @given(views(), st.integers(0, 5_000_000))
    def test_no_shard_is_copied_that_has_half_alive(self, view: DiskView, needed: int) -> None:
        """Never more bytes are written than come back."""
        plan = plan_eviction(view, needed)

        alive = alive_bytes(view, set(plan.victims.tolist()))
        assert all(alive[shard] < 0.5 * view.shard_data_bytes[shard] or not alive[shard] for shard in plan.shards)
        assert len(set(plan.shards)) == len(plan.shards)


def _latest_of(view: DiskView, row: int) -> float:
    below = [row]
    for at in below:
        below.extend(i for i, parent in enumerate(view.parent.tolist()) if parent == at)
    return max(float(view.score[at]) for at in below)


def _most(view: DiskView, dead: list[int], share: float) -> float:
    return sum(gain(view, s, a, share) for s, a in enumerate(alive_bytes(view, set(dead))))


class TestExamples:
    def test_tail_of_a_prompt_goes_first(self) -> None:
        """C06: 20 chunks stored in four steps; a quarter goes; the first 15 are still a prefix."""
        view = make_view([(row - 1, 100.0 + row, row // 5) for row in range(20)])

        plan = plan_eviction(view, 5 * 100_000)

        assert plan.victims.tolist() == [19, 18, 17, 16, 15]
        assert plan.shards == (3,)

    def test_hot_chunks_among_cold_ones_are_copied(self) -> None:
        """Two hot chunks in a shard of ten cold ones: the cold ones' bytes come back, the hot ones stay."""
        rows = [(-1, 1000.0 if row in (3, 7) else float(row), 0) for row in range(12)]

        plan = plan_eviction(make_view(rows), 500_000)

        assert plan.shards == (0,)
        assert not {3, 7} & set(plan.victims.tolist())

    def test_without_copies_the_shard_without_the_hot_chunk_goes(self) -> None:
        rows = [(-1, 1000.0 if row == 3 else float(row), row // 6) for row in range(12)]

        plan = plan_eviction(make_view(rows), 500_000, compact_below=0.0)

        assert plan.shards == (1,)
        assert sorted(plan.victims.tolist()) == [6, 7, 8, 9, 10, 11]

    def test_dead_weight_goes_before_anything_alive(self) -> None:
        plan = plan_eviction(make_view([(-1, 1.0, 0)], dead={1: 3, 0: 2}), 400_000)

        assert plan.shards == (1, 0)
        assert plan.victims.tolist() == []

    def test_pinned_chunk_keeps_its_ancestors(self) -> None:
        view = make_view([(row - 1, float(row), 0) for row in range(4)], pinned=frozenset({2}))

        plan = plan_eviction(view, 10_000_000)

        assert plan.shards == ()
        assert plan.victims.tolist() == []

    def test_nothing_there(self) -> None:
        plan = plan_eviction(make_view([]), 1000)

        assert (plan.victims.tolist(), plan.shards, plan.freed_bytes) == ([], (), 0)

    def test_a_hundred_thousand_chunks(self) -> None:
        """The plan is made beside a serving engine: a fraction of a second."""
        rng = np.random.default_rng(1)
        count, chain = 100_000, 50
        row = np.arange(count)
        view = DiskView(
            score=rng.random(count),
            parent=np.where(row % chain, row - 1, -1),
            depth=row % chain,
            shard=row // 500,
            nbytes=np.full(count, 1 << 18),
            is_pinned=np.zeros(count, dtype=np.bool_),
            shard_real_bytes=np.full(count // 500, 500 << 18),
            shard_data_bytes=np.full(count // 500, 500 << 18),
        )
        start = time.perf_counter()

        plan = plan_eviction(view, 1 << 30)

        assert time.perf_counter() - start < 2
        assert isinstance(plan, EvictionPlan)
        assert plan.freed_bytes >= 1 << 30
