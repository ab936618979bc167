"""How the files of shards that come from elsewhere are filled and checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvsnap.direct_io import write_pieces
from kvsnap.errors import CorruptChunkError
from kvsnap.namespace import Namespace
from kvsnap.shard import ShardHeader, read_header, write_shard
from kvsnap.tiers.publish import Fill

Pieces = Iterable[bytes | memoryview]


def whole_shard(
    shard_id: str,
    nbytes: int,
    pieces: Pieces,
    ns: Namespace,
    *,
    sha256: Callable[[], str] | None,
    found: Callable[[ShardHeader], None],
) -> Fill:
    """Fills in a file of `nbytes` bytes whose sha256 is `shard_id`, a shard of `ns`.

    Args:
        sha256: Gives the digest of all pieces once they have come, where the caller takes it anyway.
        found: Told the header, if all is right.
    """

    def fill(fd: int, temp: Path) -> None:
        own = hashlib.sha256()
        end = write_pieces(fd, _limited(pieces, nbytes, None if sha256 else own.update))
        digest = sha256() if sha256 else own.hexdigest()
        if end != nbytes or digest != shard_id:
            raise CorruptChunkError(
                f"shard {shard_id[:12]} is damaged: expected {nbytes} bytes with sha256 {shard_id[:12]}, "
                f"read {end} with {digest[:12]}"
            )
        found(read_header(temp, expect=ns))

    return fill


def part_of_shard(header: bytes, nbytes: int, data: Pieces) -> Fill:
    """Fills in a file of `nbytes` bytes: `header`, then `data`, which checks itself."""

    def fill(fd: int, temp: Path) -> None:
        write_shard(fd, header, [])
        end = write_pieces(fd, _limited(data, nbytes - len(header), None), len(header))
        if end != nbytes:
            raise CorruptChunkError(f"a part of a shard has {end} bytes, expected {nbytes}")

    return fill


def _limited(
    pieces: Pieces, nbytes: int, update: Callable[[bytes | memoryview], object] | None
) -> Iterator[bytes | memoryview]:
    """Pass `pieces` on, each to `update` first, never more than `nbytes` in all."""
    for piece in pieces:
        nbytes -= len(piece)
        if nbytes < 0:
            raise CorruptChunkError(f"a shard is {-nbytes} bytes or more longer than announced")
        if update is not None:
            update(piece)
        yield piece
