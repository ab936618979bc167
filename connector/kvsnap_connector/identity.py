"""VllmConfig -> ModelIdentity: content only, so that a path or a name never matters.

Weight files are chosen as vLLM's own loader chooses them for the load format
(`model_executor/model_loader/default_loader.py`, 0.32): a file that it does not read
must not count, one that it reads must.
"""

from __future__ import annotations

import fnmatch
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsnap.errors import KvsnapError
from kvsnap.identity import ModelIdentity, clean_config
from kvsnap_connector.compat import Unsupported, dtype_name, kv_dtype_of

HashFiles = Callable[[Sequence[Path]], str]
"""Digest of weight files, as `kvsnap.weights.weights_digest`."""

_INDEX = "model.safetensors.index.json"
_MISTRAL_INDEX = "consolidated.safetensors.index.json"
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_DECLARE = 'set "weights_digest" to a string that names them'


def model_identity(
    vllm_config: Any,
    *,
    weights_digest: str,
    identity_tag: str,
    kv_scales: Mapping[str, Any] | None,
    hash_files: HashFiles,
) -> ModelIdentity:
    """Everything about an engine that decides KV values.

    Args:
        vllm_config: vLLM's, after it has resolved every `auto`.
        weights_digest: "auto" for the files' content, else what the operator declares.
        identity_tag: The operator's own part.
        kv_scales: Static KV scales as found in the workers, None without.
        hash_files: Called with the weight files, unless they are declared or dummies.

    Raises:
        Unsupported: something that decides KV values can't be told.
    """
    model = vllm_config.model_config
    return ModelIdentity(
        weights=weights_of(vllm_config, weights_digest, hash_files),
        config=clean_config(config_of(model)),
        quantization=_quantization(model),
        dtype=dtype_name(model.dtype),
        kv_dtype=kv_dtype_of(vllm_config),
        kv_scales=kv_scales,
        rope=rope_in_force(model),
        identity_tag=identity_tag,
    )


def weights_of(vllm_config: Any, weights_digest: str, hash_files: HashFiles) -> str:
    """`sha256:…`, `declared:…` or `dummy:…`."""
    if weights_digest != "auto":
        return "declared:" + weights_digest.removeprefix("declared:")
    model, load, parallel = vllm_config.model_config, vllm_config.load_config, vllm_config.parallel_config
    if load.load_format == "dummy":
        if model.quantization is not None:
            raise Unsupported("dummy weights of a quantized model are not the same twice")
        # Each rank fills its own shard from the same seed: another split is another model.
        split = f"tp={parallel.tensor_parallel_size},pp={parallel.pipeline_parallel_size}"
        return f"dummy:{model.seed},{split}"
    if str(load.load_format) == "gguf":
        return hash_files(gguf_files(Path(model.model)))
    folder = model_folder(model.model, model.revision, load.download_dir)
    return hash_files(weight_files(folder, load.load_format))


def weight_files(folder: Path, load_format: str) -> list[Path]:
    """The files in `folder` that vLLM's loader reads for `load_format`, sorted by name.

    Raises:
        Unsupported: the loader reads no local files, or none that can be told.
    """
    index = _INDEX
    if load_format == "auto":
        load_format = "mistral" if _has_consolidated(folder) else "hf"
    match load_format:
        case "hf":
            patterns = ["*.safetensors", "*.bin", "*.pt"]
        case "safetensors" | "fastsafetensors" | "instanttensor" | "runai_streamer":
            patterns = ["*.safetensors"]
        case "mistral":
            patterns, index = ["consolidated*.safetensors"], _MISTRAL_INDEX
        case "pt":
            patterns = ["*.pt"]
        case "npcache":
            patterns = ["*.bin", "*.pt"]
        case "sharded_state" | "runai_streamer_sharded":
            patterns = ["model-pp-*-tp-*-part-*.safetensors", "model-rank-*-part-*.safetensors"]
        case _:
            raise Unsupported(f"the weights of load format {load_format} can't be told; {_DECLARE}")
    for pattern in patterns:
        found = [Path(path) for path in glob.glob(os.path.join(glob.escape(str(folder)), pattern))]
        if found:
            break
    else:
        raise Unsupported(f"no weight files of load format {load_format} in {folder}; {_DECLARE}")
    if pattern.endswith(".safetensors"):
        if "runai" not in load_format and "sharded" not in load_format:
            found = _in_index(found, folder, index)
    else:
        found = [path for path in found if not path.name.endswith(_NOT_WEIGHTS)]
    if not found:
        raise Unsupported(f"no weight files of load format {load_format} in {folder}; {_DECLARE}")
    return sorted(found)


def gguf_files(model: Path) -> list[Path]:
    """A GGUF model's file, or all parts of a split one."""
    if not model.is_file():
        raise Unsupported(f"the weights of GGUF model {model} are not one local file; {_DECLARE}")
    part = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", model.name)
    if part is None:
        return [model]
    found = sorted(model.parent.glob(f"{glob.escape(part[1])}-?????-of-{part[2]}.gguf"))
    if len(found) != int(part[2]):
        raise Unsupported(f"GGUF model {model} has {len(found)} of {int(part[2])} parts; {_DECLARE}")
    return found


def model_folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Where the model's files are: itself, or its snapshot in the Hub cache. Nothing is downloaded."""
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                model,
                revision=None if revision is None else str(revision),
                cache_dir=download_dir,
                local_files_only=True,
            )
        )
    except Exception as error:
        raise Unsupported(f"model {model} has no local files ({type(error).__name__}); {_DECLARE}") from error


def config_of(model: Any) -> dict[str, Any]:
    """The checkpoint's raw configuration with the operator's overrides, as vLLM applies them."""
    raw = raw_config(model)
    overrides = getattr(model, "hf_overrides", None) or {}
    if callable(overrides):
        raise Unsupported("hf_overrides is a function, and what it changes can't be told")
    return apply_overrides(raw, overrides, nested=lambda name: _is_sub_config(model, name))


def raw_config(model: Any) -> dict[str, Any]:
    """config.json as it is in the checkpoint; of a Mistral checkpoint params.json and config.json."""
    where = getattr(model, "hf_config_path", None) or model.model
    folder = Path(where).parent if os.path.isfile(where) else model_folder(where, model.revision, None)
    as_mistral = str(model.config_format) == "mistral" or (
        str(model.config_format) == "auto" and _has_consolidated(folder) and (folder / "params.json").is_file()
    )
    config = _read_json(folder / "config.json")
    if as_mistral:
        return {"params": _read_json(folder / "params.json") or {}, "config": config}
    if config is None:
        raise Unsupported(f"{folder} has no config.json that can be read")
    separate = _read_json(folder / "hf_quant_config.json")
    if separate is not None and "quantization_config" not in config:
        config["quantization_config"] = separate
    return config


def apply_overrides(
    config: Mapping[str, Any], overrides: Mapping[str, Any], *, nested: Callable[[str], bool]
) -> dict[str, Any]:
    """`config` with `overrides`: replaced, but merged where `nested` says that a value is a sub-config."""
    result = dict(config)
    for name, value in overrides.items():
        present = result.get(name)
        if isinstance(value, Mapping) and isinstance(present, Mapping) and nested(name):
            result[name] = _merge(present, value)
        else:
            result[name] = value
    return result


def rope_in_force(model: Any) -> dict[str, Any] | None:
    """What the serving length decides about positions, beyond the configuration; None for nothing.

    vLLM takes LongRoPE's long factors for *all* lengths as soon as `max_model_len` exceeds
    the original length, so the same checkpoint has two kinds of KV.
    """
    text = model.hf_text_config
    mode: dict[str, Any] = {}
    for parameters in _rope_parameters(text):
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind in ("longrope", "su"):
            original = parameters.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            if original is None:
                raise Unsupported("LongRoPE without original_max_position_embeddings is not understood")
            mode["longrope"] = "long" if model.max_model_len > original else "short"
        elif kind == "dynamic" and str(getattr(text, "model_type", "")).startswith(("minimax", "plamo")):
            # These size their RoPE by the serving length, and the dynamic kind computes with its size.
            mode["max_position"] = min(int(text.max_position_embeddings), model.max_model_len)
    if str(getattr(text, "model_type", "")).startswith("llama4"):
        generation = dict(model.try_get_generation_config()) | dict(model.override_generation_config)
        mode["attn_temperature_tuning"] = bool(generation.get("attn_temperature_tuning", model.max_model_len > 32768))
    return mode or None


def _rope_parameters(text: Any) -> Iterator[Mapping[str, Any]]:
    """The RoPE parameters of a model, one set or one per layer type."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(parameters, Mapping):
        return
    if any(isinstance(value, Mapping) for value in parameters.values()):
        yield from (value for value in parameters.values() if isinstance(value, Mapping))
    else:
        yield parameters


def _quantization(model: Any) -> str | None:
    """The method as resolved, and the operator's own settings of it."""
    if model.quantization is None:
        return None
    settings = getattr(model, "quantization_config", None)
    return str(model.quantization) if settings is None else f"{model.quantization} {settings}"


def _is_sub_config(model: Any, name: str) -> bool:
    return hasattr(getattr(model.hf_config, name, None), "to_dict")


def _merge(target: Mapping[str, Any], updates: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(target)
    for name, value in updates.items():
        present = result.get(name)
        both = isinstance(value, Mapping) and isinstance(present, Mapping)
        result[name] = _merge(present, value) if both and present is not None else value
    return result


def _has_consolidated(folder: Path) -> bool:
    """vLLM looks at names in all subfolders; so does this."""
    return any(fnmatch.fnmatch(path.name, "consolidated*.safetensors") for path in folder.rglob("*.safetensors"))


def _in_index(found: list[Path], folder: Path, index: str) -> list[Path]:
    """Only the files that the checkpoint's index names, where it has one."""
    weight_map = (_read_json(folder / index) or {}).get("weight_map")
    if not isinstance(weight_map, Mapping):
        return found
    named = {os.path.join(folder, str(name)) for name in weight_map.values()}
    return [path for path in found if str(path) in named]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise KvsnapError(f"{path} can't be read: {error}") from error
    return content if isinstance(content, dict) else None
