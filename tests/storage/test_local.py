"""Local storage: the suite, and that nothing leaves the root, is swept too early or hangs."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from kvsnap.direct_io import forget_cached, is_cached
from kvsnap.errors import ConfigError, CorruptChunkError, StorageError
from kvsnap.storage import LocalStorage, RetryStorage, Storage, local, open_storage, probe_storage
from kvsnap.testing import WRONG_NAMES, StorageSuite


class TestLocalStorage(StorageSuite):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "root")


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "root")


def test_a_stream_that_fails_leaves_no_file(storage: LocalStorage) -> None:
    def refuse() -> str:
        raise CorruptChunkError("bad digest")

    with pytest.raises(CorruptChunkError, match="bad digest"):
        storage.put_stream(lambda: [b"one"], refuse)

    assert os.listdir(storage.root) == []


def test_hidden_files_and_links_are_not_listed(storage: LocalStorage) -> None:
    storage.put_if_absent("shards/a", b"12")
    (storage.root / "shards" / ".hidden").write_bytes(b"")
    (storage.root / "shards" / "bad name").write_bytes(b"")
    (storage.root / "shards" / "link").symlink_to(storage.root / "refs")

    assert [info.name for info in storage.list("")] == ["shards/a"]


def test_sparse_terabytes_are_refused_before_they_are_read(storage: LocalStorage) -> None:
    """D18: they are one `truncate` away."""
    storage.put_if_absent("x", b"")
    os.truncate(storage.root / "x", 1 << 40)

    with pytest.raises(CorruptChunkError, match="at most 100"):
        storage.get("x", max_bytes=100)


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_names_never_leave_the_root(storage: LocalStorage, name: str) -> None:
    """D17"""
    with pytest.raises(ConfigError, match="name"):
        storage.put(name, b"")

    assert not storage.root.exists()


def test_links_and_special_files_are_refused(storage: LocalStorage) -> None:
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


def test_who_may_not_write_may_ask_for_the_time(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run of a prune on a read-only mount."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)

    assert abs(storage.now() - time.time()) < 5


def test_a_new_root_is_its_owners(tmp_path: Path) -> None:
    """Whoever wants to share it makes the directory, or changes its mode."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    for root, mode in ((tmp_path / "a" / "repo", 0o700), (shared, 0o755)):
        LocalStorage(root).put_if_absent("kvsnap.json", b"{}")
        assert root.stat().st_mode & 0o777 == mode


def test_sweep_takes_old_files_whose_writer_is_gone(storage: LocalStorage) -> None:
    """D10: fresh ones may be somebody's on another machine, locked ones are somebody's here."""
    storage.put_if_absent("x", b"")
    old, held, fresh = (storage.root / f"{local.TEMP_PREFIX}{name}" for name in ("old", "held", "fresh"))
    for path in (old, held, fresh):
        path.write_bytes(b"")
    for path in (old, held):
        os.utime(path, (0, 0))
    fd = os.open(held, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)

    assert storage.sweep(dry_run=True) == 1
    assert storage.sweep() == 1
    os.close(fd)

    assert (old.exists(), held.exists(), fresh.exists()) == (False, True, True)


def test_a_held_lock_is_no_hang(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process may hold it; reads don't need it."""
    monkeypatch.setattr(local, "LOCK_TIMEOUT_S", 0.02)
    storage.put("x", b"1")
    fd = os.open(storage.root / local.LOCK_NAME, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    started = time.monotonic()

    with pytest.raises(StorageError, match="stopped"):
        storage.put("x", b"2")

    assert time.monotonic() - started < 2
    assert storage.get("x", max_bytes=1) == b"1"
    os.close(fd)


def test_every_user_may_take_the_lock(storage: LocalStorage) -> None:
    mask = os.umask(0)
    try:
        storage.put("x", b"1")
    finally:
        os.umask(mask)

    assert stat.S_IMODE((storage.root / local.LOCK_NAME).stat().st_mode) == 0o666


def test_who_may_only_read_the_lock_takes_it_all_the_same(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user made it, with the usual umask."""
    storage.put("x", b"1")
    opened = os.open

    def open_as_another_user(path: str | Path, flags: int, *args: Any) -> int:
        if str(path).endswith(local.LOCK_NAME) and flags & (os.O_RDWR | os.O_CREAT):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", open_as_another_user)
    monkeypatch.setattr(local, "LOCK_TIMEOUT_S", 0.02)

    storage.put("x", b"2")
    assert storage.get("x", max_bytes=1) == b"2"
    fd = opened(storage.root / local.LOCK_NAME, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StorageError, match="was locked"):
        storage.put("x", b"3")
    os.close(fd)


def test_probe(storage: LocalStorage) -> None:
    assert probe_storage(storage) == storage.capabilities()
    assert storage.is_empty()


def test_urls(tmp_path: Path) -> None:
    assert open_storage(str(tmp_path)).url == str(tmp_path)
    assert open_storage(f"file://{tmp_path}").url == str(tmp_path)
    assert open_storage("file:///a%20b").url == "/a b"
    s3 = open_storage("s3://bucket/some/prefix?endpoint=http://127.0.0.1:9&region=x")
    assert isinstance(s3, RetryStorage)
    assert s3.url == "s3://bucket/some/prefix"


@pytest.mark.parametrize(
    "url",
    ["", "http://x/y", "file://host/x", "s3://", "s3:///x", "s3://b ad/x", "s3://bucket/../x", "s3://bucket/x?nothing=1",
     "s3://bucket/x?addressing=sideways", "s3://bucket/x?sse=rot13", "s3://bucket/x?kms_key=1",
     "s3://bucket/x?endpoint=127.0.0.1:9000", "s3://bucket/x#y", "s3:/bucket/x", "S3:bucket/x", "file:/x",
     "s3://bucket/x?region=", "s3://bucket/x?region=a&region=b"],
)  # fmt: skip
def test_urls_that_make_no_sense(url: str) -> None:
    with pytest.raises(ConfigError):
        open_storage(url)


def test_a_large_object_leaves_the_page_cache_as_it_was(tmp_path: Path) -> None:
    """It is read through it, for the kernel reads ahead; an engine's host has other uses for the memory."""
    storage = LocalStorage(tmp_path / "root")
    data = bytes(range(256)) * (16 << 10)
    storage.put("shard", data)
    path = tmp_path / "root" / "shard"

    def is_in_memory() -> bool:
        with path.open("rb") as file:
            return is_cached(file.fileno(), len(data))

    def read() -> bytes:
        with storage.open_read("shard") as reader:
            buffer = memoryview(bytearray(len(data)))
            done = 0
            while found := reader.readinto(buffer[done : done + (1 << 20)]):
                done += found
            return bytes(buffer)

    path.read_bytes()
    assert read() == data
    assert is_in_memory()
    os.sync()
    forget_cached(path)
    if is_in_memory():
        pytest.skip("this file system keeps its files in memory")
    assert read() == data
    assert not is_in_memory()
