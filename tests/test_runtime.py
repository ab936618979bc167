"""The runtime directory, processes and threads."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from kvsnap.errors import StorageError
from kvsnap.runtime import process_start_time, runtime_dir, widen_affinity


def test_explicit_directory_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(tmp_path / "a" / "run"))

    path = runtime_dir()

    assert path == tmp_path / "a" / "run"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert runtime_dir() == path


def test_readable_directory_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(tmp_path))

    assert stat.S_IMODE(runtime_dir().stat().st_mode) == 0o700


def test_directory_that_others_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies in it already may be somebody else's."""
    tmp_path.chmod(0o777)
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(tmp_path))

    with pytest.raises(StorageError, match="has mode 0777"):
        runtime_dir()


def test_symlink_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D17: nobody may point the runtime directory elsewhere."""
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(tmp_path / "link"))

    with pytest.raises(StorageError, match="is a symlink"):
        runtime_dir()


def test_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(tmp_path / "file"))

    with pytest.raises(StorageError, match="set KVSNAP_RUNTIME_DIR"):
        runtime_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(tmp_path, 12345, -1)
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(tmp_path))

    with pytest.raises(StorageError, match="belongs to user 12345"):
        runtime_dir()


def test_order_of_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSNAP_RUNTIME_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    assert runtime_dir() == tmp_path / "kvsnap"

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))

    assert runtime_dir() == tmp_path / f"kvsnap-{os.getuid()}"


def test_start_time_tells_processes_apart() -> None:
    """Pids are reused; a pid and a start time aren't."""
    ours = process_start_time(os.getpid())

    assert ours is not None
    assert ours == process_start_time(os.getpid())
    assert ours != process_start_time(1)


def test_dead_process_has_no_start_time() -> None:
    """A killed engine that nobody has waited for is a zombie: dead, though its pid is still there."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_start_time(child.pid) is not None

    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert process_start_time(child.pid) is None
    child.communicate()
    assert process_start_time(child.pid) is None


def test_name_with_parentheses_is_no_trouble() -> None:
    """A process chooses its name, spaces, parentheses and all."""
    script = "open('/proc/self/comm', 'w').write(') Z (x'); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()

    assert process_start_time(child.pid) is not None
    child.communicate(b"\n")


def test_pinned_thread_is_freed() -> None:
    """The CPU backend pins its main thread to its OpenMP cores, and new threads inherit that."""
    before = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def run() -> None:
        os.sched_setaffinity(0, {min(before)})
        widen_affinity()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert found == [before | os.sched_getaffinity(os.getppid())]
