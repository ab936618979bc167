"""docs/format.md explains every byte: what kvsnap writes is read by a reader made from the page alone."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvsnap.canonical import canonical_json
from kvsnap.direct_io import aligned_buffer
from kvsnap.identity import COSMETIC_CONFIG_FIELDS, ModelIdentity
from kvsnap.keys import ChunkKey, KeyChain, root_key, scope_name
from kvsnap.layout import Layout, SliceLayout
from kvsnap.namespace import Namespace
from kvsnap.shard import checksum, encode_header, write_shard
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.tiers.disk import ChunkToWrite, DiskTier
from kvsnap.tiers.engines import EngineRecord
from tests.format_reader import (
    FormatError,
    Names,
    Prompt,
    identity_hash,
    jcs,
    layout_hash,
    read_cache,
    read_repository,
    read_shard,
    read_usage,
)

PAGE = (Path(__file__).parent.parent / "docs" / "format.md").read_text()
CAP = 1 << 30


def make_namespace(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "identity": ModelIdentity(
            weights="dummy:0,tp=2,pp=1",
            config={"model_type": "Llama", "rms_norm_eps": 1e-05, "text": "\u00fc\U0001f600\ufb33"},
            dtype="bfloat16",
            kv_dtype="fp8_e4m3",
            kv_scales={"k": [0.5, 1.0], "v": 0.1},
        ),
        "layout": Layout(
            block_tokens=4,
            dtype="F8_E4M3",
            page_shape=(2, 8, 4, 64),
            page_format={"backend": "TEST", "order": "HNC"},
            slices=(
                SliceLayout(num_layers=1, kv_heads=8, ranks=(0, 2)),
                SliceLayout(num_layers=3, kv_heads=8, ranks=(1,), first_layer=1),
            ),
        ),
        "chunk_tokens": 12,
        "human": {"model": "acme/m\u00fc", "path": "/models/m", "revision": None, "engine": "vllm 0.32"},
        **changes,
    }
    return Namespace(**fields)


PROMPTS = (
    Prompt(range(100, 144)),
    Prompt([*range(100, 124), *range(900, 911)]),
    Prompt(range(100, 130), salt="t\u00e9nant"),
    Prompt([2**32 - 1, 0, 7, 7]),
)


def chunks_of(ns: Namespace, prompt: Prompt) -> list[ChunkToWrite]:
    """Full chunks and the short one after them, with random KV."""
    chain = KeyChain(root_key(ns.identity.hash(), ns.chunk_tokens, salt=prompt.salt), ns.chunk_tokens, 4)
    chain.extend(prompt.ids)
    counts = [ns.chunk_tokens] * len(chain.keys)
    if rest := (chain.num_tokens - sum(counts)) // 4 * 4:
        counts.append(rest)
    chunks = []
    for i, tokens in enumerate(counts):
        key = chain.short_key(i, tokens)
        views = []
        for part in range(ns.geometry.num_slices):
            view = aligned_buffer(ns.geometry.padded(part, tokens // 4))
            nbytes = ns.geometry.slice_bytes(part, tokens // 4)
            view[:nbytes] = random.Random(key + bytes([part])).randbytes(nbytes)
            views.append(view)
        start = i * ns.chunk_tokens
        chunks.append(
            ChunkToWrite(
                key=key,
                parent=chain.parent_of(i),
                depth=i,
                tokens=tokens,
                block_keys=chain.tail_block_keys(i, start + tokens),
                xxh3=checksum(views),
                views=views,
            )
        )
    return chunks


@dataclass(frozen=True)
class Written:
    """What kvsnap wrote."""

    ns: Namespace
    cache: Path
    repository: Path
    replica: Path
    keys: frozenset[ChunkKey]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A cache directory with everything that can be in one, an export of it, and an import of that."""
    base = tmp_path_factory.mktemp("format")
    cache, repository, replica = base / "cache", base / "repository", base / "replica"
    ns = make_namespace()
    keys: set[ChunkKey] = set()
    tier = DiskTier(cache, ns, cap_bytes=CAP)
    for prompt in PROMPTS:
        chunks = [chunk for chunk in chunks_of(ns, prompt) if chunk.key not in keys]
        shard = tier.write(scope_name(lora=None, mm=False, salted=prompt.salt is not None), chunks)
        assert shard is not None
        keys |= {chunk.key for chunk in chunks}
    tier.store_usage([(key, i, 1.7e9 + i / 2) for i, key in enumerate(sorted(keys))])
    assert tier.writer is not None
    tier.register(
        EngineRecord(
            engine_id="engine-0",
            pid=2**22 + 1,
            start=1,
            socket="/run/kvsnap/x.sock",
            namespace=ns.id(),
            identity=ns.identity.to_json(),
            layout=ns.layout.hash(),
            writer=tier.writer.name,
        )
    )
    broken = tier.write("", chunks_of(make_namespace(), Prompt(range(5000, 5012))))
    assert broken is not None
    tier.quarantine(broken.id, [])
    export_snapshot(cache, str(repository), tag="prod", include_salted=True, flush=False)
    import_snapshot(str(repository), "prod", replica)
    return Written(ns, cache, repository, replica, frozenset(keys))


def test_cache_directory(written: Written) -> None:
    found = read_cache(written.cache, PROMPTS)

    assert found.chunks.keys() == written.keys
    assert found.usage.keys() == written.keys
    assert len(found.files) == len(PROMPTS)
    for prompt in PROMPTS:
        for chunk in chunks_of(written.ns, prompt):
            assert found.chunks[chunk.key].data == b"".join(chunk.views)


def test_repository(written: Written) -> None:
    found = read_repository(written.repository, PROMPTS)

    assert found.chunks.keys() == written.keys
    assert len(found.files) == len(PROMPTS)
    usage = read_cache(written.cache, PROMPTS).usage
    assert {row["key"]: (row["hits"], row["last_use"]) for row in found.rows} == {
        key: (hits, int(last_use)) for key, (hits, last_use) in usage.items()
    }


def test_reader_notices_a_flipped_byte_of_any_object(written: Written, tmp_path: Path) -> None:
    """Invariant 4: what is named by its digest can't change unnoticed."""
    root = tmp_path / "copy"
    shutil.copytree(written.repository, root)
    objects = [path for name in ("shards", "catalogs", "manifests") for path in (root / name).rglob("*.*")]
    assert len(objects) == len(PROMPTS) + 2
    for path in objects:
        data = path.read_bytes()
        path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])

        with pytest.raises(FormatError):
            read_repository(root, PROMPTS)

        path.write_bytes(data)


def test_imported_cache_directory(written: Written) -> None:
    found = read_cache(written.replica, PROMPTS)

    assert found.chunks.keys() == written.keys
    assert {len(name) for name in found.files} == {64 + len(".safetensors")}


@pytest.mark.parametrize(
    "name", ["note.txt", "@/extra", "@/shards/x.safetensors", "@/shards/.hidden", "@/engines/x.txt", "@/tmp/x/y"]
)
def test_reader_refuses_a_file_that_the_page_does_not_name(written: Written, name: str) -> None:
    """The reader must be able to fail: else it explains nothing."""
    path = written.cache / name.replace("@", written.ns.dirname)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    try:
        with pytest.raises(FormatError):
            read_cache(written.cache, PROMPTS)
    finally:
        path.unlink()
        if path.parent.name == "x":
            path.parent.rmdir()


def names_of(ns: Namespace) -> Names:
    return Names(ns.identity.hash(), ns.layout.hash(), ns.layout.to_json(), ns.chunk_tokens)


def test_reader_notices_any_flipped_byte_of_a_shard(written: Written) -> None:
    """A28: header, padding, KV and filler are all covered."""
    path = next((written.cache / written.ns.dirname / "shards").iterdir())
    data = path.read_bytes()
    rng = random.Random(1)
    header = 8 + int.from_bytes(data[:8], "little")
    places = [*range(8), *rng.sample(range(8, header), 60), *rng.sample(range(header, len(data)), 60)]

    for at in places:
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(FormatError):
            read_shard(bytes(flipped), names_of(written.ns))


def test_reader_notices_any_flipped_byte_of_usage(written: Written) -> None:
    data = (written.cache / written.ns.dirname / "usage").read_bytes()

    for at in range(len(data)):
        flipped = bytearray(data)
        flipped[at] ^= 1
        with pytest.raises(FormatError):
            read_usage(bytes(flipped))


def example(name: str) -> list[str]:
    """The lines of the page's example."""
    found = re.search(rf"<!-- {name} -->\n```\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None
    return found[1].splitlines()


def parse_example(name: str) -> tuple[Any, str]:
    text, digest = example(f"example {name}")
    assert sha256(text.encode()).hexdigest() == digest
    return json.loads(text), digest


def test_examples_of_hashes_are_right() -> None:
    identity, identity_digest = parse_example("identity")
    layout, layout_digest = parse_example("layout")
    hashed, namespace_digest = parse_example("namespace")
    ns = Namespace(identity=ModelIdentity.from_json(identity), layout=Layout.from_json(layout), chunk_tokens=8)

    assert identity_hash(identity) == ns.identity.hash() == identity_digest
    assert layout_hash(layout) == ns.layout.hash() == layout_digest
    assert ns.hashed_fields() == hashed
    assert ns.id() == namespace_digest
    assert f"`{ns.dirname}`" in PAGE


def example_chunk() -> tuple[Namespace, KeyChain]:
    ns = Namespace(
        identity=ModelIdentity.from_json(parse_example("identity")[0]),
        layout=Layout.from_json(parse_example("layout")[0]),
        chunk_tokens=8,
    )
    chain = KeyChain(root_key(ns.identity.hash(), 8), 8, 4)
    chain.extend(range(1, 9))
    return ns, chain


def test_example_of_keys_is_right() -> None:
    _, chain = example_chunk()
    blocks = chain.tail_block_keys(0, 8).hex()

    assert [line.split(maxsplit=1)[1] if "block" not in line else line[14:] for line in example("example keys")] == [
        "8",
        "1 2 3 4 5 6 7 8",
        chain.parent_of(0).hex(),
        chain.keys[0].hex(),
        f"{blocks[:32]} {blocks[32:]}",
    ]


def test_example_of_a_shard_is_right(tmp_path: Path) -> None:
    ns, chain = example_chunk()
    view = aligned_buffer(4096)
    view[:512] = bytes(range(256)) * 2
    chunk = ChunkToWrite(chain.keys[0], chain.parent_of(0), 0, 8, chain.tail_block_keys(0, 8), checksum([view]), [view])
    header, _ = encode_header(ns, "", [chunk])
    path = tmp_path / "shard"
    with path.open("wb") as file:
        write_shard(file.fileno(), header, [[view]])
    data = path.read_bytes()
    text, numbers = example("example shard")

    assert data[8 : 8 + int.from_bytes(data[:8], "little")].rstrip().decode() == text
    assert numbers == f"{int.from_bytes(data[:8], 'little')} {len(data)} {sha256(data).hexdigest()}"
    assert [found.key for found in read_shard(data, names_of(ns))] == chain.keys


def test_list_of_cosmetic_fields_is_complete() -> None:
    assert set(" ".join(example("cosmetic")).split()) == COSMETIC_CONFIG_FIELDS


def test_reader_imports_nothing_of_kvsnap() -> None:
    text = (Path(__file__).parent / "format_reader.py").read_text()

    assert not re.search(r"^\s*(import|from) kvsnap", text, re.MULTILINE)


def test_canonical_json_of_reader_and_writer_agree(written: Written) -> None:
    value = written.ns.to_json()

    assert jcs(value) == canonical_json(value)
