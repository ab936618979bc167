"""Copies whole blocks between a CUDA device and DRAM slots, without letting anybody wait.

A store is a gather on the compute stream into a private staging piece, and a copy of that
to the host on a side stream. Work that is queued on the compute stream later comes after
the gather, so blocks may be freed and written again at once. A load is a copy into a
staging piece and a scatter, both on a side stream that first waits for the compute stream:
blocks that were just allocated may still be read or zeroed by work that is queued there.

Knows no slots and no plans; see `cuda_worker.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsnap_connector.copier import Bytes
from kvsnap_connector.cuda_streams import Buffer, Device, Event, Stream

NUM_LANES = 2
"""Loads take turns on so many streams, so that the copy of one overlaps the scatter of another."""
_SPARE_BYTES = 512 << 20
_SHARE_OF_FREE = 4


@dataclass(slots=True)
class Lane:
    """A stream and the staging piece that only its work touches, so that their order is the stream's."""

    stream: Stream
    piece: Buffer


class StreamCopier:
    """Queues copies of one rank. Nothing has happened when a method returns; events say when it has.

    Not for several threads at once, but for `*_slowly`, which one other thread may call.
    """

    def __init__(self, device: Device, *, piece_bytes: int, num_pieces: int) -> None:
        """A piece holds one chunk's slice; `num_pieces` stores may be under way at a time.

        Raises where the device has no memory for them.
        """
        self.block_bytes = device.block_bytes
        self.num_blocks = device.num_blocks
        self.num_pieces = num_pieces
        self._device = device
        self._lanes = [Lane(device.side_stream(), device.buffer(piece_bytes)) for _ in range(NUM_LANES)]
        self._slow_lane = Lane(device.side_stream(), device.buffer(piece_bytes))
        self._slow_store_stream = device.side_stream()
        self._store_stream = device.side_stream()
        self._free = [device.buffer(piece_bytes) for _ in range(num_pieces)]
        self._turn = 0

    def mark(self) -> Event:
        """The point that the compute stream is at."""
        return self._device.compute_stream().record()

    def hold_compute(self, event: Event) -> None:
        """Let what the engine queues from now on begin after `event`."""
        self._device.compute_stream().wait(event)

    # -- loads -----------------------------------------------------------------------

    def load(self, area: Bytes, block_ids: Sequence[int], after: Event) -> Event:
        """Copy the front of `area` into blocks, after `after` of the compute stream."""
        lane = self._lanes[self._turn]
        self._turn = (self._turn + 1) % len(self._lanes)
        return self._load(lane, area, block_ids, after)

    def load_slowly(self, area: Bytes, block_ids: Sequence[int], after: Event) -> Event:
        """The same for pageable memory, from the one thread that may wait for it."""
        return self._load(self._slow_lane, area, block_ids, after)

    def _load(self, lane: Lane, area: Bytes, block_ids: Sequence[int], after: Event) -> Event:
        lane.stream.wait(after)
        self._device.copy_in(lane.stream, area[: len(block_ids) * self.block_bytes], lane.piece)
        self._device.scatter(lane.stream, lane.piece, block_ids)
        return lane.stream.record()

    # -- stores ----------------------------------------------------------------------

    def reserve(self) -> Buffer | None:
        """A staging piece that nothing uses; None if all are under way."""
        return self._free.pop() if self._free else None

    def release(self, piece: Buffer) -> None:
        """The piece's copy to the host is over, or was never queued."""
        self._free.append(piece)

    def gather(self, block_ids: Sequence[int], piece: Buffer) -> None:
        """Copy blocks into a piece, on the compute stream."""
        self._device.gather(self._device.compute_stream(), block_ids, piece)

    def store(self, piece: Buffer, area: Bytes, after: Event) -> Event:
        """Copy the front of a piece into `area`, all of it, after `after` of the compute stream."""
        return self._store(self._store_stream, piece, area, after)

    def store_slowly(self, piece: Buffer, area: Bytes, after: Event) -> Event:
        """The same for pageable memory, from the one thread that may wait for it."""
        return self._store(self._slow_store_stream, piece, area, after)

    def _store(self, stream: Stream, piece: Buffer, area: Bytes, after: Event) -> Event:
        stream.wait(after)
        self._device.copy_out(stream, piece, area)
        return stream.record()

    # -- all -------------------------------------------------------------------------

    def quiesce(self) -> None:
        """Wait until nothing that was queued on a side stream goes on. Only for the rare case and for the end."""
        lanes = [*self._lanes, self._slow_lane]
        for stream in (*(lane.stream for lane in lanes), self._store_stream, self._slow_store_stream):
            stream.record().wait()

    def free(self) -> None:
        """Give the staging memory back, and use the copier no more."""
        self._lanes, self._free = [], []
        del self._slow_lane, self._device

    def enter_thread(self) -> None:
        """Make the device the calling thread's."""
        self._device.enter_thread()


def open_copier(device: Device, *, piece_bytes: int, step_bytes: int, most_bytes: int) -> StreamCopier:
    """A copier with as much staging as a step can ask for and the device can spare.

    Args:
        piece_bytes: Bytes of one chunk's slice.
        step_bytes: Bytes of KV that one engine step can compute.
        most_bytes: Never more staging than this.

    Raises:
        Exception: no memory for even one piece.
    """
    spare = (device.free_bytes() - _SPARE_BYTES) // _SHARE_OF_FREE
    lanes = NUM_LANES + 1
    wished = -(-step_bytes // piece_bytes) + 1
    num_pieces = max(1, min(wished, most_bytes // piece_bytes - lanes, spare // piece_bytes - lanes))
    while True:
        try:
            return StreamCopier(device, piece_bytes=piece_bytes, num_pieces=num_pieces)
        except Exception:
            if num_pieces == 1:
                raise
            num_pieces = max(1, num_pieces // 2)
