"""`kill -9` at every point where something durable changes, then the same again: the result is the same.

Every system call that changes the file system is a failpoint: a forked child counts them and
kills itself before the n-th, for every n, until it gets through. Nothing in kvsnap knows of it.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.listing import list_snapshots
from kvsnap.namespace import Namespace
from kvsnap.refs import remove
from kvsnap.repository import Repository
from kvsnap.repository_copy import copy_snapshots
from kvsnap.repository_prune import prune_repository
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import LocalStorage
from kvsnap.verify import verify_cache_dir, verify_snapshot
from tests.disk_fakes import make_namespace
from tests.repository_fakes import check_whole, content_of, names_in
from tests.snapshot_fakes import chain, chunks_at, prompt, store

CALLS = ("link", "mkdir", "open", "posix_fallocate", "pwrite", "pwritev", "rename", "replace", "rmdir", "truncate",
         "ftruncate", "unlink", "utime", "write", "writev")  # fmt: skip
"""Those of `os` that change what is durable. A file that is opened may be created."""
CREATES = os.O_CREAT | os.O_TRUNC
MOST = 2000


def killed_at(number: int, act: Callable[[], object]) -> bool:
    """Run `act` in a child that is killed before its `number`-th change; False if it got through."""
    gc.freeze()  # a collection in the child would copy all memory of this process
    pid = os.fork()
    if pid == 0:
        try:
            gc.disable()
            _arm(number)
            act()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    gc.unfreeze()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def _arm(number: int) -> None:
    left = number
    lock = threading.Lock()

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if name != "open" or (len(args) > 1 and args[1] & CREATES):
                with lock:
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    left -= 1
            return original(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, counted(name, getattr(os, name)))


def kill_everywhere(prepare: Callable[[], None], act: Callable[[], object]) -> Iterator[int]:
    """Yields after each kill, in the state that it left."""
    for number in range(MOST):
        prepare()
        if not killed_at(number, act):
            assert number > 3
            return
        yield number
    raise AssertionError(f"more than {MOST} changes")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory, if possible: there are thousands of small files."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="kvsnap-test-") as name:
        yield Path(name)


def restore(saved: Path, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    if saved.exists():
        shutil.copytree(saved, directory)


def chunk_keys(repo: Path, ref: str) -> set[bytes]:
    repository = Repository(LocalStorage(repo))
    catalog = repository.catalog(repository.manifest(repository.resolve(ref)))
    return set(map(bytes, catalog.keys()))


def test_export(cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
    """D01, D02, invariants 3 and 8: old or new, complete, never a mix; nothing but the shard in the air goes twice."""
    saved = tmp_path / "saved"
    export_snapshot(cache, str(saved), tag="prod")
    before = content_of(LocalStorage(saved))
    old = str(Repository(LocalStorage(saved)).ref("prod").snapshot)
    for seed in (8, 9):
        store(cache, ns, chain(ns, prompt(seed, 128)))
    expected = {bytes(entry) for entry in chunks_at(cache, ns)}
    kills = 0

    for _ in kill_everywhere(lambda: restore(saved, repo), lambda: export_snapshot(cache, str(repo), tag="prod")):
        kills += 1
        storage = LocalStorage(repo)
        listed = check_whole(storage)
        assert old in listed
        assert len(listed) <= 2
        assert before.items() - content_of(storage).items() <= {("refs/prod.json", before["refs/prod.json"])}
        there = len(names_in(storage, "shards/")) - 2

        again = export_snapshot(cache, str(repo), tag="prod")

        assert again.sent_shards == 2 - there
        assert len(check_whole(storage)) == 2
        assert chunk_keys(repo, "prod") == expected
        assert prune_repository(str(repo), grace_s=0).num_snapshots == 2
        assert len(names_in(storage, "shards/")) == 4

    assert kills > 20


def test_first_export(cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
    """The repository itself is made on the way."""
    kills = 0
    for _ in kill_everywhere(
        lambda: restore(tmp_path / "nothing", repo), lambda: export_snapshot(cache, str(repo), tag="prod")
    ):
        kills += 1
        if (repo / "kvsnap.json").exists():
            assert len(check_whole(LocalStorage(repo))) <= 1

        export_snapshot(cache, str(repo), tag="prod")

        assert len(list_snapshots(str(repo)).snapshots) == 1
        assert verify_snapshot(str(repo), "prod", read_data=True).is_good
    assert kills > 20


def test_import(cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
    """Invariants 6 and 8: what is there is a valid, prefix-closed part; repeating makes it whole."""
    export_snapshot(cache, str(repo), tag="prod")
    expected = chunks_at(cache, ns)
    other = tmp_path / "other"
    kills = 0

    for _ in kill_everywhere(
        lambda: restore(tmp_path / "nothing", other), lambda: import_snapshot(str(repo), "prod", other)
    ):
        kills += 1
        if (other / ns.dirname / "namespace.json").exists():
            report = verify_cache_dir(other, read_data=True)
            assert report.is_good
            assert not [note for note in report.notes if "lack an ancestor" in note]

        import_snapshot(str(repo), "prod", other)

        assert chunks_at(other, ns) == expected
        assert verify_cache_dir(other, read_data=True).is_good
    assert kills > 10


def test_prune(cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
    """Invariants 5 and 8: what is needed is always there; repeating gets rid of the rest."""
    saved = tmp_path / "saved"
    kept = export_snapshot(cache, str(saved), tag="prod").snapshot
    store(cache, ns, chain(ns, prompt(9, 128)))
    remove(str(saved), export_snapshot(cache, str(saved)).snapshot)
    wanted = {name for name in content_of(LocalStorage(saved)) if name.startswith("shards/")}
    kills = 0

    for _ in kill_everywhere(lambda: restore(saved, repo), lambda: prune_repository(str(repo), grace_s=0)):
        kills += 1
        storage = LocalStorage(repo)
        assert check_whole(storage) == {kept}

        prune_repository(str(repo), grace_s=0)

        assert check_whole(storage) == {kept}
        assert len(names_in(storage, "shards/")) == len(wanted) - 1
        assert names_in(storage, "gc/") == []
        assert len(names_in(storage, "catalogs/")) == len(names_in(storage, "manifests/")) == 1
    assert kills > 10


def test_prune_then_the_removed_snapshot_is_exported_again(
    cache: Path, ns: Namespace, repo: Path, tmp_path: Path
) -> None:
    """Whatever a dead prune has left: half deleted, claimed, marked. The export needs all of it again."""
    saved = tmp_path / "saved"
    ns2 = make_namespace(tag="other")
    store(tmp_path / "other", ns2, chain(ns2, prompt(1, 128)))
    export_snapshot(tmp_path / "other", str(saved), tag="other")
    remove(str(saved), export_snapshot(cache, str(saved)).snapshot)

    for _ in kill_everywhere(lambda: restore(saved, repo), lambda: prune_repository(str(repo), grace_s=0)):
        report = export_snapshot(cache, str(repo), tag="prod")
        assert report.snapshot in check_whole(LocalStorage(repo))
        prune_repository(str(repo), grace_s=0)
        assert report.snapshot in check_whole(LocalStorage(repo))
        assert chunk_keys(repo, "prod") == {bytes(key) for key in chunks_at(cache, ns)}


def test_copy(cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    snapshot = export_snapshot(cache, str(source), tag="prod").snapshot

    for _ in kill_everywhere(
        lambda: restore(tmp_path / "nothing", repo), lambda: copy_snapshots(str(source), str(repo))
    ):
        if (repo / "kvsnap.json").exists():
            assert check_whole(LocalStorage(repo)) <= {snapshot}

        copy_snapshots(str(source), str(repo))

        assert check_whole(LocalStorage(repo)) == {snapshot}
