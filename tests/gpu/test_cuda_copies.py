"""The real copier on a real device: every byte, every order, beside kernels that read and overwrite blocks.

Needs torch and a CUDA device, no vLLM: `pytest -m gpu`.
"""

from __future__ import annotations

import random
import time

import pytest
import torch

from kvsnap_connector.cuda_streams import CudaDevice
from kvsnap_connector.cuda_worker import CudaWorkerHalf
from kvsnap_connector.metadata import CopyOp, StepPlan
from tests.gpu.paged import LLAMA_8B, ORDERS, PADDED, SHAPES, PagedCache, Shape, chunk_ops, rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CHUNKS = 3
LARGE_BYTES = 36 << 30


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
        half.store(StepPlan(seq=1, stores=ops))
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
    steps = [rng.sample(range(1, 64), shape.blocks_per_chunk) for _ in range(32)]
    # An index that comes from the host makes the host wait for the device, and nothing would be queued ahead.
    on_device = [torch.tensor(ids, device="cuda") for ids in steps]
    wanted: dict[int, torch.Tensor] = {}
    with rank(cache, num_slots=16, num_pieces=16) as (half, tier):
        for seq in range(1, 17):
            for _ in range(4):
                busy = (busy @ busy).clamp_(-1, 1)
            ids, where = steps[seq - 1], on_device[seq - 1]
            for layer, view in enumerate(cache.layers):
                view.index_fill_(0, where, float(seq * 16 + layer % 16))
            half.store(
                StepPlan(
                    seq=seq,
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
                view.index_fill_(0, where, -1.0)
        settle(half)
        for slot, data in wanted.items():
            assert torch.equal(torch.from_numpy(tier.memory[slot][: len(data)].copy()), data), f"slot {slot}"
        assert [ok for _, _, ok in tier.completed] == [True] * 16

        for seq in range(17, 33):
            slot = seq - 17
            for _ in range(4):
                busy = (busy @ busy).clamp_(-1, 1)
            ids, where = steps[seq - 1], on_device[seq - 1]
            for view in cache.layers:
                view.index_fill_(0, where, -2.0)  # queued behind the products, and the load behind it
            op = CopyOp(slot=slot, generation=1, first_block=0, block_ids=ids, request_id="r")
            if seq % 2:
                half.load(StepPlan(seq=seq, async_loads={"r": [op]}))
                assert settle(half) == {"r"}
                found = cache.blocks(ids)
            else:
                half.load(StepPlan(seq=seq, loads=[op]))
                # On the compute stream, which waits for the load; `cache.blocks` would make the host wait first.
                found_here = [view.index_select(0, where) for view in cache.layers]
                found = cache.blocks(ids)
                for before, view in zip(found_here, cache.layers, strict=True):
                    assert torch.equal(before, view.index_select(0, where)), "the forward pass ran before its load"
                settle(half)
            assert torch.equal(found, wanted[slot])


def test_pinned_memory_is_pinned() -> None:
    """Without it, everything works and nothing overlaps."""
    shape = Shape("small", 8, 2, 64, 16)
    cache = PagedCache(shape, "BLNHC", num_blocks=40)
    cache.fill(3)
    products = torch.randn(8192, 8192, device="cuda")
    with rank(cache, num_slots=2, num_pieces=2) as (half, _):
        half.store(StepPlan(seq=1, stores=chunk_ops(cache, 1, random.Random(1))))  # first use allocates
        settle(half)
        torch.cuda.synchronize()
        for _ in range(20):
            products = (products @ products).clamp_(-1, 1)
        started = time.perf_counter()
        half.store(StepPlan(seq=2, acked=1, stores=chunk_ops(cache, 1, random.Random(2), first_slot=1)))
        returned = time.perf_counter() - started
        torch.cuda.synchronize()
        waited = time.perf_counter() - started

    assert returned < waited / 2, "the hook waits for the forward pass"


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
def test_blocks_far_into_a_large_cache(order: str) -> None:
    """Past 32 GiB torch takes other kernels, with offsets of 64 bits; real caches are that large."""
    num_blocks = LARGE_BYTES // LLAMA_8B.block_bytes
    if torch.cuda.mem_get_info()[0] < LARGE_BYTES + (2 << 30):
        pytest.skip("not enough free device memory")
    cache = PagedCache(LLAMA_8B, order, num_blocks)
    size = LLAMA_8B.blocks_per_chunk
    sources = [num_blocks - 1, 1, *range(num_blocks - size + 1, num_blocks - 1)]
    targets = [num_blocks - 2 * size, 2, *range(num_blocks - 3 * size + 1, num_blocks - 2 * size - 1)]
    for view in cache.layers:
        view[sources] = torch.randn(size, *view.shape[1:], device="cuda").to(torch.bfloat16)
    wanted = cache.blocks(sources)
    with rank(cache, num_slots=1, num_pieces=1) as (half, tier):
        op = CopyOp(slot=0, generation=1, first_block=0, block_ids=sources, request_id="s")
        half.store(StepPlan(seq=1, stores=[op]))
        settle(half)
        assert torch.equal(torch.from_numpy(tier.memory[0][: len(wanted)].copy()), wanted)

        op = CopyOp(slot=0, generation=1, first_block=0, block_ids=targets, request_id="r")
        half.load(StepPlan(seq=2, async_loads={"r": [op]}))
        assert settle(half) == {"r"}

        assert torch.equal(cache.blocks(targets), wanted)
        assert torch.equal(cache.blocks(sources), wanted)
        others = [3, num_blocks // 2, num_blocks - 4 * size]
        assert not cache.blocks(others).any()
    del cache, view
    torch.cuda.empty_cache()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_rank_on_another_device_than_the_current_one() -> None:
    """Streams, events, memory and the thread belong to the cache's device, whatever is current."""
    shape = Shape("small", 8, 2, 64, 16)
    cache = PagedCache(shape, "BLNHC", num_blocks=40, device="cuda:1")
    cache.fill(3)
    ids = list(range(1, 2 * shape.blocks_per_chunk + 1))
    sources, targets = ids[: shape.blocks_per_chunk], ids[shape.blocks_per_chunk :]
    wanted = cache.blocks(sources)
    torch.cuda.synchronize(1)
    with torch.cuda.device(0), rank(cache, num_slots=2, num_pieces=2, num_pinned=1) as (half, tier):
        for slot in range(2):  # the second one is pageable: the thread's
            op = CopyOp(slot=slot, generation=1, first_block=0, block_ids=sources, request_id="s")
            half.store(StepPlan(seq=2 * slot + 1, acked=2 * slot, stores=[op]))
            settle(half)
            assert torch.equal(torch.from_numpy(tier.memory[slot][: len(wanted)].copy()), wanted)
            for view in cache.layers:
                view[targets] = 7.0
            op = CopyOp(slot=slot, generation=1, first_block=0, block_ids=targets, request_id="r")
            half.load(StepPlan(seq=2 * slot + 2, async_loads={"r": [op]}))
            assert settle(half) == {"r"}
            assert torch.equal(cache.blocks(targets), wanted)
        assert torch.cuda.current_device() == 0


def test_staging_that_is_new_is_idle() -> None:
    """Side streams may use it at once: torch's allocator knows only the stream that asked."""
    cache = PagedCache(Shape("small", 8, 2, 64, 16), "BLNHC", num_blocks=40)
    device = CudaDevice(cache.memory, cache.places)
    products = torch.randn(8192, 8192, device="cuda")
    for _ in range(10):
        products = (products @ products).clamp_(-1, 1)

    device.buffer(1 << 20)

    assert torch.cuda.current_stream().query()
