"""Identity: everything that decides KV *values*, and nothing else.

No paths, names, hosts, GPUs, drivers, engine versions or tokenizers: those may be
recorded beside it for people, and are never compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NewType

from kvsnap.canonical import canonical_json, normalise, sha256_hex
from kvsnap.errors import ConfigError, IncompatibleError
from kvsnap.fields import check_keys, get_mapping, get_str

IdentityHash = NewType("IdentityHash", str)
"""64 lower-case hex digits."""

COSMETIC_CONFIG_FIELDS = frozenset({
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "finetuning_task",
    "id2label",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "task_specific_params",
    "torchscript",
    "transformers_version",
    "use_cache",
})  # fmt: skip
"""Fields of a config.json that no vLLM model reads while it computes KV. Not in it, on purpose: special
token ids (some models look at eos_token_id in the forward pass) and anything else in doubt."""

_FIELDS = ("config", "dtype", "identity_tag", "kv_dtype", "kv_scales", "quantization", "rope", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """What must be equal, field by field, for KV of one engine to be right in another.

    The JSON fields are stored as `normalise` gives them, so that an identity equals the
    one read back from a file (floats are strings in both).
    """

    weights: str
    """`sha256:<hex>` of the weight files' content (`weights_digest`), `declared:<string>`, or for dummy weights
    `dummy:<seed>` and what else decides them; see docs/format.md."""
    config: Mapping[str, Any]
    """The checkpoint's raw config.json with hf_overrides applied, through `clean_config`."""
    dtype: str
    """The model's dtype as resolved, never `auto`; vLLM's (torch's) name, e.g. `bfloat16`."""
    kv_dtype: str
    """The KV cache's dtype as resolved, never `auto`, e.g. `bfloat16`, `fp8_e4m3`."""
    quantization: str | None = None
    """The quantization method as resolved; None for none."""
    kv_scales: Mapping[str, Any] | None = None
    """Static KV scales, e.g. {"k": 0.5, "v": 1.0}; None where the KV dtype has none."""
    rope: Mapping[str, Any] | None = None
    """The RoPE mode in force, where more than `config` decides it (`max_model_len` can switch LongRoPE)."""
    identity_tag: str = ""
    """The operator's own part."""

    def __post_init__(self) -> None:
        for name in ("config", "kv_scales", "rope"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(f"identity has {name} {value!r:.80}, expected an object")
            object.__setattr__(self, name, normalise(value))
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) in ("", "auto"):
                raise ConfigError(f"identity has {name} {getattr(self, name)!r}, expected the resolved dtype")

    def to_json(self) -> dict[str, Any]:
        """Exactly the fields that are hashed."""
        return {name: getattr(self, name) for name in _FIELDS}

    @classmethod
    def from_json(cls, obj: object) -> ModelIdentity:
        """Strict: raises IncompatibleError for a field that is missing, unknown or of another type."""
        fields = check_keys(obj, "identity", _FIELDS)
        try:
            return cls(
                config=get_mapping(fields, "config"),
                dtype=get_str(fields, "dtype"),
                identity_tag=get_str(fields, "identity_tag"),
                kv_dtype=get_str(fields, "kv_dtype"),
                kv_scales=None if fields["kv_scales"] is None else get_mapping(fields, "kv_scales"),
                quantization=None if fields["quantization"] is None else get_str(fields, "quantization"),
                rope=None if fields["rope"] is None else get_mapping(fields, "rope"),
                weights=get_str(fields, "weights"),
            )
        except ConfigError as error:
            raise IncompatibleError(str(error)) from None

    def hash(self) -> IdentityHash:
        """sha256 of the canonical JSON of `to_json`."""
        return IdentityHash(sha256_hex(canonical_json(self.to_json())))


def clean_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without its cosmetic fields, also those of the sub-configs `<name>_config`."""
    return {
        name: clean_config(value) if name.endswith("_config") and isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in COSMETIC_CONFIG_FIELDS
    }


def differing_fields(a: ModelIdentity, b: ModelIdentity) -> tuple[str, ...]:
    """Dotted names of what differs, sorted: "weights", "config.rope_parameters.factor"; empty if equal.

    A field that only one of them has differs; lists are compared as a whole.
    """
    return tuple(sorted(_differences(a.to_json(), b.to_json(), "")))


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str) -> list[str]:
    names = []
    for name in a.keys() | b.keys():
        if name not in a or name not in b:
            names.append(prefix + name)
        elif isinstance(a[name], Mapping) and isinstance(b[name], Mapping):
            names += _differences(a[name], b[name], f"{prefix}{name}.")
        elif canonical_json(a[name]) != canonical_json(b[name]):
            names.append(prefix + name)
    return names
