"""Namespace: one set of chunks that any of its engines can use; a directory of the disk tier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvsnap.canonical import canonical_json, sha256_hex
from kvsnap.errors import IncompatibleError
from kvsnap.fields import check_keys, get_int, get_mapping, get_str
from kvsnap.identity import ModelIdentity
from kvsnap.keys import KEY_SCHEME
from kvsnap.layout import Geometry, Layout

FORMAT = 1
"""Version of the files in a cache directory. A reader refuses a higher one."""

_FIELDS = (
    "chunk_tokens", "format", "human", "id", "identity", "identity_fields", "key_scheme", "layout", "layout_fields",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """Identity, layout and chunk size: what a chunk's bytes and name depend on."""

    identity: ModelIdentity
    layout: Layout
    chunk_tokens: int
    """Tokens in a full chunk; a multiple of the layout's block."""
    key_scheme: str = KEY_SCHEME
    format: int = FORMAT
    human: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """For people: model name, revision, engine version … Never hashed, never compared."""

    @cached_property
    def identity_hash(self) -> str:
        """`identity.hash()`, computed once: 64 hex."""
        return self.identity.hash()

    @cached_property
    def layout_hash(self) -> str:
        """`layout.hash()`, computed once: 64 hex."""
        return self.layout.hash()

    @cached_property
    def geometry(self) -> Geometry:
        """The sizes of its chunks. Raises ConfigError if `chunk_tokens` isn't a multiple of the block."""
        return Geometry(self.layout, self.chunk_tokens)

    def id(self) -> str:
        """sha256 of the canonical JSON of what chunks depend on: 64 hex."""
        return self._id

    @cached_property
    def _id(self) -> str:
        return sha256_hex(canonical_json(self.hashed_fields()))

    @property
    def dirname(self) -> str:
        """`<slug>-<first 16 of the id>`. The slug is decoration, but the same in every engine of the namespace:
        it is made of hashed fields only (the model type and the KV dtype)."""
        model_type = self.identity.config.get("model_type")
        words = f"{model_type if isinstance(model_type, str) else 'model'}-{self.identity.kv_dtype}"
        slug = re.sub(r"[^a-z0-9_]+", "-", words.lower()).strip("-")[:40].strip("-")
        return f"{slug or 'model'}-{self._id[:16]}"

    def hashed_fields(self) -> dict[str, Any]:
        """What the id is the hash of; the same keys and values begin the metadata of every shard."""
        return {
            "chunk_tokens": self.chunk_tokens,
            "format": self.format,
            "identity": self.identity_hash,
            "key_scheme": self.key_scheme,
            "layout": self.layout_hash,
        }

    def to_json(self) -> dict[str, Any]:
        """The content of namespace.json."""
        return {
            **self.hashed_fields(),
            "human": dict(self.human),
            "id": self._id,
            "identity_fields": self.identity.to_json(),
            "layout_fields": self.layout.to_json(),
        }

    @classmethod
    def from_json(cls, obj: object) -> Namespace:
        """Strict: also recomputes every hash.

        Raises:
            IncompatibleError: another format or key scheme, or a field that is missing,
                unknown, of another type, or not the hash of what is beside it.
        """
        if isinstance(obj, Mapping) and isinstance(obj.get("format"), int) and obj["format"] > FORMAT:
            raise IncompatibleError(
                f"namespace has format version {obj['format']}, this kvsnap reads up to {FORMAT}; upgrade kvsnap",
                ("format",),
            )
        fields = check_keys(obj, "namespace", _FIELDS)
        namespace = cls(
            identity=ModelIdentity.from_json(fields["identity_fields"]),
            layout=Layout.from_json(fields["layout_fields"]),
            chunk_tokens=get_int(fields, "chunk_tokens"),
            key_scheme=get_str(fields, "key_scheme"),
            format=get_int(fields, "format"),
            human=get_mapping(fields, "human"),
        )
        if namespace.format != FORMAT:
            raise IncompatibleError(f"namespace has format version {namespace.format}, expected {FORMAT}", ("format",))
        if namespace.key_scheme != KEY_SCHEME:
            raise IncompatibleError(
                f"namespace has key scheme {namespace.key_scheme}, expected {KEY_SCHEME}", ("key_scheme",)
            )
        block_tokens = namespace.layout.block_tokens
        if namespace.chunk_tokens < 1 or namespace.chunk_tokens % block_tokens:
            raise IncompatibleError(
                f"namespace has chunk_tokens {namespace.chunk_tokens}, expected a multiple of {block_tokens}",
                ("chunk_tokens",),
            )
        computed = namespace.to_json()
        for name in ("identity", "layout", "id"):
            if fields[name] != computed[name]:
                raise IncompatibleError(
                    f"namespace has {name} {str(fields[name])[:12]}, its fields give {computed[name][:12]}", (name,)
                )
        return namespace
