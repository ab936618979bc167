"""The digest of weights."""

from __future__ import annotations

import os
from hashlib import sha256
from pathlib import Path

import pytest

from kvsnap.errors import ConfigError, StorageError
from kvsnap.weights import weights_digest

OLD_NS = 1_600_000_000_000_000_000


def make_file(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def expected(*contents: bytes) -> str:
    return "sha256:" + sha256(b"".join(sorted(sha256(data).digest() for data in contents))).hexdigest()


def test_is_the_hash_of_sorted_digests(tmp_path: Path) -> None:
    files = [make_file(tmp_path / name, name.encode() * 100_000) for name in "abc"]

    digest = weights_digest(files, cache_file=None)

    assert digest == expected(*(name.encode() * 100_000 for name in "abc"))


def test_path_name_and_order_do_not_count(tmp_path: Path) -> None:
    """C09: the same weights elsewhere are the same weights."""
    here = [make_file(tmp_path / "here" / name, data) for name, data in (("1", b"x"), ("2", b"y"))]
    there = [make_file(tmp_path / "there" / name, data) for name, data in (("a", b"y"), ("b", b"x"))]

    assert weights_digest(here, cache_file=None) == weights_digest(there, cache_file=None)


def test_other_content_at_the_same_path_counts(tmp_path: Path) -> None:
    """A01: an update under the same name, size and mtime, with the cache of the old content at hand."""
    path, cache = make_file(tmp_path / "model", b"old!"), tmp_path / "cache.json"
    os.utime(path, ns=(OLD_NS, OLD_NS))
    before = weights_digest([path], cache_file=cache)

    path.write_bytes(b"new!")
    os.utime(path, ns=(OLD_NS, OLD_NS))

    assert weights_digest([path], cache_file=cache) == expected(b"new!") != before


def test_known_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = make_file(tmp_path / "model", b"weights"), tmp_path / "deep" / "cache.json"
    calls: list[tuple[int, int]] = []
    settle(monkeypatch)
    first = weights_digest([path], cache_file=cache, progress=lambda *call: calls.append(call))

    second = weights_digest([path], cache_file=cache, progress=lambda *call: calls.append(call))

    assert first == second == expected(b"weights")
    assert calls == [(7, 7)]


def test_fresh_file_is_not_remembered(tmp_path: Path) -> None:
    """It may be written once more within the same tick of its ctime."""
    path, cache = make_file(tmp_path / "model", b"weights"), tmp_path / "cache.json"

    weights_digest([path], cache_file=cache)

    assert not cache.exists()


@pytest.mark.parametrize("junk", [b"", b"[]", b"{", b'{"1:2:3:4:5": 6}', b"\xff"])
def test_damaged_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, junk: bytes) -> None:
    path, cache = make_file(tmp_path / "model", b"weights"), make_file(tmp_path / "cache.json", junk)
    settle(monkeypatch)

    assert weights_digest([path], cache_file=cache) == expected(b"weights")
    assert cache.read_bytes() != junk


def test_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_file(tmp_path / "model", b"weights")
    settle(monkeypatch)

    assert weights_digest([path], cache_file=path / "x" / "cache.json") == expected(b"weights")


def test_hub_blob_is_not_read(tmp_path: Path) -> None:
    """The Hub names a blob by its sha256: nothing to hash. Proved by a blob whose content is something else."""
    blob = make_file(tmp_path / "blobs" / ("5a" * 32), b"not hashed")
    link = tmp_path / "snapshots" / "rev" / "model.safetensors"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)

    digest = weights_digest([link], cache_file=None)

    assert digest == "sha256:" + sha256(bytes.fromhex("5a" * 32)).hexdigest()


def test_git_blob_is_read(tmp_path: Path) -> None:
    """Small Hub files have a SHA-1 as their blob's name, which is no digest of the content alone."""
    blob = make_file(tmp_path / "blobs" / ("5a" * 20), b"hashed")
    (tmp_path / "link").symlink_to(blob)

    assert weights_digest([tmp_path / "link"], cache_file=None) == expected(b"hashed")


def test_plain_file_with_a_digest_as_name_is_read(tmp_path: Path) -> None:
    path = make_file(tmp_path / "blobs" / ("5a" * 32), b"hashed")

    assert weights_digest([path], cache_file=None) == expected(b"hashed")


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    files = [make_file(tmp_path / str(i), bytes(5_000_000)) for i in range(3)]
    calls: list[tuple[int, int]] = []

    weights_digest(files, cache_file=None, threads=2, progress=lambda *call: calls.append(call))

    assert calls == sorted(calls)
    assert calls[-1] == (15_000_000, 15_000_000)


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weight files found"):
        weights_digest([], cache_file=None)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't be read"):
        weights_digest([tmp_path / "gone"], cache_file=None)
    with pytest.raises(StorageError, match="no regular file"):
        weights_digest([tmp_path], cache_file=None)


def test_file_that_grows_meanwhile_is_refused(tmp_path: Path) -> None:
    """A download that is still running."""
    path = make_file(tmp_path / "model", bytes(9_000_000))

    def grow(done: int, total: int) -> None:
        with path.open("ab") as file:
            file.write(b"more")

    with pytest.raises(StorageError, match="changed while it was read"):
        weights_digest([path], cache_file=None, progress=grow)


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the files had been written long ago (ctime can't be set)."""
    monkeypatch.setattr("kvsnap.weights._SETTLED_S", -1.0)
