"""What a verification found, and how deep it looked."""

from __future__ import annotations

import math
import random
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvsnap.errors import ConfigError
from kvsnap.shard import ChunkEntry
from kvsnap.storage import Reader
from kvsnap.transfer import PIECE_BYTES, RangeDigests, new_hashes

Depth = Literal["quick", "default", "sample", "read-data"]
"""The ladder: existence and sizes; also headers, and that all agree; also some chunks; also every byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    kind: str
    """`missing`, `damaged`, `mismatch`, `unreadable` or `untrusted`."""
    object: str
    """Name in the repository, or path, of what it concerns."""
    chunk: str | None
    """Key of the chunk that it concerns, 64 hex, if it is only one."""
    message: str


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What a verification found. Good if there are no problems."""

    subject: str
    """The snapshot's id, or the directory."""
    depth: Depth
    seed: int | None = None
    """What chose the chunks of a sample: the same seed chooses the same."""
    signed_by: str | None = None
    """Name of the trusted key that signed it, where a signature was asked for."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is unusual and harmless: shards that no snapshot names, chunks without a full chain."""
    num_shards: int = 0
    """Shards looked at."""
    num_chunks: int = 0
    """Chunks looked at; with `quick` those that the manifest gives."""
    read_chunks: int = 0
    """Chunks whose bytes were read and compared."""
    read_bytes: int = 0
    """Bytes of shards' data read."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def add(self, kind: str, object_name: str, message: str, chunk: bytes | None = None) -> None:
        """Note a problem."""
        key = None if chunk is None else chunk.hex()
        self.problems.append(Problem(kind=kind, object=object_name, chunk=key, message=message))

    def part(self) -> VerifyReport:
        """An empty report of the same kind, for one of several threads; see `join`."""
        return VerifyReport(subject=self.subject, depth=self.depth)

    def join(self, part: VerifyReport) -> None:
        """Add what a thread found."""
        self.problems += part.problems
        self.notes += part.notes
        self.num_shards += part.num_shards
        self.num_chunks += part.num_chunks
        self.read_chunks += part.read_chunks
        self.read_bytes += part.read_bytes


def choose_depth(*, quick: bool, sample: float | None, read_data: bool) -> Depth:
    """The step of the ladder that somebody asked for.

    Raises:
        ConfigError: more than one; a share of chunks that is none.
    """
    if quick + (sample is not None) + read_data > 1:
        raise ConfigError("quick, sample and read_data exclude each other; choose one")
    if sample is not None and not 0 < sample <= 1:
        raise ConfigError(f"sample is {sample}, expected a share above 0 and up to 1")
    return "quick" if quick else "read-data" if read_data else "default" if sample is None else "sample"


def choose_sample(num_chunks: int, share: float, seed: int | None) -> tuple[set[int], int]:
    """At least one of `num_chunks`, if there is any, by its number; and the seed that chose."""
    used = secrets.randbits(32) if seed is None else seed
    count = min(math.ceil(num_chunks * share), num_chunks)
    return set(random.Random(used).sample(range(num_chunks), count)), used


def read_digests(reader: Reader, nbytes: int) -> RangeDigests:
    """Digests of the next `nbytes` bytes, or of what there is of them."""
    xxh3, blake3 = new_hashes()
    buffer = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
    while nbytes and (found := reader.readinto(buffer[:nbytes])):
        xxh3.update(buffer[:found])
        blake3.update(buffer[:found])
        nbytes -= found
    return RangeDigests(xxh3.digest(), blake3.digest())


def compare_chunks(
    name: str, entries: Sequence[ChunkEntry], found: Sequence[RangeDigests], report: VerifyReport
) -> None:
    """Compare what was read of the shard `name` with what its header says."""
    for entry, digests in zip(entries, found, strict=False):
        if digests.xxh3 != entry.xxh3:
            message = (
                f"shard {name} is damaged in chunk {entry.key.hex()[:12]}: expected xxh3 {entry.xxh3.hex()[:12]}, "
                f"read {digests.xxh3.hex()[:12]}"
            )
            report.add("damaged", name, message, entry.key)
    for entry in entries[len(found) :]:
        message = f"shard {name} is damaged in chunk {entry.key.hex()[:12]}: the file ends before the chunk does"
        report.add("damaged", name, message, entry.key)
