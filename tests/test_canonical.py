"""Canonical JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.canonical import canonical_json, normalise, sha256_hex
from kvsnap.errors import IncompatibleError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@given(VALUES)
def test_is_rfc_8785(value: Any) -> None:
    """Against an independent encoder: escapes, key order, white space."""
    assert canonical_json(value) == rfc8785.dumps(value)


@given(VALUES)
def test_is_json_of_the_same_value(value: Any) -> None:
    assert json.loads(canonical_json(value)) == value


def test_keys_in_utf16_order() -> None:
    """RFC 8785, 3.2.3: surrogate pairs sort before U+FB33, unlike their code points."""
    value = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\u00f6": 7}

    encoded = json.loads(canonical_json(value))

    assert list(encoded) == ["\r", "1", "\x80", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8.0, b"8"),
        (-0.0, b"0"),
        (1e-05, b'"0.00001"'),
        (1e-07, b'"1e-7"'),
        (0.1, b'"0.1"'),
        (1e300, b'"1e+300"'),
        (float(2**53), b'"9007199254740992"'),
        (float(2**53 - 1), b"9007199254740991"),
        (True, b"true"),
        ((1, [2.0]), b"[1,[2]]"),
        ({"b": 0.5, "a": None}, b'{"a":null,"b":"0.5"}'),
    ],
)
def test_number_rule(value: Any, text: bytes) -> None:
    assert canonical_json(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_float_text_reads_back(value: float) -> None:
    """No two floats share a text, so no two configurations share an identity by their floats."""
    assert float(json.loads(canonical_json(value))) == value


@given(VALUES | st.dictionaries(TEXT, st.floats(allow_nan=False, allow_infinity=False)))
def test_normalise_is_idempotent(value: Any) -> None:
    """What a file holds after the number rule hashes like what it was made of."""
    once = normalise(value)

    assert normalise(once) == once
    assert canonical_json(once) == canonical_json(value)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, 2**53, -(2**53), {1: 2}, b"x", {"x": object()}, "\ud800", {"\udfff": 1}, {1, 2}]
)
def test_refuses_what_has_no_canonical_form(value: Any) -> None:
    with pytest.raises(IncompatibleError, match="no canonical JSON"):
        canonical_json(value)


def test_sha256_hex() -> None:
    assert sha256_hex(b"") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
