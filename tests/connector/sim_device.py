"""A device whose streams are as lazy and disorderly as their events allow, on CPU tensors.

Queued work happens only when `run` is called or somebody waits for an event; which stream
goes on is a draw, and copies happen in two halves. So whatever a forgotten wait would
allow on a GPU now and then, happens here often.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from kvsnap_connector.copier import Bytes
from kvsnap_connector.cuda_streams import Event, Stream
from kvsnap_connector.pages import BlockView, PagePlaces


class SimEvent:
    """A point in a stream."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self.has_fired = False

    def is_done(self) -> bool:
        return self.has_fired

    def wait(self) -> None:
        while not self.has_fired:
            assert self._device.run_one(), "waits for an event that can't come"


class SimStream:
    """Work in order; a wait is work too."""

    def __init__(self, device: SimDevice) -> None:
        self.device = device
        self.work: deque[Callable[[], object] | SimEvent] = deque()

    def record(self) -> SimEvent:
        event = SimEvent(self.device)
        self.work.append(lambda: setattr(event, "has_fired", True))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimEvent)
        self.work.append(event)

    def add(self, *work: Callable[[], object]) -> None:
        self.work.extend(work)

    def is_ready(self) -> bool:
        while self.work and isinstance(self.work[0], SimEvent) and self.work[0].has_fired:
            self.work.popleft()
        return bool(self.work) and not isinstance(self.work[0], SimEvent)


class SimDevice:
    """See the module. Satisfies `kvsnap_connector.cuda_streams.Device`."""

    def __init__(self, cache: torch.Tensor, places: PagePlaces, rng: random.Random, *, memory: int = 1 << 30) -> None:
        self.view = BlockView(cache, places)
        self.block_bytes = places.block_bytes
        self.num_blocks = places.num_blocks
        self.compute = SimStream(self)
        self.streams = [self.compute]
        self.memory = memory
        self.fails: Callable[[str], bool] = lambda what: False
        """Whether the next operation of this name raises."""
        self._rng = rng

    # -- the interface ---------------------------------------------------------------

    def compute_stream(self) -> SimStream:
        return self.compute

    def side_stream(self) -> SimStream:
        self.streams.append(SimStream(self))
        return self.streams[-1]

    def buffer(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.memory:
            raise torch.OutOfMemoryError("no device memory")
        self.memory -= nbytes
        buffer = torch.full((nbytes,), 0xCD, dtype=torch.uint8)
        weakref.finalize(buffer, self._take_back, nbytes)
        return buffer

    def _take_back(self, nbytes: int) -> None:
        self.memory += nbytes

    def free_bytes(self) -> int:
        return self.memory

    def gather(self, stream: Stream, block_ids: Sequence[int], buffer: torch.Tensor) -> None:
        self._check("gather")
        for start, ids in _halves(block_ids):
            part = buffer[start * self.block_bytes :]
            _sim(stream).add(partial(self.view.gather, ids, part))

    def scatter(self, stream: Stream, buffer: torch.Tensor, block_ids: Sequence[int]) -> None:
        self._check("scatter")
        for start, ids in _halves(block_ids):
            part = buffer[start * self.block_bytes :]
            _sim(stream).add(partial(self.view.scatter, part, ids))

    def copy_out(self, stream: Stream, buffer: torch.Tensor, area: Bytes) -> None:
        self._check("copy_out")
        host, half = torch.from_numpy(area), area.nbytes // 2
        _sim(stream).add(
            lambda: _copy(host[:half], buffer[:half]), lambda: _copy(host[half:], buffer[half : area.nbytes])
        )

    def copy_in(self, stream: Stream, area: Bytes, buffer: torch.Tensor) -> None:
        self._check("copy_in")
        host, half = torch.from_numpy(area), area.nbytes // 2
        _sim(stream).add(
            lambda: _copy(buffer[:half], host[:half]), lambda: _copy(buffer[half : area.nbytes], host[half:])
        )

    def enter_thread(self) -> None:
        pass

    # -- what a test does ------------------------------------------------------------

    def run_one(self) -> bool:
        """Let one stream take one step; False if none can."""
        ready = [stream for stream in self.streams if stream.is_ready()]
        if not ready:
            return False
        work = self._rng.choice(ready).work.popleft()
        assert not isinstance(work, SimEvent)
        work()
        return True

    def run(self, steps: int) -> None:
        """At most so many steps."""
        for _ in range(steps):
            if not self.run_one():
                return

    def run_all(self) -> None:
        """Until nothing is left."""
        while self.run_one():
            pass
        assert not any(stream.work for stream in self.streams), "a stream waits for ever"

    def _check(self, what: str) -> None:
        if self.fails(what):
            raise RuntimeError(f"the device refused: {what}")


def _halves(block_ids: Sequence[int]) -> list[tuple[int, torch.Tensor]]:
    """Where each half starts, and its ids as they are now."""
    middle = len(block_ids) // 2
    parts = [(0, block_ids[:middle]), (middle, block_ids[middle:])]
    return [(start, torch.tensor(list(ids))) for start, ids in parts if ids]


def _sim(stream: Stream) -> SimStream:
    assert isinstance(stream, SimStream)
    return stream


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
