"""The catalog: one row per chunk of a snapshot, as a Parquet file.

Rows are ordered by depth, so that parents come before their children. Columns:

    key         fixed 32 bytes     the chunk's key
    parent_row  int32              row of its parent, -1 at depth 0
    depth       int32              number of ancestors
    tokens      int32              tokens that it holds
    shard       int32              position of its shard in the manifest
    offset      int64              first byte of its range in the shard's file
    nbytes      int64              length of the range, a multiple of 4096
    xxh3        fixed 16 bytes     xxh3_128 digest of the range, as in the shard's header
    blake3      fixed 32 bytes     BLAKE3 of the range: proves a ranged read
    scope       string, dictionary the shard's scope; empty for plain chunks
    hits        int64              how often it was hit; advisory
    last_use    int64              Unix time in seconds, 0 if unknown; advisory

zstd-compressed; no other column, no nulls. In memory it is columns of numpy arrays:
a snapshot may have millions of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsnap.errors import CorruptChunkError
from kvsnap.keys import ChunkKey
from kvsnap.manifest import MAX_SHARD_BYTES
from kvsnap.parquet_pages import unpacked_bytes
from kvsnap.shard_fields import SCOPE

I64 = NDArray[np.int64]
Bytes2 = NDArray[np.uint8]

_INT_TYPES = {
    "parent_row": "int32",
    "depth": "int32",
    "tokens": "int32",
    "shard": "int32",
    "offset": "int64",
    "nbytes": "int64",
    "hits": "int64",
    "last_use": "int64",
}
_BYTE_WIDTHS = {"key": 32, "xxh3": 16, "blake3": 32}
COLUMNS = (
    "key", "parent_row", "depth", "tokens", "shard", "offset", "nbytes", "xxh3", "blake3", "scope", "hits", "last_use",
)  # fmt: skip
"""Names of the columns, in their order in the file."""

MAX_ROW_BYTES = 256
MAX_SLACK_BYTES = 16 << 20
"""A catalog that unpacks to more than this, and `MAX_ROW_BYTES` for each row, is not unpacked."""
MAX_SCOPES = 100_000
_ROW_GROUP = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The chunk table, n rows. Rows lie in order of depth; arrays must not be changed."""

    key: Bytes2
    """(n, 32)"""
    parent_row: I64
    """-1 at depth 0"""
    depth: I64
    tokens: I64
    shard: I64
    """Position in the manifest's list of shards."""
    offset: I64
    """[bytes]"""
    nbytes: I64
    xxh3: Bytes2
    """(n, 16)"""
    blake3: Bytes2
    """(n, 32)"""
    scope: tuple[str, ...]
    """The different scopes."""
    scope_code: I64
    """Position in `scope`."""
    hits: I64
    last_use: I64
    """Unix time [s], 0 if unknown"""

    def __len__(self) -> int:
        return len(self.key)

    def key_of(self, row: int) -> ChunkKey:
        """The key of one row."""
        return ChunkKey(self.key[row].tobytes())

    def keys(self) -> list[ChunkKey]:
        """The keys of all rows, in order."""
        data = np.ascontiguousarray(self.key).tobytes()
        return [ChunkKey(data[at : at + 32]) for at in range(0, len(data), 32)]

    def rows_of_shards(self, num_shards: int) -> list[I64]:
        """For each shard of the manifest its rows, in order of their place in the file."""
        order = np.lexsort((self.offset, self.shard))
        bounds = np.searchsorted(self.shard[order], np.arange(num_shards + 1))
        return [order[bounds[i] : bounds[i + 1]] for i in range(num_shards)]


def encode_catalog(catalog: Catalog) -> bytes:
    """The Parquet file. The same bytes for the same table and the same version of pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {}
    for name in COLUMNS:
        if name == "scope":
            codes = pa.array(catalog.scope_code.astype(np.int32))
            columns[name] = pa.DictionaryArray.from_arrays(codes, pa.array(list(catalog.scope), pa.string()))
        elif name in _BYTE_WIDTHS:
            width = _BYTE_WIDTHS[name]
            data = pa.py_buffer(np.ascontiguousarray(getattr(catalog, name)).tobytes())
            columns[name] = pa.Array.from_buffers(pa.binary(width), len(catalog), [None, data])
        else:
            columns[name] = pa.array(getattr(catalog, name).astype(_INT_TYPES[name]))
    schema = pa.schema([pa.field(name, column.type, nullable=False) for name, column in columns.items()])
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(list(columns.values()), schema=schema),
        sink,
        compression="zstd",
        use_dictionary=["scope"],
        write_statistics=False,
        store_schema=False,
        row_group_size=_ROW_GROUP,
    )
    return bytes(sink.getvalue())


def decode_catalog(data: bytes, *, num_rows: int, shard_bytes: list[int], what: str) -> Catalog:
    """Read a catalog whose digest the caller has checked, and check that it makes sense.

    `num_rows` and `shard_bytes` (sizes of the shards, in the manifest's order) are what
    the manifest says; `what` names the catalog in messages.

    Raises:
        CorruptChunkError: a column is missing, unknown, of another type or out of range;
            a parent isn't before its child; ranges of a shard overlap or leave it.
    """
    import pyarrow as pa

    try:
        table = _read_table(data, num_rows, what)
        catalog = _from_table(table)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise CorruptChunkError(f"{what} is not a catalog: {str(error)[:200]}") from None
    _check(catalog, np.asarray(shard_bytes, np.int64), what)
    return catalog


def _read_table(data: bytes, num_rows: int, what: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # The dictionary stays one: expanded, a long scope in each of a million rows would fill the memory.
    file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=["scope"])
    if tuple(file.schema_arrow.names) != COLUMNS:
        raise CorruptChunkError(f"{what} has columns {file.schema_arrow.names}, expected {list(COLUMNS)}")
    meta = file.metadata
    if meta.num_rows != num_rows:
        raise CorruptChunkError(f"{what} has {meta.num_rows} rows, its manifest says {num_rows}")
    most = num_rows * MAX_ROW_BYTES + MAX_SLACK_BYTES
    if (unpacked := unpacked_bytes(data, meta)) > most:
        raise CorruptChunkError(f"{what} unpacks to {unpacked} bytes, at most {most} are expected of {num_rows} rows")
    return file.read()


def _from_table(table: Any) -> Catalog:
    import pyarrow as pa

    columns: dict[str, Any] = {}
    for name in COLUMNS:
        column = table.column(name)
        if column.null_count:
            raise ValueError(f"column {name} has nulls")
        if name == "scope":
            if pa.types.is_string(column.type):
                column = column.dictionary_encode()
            elif not (pa.types.is_dictionary(column.type) and pa.types.is_string(column.type.value_type)):
                raise ValueError(f"column scope has type {column.type}, expected string")
            column.validate(full=True)
            combined = column.unify_dictionaries().combine_chunks()
            if isinstance(combined, pa.ChunkedArray):  # no chunk at all
                combined = pa.array([], pa.dictionary(pa.int32(), pa.string()))
            if len(combined.dictionary) > MAX_SCOPES:
                raise ValueError(f"it has {len(combined.dictionary)} scopes, at most {MAX_SCOPES} are read")
            columns["scope"] = tuple(str(text) for text in combined.dictionary.to_pylist())
            if wrong := next((text for text in columns["scope"] if not SCOPE.fullmatch(text)), None):
                raise ValueError(f"scope {wrong[:80]!r} is none")
            columns["scope_code"] = combined.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        elif name in _BYTE_WIDTHS:
            columns[name] = _byte_column(column, name)
        else:
            if str(column.type) != _INT_TYPES[name]:
                raise ValueError(f"column {name} has type {column.type}, expected {_INT_TYPES[name]}")
            columns[name] = column.to_numpy().astype(np.int64)
    return Catalog(**columns)


def _byte_column(column: Any, name: str) -> Bytes2:
    width = _BYTE_WIDTHS[name]
    if str(column.type) != f"fixed_size_binary[{width}]":
        raise ValueError(f"column {name} has type {column.type}, expected {width} bytes")
    parts = []
    for chunk in column.chunks:
        data = np.frombuffer(chunk.buffers()[1], np.uint8)
        parts.append(data[chunk.offset * width : (chunk.offset + len(chunk)) * width])
    joined = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
    return joined.reshape(-1, width)


def _check(catalog: Catalog, shard_bytes: I64, what: str) -> None:
    rows = np.arange(len(catalog))
    parent, depth = catalog.parent_row, catalog.depth
    has_parent = (parent >= 0) & (parent < rows)
    parent_depth = np.where(has_parent, depth[np.where(has_parent, parent, 0)] if len(rows) else 0, -1)
    in_shard = (catalog.shard >= 0) & (catalog.shard < len(shard_bytes))
    ends = np.where(in_shard, shard_bytes[np.where(in_shard, catalog.shard, 0)] if len(shard_bytes) else 0, -1)
    for good, text in (
        ((parent >= -1) & (parent < rows), "its parent isn't before it"),
        (depth == parent_depth + 1, "its depth isn't its parent's plus one"),
        ((catalog.scope_code >= 0) & (catalog.scope_code < len(catalog.scope)), "its scope is unknown"),
        (catalog.tokens > 0, "it holds no token"),
        (in_shard, "its shard isn't in the manifest"),
        ((catalog.offset > 0) & (catalog.offset <= MAX_SHARD_BYTES), "its offset is out of range"),
        ((catalog.nbytes > 0) & (catalog.nbytes <= MAX_SHARD_BYTES), "its size is out of range"),
        (catalog.offset + catalog.nbytes <= ends, "its range leaves the shard"),
        (catalog.hits >= 0, "its hits are negative"),
        (catalog.last_use >= 0, "its last use is negative"),
    ):
        if not good.all():
            row = int(np.argmin(good))
            raise CorruptChunkError(f"{what}, row {row}, chunk {catalog.key_of(row).hex()[:12]}: {text}")
    order = np.lexsort((catalog.offset, catalog.shard))
    same = catalog.shard[order][1:] == catalog.shard[order][:-1]
    overlap = same & ((catalog.offset + catalog.nbytes)[order][:-1] > catalog.offset[order][1:])
    if overlap.any():
        row = int(order[int(np.argmax(overlap)) + 1])
        key = catalog.key_of(row).hex()[:12]
        raise CorruptChunkError(f"{what}, row {row}, chunk {key}: its range overlaps another")
    starts = np.sort(np.ascontiguousarray(catalog.key[:, :8]).view(np.uint64).ravel())
    if (starts[1:] == starts[:-1]).any() and len(set(catalog.keys())) != len(rows):
        raise CorruptChunkError(f"{what} names a chunk twice")
