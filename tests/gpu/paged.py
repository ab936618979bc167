"""Paged KV caches of real models' shapes, in every order, and a tier of host memory. Needs torch, no vLLM."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvsnap_connector.copier import Bytes
from kvsnap_connector.cuda_copier import StreamCopier
from kvsnap_connector.cuda_streams import CudaDevice
from kvsnap_connector.cuda_worker import CudaWorkerHalf
from kvsnap_connector.metadata import CopyOp
from kvsnap_connector.pages import PagePlaces
from kvsnap_connector.pinning import CudaPinner, pin_region

ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
CHUNK_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """One rank's KV cache."""

    name: str
    layers: int
    heads: int
    content: int
    """Elements of a token and head: K and V, or MLA's latent."""
    block_tokens: int
    page_padding: int = 0

    @property
    def page_bytes(self) -> int:
        return self.heads * self.content * self.block_tokens * 2

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def blocks_per_chunk(self) -> int:
        return CHUNK_TOKENS // self.block_tokens


LLAMA_8B = Shape("Llama-3.1-8B", 32, 8, 256, 16)
GQA_70B_TP4 = Shape("70B GQA, one rank of TP=4", 80, 2, 256, 16)
MLA = Shape("MLA, 61 layers", 61, 1, 576, 64)
PADDED = Shape("padded pages", 7, 2, 24, 16, page_padding=48)
SHAPES = (LLAMA_8B, GQA_70B_TP4, MLA)


class PagedCache:
    """A KV cache as `allocate_kv_cache` lays it out: one int8 allocation, one 4-D bf16 view per layer."""

    def __init__(self, shape: Shape, order: str, num_blocks: int, device: str = "cuda") -> None:
        self.shape, self.order, self.num_blocks = shape, order, num_blocks
        slot = shape.page_bytes + shape.page_padding
        layer_stride, block_stride = (slot * num_blocks, slot) if order.startswith("L") else (slot, slot * shape.layers)
        self.memory = torch.zeros(slot * shape.layers * num_blocks, dtype=torch.int8, device=device)
        inner = (shape.block_tokens * shape.content, shape.content)
        if not order.endswith("HNC"):
            inner = (shape.content, shape.heads * shape.content)
        self.layers = [
            torch.as_strided(
                self.memory.view(torch.bfloat16),
                [num_blocks, shape.heads, shape.block_tokens, shape.content],
                [block_stride // 2, *inner, 1],
                layer * layer_stride // 2,
            )
            for layer in range(shape.layers)
        ]
        self.places = PagePlaces(
            offsets=tuple(layer * layer_stride for layer in range(shape.layers)),
            block_strides=(block_stride,) * shape.layers,
            num_blocks=num_blocks,
            page_bytes=shape.page_bytes,
        )

    def fill(self, seed: int) -> None:
        """Random bytes everywhere, padding included."""
        generator = torch.Generator(device=self.memory.device).manual_seed(seed)
        self.memory.random_(-128, 128, generator=generator)

    def blocks(self, ids: list[int]) -> torch.Tensor:
        """Bytes of blocks in the order of a slice, by indexing through the 4-D views; on the host."""
        pages = [
            (view[ids] if self.order.endswith("HNC") else view[ids].transpose(1, 2)).contiguous()
            for view in self.layers
        ]
        stacked = torch.stack([page.view(torch.uint8).reshape(len(ids), -1) for page in pages], dim=1)
        return stacked.reshape(-1).cpu()


class HostTier:
    """Slots in shared memory, with the states that a worker sees; all waiting to be filled at first."""

    def __init__(self, num_slots: int, stride: int) -> None:
        self.num_slots, self.stride = num_slots, stride
        self.map = mmap.mmap(-1, num_slots * stride)
        self.memory: Bytes = np.frombuffer(self.map, dtype=np.uint8).reshape(num_slots, stride)
        self.memory[:] = 0xEE
        self.generations = [1] * num_slots
        self.filling = [True] * num_slots
        self.completed: list[tuple[int, int, bool]] = []
        self.loads_done = 0

    def area(self, slot: int) -> Bytes:
        area: Bytes = self.memory[slot]
        return area

    def may_fill(self, slot: int, generation: int) -> bool:
        return self.generations[slot] == generation and self.filling[slot]

    def may_read(self, slot: int, generation: int) -> bool:
        return self.generations[slot] == generation

    def complete(self, slot: int, generation: int, *, ok: bool) -> None:
        self.completed.append((slot, generation, ok))

    def finish_loads(self, seq: int) -> None:
        self.loads_done = seq

    def prefault(self, stop: Any = ()) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def rank(
    cache: PagedCache, *, num_slots: int, num_pieces: int, num_pinned: int | None = None
) -> Iterator[tuple[CudaWorkerHalf, HostTier]]:
    """A worker half over a pinned tier; only the first `num_pinned` slots if given."""
    shape = cache.shape
    chunk = shape.blocks_per_chunk * shape.block_bytes
    tier = HostTier(num_slots, -(-chunk // 4096) * 4096)
    pinner = CudaPinner()
    pinned = pin_region(
        pinner,
        tier.memory.ctypes.data,
        slot_bytes=tier.stride,
        num_slots=num_slots if num_pinned is None else num_pinned,
        node=None,
        max_bytes=1 << 40,
    )
    copier = StreamCopier(CudaDevice(cache.memory, cache.places), piece_bytes=chunk, num_pieces=num_pieces)

    def unpin() -> None:
        for address in pinned.addresses:
            pinner.unpin(address)

    half = CudaWorkerHalf(
        0,
        copier,
        tier,
        blocks_per_chunk=shape.blocks_per_chunk,
        is_writer=True,
        num_pinned=pinned.num_slots,
        on_close=unpin,
    )
    assert pinned.why_not_all is None, pinned.why_not_all
    try:
        yield half, tier
    finally:
        torch.cuda.synchronize()
        half.close()


def chunk_ops(cache: PagedCache, count: int, rng: random.Random, *, first_slot: int = 0) -> list[CopyOp]:
    """Chunks over scattered blocks, no block twice."""
    per_chunk = cache.shape.blocks_per_chunk
    ids = rng.sample(range(1, cache.num_blocks), count * per_chunk)
    return [
        CopyOp(
            slot=first_slot + index,
            generation=1,
            first_block=0,
            block_ids=ids[index * per_chunk : (index + 1) * per_chunk],
            request_id=f"r{index}",
        )
        for index in range(count)
    ]
