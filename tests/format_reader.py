"""A reader of cache directories and repositories, written from docs/format.md alone: nothing of kvsnap is imported.

It rebuilds every key, digest and checksum, and refuses any file, field or byte that the page doesn't explain.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import blake3
import safetensors
import xxhash

HEX128, HEX64, HEX32, HEX16 = (re.compile(f"[0-9a-f]{{{n}}}") for n in (128, 64, 32, 16))
DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
SCOPE = re.compile(
    r"|(lora:[0-9a-f]+|mm|salted)|(lora:[0-9a-f]+,mm|lora:[0-9a-f]+,salted|mm,salted)|lora:[0-9a-f]+,mm,salted"
)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)")
ELEMENT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
NAMESPACE_KEYS = ("chunk_tokens", "format", "identity", "key_scheme", "layout")
CATALOG_TYPES = {
    "key": "fixed_size_binary[32]", "parent_row": "int32", "depth": "int32", "tokens": "int32", "shard": "int32",
    "offset": "int64", "nbytes": "int64", "xxh3": "fixed_size_binary[16]", "blake3": "fixed_size_binary[32]",
    "scope": "string", "hits": "int64", "last_use": "int64",
}  # fmt: skip


class FormatError(Exception):
    """The page doesn't explain what is there."""


@dataclass(frozen=True)
class Prompt:
    """Token ids that may have been stored, from position 0, with the request's salt."""

    ids: Sequence[int]
    salt: str | None = None


@dataclass(frozen=True)
class Chunk:
    """One chunk as a shard describes it."""

    key: bytes
    parent: bytes
    depth: int
    tokens: int
    block_keys: bytes
    xxh3: bytes
    scope: str
    offset: int
    nbytes: int
    data: bytes


@dataclass(frozen=True)
class Names:
    """What a namespace is made of."""

    identity: str
    layout: str
    layout_fields: dict[str, Any]
    chunk_tokens: int

    def hashed(self) -> dict[str, Any]:
        return {
            "chunk_tokens": self.chunk_tokens,
            "format": 1,
            "identity": self.identity,
            "key_scheme": "kvsnap/key/1",
            "layout": self.layout,
        }


@dataclass
class Found:
    """What was read."""

    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    usage: dict[bytes, tuple[int, float]] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    rows: list[dict[str, Any]] = field(default_factory=list)


def need(condition: object, what: str) -> None:
    if not condition:
        raise FormatError(what)


# -- section 1 -----------------------------------------------------------------------


def number_rule(value: Any) -> Any:
    if isinstance(value, float):
        need(value.is_integer() and abs(value) < 2**53, f"number {value}")
        return int(value)
    if isinstance(value, list):
        return [number_rule(item) for item in value]
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return {name: number_rule(value[name]) for name in names}
    return value


def jcs(value: Any) -> bytes:
    return json.dumps(number_rule(value), separators=(",", ":"), ensure_ascii=False).encode()


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    need(len({name for name, _ in pairs}) == len(pairs), "a name twice in one object")
    return dict(pairs)


def parse(data: bytes) -> Any:
    try:
        return json.loads(data, object_pairs_hook=unique)
    except ValueError as error:
        raise FormatError(f"not JSON: {error}") from None


def load(data: bytes) -> Any:
    value = parse(data)
    need(jcs(value) == data, "not in canonical form")
    return value


def exactly(obj: Any, what: str, *names: str) -> dict[str, Any]:
    need(isinstance(obj, dict) and sorted(obj) == sorted(names), f"{what} has fields {list(obj)}")
    found: dict[str, Any] = obj
    return found


def is_int(*values: Any) -> bool:
    return all(type(value) is int for value in values)


# -- sections 2 to 5 -----------------------------------------------------------------


def identity_hash(obj: Any) -> str:
    names = ("config", "dtype", "identity_tag", "kv_dtype", "kv_scales", "quantization", "rope", "weights")
    exactly(obj, "identity", *names)
    texts = [obj[name] for name in ("dtype", "identity_tag", "kv_dtype", "weights")]
    need(all(isinstance(text, str) for text in texts), "identity")
    need(isinstance(obj["config"], dict), "identity")
    return sha256(jcs(obj)).hexdigest()


def layout_hash(obj: Any) -> str:
    exactly(obj, "layout", "block_tokens", "dtype", "page_format", "page_shape", "slices")
    need(obj["dtype"] in ELEMENT_BYTES and is_int(obj["block_tokens"], *obj["page_shape"]), "layout")
    need(all(isinstance(text, str) for text in obj["page_format"].values()), "layout")
    ranks: list[int] = []
    for part in obj["slices"]:
        exactly(part, "slice", "first_head", "first_layer", "kv_heads", "num_layers", "ranks")
        need(is_int(part["first_head"], part["first_layer"], part["kv_heads"], part["num_layers"]), "slice")
        need(part["ranks"] == sorted(part["ranks"]), "slice")
        ranks += part["ranks"]
    need(sorted(ranks) == list(range(len(ranks))), "layout")
    return sha256(jcs(obj)).hexdigest()


def token_hash(parent: bytes, kind: bytes, ids: Sequence[int]) -> bytes:
    return sha256(parent + kind + struct.pack(f"<I{len(ids)}I", len(ids), *ids)).digest()


def keys_of(prompts: Iterable[Prompt], names: Names) -> dict[bytes, tuple[bytes, int, int, bytes, str]]:
    """(parent, depth, tokens, block keys, scope) of every chunk that these prompts can have, by key."""
    found = {}
    block = names.layout_fields["block_tokens"]
    for prompt in prompts:
        fields = {"chunk_tokens": names.chunk_tokens, "identity": names.identity, "lora": None, "salt": prompt.salt}
        parent = sha256(b"kvsnap/key/1\0" + jcs(fields)).digest()
        scope = "" if prompt.salt is None else "salted"
        for depth, start in enumerate(range(0, len(prompt.ids), names.chunk_tokens)):
            ids = prompt.ids[start : start + names.chunk_tokens]
            key = b""
            for tokens in range(block, len(ids) + 1, block):
                parts = [token_hash(parent, b"b", ids[:end])[:16] for end in range(block, tokens + 1, block)]
                key = token_hash(parent, b"c", ids[:tokens])
                found[key] = (parent, depth, tokens, b"".join(parts), scope)
            parent = key
    return found


def namespace(directory: Path) -> Names:
    obj = load((directory / "namespace.json").read_bytes())
    exactly(obj, "namespace.json", *NAMESPACE_KEYS, "id", "identity_fields", "layout_fields", "human")
    names = Names(
        identity_hash(obj["identity_fields"]),
        layout_hash(obj["layout_fields"]),
        obj["layout_fields"],
        obj["chunk_tokens"],
    )
    need({name: obj[name] for name in NAMESPACE_KEYS} == names.hashed(), "namespace.json's hashes")
    need(isinstance(obj["human"], dict), "human")
    need(obj["id"] == sha256(jcs(names.hashed())).hexdigest(), "namespace.json's id")
    model_type = obj["identity_fields"]["config"].get("model_type")
    words = f"{model_type if isinstance(model_type, str) else 'model'}-{obj['identity_fields']['kv_dtype']}".lower()
    slug = re.sub("[^a-z0-9_]+", "-", words).strip("-")[:40].rstrip("-") or "model"
    need(directory.name == f"{slug}-{obj['id'][:16]}", f"name of directory {directory.name}")
    return names


# -- section 7 -----------------------------------------------------------------------


def padded(nbytes: int) -> int:
    return (nbytes + 4095) // 4096 * 4096


def tensors(key: str, blocks: int, layout: dict[str, Any], start: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    for i, part in enumerate(layout["slices"]):
        shape = [blocks, part["num_layers"], *layout["page_shape"]]
        nbytes = math.prod(shape) * ELEMENT_BYTES[layout["dtype"]]
        end = start + nbytes
        found[f"{key}.{i}"] = {"dtype": layout["dtype"], "shape": shape, "data_offsets": [start, end]}
        start += padded(nbytes)
        if start > end:
            found[f"{key}.{i}.pad"] = {"dtype": "U8", "shape": [start - end], "data_offsets": [end, start]}
    return found, start


def read_shard(data: bytes, names: Names) -> list[Chunk]:
    need(len(data) >= 8, "a shard without a header")
    (n,) = struct.unpack("<Q", data[:8])
    need(n <= 32 << 20 and (8 + n) % 4096 == 0 and 8 + n <= len(data), f"header length {n}")
    text = data[8 : 8 + n].rstrip(b" ")
    need(text.isascii(), "a header that isn't ASCII")
    header = parse(text)
    need(isinstance(header, dict) and "__metadata__" in header, "a header without metadata")
    value = exactly(header["__metadata__"], "__metadata__", "kvsnap")["kvsnap"]
    need(isinstance(value, str), "metadata that isn't a string")
    meta = exactly(load(value.encode()), "metadata", *NAMESPACE_KEYS, "check", "codec", "scope", "chunks")
    need({name: meta[name] for name in NAMESPACE_KEYS} == names.hashed(), "a shard of another namespace")
    need(meta["codec"] == "raw" and SCOPE.fullmatch(meta["scope"]), "codec or scope")
    unchecked = {name: value for name, value in meta.items() if name != "check"}
    need(meta["check"] == xxhash.xxh3_128_hexdigest(jcs(unchecked)), "the metadata's check")
    need(1 <= len(meta["chunks"]) <= 512, "number of chunks")

    expected: dict[str, Any] = {"__metadata__": {"kvsnap": value}}
    chunks: list[Chunk] = []
    block, end = names.layout_fields["block_tokens"], 0
    for row in meta["chunks"]:
        exactly(row, "chunk", "key", "parent", "depth", "tokens", "block_keys", "xxh3")
        need(HEX64.fullmatch(row["key"]) and HEX64.fullmatch(row["parent"]) and HEX32.fullmatch(row["xxh3"]), "hex")
        need(is_int(row["depth"], row["tokens"]) and row["depth"] >= 0, "numbers of a chunk")
        need(0 < row["tokens"] <= names.chunk_tokens and row["tokens"] % block == 0, "tokens")
        blocks = row["tokens"] // block
        need(re.fullmatch(f"[0-9a-f]{{{32 * blocks}}}", row["block_keys"]), "block keys")
        start = end
        parts, end = tensors(row["key"], blocks, names.layout_fields, start)
        expected |= parts
        body = data[8 + n + start : 8 + n + end]
        need(xxhash.xxh3_128_hexdigest(body) == row["xxh3"], f"checksum of chunk {row['key'][:12]}")
        for name, part in parts.items():
            if name.endswith(".pad"):
                first, last = part["data_offsets"]
                need(not any(body[first - start : last - start]), "a filler that isn't zero")
        raw = [bytes.fromhex(row[name]) for name in ("key", "parent", "block_keys", "xxh3")]
        above = next((c for c in chunks if c.key == raw[1]), None)
        need(above is None or (above.depth + 1, above.tokens) == (row["depth"], names.chunk_tokens), "parent")
        need(all(c.parent != raw[0] and c.key != raw[0] for c in chunks), "order of chunks")
        where = (8 + n + start, end - start, body)
        chunks.append(Chunk(raw[0], raw[1], row["depth"], row["tokens"], raw[2], raw[3], meta["scope"], *where))
    need(header == expected, "the header's tensors")
    need(text == json.dumps(expected, separators=(",", ":")).encode(), "the header's spelling, as kvsnap writes it")
    need(8 + n + end == len(data), "bytes after the last chunk")
    opened = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
    need(opened.keys() == expected.keys() - {"__metadata__"}, "what the safetensors library sees")
    return chunks


def check_keys(chunks: Iterable[Chunk], names: Names, prompts: Iterable[Prompt]) -> None:
    known = keys_of(prompts, names)
    for chunk in chunks:
        need(chunk.key in known, f"chunk {chunk.key.hex()[:12]} is of no prompt")
        said = (chunk.parent, chunk.depth, chunk.tokens, chunk.block_keys, chunk.scope)
        need(said == known[chunk.key], f"what chunk {chunk.key.hex()[:12]} says of itself")


# -- section 6 -----------------------------------------------------------------------


def read_cache(cache_dir: Path, prompts: Sequence[Prompt]) -> Found:
    """Everything in a cache directory."""
    found = Found()
    for path in sorted(cache_dir.iterdir()):
        if path.name == "kvsnap.json":
            marker = exactly(load(path.read_bytes()), "marker", "cap_bytes", "format", "kind")
            need(marker["format"] == 1 and marker["kind"] == "cache", "marker")
            need(marker["cap_bytes"] is None or is_int(marker["cap_bytes"]), "cap")
        elif path.name in ("lock", "evictor", "importer"):
            need(path.read_bytes() == b"", path.name)
        elif path.is_dir():
            read_namespace_dir(path, prompts, found)
        else:
            need(re.fullmatch(r"\.kvsnap\.json\.[0-9a-f]{16}\.tmp", path.name), f"file {path.name}")
    return found


def read_namespace_dir(directory: Path, prompts: Sequence[Prompt], found: Found) -> None:
    names = namespace(directory)
    for path in sorted(directory.rglob("*")):
        where = path.relative_to(directory)
        match where.parts:
            case ("namespace.json",) | ("shards" | "tmp" | "quarantine" | "engines",):
                pass
            case ("shards", name):
                found.files.add(name)
                data = path.read_bytes()
                shard_id = name.removesuffix(".safetensors")
                need(name != shard_id, f"file {where}")
                is_imported = HEX64.fullmatch(shard_id) and sha256(data).hexdigest() == shard_id
                need(HEX32.fullmatch(shard_id) or is_imported, f"name of {where}")
                chunks = read_shard(data, names)
                check_keys(chunks, names, prompts)
                found.chunks |= {chunk.key: chunk for chunk in chunks}
            case ("quarantine", name):
                need(re.fullmatch(r"[0-9a-f]{32}([0-9a-f]{32})?\.safetensors", name), f"file {where}")
            case ("tmp", writer):
                need(HEX16.fullmatch(writer), f"directory {where}")
            case ("tmp", _, "lock"):
                need(re.fullmatch(r"\d+ \d+\n", path.read_text()), f"file {where}")
            case ("tmp", _, name):
                patterns = (
                    r"[0-9a-f]{32}([0-9a-f]{32})?\.safetensors|\..+\.[0-9a-f]{16}\.tmp|probe\.[0-9a-f]{16}\.tmp",
                )
                need(any(re.fullmatch(pattern, name) for pattern in patterns), f"file {where}")
            case ("usage",):
                found.usage |= read_usage(path.read_bytes())
            case ("engines", name):
                read_engine(load(path.read_bytes()), name, names)
            case _:
                raise FormatError(f"file {where}")


def read_usage(data: bytes) -> dict[bytes, tuple[int, float]]:
    need(data[:8] == b"KVSUSE01" and len(data) >= 32, "usage")
    (count,) = struct.unpack("<Q", data[8:16])
    need(len(data) == 16 + 48 * count + 16, "length of usage")
    need(xxhash.xxh3_128_digest(data[:-16]) == data[-16:], "checksum of usage")
    rows = struct.iter_unpack("<32sQd", data[16:-16])
    return {key: (hits, last_use) for key, hits, last_use in rows}


def read_engine(obj: Any, name: str, names: Names) -> None:
    fields = ("engine_id", "pid", "start", "socket", "namespace", "identity", "layout", "writer")
    exactly(obj, "engine", *fields)
    need(re.fullmatch("[0-9A-Za-z_-]{1,128}", obj["engine_id"]) and name == obj["engine_id"] + ".json", "engine's id")
    need(is_int(obj["pid"], obj["start"]) and isinstance(obj["socket"], str), "engine")
    need(obj["namespace"] == sha256(jcs(names.hashed())).hexdigest(), "engine's namespace")
    need(identity_hash(obj["identity"]) == names.identity and obj["layout"] == names.layout, "engine's identity")
    need(obj["writer"] == "" or HEX16.fullmatch(obj["writer"]), "engine's writer")


# -- section 8 -----------------------------------------------------------------------


def read_repository(root: Path, prompts: Sequence[Prompt]) -> Found:
    """Everything in a local repository; all of it must belong to a snapshot."""
    found = Found()
    objects = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    marker = exactly(load(objects.pop("kvsnap.json")), "marker", "features", "format", "kind", "store")
    need(marker["format"] == 1 and marker["kind"] == "repository", "marker")
    need(marker["features"] == {"delete": [], "read": [], "verify": [], "write": []}, "features")
    need(all(type(value) is bool for value in marker["store"].values()), "store")
    used: set[str] = set()
    for name, data in sorted(objects.items()):
        digest = re.fullmatch(r"(?:shards/../|catalogs/|manifests/)([0-9a-f]{64})\.(safetensors|parquet|json)", name)
        if digest is not None:
            need(sha256(data).hexdigest() == digest[1], f"digest of {name}")
        elif name.endswith(".sig"):
            read_signatures(name, load(data), objects)
            used.add(name)
        elif name == ".kvsnap-lock":
            need(data == b"", name)
            used.add(name)
        elif name.startswith("refs/"):
            read_ref(name, load(data), objects)
            used.add(name)
        elif name.startswith("leases/"):
            read_lease(name, load(data))
            used.add(name)
        elif name.startswith("gc/"):
            used |= {name, *read_gc_list(name, load(data), objects)}
        else:
            raise FormatError(f"object {name}")
    for name, data in objects.items():
        if name.startswith("manifests/") and name.endswith(".json"):
            used |= {name, *read_manifest(load(data), objects, prompts, found)}
    need(used == objects.keys(), f"objects that nothing names: {objects.keys() - used}")
    return found


def read_ref(name: str, obj: Any, objects: dict[str, bytes]) -> None:
    exactly(obj, "ref", "history", "snapshot", "previous", "updated", "write_id")
    need(re.fullmatch(r"refs/(?![0-9a-f]{64}\.json)[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.json", name), f"name of {name}")
    snapshot = DIGEST.fullmatch(obj["snapshot"])
    need(snapshot and f"manifests/{snapshot[1]}.json" in objects, "what a ref names")
    need(obj["previous"] is None or DIGEST.fullmatch(obj["previous"]), "previous")
    need(TIME.fullmatch(obj["updated"]) and isinstance(obj["write_id"], str), "ref")
    for state in obj["history"]:
        exactly(state, "history", "snapshot", "updated")
        need(DIGEST.fullmatch(state["snapshot"]) and TIME.fullmatch(state["updated"]), "history")
    latest = obj["history"][0]["snapshot"] if obj["history"] else None
    need(latest == obj["previous"] and len(obj["history"]) <= 100, "history")


def read_signatures(name: str, obj: Any, objects: dict[str, bytes]) -> None:
    exactly(obj, "signatures", "signatures")
    found = re.fullmatch(r"(manifests/[0-9a-f]{64})\.sig", name)
    need(found and f"{found[1]}.json" in objects, f"name of {name}")
    rows = [exactly(row, "signature", "algorithm", "key", "signature") for row in obj["signatures"]]
    need(0 < len(rows) <= 64 and all(row["algorithm"] == "ed25519" for row in rows), "signatures")
    need([row["key"] for row in rows] == sorted({row["key"] for row in rows}), "order of signatures")
    need(all(HEX64.fullmatch(row["key"]) and HEX128.fullmatch(row["signature"]) for row in rows), "signature")


def read_lease(name: str, obj: Any) -> None:
    names = ("duration", "id", "kind", "owner", "process", "seen", "started", "write_id")
    exactly(obj, "lease", *names)
    need(HEX32.fullmatch(obj["id"]) and name in (f"leases/{obj['id']}.json", "leases/prune.json"), f"name of {name}")
    need(obj["kind"] in ("copy", "export", "merge", "prune", "sign", "tag"), "kind of a lease")
    need((obj["kind"] == "prune") == (name == "leases/prune.json"), "kind of a lease")
    need(all(isinstance(obj[key], str) for key in ("owner", "process", "write_id")), "lease")
    need(is_int(obj["duration"], obj["started"]) and obj["duration"] >= 0, "lease")
    need(all(HEX32.fullmatch(item) for item in obj["seen"]), "seen")


def read_gc_list(name: str, obj: Any, objects: dict[str, bytes]) -> set[str]:
    """What is on a list of objects to be deleted."""
    exactly(obj, "list", "marked", "objects", "reason", "sweeper", "write_id")
    need(re.fullmatch(r"gc/[0-9a-f]{32}\.json", name), f"name of {name}")
    need(obj["reason"] in ("removed", "unneeded") and is_int(obj["marked"]), "list")
    need(obj["sweeper"] is None or HEX32.fullmatch(obj["sweeper"]), "sweeper")
    need(isinstance(obj["write_id"], str) and len(obj["objects"]) <= 5000, "list")
    rows = [exactly(row, "object", "bytes", "name") for row in obj["objects"]]
    need([row["name"] for row in rows] == sorted({row["name"] for row in rows}), "order of a list")
    for row in rows:
        is_gone = obj["sweeper"] is not None and row["name"] not in objects
        need(is_gone or len(objects.get(row["name"], b"")) == row["bytes"], f"object {row['name']} on a list")
    return {row["name"] for row in rows if row["name"] in objects}


def read_manifest(obj: Any, objects: dict[str, bytes], prompts: Sequence[Prompt], found: Found) -> set[str]:
    exactly(
        obj, "manifest", "format", "required_features", "created", "writer", "model", "layout", "chunk_tokens",
        "block_tokens", "key_scheme", "shards", "catalog", "totals", "parent", "annotations",
    )  # fmt: skip
    need(obj["format"] == 1 and obj["required_features"] == [] and TIME.fullmatch(obj["created"]), "manifest")
    need(obj["key_scheme"] == "kvsnap/key/1" and obj["block_tokens"] == obj["layout"]["block_tokens"], "manifest")
    need(obj["parent"] is None or DIGEST.fullmatch(obj["parent"]), "parent")
    exactly(obj["writer"], "writer", "name", "version")
    exactly(obj["model"], "model", "id", "identity", "revision")
    need(isinstance(obj["annotations"], dict), "annotations")
    names = Names(
        identity_hash(obj["model"]["identity"]), layout_hash(obj["layout"]), obj["layout"], obj["chunk_tokens"]
    )

    used: set[str] = set()
    shards: list[dict[bytes, Chunk]] = []
    for record in obj["shards"]:
        exactly(record, "shard", "digest", "bytes", "chunks")
        digest = record["digest"].removeprefix("sha256:")
        name = f"shards/{digest[:2]}/{digest}.safetensors"
        need(name not in used and name in objects and len(objects[name]) == record["bytes"], f"shard {name}")
        used.add(name)
        chunks = read_shard(objects[name], names)
        check_keys(chunks, names, prompts)
        shards.append({chunk.key: chunk for chunk in chunks})
        found.files.add(name)

    exactly(obj["catalog"], "catalog", "digest", "bytes", "rows")
    name = f"catalogs/{obj['catalog']['digest'].removeprefix('sha256:')}.parquet"
    need(name in objects and len(objects[name]) == obj["catalog"]["bytes"], f"catalog {name}")
    used.add(name)
    rows = read_catalog(objects[name])
    need(len(rows) == obj["catalog"]["rows"], "rows of the catalog")
    for row in rows:
        chunk = shards[row["shard"]][row["key"]]
        parent = rows[row["parent_row"]]["key"] if row["parent_row"] >= 0 else chunk.parent
        said = (row["depth"], row["tokens"], row["offset"], row["nbytes"], row["xxh3"], row["scope"], parent)
        is_ = (chunk.depth, chunk.tokens, chunk.offset, chunk.nbytes, chunk.xxh3, chunk.scope, chunk.parent)
        need(said == is_ and (row["parent_row"] < 0) == (chunk.depth == 0), "a row of the catalog")
        need(blake3.blake3(chunk.data).digest() == row["blake3"], "blake3")
        found.chunks[chunk.key] = chunk
    found.rows = rows
    parents = {row["parent_row"] for row in rows}
    totals = {
        "bytes": sum(record["bytes"] for record in obj["shards"]),
        "chunks": len(rows),
        "prefixes": sum(i not in parents for i in range(len(rows))),
        "tokens": sum(row["tokens"] for row in rows),
    }
    need(obj["totals"] == totals, f"totals {obj['totals']}, expected {totals}")
    for i, record in enumerate(obj["shards"]):
        need(record["chunks"] == sum(row["shard"] == i for row in rows), "chunks of a shard")
    return used


def read_catalog(data: bytes) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(pa.BufferReader(data))
    types = {
        name: str(column.type.value_type if pa.types.is_dictionary(column.type) else column.type)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    need(list(types.items()) == list(CATALOG_TYPES.items()), f"columns {types}")
    need(not table.schema.metadata, f"metadata {table.schema.metadata}")
    rows: list[dict[str, Any]] = table.to_pylist()
    for at, row in enumerate(rows):
        need(all(value is not None for value in row.values()), "a null")
        need(-1 <= row["parent_row"] < at, "a parent after its child")
        need(at == 0 or rows[at - 1]["depth"] <= row["depth"], "order of rows")
        need(row["hits"] >= 0 and row["last_use"] >= 0, "usage")
    need(len({row["key"] for row in rows}) == len(rows), "a key twice")
    return rows
