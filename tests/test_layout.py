"""Layout and geometry."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.canonical import canonical_json
from kvsnap.direct_io import ALIGN
from kvsnap.errors import ConfigError, IncompatibleError
from kvsnap.layout import Geometry, Layout, SliceLayout

NHD = {"backend": "CPU_ATTN", "isa": "vec", "order": "NHD"}
SLICE = SliceLayout(num_layers=2, kv_heads=3, ranks=(0,))


def make_layout(**changes: Any) -> Layout:
    fields: dict[str, Any] = {
        "block_tokens": 16,
        "dtype": "BF16",
        "page_shape": (2, 3, 16, 64),
        "page_format": NHD,
        "slices": (SLICE,),
        **changes,
    }
    return Layout(**fields)


def test_golden_hash() -> None:
    text = (
        '{"block_tokens":16,"dtype":"BF16","page_format":{"backend":"CPU_ATTN","isa":"vec","order":"NHD"},'
        '"page_shape":[2,3,16,64],"slices":[{"first_head":0,"first_layer":0,"kv_heads":3,"num_layers":2,"ranks":[0]}]}'
    )

    assert canonical_json(make_layout().to_json()).decode() == text
    assert make_layout().hash() == "af128eda422fae3be129d97339d344c10f6c9560ce50fcc44cf719655c76c68e"


@pytest.mark.parametrize(
    "changes",
    [
        {"page_format": NHD | {"order": "HND"}},
        {"page_format": NHD | {"isa": "amx"}},
        {"page_format": {**NHD, "runner": "v2"}},
        {"page_shape": (3, 2, 16, 64)},
        {"page_shape": (2, 3, 1024)},
        {"dtype": "F16"},
        {"block_tokens": 32},
        {"slices": (replace(SLICE, first_layer=1),)},
        {"slices": (replace(SLICE, num_layers=3),)},
        {"slices": (SLICE, replace(SLICE, ranks=(1,)))},
        {"slices": (replace(SLICE, ranks=(0, 1)),)},
    ],
)
def test_each_field_counts(changes: dict[str, Any]) -> None:
    """A06: the same number of bytes in another order is another layout."""
    assert make_layout(**changes).hash() != make_layout().hash()


def test_json_round_trip() -> None:
    layout = make_layout(slices=(replace(SLICE, ranks=(0, 1)), replace(SLICE, ranks=(2,), first_head=3)))

    again = Layout.from_json(json.loads(canonical_json(layout.to_json())))

    assert again == layout
    assert again.hash() == layout.hash()


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "Q4"},
        {"dtype": 16},
        {"block_tokens": 0},
        {"block_tokens": True},
        {"page_shape": []},
        {"page_shape": [2, -1]},
        {"page_shape": [2, "3"]},
        {"page_format": {"isa": 3}},
        {"page_format": []},
        {"slices": []},
        {"slices": {}},
        {"slices": [{}]},
        {"extra": 1},
    ],
)
def test_from_json_is_strict(change: dict[str, Any]) -> None:
    """A06, invariant 1: a layout that this version can't read in full is a refusal, never a guess."""
    with pytest.raises(IncompatibleError):
        Layout.from_json(make_layout().to_json() | change)


@pytest.mark.parametrize("ranks", [(), (1, 0), (0, 0), (-1,)])
def test_slice_ranks_are_ascending(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="slice has ranks"):
        replace(SLICE, ranks=ranks)


@pytest.mark.parametrize("ranks", [[(0,), (0,)], [(0,), (2,)], [(0, 1), (1, 2)], [(1,)]])
def test_each_rank_is_in_one_slice(ranks: list[tuple[int, ...]]) -> None:
    """A24: no rank may be missing from a chunk, or be in it twice."""
    with pytest.raises(ConfigError, match="cover ranks"):
        make_layout(slices=tuple(replace(SLICE, ranks=r) for r in ranks))


def test_replicas_share_a_slice() -> None:
    layout = make_layout(slices=(replace(SLICE, ranks=(0, 1)), replace(SLICE, ranks=(2, 3))))

    assert [layout.slice_of_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert layout.world_size == 4
    with pytest.raises(ConfigError, match="rank 4 is in no slice"):
        layout.slice_of_rank(4)


def test_geometry_of_a_real_model() -> None:
    """SmolLM2-135M on the CPU backend: 30 layers, 3 heads, blocks of 128, chunks of 256."""
    layout = make_layout(
        block_tokens=128, page_shape=(2, 3, 128, 64), slices=(SliceLayout(num_layers=30, kv_heads=3, ranks=(0,)),)
    )
    geometry = Geometry(layout, 256)

    assert layout.page_bytes == 2 * 3 * 128 * 64 * 2
    assert geometry.blocks_per_chunk == 2
    assert geometry.num_slices == 1
    assert geometry.slice_bytes(0, 2) == 2 * 30 * layout.page_bytes
    assert geometry.chunk_bytes(256) == geometry.slice_stride(0) == 5_898_240
    assert geometry.chunk_bytes(128) == 2_949_120
    assert geometry.tensor_shape(0, 1) == (1, 30, 2, 3, 128, 64)


def test_each_slice_is_padded() -> None:
    layout = make_layout(
        dtype="U8",
        page_shape=(100,),
        slices=(replace(SLICE, ranks=(0,)), replace(SLICE, num_layers=30, ranks=(1,))),
    )
    geometry = Geometry(layout, 32)

    assert [geometry.slice_bytes(i, 2) for i in (0, 1)] == [400, 6000]
    assert [geometry.padded(i, 2) for i in (0, 1)] == [4096, 8192]
    assert [geometry.padded(i, 1) for i in (0, 1)] == [4096, 4096]
    assert geometry.chunk_bytes(32) == 12288
    assert geometry.chunk_bytes(16) == 8192


@given(st.integers(1, 5000), st.integers(1, 40), st.integers(1, 20))
def test_padding_is_the_least_multiple(page: int, layers: int, blocks: int) -> None:
    layout = make_layout(dtype="U8", page_shape=(page,), slices=(replace(SLICE, num_layers=layers),))
    geometry = Geometry(layout, 16 * blocks)

    padding = geometry.padded(0, blocks) - geometry.slice_bytes(0, blocks)

    assert 0 <= padding < ALIGN
    assert geometry.padded(0, blocks) % ALIGN == 0


@pytest.mark.parametrize("tokens", [0, 8, 17, -16])
def test_chunk_is_whole_blocks(tokens: int) -> None:
    with pytest.raises(ConfigError, match="not a whole number of blocks"):
        Geometry(make_layout(), 32).chunk_bytes(tokens)
    with pytest.raises(ConfigError, match="not a whole number of blocks"):
        Geometry(make_layout(), tokens)
