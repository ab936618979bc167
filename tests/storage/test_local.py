"""Local storage: objects appear whole or not at all, and no name leaves the root."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvsnap.errors import ConfigError, CorruptChunkError, NotFoundError, StorageError
from kvsnap.storage import LocalStorage, open_storage


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def test_put_if_absent_never_replaces(storage: LocalStorage) -> None:
    assert storage.put_if_absent("a/b", b"first")
    assert not storage.put_if_absent("a/b", b"second")

    assert storage.get("a/b", max_bytes=100) == b"first"


def test_put_replaces(storage: LocalStorage) -> None:
    storage.put("refs/x", b"first")
    storage.put("refs/x", b"second")

    assert storage.get("refs/x", max_bytes=100) == b"second"


def test_put_copies(storage: LocalStorage) -> None:
    """Callers reuse their buffers; a stored object must not change with them."""
    buffer = bytearray(b"chunk")

    def pieces() -> Iterator[memoryview]:
        for text in (b"one", b"two"):
            buffer[:3] = text
            yield memoryview(buffer)[:3]

    storage.put_stream(pieces, lambda: "x")
    storage.put_if_absent("y", memoryview(buffer))
    buffer[:] = bytes(len(buffer))

    assert storage.get("x", max_bytes=10) == b"onetwo"
    assert storage.get("y", max_bytes=10) == b"twonk"


def test_a_stream_that_fails_stores_nothing(storage: LocalStorage) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"one"
        raise CorruptChunkError("bad chunk")

    def refuse() -> str:
        raise CorruptChunkError("bad digest")

    with pytest.raises(CorruptChunkError, match="bad chunk"):
        storage.put_stream(pieces, lambda: "x")
    with pytest.raises(CorruptChunkError, match="bad digest"):
        storage.put_stream(lambda: [b"one"], refuse)

    assert storage.is_empty()
    assert os.listdir(storage.root) == []


def test_one_of_many_racing_writers_wins(storage: LocalStorage) -> None:
    """D09: the object is one writer's, whole; all others are told."""
    won: list[int] = []
    start = threading.Barrier(8)

    def write(i: int) -> None:
        start.wait()
        if storage.put_if_absent("shards/aa/x", bytes([i]) * 100_000):
            won.append(i)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(won) == 1
    assert storage.get("shards/aa/x", max_bytes=1 << 20) == bytes(won) * 100_000


def test_reads_ranges_into_a_buffer(storage: LocalStorage) -> None:
    storage.put_if_absent("x", b"0123456789")
    buffer = bytearray(4)

    assert storage.read_into("x", memoryview(buffer), 3) == 4
    assert bytes(buffer) == b"3456"
    assert storage.read_into("x", memoryview(buffer), 8) == 2
    assert storage.read_into("x", memoryview(buffer), 50) == 0


def test_reads_in_one_stream(storage: LocalStorage) -> None:
    storage.put_if_absent("x", b"0123456789")
    buffer = memoryview(bytearray(7))

    with storage.open_read("x") as reader:
        assert [reader.readinto(buffer) for _ in range(3)] == [7, 3, 0]


def test_lists_in_order_below_a_prefix(storage: LocalStorage) -> None:
    for name in ("shards/b/2", "shards/a/1", "refs/x", "shards/b/1"):
        storage.put_if_absent(name, b"12")
    (storage.root / "shards" / ".hidden").write_bytes(b"")
    (storage.root / "shards" / "bad name").write_bytes(b"")
    (storage.root / "shards" / "link").symlink_to(storage.root / "refs")

    assert [(info.name, info.nbytes) for info in storage.list("shards/")] == [
        ("shards/a/1", 2),
        ("shards/b/1", 2),
        ("shards/b/2", 2),
    ]
    assert next(iter(storage.list(""))).name == "refs/x"
    assert list(storage.list("nothing/")) == []


def test_what_is_not_there(storage: LocalStorage) -> None:
    for act in (
        lambda: storage.head("a/x"),
        lambda: storage.get("a/x", max_bytes=1),
        lambda: storage.read_into("a/x", memoryview(bytearray(1)), 0),
        lambda: storage.open_read("a/x").__enter__(),
    ):
        with pytest.raises(NotFoundError, match="a/x"):
            act()
    assert storage.delete("a/x") is False


def test_deletes(storage: LocalStorage) -> None:
    storage.put_if_absent("a/x", b"")

    assert storage.delete("a/x") is True
    assert list(storage.list("")) == []


def test_too_large_an_object_is_refused_before_it_is_read(storage: LocalStorage) -> None:
    """D18: a sparse terabyte is one `truncate` away."""
    storage.put_if_absent("x", b"")
    os.truncate(storage.root / "x", 1 << 40)

    with pytest.raises(CorruptChunkError, match="at most 100"):
        storage.get("x", max_bytes=100)


@pytest.mark.parametrize(
    "name",
    ["", "/", "/etc/passwd", "..", "../x", "a/../x", "a//b", "a/", ".x", "a/.x", "a\\b", "a\0b", "a\n", "ä", "a b",
     "x" * 300, "/".join("a" * 20)],
)  # fmt: skip
def test_names_never_leave_the_root(storage: LocalStorage, name: str) -> None:
    """D17"""
    for act in (
        lambda: storage.put(name, b""),
        lambda: storage.put_if_absent(name, b""),
        lambda: storage.head(name),
        lambda: storage.delete(name),
    ):
        with pytest.raises(ConfigError, match="name"):
            act()
    assert not storage.root.exists() or os.listdir(storage.root) == []


def test_links_and_special_files_are_refused(storage: LocalStorage, tmp_path: Path) -> None:
    """D17: a link would lead out; a pipe would hang the reader."""
    storage.put_if_absent("a/x", b"secret")
    (storage.root / "b").symlink_to(storage.root / "a")
    (storage.root / "a" / "link").symlink_to(storage.root / "a" / "x")
    os.mkfifo(storage.root / "pipe")

    for name in ("b/x", "a/link", "pipe", "a"):
        with pytest.raises(StorageError):
            storage.head(name)
    with pytest.raises(StorageError, match="symbolic link"):
        storage.put("b/y", b"")
    assert not (storage.root / "a" / "y").exists()


def test_urls(tmp_path: Path) -> None:
    assert open_storage(str(tmp_path)).url == str(tmp_path)
    assert open_storage(f"file://{tmp_path}").url == str(tmp_path)
    assert open_storage("file:///a%20b").url == "/a b"
    for url in ("", "s3://bucket/x", "http://x/y", "file://host/x"):
        with pytest.raises(ConfigError):
            open_storage(url)
