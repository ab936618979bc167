"""`CudaDevice` on CPU tensors, under a torch whose streams only take notes: what is queued where, and what it moves.

A mistake here shows on a GPU only: a copy on a stream that nobody waits for, or one that
waits for the device.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvsnap_connector.cuda_streams import CudaDevice, CudaEvent, CudaStream, numa_node_of
from kvsnap_connector.pages import PagePlaces

LAYERS, BLOCKS, PAGE = 3, 8, 48
BLOCK = LAYERS * PAGE


@dataclass
class Notes:
    """What torch was asked, in order; `current` is the stream that kernels go to."""

    current: Any = None
    done: list[tuple[Any, ...]] = field(default_factory=list)

    def named(self, *names: str) -> list[tuple[Any, ...]]:
        return [note for note in self.done if note[0] in names]


class NotingStream:
    """torch.cuda.Stream, as far as it is used."""

    def __init__(self, notes: Notes, device: Any = None) -> None:
        self.notes, self.device = notes, device

    def record_event(self) -> SimpleNamespace:
        self.notes.done.append(("record", self))
        return SimpleNamespace(
            query=lambda: self.notes.done.append(("query", self)),
            synchronize=lambda: self.notes.done.append(("wait for event", self)),
        )

    def wait_event(self, event: Any) -> None:
        self.notes.done.append(("wait", self, event))

    def synchronize(self) -> None:
        self.notes.done.append(("synchronize", self))


class NotingOps(TorchDispatchMode):  # type: ignore[misc]
    """Notes kernels and copies with the stream they go to."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_":
            self.notes.done.append((name, self.notes.current, args[0].numel(), bool(args[2:] and args[2])))
        else:
            self.notes.done.append((name, self.notes.current))
        return func(*args, **(kwargs or {}))


class Rig:
    """A device over CPU tensors, and what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes = notes = Notes()
        self.compute = notes.current = NotingStream(notes)
        self.memory = torch.randint(0, 256, (LAYERS, BLOCKS, PAGE), dtype=torch.uint8)

        @contextmanager
        def stream(chosen: NotingStream) -> Iterator[None]:
            before, notes.current = notes.current, chosen
            yield
            notes.current = before

        def current_stream(device: Any = None) -> NotingStream:
            notes.done.append(("current_stream", device))
            current: NotingStream = notes.current
            return current

        def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
            notes.done.append(("pin_memory", notes.current))
            pinned = tensor.clone()
            pinned.is_really_pinned = True
            return pinned

        original = torch.Tensor.to

        def to(tensor: torch.Tensor, device: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            is_pinned = hasattr(tensor, "is_really_pinned")
            notes.done.append(("sent", notes.current, device, is_pinned, kwargs.get("non_blocking", False)))
            return original(tensor, device, *args, **kwargs)

        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: NotingStream(notes, device))
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: notes.done.append(("set_device", device)))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 9) if device == torch.device("cpu") else 0)
        monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
        monkeypatch.setattr(torch.Tensor, "to", to)
        places = PagePlaces(
            offsets=tuple(layer * BLOCKS * PAGE for layer in range(LAYERS)),
            block_strides=(PAGE,) * LAYERS,
            num_blocks=BLOCKS,
            page_bytes=PAGE,
        )
        self.device = CudaDevice(self.memory, places)
        self.side = self.device.side_stream()
        notes.done.clear()

    def blocks(self, ids: list[int]) -> torch.Tensor:
        return self.memory[:, ids].transpose(0, 1).reshape(-1)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_a_gather_goes_to_the_stream_it_is_given_with_ids_that_nobody_waits_for(rig: Rig) -> None:
    buffer = torch.zeros(4 * BLOCK, dtype=torch.uint8)
    with NotingOps(rig.notes):
        rig.device.gather(rig.side, [5, 2], buffer)

    side = rig.side.torch_stream
    assert rig.notes.named("index_select") == [("index_select", side)]
    assert rig.notes.named("pin_memory", "sent") == [
        ("pin_memory", side),
        ("sent", side, torch.device("cpu"), True, True),
    ]
    assert rig.notes.current is rig.compute, "the engine's stream is the current one again"
    assert torch.equal(buffer[: 2 * BLOCK], rig.blocks([5, 2]))
    assert not buffer[2 * BLOCK :].any()


def test_a_scatter_goes_to_the_stream_it_is_given(rig: Rig) -> None:
    buffer = torch.randint(0, 256, (4 * BLOCK,), dtype=torch.uint8)
    with NotingOps(rig.notes):
        rig.device.scatter(rig.side, buffer, [5, 2])

    side = rig.side.torch_stream
    assert rig.notes.named("index_copy_") == [("index_copy_", side)]
    assert rig.notes.named("sent") == [("sent", side, torch.device("cpu"), True, True)]
    assert rig.notes.current is rig.compute
    assert torch.equal(rig.blocks([5, 2]), buffer[: 2 * BLOCK])


@pytest.mark.parametrize("is_out", [True, False])
def test_a_copy_is_one_piece_on_its_stream_and_blocks_nobody(rig: Rig, is_out: bool) -> None:
    """In place, in the tier's own memory: a temporary would be pageable, and the bytes would be lost."""
    slot = np.frombuffer(bytearray(random.Random(1).randbytes(2 * BLOCK)), dtype=np.uint8)
    buffer = torch.randint(0, 256, (4 * BLOCK,), dtype=torch.uint8)
    before = buffer.clone()
    with NotingOps(rig.notes):
        (rig.device.copy_out(rig.side, buffer, slot) if is_out else rig.device.copy_in(rig.side, slot, buffer))

    assert rig.notes.named("copy_", "_to_copy", "clone") == [("copy_", rig.side.torch_stream, 2 * BLOCK, True)]
    assert np.array_equal(slot, buffer[: 2 * BLOCK].numpy())
    assert torch.equal(buffer[2 * BLOCK :], before[2 * BLOCK :])
    assert not is_out or torch.equal(buffer, before)
    assert rig.notes.current is rig.compute


def test_a_buffer_may_be_used_by_any_stream_at_once(rig: Rig) -> None:
    """The allocator orders memory by the stream that asked for it; side streams know nothing of that one."""
    with NotingOps(rig.notes):
        buffer = rig.device.buffer(100)

    assert (buffer.dtype, buffer.shape) == (torch.uint8, (100,))
    kernels = [note for note in rig.notes.done if note[0] not in {"current_stream", "synchronize"}]
    assert rig.notes.done[-1] == ("synchronize", rig.compute)
    assert kernels, "and only then"


def test_a_thread_may_copy_into_what_a_hook_made(rig: Rig) -> None:
    """vLLM's hooks are in inference mode, which is a thread's; in-place writes from outside it raise."""
    slot = np.frombuffer(bytearray(random.Random(1).randbytes(BLOCK)), dtype=np.uint8)
    with torch.inference_mode():
        buffer = rig.device.buffer(BLOCK)

    rig.device.copy_in(rig.side, slot, buffer)
    rig.device.scatter(rig.side, buffer, [2])

    assert np.array_equal(rig.blocks([2]).numpy(), slot)


def test_all_is_asked_of_the_caches_own_device(rig: Rig) -> None:
    """Rank 3 has device 3, and a thread begins with device 0."""
    own = torch.device("cpu")

    assert rig.side.torch_stream.device == own
    assert rig.device.compute_stream().torch_stream is rig.compute
    assert rig.device.free_bytes() == 7
    rig.device.enter_thread()

    assert rig.notes.done == [("current_stream", own), ("set_device", own)]


def test_events_are_torchs(rig: Rig) -> None:
    stream, side = CudaStream(rig.compute), rig.side

    event = stream.record()
    side.wait(event)
    event.is_done()
    event.wait()

    assert isinstance(event, CudaEvent)
    assert rig.notes.done == [
        ("record", rig.compute),
        ("wait", side.torch_stream, event.torch_event),
        ("query", rig.compute),
        ("wait for event", rig.compute),
    ]


def test_the_gpus_address_is_put_together(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x3B, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties if index == 3 else None)
    device = tmp_path / "sys/bus/pci/devices/0001:3b:02.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)

    assert numa_node_of(3, tmp_path) == 1
    del properties.pci_domain_id  # an older torch
    assert numa_node_of(3, tmp_path) is None
