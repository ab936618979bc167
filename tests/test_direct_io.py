from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvsnap import direct_io
from kvsnap.direct_io import (
    ALIGN,
    O_DIRECT,
    aligned_buffer,
    padded,
    read_file,
    supports_direct,
    write_all,
    write_pieces,
    write_stream,
)
from kvsnap.errors import CorruptChunkError, StorageError

CONTENT = os.urandom(6 * ALIGN)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


def open_new(path: Path, flag: int) -> int:
    return os.open(path, os.O_CREAT | os.O_WRONLY | flag, 0o600)


def test_padded_rounds_up() -> None:
    assert [padded(n) for n in (0, 1, ALIGN, ALIGN + 1)] == [0, ALIGN, ALIGN, 2 * ALIGN]


@pytest.mark.parametrize("direct", [True, False])
def test_read_file_fills_all_views_in_order(path: Path, direct: bool) -> None:
    views = [aligned_buffer(ALIGN), aligned_buffer(3 * ALIGN)]

    read_file(path, views, ALIGN, direct=direct)

    assert b"".join(views) == CONTENT[ALIGN : 5 * ALIGN]


def test_more_views_than_one_call_takes(path: Path) -> None:
    path.write_bytes(CONTENT * 200)
    views = [aligned_buffer(ALIGN) for _ in range(1100)]

    read_file(path, views, 0, direct=True)

    assert b"".join(views) == (CONTENT * 200)[: 1100 * ALIGN]


def test_unaligned_views_are_read_buffered(path: Path) -> None:
    """C11: what O_DIRECT can't do is done without it, not dropped."""
    view = aligned_buffer(2 * ALIGN)[1 : 1 + ALIGN]

    read_file(path, [view], ALIGN, direct=True)

    assert view == CONTENT[ALIGN : 2 * ALIGN]


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_early_is_damage(path: Path, direct: bool) -> None:
    """B16: a truncated file under a read is an error to handle, never a SIGBUS."""
    os.truncate(path, 2 * ALIGN + 100)

    with pytest.raises(CorruptChunkError, match="ends at byte"):
        read_file(path, [aligned_buffer(2 * ALIGN)], ALIGN, direct=direct)


@pytest.mark.parametrize("direct", [True, False])
def test_what_cannot_be_opened_or_read_is_a_storage_error(tmp_path: Path, direct: bool) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "anything")
    os.mkfifo(tmp_path / "fifo")

    for name in ("missing", ".", "link", "fifo"):
        with pytest.raises(StorageError):
            read_file(tmp_path / name, [aligned_buffer(ALIGN)], 0, direct=direct)


@pytest.mark.parametrize("flag", [O_DIRECT, 0])
def test_write_stream_takes_aligned_and_other_memory(tmp_path: Path, flag: int) -> None:
    aligned = aligned_buffer(2 * ALIGN)
    aligned[:] = CONTENT[: 2 * ALIGN]
    parts = [[aligned], [memoryview(CONTENT)[2 * ALIGN : 2 * ALIGN + 50], memoryview(CONTENT)[2 * ALIGN + 50 :]]]
    fd = open_new(tmp_path / "new", flag)
    try:
        end = write_stream(fd, parts)
    finally:
        os.close(fd)

    assert end == len(CONTENT)
    assert (tmp_path / "new").read_bytes() == CONTENT


def test_many_small_views_go_out_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = os.pwritev

    def count(fd: int, views: list[memoryview], at: int) -> int:
        calls.append(len(views))
        return real(fd, views, at)

    monkeypatch.setattr(os, "pwritev", count)
    fd = open_new(tmp_path / "new", 0)
    try:
        write_stream(fd, ([memoryview(bytes([i % 251]) * 10)] for i in range(2000)))
    finally:
        os.close(fd)

    assert calls == [1024, 976]
    assert (tmp_path / "new").read_bytes() == b"".join(bytes([i % 251]) * 10 for i in range(2000))


@pytest.mark.parametrize("flag", [O_DIRECT, 0])
def test_write_pieces_takes_any_lengths(tmp_path: Path, flag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "BATCH_BYTES", 2 * ALIGN)
    fd = open_new(tmp_path / "new", flag)
    try:
        end = write_pieces(fd, [CONTENT[:5], b"", CONTENT[5 : 3 * ALIGN], CONTENT[3 * ALIGN :]])
    finally:
        os.close(fd)

    assert end == len(CONTENT)
    assert (tmp_path / "new").read_bytes() == CONTENT


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real(fd, [views[0][:7]], at))
    fd = open_new(tmp_path / "new", 0)
    try:
        write_all(fd, [memoryview(CONTENT)[:10], memoryview(CONTENT)[10:40]], 0)
    finally:
        os.close(fd)

    assert (tmp_path / "new").read_bytes() == CONTENT[:40]


def test_the_probe_leaves_nothing(tmp_path: Path) -> None:
    supports_direct(tmp_path)

    assert os.listdir(tmp_path) == []


def test_the_probe_falls_back_where_the_file_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: O_DIRECT on a file system without it."""
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)

    assert not supports_direct(tmp_path)


def test_the_probe_falls_back_where_direct_bytes_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: only what is read back counts."""
    real = os.pwritev
    answers = iter([ALIGN, ALIGN])  # the direct writes claim success and write nothing
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: next(answers, 0) or real(fd, views, at))

    assert not supports_direct(tmp_path)


def test_the_probe_refuses_a_disk_that_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: ALIGN)

    with pytest.raises(StorageError, match="not what was written"):
        supports_direct(tmp_path)
    assert os.listdir(tmp_path) == []
