"""Who may use a DRAM file, with real processes that are stopped and killed."""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvsnap.errors import IncompatibleError, NotFoundError, StorageError
from kvsnap.shard import checksum
from kvsnap.tiers import dram_lock
from kvsnap.tiers.dram import DramRegion, DramTier
from tests.disk_fakes import make_namespace

NS = make_namespace()
BUDGET = 200_000

OWNER = """
import os, random, sys, time
from pathlib import Path
from kvsnap.keys import ChunkKey
from kvsnap.shard import checksum
from kvsnap.tiers.dram import DramTier, SlotRecord
from tests.disk_fakes import make_namespace

ns = make_namespace()
tier = DramTier.open(Path(sys.argv[1]), Path(sys.argv[2]), ns.id(), ns.geometry, budget_bytes=200_000, ranks=1)

def store(slot, key):
    generation = tier.begin(slot)
    views = tier.views(slot, 64)
    for view in views:
        view[:] = random.Random(key).randbytes(len(view))
    record = SlotRecord(slot=slot, generation=generation, key=ChunkKey(key), parent=ChunkKey(bytes(32)), depth=0,
        tokens=64, scope="", block_keys=key + key, xxh3=b"", hits=0, last_use=1.0)
    tier.commit(record)
    tier.set_checksum(slot, checksum(views))

for slot in range(3):
    store(slot, os.urandom(32))
print(tier.path, tier.nonce.hex(), flush=True)
while sys.argv[3] == "store":
    store(random.randrange(tier.num_slots), os.urandom(32))
sys.stdin.read()
"""

WORKER = """
import sys, time
from kvsnap.tiers.dram import DramRegion

region = DramRegion.attach(sys.argv[1], sys.argv[2], rank=0, slice_index=0)
print("mapped", flush=True)
while sys.argv[3] == "write":
    for slot in range(region.num_slots):
        region.area(slot)[:] += 1
        region.complete(slot, 10**6, ok=True)
    region.finish_loads(10**6)
sys.stdin.read()
"""

Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, Path]:
    """(dram_dir, cache_dir)"""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm", tmp_path / "cache"


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Starts Python processes; kills them all at the end."""
    running: list[subprocess.Popen[str]] = []
    root = Path(__file__).parents[2]

    def start(code: str, *args: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, args)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root)},
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def open_tier(dirs: tuple[Path, Path]) -> DramTier:
    return DramTier.open(*dirs, NS.id(), NS.geometry, budget_bytes=BUDGET, ranks=1)


def digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_live_owner_keeps_its_file(dirs: tuple[Path, Path], spawn: Spawn) -> None:
    """A rolling update: the next engine does not wait for one that lives, stopped or not."""
    owner = spawn(OWNER, *dirs, "idle")
    path, _ = first_line(owner)
    owner.send_signal(signal.SIGSTOP)
    before, started = digest(path), time.monotonic()

    tier = open_tier(dirs)

    assert time.monotonic() - started < 1.0
    assert (path[-2:], tier.path[-2:]) == ("-0", "-1")
    assert tier.found == []
    assert digest(path) == before
    tier.close()


def test_file_of_a_killed_owner_is_taken_over(dirs: tuple[Path, Path], spawn: Spawn) -> None:
    """Invariant 8: `kill -9` and start again: the hot chunks are there, in the same file, without a wait."""
    owner = spawn(OWNER, *dirs, "idle")
    path, nonce = first_line(owner)
    kill(owner)
    started = time.monotonic()

    tier = open_tier(dirs)

    assert time.monotonic() - started < 1.0
    assert tier.path == path
    assert tier.nonce.hex() != nonce
    assert len(tier.found) == 3
    tier.close()


def test_owner_killed_at_any_instant_leaves_no_wrong_chunk(dirs: tuple[Path, Path], spawn: Spawn) -> None:
    """Invariants 1 and 8: whatever is found has the bytes that its checksum and its key say."""
    generations: list[int] = []
    found = 0
    for delay_ms in (1, 13, 29, 47):
        owner = spawn(OWNER, *dirs, "store")
        first_line(owner)
        time.sleep(delay_ms / 1000)
        kill(owner)

        tier = open_tier(dirs)
        for record in tier.found:
            (view,) = tier.views(record.slot, record.tokens)
            assert checksum([view]) == record.xxh3
            assert bytes(view) == random.Random(bytes(record.key)).randbytes(len(view))
            view.release()
        found += len(tier.found)
        now = [int(generation) for generation in tier._map.generation]
        tier.close()
        assert all(a <= b for a, b in zip(generations or now, now, strict=True))
        generations = now
    assert found > 0


def test_worker_that_outlives_its_engine_touches_no_new_file(
    dirs: tuple[Path, Path], spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 8: the owner is killed, its worker hangs, a new engine starts, then the worker goes on writing."""
    monkeypatch.setattr(dram_lock, "DYING_WAIT_S", 0.1)
    owner = spawn(OWNER, *dirs, "idle")
    old_path, nonce = first_line(owner)
    zombie = spawn(WORKER, old_path, nonce, "write")
    assert first_line(zombie) == ["mapped"]
    zombie.send_signal(signal.SIGSTOP)
    kill(owner)

    tier = open_tier(dirs)
    region = DramRegion.attach(tier.path, tier.nonce.hex(), rank=0, slice_index=0)
    generation = tier.begin(0)
    new, old = digest(tier.path), digest(old_path)
    zombie.send_signal(signal.SIGCONT)
    deadline = time.monotonic() + 30.0
    while digest(old_path) == old and time.monotonic() < deadline:
        time.sleep(0.005)

    assert digest(old_path) != old, "the worker did not go on"
    assert digest(tier.path) == new
    assert tier.fill_state(0, generation) is None
    assert tier.path != old_path
    assert any("a worker of its last engine still maps it" in message for message in tier.messages)
    region.close()
    tier.close()

    kill(zombie)
    again = open_tier(dirs)
    assert again.path == old_path  # taken over once the worker is gone
    for record in again.found:
        (view,) = again.views(record.slot, record.tokens)
        assert checksum([view]) != record.xxh3  # what the worker wrote over is found out by the check
    again.close()


def test_a_view_that_is_still_out_keeps_the_lock(dirs: tuple[Path, Path]) -> None:
    """Invariant 8: a thread that hangs in a read may wake up and write after its tier was closed."""
    tier = open_tier(dirs)
    region = DramRegion.attach(tier.path, tier.nonce.hex(), rank=0, slice_index=0)
    area, views = region.area(0), tier.views(0, 64)

    region.close()
    del region
    (workers_alive,) = [info.workers_alive for info in dram_lock.list_dram_files(dirs[0])]
    del area
    (workers_gone,) = [not info.workers_alive for info in dram_lock.list_dram_files(dirs[0])]
    tier.close()
    other = open_tier(dirs)
    other.close()
    path = tier.path
    del tier, views
    again = open_tier(dirs)
    again.close()

    assert workers_alive
    assert workers_gone
    assert other.path != path
    assert again.path == path


def test_engine_waits_for_a_worker_that_is_ending(dirs: tuple[Path, Path], spawn: Spawn) -> None:
    """A restart right after a kill: the workers need a moment to die, and then the hot chunks are there."""
    owner = spawn(OWNER, *dirs, "idle")
    path, nonce = first_line(owner)
    worker = spawn(WORKER, path, nonce, "idle")
    first_line(worker)
    kill(owner)
    timer = threading.Timer(0.1, worker.kill)
    timer.start()

    tier = open_tier(dirs)
    timer.join()

    assert (tier.path, len(tier.found)) == (path, 3)
    tier.close()


def test_worker_does_not_map_the_file_of_another_engine(dirs: tuple[Path, Path], spawn: Spawn) -> None:
    """Invariant 1: it was told of the tier before its engine was killed, and wakes up in the next one's."""
    owner = spawn(OWNER, *dirs, "idle")
    path, nonce = first_line(owner)
    kill(owner)
    tier = open_tier(dirs)
    assert tier.path == path

    with pytest.raises(IncompatibleError, match="another owner"):
        DramRegion.attach(path, nonce, rank=0, slice_index=0)

    tier.close()
    open_tier(dirs).close()  # the refused worker holds no lock


def test_worker_does_not_map_while_the_file_is_taken_over(
    dirs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dram_lock, "SHARED_WAIT_S", 0.02)
    tier = open_tier(dirs)
    with open(tier.path + ".workers") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(NotFoundError, match="taken over"):
            DramRegion.attach(tier.path, tier.nonce.hex(), rank=0, slice_index=0)
    tier.close()


def test_a_look_from_outside_does_not_keep_a_worker_out(dirs: tuple[Path, Path]) -> None:
    """`kvsnap status` tries the workers' lock for a moment; a worker that starts then must still get it."""
    tier = open_tier(dirs)
    lock = os.open(tier.path + ".workers", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    timer = threading.Timer(0.03, os.close, [lock])
    timer.start()

    region = DramRegion.attach(tier.path, tier.nonce.hex(), rank=0, slice_index=0)

    timer.join()
    region.close()
    tier.close()


def test_file_that_is_gone_is_not_mapped(dirs: tuple[Path, Path]) -> None:
    tier = open_tier(dirs)
    os.unlink(tier.path)

    with pytest.raises(StorageError, match="cannot map"):
        DramRegion.attach(tier.path, tier.nonce.hex(), rank=0, slice_index=0)
    tier.close()


def test_memory_without_a_file_is_mapped_through_proc(spawn: Spawn) -> None:
    """Where there is no shared memory: the worker opens its owner's memfd."""
    tier = DramTier.anonymous(NS.id(), NS.geometry, budget_bytes=BUDGET, ranks=1)
    assert tier.path.startswith(f"/proc/{os.getpid()}/fd/")
    assert tier.file_bytes <= BUDGET
    worker = spawn(WORKER, tier.path, tier.nonce.hex(), "write")
    assert first_line(worker) == ["mapped"]

    deadline = time.monotonic() + 30.0
    while tier.fill_state(tier.num_slots - 1, 10**6) is not True and time.monotonic() < deadline:
        time.sleep(0.005)
    kill(worker)

    assert tier.fill_state(tier.num_slots - 1, 10**6) is True
    assert any(tier.views(0, 64)[0])
    tier.close()


class TestFilesOfNobody:
    def test_are_listed_and_removed(self, dirs: tuple[Path, Path], spawn: Spawn, tmp_path: Path) -> None:
        """Four files: of a dead engine, of a live one, of a dead one whose worker lives, and damaged."""
        dead = spawn(OWNER, *dirs, "idle")
        dead_path, _ = first_line(dead)
        live = spawn(OWNER, dirs[0], tmp_path / "live", "idle")
        live_path, _ = first_line(live)
        orphaned = spawn(OWNER, dirs[0], tmp_path / "orphaned", "idle")
        orphaned_path, nonce = first_line(orphaned)
        worker = spawn(WORKER, orphaned_path, nonce, "idle")
        first_line(worker)
        kill(dead)
        kill(orphaned)
        damaged = dirs[0] / f"kvsnap-{os.geteuid()}-0123456789abcdef-0"
        damaged.write_bytes(b"?" * 5000)
        damaged.chmod(0o600)
        foreign = dirs[0] / "kvsnap-99999999-0123456789abcdef-0"
        foreign.write_bytes(b"")

        infos = {info.path: info for info in dram_lock.list_dram_files(dirs[0])}
        unused = {path for path, info in infos.items() if not info.is_used}
        removed = {path for path in infos if dram_lock.remove_file(Path(path))}

        assert infos.keys() == {dead_path, live_path, orphaned_path, str(damaged)}
        assert [(infos[p].owner_alive, infos[p].workers_alive) for p in (dead_path, live_path, orphaned_path)] == [
            (False, False),
            (True, False),
            (False, True),
        ]
        assert {(info.namespace_id, info.chunks) for info in infos.values()} == {(NS.id(), 3), ("", 0)}
        assert infos[live_path].bytes == os.stat(live_path).st_blocks * 512
        assert unused == removed == {dead_path, str(damaged)}
        left = {live_path, live_path + ".workers", orphaned_path, orphaned_path + ".workers", str(foreign)}
        assert set(map(str, dirs[0].iterdir())) == left

    def test_directory_that_is_not_there(self, tmp_path: Path) -> None:
        assert dram_lock.list_dram_files(tmp_path / "nowhere") == []
