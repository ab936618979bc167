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

from kvsnap.layout import Layout, SliceLayout
from kvsnap_connector.pages import PagePlaces, check_places, page_shape, place_layers
from kvsnap_connector.rendezvous import RankGeometry
from kvsnap_connector.unsupported import Unsupported as Unsupported

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
_QUANT_MODES = {"NONE", "FP8_PER_TENSOR"}
"""Where the bytes of a token mean the same in every page: plain values, or one static scale per layer."""
_CUDA_BACKENDS = {
    "FLASH_ATTN",
    "FLASHINFER",
    "TRITON_ATTN",
    "FLASHMLA",
    "FLASH_ATTN_MLA",
    "FLASHINFER_MLA",
    "CUTLASS_MLA",
    "TRITON_MLA",
}
"""Attention backends whose pages were looked at: K and V (or MLA's latent) of a token beside each other,
nothing outside the page. Another one may keep more than that; it is declined until somebody has looked."""
_SAFE_BLOCK_TOKENS = 64
"""No backend of those splits blocks up to this size into kernel blocks, which vLLM can't do
where all layers of a block are contiguous: it would refuse to start."""


def unsupported_reason(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why kvsnap has to stay out of this engine; None if it need not.

    Exact types only: a subclass of a known KV cache spec may hold anything.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if reason := _device_reason(device_type(vllm_config)):
        return reason
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


def device_type(vllm_config: Any) -> str:
    """`cpu`, `cuda` (ROCm calls itself so too), or what else vLLM runs on."""
    return str(getattr(vllm_config.device_config, "device_type", "unknown"))


def _device_reason(device: str) -> str | None:
    if device == "cpu":
        return None
    if device != "cuda":
        return f"not yet supported on this device ({device})"
    import torch

    if getattr(torch.version, "hip", None):
        return "not yet supported on this device (ROCm)"
    return None


def wanted_layout(vllm_config: Any, *, is_head_major: bool) -> str | None:
    """The KV cache layout to ask vLLM for: all layers of a block in one run, so that a block is one copy.

    None (no wish) where the answer would do nothing for kvsnap or could do harm: on the CPU,
    which has one layout; for models with several kinds of layers, which kvsnap declines and
    which vLLM packs; for large blocks that a backend may have to split. A backend that can't
    have it keeps its own, with a warning from vLLM, and `VLLM_KV_CACHE_LAYOUT` goes first.

    Args:
        is_head_major: Whether kernels want heads outside tokens in a page (FlashInfer on Blackwell).
    """
    if device_type(vllm_config) != "cuda" or _device_reason("cuda") is not None:
        return None
    model, cache = vllm_config.model_config, vllm_config.cache_config
    kinds = getattr(model.hf_text_config, "layer_types", None) or ()
    if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False) or len(set(kinds)) > 1:
        return None
    if getattr(cache, "user_specified_block_size", False) and cache.block_size > _SAFE_BLOCK_TOKENS:
        return None
    return "BLHNC" if is_head_major else "BLNHC"


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
        mode = getattr(spec, "kv_quant_mode", None)
        if getattr(mode, "is_per_token_head", False):
            return "KV caches with scales per token and head are not supported"
        mode_name = str(getattr(mode, "name", "NONE"))
        if mode_name not in _QUANT_MODES:
            return f"KV caches quantized as {mode_name} are not supported"
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


def locate_rank(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor]
) -> tuple[RankGeometry, PagePlaces]:
    """This worker's geometry and the places of its pages, from the tensors that vLLM registered.

    The pages' addresses come from the cache's strides (`kv_cache_tensors`) and are compared
    with the tensors themselves.

    Raises:
        Unsupported: anything about them isn't as expected.
    """
    parallel = vllm_config.parallel_config
    spec = specs_of(kv_cache_config.kv_cache_groups[0])[0]
    placed = place_layers(kv_cache_config, kv_caches)
    names = sorted(placed, key=_natural)
    pages = [page_shape(kv_caches[name], placed[name][1], kv_cache_config.num_blocks) for name in names]
    if len(set(pages)) > 1:
        raise Unsupported("layers with unequal pages are not supported")
    shape, order = pages[0]
    first = kv_caches[names[0]]
    places = PagePlaces(
        offsets=tuple(placed[name][0] for name in names),
        block_strides=tuple(placed[name][1] for name in names),
        num_blocks=int(kv_cache_config.num_blocks),
        page_bytes=math.prod(shape) * first.element_size(),
    )
    check_places([kv_caches[name] for name in names], places)
    dtype = dtype_name(first.dtype)
    if dtype not in SAFETENSORS_DTYPES or any(kv_caches[name].dtype != first.dtype for name in names):
        raise Unsupported(f"KV caches of type {dtype} are not supported")
    kv_dtype = kv_dtype_of(vllm_config)
    if not is_quantized(kv_dtype) and kv_dtype != dtype:
        raise Unsupported(f"the KV cache's type is {dtype}, the configuration says {kv_dtype}")
    layers = [vllm_config.compilation_config.static_forward_context.get(name) for name in names]
    page_format = _page_format(layers, order)
    if device_type(vllm_config) == "cuda" and page_format["backend"] not in _CUDA_BACKENDS:
        raise Unsupported(f"attention backend {page_format['backend']} is not known to kvsnap")
    geometry = RankGeometry(
        rank=parallel.rank,
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=parallel.rank // parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        layers=tuple(names),
        kv_heads=int(first.shape[1]),
        block_tokens=int(spec.block_size),
        page_shape=shape,
        page_bytes=places.page_bytes,
        dtype=SAFETENSORS_DTYPES[dtype],
        page_format=page_format,
        replicated=getattr(spec, "max_tp_shards", None) == 1 and parallel.tensor_parallel_size > 1,
        kv_scales=tuple(_scales_of(layer) for layer in layers) if is_quantized(kv_dtype) else None,
    )
    return geometry, places


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
