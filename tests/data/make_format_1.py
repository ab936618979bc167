"""Makes `tests/data/format-1`: what a kvsnap of format 1 writes, kept so that every later release is tested on it.

    PYTHONPATH=.:connector:jobs python tests/data/make_format_1.py NEW_DIRECTORY

Run it only to add something that format 1 may hold and that isn't there yet; what was written by an
older release is worth more than what a newer one writes again. Ids and times are new each time.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

from kvsnap.direct_io import aligned_buffer
from kvsnap.identity import ModelIdentity
from kvsnap.keys import KeyChain, root_key
from kvsnap.layout import Layout, SliceLayout
from kvsnap.namespace import Namespace
from kvsnap.refs import move_ref, remove
from kvsnap.repository import Repository
from kvsnap.shard import checksum
from kvsnap.signing import SigningKey
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.tiers.disk import ChunkToWrite, DiskTier
from kvsnap.tiers.engines import EngineRecord

SHARED = list(range(100, 116))
PROMPTS: list[tuple[list[int], str | None]] = [
    ([*SHARED, *range(200, 212)], None),
    ([*SHARED, *range(300, 308)], None),
    ([*SHARED], "tenant"),
    ([2**32 - 1, 0, 7, 7, 1, 2, 3, 4], None),
]
"""Token ids and salt: a shared prefix, a short chunk at the end of the first."""


def namespace() -> Namespace:
    """Two ranks with unequal slices, one of which needs padding."""
    return Namespace(
        identity=ModelIdentity(
            weights="sha256:" + "9f4c1d0f8e4b6f5d" * 4,
            config={"model_type": "llama", "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "name": "ü"},
            dtype="bfloat16",
            kv_dtype="bfloat16",
            identity_tag="golden",
        ),
        layout=Layout(
            block_tokens=4,
            dtype="BF16",
            page_shape=(2, 4, 16),
            page_format={"backend": "CPU_ATTN", "isa": "vec", "order": "HNC"},
            slices=(
                SliceLayout(num_layers=3, kv_heads=2, ranks=(0,)),
                SliceLayout(num_layers=1, kv_heads=2, ranks=(1, 2), first_layer=3),
            ),
        ),
        chunk_tokens=8,
        human={"model": "acme/golden", "path": "/models/golden", "revision": "main", "engine": "vllm 0.32.0"},
    )


def chunks(ns: Namespace, ids: list[int], salt: str | None, start: int = 0) -> list[ChunkToWrite]:
    """The chunks of a prompt from number `start` on; KV bytes follow from the keys."""
    chain = KeyChain(root_key(ns.identity.hash(), ns.chunk_tokens, salt=salt), ns.chunk_tokens, ns.layout.block_tokens)
    chain.extend(ids)
    found = []
    for depth in range(start, -(-len(ids) // ns.chunk_tokens)):
        first = depth * ns.chunk_tokens
        tokens = min(ns.chunk_tokens, len(ids) - first)
        key = chain.short_key(depth, tokens)
        views = []
        for i in range(ns.geometry.num_slices):
            blocks = ns.geometry.blocks(tokens)
            view, nbytes = aligned_buffer(ns.geometry.padded(i, blocks)), ns.geometry.slice_bytes(i, blocks)
            view[:nbytes] = random.Random(f"{key.hex()}.{i}").randbytes(nbytes)
            views.append(view)
        found.append(
            ChunkToWrite(
                key=key,
                parent=chain.parent_of(depth),
                depth=depth,
                tokens=tokens,
                block_keys=chain.tail_block_keys(depth, first + tokens),
                xxh3=checksum(views),
                views=views,
            )
        )
    return found


def make(directory: Path) -> None:
    """A cache directory of an engine that is gone, the repository that was exported to, and what is in them."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    ns, cache, repo = namespace(), directory / "cache", directory / "repository"
    directory.mkdir(parents=True)
    key_file = directory / "key.pem"
    private = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    key_file.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    key_file.chmod(0o600)
    key = SigningKey.read(key_file)
    (directory / "trusted_keys").write_text(f"golden {key.public}\n")

    all_chunks = [chunks(ns, *PROMPTS[0]), chunks(ns, *PROMPTS[1], 2), chunks(ns, *PROMPTS[2]), chunks(ns, *PROMPTS[3])]
    other = directory / "other"
    with DiskTier(other / "cache", ns, cap_bytes=1 << 30) as disk:
        disk.write("", all_chunks[3])
    export_snapshot(other / "cache", str(other / "repository"), tag="other")
    with DiskTier(cache, ns, cap_bytes=1 << 30) as disk:
        disk.write("", all_chunks[0])
        first = export_snapshot(cache, str(repo), tag="prod")
        disk.write("", all_chunks[1])
        disk.write("salted", all_chunks[2])
        disk.store_usage([(chunk.key, 3 + i, 1_760_000_000.5 + i) for i, chunk in enumerate(all_chunks[0][:2])])
        second = export_snapshot(cache, str(repo), tag="prod", include_salted=True, signer=key)
        third = export_snapshot(cache, str(repo), select="hot")
        move_ref(Repository.open(str(repo)), "first", first.snapshot)
        remove(str(repo), third.snapshot)
        import_snapshot(str(other / "repository"), "other", cache)
        disk.register(
            EngineRecord(
                engine_id="golden-1",
                pid=2**22 + 1,
                start=12345,
                socket="/run/user/1000/kvsnap/golden.sock",
                namespace=ns.id(),
                identity=ns.identity.to_json(),
                layout=ns.layout.hash(),
            )
        )
    shutil.rmtree(other)
    key_file.unlink()
    found = {
        "chunks": {
            chunk.key.hex(): {"depth": chunk.depth, "scope": "salted" if salt else "", "tokens": chunk.tokens,
                              "xxh3": chunk.xxh3.hex()}
            for (_, salt), part in zip(PROMPTS, all_chunks, strict=True) for chunk in part
        },
        "namespace": ns.id(),
        "order": [chunk.key.hex() for part in all_chunks for chunk in part],
        "prompts": [{"ids": ids, "salt": salt} for ids, salt in PROMPTS],
        "snapshots": {"first": first.snapshot, "prod": second.snapshot, "removed": third.snapshot},
    }  # fmt: skip
    (directory / "expected.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
