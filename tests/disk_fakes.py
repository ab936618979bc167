"""Namespaces, chunks and shards of random bytes for tests of the disk."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsnap.direct_io import aligned_buffer
from kvsnap.identity import ModelIdentity
from kvsnap.keys import ChunkKey
from kvsnap.layout import Layout, SliceLayout
from kvsnap.namespace import Namespace
from kvsnap.shard import checksum, encode_header, write_shard
from kvsnap.tiers.disk import ChunkToWrite


def make_namespace(
    *, tag: str = "", ranks: int = 1, page: tuple[int, ...] = (2, 3, 16, 8), layers: int = 3, chunk_tokens: int = 64
) -> Namespace:
    """16-token blocks; a page of 768 BF16 elements makes slices that need padding."""
    return Namespace(
        identity=ModelIdentity(weights="dummy:0", config={}, dtype="bfloat16", kv_dtype="bfloat16", identity_tag=tag),
        layout=Layout(
            block_tokens=16,
            dtype="BF16",
            page_shape=page,
            page_format={"backend": "test"},
            slices=tuple(SliceLayout(num_layers=layers, kv_heads=1, ranks=(r,), first_head=r) for r in range(ranks)),
        ),
        chunk_tokens=chunk_tokens,
    )


def make_views(ns: Namespace, tokens: int, seed: int | None = None) -> list[memoryview]:
    """Aligned memory for one chunk, one view per slice, padded: zeroed, or random bytes with zero padding."""
    geometry = ns.geometry
    blocks = geometry.blocks(tokens)
    views = []
    for i in range(geometry.num_slices):
        view = aligned_buffer(geometry.padded(i, blocks))
        if seed is not None:
            nbytes = geometry.slice_bytes(i, blocks)
            view[:nbytes] = random.Random(seed * 1000 + i).randbytes(nbytes)
        views.append(view)
    return views


def make_chunks(ns: Namespace, count: int, *, seed: int = 1, last_tokens: int | None = None) -> list[ChunkToWrite]:
    """A chain of `count` chunks from a random root; the last one may be short."""
    rng = random.Random(seed)
    parent = ChunkKey(rng.randbytes(32))
    chunks = []
    for depth in range(count):
        tokens = last_tokens if last_tokens and depth == count - 1 else ns.chunk_tokens
        views = make_views(ns, tokens, seed * 10_000 + depth)
        key = ChunkKey(rng.randbytes(32))
        block_keys = rng.randbytes(16 * ns.geometry.blocks(tokens))
        chunks.append(
            ChunkToWrite(
                key=key, parent=parent, depth=depth, tokens=tokens, block_keys=block_keys,
                xxh3=checksum(views), views=views,
            )
        )  # fmt: skip
        parent = key
    return chunks


def write_shard_file(path: Path, ns: Namespace, chunks: Sequence[ChunkToWrite], scope: str = "") -> Path:
    """A shard file at `path`, as the disk tier writes it."""
    header, _ = encode_header(ns, scope, chunks)
    with path.open("wb") as file:
        write_shard(file.fileno(), header, [chunk.views for chunk in chunks])
    return path


def disk_use(directory: Path) -> int:
    """What `du` says, in bytes: real blocks of everything, each inode once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, folders, files in os.walk(directory):
        folders.sort(reverse=True)  # tmp, shards, quarantine: a file that is being published isn't missed
        for name in [".", *folders, *files]:
            try:
                found = os.lstat(os.path.join(folder, name))
            except FileNotFoundError:
                continue
            seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


@dataclass
class Snapshot:
    """Everything about a directory tree that a read-only user mustn't change."""

    files: dict[str, tuple[int, int, int, bytes | None]]

    @classmethod
    def of(cls, directory: Path) -> Snapshot:
        files = {}
        for path in sorted([directory, *directory.rglob("*")]):
            found = path.lstat()
            data = path.read_bytes() if path.is_file() and not path.is_symlink() else None
            files[str(path)] = (found.st_mode, found.st_mtime_ns, found.st_ino, data)
        return cls(files)
