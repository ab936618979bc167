"""Cache directories with real keys and random bytes, and the ways to damage a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvsnap.keys import KeyChain, block_keys, root_key
from kvsnap.namespace import Namespace
from kvsnap.shard import checksum
from kvsnap.tiers.disk import ChunkToWrite, DiskTier, Shard
from tests.disk_fakes import make_namespace, make_views

CAP_BYTES = 1 << 30


def chain(ns: Namespace, ids: Sequence[int], *, salt: str | None = None, start: int = 0) -> list[ChunkToWrite]:
    """The chunks of a prompt from chunk number `start`; the last may be short. A key always has the same bytes."""
    block_tokens = ns.layout.block_tokens
    keys = KeyChain(root_key(ns.identity.hash(), ns.chunk_tokens, salt=salt), ns.chunk_tokens, block_tokens)
    keys.extend(list(ids))
    found = []
    for depth in range(-(-len(ids) // ns.chunk_tokens)):
        first = depth * ns.chunk_tokens
        tokens = min(ns.chunk_tokens, len(ids) - first)
        key = keys.keys[depth] if depth < len(keys.keys) else keys.short_key(depth, tokens)
        views = make_views(ns, tokens, int.from_bytes(key[:6], "little"))
        found.append(
            ChunkToWrite(
                key=key,
                parent=keys.parent_of(depth),
                depth=depth,
                tokens=tokens,
                block_keys=block_keys(keys.parent_of(depth), keys.ids_of(first, first + tokens), block_tokens),
                xxh3=checksum(views),
                views=views,
            )
        )
    return found[start:]


def prompt(seed: int, num_tokens: int, *, shared: int = 0) -> list[int]:
    """Token ids; the first `shared` are the same for all seeds."""
    return [i if i < shared else 1000 * (seed + 1) + i for i in range(num_tokens)]


def store(cache_dir: Path, ns: Namespace, *shards: list[ChunkToWrite], scope: str = "") -> list[Shard]:
    """Write one shard each, as an engine does."""
    with DiskTier(cache_dir, ns, cap_bytes=CAP_BYTES) as disk:
        written = [disk.write(scope, chunks) for chunks in shards]
    assert all(written)
    return [shard for shard in written if shard is not None]


def filled_cache(cache_dir: Path, ns: Namespace | None = None) -> Namespace:
    """Two shards, 7 chunks: a shared prefix of 2 and a branch of 3 (the last one short); a second branch of 2."""
    ns = ns or make_namespace()
    first = chain(ns, prompt(1, 4 * 64 + 32, shared=128))
    second = chain(ns, prompt(2, 4 * 64, shared=128), start=2)
    store(cache_dir, ns, first, second)
    return ns


def chunks_at(cache_dir: Path, ns: Namespace) -> dict[bytes, bytes]:
    """Every chunk that a disk tier finds there: key and bytes."""
    found = {}
    with DiskTier(cache_dir, ns, read_only=True) as disk:
        for shard in disk.scan():
            data = shard.path.read_bytes()
            for entry in shard.entries:
                found[bytes(entry.key)] = data[entry.offset : entry.offset + entry.nbytes]
                assert checksum([memoryview(found[bytes(entry.key)])]) == entry.xxh3
    return found


def flip(path: Path, offset: int) -> None:
    """Change one byte; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x40
    path.write_bytes(data)


def break_reads(monkeypatch: pytest.MonkeyPatch, path: Path, *, good_passes: int = 0) -> None:
    """Have the disk fail under a file, but for its header, after it was read so many times."""
    real, passes = os.preadv, 0

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        nonlocal passes
        if not flags and os.readlink(f"/proc/self/fd/{fd}") == str(path):
            passes += offset == 0
            if passes > good_passes:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)


def garble(path: Path) -> None:
    """Something else altogether."""
    path.write_bytes(b'{"garbage": [1, 2')


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flip in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "flip at the start": lambda path: flip(path, 100),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 8192 * 4096),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "deleted": lambda path: path.unlink(),
    "garbage": garble,
}
"""What can happen to a file."""
