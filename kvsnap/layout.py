"""Layout: how the bytes of KV are arranged, and the geometry that follows from it.

A *page* is one block of one layer as one rank holds it. A *slice* is what one rank
(or a set of ranks that hold the same bytes) contributes to a chunk, in the order
`[blocks, layers, *page]`; a chunk is its slices in order, each rounded up to 4096.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NewType, TypeVar

from kvsnap.canonical import canonical_json, normalise, sha256_hex
from kvsnap.direct_io import padded
from kvsnap.errors import ConfigError, IncompatibleError
from kvsnap.fields import check_keys, get_int, get_ints, get_list, get_mapping, get_str

LayoutHash = NewType("LayoutHash", str)
"""64 lower-case hex digits."""

_T = TypeVar("_T")

DTYPE_BYTES: Mapping[str, int] = {
    "BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1,
}  # fmt: skip
"""Bytes per element of the safetensors dtypes that a page may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceLayout:
    """The part of every chunk that one rank holds, or several ranks hold alike."""

    num_layers: int
    """Attention layers in this slice, in the order of the model."""
    kv_heads: int
    """KV heads that a page of this slice holds."""
    ranks: tuple[int, ...]
    """Ranks that hold these bytes: one, or all replicas, ascending. The lowest writes them."""
    first_layer: int = 0
    """Index of the first layer among all attention layers of the model (pipeline parallelism)."""
    first_head: int = 0
    """Index of the first KV head among all KV heads of the model (tensor parallelism)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        _check_positive("slice", num_layers=self.num_layers, kv_heads=self.kv_heads)
        if min(self.first_layer, self.first_head) < 0:
            raise ConfigError(f"slice starts at layer {self.first_layer}, head {self.first_head}, expected 0 or more")
        if not self.ranks or list(self.ranks) != sorted(set(self.ranks)) or self.ranks[0] < 0:
            raise ConfigError(f"slice has ranks {list(self.ranks)}, expected at least one, ascending, each once")

    def to_json(self) -> dict[str, Any]:
        return {
            "first_head": self.first_head,
            "first_layer": self.first_layer,
            "kv_heads": self.kv_heads,
            "num_layers": self.num_layers,
            "ranks": list(self.ranks),
        }

    @classmethod
    def from_json(cls, obj: object) -> SliceLayout:
        """Strict: raises IncompatibleError for a field that is missing, unknown or of another type."""
        fields = check_keys(obj, "slice", ("first_head", "first_layer", "kv_heads", "num_layers", "ranks"))
        return _build(
            cls,
            first_head=get_int(fields, "first_head"),
            first_layer=get_int(fields, "first_layer"),
            kv_heads=get_int(fields, "kv_heads"),
            num_layers=get_int(fields, "num_layers"),
            ranks=get_ints(fields, "ranks"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How bytes are arranged. Equal layouts are needed to use each other's chunks."""

    block_tokens: int
    """Tokens in one block, the engine's unit of KV memory."""
    dtype: str
    """Dtype of a page's elements, by its safetensors name: a key of `DTYPE_BYTES`."""
    page_shape: tuple[int, ...]
    """Shape of one page: one block, one layer, one rank, keys and values. The same in all slices."""
    page_format: Mapping[str, str]
    """What else decides the order of bytes inside a page: backend, ISA variant, order. Compared, never interpreted."""
    slices: tuple[SliceLayout, ...]
    """In rank-major order; each rank loads from exactly one of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "page_shape", tuple(self.page_shape))
        object.__setattr__(self, "slices", tuple(self.slices))
        object.__setattr__(self, "page_format", normalise(self.page_format))
        _check_positive("layout", block_tokens=self.block_tokens)
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"layout has dtype {self.dtype!r}, expected one of {', '.join(sorted(DTYPE_BYTES))}")
        if not self.page_shape or min(self.page_shape) < 1:
            raise ConfigError(f"layout has page shape {list(self.page_shape)}, expected positive sizes")
        if not all(isinstance(value, str) for value in self.page_format.values()):
            raise ConfigError(f"layout has page format {dict(self.page_format)}, expected strings only")
        ranks = [rank for part in self.slices for rank in part.ranks]
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise ConfigError(f"layout's slices cover ranks {ranks}, expected each of 0 … n-1 in exactly one slice")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return math.prod(self.page_shape) * DTYPE_BYTES[self.dtype]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(part.ranks) for part in self.slices)

    def slice_of_rank(self, rank: int) -> int:
        """Index of the slice that `rank` loads from; it also writes it if it is the lowest of `slices[i].ranks`."""
        for i, part in enumerate(self.slices):
            if rank in part.ranks:
                return i
        raise ConfigError(f"rank {rank} is in no slice of this layout, which has {self.world_size} ranks")

    def to_json(self) -> dict[str, Any]:
        return {
            "block_tokens": self.block_tokens,
            "dtype": self.dtype,
            "page_format": dict(self.page_format),
            "page_shape": list(self.page_shape),
            "slices": [part.to_json() for part in self.slices],
        }

    @classmethod
    def from_json(cls, obj: object) -> Layout:
        """Strict: raises IncompatibleError for a field that is missing, unknown or of another type."""
        fields = check_keys(obj, "layout", ("block_tokens", "dtype", "page_format", "page_shape", "slices"))
        return _build(
            cls,
            block_tokens=get_int(fields, "block_tokens"),
            dtype=get_str(fields, "dtype"),
            page_format=get_mapping(fields, "page_format"),
            page_shape=get_ints(fields, "page_shape"),
            slices=tuple(SliceLayout.from_json(part) for part in get_list(fields, "slices")),
        )

    def hash(self) -> LayoutHash:
        """sha256 of the canonical JSON of `to_json`."""
        return LayoutHash(sha256_hex(canonical_json(self.to_json())))


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a chunk and its slices, in bytes, as they follow from a layout and a chunk size."""

    layout: Layout
    chunk_tokens: int
    """Tokens in a full chunk; a multiple of the layout's block."""
    blocks_per_chunk: int = field(init=False)
    num_slices: int = field(init=False)
    _chunk_bytes: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    """What `chunk_bytes` found so far: it is asked for each of many thousand chunks, which have few sizes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_slices", len(self.layout.slices))
        object.__setattr__(self, "blocks_per_chunk", self.blocks(self.chunk_tokens))

    def blocks(self, tokens: int) -> int:
        """Blocks of `tokens` tokens, which must be whole blocks."""
        if tokens < 1 or tokens % self.layout.block_tokens:
            block_tokens = self.layout.block_tokens
            raise ConfigError(f"a chunk of {tokens} tokens is not a whole number of blocks of {block_tokens} tokens")
        return tokens // self.layout.block_tokens

    def slice_bytes(self, i: int, blocks: int) -> int:
        """Bytes of slice i with `blocks` blocks, without the padding."""
        return blocks * self.layout.slices[i].num_layers * self.layout.page_bytes

    def padded(self, i: int, blocks: int) -> int:
        """Bytes of slice i with `blocks` blocks, rounded up to 4096."""
        return padded(self.slice_bytes(i, blocks))

    def slice_stride(self, i: int) -> int:
        """Bytes of slice i in a slot of the DRAM tier: those of a full chunk, padded."""
        return self.padded(i, self.blocks_per_chunk)

    def chunk_bytes(self, tokens: int) -> int:
        """Bytes of a chunk of `tokens` tokens, all slices padded: its range in a shard."""
        known = self._chunk_bytes.get(tokens)
        if known is None:
            blocks = self.blocks(tokens)
            known = self._chunk_bytes[tokens] = sum(self.padded(i, blocks) for i in range(self.num_slices))
        return known

    def tensor_shape(self, i: int, blocks: int) -> tuple[int, ...]:
        """Shape of slice i with `blocks` blocks: (blocks, layers, *page)."""
        return (blocks, self.layout.slices[i].num_layers, *self.layout.page_shape)


def _build(cls: type[_T], **fields: Any) -> _T:
    """What is a wrong argument to a constructor is an incompatible file to its reader."""
    try:
        return cls(**fields)
    except ConfigError as error:
        raise IncompatibleError(str(error)) from None


def _check_positive(what: str, **values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{what} has {name} {value}, expected 1 or more")
