"""Identity: what decides KV values."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvsnap.canonical import canonical_json
from kvsnap.errors import ConfigError, IncompatibleError
from kvsnap.identity import COSMETIC_CONFIG_FIELDS, ModelIdentity, clean_config, differing_fields

GOLDEN = sorted((Path(__file__).parent / "data" / "identities").glob("*.json"))

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "linear", "factor": 1.0},
    "eos_token_id": [1, 2],
}


def make_identity(**changes: Any) -> ModelIdentity:
    fields: dict[str, Any] = {
        "weights": "sha256:" + "ab" * 32,
        "config": CONFIG,
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        **changes,
    }
    return ModelIdentity(**fields)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    """Three models' identities, computed without kvsnap: a change here makes every cache in the world cold."""
    golden = json.loads(path.read_text())
    fields = golden["identity"] | {"config": clean_config(golden["identity"]["config"])}

    identity = ModelIdentity(**fields)

    assert canonical_json(identity.to_json()).decode() == golden["canonical"]
    assert identity.hash() == golden["hash"] == sha256(golden["canonical"].encode()).hexdigest()


def test_there_are_three_golden_identities() -> None:
    assert len(GOLDEN) == 3


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"weights": "sha256:" + "cd" * 32}, ("weights",)),
        ({"kv_dtype": "fp8_e4m3", "kv_scales": {"k": 1.0, "v": 1.0}}, ("kv_dtype", "kv_scales")),
        ({"dtype": "float16"}, ("dtype",)),
        ({"quantization": "fp8"}, ("quantization",)),
        ({"rope": {"mode": "long"}}, ("rope",)),
        ({"identity_tag": "blue"}, ("identity_tag",)),
        (
            {"config": CONFIG | {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}},
            ("config.rope_parameters.factor",),
        ),
        ({"config": CONFIG | {"sliding_window": None}}, ("config.sliding_window",)),
        ({"config": CONFIG | {"eos_token_id": [1]}}, ("config.eos_token_id",)),
    ],
)
def test_each_field_counts(changes: dict[str, Any], names: tuple[str, ...]) -> None:
    """A01 (weights), A03 (RoPE), A05 (KV dtype): another identity, and the field that differs has a name."""
    ours, theirs = make_identity(), make_identity(**changes)

    assert ours.hash() != theirs.hash()
    assert differing_fields(ours, theirs) == names
    assert differing_fields(theirs, ours) == names


def test_scales_count() -> None:
    """A07: KV quantised with other static scales is other KV."""
    ours = make_identity(kv_dtype="fp8_e4m3", kv_scales={"k": 0.7, "v": 1.0})
    theirs = make_identity(kv_dtype="fp8_e4m3", kv_scales={"k": 0.5, "v": 1.0})

    assert ours.hash() != theirs.hash()
    assert differing_fields(ours, theirs) == ("kv_scales.k",)


def test_a_flag_is_not_a_number() -> None:
    """In Python True equals 1; in a config they are two values."""
    ours, theirs = make_identity(config={"x": True}), make_identity(config={"x": 1})

    assert ours.hash() != theirs.hash()
    assert differing_fields(ours, theirs) == ("config.x",)


def test_spelling_of_numbers_does_not_count() -> None:
    """8 and 8.0 are one number, whichever tool wrote the config."""
    assert make_identity(config={"factor": 8}).hash() == make_identity(config={"factor": 8.0}).hash()


def test_order_of_fields_does_not_count() -> None:
    assert make_identity(config=dict(reversed(CONFIG.items()))).hash() == make_identity().hash()


def test_cosmetic_fields_do_not_count() -> None:
    """C09: too strict is a bug too; paths and versions in a config.json are no part of a model."""
    cosmetic: dict[str, Any] = dict.fromkeys(COSMETIC_CONFIG_FIELDS, "/models/a")
    noisy = {**CONFIG, **cosmetic, "text_config": {"hidden_size": 8, **cosmetic}}

    assert clean_config(noisy) == {**CONFIG, "text_config": {"hidden_size": 8}}


def test_clean_config_keeps_what_a_model_may_read() -> None:
    """Some models look at special token ids while they compute KV: in doubt a field counts."""
    assert clean_config(CONFIG) == CONFIG


def test_json_round_trip() -> None:
    """Floats are written as strings; what is read back must equal what was written, with no field differing."""
    identity = make_identity(kv_scales={"k": 0.1}, rope={"factor": 1.5}, quantization="awq")

    again = ModelIdentity.from_json(json.loads(canonical_json(identity.to_json())))

    assert again == identity
    assert again.hash() == identity.hash()
    assert differing_fields(again, identity) == ()


def test_does_not_change_with_its_source() -> None:
    config = {"layers": [1, 2]}
    identity = make_identity(config=config)
    before = identity.hash()

    config["layers"].append(3)

    assert identity.hash() == before


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"colour": 1}, ("colour",)),
        ({"weights": None}, ("weights",)),
        ({"config": "llama"}, ("config",)),
        ({"rope": 0}, ("rope",)),
        ({"quantization": False}, ("quantization",)),
        ({"kv_dtype": 8}, ("kv_dtype",)),
    ],
)
def test_from_json_is_strict(change: dict[str, Any], fields: tuple[str, ...]) -> None:
    """Invariant 1: a field that this version doesn't know may decide KV values."""
    with pytest.raises(IncompatibleError) as caught:
        ModelIdentity.from_json(make_identity().to_json() | change)

    assert caught.value.fields == fields


def test_from_json_names_what_is_missing() -> None:
    obj = make_identity().to_json()
    del obj["kv_dtype"], obj["rope"]

    with pytest.raises(IncompatibleError, match="lacks kv_dtype, rope") as caught:
        ModelIdentity.from_json(obj)

    assert caught.value.fields == ("kv_dtype", "rope")


@pytest.mark.parametrize("obj", [None, [], "identity", 3])
def test_from_json_wants_an_object(obj: object) -> None:
    with pytest.raises(IncompatibleError, match="expected an object"):
        ModelIdentity.from_json(obj)


@pytest.mark.parametrize("name", ["dtype", "kv_dtype"])
def test_unresolved_dtype_is_refused(name: str) -> None:
    """`auto` is another dtype on another host."""
    with pytest.raises(ConfigError, match="expected the resolved dtype"):
        make_identity(**{name: "auto"})


def test_config_without_canonical_form_is_refused() -> None:
    with pytest.raises(IncompatibleError):
        make_identity(config={"time_step_limit": [0.0, float("inf")]})


def test_replace_normalises_again() -> None:
    assert replace(make_identity(), rope={"factor": 2.0}).rope == {"factor": 2}
