"""The catalog: what is written is read back; what makes no sense is refused, and nothing else happens."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvsnap.catalog import COLUMNS, Catalog, decode_catalog, encode_catalog
from kvsnap.errors import CorruptChunkError

SHARD_BYTES = [4096 * 10, 4096 * 10]


def make(rows: int = 4) -> Catalog:
    rng = np.random.default_rng(1)
    return Catalog(
        key=rng.integers(0, 256, (rows, 32), np.uint8),
        parent_row=np.arange(rows) - 1,
        depth=np.arange(rows),
        tokens=np.full(rows, 64),
        shard=np.arange(rows) % 2,
        offset=4096 * (1 + np.arange(rows) // 2),
        nbytes=np.full(rows, 4096),
        xxh3=rng.integers(0, 256, (rows, 16), np.uint8),
        blake3=rng.integers(0, 256, (rows, 32), np.uint8),
        scope=("", "salted"),
        scope_code=np.arange(rows) % 2,
        hits=np.arange(rows) * 1000,
        last_use=np.arange(rows) + 1_700_000_000,
    )


def decode(data: bytes, rows: int = 4) -> Catalog:
    return decode_catalog(data, num_rows=rows, shard_bytes=SHARD_BYTES, what="catalog x")


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_round_trip(rows: int) -> None:
    catalog = make(rows)

    found = decode(encode_catalog(catalog), rows)

    for field in dataclasses.fields(Catalog):
        if not field.name.startswith("scope"):
            assert np.array_equal(getattr(found, field.name), getattr(catalog, field.name)), field.name
    assert [found.scope[code] for code in found.scope_code] == [catalog.scope[code] for code in catalog.scope_code]


def test_is_deterministic() -> None:
    assert encode_catalog(make()) == encode_catalog(make())


def test_any_parquet_reader_opens_it() -> None:
    table = pq.read_table(io.BytesIO(encode_catalog(make())))

    assert tuple(table.column_names) == COLUMNS
    assert table.column("scope").to_pylist() == ["", "salted", "", "salted"]
    assert {str(table.schema.field(name).type) for name in ("key", "blake3")} == {"fixed_size_binary[32]"}


def test_rows_of_shards_are_in_order_of_place() -> None:
    assert [rows.tolist() for rows in make().rows_of_shards(3)] == [[0, 2], [1, 3], []]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent_row": [-1, 1, 1, 2]}, "parent isn't before it"),
        ({"parent_row": [-2, 0, 1, 2]}, "parent isn't before it"),
        ({"parent_row": [-1, 0, 1, 2**31 - 1]}, "parent isn't before it"),
        ({"depth": [0, 1, 2, 2]}, "depth"),
        ({"depth": [1, 2, 3, 4]}, "depth"),
        ({"tokens": [0, 64, 64, 64]}, "no token"),
        ({"shard": [2, 1, 0, 1]}, "shard isn't in the manifest"),
        ({"shard": [-1, 1, 0, 1]}, "shard isn't in the manifest"),
        ({"offset": [-4096, 4096, 8192, 8192]}, "offset"),
        ({"offset": [2**62, 4096, 8192, 8192]}, "offset"),
        ({"nbytes": [2**62, 4096, 4096, 4096]}, "size"),
        ({"nbytes": [0, 4096, 4096, 4096]}, "size"),
        ({"nbytes": [4096 * 40, 4096, 4096, 4096]}, "leaves the shard"),
        ({"nbytes": [8192, 4096, 4096, 4096]}, "overlaps"),
        ({"hits": [-1, 0, 0, 0]}, "hits"),
        ({"last_use": [-1, 0, 0, 0]}, "last use"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, list[int]], message: str) -> None:
    """D18: all of it was written with a right digest, by a stranger."""
    arrays: dict[str, Any] = {name: np.array(values) for name, values in change.items()}
    bad = dataclasses.replace(make(), **arrays)

    with pytest.raises(CorruptChunkError, match=message):
        decode(encode_catalog(bad))


def test_a_chunk_twice_is_refused() -> None:
    catalog = make()
    key = catalog.key.copy()
    key[3] = key[0]

    with pytest.raises(CorruptChunkError, match="twice"):
        decode(encode_catalog(dataclasses.replace(catalog, key=key)))


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(CorruptChunkError, match="4 rows"):
        decode(encode_catalog(make()), rows=3)


def tables() -> list[tuple[str, Any]]:
    table = pq.read_table(io.BytesIO(encode_catalog(make())))
    with_null = table.set_column(3, "tokens", pa.array([1, None, 1, 1], pa.int32()))
    return [
        ("lacks a column", table.drop_columns(["hits"])),
        ("has one more", table.append_column("x", pa.array([1, 2, 3, 4]))),
        ("other order", table.select(list(reversed(table.column_names)))),
        ("other type", table.set_column(3, "tokens", pa.array([1, 1, 1, 1], pa.float64()))),
        ("other width", table.set_column(0, "key", pa.array([b"1"] * 4, pa.binary(1)))),
        ("nulls", with_null),
        ("scope is a number", table.set_column(9, "scope", pa.array([1, 1, 1, 1]))),
        ("scope of lists", table.set_column(9, "scope", pa.array([["a"]] * 4))),
    ]


@pytest.mark.parametrize(("name", "table"), tables(), ids=[name for name, _ in tables()])
def test_other_tables_are_refused(name: str, table: Any) -> None:
    sink = io.BytesIO()
    pq.write_table(table, sink)

    with pytest.raises(CorruptChunkError):
        decode(sink.getvalue())


DATA = encode_catalog(make())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.integers(1, 255), st.booleans())
def test_damage_never_crashes_the_reader(at: int, change: int, cut: bool) -> None:
    """The digest is checked first; should it ever not be, the reader still raises nothing else."""
    data = DATA[:at] if cut else DATA[:at] + bytes([DATA[at] ^ change]) + DATA[at + 1 :]

    with contextlib.suppress(CorruptChunkError):
        decode(data)
