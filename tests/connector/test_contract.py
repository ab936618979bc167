"""vLLM's side of the contract. A change of any hook has to be looked at, not survived by luck.

Tested against 0.32.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("vllm")]

HOOKS = {
    "__init__": "self, vllm_config, role, kv_cache_config",
    "bind_connector_metadata": "self, connector_metadata",
    "bind_gpu_block_pool": "self, gpu_block_pool",
    "bind_kv_cache_manager": "self, kv_cache_manager",
    "build_connector_meta": "self, scheduler_output",
    "build_connector_worker_meta": "self",
    "build_kv_connector_stats": "cls, data",
    "build_prom_metrics": "cls, vllm_config, metric_types, labelnames, per_engine_labelvalues",
    "clear_connector_metadata": "self",
    "finish_forward": "self",
    "get_block_ids_with_load_errors": "self",
    "get_external_cache_hit_sources": "self, request, num_external_tokens",
    "get_finished": "self, finished_req_ids",
    "get_finished_count": "self",
    "get_handshake_metadata": "self",
    "get_kv_connector_kv_cache_events": "self",
    "get_kv_connector_stats": "self",
    "get_loaded_kv_cache_group_ids": "self, request",
    "get_mem_pool_context": "self",
    "get_num_new_matched_tokens": "self, request, num_computed_tokens",
    "get_required_kvcache_layout": "cls, vllm_config",
    "get_transfer_results": "self, finished_req_ids",
    "handle_preemptions": "self, kv_connector_metadata",
    "has_connector_metadata": "self",
    "has_pending_block_frees": "self",
    "has_pending_push_work": "self",
    "on_new_request": "self, request",
    "register_finished_partial_tail": "self, request, block_ids, partial_tail_offloads",
    "register_kv_caches": "self, kv_caches",
    "request_finished": "self, request, block_ids",
    "request_finished_all_groups": "self, request, block_ids",
    "requires_kv_delivery": "property",
    "requires_piecewise_for_cudagraph": "cls, extra_config",
    "reset_cache": "self",
    "reset_capture_state": "self",
    "role": "property",
    "save_kv_layer": "self, layer_name, kv_layer, attn_metadata, **kwargs",
    "set_host_xfer_buffer_ops": "self, copy_operation",
    "set_xfer_handshake_metadata": "self, metadata",
    "set_xfer_handshake_metadata_pp_aware": "self, metadata",
    "shutdown": "self",
    "start_load_kv": "self, forward_context, **kwargs",
    "supports_divergent_local_hybrid_hits": "property",
    "take_events": "self",
    "update_connector_output": "self, connector_output",
    "update_state_after_alloc": "self, request, blocks, num_external_tokens",
    "wait_for_layer_load": "self, layer_name",
    "wait_for_save": "self",
}
"""Every hook of vLLM 0.32's base classes, and the names of its parameters."""

ADDED_LATER = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
"""New in 0.33, around sleep. kvsnap has them all, with any arguments."""


def _signature(member: Any) -> str | None:
    if isinstance(member, property):
        return "property"
    function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
    if not inspect.isfunction(function):
        return None
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(("**" if p.kind is p.VAR_KEYWORD else "") + p.name for p in parameters)


def _hooks(*classes: type) -> dict[str, str]:
    found = {}
    for cls in classes:
        for name, member in vars(cls).items():
            if not name.startswith("_") or name == "__init__":
                signature = _signature(member)
                if signature is not None:
                    found[name] = signature
    return found


def test_every_hook_is_as_it_was() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base

    found = _hooks(base.KVConnectorBase_V1, base.SupportsHMA)

    assert {name: text for name, text in found.items() if name not in ADDED_LATER} == HOOKS


def test_our_hooks_take_what_vllm_gives() -> None:
    from kvsnap_connector.connector import KVSnapConnector

    ours = {name: text for name, text in _hooks(KVSnapConnector).items() if name in HOOKS}

    assert {name: HOOKS[name] for name in ours} == ours
    assert not KVSnapConnector.__abstractmethods__


def test_what_is_read_of_vllms_objects_is_there() -> None:
    """Attributes that `compat.py`, `identity.py` and `live_request.py` rely on."""
    from vllm.config import CacheConfig, KVTransferConfig, LoadConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.v1.core.sched.output import CachedRequestData, KVConnectorBlockState, NewRequestData, SchedulerOutput
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.request import Request

    expected: dict[type, str] = {
        CacheConfig: "cache_dtype kv_cache_dtype_skip_layers block_size user_specified_block_size",
        KVTransferConfig: "engine_id kv_load_failure_policy kv_connector_extra_config is_kv_producer is_kv_consumer",
        LoadConfig: "load_format download_dir",
        ModelConfig: (
            "model revision served_model_name dtype quantization quantization_config seed max_model_len "
            "hf_overrides hf_config hf_text_config hf_config_path config_format model_class_overrides "
            "override_generation_config is_encoder_decoder is_diffusion enable_sleep_mode is_hybrid is_attention_free"
        ),
        ParallelConfig: (
            "rank world_size tensor_parallel_size pipeline_parallel_size data_parallel_size_local nnodes "
            "decode_context_parallel_size prefill_context_parallel_size"
        ),
        VllmConfig: (
            "model_config cache_config load_config parallel_config device_config compilation_config "
            "speculative_config kv_transfer_config weight_transfer_config use_v2_model_runner"
        ),
        CachedRequestData: "req_ids num_computed_tokens",
        KVConnectorBlockState: "get_block_ids",
        NewRequestData: "req_id num_computed_tokens",
        SchedulerOutput: (
            "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens preempted_req_ids kv_connector_block_state"
        ),
        FullAttentionSpec: "block_size page_size_bytes max_tp_shards non_causal tokens_per_state kv_quant_mode",
        KVCacheConfig: "num_blocks kv_cache_tensors kv_cache_groups kv_cache_layout",
        KVCacheGroupSpec: "layer_names kv_cache_spec is_eagle_group host_resident enable_kv_transfer",
        KVCacheTensor: "layers layer_stride block_stride offset host_resident",
    }
    missing = [
        f"{cls.__name__}.{name}"
        for cls, names in expected.items()
        for name in names.split()
        if name not in _fields(cls)
    ]
    assert missing == []
    parameters = set(inspect.signature(Request.__init__).parameters)
    assert {"request_id", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "mm_features", "lora_request",
            "cache_salt", "resumable"} <= parameters  # fmt: skip


def _fields(cls: type) -> set[str]:
    """Fields with and without a default, properties and methods of a class and its bases."""
    found = set(dir(cls))
    for parent in cls.__mro__:
        found |= set(getattr(parent, "__dataclass_fields__", ())) | set(getattr(parent, "__annotations__", ()))
    return found


def test_every_load_format_has_been_looked_at() -> None:
    """A format that `identity.weight_files` doesn't know is declined, never guessed; a new one may deserve more."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    understood = {"auto", "hf", "dummy", "fastsafetensors", "instanttensor", "mistral", "npcache", "pt",
                  "runai_streamer", "runai_streamer_sharded", "safetensors", "sharded_state"}  # fmt: skip
    need_a_declaration = {"ipc_cache", "modelexpress", "tensorizer"}

    assert set(_LOAD_FORMAT_TO_MODEL_LOADER) == understood | need_a_declaration


@pytest.mark.parametrize("load_format", ["auto", "hf", "safetensors", "pt", "npcache"])
def test_weight_files_are_those_of_vllms_own_loader(load_format: str, tmp_path: Any) -> None:
    """A01: a file that the loader reads and the identity misses is a wrong hit waiting to happen."""
    from pathlib import Path

    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from kvsnap_connector.identity import weight_files

    names = ["a.safetensors", "b.safetensors", "c.bin", "d.pt", "optimizer.pt", "training_args.bin"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "b.safetensors"}}')

    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    _, theirs, _, _ = loader._prepare_weights(str(tmp_path), None, None, True, None)

    assert weight_files(tmp_path, load_format) == sorted(Path(path) for path in theirs)
    assert theirs


def test_the_cuda_facts_are_as_they_were() -> None:
    """Names that `compat.py` goes by; with another spelling everything on CUDA would be declined, or too little."""
    from vllm.config import SchedulerConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.kv_cache_interface import KVQuantMode
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from kvsnap_connector.compat import _CUDA_BACKENDS, _QUANT_MODES

    assert set(AttentionBackendEnum.__members__) >= _CUDA_BACKENDS
    assert set(KVQuantMode.__members__) >= _QUANT_MODES
    assert {layout.name for layout in KVCacheLayout if layout.is_block_compact} == {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
    assert "max_num_batched_tokens" in _fields(SchedulerConfig)


def test_what_comes_with_0_33_is_there_already() -> None:
    from kvsnap_connector.connector import KVSnapConnector

    assert all(callable(getattr(KVSnapConnector, name)) for name in ADDED_LATER)
    assert KVSnapConnector.supports_sleep_mode(object())


def test_the_plugin_registers_once() -> None:
    """vLLM runs plugins in every process, and twice in some."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvsnap_connector.connector import KVSnapConnector
    from kvsnap_connector.plugin import register

    register()
    register()

    assert KVConnectorFactory.get_connector_class_by_name("KVSnapConnector") is KVSnapConnector


def test_the_package_is_importable_without_vllm() -> None:
    """The plugin is imported in every process of every vLLM, whether kvsnap is used or not."""
    import subprocess
    import sys

    code = "import sys; import kvsnap_connector, kvsnap_connector.plugin; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                            env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip

    loaded = set(result.stdout.split())
    assert not loaded & {"vllm", "torch", "numpy", "pyarrow"}


def test_the_module_path_gives_the_class() -> None:
    import kvsnap_connector
    from kvsnap_connector.connector import KVSnapConnector

    assert kvsnap_connector.KVSnapConnector is KVSnapConnector
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvsnap_connector.Nothing
