"""Shards: one immutable safetensors file with many chunks. How they are written, and the strict reader.

    8 bytes     N, u64 little-endian
    N bytes     JSON header, padded with spaces so that 8+N is a multiple of 4096
    data        per chunk, per slice: the tensor `<key hex>.<slice>`, then zeros up to a multiple of 4096 (`….pad`, U8)

`__metadata__` holds one key, `kvsnap`, whose value is canonical JSON (docs/format.md). A chunk's range is contiguous
and aligned, so that one read moves it and O_DIRECT works. The reader trusts nothing: what isn't right is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import xxhash

from kvsnap.direct_io import ALIGN, aligned_buffer, open_read, padded, write_stream
from kvsnap.errors import CorruptChunkError, IncompatibleError, StorageError
from kvsnap.keys import ChunkKey
from kvsnap.namespace import Namespace
from kvsnap.shard_fields import CODEC_RAW, RowCheck, parse_metadata, render_metadata, render_row
from kvsnap.shard_tensors import GeometryTensors, HeaderTensors, Tensors, check_tensors, load_strict

MAX_HEADER_BYTES = 32 << 20
"""Longest header that a reader takes; checked before anything is allocated for it, for the file may be a stranger's."""
MAX_CHUNKS = 512
"""Most chunks in a shard."""
TARGET_BYTES = 128 << 20
"""Size at which a writer publishes."""

FIRST_READ = 64 << 10
"""Bytes that a reader asks for at once; holds most headers."""
_PREFIX = '{"__metadata__":{"kvsnap":"'


class Chunk(Protocol):
    """What a header says about a chunk; `ChunkEntry` and `ChunkToWrite` are such."""

    @property
    def key(self) -> ChunkKey: ...
    @property
    def parent(self) -> ChunkKey: ...
    @property
    def depth(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def xxh3(self) -> bytes: ...
    @property
    def block_keys(self) -> bytes: ...


class ChunkEntry(NamedTuple):
    """One chunk of a shard."""

    key: ChunkKey
    parent: ChunkKey
    """Key of the chunk before it; the root at depth 0."""
    depth: int
    """Number of ancestors."""
    tokens: int
    """Tokens that it holds: whole blocks, at most `chunk_tokens`."""
    xxh3: bytes
    """XXH3-128 digest, 16 bytes, of the chunk's whole range, padding included."""
    block_keys: bytes
    """Its block keys, 16 bytes each, one per block."""
    offset: int
    """Where its range starts in the file, in bytes; a multiple of 4096."""
    nbytes: int
    """Length of its range, in bytes; a multiple of 4096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardHeader:
    """What a shard's header says, checked."""

    format: int
    identity: str
    layout: str
    chunk_tokens: int
    key_scheme: str
    codec: str
    scope: str
    """Restrictions that all its chunks carry; empty is plain."""
    chunks: tuple[ChunkEntry, ...]
    """In file order; parents before children."""
    data_start: int
    """8+N, in bytes."""
    file_bytes: int


def checksum(views: Iterable[memoryview]) -> bytes:
    """XXH3-128 digest (16 bytes) over the bytes of all `views`, in order. Releases the GIL for large ones."""
    state = xxhash.xxh3_128()
    for view in views:
        state.update(view)
    return state.digest()


def encode_header(ns: Namespace, scope: str, chunks: Sequence[Chunk]) -> tuple[bytes, tuple[ChunkEntry, ...]]:
    """The first 8+N bytes of a shard with `chunks` in this order, and its entries. Deterministic.

    Raises:
        CorruptChunkError: the reader would refuse it (a parent after its child, wrong block keys, …).
    """
    tensors = _prescribed(ns)
    hexes = [(c.key.hex(), c.parent.hex(), c.depth, c.tokens, c.xxh3.hex(), c.block_keys.hex()) for c in chunks]
    body = render_metadata(ns.hashed_fields(), scope, ",".join(render_row(*row) for row in hexes))
    offset, parts = 0, []
    for row in hexes:
        text, offset = tensors.render(row[0], row[3], offset)
        parts.append(text)
    escaped = body.replace('"', '\\"')
    text = f'{_PREFIX}{escaped}"}},{",".join(parts)}}}'
    data = text.encode("ascii")
    length = padded(8 + len(data)) - 8
    header = length.to_bytes(8, "little") + data.ljust(length)
    return header, decode_header(header, len(header) + offset, ns).chunks


def read_header(path: Path, *, expect: Namespace | None = None) -> ShardHeader:
    """Read and check the header of the shard at `path`; see `decode_header`.

    Raises:
        CorruptChunkError: the header, or the length of the file, isn't exactly right; says what.
        IncompatibleError: another namespace, format or codec.
        StorageError: vanished, a symbolic link, not a file, no permission, an I/O error.
    """
    fd = open_read(path, direct=False)
    try:
        return read_open_header(fd, expect)
    except CorruptChunkError as error:
        raise CorruptChunkError(f"shard {path.name} is damaged: {error}") from None
    except IncompatibleError as error:
        raise IncompatibleError(f"shard {path.name} {error}", error.fields) from None
    except StorageError as error:
        raise StorageError(f"shard {path.name} {error}") from error
    finally:
        os.close(fd)


def read_open_header(fd: int, expect: Namespace | None) -> ShardHeader:
    """`read_header` of an open file; messages start with what is wrong, since the caller knows the name."""
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise StorageError("is not a regular file")
        head = os.pread(fd, min(FIRST_READ, found.st_size), 0)
        length = header_length(head, found.st_size)
        while len(head) < length:
            more = os.pread(fd, length - len(head), len(head))
            if not more:
                raise CorruptChunkError(f"it ends at byte {len(head)}, inside its header")
            head += more
    except OSError as error:
        what = "is a directory" if error.errno == errno.EISDIR else f"can't be read: {error.strerror or error}"
        raise StorageError(what) from error
    return decode_header(head[:length], found.st_size, expect)


def write_shard(fd: int, header: bytes, chunks: Iterable[Sequence[memoryview]]) -> int:
    """Write `header` (of `encode_header`) and the views of each chunk from offset 0; returns the bytes written.

    Streams: holds nothing but the header and a batch of the given views. `fd` may have O_DIRECT; aligned views are then
    written from where they are. Not durable before an fsync. Raises OSError.
    """
    first = aligned_buffer(len(header))
    first[:] = header

    def parts() -> Iterable[Sequence[memoryview]]:
        yield [first]
        yield from chunks

    return write_stream(fd, parts())


def header_length(start: bytes | bytearray, file_bytes: int) -> int:
    """8+N of a shard by its first 8 bytes, refused before anything is allocated for it.

    Raises:
        CorruptChunkError: longer than any header, or than the file, or not where data can start.
    """
    if len(start) < 8:
        raise CorruptChunkError(f"it has {file_bytes} bytes, expected at least 8")
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CorruptChunkError(f"header length {length}, expected at most {MAX_HEADER_BYTES}")
    if 8 + length > file_bytes:
        raise CorruptChunkError(f"header length {length}, but it has {file_bytes} bytes in all")
    if (8 + length) % ALIGN:
        raise CorruptChunkError(f"data starts at byte {8 + length}, expected a multiple of {ALIGN}")
    return 8 + length


def decode_header(head: bytes | bytearray, file_bytes: int, expect: Namespace | None) -> ShardHeader:
    """Check a header, given the first `header_length` bytes of a file of `file_bytes`; the data is not looked at.

    With `expect`, the shard must be of this namespace and its tensors exactly as the layout says; without, they must
    agree with each other.

    Raises:
        CorruptChunkError: the header, or the length of the file, isn't exactly right; says what, not where.
        IncompatibleError: another namespace, format or codec.
    """
    try:
        return _parse(head, file_bytes, expect)
    except IncompatibleError as error:
        raise IncompatibleError(f"is not of this namespace: {error}", error.fields) from None
    except (ValueError, RecursionError) as error:
        raise CorruptChunkError(f"its header is not valid JSON: {error}") from None


def _parse(head: bytes | bytearray, file_bytes: int, expect: Namespace | None) -> ShardHeader:
    text = head[8:].rstrip(b" ").decode("ascii")
    escaped, rest = _split(text)
    meta = parse_metadata(escaped, None if expect is None else expect.hashed_fields())
    if not 0 < len(meta.rows) <= MAX_CHUNKS:
        raise CorruptChunkError(f"it has {len(meta.rows)} chunks, expected 1 to {MAX_CHUNKS}")
    tensors: Tensors = HeaderTensors(load_strict(text)) if expect is None else _prescribed(expect)

    data_start, offset = len(head), 0
    check = RowCheck(meta.fields["chunk_tokens"])
    entries, parts = [], []
    for row in meta.rows:
        depth, tokens = int(row[1]), int(row[4])
        key, parent, xxh3, block_keys = check.add(row, depth, tokens, tensors.blocks(row[2], tokens))
        part, end = tensors.render(row[2], tokens, offset)
        parts.append(part)
        start, nbytes = data_start + offset, end - offset
        entries.append(ChunkEntry(ChunkKey(key), ChunkKey(parent), depth, tokens, xxh3, block_keys, start, nbytes))
        offset = end
    check.finish()
    if rest != f'"}},{",".join(parts)}}}':
        check_tensors(load_strict(text), load_strict(f"{{{','.join(parts)}}}"))
    if data_start + offset != file_bytes:
        raise CorruptChunkError(f"it has {file_bytes} bytes, expected {data_start + offset}")
    return ShardHeader(
        **meta.fields,
        codec=CODEC_RAW,
        scope=meta.scope,
        chunks=tuple(entries),
        data_start=data_start,
        file_bytes=file_bytes,
    )


_last: tuple[Namespace, GeometryTensors] | None = None


def _prescribed(ns: Namespace) -> GeometryTensors:
    """Kept for the namespace seen last: its prepared texts are what makes a scan fast."""
    global _last
    last = _last
    if last is None or last[0] is not ns:
        last = _last = (ns, GeometryTensors(ns.geometry))
    return last[1]


def _split(text: str) -> tuple[str, str]:
    """The metadata value with its escapes, and what follows it; the latter is "" where the writer was another one."""
    end = text.find('}"', text.find(r"\"scope\":", len(_PREFIX)))  # unescaped quotes end the value
    if text.startswith(_PREFIX) and end > 0:
        return text[len(_PREFIX) : end + 1], text[end + 1 :]
    outer = load_strict(text)
    metadata: Any = outer.get("__metadata__") if isinstance(outer, dict) else None
    if not isinstance(metadata, dict) or list(metadata) != ["kvsnap"] or not isinstance(metadata["kvsnap"], str):
        raise CorruptChunkError("its __metadata__ is not exactly one string under the key kvsnap")
    if "\\" in metadata["kvsnap"]:
        raise CorruptChunkError("its metadata is not canonical JSON")
    return metadata["kvsnap"].replace('"', '\\"'), ""
