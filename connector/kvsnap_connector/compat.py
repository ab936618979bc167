"""Every look at a vLLM object's shape: what is supported, pages from tensors, layout from ranks.

Written for vLLM 0.32 and 0.33. Nothing here imports vLLM; attributes are read with care,
because what is not understood has to be declined and not guessed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsnap.layout import Layout, SliceLayout
from kvsnap_connector.copier import Bytes, PageViews
from kvsnap_connector.rendezvous import RankGeometry

if TYPE_CHECKING:
    import torch

SAFETENSORS_DTYPES = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
    "int8": "I8",
}
"""Element types of a KV cache, by torch's name."""

_KV_DTYPES = {"fp8": "fp8_e4m3", "half": "float16", "float": "float32"}
_SPECS = {"FullAttentionSpec", "MLAAttentionSpec"}
_WITHOUT_DRAFT_KV = {"ngram", "ngram_gpu", "suffix"}
_AXES = "HNC"


class Unsupported(Exception):
    """kvsnap can't cache this engine correctly. The text is the reason, for people."""


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why kvsnap has to stay out of this engine; None if it need not.

    Exact types only: a subclass of a known KV cache spec may hold anything.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device = str(getattr(vllm_config.device_config, "device_type", "unknown"))
    if device != "cpu":
        return f"not yet supported on this device ({device})"
    if model.runner_type == "pooling":
        return "pooling models are not supported"
    if getattr(model, "is_encoder_decoder", False):
        return "encoder-decoder models are not supported"
    if getattr(model, "is_diffusion", False):
        return "diffusion language models are not supported"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"context parallelism is not supported ({name} is {getattr(parallel, name)})"
    if getattr(parallel, "nnodes", 1) > 1:
        return f"ranks on several hosts are not supported (nnodes is {parallel.nnodes})"
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None and speculative.method not in _WITHOUT_DRAFT_KV:
        return f"speculative decoding with draft KV is not supported (method {speculative.method})"
    if callable(getattr(model, "hf_overrides", None)):
        return "hf_overrides is a function, and what it changes can't be told"
    if getattr(model, "model_class_overrides", None):
        return "model_class_overrides replaces the model's code"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales that are computed at run time are not supported"
    if vllm_config.cache_config.kv_cache_dtype_skip_layers:
        return "kv_cache_dtype_skip_layers gives layers of different KV types"
    return _groups_reason(kv_cache_config)


def _groups_reason(kv_cache_config: Any) -> str | None:
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    if len(groups) > 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        return f"models with several KV cache groups are not supported ({len(groups)} groups: {', '.join(kinds)})"
    group = groups[0]
    if getattr(group, "is_eagle_group", False):
        return "KV cache groups of EAGLE or MTP draft layers are not supported"
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        return "the KV cache group can't be transferred"
    specs = specs_of(group)
    for spec in specs:
        kind = type(spec).__name__
        if kind not in _SPECS:
            return f"KV caches of kind {kind} are not supported"
        if getattr(spec, "non_causal", False):
            return "layers that attend to later tokens are not supported"
        if getattr(spec, "tokens_per_state", 1) != 1:
            return "compressed KV states (several tokens in one) are not supported"
        if getattr(getattr(spec, "kv_quant_mode", None), "is_per_token_head", False):
            return "KV caches with scales per token and head are not supported"
    if len({(spec.block_size, spec.page_size_bytes) for spec in specs}) > 1:
        return "layers with unequal pages are not supported"
    layout = kv_cache_config.kv_cache_layout
    if layout is None or set(layout[:2]) != {"L", "B"}:
        return f"KV cache layout {layout} does not keep a page in one piece"
    return None


def specs_of(group: Any) -> list[Any]:
    """The KV cache specs of a group's layers: one, or one per layer."""
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [group.kv_cache_spec] if several is None else list(several.values())


def block_tokens_of(kv_cache_config: Any) -> int:
    """Tokens of an engine block. One group only."""
    return int(specs_of(kv_cache_config.kv_cache_groups[0])[0].block_size)


def kv_dtype_of(vllm_config: Any) -> str:
    """The KV cache's type as resolved: never `auto`, one name for each."""
    name = str(vllm_config.cache_config.cache_dtype)
    return dtype_name(vllm_config.model_config.dtype) if name == "auto" else _KV_DTYPES.get(name, name)


def is_quantized(kv_dtype: str) -> bool:
    """Whether values of this KV type depend on scales."""
    return kv_dtype not in ("bfloat16", "float16", "float32")


def dtype_name(dtype: Any) -> str:
    """torch's name of a dtype, without the module."""
    return str(dtype).removeprefix("torch.")


def describe_rank(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[RankGeometry, PageViews]:
    """This worker's geometry and the byte views of its pages, from the tensors that vLLM registered.

    The pages' addresses come from the cache's strides (`kv_cache_tensors`) and are compared
    with the tensors themselves.

    Raises:
        Unsupported: anything about them isn't as expected.
    """
    parallel = vllm_config.parallel_config
    spec = specs_of(kv_cache_config.kv_cache_groups[0])[0]
    placed = _place_layers(kv_cache_config, kv_caches)
    names = sorted(placed, key=_natural)
    pages = [_page_shape(kv_caches[name], placed[name][1], kv_cache_config.num_blocks) for name in names]
    if len(set(pages)) > 1:
        raise Unsupported("layers with unequal pages are not supported")
    shape, order = pages[0]
    first = kv_caches[names[0]]
    page_bytes = math.prod(shape) * first.element_size()
    views = [
        _byte_view(kv_caches[name], placed[name][0], placed[name][1], kv_cache_config.num_blocks, page_bytes)
        for name in names
    ]
    dtype = dtype_name(first.dtype)
    if dtype not in SAFETENSORS_DTYPES or any(kv_caches[name].dtype != first.dtype for name in names):
        raise Unsupported(f"KV caches of type {dtype} are not supported")
    kv_dtype = kv_dtype_of(vllm_config)
    if not is_quantized(kv_dtype) and kv_dtype != dtype:
        raise Unsupported(f"the KV cache's type is {dtype}, the configuration says {kv_dtype}")
    layers = [vllm_config.compilation_config.static_forward_context.get(name) for name in names]
    tp_rank = parallel.rank % parallel.tensor_parallel_size
    geometry = RankGeometry(
        rank=parallel.rank,
        tp_rank=tp_rank,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=parallel.rank // parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        layers=tuple(names),
        kv_heads=int(first.shape[1]),
        block_tokens=int(spec.block_size),
        num_blocks=int(kv_cache_config.num_blocks),
        page_shape=shape,
        page_bytes=page_bytes,
        dtype=SAFETENSORS_DTYPES[dtype],
        page_format=_page_format(layers, order),
        replicated=getattr(spec, "max_tp_shards", None) == 1 and parallel.tensor_parallel_size > 1,
        kv_scales=tuple(_scales_of(layer) for layer in layers) if is_quantized(kv_dtype) else None,
    )
    return geometry, PageViews(layers=tuple(views))


def layout_of(ranks: Sequence[RankGeometry]) -> Layout:
    """The layout that the workers' pages add up to.

    Raises:
        Unsupported: the ranks don't fit together.
    """
    first = ranks[0]
    for name in ("block_tokens", "dtype", "page_shape", "page_format", "tp_size", "pp_size", "replicated"):
        if len({repr(getattr(rank, name)) for rank in ranks}) > 1:
            raise Unsupported(f"ranks differ in {name}: {[getattr(rank, name) for rank in ranks]}")
    if [rank.rank for rank in ranks] != list(range(first.tp_size * first.pp_size)):
        raise Unsupported(f"{len(ranks)} ranks for {first.tp_size} x {first.pp_size} parallel workers")
    slices: list[SliceLayout] = []
    first_layer = 0
    for stage in range(first.pp_size):
        members = [rank for rank in ranks if rank.pp_rank == stage]
        if len({rank.layers for rank in members}) > 1:
            raise Unsupported(f"ranks of pipeline stage {stage} hold different layers")
        holders = [members] if first.replicated else [[rank] for rank in members]
        slices += [
            SliceLayout(
                num_layers=len(same[0].layers),
                kv_heads=same[0].kv_heads,
                ranks=tuple(rank.rank for rank in same),
                first_layer=first_layer,
                first_head=0 if first.replicated else same[0].tp_rank * same[0].kv_heads,
            )
            for same in holders
        ]
        first_layer += len(members[0].layers)
    return Layout(
        block_tokens=first.block_tokens,
        dtype=first.dtype,
        page_shape=first.page_shape,
        page_format=first.page_format,
        slices=tuple(slices),
    )


def kv_scales_of(ranks: Sequence[RankGeometry]) -> dict[str, Any] | None:
    """The static KV scales of all layers, as identity wants them; None if the cache isn't quantized."""
    pairs: list[tuple[float, float]] = []
    for rank in ranks:
        if rank.kv_scales is None:
            return None
        if rank.tp_rank == 0:
            pairs.extend(rank.kv_scales)
        elif rank.kv_scales != next(r.kv_scales for r in ranks if r.pp_rank == rank.pp_rank):
            raise Unsupported("ranks have different KV scales")
    if len(set(pairs)) == 1:
        return {"k": pairs[0][0], "v": pairs[0][1]}
    return {"k": [pair[0] for pair in pairs], "v": [pair[1] for pair in pairs]}


def _place_layers(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Byte offset of block 0 and byte distance of blocks, of every layer with a cache of its own."""
    placed: dict[str, tuple[int, int]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        if getattr(tensor, "host_resident", False):
            raise Unsupported("KV caches that live on the host are not supported")
        for index, name in enumerate(tensor.layers):
            if name not in kv_caches:
                raise Unsupported(f"layer {name} has no registered KV cache")
            placed[name] = (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
    if not placed:
        raise Unsupported("the model has no KV cache")
    if missing := set(kv_cache_config.kv_cache_groups[0].layer_names) - set(placed) - set(kv_caches):
        raise Unsupported(f"layers {sorted(missing)} have no place in the KV cache")
    return placed


def _page_shape(cache: torch.Tensor, block_stride: int, num_blocks: int) -> tuple[tuple[int, ...], str]:
    """A page's dimensions in memory order, and their names ("HNC", or "2xHNC" for two kernel blocks in a block)."""
    if cache.ndim != 4 or cache.shape[0] % num_blocks:
        raise Unsupported(f"a KV cache of shape {tuple(cache.shape)} for {num_blocks} blocks is not understood")
    ratio = cache.shape[0] // num_blocks
    if cache.stride(0) * cache.element_size() * ratio != block_stride:
        raise Unsupported(
            f"blocks lie {cache.stride(0) * cache.element_size() * ratio} bytes apart, the configuration says "
            f"{block_stride}"
        )
    sizes, strides = list(cache.shape[1:]), [cache.stride(dim) for dim in (1, 2, 3)]
    # A dimension of size 1 has no place in memory: put it where it stands in the logical order.
    dims = [dim for dim in range(3) if sizes[dim] == 1]
    dims += sorted((dim for dim in range(3) if sizes[dim] != 1), key=lambda dim: -strides[dim])
    dense = 1
    for dim in reversed(dims):
        if sizes[dim] != 1 and strides[dim] != dense:
            raise Unsupported("a page of the KV cache is not one run of bytes")
        dense *= sizes[dim]
    shape, order = tuple(sizes[dim] for dim in dims), "".join(_AXES[dim] for dim in dims)
    if ratio == 1:
        return shape, order
    if cache.stride(0) != dense:
        raise Unsupported("kernel blocks with gaps between them are not supported")
    return (ratio, *shape), f"{ratio}x{order}"


def _byte_view(cache: torch.Tensor, offset: int, block_stride: int, num_blocks: int, page_bytes: int) -> Bytes:
    """`[num_blocks, page_bytes]` over the cache's own memory."""
    import torch

    if cache.device.type != "cpu":
        raise Unsupported(f"KV caches on {cache.device.type} are not supported")
    storage = cache.untyped_storage()
    found = cache.data_ptr() - storage.data_ptr()
    if found != offset:
        raise Unsupported(f"a layer's KV cache starts at byte {found}, the configuration says {offset}")
    if offset + (num_blocks - 1) * block_stride + page_bytes > storage.nbytes() or block_stride < page_bytes:
        raise Unsupported("the KV cache is smaller than its blocks")
    raw: Bytes = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
    return np.lib.stride_tricks.as_strided(
        raw[offset:], shape=(num_blocks, page_bytes), strides=(block_stride, 1), writeable=True
    )


def _page_format(layers: Sequence[Any], order: str) -> dict[str, str]:
    """What decides the meaning of the bytes inside a page, besides its shape."""
    found: set[tuple[str, str]] = set()
    for layer in layers:
        backend = getattr(layer, "attn_backend", None)
        if backend is None:
            raise Unsupported("an attention layer does not name its backend")
        found.add((str(backend.get_name()), str(getattr(layer, "isa", ""))))
    if len(found) > 1:
        raise Unsupported(f"layers use different attention backends: {sorted(found)}")
    backend_name, isa = found.pop()
    if backend_name == "CPU_ATTN" and not isa:
        raise Unsupported("the CPU attention backend does not name its instruction set")
    page_format = {"backend": backend_name, "order": order}
    if isa:
        page_format["isa"] = isa
    if sys.byteorder != "little":
        page_format["byteorder"] = sys.byteorder
    return page_format


def _scales_of(layer: Any) -> tuple[float, float]:
    key, value = getattr(layer, "_k_scale_float", None), getattr(layer, "_v_scale_float", None)
    if key is None or value is None:
        raise Unsupported("a quantized KV cache without static scales is not supported")
    return float(key), float(value)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts "layers.10" after "layers.9", which is the order of the model."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
