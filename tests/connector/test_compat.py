"""What kvsnap declines, how it sees pages, and the layout that ranks add up to."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvsnap_connector.compat import (
    Unsupported,
    kv_dtype_of,
    kv_scales_of,
    layout_of,
    locate_rank,
    unsupported_reason,
)
from kvsnap_connector.copier import PageViews
from kvsnap_connector.pages import byte_views
from kvsnap_connector.rendezvous import RankGeometry
from tests.connector.fakes import (
    Backend,
    CacheConfig,
    CacheTensor,
    FullAttentionSpec,
    Group,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    make_layer,
    make_vllm_config,
)
from tests.connector.test_rendezvous import GEOMETRY

HEADS, TOKENS, CONTENT = 2, 16, 8
PAGE = HEADS * TOKENS * CONTENT * 2
NAMES = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.10.attn"]


def make_cache(
    order: str = "LBHNC", *, num_blocks: int = 6, ratio: int = 1, gap: int = 0
) -> tuple[CacheConfig, dict[str, torch.Tensor]]:
    """A KV cache of three layers in one allocation, as vLLM's `allocate_kv_cache` lays it out."""
    sizes = {"L": 3, "B": num_blocks * ratio, "H": HEADS, "N": TOKENS // ratio, "C": CONTENT}
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= sizes[axis]
        if axis == order[2]:
            step += gap
    memory = torch.zeros(step, dtype=torch.bfloat16)
    view = torch.as_strided(memory, [sizes[axis] for axis in "LBHNC"], [strides[axis] for axis in "LBHNC"])
    view.copy_(torch.randn(view.shape))
    tensor = CacheTensor(
        size=step * 2, layers=NAMES, layer_stride=strides["L"] * 2, block_stride=strides["B"] * 2 * ratio
    )
    config = CacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[Group(NAMES, FullAttentionSpec(block_size=TOKENS))],
        kv_cache_layout=order,
    )
    return config, {name: view[index] for index, name in enumerate(NAMES)}


def make_config(**layer_values: Any) -> SimpleNamespace:
    config = make_vllm_config()
    config.compilation_config.static_forward_context = {name: make_layer(**layer_values) for name in NAMES}
    return config


def pages_of(cache_config: CacheConfig, caches: dict[str, torch.Tensor]) -> tuple[RankGeometry, PageViews]:
    geometry, places = locate_rank(make_config(), cache_config, caches)
    return geometry, byte_views(caches[geometry.layers[0]], places)


@pytest.mark.parametrize(
    ("order", "in_page", "shape"),
    [
        ("LBHNC", "HNC", (HEADS, TOKENS, CONTENT)),
        ("LBNHC", "NHC", (TOKENS, HEADS, CONTENT)),
        ("BLHNC", "HNC", (HEADS, TOKENS, CONTENT)),
        ("BLNHC", "NHC", (TOKENS, HEADS, CONTENT)),
    ],
)
def test_pages_are_found_in_every_order_that_keeps_them_whole(order: str, in_page: str, shape: tuple[int, ...]) -> None:
    """A06: the order inside a page is part of the layout, that of layers and blocks is not."""
    cache_config, caches = make_cache(order)

    geometry, pages = pages_of(cache_config, caches)

    assert geometry.page_shape == shape
    assert geometry.page_format == {"backend": "CPU_ATTN", "isa": "amx", "order": in_page}
    for view, name in zip(pages.layers, geometry.layers, strict=True):
        for block in range(6):
            page = caches[name][block] if in_page == "HNC" else caches[name][block].transpose(0, 1)
            assert np.array_equal(view[block], page.contiguous().view(torch.uint8).numpy().reshape(-1))


def test_a_page_is_written_in_place() -> None:
    cache_config, caches = make_cache()
    _, pages = pages_of(cache_config, caches)

    pages.layers[1][3] = 0

    assert caches[NAMES[1]][3].abs().sum() == 0
    assert caches[NAMES[1]][2].abs().sum() > 0
    assert caches[NAMES[0]][3].abs().sum() > 0


def test_kernel_blocks_are_not_the_engines_blocks() -> None:
    """`shape[0]` counts kernel blocks; taken for the number of blocks, pages would be halves."""
    cache_config, caches = make_cache(ratio=2)

    geometry, pages = pages_of(cache_config, caches)

    assert caches[NAMES[0]].shape[0] == 12
    assert pages.num_blocks == 6
    assert geometry.page_shape == (2, HEADS, TOKENS // 2, CONTENT)
    assert geometry.page_bytes == PAGE
    assert geometry.page_format["order"] == "2xHNC"
    assert np.array_equal(pages.layers[2][1], caches[NAMES[2]][2:4].contiguous().view(torch.uint8).numpy().reshape(-1))


def test_padding_between_blocks_is_not_part_of_a_page() -> None:
    cache_config, caches = make_cache(gap=32)

    _, pages = pages_of(cache_config, caches)

    assert pages.page_bytes == PAGE
    assert pages.layers[0].strides[0] == PAGE + 64


def test_layers_come_in_the_order_of_the_model() -> None:
    cache_config, caches = make_cache()
    cache_config.kv_cache_tensors[0].layers = list(reversed(NAMES))

    with pytest.raises(Unsupported, match="starts at byte"):
        locate_rank(make_config(), cache_config, caches)
    geometry, _ = locate_rank(make_config(), cache_config, dict(zip(reversed(NAMES), caches.values(), strict=True)))

    assert geometry.layers == tuple(NAMES)


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC"])
def test_pages_in_pieces_are_declined(order: str) -> None:
    cache_config, caches = make_cache(order)

    assert "does not keep a page in one piece" in (unsupported_reason(make_config(), cache_config) or "")
    with pytest.raises(Unsupported, match="not one run of bytes"):
        locate_rank(make_config(), cache_config, caches)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("block_stride", 2 * PAGE, "apart"), ("offset", 64, "starts at byte"), ("layer_stride", PAGE, "starts at byte")],
)
def test_a_configuration_that_does_not_fit_the_tensors_is_declined(field: str, value: int, said: str) -> None:
    """Bytes from a wrong address are wrong KV; the cross-check costs nothing."""
    cache_config, caches = make_cache()
    setattr(cache_config.kv_cache_tensors[0], field, value)

    with pytest.raises(Unsupported, match=said):
        locate_rank(make_config(), cache_config, caches)


def test_a_missing_instruction_set_is_declined() -> None:
    """Pages of the CPU backend are packed by it; without it two hosts can't be told apart."""
    cache_config, caches = make_cache()

    with pytest.raises(Unsupported, match="instruction set"):
        locate_rank(make_config(isa=""), cache_config, caches)


def test_another_instruction_set_is_another_layout() -> None:
    cache_config, caches = make_cache()
    amx, _ = locate_rank(make_config(isa="amx"), cache_config, caches)
    vec, _ = locate_rank(make_config(isa="vec"), cache_config, caches)

    assert layout_of([amx]).hash() != layout_of([vec]).hash()


def test_layers_of_two_backends_are_declined() -> None:
    cache_config, caches = make_cache()
    config = make_config()
    config.compilation_config.static_forward_context[NAMES[0]].attn_backend = Backend("OTHER")

    with pytest.raises(Unsupported, match="different attention backends"):
        locate_rank(config, cache_config, caches)


def test_scales_of_a_quantized_cache_are_read_from_the_layers() -> None:
    """A07: two engines with other scales give other bytes meaning."""
    cache_config, _ = make_cache()
    memory = torch.zeros(3, 6, HEADS, TOKENS, CONTENT, dtype=torch.uint8)
    quantized = {name: memory[index] for index, name in enumerate(NAMES)}
    tensor = cache_config.kv_cache_tensors[0]
    tensor.layer_stride, tensor.block_stride = memory.stride(0), memory.stride(1)
    config = make_config(_k_scale_float=0.5, _v_scale_float=0.25)
    config.cache_config.cache_dtype = "fp8"

    geometry, _ = locate_rank(config, cache_config, quantized)

    assert geometry.kv_scales == ((0.5, 0.25),) * 3
    assert kv_scales_of([geometry]) == {"k": 0.5, "v": 0.25}


def test_a_quantized_cache_without_scales_is_declined() -> None:
    cache_config, caches = make_cache()
    config = make_config()
    config.cache_config.cache_dtype = "fp8_e4m3"

    with pytest.raises(Unsupported, match="static scales"):
        locate_rank(config, cache_config, caches)


@pytest.mark.parametrize(
    ("given", "resolved"),
    [("auto", "bfloat16"), ("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("half", "float16")],
)
def test_the_kv_type_is_never_auto(given: str, resolved: str) -> None:
    """A05: the type is part of the identity, under one name."""
    config = make_vllm_config()
    config.cache_config.cache_dtype = given

    assert kv_dtype_of(config) == resolved


def test_a_plain_engine_is_supported() -> None:
    cache_config, _ = make_cache()

    assert unsupported_reason(make_config(), cache_config) is None


def _set(path: str, value: object) -> Any:
    def apply(config: SimpleNamespace, cache_config: CacheConfig) -> None:
        *parents, name = path.split(".")
        target: Any = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)

    return apply


def _group(*specs: object, **values: object) -> Any:
    def apply(config: SimpleNamespace, cache_config: CacheConfig) -> None:
        cache_config.kv_cache_groups = [Group(NAMES, spec, **values) for spec in specs]  # type: ignore[arg-type]

    return apply


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_set("device_config.device_type", "xpu"), r"not yet supported on this device \(xpu\)"),
        (_set("model_config.runner_type", "pooling"), "pooling"),
        (_set("model_config.hf_overrides", lambda config: config), "hf_overrides is a function"),
        (_set("model_config.is_encoder_decoder", True), "encoder-decoder"),
        (_set("parallel_config.decode_context_parallel_size", 2), "context parallelism"),
        (_set("parallel_config.prefill_context_parallel_size", 2), "context parallelism"),
        (_set("parallel_config.nnodes", 2), "several hosts"),
        (_set("speculative_config", SimpleNamespace(method="eagle3")), "draft KV"),
        (_set("cache_config.kv_cache_dtype_skip_layers", ["0"]), "different KV types"),
        (_set("cache_config.calculate_kv_scales", True), "computed at run time"),
        (_group(), "no KV cache"),
        (_group(FullAttentionSpec(), MambaSpec()), r"several KV cache groups .*MambaSpec"),
        (_group(MambaSpec()), "MambaSpec"),
        (_group(SlidingWindowSpec()), "SlidingWindowSpec"),
        (_group(FullAttentionSpec(), is_eagle_group=True), "EAGLE"),
        (_group(FullAttentionSpec(), enable_kv_transfer=False), "can't be transferred"),
        (_group(FullAttentionSpec(non_causal=True)), "later tokens"),
        (_group(FullAttentionSpec(tokens_per_state=4)), "several tokens in one"),
        (
            _group(
                SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(), "b": FullAttentionSpec(page_size_bytes=8192)})
            ),
            "unequal pages",
        ),
    ],
)
def test_what_can_not_be_cached_correctly_is_declined(change: Any, said: str) -> None:
    """A25 and design section 3: decline, don't break."""
    config = make_config()
    cache_config, _ = make_cache()
    change(config, cache_config)

    reason = unsupported_reason(config, cache_config)

    assert reason is not None
    assert re.search(said, reason)


def test_speculation_without_a_draft_model_is_supported() -> None:
    config = make_config()
    config.speculative_config = SimpleNamespace(method="ngram")

    assert unsupported_reason(config, make_cache()[0]) is None


def ranks(tp: int, pp: int, **values: Any) -> list[RankGeometry]:
    return [
        replace(
            GEOMETRY,
            rank=rank,
            tp_rank=rank % tp,
            tp_size=tp,
            pp_rank=rank // tp,
            pp_size=pp,
            layers=tuple(f"layers.{rank // tp * 2 + index}" for index in range(2)),
            **values,
        )
        for rank in range(tp * pp)
    ]


def test_every_tensor_parallel_rank_has_a_slice() -> None:
    layout = layout_of(ranks(2, 2))

    assert [(part.first_layer, part.first_head, part.ranks) for part in layout.slices] == [
        (0, 0, (0,)),
        (0, 3, (1,)),
        (2, 0, (2,)),
        (2, 3, (3,)),
    ]


def test_a_replicated_cache_is_stored_once_per_stage() -> None:
    """MLA: all tensor-parallel ranks hold the same bytes."""
    layout = layout_of(ranks(2, 2, replicated=True, kv_heads=1))

    assert [part.ranks for part in layout.slices] == [(0, 1), (2, 3)]


def test_an_mla_cache_under_tensor_parallelism_is_replicated() -> None:
    cache_config, caches = make_cache()
    cache_config.kv_cache_groups = [Group(NAMES, MLAAttentionSpec(block_size=TOKENS))]
    config = make_config()
    config.parallel_config.tensor_parallel_size = 2

    geometry, _ = locate_rank(config, cache_config, caches)

    assert geometry.replicated


@pytest.mark.parametrize(
    ("field", "value"),
    [("page_format", {"backend": "CPU_ATTN", "isa": "vec", "order": "HNC"}), ("dtype", "F16"), ("block_tokens", 64)],
)
def test_ranks_that_differ_are_declined(field: str, value: object) -> None:
    """A24: one layout for all, or none."""
    first, second = ranks(2, 1)

    with pytest.raises(Unsupported, match=f"ranks differ in {field}"):
        layout_of([first, replace(second, **{field: value})])  # type: ignore[arg-type]


def test_scales_that_differ_between_ranks_are_declined() -> None:
    first, second = ranks(2, 1)

    with pytest.raises(Unsupported, match="different KV scales"):
        kv_scales_of([first, replace(second, kv_scales=((0.5, 1.0), (0.5, 1.0)))])


def test_scales_are_those_of_all_stages_in_order() -> None:
    assert kv_scales_of(ranks(1, 2)) == {"k": [0.5, 0.25, 0.5, 0.25], "v": [1.0, 1.0, 1.0, 1.0]}
