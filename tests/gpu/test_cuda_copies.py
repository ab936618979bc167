"""The real copier on a real device: every byte, every order, beside kernels that read and overwrite blocks.

Needs torch and a CUDA device, no vLLM: `pytest -m gpu`.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from kvsnap_connector.cuda_worker import CudaWorkerHalf
from kvsnap_connector.metadata import CopyOp, StepPlan
from tests.gpu.paged import ORDERS, PADDED, SHAPES, PagedCache, Shape, chunk_ops, rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CHUNKS = 3


def settle(half: CudaWorkerHalf) -> set[str]:
    """Wait until nothing is under way; what was received."""
    received: set[str] = set()
    deadline = time.monotonic() + 30
    while not half.is_idle:
        assert time.monotonic() < deadline, "a copy hangs"
        received |= half.take_received()
        time.sleep(0.001)
    return received | half.take_received()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [*SHAPES, PADDED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("num_pinned", [None, 1], ids=["pinned", "mostly pageable"])
def test_every_byte_there_and_back(shape: Shape, order: str, num_pinned: int | None) -> None:
    """Stored blocks are poisoned before they are loaded into others; nothing else changes."""
    cache = PagedCache(shape, order, num_blocks=2 * CHUNKS * shape.blocks_per_chunk + 3)
    cache.fill(1)
    rng = random.Random(order)
    ids = rng.sample(range(1, cache.num_blocks), 2 * CHUNKS * shape.blocks_per_chunk)
    size = shape.blocks_per_chunk
    parts = [ids[i : i + size] for i in range(0, len(ids), size)]
    sources, targets = parts[:CHUNKS], parts[CHUNKS:]
    wanted = [cache.blocks(part) for part in sources]
    with rank(cache, num_slots=CHUNKS, num_pieces=CHUNKS, num_pinned=num_pinned) as (half, tier):
        ops = [
            CopyOp(slot=slot, generation=1, first_block=0, block_ids=part, request_id="s")
            for slot, part in enumerate(sources)
        ]
        half.store(StepPlan(seq=1, epoch=1, stores=ops))
        for view in cache.layers:
            view[ids] = 7.0  # blocks are free as soon as the hook returns
        settle(half)

        assert sorted(tier.completed) == [(slot, 1, True) for slot in range(CHUNKS)]
        for slot, data in enumerate(wanted):
            assert torch.equal(torch.from_numpy(tier.memory[slot][: len(data)].copy()), data)
            assert not tier.memory[slot][len(data) :].any()

        untouched = cache.blocks(sources[0])
        half.load(
            StepPlan(
                seq=2,
                epoch=1,
                async_loads={
                    f"r{slot}": [CopyOp(slot=slot, generation=1, first_block=0, block_ids=part, request_id=f"r{slot}")]
                    for slot, part in enumerate(targets)
                },
            )
        )
        received = settle(half)

        assert received == {f"r{slot}" for slot in range(CHUNKS)}
        for data, part in zip(wanted, targets, strict=True):
            assert torch.equal(cache.blocks(part), data)
        assert torch.equal(cache.blocks(sources[0]), untouched)
        assert tier.loads_done == 2


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
def test_steps_that_read_and_overwrite_blocks_beside_it(order: str) -> None:
    """Compute, store, overwrite, load into blocks that a queued kernel still writes; many times, without a wait."""
    shape = Shape("small", 8, 2, 64, 16)
    cache = PagedCache(shape, order, num_blocks=64)
    busy = torch.randn(4096, 4096, device="cuda")
    rng = random.Random(5)
    wanted: dict[int, torch.Tensor] = {}
    with rank(cache, num_slots=16, num_pieces=16) as (half, tier):
        for seq in range(1, 17):
            for _ in range(4):
                busy = (busy @ busy).clamp_(-1, 1)
            ids = rng.sample(range(1, 64), shape.blocks_per_chunk)
            for layer, view in enumerate(cache.layers):
                view[ids] = float(seq * 16 + layer % 16)
            half.store(
                StepPlan(
                    seq=seq,
                    epoch=1,
                    acked=seq - 1,
                    stores=[CopyOp(slot=seq - 1, generation=1, first_block=0, block_ids=ids, request_id="s")],
                )
            )
            expected = torch.stack(
                [
                    torch.full((shape.heads * shape.block_tokens * shape.content,), float(seq * 16 + layer % 16))
                    for layer in range(shape.layers)
                ]
            ).to(torch.bfloat16)
            wanted[seq - 1] = expected.view(torch.uint8).reshape(1, -1).repeat(shape.blocks_per_chunk, 1).reshape(-1)
            for view in cache.layers:
                view[ids] = -1.0
        settle(half)
        for slot, data in wanted.items():
            assert torch.equal(torch.from_numpy(tier.memory[slot][: len(data)].copy()), data), f"slot {slot}"
        assert [ok for _, _, ok in tier.completed] == [True] * 16

        for seq in range(17, 33):
            slot = seq - 17
            for _ in range(4):
                busy = (busy @ busy).clamp_(-1, 1)
            ids = rng.sample(range(1, 64), shape.blocks_per_chunk)
            for view in cache.layers:
                view[ids] = -2.0  # queued behind the products, and the load behind it
            op = CopyOp(slot=slot, generation=1, first_block=0, block_ids=ids, request_id="r")
            if seq % 2:
                half.load(StepPlan(seq=seq, epoch=1, async_loads={"r": [op]}))
                assert settle(half) == {"r"}
                found = cache.blocks(ids)
            else:
                half.load(StepPlan(seq=seq, epoch=1, loads=[op]))
                found = cache.blocks(ids)  # on the compute stream, which waits for the load
                settle(half)
            assert torch.equal(found, wanted[slot])


def test_pinned_memory_is_pinned() -> None:
    """Without it, everything works and nothing overlaps."""
    shape = Shape("small", 8, 2, 64, 16)
    cache = PagedCache(shape, "BLNHC", num_blocks=40)
    cache.fill(3)
    products = torch.randn(8192, 8192, device="cuda")
    with rank(cache, num_slots=2, num_pieces=2) as (half, _):
        half.store(StepPlan(seq=1, epoch=1, stores=chunk_ops(cache, 1, random.Random(1))))  # first use allocates
        settle(half)
        torch.cuda.synchronize()
        for _ in range(20):
            products = (products @ products).clamp_(-1, 1)
        started = time.perf_counter()
        half.store(StepPlan(seq=2, epoch=1, acked=1, stores=chunk_ops(cache, 1, random.Random(2), first_slot=1)))
        returned = time.perf_counter() - started
        torch.cuda.synchronize()
        waited = time.perf_counter() - started

    assert returned < waited / 2, "the hook waits for the forward pass"
