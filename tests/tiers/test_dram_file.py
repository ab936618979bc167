"""The DRAM tier's file: what is in it, what of it a next owner believes, and how large it is."""

from __future__ import annotations

import dataclasses
import os
import random
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvsnap.errors import CorruptChunkError, KvsnapError, StorageError
from kvsnap.keys import ChunkKey
from kvsnap.namespace import Namespace
from kvsnap.shard import checksum
from kvsnap.tiers import dram_file as f
from kvsnap.tiers.dram import DramRegion, DramTier, SlotRecord
from kvsnap.tiers.dram_lock import base_name
from tests.disk_fakes import make_namespace

NS = make_namespace()
BUDGET = 200_000  # 9 slots of 20 KiB and the tables


@pytest.fixture
def dirs(tmp_path: Path) -> tuple[Path, Path]:
    """(dram_dir, cache_dir)"""
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm", tmp_path / "cache"


def open_tier(
    dirs: tuple[Path, Path], *, budget: int = BUDGET, ns: Namespace = NS, base: Namespace | None = None
) -> DramTier:
    return DramTier.open(
        dirs[0], dirs[1], (base or ns).id(), ns.geometry, budget_bytes=budget, ranks=ns.layout.world_size
    )


def fill(tier: DramTier, slot: int, seed: int, *, tokens: int = 64) -> SlotRecord:
    """Put a chunk of random bytes into a slot, with its checksum."""
    rng = random.Random(seed)
    generation = tier.begin(slot)
    views = tier.views(slot, tokens)
    for view in views:
        view[:] = rng.randbytes(len(view))
    record = SlotRecord(
        slot=slot,
        generation=generation,
        key=ChunkKey(rng.randbytes(32)),
        parent=ChunkKey(rng.randbytes(32)),
        depth=seed % 7,
        tokens=tokens,
        scope="mm,salted" if seed % 2 else "",
        block_keys=rng.randbytes(tokens // 16 * 16),
        xxh3=checksum(views),
        hits=seed,
        last_use=1e9 + seed,
    )
    tier.commit(record)
    return record


def damage(path: str, offset: int, data: bytes | None = None) -> None:
    """Flip a bit, or write `data`, in a file."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, data or bytes([os.pread(fd, 1, offset)[0] ^ 1]), offset)
    finally:
        os.close(fd)


shapes = st.builds(
    f.DramShape,
    num_slots=st.integers(1, 300),
    blocks_per_chunk=st.integers(1, 64),
    strides=st.lists(st.integers(1, 9).map(lambda n: n * 4096), min_size=1, max_size=5).map(tuple),
    num_ranks=st.integers(1, 9),
    namespace=st.binary(min_size=32, max_size=32),
)


class TestShape:
    @given(shapes)
    def test_header_round_trip(self, shape: f.DramShape) -> None:
        page = shape.header()

        assert len(page) == 4096
        assert f.DramShape.from_header(page) == shape

    @given(shapes)
    def test_parts_do_not_overlap(self, shape: f.DramShape) -> None:
        """Owner pages, words, records and areas follow each other; areas are 4096-aligned for O_DIRECT."""
        words_end = shape.words_offset + shape.num_ranks * shape.rank_words_bytes
        records_end = shape.table_offset + shape.num_slots * shape.record_bytes
        regions = [shape.region_offset(i) for i in range(len(shape.strides))]

        assert words_end <= shape.table_offset
        assert records_end <= shape.data_offset == regions[0]
        assert shape.rank_words_bytes >= 64 + 8 * shape.num_slots
        assert shape.record_bytes >= f.crc_offset(shape) + 4
        assert all(offset % 4096 == 0 for offset in regions)
        ends = [at + stride * shape.num_slots for at, stride in zip(regions, shape.strides, strict=True)]
        assert ends == [*regions[1:], shape.file_bytes]

    @given(shapes, st.integers(0, 8 << 20))
    def test_budget_is_used_up_and_never_exceeded(self, shape: f.DramShape, budget: int) -> None:
        """Invariant 7: the file, tables included, stays within the budget; one more slot would not."""
        slots = f.slots_that_fit(
            budget, blocks_per_chunk=shape.blocks_per_chunk, strides=shape.strides, num_ranks=shape.num_ranks
        )

        assert slots == 0 or dataclasses.replace(shape, num_slots=slots).file_bytes <= budget
        assert dataclasses.replace(shape, num_slots=slots + 1).file_bytes > budget

    @pytest.mark.parametrize("page", [b"", bytes(4096), b"x" * 4095])
    def test_what_is_no_header_is_refused(self, page: bytes) -> None:
        with pytest.raises(CorruptChunkError, match="checksum"):
            f.DramShape.from_header(page)

    def test_too_many_slices_for_a_header(self) -> None:
        shape = f.DramShape(num_slots=1, blocks_per_chunk=1, strides=(4096,) * 600, num_ranks=600, namespace=bytes(32))

        with pytest.raises(KvsnapError, match="600 slices"):
            shape.header()

    def test_newest_good_owner_copy_counts(self) -> None:
        """Invariant 8: a kill in the middle of writing an owner record leaves the one before it."""
        page = bytearray(4096)
        for seq in (4, 5):
            owner = f.Owner(epoch=seq, pid=1, start=2, nonce=b"n" * 16)
            at = f.owner_copy_offset(seq) - 4096
            page[at : at + 512] = f.encode_owner(owner, seq)
        whole = f.decode_owner(bytes(page))
        page[f.owner_copy_offset(5) - 4096 + 8] ^= 1

        torn = f.decode_owner(bytes(page))

        assert whole is not None
        assert torn is not None
        assert (whole[1].epoch, torn[1].epoch) == (5, 4)
        assert f.decode_owner(bytes(4096)) is None


class TestSize:
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_real_size_is_within_the_budget(self, dirs: tuple[Path, Path], ranks: int) -> None:
        """Invariant 7."""
        tier = open_tier(dirs, ns=make_namespace(ranks=ranks))

        status = os.stat(tier.path)
        tier.close()

        assert status.st_size == tier.file_bytes <= BUDGET
        assert status.st_blocks * 512 <= BUDGET
        assert stat.S_IMODE(status.st_mode) == 0o600

    def test_memory_is_reserved(self, dirs: tuple[Path, Path]) -> None:
        """B19: a page that can't be had shows at the start, not as a SIGBUS later."""
        tier = open_tier(dirs)

        assert os.stat(tier.path).st_blocks * 512 >= tier.file_bytes
        tier.close()

    def test_budget_below_one_chunk(self, dirs: tuple[Path, Path]) -> None:
        with pytest.raises(StorageError, match="a chunk has 20480 bytes, but the DRAM tier may have 9999"):
            open_tier(dirs, budget=9999)

        open_tier(dirs).close()  # and nothing stays locked

    def test_small_file_system_means_a_smaller_tier(self, small_dir: Path, tmp_path: Path) -> None:
        """The 64 MiB `/dev/shm` of a default container: said, and lived with."""
        tier = open_tier((small_dir, tmp_path / "cache"), budget=8 << 20)

        assert 0 < tier.file_bytes <= 1 << 20
        assert any("smaller tier" in message for message in tier.messages)
        for slot in range(tier.num_slots):
            fill(tier, slot, slot)
        tier.close()

    def test_smaller_tier_is_attached_again(self, small_dir: Path, tmp_path: Path) -> None:
        """The room that the file itself takes counts as room."""
        first = open_tier((small_dir, tmp_path / "cache"), budget=8 << 20)
        record = fill(first, 3, 1)
        first.close()

        second = open_tier((small_dir, tmp_path / "cache"), budget=8 << 20)

        assert second.found == [record]
        second.close()

    def test_a_little_more_room_is_no_reason_to_lose_the_chunks(self, small_dir: Path, tmp_path: Path) -> None:
        """What others use of a small `/dev/shm` varies between two starts."""
        other = small_dir / "somebody-elses"
        other.write_bytes(bytes(40 << 10))
        first = open_tier((small_dir, tmp_path / "cache"), budget=8 << 20)
        record = fill(first, 3, 1)
        first.close()
        other.unlink()

        second = open_tier((small_dir, tmp_path / "cache"), budget=8 << 20)

        assert second.found == [record]
        assert second.num_slots == first.num_slots
        second.close()


@pytest.fixture
def small_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with 1 MiB of room: a real tmpfs where that may be mounted."""
    path = tmp_path / "small"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:

        def statvfs(of: Path) -> os.statvfs_result:
            found = list(real(of))
            used = sum(entry.stat().st_blocks * 512 for entry in path.iterdir())
            found[4] = ((1 << 20) - used) // found[1]
            return os.statvfs_result(found)

        real = os.statvfs
        monkeypatch.setattr(os, "statvfs", statvfs)
    yield path
    if not mounted.returncode:
        subprocess.run(["umount", "-l", str(path)], check=True)


class TestAttach:
    def test_chunks_are_found_again(self, dirs: tuple[Path, Path]) -> None:
        first = open_tier(dirs)
        records = [fill(first, slot, slot + 1, tokens=16 * (slot % 4 + 1)) for slot in range(first.num_slots)]
        contents = [[bytes(view) for view in first.views(r.slot, r.tokens)] for r in records]
        first.close()

        second = open_tier(dirs)

        assert second.found == records
        assert [[bytes(view) for view in second.views(r.slot, r.tokens)] for r in second.found] == contents
        assert second.messages == []
        second.close()

    def test_use_is_found_again(self, dirs: tuple[Path, Path]) -> None:
        first = open_tier(dirs)
        fill(first, 0, 1)
        first.touch(0, 1 << 40, 123.5)
        first.close()

        second = open_tier(dirs)

        assert [(r.hits, r.last_use) for r in second.found] == [(0xFFFFFFFF, 123.5)]
        second.close()

    @pytest.mark.parametrize("change", ["budget", "ranks", "page"])
    def test_other_geometry_replaces_the_file_and_says_so(self, dirs: tuple[Path, Path], change: str) -> None:
        first = open_tier(dirs)
        fill(first, 0, 1)
        first.close()
        other = {
            "budget": NS,
            "ranks": make_namespace(ranks=2),
            "page": make_namespace(page=(2, 3, 16, 4)),
        }[change]

        second = open_tier(dirs, ns=other, base=NS, budget=BUDGET - 41_000 if change == "budget" else BUDGET)

        assert second.found == []
        assert ["another size or geometry" in message for message in second.messages] == [True]
        assert (second.path, os.stat(second.path).st_size) == (first.path, second.file_bytes)
        second.close()

    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (4090, 4096), (4096, 8192)])
    def test_damaged_header_or_owner_replaces_the_file(self, dirs: tuple[Path, Path], start: int, stop: int) -> None:
        """Invariant 1: without its owner record nobody knows which epoch's chunks are void."""
        first = open_tier(dirs)
        fill(first, 0, 1)
        first.bump_epoch()
        first.close()
        damage(first.path, start, b"\xff" * (stop - start))

        second = open_tier(dirs)

        assert second.found == []
        assert ["damaged" in message for message in second.messages] == [True]
        fill(second, 0, 1)
        second.close()

    def test_truncated_file_is_replaced(self, dirs: tuple[Path, Path]) -> None:
        first = open_tier(dirs)
        fill(first, 0, 1)
        first.close()
        os.truncate(first.path, first.file_bytes - 4096)

        second = open_tier(dirs)

        assert second.found == []
        assert os.stat(second.path).st_size == second.file_bytes
        second.close()

    @pytest.mark.parametrize(
        "offset", [f.GENERATION, f.EPOCH, f.TOKENS, f.DEPTH, f.FLAGS, f.KEY, f.PARENT, f.XXH3, f.SCOPE, f.BLOCK_KEYS]
    )
    def test_damaged_record_is_not_attached(self, dirs: tuple[Path, Path], offset: int) -> None:
        """Invariant 1."""
        first = open_tier(dirs)
        shape = first._map.shape
        kept, lost = fill(first, 1, 1), fill(first, 2, 2)
        first.close()
        damage(first.path, shape.table_offset + lost.slot * shape.record_bytes + offset)

        second = open_tier(dirs)

        assert second.found == [kept]
        second.close()

    def test_record_torn_between_checksum_and_crc_is_not_attached(self, dirs: tuple[Path, Path]) -> None:
        """Invariant 8: killed while the background checksum was entered."""
        first = open_tier(dirs)
        record = fill(first, 0, 1)
        shape = first._map.shape
        first.close()
        damage(first.path, shape.table_offset + f.XXH3, os.urandom(16))

        second = open_tier(dirs)

        assert second.found == []
        assert second.begin(0) > record.generation
        second.close()

    def test_chunk_without_checksum_is_not_attached(self, dirs: tuple[Path, Path]) -> None:
        first = open_tier(dirs)
        records = [fill(first, slot, slot) for slot in range(2)]
        for record in records:
            first.commit(dataclasses.replace(record, xxh3=b""))
        first.set_checksum(1, records[1].xxh3)
        first.close()

        second = open_tier(dirs)

        assert second.found == [records[1]]
        second.close()

    def test_slot_in_the_making_is_not_attached(self, dirs: tuple[Path, Path]) -> None:
        """A16: from `begin` on, the old record counts no more, though it is still whole."""
        first = open_tier(dirs)
        for slot in range(2):
            fill(first, slot, slot)
        first.begin(0)
        first.free(1)
        first.close()

        second = open_tier(dirs)

        assert second.found == []
        second.close()

    def test_epoch_is_void_for_later_owners_too(self, dirs: tuple[Path, Path]) -> None:
        """A14: killed right after the bump, before any slot was freed."""
        first = open_tier(dirs)
        fill(first, 0, 1)
        epoch = first.bump_epoch()
        after = fill(first, 1, 2)
        first.close()

        second = open_tier(dirs)

        assert second.found == [after]
        assert second.epoch == epoch
        assert second.bump_epoch() == epoch + 1
        second.close()


class TestGenerations:
    def test_grow_across_owners(self, dirs: tuple[Path, Path]) -> None:
        seen = []
        for _ in range(4):
            tier = open_tier(dirs)
            seen += [tier.begin(0), tier.begin(0)]
            tier.close()

        assert seen == sorted(set(seen))
        assert seen[0] > 0

    def test_never_shrink_inside_a_commit(self, dirs: tuple[Path, Path]) -> None:
        """Invariant 8: a kill half-way through writing a record must not start the count anew."""
        tier = open_tier(dirs)
        record = fill(tier, 0, 1)
        generation = tier.begin(0)

        with pytest.raises(struct.error):  # packing zeroes its target first, then fails at the key
            tier.commit(dataclasses.replace(record, generation=generation, key="no bytes"))  # type: ignore[arg-type]

        assert tier.begin(0) == generation + 1
        tier.close()

    def test_words_of_a_past_life_complete_nothing(self, dirs: tuple[Path, Path]) -> None:
        """A16: even a word with the very generation that comes next."""
        first = open_tier(dirs)
        region = DramRegion.attach(first.path, first.nonce.hex(), rank=0, slice_index=0)
        upcoming = first.begin(0) + 1
        region.complete(0, upcoming, ok=True)
        region.finish_loads(99)
        region.close()
        first.close()

        second = open_tier(dirs)

        assert second.begin(0) == upcoming
        assert second.fill_state(0, upcoming) is None
        assert second.loads_done() == 0
        second.close()


class TestRanks:
    @pytest.fixture
    def pair(self, dirs: tuple[Path, Path]) -> Iterator[tuple[DramTier, list[DramRegion]]]:
        tier = open_tier(dirs, ns=make_namespace(ranks=2))
        regions = [DramRegion.attach(tier.path, tier.nonce.hex(), rank=r, slice_index=r) for r in range(2)]
        yield tier, regions
        for region in regions:
            region.close()
        tier.close()

    @pytest.mark.parametrize(("second", "state"), [(None, None), (True, True), (False, False)])
    def test_a_fill_is_over_when_all_ranks_are_through(
        self, pair: tuple[DramTier, list[DramRegion]], second: bool | None, state: bool | None
    ) -> None:
        """A24: one rank's failure voids it for all, but only once none writes any more."""
        tier, regions = pair
        generation = tier.begin(3)
        assert regions[0].may_fill(3, generation)
        assert not regions[0].may_fill(3, generation - 1)

        regions[0].complete(3, generation, ok=True)
        if second is not None:
            regions[1].complete(3, generation, ok=second)

        assert tier.fill_state(3, generation) is state

    def test_freed_or_reused_slot_is_neither_filled_nor_read(self, pair: tuple[DramTier, list[DramRegion]]) -> None:
        """B02: a copy planned for an older generation touches nothing."""
        tier, (region, _) = pair
        generation = tier.begin(0)
        tier.free(0)
        assert not region.may_fill(0, generation)
        assert region.may_read(0, generation)  # a load under way may end: the bytes stay until `begin`

        tier.begin(0)

        assert not region.may_fill(0, generation)
        assert not region.may_read(0, generation)

    def test_loads_are_over_when_the_slowest_rank_says_so(self, pair: tuple[DramTier, list[DramRegion]]) -> None:
        tier, regions = pair
        regions[0].finish_loads(7)
        regions[1].finish_loads(5)
        regions[0].finish_loads(6)  # late report of an older plan

        assert tier.loads_done() == 5
        assert [int(word) for word in tier._map.loads] == [7, 5]

    def test_areas_are_the_owners_views(self, pair: tuple[DramTier, list[DramRegion]]) -> None:
        """What a rank writes is what the owner hashes, slice by slice, 4096-aligned."""
        tier, regions = pair
        for rank, region in enumerate(regions):
            region.area(2)[:] = rank + 1

        views = tier.views(2, 64)

        assert [bytes(view) for view in views] == [
            bytes([rank + 1]) * region.stride for rank, region in enumerate(regions)
        ]
        assert all(region.area(2).ctypes.data % 4096 == 0 for region in regions)
        assert [len(view) for view in tier.views(2, 16)] == [8192, 8192]

    def test_unknown_rank_or_slice_is_refused(self, pair: tuple[DramTier, list[DramRegion]]) -> None:
        tier, _ = pair
        with pytest.raises(KvsnapError, match="no rank 2"):
            DramRegion.attach(tier.path, tier.nonce.hex(), rank=2, slice_index=0)

    def test_prefault_ends_when_told(self, pair: tuple[DramTier, list[DramRegion]]) -> None:
        tier, regions = pair
        tier.prefault()
        regions[0].prefault(stop=[True])

        address, nbytes = regions[1].region()

        assert (address % 4096, nbytes) == (0, regions[1].stride * tier.num_slots)


def test_scope_that_does_not_fit_is_refused(dirs: tuple[Path, Path]) -> None:
    tier = open_tier(dirs)
    record = dataclasses.replace(fill(tier, 0, 1), scope="lora:" + "a" * 100)

    with pytest.raises(KvsnapError, match="105 bytes, at most 96"):
        tier.commit(record)
    tier.close()


class TestName:
    def test_is_stable_and_tells_apart(self, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        cache.mkdir()
        (tmp_path / "link").symlink_to(cache)
        name = base_name(cache, NS.id())

        assert name == base_name(tmp_path / "x" / ".." / "cache", NS.id()) == base_name(tmp_path / "link", NS.id())
        assert name.startswith(f"kvsnap-{os.geteuid()}-")
        assert len({name, base_name(tmp_path, NS.id()), base_name(cache, make_namespace(tag="b").id())}) == 3

    def test_other_directories_do_not_share(self, dirs: tuple[Path, Path], tmp_path: Path) -> None:
        first = open_tier(dirs)
        second = open_tier((dirs[0], tmp_path / "other"))

        assert first.path != second.path
        first.close()
        second.close()

    @pytest.mark.parametrize("what", ["symlink", "dangling", "mode", "directory", "fifo", "workers"])
    def test_what_is_not_ours_is_left_alone(self, dirs: tuple[Path, Path], tmp_path: Path, what: str) -> None:
        """`/dev/shm` is everybody's: a name that somebody else took costs a number, and no byte there changes."""
        victim = tmp_path / "victim"
        victim.write_bytes(b"v" * 100)
        path = dirs[0] / (base_name(dirs[1], NS.id()) + "-0")
        if what in ("symlink", "dangling"):
            path.symlink_to(victim if what == "symlink" else tmp_path / "missing")
        elif what == "mode":
            path.write_bytes(b"x")
            path.chmod(0o644)
        elif what == "directory":
            path.mkdir()
        elif what == "fifo":
            os.mkfifo(path, 0o600)
        else:
            path.with_name(path.name + ".workers").symlink_to(victim)

        tier = open_tier(dirs)

        assert tier.path == f"{str(path)[:-2]}-1"
        assert ["not usable" in message for message in tier.messages] == [True]
        assert victim.read_bytes() == b"v" * 100
        assert not (tmp_path / "missing").exists()
        tier.close()

    def test_directory_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="cannot create the DRAM tier"):
            open_tier((tmp_path / "nowhere", tmp_path))
