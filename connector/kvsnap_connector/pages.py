"""Where the pages of a KV cache lie: by address from strides, never from a tensor's `shape[0]`.

vLLM registers one 4-D view per layer over one allocation, in one of several physical
orders. All that keep a page in one run of bytes are understood; padding between blocks,
and kernel blocks that divide an engine block, are too. The rest is declined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvsnap_connector.copier import Bytes, PageViews
from kvsnap_connector.unsupported import Unsupported

if TYPE_CHECKING:
    import torch

_AXES = "HNC"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlaces:
    """Where one rank's pages lie in the one allocation of its KV cache."""

    offsets: tuple[int, ...]
    """Byte of block 0's page, per layer, in the order of a slice."""
    block_strides: tuple[int, ...]
    """Bytes from one block's page to the next one's, per layer."""
    num_blocks: int
    """Blocks of the engine, the null block included."""
    page_bytes: int
    """Bytes of a page, without padding."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in a slice: all layers' pages."""
        return len(self.offsets) * self.page_bytes


def place_layers(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Byte offset of block 0 and byte distance of blocks, of every layer with a cache of its own."""
    placed: dict[str, tuple[int, int]] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        if getattr(tensor, "host_resident", False):
            raise Unsupported("KV caches that live on the host are not supported")
        for index, name in enumerate(tensor.layers):
            if name not in kv_caches:
                raise Unsupported(f"layer {name} has no registered KV cache")
            placed[name] = (tensor.offset + index * tensor.layer_stride, tensor.block_stride)
    if not placed:
        raise Unsupported("the model has no KV cache")
    if missing := set(kv_cache_config.kv_cache_groups[0].layer_names) - set(placed) - set(kv_caches):
        raise Unsupported(f"layers {sorted(missing)} have no place in the KV cache")
    return placed


def page_shape(cache: torch.Tensor, block_stride: int, num_blocks: int) -> tuple[tuple[int, ...], str]:
    """A page's dimensions in memory order, and their names ("HNC", or "2xHNC" for two kernel blocks in a block)."""
    if cache.ndim != 4 or cache.shape[0] % num_blocks:
        raise Unsupported(f"a KV cache of shape {tuple(cache.shape)} for {num_blocks} blocks is not understood")
    ratio = cache.shape[0] // num_blocks
    if cache.stride(0) * cache.element_size() * ratio != block_stride:
        raise Unsupported(
            f"blocks lie {cache.stride(0) * cache.element_size() * ratio} bytes apart, the configuration says "
            f"{block_stride}"
        )
    sizes, strides = list(cache.shape[1:]), [cache.stride(dim) for dim in (1, 2, 3)]
    # A dimension of size 1 has no place in memory: put it where it stands in the logical order.
    dims = [dim for dim in range(3) if sizes[dim] == 1]
    dims += sorted((dim for dim in range(3) if sizes[dim] != 1), key=lambda dim: -strides[dim])
    dense = 1
    for dim in reversed(dims):
        if sizes[dim] != 1 and strides[dim] != dense:
            raise Unsupported("a page of the KV cache is not one run of bytes")
        dense *= sizes[dim]
    shape, order = tuple(sizes[dim] for dim in dims), "".join(_AXES[dim] for dim in dims)
    if ratio == 1:
        return shape, order
    if cache.stride(0) != dense:
        raise Unsupported("kernel blocks with gaps between them are not supported")
    return (ratio, *shape), f"{ratio}x{order}"


def check_places(caches: Sequence[torch.Tensor], places: PagePlaces) -> None:
    """Compare the places with the tensors themselves: bytes from a wrong address are wrong KV.

    Raises:
        Unsupported: they don't agree, or the allocation is too small.
    """
    starts = {cache.untyped_storage().data_ptr() for cache in caches}
    if len(starts) != 1:
        raise Unsupported(f"the layers' KV caches lie in {len(starts)} allocations, expected one")
    for cache, offset, block_stride in zip(caches, places.offsets, places.block_strides, strict=True):
        storage = cache.untyped_storage()
        found = cache.data_ptr() - storage.data_ptr()
        if found != offset:
            raise Unsupported(f"a layer's KV cache starts at byte {found}, the configuration says {offset}")
        end = offset + (places.num_blocks - 1) * block_stride + places.page_bytes
        if end > storage.nbytes() or block_stride < places.page_bytes:
            raise Unsupported("the KV cache is smaller than its blocks")


def byte_views(cache: torch.Tensor, places: PagePlaces) -> PageViews:
    """`[num_blocks, page_bytes]` per layer, over the memory that `cache` is a part of."""
    import torch

    if cache.device.type != "cpu":
        raise Unsupported(f"KV caches on {cache.device.type} are not supported by this copier")
    raw: Bytes = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).numpy()
    return PageViews(
        layers=tuple(
            np.lib.stride_tricks.as_strided(
                raw[offset:], shape=(places.num_blocks, places.page_bytes), strides=(block_stride, 1), writeable=True
            )
            for offset, block_stride in zip(places.offsets, places.block_strides, strict=True)
        )
    )


class BlockView:
    """All blocks of a KV cache as one tensor, `[blocks, layers, page]`, to gather from and scatter into.

    Works on the device that the cache is on, in elements as wide as addresses and sizes
    allow (16 bytes at best). Where all layers of a block are one run of bytes it is
    `[blocks, layers * page]`.
    """

    def __init__(self, cache: torch.Tensor, places: PagePlaces) -> None:
        """`cache` is any tensor over the allocation that `places` describes.

        Raises:
            Unsupported: layers or blocks don't lie at constant distances.
        """
        import torch

        if len(set(places.block_strides)) > 1:
            raise Unsupported(f"layers whose blocks lie {sorted(set(places.block_strides))} bytes apart")
        steps = {after - before for before, after in zip(places.offsets, places.offsets[1:], strict=False)}
        if len(steps) > 1 or min(steps, default=1) <= 0:
            raise Unsupported(f"layers that lie {sorted(steps)} bytes apart, expected one distance")
        step = steps.pop() if steps else places.page_bytes
        first, block_stride, page = places.offsets[0], places.block_strides[0], places.page_bytes
        storage = cache.untyped_storage()
        numbers = (storage.data_ptr() + first, step, block_stride, page)
        self._dtype, width = next(
            (dtype, width)
            for dtype, width in (
                (torch.complex128, 16),
                (torch.int64, 8),
                (torch.int32, 4),
                (torch.int16, 2),
                (torch.uint8, 1),
            )
            if all(number % width == 0 for number in numbers)
        )
        self.device = cache.device
        self.block_bytes = places.block_bytes
        self.num_blocks = places.num_blocks
        self.is_one_run = step == page
        num_layers = len(places.offsets)
        row = [num_layers * page // width] if self.is_one_run else [num_layers, page // width]
        strides = [1] if self.is_one_run else [step // width, 1]
        flat = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
        # The storage may be longer than a multiple of the width, or start at an odd address.
        usable = (storage.nbytes() - first) // width * width
        typed = flat[first : first + usable].view(self._dtype)
        self._blocks = torch.as_strided(
            typed, [places.num_blocks, *row], [block_stride // width, *strides], typed.storage_offset()
        )
        self._row = row

    def gather(self, ids: torch.Tensor, buffer: torch.Tensor) -> None:
        """Copy blocks, in order, into the front of a uint8 buffer on the same device."""
        import torch

        with torch.inference_mode():  # so was the cache made, and a thread of ours isn't in it by itself
            torch.index_select(self._blocks, 0, ids, out=self._rows(buffer, len(ids)))

    def scatter(self, buffer: torch.Tensor, ids: torch.Tensor) -> None:
        """Copy the front of a uint8 buffer into blocks, in order."""
        import torch

        with torch.inference_mode():
            self._blocks.index_copy_(0, ids, self._rows(buffer, len(ids)))

    def _rows(self, buffer: torch.Tensor, num_blocks: int) -> torch.Tensor:
        return buffer[: num_blocks * self.block_bytes].view(self._dtype).view(num_blocks, *self._row)
