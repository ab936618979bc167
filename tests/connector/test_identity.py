"""Identity follows content: the same weights anywhere are the same, others in the same place are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsnap.identity import ModelIdentity, differing_fields
from kvsnap.weights import weights_digest
from kvsnap_connector.compat import Unsupported
from kvsnap_connector.identity import gguf_files, model_identity, rope_in_force, weight_files, weights_of
from tests.connector.fakes import make_vllm_config

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "linear", "factor": 1.0, "rope_theta": 10000.0},
    "text_config": {"hidden_size": 32, "depth": 2},
    "_name_or_path": "/somewhere",
    "transformers_version": "5.0",
}


def make_model(folder: Path, *, weights: bytes = b"weights", config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    return folder


def hash_files(files: Sequence[Path]) -> str:
    return weights_digest(files, cache_file=None)


def identity_of(
    folder: Path, *, weights: str = "auto", change: Callable[[Any], None] | None = None, **values: Any
) -> ModelIdentity:
    vllm_config = make_vllm_config(str(folder), **values)
    if change is not None:
        change(vllm_config)
    return model_identity(vllm_config, weights_digest=weights, identity_tag="", kv_scales=None, hash_files=hash_files)


def test_the_same_weights_at_another_path_are_the_same(tmp_path: Path) -> None:
    """C09: a path in the identity costs every hit."""
    here = identity_of(make_model(tmp_path / "a"), served_model_name="a")
    there = identity_of(
        make_model(tmp_path / "b" / "c", config=CONFIG | {"_name_or_path": "/other"}), served_model_name=["b"]
    )

    assert here.hash() == there.hash()


def test_other_weights_at_the_same_path_are_others(tmp_path: Path) -> None:
    """A01: an update under the same name."""
    before = identity_of(make_model(tmp_path / "a"))
    after = identity_of(make_model(tmp_path / "a", weights=b"fine-tuned"))

    assert differing_fields(before, after) == ("weights",)


def test_a_sibling_with_the_same_configuration_is_another_model(tmp_path: Path) -> None:
    """A02: base and instruct have equal shapes."""
    base = identity_of(make_model(tmp_path / "base"))
    instruct = identity_of(make_model(tmp_path / "instruct", weights=b"instruct"))

    assert base.config == instruct.config
    assert base.hash() != instruct.hash()


def test_an_override_of_rope_is_named(tmp_path: Path) -> None:
    """A03: the same checkpoint with another RoPE has other KV."""
    folder = make_model(tmp_path / "a")
    changed = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

    plain = identity_of(folder)
    overridden = identity_of(folder, hf_overrides={"rope_parameters": changed})

    assert differing_fields(plain, overridden) == ("config.rope_parameters.factor",)


def test_an_override_with_the_same_value_changes_nothing(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")

    same = identity_of(folder, hf_overrides={"rope_parameters": CONFIG["rope_parameters"], "hidden_size": 64})

    assert same.hash() == identity_of(folder).hash()


def test_an_override_of_a_sub_config_is_merged_into_it(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    sub_config = SimpleNamespace(to_dict=dict)
    hf_config = SimpleNamespace(text_config=sub_config, rope_parameters=None, model_type="llama")

    identity = identity_of(folder, hf_config=hf_config, hf_overrides={"text_config": {"depth": 3}})

    assert identity.config["text_config"] == {"hidden_size": 32, "depth": 3}


def test_a_kv_type_is_part_of_it(tmp_path: Path) -> None:
    """A05: bf16 and fp8 never share."""
    folder = make_model(tmp_path / "a")

    def quantize(config: Any) -> None:
        config.cache_config.cache_dtype = "fp8"

    assert differing_fields(identity_of(folder), identity_of(folder, change=quantize)) == ("kv_dtype",)


def test_a_quantization_is_part_of_it(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")

    assert differing_fields(identity_of(folder), identity_of(folder, quantization="fp8")) == ("quantization",)


@pytest.mark.parametrize("rope_type", ["longrope", "su"])
def test_the_serving_length_switches_longrope(tmp_path: Path, rope_type: str) -> None:
    """A03: `max_model_len` alone changes the KV of every prompt."""
    text = SimpleNamespace(
        model_type="phi3", rope_parameters={"rope_type": rope_type, "original_max_position_embeddings": 4096}
    )
    folder = make_model(tmp_path / "a")

    short = identity_of(folder, hf_text_config=text, max_model_len=4096)
    long = identity_of(folder, hf_text_config=text, max_model_len=4097)

    assert differing_fields(short, long) == ("rope.longrope",)


def test_the_serving_length_of_plain_rope_does_not_count(tmp_path: Path) -> None:
    """Too strict is a bug too: a longer context length must not cost the cache."""
    folder = make_model(tmp_path / "a")

    assert identity_of(folder, max_model_len=1000).hash() == identity_of(folder, max_model_len=8000).hash()


def test_rope_of_one_layer_type_is_enough_to_switch() -> None:
    text = SimpleNamespace(
        model_type="x",
        rope_parameters={
            "full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 100},
            "sliding_attention": {"rope_type": "default"},
        },
    )

    assert rope_in_force(SimpleNamespace(hf_text_config=text, max_model_len=200)) == {"longrope": "long"}


def test_declared_weights_are_not_hashed(tmp_path: Path) -> None:
    identity = identity_of(make_model(tmp_path / "a"), weights="release-7")

    assert identity.weights == "declared:release-7"


def test_dummy_weights_are_their_seed_and_split() -> None:
    """Every rank fills its shard from the same seed, so another split is another model."""
    config = make_vllm_config(seed=3)
    config.load_config.load_format = "dummy"
    one = weights_of(config, "auto", hash_files)
    config.parallel_config.tensor_parallel_size = 2
    two = weights_of(config, "auto", hash_files)

    assert one == "dummy:3,tp=1,pp=1"
    assert two == "dummy:3,tp=2,pp=1"


def test_a_function_of_overrides_is_declined(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="is a function"):
        identity_of(make_model(tmp_path / "a"), hf_overrides=lambda config: config)


def test_a_model_that_is_nowhere_is_declined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(Unsupported, match="has no local files"):
        identity_of(Path("nobody/nothing-of-this-name"))


def test_a_separate_quantization_file_counts_as_vllm_takes_it(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    plain = identity_of(folder)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')

    assert differing_fields(plain, identity_of(folder)) == ("config.quantization_config",)


def test_a_mistral_checkpoint_is_read_as_one(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    (folder / "consolidated.safetensors").write_bytes(b"mistral")
    (folder / "params.json").write_text('{"dim": 64}')

    identity = identity_of(folder)

    assert identity.config["params"] == {"dim": 64}
    assert identity.weights == hash_files([folder / "consolidated.safetensors"])


FILES = ["b.safetensors", "a.safetensors", "pytorch_model.bin", "x.pt", "training_args.bin", "notes.txt"]


@pytest.mark.parametrize(
    ("present", "load_format", "read"),
    [
        (FILES, "auto", ["a.safetensors", "b.safetensors"]),
        (FILES, "hf", ["a.safetensors", "b.safetensors"]),
        (FILES, "safetensors", ["a.safetensors", "b.safetensors"]),
        (FILES, "pt", ["x.pt"]),
        (FILES, "npcache", ["pytorch_model.bin"]),
        (FILES[2:], "auto", ["pytorch_model.bin"]),
        (["x.pt", "optimizer.pt"], "auto", ["x.pt"]),
        ([*FILES, "consolidated.safetensors"], "auto", ["consolidated.safetensors"]),
        ([*FILES, "consolidated.safetensors"], "hf", ["a.safetensors", "b.safetensors", "consolidated.safetensors"]),
        (["model-rank-1-part-0.safetensors", "x.safetensors"], "sharded_state", ["model-rank-1-part-0.safetensors"]),
    ],
)
def test_weight_files_are_those_that_the_loader_reads(
    tmp_path: Path, present: list[str], load_format: str, read: list[str]
) -> None:
    for name in present:
        (tmp_path / name).write_bytes(b"")

    assert [path.name for path in weight_files(tmp_path, load_format)] == read


def test_files_that_the_index_does_not_name_do_not_count(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors", "extra.safetensors"):
        (tmp_path / name).write_bytes(b"")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert [path.name for path in weight_files(tmp_path, "auto")] == ["model-1.safetensors", "model-2.safetensors"]


def test_a_folder_with_a_pattern_in_its_name_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models[1]*"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"")

    assert [path.name for path in weight_files(folder, "auto")] == ["a.safetensors"]


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress", "of-a-plugin"])
def test_a_format_that_is_not_known_needs_a_declaration(tmp_path: Path, load_format: str) -> None:
    with pytest.raises(Unsupported, match="weights_digest"):
        weight_files(tmp_path, load_format)


def test_a_folder_without_weights_needs_a_declaration(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="weights_digest"):
        weight_files(tmp_path, "auto")


def test_all_parts_of_a_split_gguf_count(tmp_path: Path) -> None:
    names = [f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    for name in names:
        (tmp_path / name).write_bytes(b"")

    assert [path.name for path in gguf_files(tmp_path / names[0])] == names
    (tmp_path / names[1]).unlink()
    with pytest.raises(Unsupported, match="1 of 2 parts"):
        gguf_files(tmp_path / names[0])
