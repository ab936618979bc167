"""A catalog of a million chunks: write it, read it, plan an import from it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.namespaces import smollm2
from benchmarks.report import emit, note
from kvsnap.catalog import Catalog, decode_catalog, encode_catalog
from kvsnap.import_plan import ImportPlan
from kvsnap.manifest import CatalogRecord, Digest, Manifest, ShardRecord, Totals

ROWS = 1_000_000
PER_SHARD = 25
CHAIN = 50
"""Chunks of one prompt; they lie in two shards."""
CHUNK_BYTES = 5_898_240
ROUNDS = 3


def make_catalog() -> tuple[Catalog, list[int]]:
    """A catalog of prompts, and the sizes of its shards."""
    rng = np.random.default_rng(1)
    prompts = ROWS // CHAIN
    depth = np.repeat(np.arange(CHAIN), prompts)
    place = np.tile(np.arange(prompts), CHAIN) * CHAIN + depth
    catalog = Catalog(
        key=rng.integers(0, 256, (ROWS, 32), np.uint8),
        parent_row=np.where(depth > 0, np.arange(ROWS) - prompts, -1),
        depth=depth,
        tokens=np.full(ROWS, 256),
        shard=place // PER_SHARD,
        offset=65536 + place % PER_SHARD * CHUNK_BYTES,
        nbytes=np.full(ROWS, CHUNK_BYTES),
        xxh3=rng.integers(0, 256, (ROWS, 16), np.uint8),
        blake3=rng.integers(0, 256, (ROWS, 32), np.uint8),
        scope=("",),
        scope_code=np.zeros(ROWS, np.int64),
        hits=rng.geometric(0.3, ROWS) - 1,
        last_use=1_700_000_000 + rng.integers(0, 1_000_000, ROWS),
    )
    return catalog, [65536 + PER_SHARD * CHUNK_BYTES] * (ROWS // PER_SHARD)


def measure(empty: Path) -> None:
    """Emit the rows of the catalog. `empty`: a folder to plan an import into."""
    catalog, sizes = make_catalog()
    written, read, planned = [], [], []
    data = b""
    for _ in range(ROUNDS):
        began = time.perf_counter()
        data = encode_catalog(catalog)
        encoded = time.perf_counter()
        found = decode_catalog(data, num_rows=ROWS, shard_bytes=sizes, what="catalog")
        decoded = time.perf_counter()
        manifest = _manifest(data, sizes)
        for max_bytes in (None, sum(sizes) // 2 + CHUNK_BYTES):
            start = time.perf_counter()
            plan = ImportPlan(manifest, found, max_bytes)
            plan.present(plan.rows_there(empty))
            planned.append(time.perf_counter() - start)
        written.append(encoded - began)
        read.append(decoded - encoded)
    note(f"a catalog of {ROWS} chunks in {len(sizes)} shards: {len(data) / 1e6:.1f} MB")
    emit("catalog_write_s", statistics.median(written), at_most=3)
    emit("catalog_read_s", statistics.median(read), at_most=1)
    emit("catalog_plan_s", statistics.median(planned), at_most=3)
    emit("catalog_mb", len(data) / 1e6, at_most=110)


def _manifest(data: bytes, sizes: list[int]) -> Manifest:
    return Manifest(
        namespace=smollm2(),
        created="2026-01-01T00:00:00Z",
        writer={},
        shards=tuple(
            ShardRecord(digest=Digest(f"{i:064x}"), nbytes=nbytes, num_chunks=PER_SHARD)
            for i, nbytes in enumerate(sizes)
        ),
        catalog=CatalogRecord(digest=Digest("0" * 64), nbytes=len(data), num_rows=ROWS),
        totals=Totals(num_chunks=ROWS, num_tokens=ROWS * 256, nbytes=sum(sizes), num_prefixes=ROWS // CHAIN),
    )
