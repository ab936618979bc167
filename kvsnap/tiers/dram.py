"""The DRAM tier: hot chunks in a shared-memory file that outlives its engine.

`DramTier` is the owner's side (scheduler process): it alone changes slot records.
`DramRegion` is one rank's side: it copies bytes and writes completion words.
Neither has a policy; which chunk goes where is `cache.py`'s business.

Invariants 1 and 8 rest on one order of writes. Before any byte of a slot changes, its
record leaves `valid` and its generation goes up; it becomes `valid` again only when
every rank has written that generation as its completion word.
"""

from __future__ import annotations

import logging
import os
import secrets
import struct
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvsnap.errors import CorruptChunkError, IncompatibleError, KvsnapError, StorageError
from kvsnap.keys import ChunkKey
from kvsnap.layout import Geometry
from kvsnap.runtime import process_start_time
from kvsnap.tiers import dram_file as f
from kvsnap.tiers.dram_lock import Claim, base_name, claim, hold_workers_lock, remove_for_room

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierInfo:
    """What a worker needs to map the tier."""

    path: str
    nonce: str
    """Hex; a file that another engine took over meanwhile has another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """A chunk found in a slot after an attach. Not yet checked against its bytes."""

    slot: int
    generation: int
    key: ChunkKey
    parent: ChunkKey
    depth: int
    tokens: int
    scope: str
    block_keys: bytes
    xxh3: bytes
    hits: int
    last_use: float


class DramTier:
    """The owner's side of the DRAM tier.

    Create it with `open` (a file that survives) or `anonymous` (memory that doesn't).
    """

    def __init__(self, mapping: f.DramMapping, geometry: Geometry, held: Claim | int, path: str) -> None:
        self._map = mapping
        self._geometry = geometry
        self._held = held
        self.path = path
        self.messages: list[str] = []
        self.found: list[SlotRecord] = []
        """Chunks of the last owner, to be taken over or freed by the cache."""
        self._seq = 0
        self.epoch = 1
        self.nonce = secrets.token_bytes(16)

    @classmethod
    def open(
        cls, dram_dir: Path, cache_dir: Path, namespace_id: str, geometry: Geometry, *, budget_bytes: int, ranks: int
    ) -> DramTier:
        """Attach the file that the last engine left, or make a new one, and own it.

        The size is reserved now, so that a small `/dev/shm` gives a smaller tier and
        never a SIGBUS later.

        Raises:
            StorageError: no room for even one chunk, or the directory can't be written.
        """
        held = claim(dram_dir, base_name(cache_dir, namespace_id))
        try:
            tier = cls._take(held, namespace_id, geometry, budget_bytes, ranks)
        except BaseException:
            held.release()
            raise
        tier.messages[:0] = held.messages
        held.admit_workers()
        return tier

    @classmethod
    def anonymous(cls, namespace_id: str, geometry: Geometry, *, budget_bytes: int, ranks: int) -> DramTier:
        """A tier in memory that goes with this process; workers open it through `/proc`."""
        shape = _shape(namespace_id, geometry, budget_bytes, ranks)
        fd = os.memfd_create("kvsnap-dram", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, shape.file_bytes)
        except OSError as error:
            os.close(fd)
            raise StorageError(f"no memory for a DRAM tier of {shape.file_bytes} bytes: {error}") from error
        os.pwrite(fd, shape.header(), 0)
        tier = cls(f.DramMapping(fd, shape), geometry, fd, f"/proc/{os.getpid()}/fd/{fd}")
        tier._write_owner()
        return tier

    @classmethod
    def _take(cls, held: Claim, namespace_id: str, geometry: Geometry, budget_bytes: int, ranks: int) -> DramTier:
        available = _available(held)
        messages = []
        if budget_bytes > available:
            own_base = held.path.name.rpartition("-")[0]
            removed = remove_for_room(held.path.parent, budget_bytes - available, own_base)
            messages += [
                f"removed {gone.path} to make room for this DRAM tier: nobody owned it, {gone.chunks} chunks, "
                f"{gone.bytes} bytes, last used {time.strftime('%Y-%m-%d %H:%M', time.localtime(gone.last_use))}"
                for gone in removed
            ]
            available = _available(held)
        old = _read_old(held.fd)
        is_short = budget_bytes > available
        if is_short:
            messages.append(
                f"{held.path.parent} has {available} bytes free, dram asks for {budget_bytes}: smaller tier"
            )
            budget_bytes = available
        shape = _shape(namespace_id, geometry, budget_bytes, ranks)
        if is_short and old is not None and _is_nearly(old[0], shape):
            shape = old[0]  # what others use of the memory varies; hot chunks are worth more than a few slots
        if old is None or old[0] != shape or old[1] is None:
            if os.fstat(held.fd).st_size:
                why = "had another size or geometry" if old and old[0] != shape else "is damaged or was never finished"
                messages.append(f"{held.path} {why} and is replaced, its chunks are lost")
            os.ftruncate(held.fd, 0)
        try:
            if not _has_all_pages(held.fd, shape.file_bytes):
                os.posix_fallocate(held.fd, 0, shape.file_bytes)
        except OSError as error:
            os.ftruncate(held.fd, 0)
            raise StorageError(f"no room for a DRAM tier of {shape.file_bytes} bytes: {error}") from error
        os.pwrite(held.fd, shape.header(), 0)
        tier = cls(f.DramMapping(held.fd, shape), geometry, held, str(held.path))
        tier.messages = messages
        previous = tier._map.read_owner()
        if previous is not None:
            tier._seq, tier.epoch = previous[0], previous[1].epoch
        # Completion words of a past life must not be taken for ours. Generations only grow,
        # and nobody else maps the file now: both locks are ours.
        tier._map.loads[:] = 0
        tier._map.done[:] = 0
        tier._write_owner()
        tier.found = list(tier._records())
        return tier

    # -- what it is ------------------------------------------------------------------

    @property
    def num_slots(self) -> int:
        """Chunks that fit."""
        return self._map.shape.num_slots

    @property
    def file_bytes(self) -> int:
        """Real size of the tier, tables included."""
        return self._map.shape.file_bytes

    @property
    def info(self) -> TierInfo:
        """What the workers are told."""
        return TierInfo(path=self.path, nonce=self.nonce.hex())

    def views(self, slot: int, tokens: int) -> list[memoryview]:
        """The bytes of a chunk of `tokens` tokens in `slot`: one 4096-aligned view a slice, padding included."""
        blocks = tokens // self._geometry.layout.block_tokens
        return [self._map.area(i, slot, self._geometry.padded(i, blocks)) for i in range(self._geometry.num_slices)]

    # -- the life of a slot ----------------------------------------------------------

    def begin(self, slot: int) -> int:
        """Take the slot out of `valid` and raise its generation; returns the generation."""
        self._map.state[slot] = f.EMPTY
        generation = int(self._map.generation[slot]) + 1
        self._map.generation[slot] = generation
        self._map.state[slot] = f.FILLING
        return generation

    def commit(self, record: SlotRecord) -> None:
        """Write the record and make the slot `valid`. All ranks must have finished.

        An empty `xxh3` means not yet known; see `set_checksum`.
        """
        scope = record.scope.encode()
        if len(scope) > f.SCOPE_MAX:
            raise KvsnapError(f"scope {record.scope!r} has {len(scope)} bytes, at most {f.SCOPE_MAX} fit")
        view = self._map.record(record.slot)
        f._FIXED.pack_into(
            view,
            f.EPOCH,
            self.epoch,
            record.tokens,
            record.depth,
            len(scope),
            f.HAS_CHECKSUM if record.xxh3 else 0,
            record.key,
            record.parent,
            record.xxh3,
            scope,
        )
        size = 16 * self._map.shape.blocks_per_chunk
        view[f.BLOCK_KEYS : f.BLOCK_KEYS + size] = record.block_keys.ljust(size, b"\0")
        self._seal(view)
        self.touch(record.slot, record.hits, record.last_use)
        self._map.state[record.slot] = f.VALID

    def set_checksum(self, slot: int, xxh3: bytes) -> None:
        """Add the checksum of a valid slot's bytes to its record."""
        view = self._map.record(slot)
        view[f.XXH3 : f.XXH3 + 16] = xxh3
        struct.pack_into("<I", view, f.FLAGS, f.HAS_CHECKSUM)
        self._seal(view)

    def free(self, slot: int) -> None:
        """The slot holds nothing any more. Its bytes and generation stay until it is taken again."""
        self._map.state[slot] = f.EMPTY

    def touch(self, slot: int, hits: int, last_use: float) -> None:
        """Record use, for the next owner's policy."""
        self._map.hits[slot] = min(hits, 0xFFFFFFFF)
        self._map.last_use[slot] = last_use

    def fill_state(self, slot: int, generation: int) -> bool | None:
        """True: every rank finished this generation. False: all are through, one failed. None: not yet."""
        words = self._map.done[:, slot].tolist()
        failed = generation | f.FAILED_BIT
        if all(word == generation for word in words):
            return True
        return False if all(word in (generation, failed) for word in words) else None

    def loads_done(self) -> int:
        """All loads of plans up to this number are over on every rank."""
        return int(self._map.loads.min())

    def bump_epoch(self) -> int:
        """Make every record of this and earlier epochs void, also for a later owner."""
        self.epoch += 1
        self._write_owner()
        return self.epoch

    def note_use(self) -> None:
        """Let the file's time of change say that it is in use: stores through a mapping don't."""
        if isinstance(self._held, Claim):
            os.utime(self._held.fd)

    def prefault(self, stop: Sequence[bool] = ()) -> None:
        """Fault the data in; for a background thread. `stop` non-empty ends it."""
        f.prefault(self._map, self._map.shape.data_offset, self.file_bytes, stop)

    def close(self) -> None:
        """Give up ownership; the file and its chunks stay for the next engine.

        While a view is still out (a read that hangs), the mapping stays and the lock with
        it: nobody else may own a file that this process can still write to.
        """
        self._map.close()
        if isinstance(self._held, Claim):
            self._held.release()
        else:
            os.close(self._held)

    # -- inside ----------------------------------------------------------------------

    def _seal(self, view: memoryview) -> None:
        struct.pack_into("<I", view, f.crc_offset(self._map.shape), f.record_crc(view, self._map.shape))

    def _write_owner(self) -> None:
        self._seq += 1
        owner = f.Owner(epoch=self.epoch, pid=os.getpid(), start=process_start_time(os.getpid()) or 0, nonce=self.nonce)
        start = f.owner_copy_offset(self._seq)
        copy = f.encode_owner(owner, self._seq)
        self._map.buffer[start : start + len(copy)] = copy

    def _records(self) -> Iterator[SlotRecord]:
        shape = self._map.shape
        for slot in np.flatnonzero(self._map.state != f.EMPTY).tolist():
            view = self._map.record(slot)
            epoch, tokens, depth, scope_bytes, flags, key, parent, xxh3, scope = f._FIXED.unpack_from(view, f.EPOCH)
            sealed = struct.unpack_from("<I", view, f.crc_offset(shape))[0] == f.record_crc(view, shape)
            whole = self._map.state[slot] == f.VALID and sealed and epoch == self.epoch and flags & f.HAS_CHECKSUM
            blocks, odd = divmod(tokens, self._geometry.layout.block_tokens)
            if not whole or odd or not 0 < blocks <= shape.blocks_per_chunk or scope_bytes > f.SCOPE_MAX:
                self._map.state[slot] = f.EMPTY
                continue
            yield SlotRecord(
                slot=slot,
                generation=int(self._map.generation[slot]),
                key=ChunkKey(key),
                parent=ChunkKey(parent),
                depth=depth,
                tokens=tokens,
                scope=scope[:scope_bytes].decode(),
                block_keys=bytes(view[f.BLOCK_KEYS : f.BLOCK_KEYS + 16 * blocks]),
                xxh3=xxh3,
                hits=int(self._map.hits[slot]),
                last_use=float(self._map.last_use[slot]),
            )


class DramRegion:
    """One rank's side: the areas it fills and reads, and its completion words."""

    def __init__(self, mapping: f.DramMapping, rank: int, slice_index: int, fds: tuple[int, ...]) -> None:
        self._map = mapping
        self._rank = rank
        self._slice = slice_index
        self._fds = fds

    @classmethod
    def attach(cls, path: str, nonce: str, *, rank: int, slice_index: int) -> DramRegion:
        """Map the tier that the scheduler half made.

        Args:
            path, nonce: From `TierInfo`.
            rank: Global rank in the engine; whose completion words to write.
            slice_index: The slice that this rank loads, and stores if it is its writer.

        Raises:
            IncompatibleError: Another engine owns the file by now.
            KvsnapError: It can't be opened or is not a DRAM tier.
        """
        fds: list[int] = []
        try:
            if not path.startswith("/proc/"):
                fds.append(hold_workers_lock(Path(path)))
            fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            shape, owner = f.read_header(fds[-1])
            if owner is None or owner[1].nonce.hex() != nonce:
                raise IncompatibleError(f"the DRAM tier {path} has another owner than this engine")
            if rank >= shape.num_ranks or slice_index >= len(shape.strides):
                raise IncompatibleError(f"the DRAM tier {path} has no rank {rank} with slice {slice_index}")
            return cls(f.DramMapping(fds[-1], shape), rank, slice_index, tuple(fds))
        except OSError as error:
            _close_all(fds)
            raise StorageError(f"cannot map the DRAM tier {path}: {error}") from error
        except KvsnapError:
            _close_all(fds)
            raise

    @property
    def num_slots(self) -> int:
        """Slots of the tier."""
        return self._map.shape.num_slots

    @property
    def stride(self) -> int:
        """Bytes of this rank's area in a slot."""
        return self._map.shape.strides[self._slice]

    def area(self, slot: int) -> NDArray[np.uint8]:
        """This rank's area of the slot: uint8, `stride` bytes, 4096-aligned."""
        start = self._map.shape.region_offset(self._slice) + slot * self.stride
        return self._map.bytes[start : start + self.stride]

    def region(self) -> tuple[int, int]:
        """Address and size in bytes of all areas of this rank together (to pin or to place)."""
        start = self._map.shape.region_offset(self._slice)
        return self._map.bytes.ctypes.data + start, self.stride * self.num_slots

    def may_fill(self, slot: int, generation: int) -> bool:
        """Whether the slot waits for exactly this store."""
        return bool(self._map.generation[slot] == generation and self._map.state[slot] == f.FILLING)

    def may_read(self, slot: int, generation: int) -> bool:
        """Whether the slot still holds what the load was planned for."""
        return bool(self._map.generation[slot] == generation)

    def complete(self, slot: int, generation: int, *, ok: bool) -> None:
        """Write the completion word of a store; the last thing done for it."""
        self._map.done[self._rank, slot] = generation if ok else generation | f.FAILED_BIT

    def finish_loads(self, seq: int) -> None:
        """All loads of plans up to `seq` are over on this rank, one way or the other."""
        if seq > int(self._map.loads[self._rank]):
            self._map.loads[self._rank] = seq

    def prefault(self, stop: Sequence[bool] = ()) -> None:
        """Fault this rank's areas in; for a background thread. `stop` non-empty ends it."""
        start = self._map.shape.region_offset(self._slice)
        f.prefault(self._map, start, start + self.stride * self.num_slots, stop)

    def close(self) -> None:
        """Unmap and let go of the workers' lock; while a view is still out, not before that is gone."""
        if self._map.close():
            _close_all(self._fds)
        else:
            weakref.finalize(self._map.mm, _close_all, self._fds)
        self._fds = ()


def _available(held: Claim) -> int:
    """Bytes that the file may have: those it has, and those free beside it."""
    room = os.statvfs(held.path.parent)
    return os.fstat(held.fd).st_blocks * 512 + room.f_bavail * room.f_frsize


def _shape(namespace_id: str, geometry: Geometry, budget_bytes: int, ranks: int) -> f.DramShape:
    strides = tuple(geometry.slice_stride(i) for i in range(geometry.num_slices))
    slots = f.slots_that_fit(budget_bytes, blocks_per_chunk=geometry.blocks_per_chunk, strides=strides, num_ranks=ranks)
    if slots == 0:
        raise StorageError(
            f"a chunk has {sum(strides)} bytes, but the DRAM tier may have {budget_bytes} in all; "
            "raise dram or lower chunk_tokens"
        )
    return f.DramShape(
        num_slots=slots,
        blocks_per_chunk=geometry.blocks_per_chunk,
        strides=strides,
        num_ranks=ranks,
        namespace=bytes.fromhex(namespace_id),
    )


def _has_all_pages(fd: int, nbytes: int) -> bool:
    """Whether a file of this length has no holes: an attach needn't ask for each of a million pages again."""
    found = os.fstat(fd)
    return found.st_size == nbytes and found.st_blocks * 512 >= nbytes


def _is_nearly(old: f.DramShape, shape: f.DramShape) -> bool:
    """Whether the old tier differs only by up to a tenth fewer slots."""
    return replace(old, num_slots=shape.num_slots) == shape and 0.9 * shape.num_slots <= old.num_slots < shape.num_slots


def _read_old(fd: int) -> tuple[f.DramShape, object] | None:
    try:
        return f.read_header(fd)
    except CorruptChunkError:
        return None


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
