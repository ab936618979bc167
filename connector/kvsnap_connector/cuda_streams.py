"""What the CUDA copier needs of a device, and the CUDA implementation of it.

Everything that has to do with streams and events goes through `Device`, which is small,
so that the same copier runs over a simulated device whose streams are lazy and as
disorderly as their events allow (`tests/connector/sim_device.py`). Importing this
module imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvsnap_connector.copier import Bytes
from kvsnap_connector.pages import BlockView, PagePlaces

if TYPE_CHECKING:
    import torch

Buffer = Any
"""Private device memory, as `Device.buffer` made it."""


class Event(Protocol):
    """A point in a stream."""

    def is_done(self) -> bool:
        """Whether the stream has passed it. Never waits."""
        ...

    def wait(self) -> None:
        """Let the calling thread wait for it."""
        ...


class Stream(Protocol):
    """Work that the device does in order. Two streams know nothing of each other but by events."""

    def record(self) -> Event:
        """The point that all work queued so far ends at."""
        ...

    def wait(self, event: Event) -> None:
        """Let work that is queued from now on begin after `event`. The caller doesn't wait."""
        ...


class Device(Protocol):
    """One device that holds the pages of one rank. All copies are queued; none has happened on return."""

    block_bytes: int
    """Bytes of one block: all layers' pages."""
    num_blocks: int
    """Blocks of the engine."""

    def compute_stream(self) -> Stream:
        """The stream that the engine computes on, as the calling hook sees it."""
        ...

    def side_stream(self) -> Stream:
        """A new stream for copies."""
        ...

    def buffer(self, nbytes: int) -> Buffer:
        """Private device memory; raises where there is none."""
        ...

    def free_bytes(self) -> int:
        """Device memory that nobody holds."""
        ...

    def gather(self, stream: Stream, block_ids: Sequence[int], buffer: Buffer) -> None:
        """Blocks, in order, into the front of a buffer."""
        ...

    def scatter(self, stream: Stream, buffer: Buffer, block_ids: Sequence[int]) -> None:
        """The front of a buffer into blocks, in order."""
        ...

    def copy_out(self, stream: Stream, buffer: Buffer, area: Bytes) -> None:
        """The front of a buffer into host memory. Pageable memory may block the caller until it is done."""
        ...

    def copy_in(self, stream: Stream, area: Bytes, buffer: Buffer) -> None:
        """Host memory into the front of a buffer. Pageable memory may block the caller until it is done."""
        ...

    def enter_thread(self) -> None:
        """Make this device the calling thread's."""
        ...


class CudaStream:
    """A torch stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.torch_stream = stream

    def record(self) -> CudaEvent:
        """See `Stream.record`."""
        return CudaEvent(self.torch_stream.record_event())

    def wait(self, event: Event) -> None:
        """See `Stream.wait`."""
        assert isinstance(event, CudaEvent)
        self.torch_stream.wait_event(event.torch_event)


class CudaEvent:
    """A torch event, recorded once."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.torch_event = event

    def is_done(self) -> bool:
        """See `Event.is_done`."""
        return bool(self.torch_event.query())

    def wait(self) -> None:
        """See `Event.wait`."""
        self.torch_event.synchronize()


class CudaDevice:
    """One CUDA device, by torch.

    Block ids travel to the device in pinned memory that torch's own allocator keeps until
    the copy is over. Layer hooks, graph capture and the default stream are never touched.
    """

    def __init__(self, cache: torch.Tensor, places: PagePlaces) -> None:
        """`cache` is any registered tensor over the allocation that `places` describes."""
        import torch

        self._torch = torch
        self._device = cache.device
        self._view = BlockView(cache, places)
        self.block_bytes = places.block_bytes
        self.num_blocks = places.num_blocks

    def compute_stream(self) -> CudaStream:
        """See `Device.compute_stream`."""
        return CudaStream(self._torch.cuda.current_stream(self._device))

    def side_stream(self) -> CudaStream:
        """See `Device.side_stream`."""
        return CudaStream(self._torch.cuda.Stream(self._device))

    def buffer(self, nbytes: int) -> torch.Tensor:
        """See `Device.buffer`. Comes zeroed, from torch's own pool.

        That pool knows only the stream that asked: other streams may use what it gives once
        the zeroing, and whatever that stream still did with the memory before, are over.
        """
        memory = self._torch.zeros(nbytes, dtype=self._torch.uint8, device=self._device)
        self._torch.cuda.current_stream(self._device).synchronize()
        return memory

    def free_bytes(self) -> int:
        """See `Device.free_bytes`."""
        return int(self._torch.cuda.mem_get_info(self._device)[0])

    def gather(self, stream: Stream, block_ids: Sequence[int], buffer: Buffer) -> None:
        """See `Device.gather`: one kernel."""
        with self._on(stream):
            self._view.gather(self._ids(block_ids), buffer)

    def scatter(self, stream: Stream, buffer: Buffer, block_ids: Sequence[int]) -> None:
        """See `Device.scatter`: one kernel."""
        with self._on(stream):
            self._view.scatter(buffer, self._ids(block_ids))

    def copy_out(self, stream: Stream, buffer: Buffer, area: Bytes) -> None:
        """See `Device.copy_out`."""
        with self._on(stream):
            self._host(area).copy_(buffer[: area.nbytes], non_blocking=True)

    def copy_in(self, stream: Stream, area: Bytes, buffer: Buffer) -> None:
        """See `Device.copy_in`."""
        with self._on(stream):
            buffer[: area.nbytes].copy_(self._host(area), non_blocking=True)

    def enter_thread(self) -> None:
        """See `Device.enter_thread`."""
        self._torch.cuda.set_device(self._device)

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, CudaStream)
        with self._torch.inference_mode(), self._torch.cuda.stream(stream.torch_stream):
            yield

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        host = self._torch.tensor(block_ids, dtype=self._torch.int64, device="cpu").pin_memory()
        return host.to(self._device, non_blocking=True)

    def _host(self, area: Bytes) -> torch.Tensor:
        return self._torch.from_numpy(np.asarray(area))


def numa_node_of(device_index: int, root: Path = Path("/")) -> int | None:
    """NUMA node that a CUDA device hangs on; None where the system doesn't say or has only one."""
    import torch

    properties = torch.cuda.get_device_properties(device_index)
    numbers = [int(getattr(properties, name, -1)) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    if min(numbers) < 0:
        return None
    domain, bus, device = numbers
    return numa_node_of_pci(f"{domain:04x}:{bus:02x}:{device:02x}.0", root)


def numa_node_of_pci(address: str, root: Path = Path("/")) -> int | None:
    """NUMA node of a PCI device by its address; None where the system doesn't say or has only one."""
    if len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) < 2:
        return None
    try:
        node = int((root / "sys/bus/pci/devices" / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
