"""Small stand-ins for what the worker half and the adapters talk to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsnap_connector.copier import Bytes, PageViews
from kvsnap_connector.metadata import CopyOp


class FakeRegion:
    """A tier of ordinary memory, with the states that a worker sees."""

    def __init__(self, num_slots: int, stride: int) -> None:
        self.num_slots = num_slots
        self.stride = stride
        self.memory: NDArray[np.uint8] = np.full((num_slots, stride), 0xEE, dtype=np.uint8)
        self.generations = [1] * num_slots
        self.filling = [True] * num_slots
        self.completed: list[tuple[int, int, bool]] = []
        self.loads_done = 0
        self.prefaulted = False
        self.is_closed = False

    def area(self, slot: int) -> Bytes:
        area: Bytes = self.memory[slot]
        return area

    def may_fill(self, slot: int, generation: int) -> bool:
        return self.generations[slot] == generation and self.filling[slot]

    def may_read(self, slot: int, generation: int) -> bool:
        return self.generations[slot] == generation

    def complete(self, slot: int, generation: int, *, ok: bool) -> None:
        self.completed.append((slot, generation, ok))

    def finish_loads(self, seq: int) -> None:
        self.loads_done = seq

    def prefault(self, stop: Sequence[bool] = ()) -> None:
        self.prefaulted = True

    def close(self) -> None:
        self.is_closed = True


def make_pages(num_layers: int, num_blocks: int, page_bytes: int, *, gap: int = 0) -> tuple[NDArray[Any], PageViews]:
    """Random pages; returns the backing memory as `[layers, blocks, page + gap]` and its views."""
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, size=(num_layers, num_blocks, page_bytes + gap), dtype=np.uint8)
    return memory, PageViews(layers=tuple(memory[layer, :, :page_bytes] for layer in range(num_layers)))


def op(slot: int = 0, blocks: Sequence[int] = (3, 5), *, generation: int = 1, first_block: int = 0) -> CopyOp:
    """A copy of these device blocks, for a request `r`."""
    return CopyOp(slot=slot, generation=generation, first_block=first_block, block_ids=list(blocks), request_id="r")


@dataclass
class FullAttentionSpec:
    """Named as vLLM's, because kvsnap goes by exact type names."""

    block_size: int = 16
    page_size_bytes: int = 4096
    max_tp_shards: int | None = None
    non_causal: bool = False
    tokens_per_state: int = 1


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    """The same, one latent head for all ranks."""

    max_tp_shards: int | None = 1


@dataclass
class MambaSpec:
    """A state that isn't KV."""

    block_size: int = 16
    page_size_bytes: int = 4096


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    """Drops blocks that slid out."""


@dataclass
class Backend:
    """An attention backend by name."""

    name: str = "CPU_ATTN"

    def get_name(self) -> str:
        return self.name


def make_layer(**values: Any) -> SimpleNamespace:
    """An attention layer as vLLM leaves it in `static_forward_context`."""
    return SimpleNamespace(**{"attn_backend": Backend(), "isa": "amx"} | values)


@dataclass
class Group:
    """One KV cache group."""

    layer_names: list[str]
    kv_cache_spec: Any
    is_eagle_group: bool = False
    host_resident: bool = False
    enable_kv_transfer: bool = True


@dataclass
class CacheTensor:
    """Placement of layers in the one allocation."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int = 0
    host_resident: bool = False


@dataclass
class CacheConfig:
    """vLLM's KVCacheConfig, as far as it is read."""

    num_blocks: int
    kv_cache_tensors: list[CacheTensor]
    kv_cache_groups: list[Group]
    kv_cache_layout: str | None = "LBHNC"


@dataclass
class Request:
    """vLLM's Request, as far as it is read."""

    request_id: str = "r"
    prompt_token_ids: list[int] | None = field(default_factory=lambda: list(range(40)))
    prompt_embeds: object = None
    prompt_is_token_ids: object = None
    pooling_params: object = None
    lora_request: object = None
    mm_features: list[object] = field(default_factory=list)
    resumable: bool = False
    cache_salt: object = None
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: object = None

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids or [])

    @property
    def num_tokens(self) -> int:
        return len(self._all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or [])


def make_vllm_config(model: str = "model", **model_values: Any) -> SimpleNamespace:
    """A VllmConfig for one CPU rank, with `model_values` in its model_config."""
    hf_config = SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "default", "rope_theta": 10000})
    values: dict[str, Any] = {
        "model": model,
        "revision": None,
        "served_model_name": "name",
        "runner_type": "generate",
        "dtype": "torch.bfloat16",
        "quantization": None,
        "quantization_config": None,
        "seed": 0,
        "max_model_len": 4096,
        "hf_overrides": {},
        "hf_config": hf_config,
        "hf_text_config": hf_config,
        "hf_config_path": None,
        "config_format": "auto",
        "model_class_overrides": {},
        "override_generation_config": {},
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(**values | model_values),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        parallel_config=SimpleNamespace(
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size_local=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes=1,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(static_forward_context={}),
        speculative_config=None,
        use_v2_model_runner=False,
    )
