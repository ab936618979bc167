"""The tensors of a shard's header: which there must be for each chunk, and whether those found are these."""

from __future__ import annotations

import json
import math
from typing import Any, Protocol

from kvsnap.direct_io import padded
from kvsnap.errors import CorruptChunkError
from kvsnap.layout import DTYPE_BYTES, Geometry

Pieces = tuple[list[tuple[str, int, int]], int]
"""Per tensor of a chunk: its text between key and offsets, start and end within the chunk; the chunk's bytes."""


_MAX_TEXTS = 4096


class Tensors(Protocol):
    """Knows which tensors a chunk has."""

    def blocks(self, key_hex: str, tokens: int) -> int:
        """Blocks of a chunk of `tokens` tokens; raises CorruptChunkError if they aren't whole blocks."""

    def render(self, key_hex: str, tokens: int, offset: int) -> tuple[str, int]:
        """Header text of the tensors of a chunk whose range starts at `offset` in the data; the range's end."""


class GeometryTensors:
    """What a layout prescribes."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._block_tokens = geometry.layout.block_tokens
        self._pieces: dict[int, Pieces] = {}
        self._texts: dict[tuple[int, int], tuple[tuple[str, ...], int]] = {}

    def blocks(self, key_hex: str, tokens: int) -> int:
        if tokens % self._block_tokens:
            raise CorruptChunkError(
                f"chunk {key_hex[:12]} has {tokens} tokens, expected a multiple of {self._block_tokens}"
            )
        return tokens // self._block_tokens

    def render(self, key_hex: str, tokens: int, offset: int) -> tuple[str, int]:
        """Most shards have chunks at the same offsets, so what follows the key is kept."""
        known = self._texts.get((tokens, offset))
        if known is None:
            if len(self._texts) >= _MAX_TEXTS:
                self._texts.clear()
            if tokens not in self._pieces:
                self._pieces[tokens] = self._prescribe(tokens // self._block_tokens)
            known = self._texts[tokens, offset] = _after_key(self._pieces[tokens], offset)
        return _with_key(key_hex, known)

    def _prescribe(self, blocks: int) -> Pieces:
        geometry = self._geometry
        return _pieces(
            [
                (geometry.layout.dtype, list(geometry.tensor_shape(i, blocks)), geometry.slice_bytes(i, blocks))
                for i in range(geometry.num_slices)
            ]
        )


class HeaderTensors:
    """What follows from a header itself, where the layout isn't known: all chunks must have like tensors."""

    def __init__(self, outer: Any) -> None:
        self._outer = outer
        self._like: tuple[float, list[Any]] | None = None

    def blocks(self, key_hex: str, tokens: int) -> int:
        """The first size of slice 0."""
        shape = self._slices(key_hex)[0][1]
        if tokens % shape[0]:
            raise CorruptChunkError(f"chunk {key_hex[:12]} has {tokens} tokens in {shape[0]} blocks")
        return int(shape[0])

    def render(self, key_hex: str, tokens: int, offset: int) -> tuple[str, int]:
        slices = self._slices(key_hex)
        blocks = slices[0][1][0]
        like = (tokens / blocks, [(dtype, shape[1:]) for dtype, shape, _ in slices])
        if self._like is None:
            self._like = like
        if like != self._like or any(shape[0] != blocks for _, shape, _ in slices):
            raise CorruptChunkError(f"chunk {key_hex[:12]} has other tensors than the first chunk")
        return _with_key(key_hex, _after_key(_pieces(slices), offset))

    def _slices(self, key_hex: str) -> list[tuple[str, list[int], int]]:
        slices: list[tuple[str, list[int], int]] = []
        while isinstance(found := self._outer.get(f"{key_hex}.{len(slices)}"), dict):
            dtype, shape = found.get("dtype"), found.get("shape")
            if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
                raise CorruptChunkError(f"chunk {key_hex[:12]} has a tensor of dtype {dtype!r:.20}")
            if type(shape) is not list or not shape or not all(type(size) is int and size > 0 for size in shape):
                raise CorruptChunkError(f"chunk {key_hex[:12]} has a tensor of shape {shape!r:.80}")
            slices.append((dtype, shape, math.prod(shape) * DTYPE_BYTES[dtype]))
        if not slices:
            raise CorruptChunkError(f"tensor {key_hex[:12]}….0 is missing")
        return slices


def load_strict(text: str) -> Any:
    """Parse JSON; an object with a key twice, NaN and infinities raise CorruptChunkError, bad JSON ValueError."""
    return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)


def check_tensors(outer: Any, expected: dict[str, Any]) -> None:
    """Compare a parsed header with the tensors that it must have; raises CorruptChunkError naming the difference."""
    if not isinstance(outer, dict) or list(outer.get("__metadata__", ())) != ["kvsnap"]:
        raise CorruptChunkError("its __metadata__ is not exactly one string under the key kvsnap")
    if missing := expected.keys() - outer.keys():
        raise CorruptChunkError(f"tensor {min(missing)} is missing")
    if unknown := outer.keys() - expected.keys() - {"__metadata__"}:
        raise CorruptChunkError(f"tensor {min(unknown)!r:.90} doesn't belong here")
    for name, want in expected.items():
        if _text(outer[name]) != _text(want):
            raise CorruptChunkError(f"tensor {name} is {_text(outer[name])[:120]}, expected {_text(want)}")


def _pieces(slices: list[tuple[str, list[int], int]]) -> Pieces:
    pieces, offset = [], 0
    for i, (dtype, shape, nbytes) in enumerate(slices):
        sizes = ",".join(map(str, shape))
        end, aligned = offset + nbytes, offset + padded(nbytes)
        pieces.append((f'.{i}":{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[', offset, end))
        if aligned > end:
            fill = f'.{i}.pad":{{"dtype":"U8","shape":[{aligned - end}],"data_offsets":['
            pieces.append((fill, end, aligned))
        offset = aligned
    return pieces, offset


def _after_key(pieces: Pieces, offset: int) -> tuple[tuple[str, ...], int]:
    tensors, nbytes = pieces
    return tuple(f"{text}{offset + start},{offset + end}]}}" for text, start, end in tensors), offset + nbytes


def _with_key(key_hex: str, after: tuple[tuple[str, ...], int]) -> tuple[str, int]:
    texts, end = after
    return f'"{key_hex}' + f',"{key_hex}'.join(texts), end


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise CorruptChunkError("its header has a key twice")
    return found


def _no_constant(text: str) -> Any:
    raise CorruptChunkError(f"its header holds {text}")


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
