"""Blocks of a KV cache as rows on its own device: every order that keeps a page whole, on CPU tensors.

The reference never uses the strides that the code uses: it reads through the 4-D views
that vLLM registers, in the order of a slice, `[blocks, layers, *page]`.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvsnap_connector.compat import Unsupported, locate_rank, wanted_layout
from kvsnap_connector.pages import BlockView, PagePlaces, check_places, page_shape
from tests.connector.fakes import (
    Backend,
    CacheConfig,
    CacheTensor,
    FullAttentionSpec,
    Group,
    MLAAttentionSpec,
    make_layer,
    make_vllm_config,
)

ORDERS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]
LAYERS, BLOCKS, TOKENS = 5, 7, 16


def make_cuda_config(names: list[str], *, backend: str = "FLASH_ATTN", tp: int = 1) -> SimpleNamespace:
    """A VllmConfig that says CUDA; the tensors in these tests are on the CPU."""
    config = make_vllm_config()
    config.device_config.device_type = "cuda"
    config.parallel_config.tensor_parallel_size = tp
    config.compilation_config.static_forward_context = {
        name: make_layer(attn_backend=Backend(backend), isa="") for name in names
    }
    return config


def make_cuda_cache(
    order: str,
    *,
    heads: int = 2,
    content: int = 8,
    ratio: int = 1,
    page_padding: int = 0,
    block_padding: int = 0,
    mla: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[CacheConfig, dict[str, torch.Tensor]]:
    """A cache over one int8 allocation, laid out by the address formula of `KVCacheTensor`.

    `page_padding` bytes after every page, `block_padding` after every block (where blocks
    are outermost).
    """
    names = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]
    size = torch.empty(0, dtype=dtype).element_size()
    page = heads * TOKENS * content * size
    slot = page + page_padding
    if order.startswith("L"):
        layer_stride, block_stride = slot * BLOCKS, slot
    else:
        layer_stride, block_stride = slot, slot * LAYERS + block_padding
    memory = torch.randint(-128, 128, (max(layer_stride * LAYERS, block_stride * BLOCKS),), dtype=torch.int8)
    tokens = TOKENS // ratio
    inner = {"H": tokens * content, "N": content} if order.endswith("HNC") else {"H": content, "N": heads * content}
    caches = {
        name: torch.as_strided(
            memory.view(dtype),
            [BLOCKS * ratio, heads, tokens, content],
            [block_stride // size // ratio, inner["H"], inner["N"], 1],
            layer * layer_stride // size,
        )
        for layer, name in enumerate(names)
    }
    spec = (MLAAttentionSpec if mla else FullAttentionSpec)(block_size=TOKENS, page_size_bytes=slot)
    config = CacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            CacheTensor(size=memory.nbytes, layers=names, layer_stride=layer_stride, block_stride=block_stride)
        ],
        kv_cache_groups=[Group(names, spec)],
        kv_cache_layout=order,
    )
    return config, caches


def reference(caches: dict[str, torch.Tensor], order: str, blocks: list[int], ratio: int = 1) -> torch.Tensor:
    """The bytes of a slice, by indexing."""
    pages = []
    for block in blocks:
        for cache in caches.values():
            parts = cache[block * ratio : (block + 1) * ratio]
            parts = parts if order.endswith("HNC") else parts.transpose(1, 2)
            pages.append(parts.contiguous().view(torch.uint8).reshape(-1))
    return torch.cat(pages)


def view_of(config: CacheConfig, caches: dict[str, torch.Tensor], **values: Any) -> tuple[Any, PagePlaces, BlockView]:
    geometry, places = locate_rank(make_cuda_config(list(caches), **values), config, caches)
    return geometry, places, BlockView(next(iter(caches.values())), places)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"page_padding": 64},
        {"page_padding": 2},
        {"block_padding": 4096},
        {"heads": 1, "content": 36, "mla": True},
        {"dtype": torch.uint8, "content": 3},
    ],
    ids=["dense", "padded pages", "odd padding", "padded blocks", "MLA", "odd bytes"],
)
def test_a_slice_is_gathered_and_scattered_byte_for_byte(order: str, shape: dict[str, Any]) -> None:
    """A06, B.1: pages from strides and placement, whatever lies between them."""
    cache_config, caches = make_cuda_cache(order, **shape)
    geometry, places, view = (
        view_of(cache_config, caches) if "dtype" not in shape else (None, *_raw_view(cache_config, caches))
    )
    blocks = [5, 1, 6]
    buffer = torch.zeros(len(blocks) * view.block_bytes + 64, dtype=torch.uint8)
    before = next(iter(caches.values())).untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(before)
    untouched = whole.clone()

    view.gather(torch.tensor(blocks), buffer)

    assert torch.equal(buffer[: len(blocks) * view.block_bytes], reference(caches, order, blocks))
    assert torch.equal(whole, untouched)

    new = torch.randint(0, 256, (2 * view.block_bytes,), dtype=torch.uint8)
    view.scatter(new, torch.tensor([2, 4]))

    assert torch.equal(reference(caches, order, [2, 4]), new)
    assert torch.equal(reference(caches, order, blocks), buffer[: len(blocks) * view.block_bytes])
    changed = (whole != untouched).sum().item()
    assert 0 < changed <= 2 * view.block_bytes, "padding and other blocks stay as they are"
    assert places.num_blocks == BLOCKS
    if geometry is not None:
        assert "isa" not in geometry.page_format


def _raw_view(config: CacheConfig, caches: dict[str, torch.Tensor]) -> tuple[PagePlaces, BlockView]:
    """Past the checks of types: bytes that no wide element fits."""
    tensor = config.kv_cache_tensors[0]
    first = next(iter(caches.values()))
    places = PagePlaces(
        offsets=tuple(index * tensor.layer_stride for index in range(LAYERS)),
        block_strides=(tensor.block_stride,) * LAYERS,
        num_blocks=BLOCKS,
        page_bytes=first[0].numel(),
    )
    return places, BlockView(first, places)


@pytest.mark.parametrize("order", ["BLHNC", "BLNHC"])
def test_a_block_is_one_run_where_blocks_are_outermost(order: str) -> None:
    _, _, view = view_of(*make_cuda_cache(order, block_padding=512))

    assert view.is_one_run


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_kernel_blocks_smaller_than_the_engines_are_put_together(order: str) -> None:
    """`shape[0]` is twice the number of blocks; a page is two kernel blocks."""
    cache_config, caches = make_cuda_cache(order, ratio=2)
    geometry, places, view = view_of(cache_config, caches)
    buffer = torch.zeros(2 * view.block_bytes, dtype=torch.uint8)

    view.gather(torch.tensor([6, 3]), buffer)

    assert next(iter(caches.values())).shape[0] == 2 * BLOCKS
    assert places.num_blocks == BLOCKS
    assert geometry.page_format == {"backend": "FLASH_ATTN", "order": "2x" + order[2:]}
    assert torch.equal(buffer, reference(caches, order, [6, 3], ratio=2))


@pytest.mark.parametrize("order", ORDERS)
def test_an_mla_rank_holds_a_replica(order: str) -> None:
    cache_config, caches = make_cuda_cache(order, heads=1, content=36, mla=True)

    geometry, _, _ = view_of(cache_config, caches, backend="FLASHMLA", tp=4)

    assert geometry.replicated
    assert geometry.kv_heads == 1
    assert geometry.page_format["backend"] == "FLASHMLA"


@pytest.mark.parametrize("backend", ["FLASH_ATTN_DIFFKV", "TURBOQUANT", "FLEX_ATTENTION"])
def test_an_attention_backend_that_nobody_has_looked_at_is_declined(backend: str) -> None:
    with pytest.raises(Unsupported, match=f"attention backend {backend} is not known"):
        view_of(*make_cuda_cache("LBHNC"), backend=backend)


@pytest.mark.parametrize(
    ("first", "step", "block_stride", "page"),
    [(0, 32, 64, 24), (0, 40, 96, 32), (0, 32, 72, 32), (8, 32, 64, 32), (4100, 48, 96, 32), (32, 32, 64, 32)],
    ids=["odd pages", "odd layers", "odd blocks", "odd start", "all", "later start"],
)
def test_elements_are_as_wide_as_every_address_allows(first: int, step: int, block_stride: int, page: int) -> None:
    """One number that is forgotten shifts all that follows by bytes."""
    memory = torch.randint(0, 256, (first + 8 * block_stride + 3,), dtype=torch.uint8)
    places = PagePlaces(offsets=(first, first + step), block_strides=(block_stride,) * 2, num_blocks=8, page_bytes=page)
    view = BlockView(memory, places)
    buffer = torch.zeros(2 * view.block_bytes, dtype=torch.uint8)

    view.gather(torch.tensor([7, 2]), buffer)

    starts = [first + layer * step + block * block_stride for block in (7, 2) for layer in (0, 1)]
    assert torch.equal(buffer, torch.cat([memory[start : start + page] for start in starts]))


def test_a_thread_of_its_own_may_write_what_vllm_made_for_inference() -> None:
    """vLLM works in inference mode, which is a thread's; in-place writes from outside it raise."""
    with torch.inference_mode():
        cache_config, caches = make_cuda_cache("LBNHC")
        _, _, view = view_of(cache_config, caches)
        buffer = torch.zeros(view.block_bytes, dtype=torch.uint8)

    view.gather(torch.tensor([2]), buffer)
    view.scatter(buffer, torch.tensor([3]))

    assert torch.equal(reference(caches, "LBNHC", [3]), reference(caches, "LBNHC", [2]))


def test_layers_at_unequal_distances_are_declined() -> None:
    cache_config, caches = make_cuda_cache("LBHNC")
    _, places, _ = view_of(cache_config, caches)
    odd = replace(places, offsets=(*places.offsets[:-1], places.offsets[-1] + 64))

    with pytest.raises(Unsupported, match="expected one distance"):
        BlockView(next(iter(caches.values())), odd)


def _places(**values: Any) -> PagePlaces:
    given: dict[str, Any] = {"offsets": (0, 32), "block_strides": (64, 64), "num_blocks": 4, "page_bytes": 32}
    return PagePlaces(**given | values)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"block_strides": (64, 128)}, "layers whose blocks lie"),
        ({"offsets": (32, 0)}, "expected one distance"),
        ({"offsets": (0, 0)}, "expected one distance"),
    ],
)
def test_places_that_one_view_cannot_describe_are_declined(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        BlockView(torch.zeros(1024, dtype=torch.uint8), _places(**values))


@pytest.mark.parametrize("values", [{"num_blocks": 5}, {"block_strides": (24, 24)}], ids=["too many", "overlapping"])
def test_blocks_that_do_not_fit_are_declined(values: dict[str, Any]) -> None:
    """Bytes past the end are somebody else's memory."""
    memory = torch.zeros(4 * 64, dtype=torch.uint8)

    check_places([memory, memory[32:]], _places())
    with pytest.raises(Unsupported, match="smaller than its blocks"):
        check_places([memory, memory[32:]], _places(**values))


def test_shapes_that_are_not_understood_are_declined() -> None:
    memory = torch.zeros(4096, dtype=torch.int8)
    whole = torch.as_strided(memory, [6, 2, 4, 2], [16, 8, 2, 1])
    gaps = torch.as_strided(memory, [6, 2, 4, 2], [24, 8, 2, 1])

    assert page_shape(whole, 32, 3) == ((2, 2, 4, 2), "2xHNC")
    with pytest.raises(Unsupported, match="for 4 blocks is not understood"):
        page_shape(whole, 24, 4)
    with pytest.raises(Unsupported, match="not understood"):
        page_shape(whole[0], 32, 1)
    with pytest.raises(Unsupported, match="kernel blocks with gaps"):
        page_shape(gaps, 48, 3)


def test_a_cache_on_the_host_is_declined() -> None:
    cache_config, caches = make_cuda_cache("LBHNC")
    cache_config.kv_cache_tensors[0].host_resident = True

    with pytest.raises(Unsupported, match="live on the host"):
        view_of(cache_config, caches)


def test_layers_in_several_allocations_are_declined() -> None:
    """One formula for all addresses needs one base."""
    cache_config, caches = make_cuda_cache("LBHNC")
    name = next(iter(caches))
    caches[name] = caches[name].clone()

    with pytest.raises(Unsupported, match="in 2 allocations, expected one"):
        locate_rank(make_cuda_config(list(caches)), cache_config, caches)


def test_an_allocation_with_a_tail_is_fine() -> None:
    """ROCm rounds it up, and so may others; only too little is a fault."""
    cache_config, caches = make_cuda_cache("BLNHC")
    storage = next(iter(caches.values())).untyped_storage()
    longer = torch.cat([torch.empty(0, dtype=torch.uint8).set_(storage), torch.zeros(7, dtype=torch.uint8)])
    moved = {
        name: torch.empty(0, dtype=cache.dtype).set_(
            longer.untyped_storage(), cache.storage_offset(), cache.shape, cache.stride()
        )
        for name, cache in caches.items()
    }

    _, _, view = view_of(cache_config, moved)
    buffer = torch.zeros(view.block_bytes, dtype=torch.uint8)
    view.gather(torch.tensor([BLOCKS - 1]), buffer)

    assert torch.equal(buffer, reference(caches, "BLNHC", [BLOCKS - 1]))


def _layout_config(**values: Any) -> SimpleNamespace:
    config = make_cuda_config([])
    config.cache_config.block_size = 16
    for name, value in values.items():
        owner = config.cache_config if hasattr(config.cache_config, name) or name.startswith("user") else None
        setattr(owner or config.model_config, name, value)
    return config


def test_all_layers_of_a_block_are_asked_to_be_contiguous() -> None:
    assert wanted_layout(_layout_config(), is_head_major=False) == "BLNHC"
    assert wanted_layout(_layout_config(), is_head_major=True) == "BLHNC"


def test_a_wish_that_would_keep_vllm_from_starting_is_not_made() -> None:
    """vLLM can't split a block into kernel blocks where layers are packed into it, and raises."""
    config = _layout_config(user_specified_block_size=True, block_size=128)

    assert wanted_layout(config, is_head_major=False) is None
    assert wanted_layout(_layout_config(user_specified_block_size=True, block_size=32), is_head_major=False) == "BLNHC"


def test_no_wish_where_kvsnap_stays_out() -> None:
    mixed = SimpleNamespace(layer_types=["full_attention", "sliding_attention"])

    assert wanted_layout(_layout_config(hf_text_config=mixed), is_head_major=False) is None
    assert wanted_layout(_layout_config(is_hybrid=True), is_head_major=False) is None
    assert wanted_layout(make_vllm_config(), is_head_major=False) is None, "the CPU backend has one layout"
