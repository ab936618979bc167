from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvsnap.atomic import fsync_dir, link_new, write_file
from kvsnap.errors import StorageError


def test_write_file_replaces_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old and longer")
    with path.open("rb") as reader:
        write_file(path, b"new")

        assert path.read_bytes() == b"new"
        assert reader.read() == b"old and longer"
    assert os.listdir(tmp_path) == ["file"]


def test_write_file_can_keep_its_temporary_file_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()

    write_file(tmp_path / "file", b"new", temp_dir=tmp_path / "tmp", mode=0o600)

    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "tmp") == []


def test_a_failed_write_leaves_the_old_content_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="can't be written: No space left"):
        write_file(path, b"new")

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_link_new_never_replaces(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")

    assert link_new(tmp_path / "a", tmp_path / "name")
    assert not link_new(tmp_path / "b", tmp_path / "name")
    assert (tmp_path / "name").read_bytes() == b"a"


def test_link_new_does_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*args: object, **kwargs: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").write_bytes(b"b")

    assert link_new(tmp_path / "a", tmp_path / "name")
    assert not link_new(tmp_path / "b", tmp_path / "name")
    assert (tmp_path / "name").read_bytes() == b"a"


def test_fsync_dir_wants_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    fsync_dir(tmp_path)
    with pytest.raises(NotADirectoryError):
        fsync_dir(tmp_path / "file")
