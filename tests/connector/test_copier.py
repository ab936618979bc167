"""Whole pages, in the order of a slot, whatever the strides of the engine's cache."""

from __future__ import annotations

import numpy as np
import pytest

from kvsnap.errors import KvsnapError
from kvsnap_connector.copier import CpuCopier, PageViews, zero_padding
from tests.connector.fakes import make_pages


@pytest.mark.parametrize("gap", [0, 64], ids=["dense", "padded blocks"])
def test_a_slice_is_blocks_then_layers_then_the_page(gap: int) -> None:
    memory, pages = make_pages(3, 8, 256, gap=gap)
    area = np.zeros(3 * 3 * 256, dtype=np.uint8)

    CpuCopier(pages).gather([5, 2, 7], area)

    expected = memory[:, [5, 2, 7], :256].transpose(1, 0, 2)
    assert np.array_equal(area.reshape(3, 3, 256), expected)


@pytest.mark.parametrize("gap", [0, 64], ids=["dense", "padded blocks"])
def test_scatter_undoes_gather_and_touches_nothing_else(gap: int) -> None:
    memory, pages = make_pages(3, 8, 256, gap=gap)
    before = memory.copy()
    area = np.random.default_rng(1).integers(0, 256, size=4096, dtype=np.uint8)

    CpuCopier(pages).scatter(area, [6, 1])

    assert np.array_equal(memory[:, [6, 1], :256].transpose(1, 0, 2).reshape(-1), area[: 2 * 3 * 256])
    before[:, [6, 1], :256] = memory[:, [6, 1], :256]
    assert np.array_equal(memory, before)


def test_layers_that_lie_at_odd_distances_are_copied_one_by_one() -> None:
    _, pages = make_pages(3, 8, 256)
    odd = PageViews(layers=(pages.layers[0], pages.layers[2], pages.layers[1]))
    area = np.zeros(3 * 256, dtype=np.uint8)

    CpuCopier(odd).gather([4], area)

    assert np.array_equal(area.reshape(3, 256), np.stack([view[4] for view in odd.layers]))


def test_blocks_outermost_layouts_give_the_same_slice() -> None:
    """A06: slots normalise the order of layers and blocks, never what is inside a page."""
    memory, pages = make_pages(3, 8, 256)
    other = np.ascontiguousarray(memory.transpose(1, 0, 2))
    outermost = PageViews(layers=tuple(other[:, layer] for layer in range(3)))
    one, two = np.zeros(6 * 256, dtype=np.uint8), np.zeros(6 * 256, dtype=np.uint8)

    CpuCopier(pages).gather([3, 1], one)
    CpuCopier(outermost).gather([3, 1], two)

    assert np.array_equal(one, two)


def test_a_slot_that_is_too_small_is_refused() -> None:
    _, pages = make_pages(3, 8, 256)

    with pytest.raises(KvsnapError, match="2 blocks need 1536 bytes, the slot's slice holds 1535"):
        CpuCopier(pages).gather([1, 2], np.zeros(1535, dtype=np.uint8))


def test_layers_with_unequal_pages_are_refused() -> None:
    with pytest.raises(KvsnapError, match="unequal pages"):
        PageViews(layers=(np.zeros((4, 16), dtype=np.uint8), np.zeros((4, 32), dtype=np.uint8)))


def test_padding_is_zeroed_up_to_the_next_4096_only() -> None:
    area = np.full(3 * 4096, 7, dtype=np.uint8)

    zero_padding(area, 5000)

    assert (area[:5000] == 7).all()
    assert (area[5000:8192] == 0).all()
    assert (area[8192:] == 7).all()
