"""Namespaces: ids, directory names, namespace.json."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from kvsnap.errors import ConfigError, IncompatibleError
from kvsnap.identity import ModelIdentity
from kvsnap.layout import Layout, SliceLayout
from kvsnap.namespace import Namespace

IDENTITY = ModelIdentity(
    weights="dummy:0", config={"model_type": "llama", "eps": 1e-05}, dtype="float32", kv_dtype="float32"
)
LAYOUT = Layout(
    block_tokens=16,
    dtype="F32",
    page_shape=(2, 3, 16, 64),
    page_format={"backend": "CPU_ATTN", "isa": "vec", "order": "NHD"},
    slices=(SliceLayout(num_layers=2, kv_heads=3, ranks=(0,)),),
)


def make_namespace(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {"identity": IDENTITY, "layout": LAYOUT, "chunk_tokens": 256, **changes}
    return Namespace(**fields)


def test_golden_id() -> None:
    text = (
        f'{{"chunk_tokens":256,"format":1,"identity":"{IDENTITY.hash()}",'
        f'"key_scheme":"kvsnap/key/1","layout":"{LAYOUT.hash()}"}}'
    )

    assert make_namespace().id() == sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": replace(IDENTITY, weights="dummy:1")},
        {"layout": replace(LAYOUT, page_format={"backend": "CPU_ATTN", "isa": "amx", "order": "NHD"})},
        {"chunk_tokens": 512},
        {"key_scheme": "kvsnap/key/2"},
        {"format": 2},
    ],
)
def test_each_field_counts(changes: dict[str, Any]) -> None:
    """A06: another page format, another directory; invariant 1."""
    assert make_namespace(**changes).id() != make_namespace().id()


def test_names_and_paths_do_not_count() -> None:
    """C09: one namespace is one directory, also when the model lies elsewhere."""
    here = make_namespace(human={"model": "/models/a"})
    there = make_namespace(human={"model": "/mnt/b", "host": "x"})

    assert here.id() == there.id()
    assert here.dirname == there.dirname
    assert here == there


def test_dirname() -> None:
    namespace = make_namespace()

    assert namespace.dirname == f"llama-float32-{namespace.id()[:16]}"


@pytest.mark.parametrize("model_type", [None, 3, "../../etc", "a/b", "", "Ünï", "x" * 300, ".."])
def test_dirname_is_one_safe_name(model_type: object) -> None:
    """D17: a model's config must not choose a path."""
    identity = replace(IDENTITY, config={"model_type": model_type})

    name = make_namespace(identity=identity).dirname

    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")
    assert not name.startswith("-")
    assert len(name) <= 60


def test_json_round_trip() -> None:
    namespace = make_namespace(human={"model": "m", "engine": "vllm 0.32"})

    again = Namespace.from_json(json.loads(json.dumps(namespace.to_json())))

    assert again == namespace
    assert again.id() == namespace.id()
    assert again.human == namespace.human


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"format": 2}, "format"),
        ({"format": 0}, "format"),
        ({"key_scheme": "kvsnap/key/2"}, "key_scheme"),
        ({"chunk_tokens": 100}, "chunk_tokens"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": 512}, "id"),
        ({"identity": "ab" * 32}, "identity"),
        ({"layout": 7}, "layout"),
        ({"id": "ab" * 32}, "id"),
        ({"surprise": 1}, "surprise"),
        ({"human": None}, "human"),
    ],
)
def test_from_json_is_strict(change: dict[str, Any], field: str) -> None:
    """Invariant 1: what doesn't add up is refused, by the name of the field."""
    with pytest.raises(IncompatibleError) as caught:
        Namespace.from_json(make_namespace().to_json() | change)

    assert caught.value.fields == (field,)


def test_newer_format_says_upgrade() -> None:
    """Also when the newer format has fields that this version doesn't know."""
    with pytest.raises(IncompatibleError, match="has format version 3, this kvsnap reads up to 1; upgrade kvsnap"):
        Namespace.from_json({"format": 3, "new": True})


def test_changed_identity_field_is_noticed() -> None:
    """A01: the hash must be that of the fields beside it."""
    obj = make_namespace().to_json()
    obj["identity_fields"] = obj["identity_fields"] | {"weights": "dummy:1"}

    with pytest.raises(IncompatibleError) as caught:
        Namespace.from_json(obj)

    assert caught.value.fields == ("identity",)


def test_geometry() -> None:
    assert make_namespace().geometry.blocks_per_chunk == 16
    with pytest.raises(ConfigError, match="not a whole number of blocks"):
        _ = make_namespace(chunk_tokens=100).geometry
