"""The DRAM tier's file: where everything lies in it, and who may touch it.

One file in `/dev/shm`, mapped by the scheduler process and by every worker. It
outlives them, so a restarted engine finds its hot chunks again.

```
page 0        static header: magic, version, geometry, namespace, CRC
page 1        owner records, two copies written in turn: epoch, pid, start time, nonce, CRC
words         per rank: one word of finished loads, then one completion word a slot
slot table    one fixed record a slot
data          per slice: `num_slots` areas of `stride` bytes, 4096-aligned
```

Two kinds of writers share it without a lock: the owner (slot table, owner record,
promoted data) and the workers (their completion words, the data of slots that they
were told to fill). 8-byte aligned stores are the only thing read across processes
without a checksum.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsnap.direct_io import ALIGN
from kvsnap.errors import CorruptChunkError, KvsnapError

MAGIC = b"KVSDRAM1"
VERSION = 1
PAGE = ALIGN
"""Header and owner records have one each; slot table and areas start between two."""
_HEADER = struct.Struct("<8sIIIIII32s")
_OWNER = struct.Struct("<QQQQ16s")
_OWNER_COPY = 512
_WORD = 8
_LINE = 64

# Byte offsets inside one slot record. The CRC covers everything from `generation` on,
# so that the three fields before it can change without it.
STATE, HITS, LAST_USE, GENERATION, EPOCH = 0, 4, 8, 16, 24
TOKENS, DEPTH, SCOPE_BYTES, FLAGS = 32, 36, 40, 44
KEY, PARENT, XXH3, SCOPE, BLOCK_KEYS = 48, 80, 112, 128, 224
SCOPE_MAX = BLOCK_KEYS - SCOPE
_FIXED = struct.Struct("<QIIII32s32s16s96s")  # from EPOCH on: packing zeroes first, and a generation never shrinks
HAS_CHECKSUM = 1

EMPTY, FILLING, VALID = 0, 1, 2
FAILED_BIT = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class DramShape:
    """Everything that fixes the file's size and offsets."""

    num_slots: int
    """Chunks that fit."""
    blocks_per_chunk: int
    """Block keys that a record has room for."""
    strides: tuple[int, ...]
    """Bytes of one slot in each slice's region, multiples of 4096."""
    num_ranks: int
    """Workers that write completion words."""
    namespace: bytes
    """32 raw bytes: chunks of another namespace are never read."""

    @property
    def record_bytes(self) -> int:
        """Size of one slot record."""
        return _round(BLOCK_KEYS + 16 * self.blocks_per_chunk + 4, _LINE)

    @property
    def words_offset(self) -> int:
        """Where the words of rank 0 start."""
        return 2 * PAGE

    @property
    def rank_words_bytes(self) -> int:
        """Bytes of one rank's words: a line for its loads, then a word a slot."""
        return _round(_LINE + _WORD * self.num_slots, _LINE)

    @property
    def table_offset(self) -> int:
        """Where the slot table starts."""
        return _round(self.words_offset + self.num_ranks * self.rank_words_bytes, PAGE)

    @property
    def data_offset(self) -> int:
        """Where the first slice's region starts."""
        return _round(self.table_offset + self.num_slots * self.record_bytes, PAGE)

    def region_offset(self, slice_index: int) -> int:
        """Where the region of one slice starts."""
        return self.data_offset + self.num_slots * sum(self.strides[:slice_index])

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.num_slots * sum(self.strides)

    def header(self) -> bytes:
        """Encode the static header page."""
        body = _HEADER.pack(
            MAGIC,
            VERSION,
            self.num_slots,
            self.record_bytes,
            self.blocks_per_chunk,
            self.num_ranks,
            len(self.strides),
            self.namespace,
        ) + struct.pack(f"<{len(self.strides)}Q", *self.strides)
        if len(body) > PAGE - 4:
            raise KvsnapError(f"a DRAM tier of {len(self.strides)} slices does not fit its header; use fewer ranks")
        body = body.ljust(PAGE - 4, b"\0")
        return body + struct.pack("<I", zlib.crc32(body))

    @staticmethod
    def from_header(page: bytes) -> DramShape:
        """Decode a header page; `CorruptChunkError` where it is not one of ours."""
        if len(page) != PAGE or struct.unpack("<I", page[-4:])[0] != zlib.crc32(page[:-4]):
            raise CorruptChunkError("the DRAM tier's header has a wrong checksum")
        magic, version, slots, _, blocks, ranks, slices, namespace = _HEADER.unpack_from(page)
        if magic != MAGIC or version != VERSION:
            raise CorruptChunkError(f"the DRAM tier has version {version}, this kvsnap has {VERSION}")
        strides = struct.unpack_from(f"<{slices}Q", page, _HEADER.size)
        return DramShape(
            num_slots=slots, blocks_per_chunk=blocks, strides=strides, num_ranks=ranks, namespace=namespace
        )


def slots_that_fit(
    budget_bytes: int, *, blocks_per_chunk: int, strides: Sequence[int], num_ranks: int, max_slots: int = 1 << 22
) -> int:
    """Largest number of slots whose file stays within `budget_bytes`; 0 if none does."""
    low, high = 0, max_slots
    while low < high:
        middle = (low + high + 1) // 2
        shape = DramShape(
            num_slots=middle,
            blocks_per_chunk=blocks_per_chunk,
            strides=tuple(strides),
            num_ranks=num_ranks,
            namespace=bytes(32),
        )
        if shape.file_bytes <= budget_bytes:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who owns the file, and which epoch its records must have."""

    epoch: int
    pid: int
    start: int
    nonce: bytes


def encode_owner(owner: Owner, seq: int) -> bytes:
    """One owner copy, checksummed."""
    body = _OWNER.pack(seq, owner.epoch, owner.pid, owner.start, owner.nonce)
    return (body + struct.pack("<I", zlib.crc32(body))).ljust(_OWNER_COPY, b"\0")


def decode_owner(page: bytes) -> tuple[int, Owner] | None:
    """The newer of the two good copies in an owner page as (seq, owner); None if neither is good."""
    best: tuple[int, Owner] | None = None
    for offset in (0, _OWNER_COPY):
        body = page[offset : offset + _OWNER.size]
        crc = page[offset + _OWNER.size : offset + _OWNER.size + 4]
        if len(crc) < 4 or struct.unpack("<I", crc)[0] != zlib.crc32(body):
            continue
        seq, epoch, pid, start, nonce = _OWNER.unpack(body)
        if seq and (best is None or seq > best[0]):
            best = seq, Owner(epoch=epoch, pid=pid, start=start, nonce=nonce)
    return best


def owner_copy_offset(seq: int) -> int:
    """File offset of the copy that number `seq` is written to: the older of the two."""
    return PAGE + _OWNER_COPY * (seq % 2)


class DramMapping:
    """The file mapped into this process, with numpy views of its columns.

    `state`, `hits`, `last_use`, `generation` and `epoch` are views of the slot table
    with one element a slot; an element store is one aligned machine store.
    """

    def __init__(self, fd: int, shape: DramShape) -> None:
        self.shape = shape
        self.mm = mmap.mmap(fd, shape.file_bytes)
        self.buffer = memoryview(self.mm)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.mm, dtype=np.uint8)
        self.state = self._column("<u4", STATE)
        self.hits = self._column("<u4", HITS)
        self.last_use = self._column("<f8", LAST_USE)
        self.generation = self._column("<u8", GENERATION)
        self.epoch = self._column("<u8", EPOCH)
        words = self._words()
        self.loads = words[:, 0]
        self.done = words[:, _LINE // _WORD : _LINE // _WORD + shape.num_slots]

    def _column(self, dtype: str, offset: int) -> NDArray[Any]:
        return np.ndarray(
            (self.shape.num_slots,),
            dtype=dtype,
            buffer=self.buffer,
            offset=self.shape.table_offset + offset,
            strides=(self.shape.record_bytes,),
        )

    def _words(self) -> NDArray[np.uint64]:
        columns = self.shape.rank_words_bytes // _WORD
        return np.ndarray(
            (self.shape.num_ranks, columns), dtype="<u8", buffer=self.buffer, offset=self.shape.words_offset
        )

    def record(self, slot: int) -> memoryview:
        """The slot's record."""
        start = self.shape.table_offset + slot * self.shape.record_bytes
        return self.buffer[start : start + self.shape.record_bytes]

    def area(self, slice_index: int, slot: int, nbytes: int | None = None) -> memoryview:
        """The first `nbytes` (default: all) of the slot's area in one slice's region."""
        stride = self.shape.strides[slice_index]
        start = self.shape.region_offset(slice_index) + slot * stride
        return self.buffer[start : start + (stride if nbytes is None else nbytes)]

    def read_owner(self) -> tuple[int, Owner] | None:
        """The newest good owner copy as (seq, owner)."""
        return decode_owner(bytes(self.buffer[PAGE : 2 * PAGE]))

    def close(self) -> bool:
        """Unmap; False where views handed out earlier keep the mapping alive until they are gone."""
        self.bytes = np.empty(0, dtype=np.uint8)
        self.state = self.hits = self.last_use = self.generation = self.epoch = np.empty(0)
        self.loads = self.done = np.empty(0, dtype=np.uint64)
        try:
            self.buffer.release()
            self.mm.close()
        except BufferError:
            return False  # a view is still out; the mapping goes with it
        return True


def crc_offset(shape: DramShape) -> int:
    """Where a record's CRC lies."""
    return BLOCK_KEYS + 16 * shape.blocks_per_chunk


def record_crc(record: memoryview, shape: DramShape) -> int:
    """CRC of all fields of a record but state, hits and last use."""
    return zlib.crc32(record[GENERATION : crc_offset(shape)])


_MADV_POPULATE_WRITE = 23
_PREFAULT_PIECE = 8 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def prefault(mapping: DramMapping, start: int, end: int, stop: Sequence[bool]) -> None:
    """Fault the mapping in from `start` to `end`, both page boundaries, piece by piece; `stop` non-empty ends it.

    The first touch of a shared-memory page costs ten times the copy itself, so it is
    paid ahead. ctypes lets go of the interpreter lock, which `mmap.madvise` does not.
    Does nothing where the kernel can't (before Linux 5.14).
    """
    for piece in range(start, end, _PREFAULT_PIECE):
        address = ctypes.c_void_p(mapping.bytes.ctypes.data + piece)
        size = ctypes.c_size_t(min(_PREFAULT_PIECE, end - piece))
        if stop or _libc.madvise(address, size, ctypes.c_int(_MADV_POPULATE_WRITE)) != 0:
            return
        time.sleep(0)


def read_header(fd: int) -> tuple[DramShape, tuple[int, Owner] | None]:
    """Header and owner of an open file; `CorruptChunkError` where it is not a DRAM tier."""
    shape = DramShape.from_header(os.pread(fd, PAGE, 0))
    if os.fstat(fd).st_size != shape.file_bytes:
        raise CorruptChunkError(
            f"the DRAM tier's file has {os.fstat(fd).st_size} bytes, its header says {shape.file_bytes}"
        )
    return shape, decode_owner(os.pread(fd, PAGE, PAGE))


def _round(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
