"""Pins one rank's region of the DRAM tier for a GPU, in bounded pieces, on the GPU's NUMA node.

A copy from or to pinned memory goes on by itself; one of pageable memory is slower and
blocks whoever queues it. Pinning is a favour to speed only: what can't be pinned within
the bounds stays pageable and works.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvsnap.direct_io import ALIGN

PIECE_BYTES = 1 << 30
PIN_SECONDS = 120.0
_SLOW_BYTES_PER_SECOND = 1 << 30
_READ_WRITE_PAGES = 23  # MADV_POPULATE_WRITE
_PREFERRED = 1  # MPOL_PREFERRED
_MOVE = 2  # MPOL_MF_MOVE
_MBIND = {"x86_64": 237, "aarch64": 235}


class Pinner(Protocol):
    """What pinning needs of the system. Each answers why it failed; None if it didn't."""

    def place(self, address: int, nbytes: int, node: int) -> str | None:
        """Fault the pages in and move them to a NUMA node."""
        ...

    def pin(self, address: int, nbytes: int) -> str | None:
        """Page-lock for the device."""
        ...

    def unpin(self, address: int) -> str | None:
        """Undo it, by the address of a whole piece."""
        ...


@dataclass(frozen=True, slots=True)
class Pinned:
    """What of a region is pinned: whole slots, from the first one on."""

    num_slots: int
    """Slots that are pinned; no slot is pinned in part."""
    nbytes: int
    seconds: float
    why_not_all: str | None
    """None if all of it is pinned."""
    why_not_placed: str | None
    """None where it is on the wished NUMA node, or none was wished."""
    addresses: tuple[int, ...]
    """Of the pieces, for `unpin`."""

    def line(self, rank: int, total_bytes: int) -> str:
        """For the log."""
        text = f"rank {rank}: pinned {self.nbytes >> 20} of {total_bytes >> 20} MiB in {self.seconds:.1f} s"
        if self.why_not_all is not None:
            text += f"; the rest stays pageable, which works and is slower ({self.why_not_all})"
        if self.why_not_placed is not None:
            text += f"; not on the GPU's NUMA node ({self.why_not_placed})"
        return text


def pin_region(
    pinner: Pinner,
    address: int,
    *,
    slot_bytes: int,
    num_slots: int,
    node: int | None,
    max_bytes: int,
    max_seconds: float = PIN_SECONDS,
    piece_bytes: int = PIECE_BYTES,
    page_bytes: int = mmap.PAGESIZE,
    clock: Callable[[], float] = time.monotonic,
) -> Pinned:
    """Pin slots from the first on, until a bound is met or the system refuses.

    Pieces end between slots: the device can't copy across two pinned ranges at once. They
    end between pages too, which are larger than a slot's alignment on some machines: no page
    can be pinned twice. Where no slot ends there it is one piece.
    """
    started = clock()
    addresses: list[int] = []
    done = 0
    why: str | None = None
    why_not_placed: str | None = None
    wish = max(1, piece_bytes // slot_bytes)
    while done < num_slots:
        start = address + done * slot_bytes
        counts = range(wish, wish + max(1, page_bytes // ALIGN))
        ends_page = (count for count in counts if (start + count * slot_bytes) % page_bytes == 0)
        count = next(ends_page, int(max_seconds * _SLOW_BYTES_PER_SECOND) // slot_bytes)
        count = min(count, num_slots - done, (max_bytes - done * slot_bytes) // slot_bytes)
        if count <= 0:
            why = f"no more than {max_bytes >> 20} MiB are pinned"
            break
        if clock() - started >= max_seconds:
            why = f"it takes longer than {max_seconds:.0f} s"
            break
        nbytes = count * slot_bytes
        if node is not None and why_not_placed is None:
            why_not_placed = pinner.place(start, nbytes, node)
        why = pinner.pin(start, nbytes)
        if why is not None:
            break
        addresses.append(start)
        done += count
    return Pinned(done, done * slot_bytes, clock() - started, why, why_not_placed, tuple(addresses))


class CudaPinner:
    """By the CUDA runtime that torch has loaded; ctypes lets go of the interpreter lock meanwhile."""

    def __init__(self, maps: Path = Path("/proc/self/maps")) -> None:
        self._runtime: ctypes.CDLL | None = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        found = {line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if "libcudart" in line}
        for path in sorted(found):
            try:
                self._runtime = ctypes.CDLL(path)
                break
            except OSError:
                continue  # replaced on disk since, or not a library

    def place(self, address: int, nbytes: int, node: int) -> str | None:
        """See `Pinner.place`."""
        return place_on_node(self._libc, address, nbytes, node)

    def pin(self, address: int, nbytes: int) -> str | None:
        """See `Pinner.pin`."""
        if self._runtime is None:
            return "the CUDA runtime was not found"
        code = self._runtime.cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(0))
        return None if code == 0 else self._say("cudaHostRegister", code)

    def unpin(self, address: int) -> str | None:
        """See `Pinner.unpin`."""
        if self._runtime is None:
            return "the CUDA runtime was not found"
        code = self._runtime.cudaHostUnregister(ctypes.c_void_p(address))
        return None if code == 0 else self._say("cudaHostUnregister", code)

    def _say(self, name: str, code: int) -> str:
        assert self._runtime is not None
        self._runtime.cudaGetLastError()  # else the engine's next kernel is blamed for it
        return f"{name} answers error {code}"


def place_on_node(libc: ctypes.CDLL, address: int, nbytes: int, node: int) -> str | None:
    """Fault pages in and move them to a NUMA node, as far as there is room; why not, or None.

    The DRAM tier's owner has allocated the pages already, wherever it ran. Only pages that
    this process has mapped are moved, and only while nobody else has, so: before use.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not known how on {platform.machine()}"
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    start, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    if libc.madvise(start, size, _READ_WRITE_PAGES) != 0:
        return f"madvise answers errno {ctypes.get_errno()}"
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    if libc.syscall(number, start, size, _PREFERRED, mask, ctypes.c_ulong(len(mask) * bits + 1), _MOVE) != 0:
        return f"mbind answers errno {ctypes.get_errno()}"
    return None
