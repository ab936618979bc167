"""Who goes next: pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.policy import FrequencyRecency, Rates, prefix_closed


class TestFrequencyRecency:
    def test_later_use_is_worth_more(self) -> None:
        policy = FrequencyRecency()

        assert policy.score(0, 100.0) < policy.score(0, 101.0)

    def test_doubling_the_hits_is_worth_the_bonus(self) -> None:
        policy = FrequencyRecency(bonus_s=600.0)

        assert policy.score(3, 0.0) == pytest.approx(policy.score(1, 600.0))
        assert policy.score(0, 50.0) == 50.0

    @given(st.integers(0, 2**32), st.integers(0, 2**32), st.floats(0, 4e9))
    def test_hits_never_make_a_chunk_colder(self, a: int, b: int, last_use: float) -> None:
        scores = [FrequencyRecency().score(hits, last_use) for hits in sorted((a, b))]

        assert scores[0] <= scores[1]


class TestRates:
    def test_unmeasured_speeds_load(self) -> None:
        """The first hit after a start must not be declined for want of a number."""
        rates = Rates()
        assert rates.is_worth_loading(1 << 40, 0, 1)
        rates.saw_read(1000, 1.0)
        assert rates.is_worth_loading(1 << 40, 0, 1)

    def test_slower_reading_than_computing_is_declined(self) -> None:
        """B17."""
        rates = Rates()
        rates.saw_read(1000, 1.0)
        rates.saw_prefill(100, 1.0)

        assert rates.is_worth_loading(1000, 0, 100)
        assert not rates.is_worth_loading(1001, 0, 100)

    def test_a_measured_speed_follows_slowly(self) -> None:
        """One slow read in a thousand does not turn loading off."""
        rates = Rates()
        rates.saw_read(1000, 1.0)
        rates.saw_read(0, 1.0)
        assert rates.disk_bytes_per_s == pytest.approx(700.0)
        for _ in range(50):
            rates.saw_read(10, 1.0)

        assert rates.disk_bytes_per_s == pytest.approx(10.0, rel=0.01)

    def test_no_time_at_all(self) -> None:
        rates = Rates()
        rates.saw_read(1000, 0.0)
        rates.saw_prefill(1000, 0.0)

        assert math.isfinite(rates.disk_bytes_per_s)
        assert math.isfinite(rates.prefill_tokens_per_s)


trees = st.lists(st.integers(-2, 30), max_size=30).map(
    lambda parents: {
        b"%d" % i: None if parent == -1 else b"%d" % parent if 0 <= parent < i else b"lost"
        for i, parent in enumerate(parents)
        if parent != -2
    }
)


class TestPrefixClosed:
    @given(trees, st.lists(st.integers(0, 40).map(lambda i: b"%d" % i), max_size=40))
    def test_parents_come_first_and_chains_are_whole(
        self, parents: dict[bytes, bytes | None], wanted: list[bytes]
    ) -> None:
        """Invariant 6."""
        order = prefix_closed(wanted, parents)

        assert len(set(order)) == len(order)
        for at, key in enumerate(order):
            above = parents[key]
            assert above is None or above in order[:at]
        whole = [key for key in wanted if _chain(key, parents)]
        assert set(order) == {above for key in whole for above in _chain(key, parents)}

    def test_order_is_that_of_first_need(self) -> None:
        parents: dict[bytes, bytes | None] = {b"a": None, b"b": b"a", b"c": b"b", b"x": None, b"y": b"x"}

        assert prefix_closed([b"y", b"c", b"a"], parents) == [b"x", b"y", b"a", b"b", b"c"]

    def test_chunk_without_its_chain_is_left_out(self) -> None:
        assert prefix_closed([b"b", b"a"], {b"b": b"gone", b"a": None}) == [b"a"]


def _chain(key: bytes, parents: dict[bytes, bytes | None]) -> set[bytes]:
    """The key and all its ancestors; empty where one is missing."""
    chain: set[bytes] = set()
    at: bytes | None = key
    while at is not None:
        if at not in parents:
            return set()
        chain.add(at)
        at = parents[at]
    return chain
