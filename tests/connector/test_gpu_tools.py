"""`tests/gpu` and `benchmarks/gpu_copy.py` on CPU tensors: they must be right the day a GPU is there.

Under a `torch.cuda` that does all at once, they run to their end: whatever fails on a GPU
is then the GPU's doing, or torch's, and no mistake in the test.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvsnap_connector.pages import BlockView
from tests.gpu import paged, test_cuda_copies
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


class OnTheCpu(TorchFunctionMode):  # type: ignore[misc]
    """What is asked of a CUDA device is done by the CPU; products are small or left out, they only take time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        if func.__name__ == "randn" and args[0] > 1000:
            args = (2, 2)
        return args[0] if "matmul" in func.__name__ else func(*args, **kwargs)


class DoneAtOnce:
    """A stream, and an event: all work is done when it is queued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self) -> DoneAtOnce:
        return DoneAtOnce()

    def wait_event(self, event: DoneAtOnce) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: DoneAtOnce) -> float:
        return 0.001


class PinsNothing:
    """A `Pinner`."""

    def place(self, address: int, nbytes: int, node: int) -> None:
        pass

    def pin(self, address: int, nbytes: int) -> None:
        pass

    def unpin(self, address: int) -> None:
        pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "Stream": DoneAtOnce,
        "Event": DoneAtOnce,
        "stream": lambda stream: nullcontext(),
        "device": lambda index: nullcontext(),
        "current_stream": lambda device=None: DoneAtOnce(),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "mem_get_info": lambda device=None: (64 << 30, 64 << 30),
        "get_device_name": lambda: "none",
        "empty_cache": lambda: None,
        "_sleep": lambda cycles: None,
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(paged, "CudaPinner", PinsNothing)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_pinned", [None, 1])
def test_the_gpu_tests_run_without_one(no_gpu: None, order: str, num_pinned: int | None) -> None:
    with OnTheCpu():
        test_cuda_copies.test_every_byte_there_and_back(PADDED, order, num_pinned)


def test_the_gpu_tests_of_order_and_devices_run_without_one(no_gpu: None) -> None:
    with OnTheCpu():
        test_cuda_copies.test_steps_that_read_and_overwrite_blocks_beside_it("BLNHC")
        test_cuda_copies.test_a_rank_on_another_device_than_the_current_one()
        test_cuda_copies.test_staging_that_is_new_is_idle()


@pytest.mark.parametrize("order", ["LBNHC", "BLNHC"])
def test_the_gpu_test_of_a_large_cache_runs_without_one(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(test_cuda_copies, "LARGE_BYTES", 200 * SMALL.block_bytes)
    monkeypatch.setattr(test_cuda_copies, "LLAMA_8B", SMALL)
    with OnTheCpu():
        test_cuda_copies.test_blocks_far_into_a_large_cache(order)


def test_the_benchmark_runs_without_a_gpu(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import gpu_copy

    monkeypatch.setattr(gpu_copy, "SHAPES", (SMALL, PADDED))
    monkeypatch.setattr(gpu_copy, "LLAMA_8B", SMALL)
    monkeypatch.setattr(gpu_copy, "COUNTS", (1, 2))
    monkeypatch.setattr(gpu_copy, "ROUNDS", 2)
    with OnTheCpu():
        assert gpu_copy.main() == 0

    out, err = capsys.readouterr()
    assert "gpu_store_over_memcpy" in out + err
