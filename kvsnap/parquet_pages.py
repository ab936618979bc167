"""How much memory a Parquet file would take, found out before anything is unpacked.

What the file's footer says of sizes is the writer's word. The decoder believes each page's own header
instead, so the headers are read here: sizes, numbers of values, encodings. Only encodings whose output
is bounded by these are let through; one of the others makes terabytes of a kilobyte.

Page headers are Thrift structs in its compact protocol (parquet-format, `parquet.thrift`: PageHeader).
"""

from __future__ import annotations

from typing import Any

_PLAIN, _PLAIN_DICTIONARY, _RLE, _DELTA_BINARY_PACKED, _RLE_DICTIONARY, _BYTE_STREAM_SPLIT = 0, 2, 3, 5, 8, 9
_ENCODINGS = frozenset({_PLAIN, _PLAIN_DICTIONARY, _RLE, _DELTA_BINARY_PACKED, _RLE_DICTIONARY, _BYTE_STREAM_SPLIT})
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_CONTENT = {_DATA: 5, _DICTIONARY: 7, _DATA_V2: 8}
"""The field that describes a page of this kind."""
_MAX_DEPTH = 4

Struct = dict[int, Any]


def unpacked_bytes(data: bytes, metadata: Any) -> int:
    """Bytes of all pages of a file once they are unpacked. `metadata` is pyarrow's of the footer.

    Raises:
        ValueError: a page header makes no sense, or has an encoding that isn't read.
    """
    total = 0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        if not group.num_rows:  # no page is read
            continue
        for j in range(group.num_columns):
            column = group.column(j)
            start = column.data_page_offset
            if column.has_dictionary_page and 0 < (column.dictionary_page_offset or 0) < start:
                start = column.dictionary_page_offset
            end = start + column.total_compressed_size
            if not 0 < start <= end <= len(data):
                raise ValueError(f"column {column.path_in_schema} lies at {start} to {end} of {len(data)} bytes")
            total += _column(data, start, end, group.num_rows)
    return total


def _column(data: bytes, position: int, end: int, num_rows: int) -> int:
    total = values = 0
    while position < end and values < num_rows:
        header, position = _struct(data, position, end, 0)
        kind, unpacked, packed = header.get(1), header.get(2), header.get(3)
        content = header.get(_CONTENT.get(kind, 0)) if isinstance(kind, int) else None
        if not isinstance(content, dict) or not isinstance(unpacked, int) or not isinstance(packed, int):
            raise ValueError(f"a page is of kind {kind!r:.20}")
        encoding, count = content.get(4 if kind == _DATA_V2 else 2), content.get(1)
        if encoding not in _ENCODINGS:
            raise ValueError(f"a page has encoding {encoding!r:.20}, which is not read")
        # a dictionary may have values that no row has; they are as long as they are
        most = num_rows - values if kind != _DICTIONARY else unpacked
        if not isinstance(count, int) or not 0 <= count <= most or unpacked < 0 or packed < 0:
            raise ValueError(f"a page has {count!r:.20} values in {unpacked} bytes, its group {num_rows} rows")
        values += count if kind != _DICTIONARY else 0
        total += unpacked
        position += packed
    if position > end or values < num_rows:
        raise ValueError(f"its pages have {values} values, its group {num_rows} rows")
    return total


def _struct(data: bytes, position: int, end: int, depth: int) -> tuple[Struct, int]:
    if depth > _MAX_DEPTH:
        raise ValueError("a page header is nested too deeply")
    found: Struct = {}
    field = 0
    while True:
        if position >= end:
            raise ValueError("a page header ends early")
        head, position = data[position], position + 1
        if head == 0:
            return found, position
        kind = head & 15
        if head >> 4:
            field += head >> 4
        else:
            field, position = _signed(data, position, end)
        value: Any = None
        match kind:
            case 1 | 2:
                value = kind == 1
            case 3:
                position += 1
            case 4 | 5 | 6:
                value, position = _signed(data, position, end)
            case 7:
                position += 8
            case 8:
                length, position = _varint(data, position, end)
                position += length
            case 12:
                value, position = _struct(data, position, end, depth + 1)
            case _:
                raise ValueError(f"a page header has a field of type {kind}")
        found[field] = value


def _signed(data: bytes, position: int, end: int) -> tuple[int, int]:
    value, position = _varint(data, position, end)
    return (value >> 1) ^ -(value & 1), position


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte, position = data[position], position + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
    raise ValueError("a page header ends early")
