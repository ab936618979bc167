"""Keys: the name of a chunk, made of the model's identity and all tokens up to the chunk's end.

    root      = sha256("kvsnap/key/1" + NUL + JCS({chunk_tokens, identity, lora, salt}))
    chunk key = sha256(parent + "c" + n + ids + mm)
    block key = sha256(parent + "b" + n + ids + mm)[:16]

n is the number of ids, u32 little-endian; ids are the token ids, u32 little-endian;
mm is JCS([[hash, offset, length], …]) of the multimodal items that overlap these
tokens, nothing if there are none. No seed, no pickle, no built-in hash: the same in
every process, on every host.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NewType

from kvsnap.canonical import canonical_json
from kvsnap.errors import ConfigError
from kvsnap.identity import IdentityHash

ChunkKey = NewType("ChunkKey", bytes)
"""32 raw bytes; also the type of a root, the parent of every chunk at depth 0."""

KEY_SCHEME = "kvsnap/key/1"
BLOCK_KEY_BYTES = 16
TOKEN_BYTES = 4

_U32_CODE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


@dataclass(frozen=True, slots=True)
class MmItem:
    """One multimodal item of a prompt. Broken metadata raises: such a prompt can't be cached."""

    hash: str
    """The item's content hash in full, as the engine gives it."""
    offset: int
    """Position of its first placeholder token, from the start of the prompt."""
    length: int
    """Number of its placeholder tokens."""

    def __post_init__(self) -> None:
        name: object = self.hash
        if not isinstance(name, str) or not name:
            raise ConfigError(f"multimodal item has hash {name!r:.80}, expected a non-empty string")
        checks: tuple[tuple[str, object, int], ...] = (("offset", self.offset, 0), ("length", self.length, 1))
        for field, value, least in checks:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"multimodal item {name[:12]} has {field} {value!r}, expected {least} or more")


def token_bytes(ids: Sequence[int]) -> bytes:
    """The token ids as u32 little-endian.

    Raises:
        ConfigError: an id is negative, above 2^32-1 or not an integer.
    """
    try:
        tokens = array(_U32_CODE, ids)
    except (OverflowError, TypeError) as error:
        raise ConfigError(f"token ids must be integers within 0 … 2^32-1: {error}") from None
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def root_key(
    identity: IdentityHash, chunk_tokens: int, *, salt: str | None = None, lora: str | None = None
) -> ChunkKey:
    """The parent of all chunks at depth 0 of one identity, chunk size, salt and adapter.

    `lora` is the digest of the adapter's content, not its name. An empty salt is a salt.
    """
    fields = {"identity": identity, "chunk_tokens": chunk_tokens, "salt": salt, "lora": lora}
    return ChunkKey(sha256(KEY_SCHEME.encode() + b"\0" + canonical_json(fields)).digest())


def chunk_key(parent: ChunkKey, ids: bytes, mm: bytes = b"") -> ChunkKey:
    """The key of a chunk, full or short, that holds exactly the tokens `ids` (see `token_bytes`)."""
    return ChunkKey(sha256(b"".join((parent, b"c", _count(ids), ids, mm))).digest())


def block_keys(parent: ChunkKey, ids: bytes, block_tokens: int, mm: Sequence[MmItem] = (), start: int = 0) -> bytes:
    """The keys of the first 1, 2, … whole blocks in `ids`, 16 bytes each, one after the other.

    `parent` is the parent of the chunk that starts with `ids`, `start` the position of
    its first token (only `mm` needs it). Ids after the last whole block don't count.
    """
    step = block_tokens * TOKEN_BYTES
    keys = []
    for end in range(step, len(ids) + 1, step):
        items = mm_bytes(mm, start, end // TOKEN_BYTES) if mm else b""
        part = ids[:end]
        keys.append(sha256(b"".join((parent, b"b", _count(part), part, items))).digest()[:BLOCK_KEY_BYTES])
    return b"".join(keys)


def mm_bytes(items: Iterable[MmItem], start: int, count: int) -> bytes:
    """JCS of the items that overlap the `count` tokens from position `start`; empty if none does.

    Items are ordered by offset, with their absolute offset and their whole length, so
    that an item cut by a chunk's border names both sides.
    """
    overlapping = [item for item in items if item.offset < start + count and start < item.offset + item.length]
    if not overlapping:
        return b""
    overlapping.sort(key=lambda item: (item.offset, item.length, item.hash))
    return canonical_json([[item.hash, item.offset, item.length] for item in overlapping])


def scope_name(*, lora: str | None, mm: bool, salted: bool) -> str:
    """Which restrictions a chunk carries, and all its descendants: "" is plain.

    `lora` is the adapter's digest in lower-case hex.
    """
    parts = [f"lora:{lora}" if lora is not None else "", "mm" if mm else "", "salted" if salted else ""]
    return ",".join(part for part in parts if part)


class KeyChain:
    """The keys of one token sequence, grown with it. Never hashes a full chunk twice.

    Not safe for use by several threads at once.
    """

    def __init__(self, root: ChunkKey, chunk_tokens: int, block_tokens: int, mm: Sequence[MmItem] = ()) -> None:
        if block_tokens < 1 or chunk_tokens < 1 or chunk_tokens % block_tokens:
            raise ConfigError(f"chunk_tokens is {chunk_tokens}, expected a multiple of the block size {block_tokens}")
        self.keys: list[ChunkKey] = []
        """`keys[i]` names full chunk i."""
        self.num_tokens = 0
        """Tokens seen so far, those after the last full chunk included."""
        self._root = root
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self._chunk_head = b"c" + chunk_tokens.to_bytes(TOKEN_BYTES, "little")
        self._mm = tuple(mm)
        self._ids = bytearray()

    def extend(self, ids: Sequence[int]) -> None:
        """Take `ids`, the whole sequence as it is now, and hash its new full chunks.

        The full chunks known so far must be a prefix of it and aren't read again; the
        tokens after them are, so they may differ from the last call's.

        Raises:
            ConfigError: `ids` ends before the last known full chunk does, or holds
                what `token_bytes` refuses. The chain is then as before.
        """
        known = len(self.keys) * self._chunk_tokens
        if len(ids) < known:
            raise ConfigError(f"sequence has {len(ids)} tokens, expected at least the {known} hashed so far")
        # A slice also turns a sequence view into a list, which is the fast case.
        tail = token_bytes(ids if known == 0 and type(ids) is list else ids[known:])
        self._ids[known * TOKEN_BYTES :] = tail  # in place: a long sequence grows by one token a step
        self.num_tokens = known + len(tail) // TOKEN_BYTES
        step = self._chunk_tokens * TOKEN_BYTES
        parent = self.keys[-1] if self.keys else self._root
        head, mm = self._chunk_head, b""
        for start in range(0, len(tail) - step + 1, step):
            if self._mm:
                mm = mm_bytes(self._mm, known + start // TOKEN_BYTES, self._chunk_tokens)
            parent = ChunkKey(sha256(b"".join((parent, head, tail[start : start + step], mm))).digest())
            self.keys.append(parent)

    def parent_of(self, i: int) -> ChunkKey:
        """The key of chunk i-1; the root for chunk 0."""
        return self.keys[i - 1] if i else self._root

    def ids_of(self, start: int, end: int) -> bytes:
        """Token bytes of the positions start … end-1."""
        if not 0 <= start <= end <= self.num_tokens:
            raise ConfigError(f"positions {start} to {end} asked for, the sequence has {self.num_tokens}")
        return bytes(memoryview(self._ids)[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def tail_block_keys(self, i: int, limit_tokens: int) -> bytes:
        """Block keys of chunk i's whole blocks that end at or before position `limit_tokens`."""
        start = i * self._chunk_tokens
        end = min(start + self._chunk_tokens, limit_tokens, self.num_tokens)
        if end - start < self._block_tokens:
            return b""
        return block_keys(self.parent_of(i), self.ids_of(start, end), self._block_tokens, self._mm, start)

    def short_key(self, i: int, tokens: int) -> ChunkKey:
        """The key of a chunk at index i that holds only its first `tokens` tokens."""
        start = i * self._chunk_tokens
        mm = mm_bytes(self._mm, start, tokens) if self._mm else b""
        return chunk_key(self.parent_of(i), self.ids_of(start, start + tokens), mm)


def _count(ids: bytes) -> bytes:
    return (len(ids) // TOKEN_BYTES).to_bytes(TOKEN_BYTES, "little")
