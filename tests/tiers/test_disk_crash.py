"""Killed at any instant: the next start finds a valid state and cleans up (invariant 8)."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvsnap.direct_io import aligned_buffer
from kvsnap.runtime import process_start_time
from kvsnap.tiers import engines
from kvsnap.tiers.disk import DiskTier
from tests.disk_fakes import disk_use, make_chunks, make_namespace, make_views

NS = make_namespace(page=(2, 2, 16, 16))
CAP = 16 << 20
CALLS = (
    "open",
    "pwritev",
    "pwrite",
    "write",
    "fsync",
    "link",
    "rename",
    "replace",
    "unlink",
    "posix_fallocate",
    "mkdir",
)


def run_and_kill(act: Callable[[], object], after: int) -> bool:
    """Fork, `act`, and SIGKILL itself right before the system call number `after`; False if it got to its end."""
    pid = os.fork()
    if pid == 0:
        left = [after]

        def counted(real: Callable[..., object]) -> Callable[..., object]:
            def call(*args: object, **kwargs: object) -> object:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **kwargs)

            return call

        status = 1
        try:
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            act()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def temp_files(tier: DiskTier) -> list[Path]:
    own = tier.writer.path if tier.writer else None
    return [path for path in (tier.dir / "tmp").rglob("*") if path != own and path.parent != own]


def assert_sound(tier: DiskTier) -> dict[bytes, int]:
    """Every shard there is whole, with the bytes that were written; returns how often each key is there."""
    found: dict[bytes, int] = {}
    buffer = aligned_buffer(NS.geometry.chunk_bytes(NS.chunk_tokens))
    for shard in tier.scan():
        for entry in shard.entries:
            assert tier.read_chunk(shard.id, entry, [buffer[: entry.nbytes]])
            found[entry.key] = found.get(entry.key, 0) + 1
    assert tier.counts["damaged_shards"] == 0
    assert temp_files(tier) == []
    assert not [path for path in tier.dir.rglob("*.tmp") if path.is_file()]
    return found


def test_killed_at_every_step_of_two_writes(tmp_path: Path) -> None:
    """Invariant 8; D01: the old state or the new one, complete, never a mix; D10: no temporary file stays."""
    old, new = make_chunks(NS, 3, seed=1), make_chunks(NS, 2, seed=2)
    with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
        tier.write("", old)
        tier.store_usage([(old[0].key, 1, 1.0)])

    def act() -> None:
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            tier.write("", new)
            tier.store_usage([(new[0].key, 2, 2.0)])

    outcomes = set()
    after = 0
    while run_and_kill(act, after):
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            found = assert_sound(tier)
            assert {chunk.key for chunk in old} <= found.keys()
            news = [chunk.key in found for chunk in new]
            assert news in ([True, True], [False, False])
            assert tier.load_usage() in ({old[0].key: (1, 1.0)}, {new[0].key: (2, 2.0)})
            assert disk_use(tmp_path) == tier.used_bytes() <= CAP
            outcomes.add(news[0])
            for shard in list(DiskTier(tmp_path, NS, read_only=True).scan()):
                if shard.entries[0].key == new[0].key:
                    tier.drop(shard.id)
        after += 1

    assert outcomes == {True, False}
    assert after > 25


def test_killed_at_every_step_of_the_first_start(tmp_path: Path) -> None:
    """Invariant 8: a directory that is half made is finished by the next start."""
    after = 0
    while run_and_kill(partial(DiskTier, tmp_path / str(after), NS, cap_bytes=CAP), after):
        with DiskTier(tmp_path / str(after), NS, cap_bytes=CAP) as tier:
            assert tier.write("", make_chunks(NS, 1)) is not None
            assert not [path for path in tier.cache_dir.iterdir() if path.name.endswith(".tmp")]
        after += 1
    assert after > 15


def test_killed_at_every_step_of_a_quarantine(tmp_path: Path) -> None:
    """Invariant 8: good chunks of a damaged shard are there at every instant, at worst twice."""
    chunks = make_chunks(NS, 3)
    after, was_killed = 0, True
    while was_killed:
        directory = tmp_path / str(after)
        with DiskTier(directory, NS, cap_bytes=CAP) as tier:
            shard = tier.write("", chunks)
            assert shard is not None
        with shard.path.open("r+b") as file:
            file.seek(shard.entries[2].offset)
            file.write(bytes(8))

        def act(directory: Path = directory, shard_id: str = shard.id) -> None:
            with DiskTier(directory, NS, cap_bytes=CAP) as tier:
                [found] = tier.scan()
                tier.quarantine(shard_id, list(found.entries))

        was_killed = run_and_kill(act, after)
        with DiskTier(directory, NS, cap_bytes=CAP) as tier:
            views = make_views(NS, 64)
            good = {
                entry.key for shard in tier.scan() for entry in shard.entries if tier.read_chunk(shard.id, entry, views)
            }
            assert good == {chunks[0].key, chunks[1].key}
            assert temp_files(tier) == []
        after += 3


class TestSweep:
    """D10: what dead writers left goes at the next start; nothing else does."""

    def leave(self, tier: DiskTier, name: str = "ab" * 8) -> Path:
        """What a killed writer leaves."""
        writer = tier.dir / "tmp" / name
        writer.mkdir()
        (writer / "lock").write_text("999999999 1\n")
        (writer / f"{'cd' * 16}.safetensors").write_bytes(bytes(1 << 20))
        (writer / f".usage.{'ef' * 8}.tmp").write_bytes(b"x")
        return writer

    def test_ten_kills(self, tmp_path: Path) -> None:
        def act() -> None:
            DiskTier(tmp_path, NS, cap_bytes=CAP).write("", make_chunks(NS, 2))

        for _ in range(10):
            run_and_kill(act, 40)

        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            assert temp_files(tier) == []

    def test_bytes_of_the_dead_count_until_then(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            before = tier.used_bytes()
            writer = self.leave(tier)
            assert tier.used_bytes() >= before + (1 << 20)

            with DiskTier(tmp_path, NS, cap_bytes=CAP) as again:
                assert again.counts["swept_bytes"] >= 1 << 20
            assert not writer.exists()

    def test_other_namespaces_too(self, tmp_path: Path) -> None:
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            writer = self.leave(tier)
            DiskTier(tmp_path, make_namespace(tag="other"), cap_bytes=CAP).close()

            assert not writer.exists()

    def test_the_living_keep_theirs(self, tmp_path: Path) -> None:
        """Also a writer of another process that is stopped: its lock is what counts."""
        script = (
            "import sys, fcntl, os, time\n"
            "fd = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(fd, fcntl.LOCK_EX); print('ready', flush=True)\n"
            "sys.stdin.read()"
        )
        with DiskTier(tmp_path, NS, cap_bytes=CAP) as tier:
            writer = self.leave(tier)
            command = [sys.executable, "-c", script, str(writer / "lock")]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                os.kill(process.pid, signal.SIGSTOP)
                DiskTier(tmp_path, NS, cap_bytes=CAP).close()
                assert len(list(writer.iterdir())) == 3
                os.kill(process.pid, signal.SIGKILL)
            DiskTier(tmp_path, NS, cap_bytes=CAP).close()
            assert not writer.exists()

    def test_foreign_files_and_links_stay(self, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "lock").touch()
        (outside / f"{'ab' * 16}.safetensors").touch()
        with DiskTier(tmp_path / "cache", NS, cap_bytes=CAP) as tier:
            tmp = tier.dir / "tmp"
            (tmp / ("12" * 8)).symlink_to(outside)
            (tmp / "mine.tmp").write_text("mine")
            (tmp / "my-dir").mkdir()
            writer = self.leave(tier)
            (writer / "notes.txt").write_text("mine")
            (writer / f"{'99' * 16}.safetensors").symlink_to(outside / "lock")

            DiskTier(tier.cache_dir, NS, cap_bytes=CAP).close()

            assert {path.name for path in tmp.iterdir()} >= {"12" * 8, "mine.tmp", "my-dir", "ab" * 8}
            assert {path.name for path in writer.iterdir()} == {"lock", "notes.txt", f"{'99' * 16}.safetensors"}
        assert len(list(outside.iterdir())) == 2


class TestEngineRecords:
    @pytest.fixture
    def tier(self, tmp_path: Path) -> DiskTier:
        return DiskTier(tmp_path, NS, cap_bytes=CAP)

    def record(self, tier: DiskTier, engine_id: str = "an-engine_dp0", pid: int | None = None) -> engines.EngineRecord:
        pid = pid or os.getpid()
        return engines.EngineRecord(
            engine_id=engine_id,
            pid=pid,
            start=process_start_time(pid) or 1,
            socket="/run/x.sock",
            namespace=NS.id(),
            identity=NS.identity.to_json(),
            layout=NS.layout_hash,
        )

    def test_live_ones_are_found(self, tier: DiskTier) -> None:
        tier.register(self.record(tier))

        assert engines.live_engines(tier.cache_dir) == [self.record(tier)]
        engines.remove_record(tier.dir, "an-engine_dp0")
        assert engines.live_engines(tier.cache_dir) == []

    def test_dead_and_unreadable_ones_are_removed(self, tier: DiskTier) -> None:
        tier.register(self.record(tier, "dead", pid=999_999_999))
        (tier.dir / "engines" / "torn.json").write_text('{"pid":')
        (tier.dir / "engines" / "renamed.json").write_bytes((tier.dir / "engines" / "dead.json").read_bytes())

        assert engines.live_engines(tier.cache_dir, remove_dead=False) == []
        assert len(list((tier.dir / "engines").iterdir())) == 3
        assert engines.live_engines(tier.cache_dir) == []
        assert list((tier.dir / "engines").iterdir()) == []

    def test_a_reused_pid_is_another_process(self, tier: DiskTier) -> None:
        tier.register(dataclasses.replace(self.record(tier), start=1))

        assert engines.live_engines(tier.cache_dir) == []

    def test_an_engine_in_another_container_lives_by_its_lock(self, tier: DiskTier) -> None:
        assert tier.writer is not None
        foreign = dataclasses.replace(self.record(tier), pid=999_999_999, writer=tier.writer.name)
        tier.register(foreign)

        assert engines.live_engines(tier.cache_dir) == [foreign]
        tier.close()
        assert engines.live_engines(tier.cache_dir) == []

    @pytest.mark.parametrize("engine_id", ["", "../x", "a/b", "a.b", "x" * 129, "é"])
    def test_ids_cannot_leave_the_directory(self, tier: DiskTier, engine_id: str) -> None:
        """D17."""
        with pytest.raises(ValueError, match="engine id"):
            tier.register(self.record(tier, engine_id))
