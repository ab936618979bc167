"""Pinning is bounded and never in the way; NUMA nodes are found, or nothing is moved."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

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


@pytest.mark.parametrize(
    ("start", "slot_bytes", "counts"),
    [(0, 0x5000, [16, 16, 8]), (0x6000, 0x5000, [2, 16, 16, 6]), (0x1000, 0x10000, [40]), (0, 0x8000, [8] * 5)],
    ids=["aligned", "another start", "no slot ends with a page", "half pages"],
)
def test_no_page_is_in_two_pieces(start: int, slot_bytes: int, counts: list[int]) -> None:
    """Kernels with 64 KiB pages (Grace): CUDA refuses a range whose first page is pinned already."""
    pinner = FakePinner()

    pinned = pin_region(
        pinner,
        start,
        slot_bytes=slot_bytes,
        num_slots=40,
        node=None,
        max_bytes=1 << 40,
        piece_bytes=8 * slot_bytes if slot_bytes == 0x8000 else slot_bytes,
        page_bytes=1 << 16,
    )

    assert pinned.num_slots == 40
    assert [nbytes // slot_bytes for _, nbytes in pinner.pinned] == counts
    assert [at for at, _ in pinner.pinned] == [start + slot_bytes * sum(counts[:i]) for i in range(len(counts))]


def test_one_piece_is_bounded_too() -> None:
    """Invariant 7: the clock is not asked while a piece is pinned."""
    pinner = FakePinner()

    pin_region(
        pinner,
        0x1000,
        slot_bytes=1 << 30,
        num_slots=1000,
        node=None,
        max_bytes=1 << 40,
        max_seconds=50,
        page_bytes=1 << 16,
    )

    assert pinner.pinned[0] == (0x1000, 50 << 30)


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


def test_a_runtime_that_does_not_load_is_a_reason_and_no_error(tmp_path: Path) -> None:
    """Pinning is a favour to speed: a library that was replaced under the server doesn't turn kvsnap off."""
    broken = tmp_path / "a folder" / "libcudart.so.12"
    broken.parent.mkdir()
    broken.write_bytes(b"no library")
    maps = tmp_path / "maps"
    maps.write_text(
        f"7f00-7f01 r-xp 00000000 08:01 1                          {broken}\n"
        "7f02-7f03 r-xp 00000000 08:01 2                          /gone/libcudart.so.13 (deleted)\n"
    )

    assert CudaPinner(maps).pin(0x1000, 4096) == "the CUDA runtime was not found"


class FakeRuntime:
    """libcudart, as far as it is used: answers with a code, and keeps it as its last error."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.last_error = 0
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def _answer(self, name: str, *args: Any) -> int:
        self.calls.append((name, tuple(arg.value for arg in args)))
        self.last_error = self.code
        return self.code

    def cudaHostRegister(self, *args: Any) -> int:
        return self._answer("cudaHostRegister", *args)

    def cudaHostUnregister(self, *args: Any) -> int:
        return self._answer("cudaHostUnregister", *args)

    def cudaGetLastError(self) -> int:
        code, self.last_error = self.last_error, 0
        return code


@pytest.mark.parametrize("code", [0, 2, 712])
def test_what_cuda_answers_is_read_and_cleared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    """An error that is left behind ends the engine: its next kernel launch is blamed for it."""
    (tmp_path / "maps").write_text("")
    pinner, runtime = CudaPinner(tmp_path / "maps"), FakeRuntime(code)
    monkeypatch.setattr(pinner, "_runtime", runtime)

    pinned, unpinned = pinner.pin(0x7F12_3456_7000, 5 << 30), pinner.unpin(0x7F12_3456_7000)

    assert pinned == (f"cudaHostRegister answers error {code}" if code else None)
    assert unpinned == (f"cudaHostUnregister answers error {code}" if code else None)
    assert runtime.last_error == 0
    assert runtime.calls == [
        ("cudaHostRegister", (0x7F12_3456_7000, 5 << 30, 0)),
        ("cudaHostUnregister", (0x7F12_3456_7000,)),
    ]


class FakeLibc:
    """Notes what of the memory it is asked for."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def madvise(self, start: Any, size: Any, advice: int) -> int:
        self.ranges.append((start.value, size.value))
        return 0

    def syscall(self, number: int, start: Any, size: Any, mode: int, mask: Any, maxnode: Any, flags: int) -> int:
        self.ranges.append((start.value, size.value))
        assert mask[1] == 1 << 6
        assert maxnode.value == 129
        return 0


def test_whole_pages_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses an address inside a page; slots begin at multiples of 4096, pages may be larger."""
    monkeypatch.setattr("kvsnap_connector.pinning.mmap.PAGESIZE", 1 << 16)
    libc = FakeLibc()

    assert place_on_node(cast("ctypes.CDLL", libc), 0x7F00_0001_3000, 0x1_0000, 70) is None
    assert libc.ranges == [(0x7F00_0001_0000, 0x2_0000)] * 2


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
