"""Keys, block keys and the chain of one sequence."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any, overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.errors import ConfigError
from kvsnap.identity import IdentityHash, ModelIdentity
from kvsnap.keys import (
    BLOCK_KEY_BYTES,
    ChunkKey,
    KeyChain,
    MmItem,
    block_keys,
    chunk_key,
    mm_bytes,
    root_key,
    scope_name,
    token_bytes,
)

IDENTITY = IdentityHash("5e" * 32)
ROOT = root_key(IDENTITY, 8)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def plain_key(parent: bytes, kind: bytes, ids: Sequence[int], mm: bytes = b"") -> bytes:
    """The key of the format page, computed the slow way."""
    return sha256(parent + kind + struct.pack("<I", len(ids)) + struct.pack(f"<{len(ids)}I", *ids) + mm).digest()


class TokenView(Sequence[int]):
    """Like the engine's read-only view of its token list: a sequence that is no list."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, i: int) -> int: ...
    @overload
    def __getitem__(self, i: slice) -> list[int]: ...
    def __getitem__(self, i: int | slice) -> int | list[int]:
        return self._ids[i]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)


def test_golden_root() -> None:
    text = '{"chunk_tokens":256,"identity":"' + "5e" * 32 + '","lora":null,"salt":null}'

    assert root_key(IDENTITY, 256) == sha256(b"kvsnap/key/1\0" + text.encode()).digest()


def test_golden_root_with_salt_and_adapter() -> None:
    text = '{"chunk_tokens":16,"identity":"' + "5e" * 32 + '","lora":"' + "1a" * 32 + '","salt":"\u00fc\\"x"}'

    assert root_key(IDENTITY, 16, salt='ü"x', lora="1a" * 32) == sha256(b"kvsnap/key/1\0" + text.encode()).digest()


def test_golden_keys() -> None:
    """Literal digests: also a change of both code and helper would be seen."""
    root = root_key(IDENTITY, 256)
    key = chunk_key(root, token_bytes(range(256)))

    assert root.hex() == "090982abd92eeadfcc831efb1f7b3a0fcb6e2e0203e8547d4c9640a6d6d8ca97"
    assert key.hex() == "d2f65b373c21b603cc57f32e89ded7525f78fd8ef412d10194b862de1b9df35b"
    assert (
        block_keys(root, token_bytes(range(32)), 16).hex()
        == "576705b2ff22762c1b00f8152738e738055e6bb6cecc965b76fc987b5c2a1c38"
    )


@given(TOKENS.filter(bool))
def test_chunk_key_is_what_the_format_says(ids: list[int]) -> None:
    assert chunk_key(ROOT, token_bytes(ids)) == plain_key(ROOT, b"c", ids)


@given(TOKENS)
def test_block_keys_are_what_the_format_says(ids: list[int]) -> None:
    expected = [plain_key(ROOT, b"b", ids[:end])[:BLOCK_KEY_BYTES] for end in range(4, len(ids) + 1, 4)]

    assert block_keys(ROOT, token_bytes(ids), 4) == b"".join(expected)


def test_block_keys_differ_from_chunk_keys() -> None:
    """A block key must never be taken for the start of a chunk key of the same tokens."""
    ids = token_bytes(range(4))

    assert block_keys(ROOT, ids, 4) != chunk_key(ROOT, ids)[:BLOCK_KEY_BYTES]


@pytest.mark.parametrize("ids", [[-1], [2**32], [1.5], ["1"], [None]])
def test_bad_token_ids_are_refused(ids: list[Any]) -> None:
    """An id that doesn't fit must not be cut to one that does: that would be another prompt's key."""
    with pytest.raises(ConfigError, match="token ids must be integers"):
        token_bytes(ids)


def test_token_bytes_are_little_endian() -> None:
    assert token_bytes([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert token_bytes([]) == b""


def test_salts_have_their_own_keys() -> None:
    """A10: only equal salts share a key; no salt, an empty one and the text "null" are three."""
    roots = {root_key(IDENTITY, 256, salt=salt) for salt in (None, "", "null", "x", "y", "X")}

    assert len(roots) == 6


def test_adapters_have_their_own_keys() -> None:
    """A08: each adapter, and none, has its own key space; an adapter isn't a salt."""
    digest = "1a" * 32
    roots = {
        root_key(IDENTITY, 256),
        root_key(IDENTITY, 256, lora=digest),
        root_key(IDENTITY, 256, lora="1b" * 32),
        root_key(IDENTITY, 256, salt=digest),
        root_key(IDENTITY, 256, salt=digest, lora=digest),
    }

    assert len(roots) == 5


def test_kv_dtypes_have_their_own_keys() -> None:
    """A05: two configurations that differ in nothing but the KV dtype share no key."""
    auto, fp8 = (
        ModelIdentity(weights="dummy:0", config={}, dtype="bfloat16", kv_dtype=kv_dtype)
        for kv_dtype in ("bfloat16", "fp8_e4m3")
    )

    assert root_key(auto.hash(), 256) != root_key(fp8.hash(), 256)


def test_chunk_sizes_have_their_own_keys() -> None:
    assert root_key(IDENTITY, 256) != root_key(IDENTITY, 512)


def test_key_depends_on_everything_before() -> None:
    """The same 8 tokens after other tokens are other KV."""
    a, b = KeyChain(ROOT, 8, 4), KeyChain(ROOT, 8, 4)
    a.extend([1] * 8 + [7] * 8)
    b.extend([2] * 8 + [7] * 8)

    assert a.keys[1] != b.keys[1]
    assert a.tail_block_keys(1, 16) != b.tail_block_keys(1, 16)


def test_prompt_without_token_ids_has_no_chunks() -> None:
    """A13: an empty sequence has no chunk, no block and so nothing that could hit."""
    chain = KeyChain(ROOT, 8, 4)
    chain.extend([])

    assert chain.keys == []
    assert chain.num_tokens == 0
    assert chain.tail_block_keys(0, 0) == b""


@given(TOKENS, st.lists(st.integers(0, 70), max_size=4))
def test_growing_chain_equals_one_made_at_once(ids: list[int], cuts: list[int]) -> None:
    whole = KeyChain(ROOT, 8, 4)
    whole.extend(ids)
    grown = KeyChain(ROOT, 8, 4)

    for cut in sorted(cuts):
        grown.extend(TokenView(ids[:cut]))
    grown.extend(TokenView(ids))

    parent: bytes = ROOT
    for i, key in enumerate(grown.keys):
        assert grown.parent_of(i) == parent
        assert key == plain_key(parent, b"c", ids[i * 8 : i * 8 + 8])
        parent = key
    assert grown.keys == whole.keys
    assert len(grown.keys) == len(ids) // 8
    assert grown.num_tokens == len(ids)
    assert grown.ids_of(0, len(ids)) == token_bytes(ids)


def test_tail_may_change_between_calls() -> None:
    """Tokens after the last full chunk aren't confirmed yet; a rejected draft must leave no trace in the keys."""
    chain = KeyChain(ROOT, 8, 4)
    chain.extend([*range(8), 90, 91])

    chain.extend([*range(8), *range(100, 108)])

    assert chain.keys[1] == plain_key(chain.keys[0], b"c", range(100, 108))


def test_shrinking_into_hashed_chunks_is_refused() -> None:
    chain = KeyChain(ROOT, 8, 4)
    chain.extend(range(17))

    with pytest.raises(ConfigError, match="sequence has 15 tokens, expected at least the 16"):
        chain.extend(range(15))

    assert chain.num_tokens == 17


def test_bad_id_leaves_the_chain_as_it_was() -> None:
    chain = KeyChain(ROOT, 8, 4)
    chain.extend(range(10))

    with pytest.raises(ConfigError):
        chain.extend([*range(16), -1])

    assert chain.num_tokens == 10
    assert len(chain.keys) == 1


@pytest.mark.parametrize(("limit", "blocks"), [(9, 0), (15, 0), (16, 1), (19, 1), (20, 2), (24, 3), (99, 3)])
def test_tail_block_keys_end_at_the_limit(limit: int, blocks: int) -> None:
    """A19: only whole blocks count, and none that ends after the limit."""
    chain = KeyChain(ROOT, 12, 4)
    chain.extend(range(26))
    parent = chain.keys[0]

    found = chain.tail_block_keys(1, limit)

    expected = [plain_key(parent, b"b", range(12, 12 + 4 * j))[:BLOCK_KEY_BYTES] for j in range(1, blocks + 1)]
    assert found == b"".join(expected)


def test_short_key() -> None:
    chain = KeyChain(ROOT, 8, 4)
    chain.extend(range(14))

    assert chain.short_key(1, 4) == plain_key(chain.keys[0], b"c", range(8, 12))
    assert chain.short_key(0, 8) == chain.keys[0]


def test_ids_of_what_is_not_there_are_refused() -> None:
    chain = KeyChain(ROOT, 8, 4)
    chain.extend(range(10))

    with pytest.raises(ConfigError, match="the sequence has 10"):
        chain.ids_of(8, 12)


@pytest.mark.parametrize(("chunk", "block"), [(8, 3), (0, 4), (8, 0), (4, 8)])
def test_chunk_must_be_whole_blocks(chunk: int, block: int) -> None:
    with pytest.raises(ConfigError, match="expected a multiple of the block size"):
        KeyChain(ROOT, chunk, block)


def test_images_have_their_own_keys() -> None:
    """A12: equal placeholder tokens, other images; hashes that end alike are still two."""
    ids = [9] * 16
    keys = set()
    for items in ([], [MmItem("aaaabeef", 2, 4)], [MmItem("ccccbeef", 2, 4)], [MmItem("aaaabeef", 3, 4)]):
        chain = KeyChain(ROOT, 8, 4, items)
        chain.extend(ids)
        keys.add((chain.keys[0], chain.tail_block_keys(0, 8), chain.short_key(0, 4)))

    assert len(keys) == 4
    assert len({key for key, _, _ in keys}) == 4
    assert len({blocks for _, blocks, _ in keys}) == 4


def test_image_counts_only_where_it_overlaps() -> None:
    """Blocks before an image are shared whatever the image is; from its first token on none is."""
    items = [MmItem("ff" * 32, 6, 4)]
    text = plain_key(ROOT, b"b", range(4))[:BLOCK_KEY_BYTES]
    mixed = plain_key(ROOT, b"b", range(8), b'[["' + b"ff" * 32 + b'",6,4]]')[:BLOCK_KEY_BYTES]

    assert block_keys(ROOT, token_bytes(range(8)), 4, items) == text + mixed


@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 30), st.integers(1, 30))
def test_overlap_of_items(offset: int, length: int, start: int, count: int) -> None:
    overlaps = bool(set(range(offset, offset + length)) & set(range(start, start + count)))

    found = mm_bytes([MmItem("h", offset, length)], start, count)

    assert found == (b'[["h",%d,%d]]' % (offset, length) if overlaps else b"")


def test_items_are_ordered_by_offset() -> None:
    items = [MmItem("a", 9, 1), MmItem("b", 2, 3)]

    assert json.loads(mm_bytes(items, 0, 16)) == [["b", 2, 3], ["a", 9, 1]]
    assert mm_bytes(items, 0, 16) == mm_bytes(reversed(items), 0, 16)


@pytest.mark.parametrize(
    "fields", [("", 0, 1), (None, 0, 1), (b"x", 0, 1), ("h", -1, 1), ("h", 0, 0), ("h", None, 1), ("h", 0, 1.5)]
)
def test_broken_image_metadata_is_refused(fields: tuple[Any, Any, Any]) -> None:
    """A12: broken metadata must not fall back to keys of the text alone."""
    with pytest.raises(ConfigError, match="multimodal item"):
        MmItem(*fields)


@pytest.mark.parametrize(
    ("lora", "mm", "salted", "scope"),
    [
        (None, False, False, ""),
        (None, False, True, "salted"),
        (None, True, False, "mm"),
        ("1a2b", False, False, "lora:1a2b"),
        ("1a2b", True, True, "lora:1a2b,mm,salted"),
    ],
)
def test_scope_names(lora: str | None, mm: bool, salted: bool, scope: str) -> None:
    assert scope_name(lora=lora, mm=mm, salted=salted) == scope


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_keys_are_the_same_in_every_process(seed: str | None) -> None:
    """C01: stored by one process, found by the next, whatever PYTHONHASHSEED says."""
    script = (
        "from kvsnap.keys import *; from kvsnap.identity import *\n"
        "identity = ModelIdentity(weights='dummy:0', config={'b': {'y': 1, 'x': 0.5}, 'a': [None]}, "
        "dtype='float32', kv_dtype='float32').hash()\n"
        "chain = KeyChain(root_key(identity, 8, salt='s'), 8, 4, [MmItem('h', 3, 2)])\n"
        "chain.extend(range(20))\n"
        "print(chain.keys[1].hex(), chain.tail_block_keys(2, 20).hex())\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if seed is not None:
        env["PYTHONHASHSEED"] = seed
    identity = ModelIdentity(
        weights="dummy:0", config={"a": [None], "b": {"x": 0.5, "y": 1.0}}, dtype="float32", kv_dtype="float32"
    )
    chain = KeyChain(root_key(identity.hash(), 8, salt="s"), 8, 4, [MmItem("h", 3, 2)])
    chain.extend(range(20))

    printed = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)

    assert printed.stdout.split() == [chain.keys[1].hex(), chain.tail_block_keys(2, 20).hex()]


def test_import_is_light() -> None:
    """The connector is imported into every vLLM process: no torch, boto3 or pyarrow with it."""
    script = (
        "import sys, kvsnap.config, kvsnap.keys, kvsnap.namespace, kvsnap.runtime, kvsnap.weights\n"
        "print([name for name in ('torch', 'boto3', 'pyarrow', 'vllm', 'numpy') if name in sys.modules])\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    printed = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)

    assert printed.stdout.strip() == "[]"


def test_root_is_a_chunk_key() -> None:
    key: ChunkKey = root_key(IDENTITY, 256)

    assert len(key) == 32
