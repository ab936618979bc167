"""Helpers of `tests/gpu` and `benchmarks/gpu_copy.py`, on CPU tensors: they must be right the day a GPU is there."""

from __future__ import annotations

import pytest
import torch

from kvsnap_connector.pages import BlockView
from tests.gpu.paged import ORDERS, PADDED, PagedCache, Shape

SMALL = Shape("small", 3, 2, 8, 16)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [SMALL, PADDED], ids=lambda shape: shape.name)
def test_the_reference_and_the_copier_agree(shape: Shape, order: str) -> None:
    cache = PagedCache(shape, order, num_blocks=9, device="cpu")
    cache.fill(1)
    view = BlockView(cache.memory, cache.places)
    buffer = torch.zeros(3 * shape.block_bytes, dtype=torch.uint8)

    view.gather(torch.tensor([4, 8, 1]), buffer)

    assert torch.equal(buffer, cache.blocks([4, 8, 1]))


def test_without_a_device_the_benchmark_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import gpu_copy

    if torch.cuda.is_available():
        pytest.skip("there is one")

    assert gpu_copy.main() == 1
    assert "no CUDA device" in capsys.readouterr().err
