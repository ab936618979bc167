"""Pinning is bounded and never in the way; NUMA nodes are found, or nothing is moved."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsnap_connector.cuda_streams import numa_node_of_pci
from kvsnap_connector.pinning import CudaPinner, Pinned, pin_region, place_on_node

SLOT = 1 << 20


class FakePinner:
    """Answers as told, and remembers."""

    def __init__(self, *, fails_after: int = 1000, cannot_place: str | None = None) -> None:
        self.pinned: list[tuple[int, int]] = []
        self.placed: list[tuple[int, int, int]] = []
        self.fails_after = fails_after
        self.cannot_place = cannot_place

    def place(self, address: int, nbytes: int, node: int) -> str | None:
        self.placed.append((address, nbytes, node))
        return self.cannot_place

    def pin(self, address: int, nbytes: int) -> str | None:
        if len(self.pinned) == self.fails_after:
            return "cudaHostRegister answers error 2"
        self.pinned.append((address, nbytes))
        return None

    def unpin(self, address: int) -> str | None:
        return None


def run(pinner: FakePinner, *, max_bytes: int = 1 << 40, node: int | None = None, seconds: float = 0.0) -> Pinned:
    ticks: Iterator[float] = iter(index * seconds for index in range(10000))
    return pin_region(
        pinner,
        0x1000,
        slot_bytes=SLOT,
        num_slots=10,
        node=node,
        max_bytes=max_bytes,
        max_seconds=5.0,
        piece_bytes=4 * SLOT - 1,
        clock=lambda: next(ticks),
    )


def test_all_is_pinned_in_pieces_that_end_between_slots() -> None:
    """A copy across two pinned ranges is an error of the device."""
    pinner = FakePinner()

    pinned = run(pinner)

    assert pinned.num_slots == 10
    assert [nbytes for _, nbytes in pinner.pinned] == [3 * SLOT, 3 * SLOT, 3 * SLOT, SLOT]
    assert [start for start, _ in pinner.pinned] == list(pinned.addresses)
    assert pinned.addresses[1] == 0x1000 + 3 * SLOT
    assert pinned.line(2, 10 * SLOT) == "rank 2: pinned 10 of 10 MiB in 0.0 s"


def test_no_more_bytes_than_allowed() -> None:
    """Invariant 7"""
    pinner = FakePinner()

    pinned = run(pinner, max_bytes=5 * SLOT + 17)

    assert pinned.num_slots == 5
    assert "the rest stays pageable, which works and is slower (no more than 5 MiB are pinned)" in pinned.line(0, 0)


def test_no_more_seconds_than_allowed() -> None:
    """Invariant 7: the engine isn't ready before."""
    pinned = run(FakePinner(), seconds=2.0)

    assert 0 < pinned.num_slots < 10
    assert pinned.why_not_all == "it takes longer than 5 s"


def test_a_refusal_ends_it_and_keeps_what_there_is() -> None:
    pinned = run(FakePinner(fails_after=1))

    assert pinned.num_slots == 3
    assert pinned.why_not_all == "cudaHostRegister answers error 2"


def test_pages_are_placed_before_they_are_pinned_and_only_once_if_that_fails() -> None:
    good, bad = FakePinner(), FakePinner(cannot_place="mbind answers errno 1")

    run(good, node=1)
    pinned = run(bad, node=1)

    assert [(start, nbytes) for start, nbytes, _ in good.placed] == good.pinned
    assert len(bad.placed) == 1
    assert pinned.num_slots == 10
    assert "not on the GPU's NUMA node (mbind answers errno 1)" in pinned.line(0, 0)


def test_no_cuda_runtime_is_a_reason_and_no_error(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 0 08:01 1 /usr/lib/libc.so.6\n")
    pinner = CudaPinner(maps)

    assert pinner.pin(0x1000, 4096) == "the CUDA runtime was not found"
    assert pinner.unpin(0x1000) == "the CUDA runtime was not found"


def test_placing_answers_and_changes_no_byte() -> None:
    """Where the sandbox forbids `mbind` it says so; where not, the pages are as they were."""
    with mmap.mmap(-1, 1 << 20) as memory:
        memory[:4] = b"kept"
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

        reason = place_on_node(ctypes.CDLL(None, use_errno=True), address, 1 << 20, 0)

        assert reason is None or "errno" in reason
        assert memory[:4] == b"kept"


@pytest.mark.parametrize(("nodes", "text", "found"), [(2, "1\n", 1), (2, "-1\n", None), (1, "0\n", None)])
def test_the_gpus_node_is_read_from_the_system(tmp_path: Path, nodes: int, text: str, found: int | None) -> None:
    device = tmp_path / "sys/bus/pci/devices/0000:3b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(text)
    for node in range(nodes):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)

    assert numa_node_of_pci("0000:3b:00.0", tmp_path) == found
    assert numa_node_of_pci("0000:ff:00.0", tmp_path) is None
