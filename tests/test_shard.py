from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvsnap.direct_io import ALIGN, O_DIRECT
from kvsnap.errors import CorruptChunkError, IncompatibleError, StorageError
from kvsnap.namespace import Namespace
from kvsnap.shard import (
    MAX_HEADER_BYTES,
    checksum,
    encode_header,
    read_header,
    read_open_header,
    write_shard,
)
from tests.disk_fakes import make_chunks, make_namespace, write_shard_file

NS = make_namespace()
CHUNKS = make_chunks(NS, 4, last_tokens=32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_shard_file(tmp_path / "shard.safetensors", NS, CHUNKS)


def split(path: Path) -> tuple[dict[str, Any], bytes]:
    """A shard's header as parsed JSON, and its data."""
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def join(path: Path, header: str, data: bytes, *, pad: int = ALIGN) -> None:
    text = header.encode()
    length = -(-(8 + len(text)) // pad) * pad - 8
    path.write_bytes(struct.pack("<Q", length) + text.ljust(length) + data)


def canonical(value: dict[str, Any]) -> str:
    """JCS of the metadata with a right check."""
    value = {name: item for name, item in value.items() if name != "check"}
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"))
    check = xxhash.xxh3_128_hexdigest(plain.encode())
    return json.dumps({**value, "check": check}, sort_keys=True, separators=(",", ":"))


def change(path: Path, edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    """Let `edit` change the header's tensors and the metadata, and write both back with a right check."""
    header, data = split(path)
    meta = json.loads(header["__metadata__"]["kvsnap"])
    edit(header, meta)
    header["__metadata__"]["kvsnap"] = canonical(meta)
    join(path, json.dumps(header, separators=(",", ":")), data)


class TestRoundTrip:
    def test_entries_come_back_as_written(self, path: Path) -> None:
        header = read_header(path, expect=NS)

        for chunk, entry in zip(CHUNKS, header.chunks, strict=True):
            for name in ("key", "parent", "depth", "tokens", "xxh3", "block_keys"):
                assert getattr(entry, name) == getattr(chunk, name)
            assert entry.offset % ALIGN == entry.nbytes % ALIGN == 0
            stored = memoryview(path.read_bytes())[entry.offset : entry.offset + entry.nbytes]
            assert stored == b"".join(chunk.views)
            assert checksum([stored]) == entry.xxh3
        assert header.file_bytes == path.stat().st_size
        assert (header.identity, header.layout) == (NS.identity_hash, NS.layout_hash)

    def test_the_same_without_knowing_the_namespace(self, path: Path) -> None:
        assert read_header(path) == read_header(path, expect=NS)

    def test_an_open_file_will_do(self, path: Path) -> None:
        with path.open("rb") as file:
            assert read_open_header(file.fileno(), NS) == read_header(path, expect=NS)

    @pytest.mark.parametrize("ranks", [1, 3])
    @pytest.mark.parametrize("page", [(2, 3, 16, 8), (2, 1, 16, 64), (7,)])
    def test_other_shapes(self, tmp_path: Path, ranks: int, page: tuple[int, ...]) -> None:
        ns = make_namespace(ranks=ranks, page=page)
        chunks = make_chunks(ns, 3, last_tokens=16)

        header = read_header(write_shard_file(tmp_path / "s", ns, chunks), expect=ns)

        assert [entry.nbytes for entry in header.chunks] == [ns.geometry.chunk_bytes(chunk.tokens) for chunk in chunks]
        assert read_header(tmp_path / "s") == header

    def test_o_direct_writes_the_same_bytes(self, path: Path, tmp_path: Path) -> None:
        header, _ = encode_header(NS, "", CHUNKS)
        fd = os.open(tmp_path / "direct", os.O_CREAT | os.O_WRONLY | O_DIRECT, 0o600)
        try:
            nbytes = write_shard(fd, header, [chunk.views for chunk in CHUNKS])
        finally:
            os.close(fd)

        assert nbytes == path.stat().st_size
        assert (tmp_path / "direct").read_bytes() == path.read_bytes()

    def test_a_header_is_deterministic(self) -> None:
        assert encode_header(NS, "mm", CHUNKS) == encode_header(NS, "mm", CHUNKS)

    def test_any_amount_of_padding_is_read(self, path: Path) -> None:
        header, data = split(path)
        join(path, json.dumps(header, separators=(",", ":")), data, pad=16 * ALIGN)

        assert read_header(path, expect=NS).data_start == 16 * ALIGN

    def test_another_writer_of_the_same_header_is_read(self, path: Path) -> None:
        """The order of tensors and white space outside the metadata are free in safetensors."""
        expected = read_header(path, expect=NS)
        header, data = split(path)
        join(path, json.dumps(dict(reversed(header.items())), indent=1), data)

        found = read_header(path, expect=NS)

        assert [entry[:6] for entry in found.chunks] == [entry[:6] for entry in expected.chunks]


class TestSafetensors:
    """Any safetensors reader opens every shard."""

    @pytest.mark.parametrize("page", [(2, 3, 16, 8), (2, 1, 16, 64)])
    def test_numpy(self, tmp_path: Path, page: tuple[int, ...]) -> None:
        ns = dataclasses.replace(make_namespace(ranks=2, page=page))
        ns = dataclasses.replace(ns, layout=dataclasses.replace(ns.layout, dtype="F16"))
        chunks = make_chunks(ns, 2)
        path = write_shard_file(tmp_path / "s.safetensors", ns, chunks)

        tensors = safetensors.numpy.load_file(path)

        for chunk in chunks:
            for i, view in enumerate(chunk.views):
                tensor = tensors.pop(f"{chunk.key.hex()}.{i}")
                assert tensor.shape == ns.geometry.tensor_shape(i, 4)
                assert tensor.tobytes() == view[: tensor.nbytes]
        assert all(name.endswith(".pad") and not tensor.any() for name, tensor in tensors.items())

    def test_torch(self, path: Path) -> None:
        torch = pytest.importorskip("torch")
        load_file = pytest.importorskip("safetensors.torch").load_file

        tensors = load_file(path)

        tensor = tensors[f"{CHUNKS[0].key.hex()}.0"]
        assert tensor.dtype == torch.bfloat16
        nbytes = NS.geometry.slice_bytes(0, 4)
        assert tensor.view(torch.uint8).numpy().tobytes() == CHUNKS[0].views[0][:nbytes]

    def test_safe_open(self, path: Path) -> None:
        with safetensors.safe_open(path, framework="numpy") as file:
            assert list(file.metadata()) == ["kvsnap"]
            assert f"{CHUNKS[-1].key.hex()}.0.pad" in file.keys()  # noqa: SIM118
            assert not np.any(file.get_tensor(f"{CHUNKS[-1].key.hex()}.0.pad"))


EDITS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "token count not whole blocks": (lambda h, m: m["chunks"][3].update(tokens=31), "multiple of 16"),
    "no tokens": (lambda h, m: m["chunks"][3].update(tokens=0), "block keys"),
    "more tokens than a chunk": (lambda h, m: m["chunks"][0].update(tokens=128), "block keys, expected 8"),
    "float for int": (lambda h, m: m["chunks"][0].update(tokens=64.0), "not canonical"),
    "bool for int": (lambda h, m: m["chunks"][1].update(depth=True), "not canonical"),
    "negative depth": (lambda h, m: m["chunks"][0].update(depth=-1), "not canonical"),
    "block key missing": (lambda h, m: m["chunks"][0].update(block_keys="ab" * 48), "3 block keys, expected 4"),
    "capital hex": (lambda h, m: m["chunks"][0].update(key=m["chunks"][0]["key"].upper()), "not lower-case hex"),
    "spaces in hex": (lambda h, m: m["chunks"][0].update(key="  " + m["chunks"][0]["key"][2:]), "not lower-case hex"),
    "short key": (lambda h, m: m["chunks"][0].update(key="ab"), "not canonical"),
    "field missing": (lambda h, m: m["chunks"][0].pop("xxh3"), "not canonical"),
    "field unknown": (lambda h, m: m["chunks"][0].update(more=1), "not canonical"),
    "chunk twice": (lambda h, m: m["chunks"].insert(0, m["chunks"][0]), "twice"),
    "child before parent": (lambda h, m: m["chunks"].reverse(), "comes after a chunk that follows it"),
    "own parent": (lambda h, m: m["chunks"][0].update(parent=m["chunks"][0]["key"]), "comes after"),
    "depth skipped": (lambda h, m: m["chunks"][2].update(depth=5), "can't follow"),
    "no chunks": (lambda h, m: m.update(chunks=[]), "0 chunks"),
    "chunks not a list": (lambda h, m: m.update(chunks="x"), "not canonical"),
    "scope out of order": (lambda h, m: m.update(scope="salted,mm"), "scope"),
    "scope with a comma too many": (lambda h, m: m.update(scope=",mm"), "scope"),
    "scope unknown": (lambda h, m: m.update(scope="secret"), "scope"),
    "unknown field": (lambda h, m: m.update(more=1), "canonical"),
    "tensor missing": (lambda h, m: h.pop(f"{CHUNKS[0].key.hex()}.0"), "is missing"),
    "filler missing": (lambda h, m: h.pop(f"{CHUNKS[3].key.hex()}.0.pad"), "is missing"),
    "tensor too many": (lambda h, m: h.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}), "belong here"),
    "dtype": (lambda h, m: h[f"{CHUNKS[0].key.hex()}.0"].update(dtype="F16"), "expected"),
    "shape": (lambda h, m: h[f"{CHUNKS[0].key.hex()}.0"]["shape"].reverse(), "expected"),
    "gap": (lambda h, m: h[f"{CHUNKS[1].key.hex()}.0"].update(data_offsets=[1, 2]), "expected"),
    "offsets as floats": (lambda h, m: h[f"{CHUNKS[0].key.hex()}.0"].update(data_offsets=[0.0, 18432.0]), "expected"),
    "offset far away": (lambda h, m: h[f"{CHUNKS[0].key.hex()}.0"].update(data_offsets=[0, 2**62]), "expected"),
    "second metadata": (lambda h, m: h["__metadata__"].update(other="x"), "__metadata__"),
}  # fmt: skip


class TestStrictReader:
    """Invariant 1: any doubt about a shard is damage, so that none of its chunks can be a hit."""

    @pytest.mark.parametrize("what", EDITS)
    def test_refuses(self, path: Path, what: str) -> None:
        edit, message = EDITS[what]
        change(path, edit)

        with pytest.raises(CorruptChunkError, match=message) as caught:
            read_header(path, expect=NS)

        assert "shard.safetensors is damaged" in str(caught.value)

    @pytest.mark.parametrize(
        ("edit", "field"),
        [
            (lambda h, m: m.update(format=2), "format"),
            (lambda h, m: m.update(format=2, chunks={}, new=1), "format"),
            (lambda h, m: m.update(codec="zstd"), "codec"),
            (lambda h, m: m.update(key_scheme="kvsnap/key/2"), "key_scheme"),
            (lambda h, m: m.update(identity="ab" * 32), "identity"),
            (lambda h, m: m.update(layout="ab" * 32), "layout"),
            (lambda h, m: m.update(chunk_tokens=128), "chunk_tokens"),
        ],
    )
    def test_refuses_what_is_made_for_others(self, path: Path, edit: Any, field: str) -> None:
        change(path, edit)

        with pytest.raises(IncompatibleError) as caught:
            read_header(path, expect=NS)

        assert caught.value.fields == (field,)

    def test_refuses_a_short_chunk_with_children(self, tmp_path: Path) -> None:
        """A short chunk is always a leaf."""
        chunks = make_chunks(NS, 3)
        short = make_chunks(NS, 1, seed=9, last_tokens=32)[0]
        chunks[1] = short._replace(key=chunks[1].key, parent=chunks[0].key, depth=1)

        with pytest.raises(CorruptChunkError, match="can't follow"):
            encode_header(NS, "", chunks)

    def test_refuses_a_key_twice_in_the_header(self, path: Path) -> None:
        header, data = split(path)
        text = json.dumps(header, separators=(",", ":"))
        name = json.dumps(f"{CHUNKS[0].key.hex()}.0")
        twice = f"{text[:-1]},{name}:{json.dumps(header[json.loads(name)])}}}"
        join(path, twice, data)

        with pytest.raises(CorruptChunkError, match="key twice"):
            read_header(path, expect=NS)

    def test_refuses_a_key_twice_in_the_metadata(self, path: Path) -> None:
        header, data = split(path)
        plain = canonical(json.loads(header["__metadata__"]["kvsnap"]))
        body = plain[plain.index('"chunk_tokens"') :].replace('"scope":""', '"scope":"","scope":""')
        check = xxhash.xxh3_128_hexdigest(("{" + body).encode())
        header["__metadata__"]["kvsnap"] = f'{{"check":"{check}",{body}'
        join(path, json.dumps(header, separators=(",", ":")), data)

        with pytest.raises(CorruptChunkError, match="canonical"):
            read_header(path, expect=NS)

    def test_refuses_a_wrong_check(self, path: Path) -> None:
        raw = path.read_bytes()
        spot = raw.index(CHUNKS[0].xxh3.hex().encode())
        flipped = b"0" if raw[spot : spot + 1] != b"0" else b"1"
        path.write_bytes(raw[:spot] + flipped + raw[spot + 1 :])

        with pytest.raises(CorruptChunkError, match=r"has check [0-9a-f]{12}, read [0-9a-f]{12}"):
            read_header(path, expect=NS)

    @pytest.mark.parametrize("change", [-1, 1, -ALIGN, ALIGN])
    def test_refuses_another_length(self, path: Path, change: int) -> None:
        os.truncate(path, path.stat().st_size + change)

        with pytest.raises(CorruptChunkError, match="bytes, expected"):
            read_header(path, expect=NS)

    def test_refuses_more_chunks_than_a_shard_holds(self) -> None:
        ns = make_namespace(page=(1,), layers=1, chunk_tokens=16)

        with pytest.raises(CorruptChunkError, match="513 chunks, expected 1 to 512"):
            encode_header(ns, "", make_chunks(ns, 513))


class TestHostileFiles:
    """D18: nothing is unpickled, and no number in a file decides how much memory is taken."""

    @pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
    def test_header_length_is_capped_before_it_is_used(self, path: Path, length: int) -> None:
        with path.open("r+b") as file:
            file.write(struct.pack("<Q", length))
            os.truncate(path, 1 << 40)  # sparse: the length alone would pass

        with pytest.raises(CorruptChunkError, match="expected at most"):
            read_header(path, expect=NS)

    def test_a_header_beyond_the_file(self, path: Path) -> None:
        path.write_bytes(struct.pack("<Q", 3 * ALIGN - 8) + b"{}")

        with pytest.raises(CorruptChunkError, match="bytes in all"):
            read_header(path, expect=NS)

    def test_a_header_that_is_not_aligned(self, path: Path) -> None:
        path.write_bytes(struct.pack("<Q", 2) + b"{}" + bytes(ALIGN))

        with pytest.raises(CorruptChunkError, match="multiple of 4096"):
            read_header(path, expect=NS)

    @pytest.mark.parametrize("expect", [NS, None])
    @pytest.mark.parametrize(
        "text",
        ["", "[]", "{}", "null", "[" * 100_000, "1" * 5000, '{"__metadata__":{"kvsnap":1}}', '{"__metadata__":[]}',
         '{"__metadata__":{"kvsnap":"{}"}}', '{"__metadata__":{"kvsnap":"\\\\"}}', '{"a":NaN}',
         '{"__metadata__":{"kvsnap":"'],
    )  # fmt: skip
    def test_other_json(self, path: Path, text: str, expect: Namespace | None) -> None:
        join(path, text, b"")

        with pytest.raises(CorruptChunkError):
            read_header(path, expect=expect)

    def test_a_pickle(self, path: Path) -> None:
        path.write_bytes(pickle.dumps({"kv": list(range(5000))}).ljust(4 * ALIGN))

        with pytest.raises(CorruptChunkError):
            read_header(path, expect=NS)

    def test_not_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "dir").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "dir")

        for name in ("dir", "link", "missing"):
            with pytest.raises(StorageError):
                read_header(tmp_path / name, expect=NS)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_any_changed_byte_of_the_header_is_noticed(self, tmp_path: Path, data: st.DataObject) -> None:
        """Invariant 1, A28: also with `expect` left out, nothing but padding may differ from what was written."""
        header, _ = encode_header(NS, "", CHUNKS)
        size = write_shard_file(tmp_path / "s", NS, CHUNKS).stat().st_size
        spot = data.draw(st.integers(0, len(header.rstrip()) - 1))
        value = data.draw(st.integers(0, 255).filter(lambda value: value != header[spot]))
        changed = tmp_path / "changed"
        changed.write_bytes(header[:spot] + bytes([value]) + header[spot + 1 :])
        os.truncate(changed, size)

        with pytest.raises((CorruptChunkError, IncompatibleError)):
            read_header(changed, expect=data.draw(st.sampled_from([NS, None])))


def test_a_random_tree_is_written_parents_first(tmp_path: Path) -> None:
    """A shard may hold several branches; only the order matters."""
    rng = random.Random(5)
    chunks = make_chunks(NS, 6)
    for i in range(1, 6):
        parent = rng.randrange(i)
        chunks[i] = chunks[i]._replace(parent=chunks[parent].key, depth=chunks[parent].depth + 1)

    header = read_header(write_shard_file(tmp_path / "s", NS, chunks), expect=NS)

    assert [entry.parent for entry in header.chunks] == [chunk.parent for chunk in chunks]


@pytest.mark.parametrize(
    "scope", ["", "mm", "salted", "mm,salted", "lora:00ff", "lora:00ff,mm,salted", "lora:00ff,salted"]
)
def test_scopes(tmp_path: Path, scope: str) -> None:
    path = write_shard_file(tmp_path / "s", NS, CHUNKS, scope)

    assert read_header(path, expect=NS).scope == scope
