"""D18: whatever a stranger puts where kvsnap reads, the answer is an error of ours, soon, and in little memory."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsnap.canonical import canonical_json, sha256_hex
from kvsnap.catalog import COLUMNS, decode_catalog, encode_catalog
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, KvsnapError
from kvsnap.features import check_marker, decode_marker
from kvsnap.gc_lists import read_list
from kvsnap.leases import read_lease
from kvsnap.manifest import Digest, decode_manifest
from kvsnap.repository import Repository, decode_ref
from kvsnap.shard import ShardHeader, decode_header, header_length, read_header
from kvsnap.signing import Signature, decode_signatures, encode_signatures
from kvsnap.storage import MemoryStorage
from kvsnap.tiers import usage
from kvsnap.tiers.engines import EngineRecord, read_records
from kvsnap.tiers.paths import read_namespace
from tests.snapshot_fakes import filled_cache

GOLDEN = Path(__file__).parent / "data" / "format-1"
MIB = 1 << 20
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

REPOSITORY = Repository.open(str(GOLDEN / "repository"))
SNAPSHOT = REPOSITORY.ref("prod").snapshot
MANIFEST = REPOSITORY.manifest_bytes(SNAPSHOT)
DECODED = REPOSITORY.manifest(SNAPSHOT)
CATALOG = REPOSITORY.catalog_bytes(DECODED)
SHARD_BYTES = [shard.nbytes for shard in DECODED.shards]
SHARD = max(
    (GOLDEN / "repository" / "shards").rglob("*.safetensors"), key=lambda path: path.stat().st_size
).read_bytes()
REF = (GOLDEN / "repository" / "refs" / "prod.json").read_bytes()
GC_LIST = next((GOLDEN / "repository" / "gc").iterdir())
USAGE = next((GOLDEN / "cache").glob("*/usage")).read_bytes()
ENGINE = next((GOLDEN / "cache").glob("*/engines/*")).read_bytes()
NAMESPACE = next((GOLDEN / "cache").glob("*/namespace.json")).read_bytes()
MARKER = (GOLDEN / "repository" / "kvsnap.json").read_bytes()
SIGNATURES = next((GOLDEN / "repository" / "manifests").glob("*.sig")).read_bytes()

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.just("sha256:" + "0" * 64),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=5,
)


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """No more than this is allocated by Python at any time inside."""
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= nbytes


@st.composite
def changed_bytes(draw: st.DrawFn, original: bytes) -> bytes:
    """Other bytes: some changed, some taken out or put in, the end cut off, or something else altogether."""
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        match draw(st.sampled_from(["change", "insert", "delete", "cut", "replace", "repeat"])):
            case "change" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=20))
            case "delete":
                del data[at : at + draw(st.integers(1, 50))]
            case "cut":
                del data[at:]
            case "repeat":
                data += data[at : at + 100]
            case _:
                data[:] = draw(st.binary(max_size=200))
    return bytes(data)


@st.composite
def changed_json(draw: st.DrawFn, original: bytes) -> bytes:
    """Valid JSON of another content: some value anywhere in it is another, is missing, or is new."""
    obj = json.loads(original)
    for _ in range(draw(st.integers(1, 3))):
        places = list(walk(obj))
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        match draw(st.sampled_from(["set", "set", "delete", "copy", "number"])):
            case "set":
                holder[key] = draw(json_values)
            case "delete":
                del holder[key]
                if not obj:
                    return b"{}"
            case "copy":
                holder[key] = json.loads(original)
            case _:
                holder[key] = draw(st.sampled_from([-1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**40, 0.5, 1e308]))
    return json.dumps(obj).encode()


def walk(obj: Any) -> Iterator[tuple[Any, Any]]:
    """All places in a value: (object or list, key or index)."""
    items = obj.items() if isinstance(obj, dict) else enumerate(obj) if isinstance(obj, list) else ()
    for key, value in list(items):
        yield obj, key
        yield from walk(value)


def refused_or_same(read: Callable[[], object], original: object) -> None:
    """Nothing but our errors; what is accepted means what it meant."""
    try:
        found = read()
    except KvsnapError:
        return
    assert found == original


class TestManifest:
    @FEW
    @given(changed_bytes(MANIFEST))
    def test_other_bytes_are_never_this_snapshot(self, data: bytes) -> None:
        if data != MANIFEST:
            with pytest.raises(CorruptChunkError, match="damaged"):
                decode_manifest(data, expect=SNAPSHOT)

    @FEW
    @given(changed_bytes(MANIFEST) | changed_json(MANIFEST))
    def test_one_with_a_digest_of_its_own_is_read_or_refused(self, data: bytes) -> None:
        """What is accepted has sizes within the limits, and says the same again."""
        with at_most(MIB):
            try:
                manifest = decode_manifest(data, expect=Digest(sha256_hex(data)))
            except KvsnapError:
                return
        again = manifest.encode()
        assert decode_manifest(again, expect=Digest(sha256_hex(again))) == manifest

    def test_an_integer_without_canonical_form_is_refused(self) -> None:
        """It could be read, but not written again, as `merge` does."""
        data = canonical_json({**json.loads(DECODED.encode()), "annotations": {"n": 0}}).replace(
            b'"n":0', b'"n":9007199254740992'
        )

        with pytest.raises(CorruptChunkError, match="no canonical JSON"):
            decode_manifest(data, expect=Digest(sha256_hex(data)))

    @pytest.mark.parametrize(
        "data",
        [
            b"[" * 200_000,
            b'{"a":' * 200_000,
            b'{"format":1,"format":1}',
            b"9" * 10_000,
            b'{"format":' + b"9" * 5000 + b"}",
            b'{"format":NaN}',
            b'{"format":1,"required_features":[' + b'"x",' * 1000 + b'"x"]}',
            "{\ud800".encode("utf-8", "surrogatepass"),
        ],
    )
    def test_known_tricks(self, data: bytes) -> None:
        with at_most(16 * MIB), pytest.raises((CorruptChunkError, IncompatibleError)):
            decode_manifest(data, expect=Digest(sha256_hex(data)))

    def test_is_not_read_when_it_is_too_large(self) -> None:
        """By its size alone: the storage says it before a byte is read."""

        class Huge(MemoryStorage):
            def head(self, name: str) -> Any:
                return super().head(name).__class__(name=name, nbytes=1 << 40, modified=0.0)

        storage = Huge()
        storage.put(f"manifests/{SNAPSHOT}.json", MANIFEST)

        with at_most(MIB), pytest.raises(CorruptChunkError, match="at most"):
            Repository(storage).manifest(SNAPSHOT)


REPOSITORY.catalog(DECODED)  # loads pyarrow, whose memory isn't the catalog's


def decode(data: bytes, num_rows: int | None = None) -> object:
    rows = DECODED.catalog.num_rows if num_rows is None else num_rows
    return decode_catalog(data, num_rows=rows, shard_bytes=SHARD_BYTES, what="catalog x")


class TestCatalog:
    def test_other_bytes_are_never_this_catalog(self) -> None:
        """Its digest is compared before Parquet sees a byte."""
        storage = MemoryStorage()
        name = f"catalogs/{DECODED.catalog.digest}.parquet"
        for at in range(0, len(CATALOG), 37):
            changed = bytearray(CATALOG)
            changed[at] ^= 1
            storage.put(name, changed)
            with pytest.raises(CorruptChunkError, match="damaged"):
                Repository(storage).catalog(DECODED)

    @settings(parent=FEW, max_examples=200)
    @given(changed_bytes(CATALOG))
    def test_one_with_a_digest_of_its_own_is_read_or_refused(self, data: bytes) -> None:
        with at_most(8 * MIB), suppress(KvsnapError):
            decode(data)

    @FEW
    @given(st.data())
    def test_rows_that_contradict_the_manifest_or_each_other_are_refused(self, data: st.DataObject) -> None:
        catalog = REPOSITORY.catalog(DECODED)
        name = data.draw(st.sampled_from(["parent_row", "depth", "tokens", "shard", "offset", "nbytes"]))
        row = data.draw(st.integers(0, len(catalog) - 1))
        values = getattr(catalog, name).copy()
        before = values[row]
        values[row] = data.draw(st.integers(-(2**31), 2**31 - 1))
        fields = {field: getattr(catalog, field) for field in catalog.__slots__}
        changed = type(catalog)(**{**fields, name: values})

        try:
            decoded = decode(encode_catalog(changed))
        except KvsnapError:
            return

        # What fits by itself is compared with the shard's header, field by field, before anything is imported.
        assert values[row] == before or name in ("tokens", "offset", "nbytes", "parent_row", "shard", "depth")
        assert len(decoded) == len(catalog)  # type: ignore[arg-type]

    @pytest.mark.parametrize("trick", ["long scope", "prefixes", "many scopes", "page of zeros", "lying footer"])
    def test_bombs_are_not_unpacked(self, tmp_path: Path, trick: str) -> None:
        """A few kilobytes that unpack to gigabytes. In a process that may not take 1.5 GiB more than it has."""
        path = tmp_path / "bomb"
        path.write_bytes(bomb(trick))
        assert path.stat().st_size < 3 * MIB
        code = f"""
import os, resource, sys
from pathlib import Path
import pyarrow, pyarrow.parquet, numpy
from kvsnap.catalog import decode_catalog
from kvsnap.errors import CorruptChunkError
pyarrow.set_cpu_count(2)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1536 << 20),) * 2)
data = Path({str(path)!r}).read_bytes()
before = pyarrow.default_memory_pool().max_memory()
try:
    decode_catalog(data, num_rows={BOMB_ROWS}, shard_bytes=[1 << 40], what="catalog x")
except CorruptChunkError as error:
    print(error)
else:
    raise SystemExit("accepted")
assert pyarrow.default_memory_pool().max_memory() - before < 256 << 20, pyarrow.default_memory_pool().max_memory()
sys.stdout.flush()
os._exit(0)  # a thread of pyarrow's that is just starting would abort an ordinary end
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": ":".join(sys.path), "ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
        assert done.returncode == 0, done.stdout + done.stderr


BOMB_ROWS = 20_000


def bomb(trick: str) -> bytes:
    """A catalog of columns that are right and a scope that isn't."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    n = BOMB_ROWS
    keys = np.random.default_rng(0).integers(0, 256, (64, 32), np.uint8).repeat(n // 64 + 1, axis=0)[:n].copy()
    keys[:, :4] = np.arange(n, dtype=">u4").view(np.uint8).reshape(-1, 4)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        if name in ("key", "xxh3", "blake3"):
            width = 16 if name == "xxh3" else 32
            data = pa.py_buffer(
                np.ascontiguousarray(keys[:, :width] if name == "key" else np.zeros((n, width), np.uint8))
            )
            columns[name] = pa.Array.from_buffers(pa.binary(width), n, [None, data])
        elif name == "scope":
            long = "x" * (20 << 20)
            scopes: list[str] = {
                "long scope": [long],
                "prefixes": ["x" * 10_000 + str(i) for i in range(n)],
                "many scopes": [f"mm{i:0600}" for i in range(n)],
            }.get(trick, ["x" * (200 << 20)] if trick == "page of zeros" else [long])
            if len(scopes) == n:
                columns[name] = pa.array(scopes)
            else:
                columns[name] = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, np.int32)), pa.array(scopes))
        else:
            value = -1 if name == "parent_row" else 0
            array = np.full(n, value, np.int64)
            if name == "offset":
                array = np.arange(1, n + 1) * 4096
            if name in ("tokens", "nbytes"):
                array[:] = 4096
            columns[name] = pa.array(
                array.astype("int64" if name in ("offset", "nbytes", "hits", "last_use") else "int32")
            )
    schema = pa.schema([pa.field(name, column.type, nullable=False) for name, column in columns.items()])
    sink = pa.BufferOutputStream()
    delta = trick == "prefixes"
    pq.write_table(
        pa.Table.from_arrays(list(columns.values()), schema=schema), sink, compression="zstd", store_schema=False,
        use_dictionary=False if delta else ["scope"], column_encoding={"scope": "DELTA_BYTE_ARRAY"} if delta else None,
        dictionary_pagesize_limit=1 << 30, write_statistics=False,
    )  # fmt: skip
    data = bytes(sink.getvalue())
    if trick != "lying footer":
        return data
    # the footer says that the scope's pages unpack to little; the pages' own headers decide
    meta = pq.read_metadata(pa.BufferReader(data)).row_group(0)
    size = meta.column(COLUMNS.index("scope")).total_uncompressed_size
    for value in (size, meta.total_byte_size):
        data = data.replace(varint(value), varint(1000).ljust(len(varint(value)), b"\x80")[:-1] + b"\x00")
    return data


def varint(value: int) -> bytes:
    """As Thrift's compact protocol has signed integers."""
    value, out = value << 1, bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


class TestShardHeader:
    @settings(parent=FEW, max_examples=200)
    @given(changed_bytes(SHARD[: 8 + int.from_bytes(SHARD[:8], "little")]))
    def test_is_refused_or_says_the_same(self, head: bytes) -> None:
        """From memory, as an import reads it."""
        data = head + SHARD[8 + int.from_bytes(SHARD[:8], "little") :]

        def read() -> ShardHeader:
            length = header_length(data[:8], len(data))
            return decode_header(data[:length], len(data), DECODED.namespace)

        with at_most(2 * MIB):
            refused_or_same(read, ORIGINAL_HEADER)

    @FEW
    @given(data=st.data())
    def test_from_a_file_without_a_namespace(self, data: st.DataObject) -> None:
        content = data.draw(changed_bytes(SHARD[:4096])) + SHARD[4096:]
        with tempfile.NamedTemporaryFile() as file:
            file.write(content)
            file.flush()
            with at_most(4 * MIB):
                refused_or_same(lambda: read_header(Path(file.name)), ORIGINAL_HEADER)

    @pytest.mark.parametrize("length", [0, 1, 7, 4088, 32 << 20, (32 << 20) - 8, 2**31, 2**63, 2**64 - 1])
    def test_lengths(self, tmp_path: Path, length: int) -> None:
        """Nothing is allocated for a header that can't be one; a sparse file of 1 TiB costs nothing."""
        path = tmp_path / "shard"
        with path.open("wb") as file:
            file.write(length.to_bytes(8, "little"))
            file.truncate(1 << 40)

        # a header of 32 MiB may be one: it is read, and it is no JSON
        with at_most(200 * MIB if MIB < length <= 32 * MIB else MIB), pytest.raises(CorruptChunkError):
            read_header(path, expect=DECODED.namespace)


ORIGINAL_HEADER = decode_header(SHARD[: header_length(SHARD[:8], len(SHARD))], len(SHARD), DECODED.namespace)


class TestSmallObjects:
    """No checksum covers these: what is accepted must be well-formed, and what it names is checked where it is."""

    @FEW
    @given(changed_bytes(REF) | changed_json(REF))
    def test_ref(self, data: bytes) -> None:
        with at_most(MIB):
            try:
                ref = decode_ref(data, "prod", "memory")
            except KvsnapError:
                return
        for digest in (ref.snapshot, ref.previous, *(item.snapshot for item in ref.history)):
            assert digest is None or (len(digest) == 64 and set(digest) <= set("0123456789abcdef"))

    @FEW
    @given(changed_bytes(REF))
    def test_a_ref_that_names_another_snapshot_names_none(self, data: bytes) -> None:
        storage = MemoryStorage()
        storage.put("kvsnap.json", MARKER)
        storage.put("refs/prod.json", data)
        storage.put(f"manifests/{SNAPSHOT}.json", MANIFEST)
        repository = Repository.open(storage)

        refused_or_same(lambda: repository.manifest(repository.resolve("prod")), DECODED)

    @FEW
    @given(changed_bytes(GC_LIST.read_bytes()) | changed_json(GC_LIST.read_bytes()))
    def test_list_of_what_is_to_be_deleted(self, data: bytes) -> None:
        storage, list_id = MemoryStorage(), GC_LIST.stem
        storage.put(f"gc/{list_id}.json", data)

        try:
            found = read_list(storage, list_id)
        except KvsnapError:
            return
        assert found is not None
        assert all(".." not in name for name in found.objects)

    @FEW
    @given(changed_json(canonical_json({
        "duration": 300, "id": "0" * 32, "kind": "export", "owner": "me", "process": "x/1:2", "seen": ["1" * 32],
        "started": 1, "write_id": "2",
    })))  # fmt: skip
    def test_lease(self, data: bytes) -> None:
        storage = MemoryStorage()
        storage.put("leases/x.json", data)

        try:
            lease = read_lease(storage, "leases/x.json")
        except KvsnapError:
            return
        assert lease is None or isinstance(lease.describe(), str)

    @FEW
    @given(changed_bytes(MARKER) | changed_json(MARKER))
    def test_marker(self, data: bytes) -> None:
        for operation in ("read", "write", "delete", "verify"):
            with suppress(ConfigError, CorruptChunkError, IncompatibleError):
                check_marker(decode_marker(data, "x"), operation, "x")

    @FEW
    @given(changed_bytes(SIGNATURES) | changed_json(SIGNATURES))
    def test_signatures(self, data: bytes) -> None:
        """What is accepted is hex of the right length; whether it is good is another question."""
        try:
            found = decode_signatures(data, "x.sig")
        except CorruptChunkError:
            return
        assert decode_signatures(encode_signatures(found), "x.sig") == sorted(found, key=lambda item: item.key)

    @FEW
    @given(st.data())
    def test_a_changed_signature_is_never_good(self, data: st.DataObject) -> None:
        pytest.importorskip("cryptography")
        (item,) = decode_signatures(SIGNATURES, "x.sig")
        assert item.is_good(MANIFEST)
        field = data.draw(st.sampled_from(["key", "signature", "manifest"]))
        original = MANIFEST if field == "manifest" else bytes.fromhex(getattr(item, field))
        changed = bytearray(original)
        changed[data.draw(st.integers(0, len(original) - 1))] ^= data.draw(st.integers(1, 255))
        if field == "manifest":
            assert not item.is_good(bytes(changed))
        else:
            hexes = {"key": item.key, "signature": item.signature, field: changed.hex()}
            assert not Signature(**hexes).is_good(MANIFEST)


class TestCacheFiles:
    @FEW
    @given(changed_bytes(USAGE))
    def test_usage_is_as_it_was_or_refused(self, data: bytes) -> None:
        with at_most(MIB):
            refused_or_same(lambda: usage.decode(data), usage.decode(USAGE))

    @pytest.mark.parametrize("count", [2**32, 2**60, 2**64 - 1])
    def test_usage_with_a_count_that_can_not_be(self, count: int) -> None:
        import xxhash

        body = b"KVSUSE01" + count.to_bytes(8, "little") + bytes(48)
        with at_most(MIB), pytest.raises(CorruptChunkError):
            usage.decode(body + xxhash.xxh3_128_digest(body))

    @FEW
    @given(changed_bytes(ENGINE) | changed_json(ENGINE))
    def test_engine_record_is_read_or_ignored(self, data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "engines").mkdir()
            (Path(folder) / "engines" / "golden-1.json").write_bytes(data)

            with at_most(MIB):
                records = read_records(Path(folder))

        for record in records:
            assert isinstance(record, EngineRecord)
            assert record.engine_id == "golden-1", "a record can't speak for another file's engine"
            assert "/" not in record.writer

    @FEW
    @given(changed_bytes(NAMESPACE) | changed_json(NAMESPACE))
    def test_namespace_is_as_it_was_or_refused(self, data: bytes) -> None:
        """Its directory is named by its hash; `human` is for people, and anything."""
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / DECODED.namespace.dirname
            directory.mkdir()
            (directory / "namespace.json").write_bytes(data)

            with at_most(MIB):
                try:
                    ns = read_namespace(directory)
                except KvsnapError:
                    return
        assert ns.id() == DECODED.namespace.id()


def test_a_whole_cache_of_garbage_is_looked_through(tmp_path: Path) -> None:
    """Any file may be anything; nothing but a report comes of it."""
    from kvsnap.verify import verify_cache_dir

    rng = random.Random(1)
    for round_ in range(10):
        cache = tmp_path / str(round_)
        filled_cache(cache)
        for path in [path for path in cache.rglob("*") if path.is_file() and path.name != "kvsnap.json"]:
            if rng.random() < 0.5:
                data = bytearray(path.read_bytes() or b"x")
                for _ in range(3):
                    data[rng.randrange(len(data))] = rng.randrange(256)
                path.write_bytes(data[: rng.randrange(len(data)) + 1])
        with suppress(KvsnapError):
            verify_cache_dir(cache, read_data=True)
