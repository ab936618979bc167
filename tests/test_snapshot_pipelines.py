"""Export and import of several shards at once: order, budgets, requests, what is referenced and what is sent."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from kvsnap.errors import CorruptChunkError, StorageError
from kvsnap.keys import ChunkKey
from kvsnap.namespace import Namespace
from kvsnap.repository import Repository
from kvsnap.shard import checksum
from kvsnap.snapshot_export import ExportReport, export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import Buffer, LocalStorage, MemoryStorage, Reader, Storage
from kvsnap.storage.wrapper import WrapperStorage
from kvsnap.tiers.disk import ChunkToWrite, DiskTier
from kvsnap.transfer import NUM_WORKERS
from kvsnap.verify import verify_cache_dir, verify_snapshot
from tests.disk_fakes import make_namespace
from tests.snapshot_fakes import chain, chunks_at, flip, prompt, store

T = TypeVar("T")


class CountingStorage(WrapperStorage):
    """Counts requests by operation and kind of object, and can hold up reads of an object."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.count: Counter[tuple[str, str]] = Counter()
        self.bytes_read = 0
        self.open_reads = 0
        self.most_open_reads = 0
        self.slow: str | None = None
        self.goes_on: Callable[[], bool] = lambda: True
        self._lock = threading.Lock()

    def _call(self, operation: str, name: str, act: Callable[[], T]) -> T:
        with self._lock:
            self.count[operation, name.split("/")[0]] += 1
        return act()

    @contextmanager
    def open_read(self, name: str, *, offset: int = 0, nbytes: int | None = None) -> Iterator[Reader]:
        with super().open_read(name, offset=offset, nbytes=nbytes) as reader:
            with self._lock:
                self.open_reads += 1
                self.most_open_reads = max(self.most_open_reads, self.open_reads)
            if name == self.slow:
                deadline = time.monotonic() + 20
                while not self.goes_on() and time.monotonic() < deadline:
                    time.sleep(0.005)
            yield _CountingReader(reader, self)
            with self._lock:
                self.open_reads -= 1


class _CountingReader:
    def __init__(self, inner: Reader, storage: CountingStorage) -> None:
        self._inner = inner
        self._storage = storage

    def readinto(self, buffer: memoryview, /) -> int:
        found = self._inner.readinto(buffer)
        self._storage.bytes_read += found
        return found


@pytest.fixture
def ns() -> Namespace:
    return make_namespace()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def repo(tmp_path: Path) -> CountingStorage:
    return CountingStorage(LocalStorage(tmp_path / "repo"))


def many_prompts(count: int, ns: Namespace, num_tokens: int = 256) -> list[list[ChunkToWrite]]:
    return [chain(ns, prompt(seed, num_tokens)) for seed in range(count)]


def split_prompt(ns: Namespace, parts: int) -> list[list[ChunkToWrite]]:
    """One prompt of four chunks per shard: each shard needs the one before it."""
    chunks = chain(ns, prompt(1, parts * 256))
    return [chunks[4 * i : 4 * i + 4] for i in range(parts)]


def heat(cache: Path, ns: Namespace, chunks: list[ChunkToWrite], hits: int) -> None:
    with DiskTier(cache, ns) as disk:
        known = {key: (key, *rest) for key, rest in disk.load_usage().items()}
        known.update({c.key: (ChunkKey(c.key), hits, 1_700_000_000.0) for c in chunks})
        disk.store_usage(list(known.values()))


class TestImport:
    def test_one_get_per_shard_and_nothing_else(
        self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path
    ) -> None:
        """Requests cost money and time: per shard one GET, no HEAD."""
        store(cache, ns, *many_prompts(9, ns))
        export_snapshot(cache, repo, tag="prod")
        repo.count.clear()

        report = import_snapshot(repo, "prod", tmp_path / "other")

        assert report.imported_shards == 9
        assert {key: n for key, n in repo.count.items() if key[1] == "shards"} == {
            ("open_read", "shards"): 9,
            ("list", "shards"): 1,
        }
        assert verify_cache_dir(tmp_path / "other", read_data=True).is_good

    def test_a_few_shards_at_a_time(self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path) -> None:
        """Memory is bounded by what is on its way, whatever the size of the snapshot."""
        store(cache, ns, *many_prompts(3 * NUM_WORKERS, ns))
        export_snapshot(cache, repo, tag="prod")
        first = Repository(repo).manifest(Repository(repo).resolve("prod")).shards[0]
        repo.slow = f"shards/{first.digest[:2]}/{first.digest}.safetensors"
        repo.goes_on = lambda: repo.most_open_reads > 1

        import_snapshot(repo, "prod", tmp_path / "other")

        assert 1 < repo.most_open_reads <= NUM_WORKERS

    def test_no_shard_is_seen_before_those_it_needs(
        self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path
    ) -> None:
        """Invariant 6, at any instant: the root's shard comes last, the others are done and wait for it."""
        store(cache, ns, *split_prompt(ns, 3))
        export_snapshot(cache, repo, tag="prod")
        manifest = Repository(repo).manifest(Repository(repo).resolve("prod"))
        catalog = Repository(repo).catalog(manifest)
        root = manifest.shards[int(catalog.shard[0])]
        repo.slow = f"shards/{root.digest[:2]}/{root.digest}.safetensors"
        shards = tmp_path / "other" / ns.dirname / "shards"
        seen: list[int] = []

        def others_are_done() -> bool:
            seen.append(len(list(shards.iterdir())) if shards.is_dir() else 0)
            return repo.open_reads == 1 and len(seen) > 3

        repo.goes_on = others_are_done
        order: list[int] = []
        import_snapshot(
            repo, "prod", tmp_path / "other", progress=lambda done, total: order.append(len(list(shards.iterdir())))
        )

        assert set(seen) == {0}
        assert order == [1, 2, 3]
        assert len(chunks_at(tmp_path / "other", ns)) == 12

    def test_a_budget_takes_the_last_shard_in_part(
        self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path
    ) -> None:
        """Hottest first, then the start of the next one, by one request for exactly that range."""
        prompts = many_prompts(3, ns)
        written = store(cache, ns, *prompts)
        for i, chunks in enumerate(prompts):
            heat(cache, ns, chunks, 10 - i)
        export_snapshot(cache, repo, tag="prod")
        sizes = [shard.path.stat().st_size for shard in written]
        part = written[1].entries[1].offset + written[1].entries[1].nbytes
        repo.count.clear()
        repo.bytes_read = 0

        report = import_snapshot(repo, "prod", tmp_path / "other", max_bytes=sizes[0] + part + 4096)

        assert (report.num_chunks, report.chosen_shards, report.is_last_in_part) == (6, 2, True)
        assert report.imported_bytes == sizes[0] + part
        assert repo.count["open_read", "shards"] == 2
        assert set(chunks_at(tmp_path / "other", ns)) == {c.key for c in [*prompts[0], *prompts[1][:2]]}
        expected = chunks_at(cache, ns)
        assert all(expected[key] == data for key, data in chunks_at(tmp_path / "other", ns).items())
        assert verify_cache_dir(tmp_path / "other", read_data=True).is_good

    def test_a_part_is_not_fetched_twice(
        self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path
    ) -> None:
        store(cache, ns, *many_prompts(2, ns))
        export_snapshot(cache, repo, tag="prod")
        budget = Repository(repo).manifest(Repository(repo).resolve("prod")).totals.nbytes - 4096
        first = import_snapshot(repo, "prod", tmp_path / "other", max_bytes=budget)
        repo.count.clear()

        again = import_snapshot(repo, "prod", tmp_path / "other", max_bytes=budget)

        assert first.is_last_in_part
        assert (again.imported_shards, again.num_chunks) == (0, first.num_chunks)
        assert repo.count["open_read", "shards"] == 0

    def test_a_damaged_part_is_refused(self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path) -> None:
        """D14: no digest covers a range, so each chunk's BLAKE3 does; the message names the chunk."""
        chunks = chain(ns, prompt(1, 256))
        written = store(cache, ns, chunks)[0]
        export_snapshot(cache, repo, tag="prod")
        shard = next((tmp_path / "repo" / "shards").glob("*/*"))
        flip(shard, written.entries[1].offset + 5)

        with pytest.raises(CorruptChunkError, match=chunks[1].key.hex()[:12]):
            import_snapshot(repo, "prod", tmp_path / "other", max_bytes=shard.stat().st_size - 4096)

        assert chunks_at(tmp_path / "other", ns) == {}

    def test_stops_at_the_first_failure_and_leaves_a_valid_part(
        self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path
    ) -> None:
        store(cache, ns, *split_prompt(ns, 6))
        export_snapshot(cache, repo, tag="prod")
        manifest = Repository(repo).manifest(Repository(repo).resolve("prod"))
        catalog = Repository(repo).catalog(manifest)
        third = manifest.shards[int(catalog.shard[8])].digest
        flip(tmp_path / "repo" / "shards" / third[:2] / f"{third}.safetensors", -1)

        with pytest.raises(CorruptChunkError, match=third):
            import_snapshot(repo, "prod", tmp_path / "other")

        assert len(chunks_at(tmp_path / "other", ns)) in (0, 4, 8)
        assert verify_cache_dir(tmp_path / "other", read_data=True).notes == []
        assert not list((tmp_path / "other" / ns.dirname / "tmp").iterdir())

    def test_a_full_directory_ends_it_without_a_wait_for_ever(
        self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path
    ) -> None:
        """Invariant 7: the cap holds with several shards on their way, too."""
        written = store(cache, ns, *split_prompt(ns, 8))
        export_snapshot(cache, repo, tag="prod")
        cap = 3 * written[0].path.stat().st_size + (400 << 10)
        DiskTier(tmp_path / "other", ns, cap_bytes=cap).close()

        report = import_snapshot(repo, "prod", tmp_path / "other")

        assert report.is_full
        assert report.num_chunks == len(chunks_at(tmp_path / "other", ns)) == 4 * report.imported_shards
        assert sum(path.lstat().st_blocks * 512 for path in (tmp_path / "other").rglob("*")) <= cap


class TestExport:
    def test_what_was_compacted_is_not_sent_again(
        self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path
    ) -> None:
        """The chunks are in the repository; that another shard holds them here makes no difference."""
        chunks = chain(ns, prompt(1, 512))
        old = store(cache, ns, chunks)[0]
        first = export_snapshot(cache, repo, tag="prod")
        with DiskTier(cache, ns) as disk:
            list(disk.scan())
            disk.drop(old.id)
        store(cache, ns, chunks[:4], chunks[4:6])

        again = export_snapshot(cache, repo, tag="prod")

        assert (again.sent_shards, again.sent_bytes, again.num_chunks) == (0, 0, 6)
        assert again.snapshot != first.snapshot
        assert verify_snapshot(repo.url, "prod", read_data=True).is_good
        import_snapshot(repo, "prod", tmp_path / "other")
        assert {c.key for c in chunks[:6]} <= set(chunks_at(tmp_path / "other", ns))

    def test_a_shard_that_goes_anyway_needs_no_other_one(self, ns: Namespace, tmp_path: Path) -> None:
        """Three hosts with one system prompt: each snapshot is as large as if the others' weren't there."""
        storage = MemoryStorage()
        for host in range(3):
            cache = tmp_path / f"host-{host}"
            for seed in range(3):
                store(cache, ns, chain(ns, prompt(10 * host + seed, 256, shared=128)))
            alone = export_snapshot(cache, MemoryStorage())
            report = export_snapshot(cache, storage, tag=f"host-{host}")

            assert (report.num_chunks, report.num_shards, report.nbytes) == (8, 3, alone.nbytes)
            assert not export_snapshot(cache, storage, tag=f"host-{host}").is_new

    def test_a_bound_is_not_spent_on_a_shard_that_is_too_large(
        self, cache: Path, ns: Namespace, repo: CountingStorage
    ) -> None:
        """The root is in the repository in a small shard, and here in a large one that has something new, too."""
        prompts = chain(ns, prompt(1, 128))
        old = store(cache, ns, prompts[:1], prompts[1:])
        first = export_snapshot(cache, repo, tag="prod")
        with DiskTier(cache, ns) as disk:
            list(disk.scan())
            disk.drop(old[0].id)
        store(cache, ns, [prompts[0], *(chunk for seed in range(4) for chunk in chain(ns, prompt(30 + seed, 256)))])

        report = export_snapshot(cache, repo, tag="prod", max_bytes=first.nbytes)

        assert (report.snapshot, report.num_chunks) == (first.snapshot, 2)

    def test_a_part_of_a_shard_does_not_have_all_of_it_sent(
        self, cache: Path, ns: Namespace, repo: CountingStorage
    ) -> None:
        """What is new in it was not selected; what was is in the repository."""
        first = chain(ns, prompt(1, 128))
        store(cache, ns, first)
        export_snapshot(cache, repo, tag="hot")
        both = [*first, *chain(ns, prompt(1, 256))[2:]]
        with DiskTier(cache, ns) as disk:
            for shard in list(disk.scan()):
                disk.drop(shard.id)
            assert disk.write("", both)
            disk.store_usage([(chunk.key, 3, time.time()) for chunk in first])

        report = export_snapshot(cache, repo, tag="hot", select="hot")

        assert (report.is_new, report.sent_shards) == (False, 0)

    def test_other_bytes_of_a_known_chunk_are_not_sent(
        self, cache: Path, ns: Namespace, repo: CountingStorage, tmp_path: Path
    ) -> None:
        """KV isn't bitwise the same on every engine: a chunk counts by its key, its bytes by the shard that has it."""
        first = export_of(tmp_path / "one", ns, repo)
        chunks = chain(ns, prompt(1, 256))
        changed = [c._replace(views=[memoryview(bytearray(v)) for v in c.views]) for c in chunks]
        for chunk in changed:
            chunk.views[0][0] ^= 1
        store(cache, ns, [c._replace(xxh3=checksum(c.views)) for c in changed])

        again = export_snapshot(cache, repo, tag="prod")

        assert again.snapshot == first.snapshot
        assert again.sent_bytes == 0

    def test_an_unchanged_export_asks_nothing_per_shard(
        self, cache: Path, ns: Namespace, repo: CountingStorage
    ) -> None:
        store(cache, ns, *many_prompts(6, ns))
        export_snapshot(cache, repo, tag="prod")
        repo.count.clear()

        again = export_snapshot(cache, repo, tag="prod")

        assert not again.is_new
        assert {key for key in repo.count if key[1] == "shards"} == {("list", "shards")}

    def test_a_few_new_chunks_send_a_few_bytes(self, cache: Path, ns: Namespace, repo: CountingStorage) -> None:
        store(cache, ns, *many_prompts(50, ns))
        first = export_snapshot(cache, repo, tag="prod")
        added = store(cache, ns, chain(ns, prompt(99, 128)))

        again = export_snapshot(cache, repo, tag="prod")

        assert again.sent_bytes == added[0].path.stat().st_size <= 0.02 * first.nbytes
        assert again.parent == first.snapshot

    def test_a_resumed_export_reads_and_skips_what_is_there(
        self, cache: Path, ns: Namespace, repo: CountingStorage
    ) -> None:
        """D01: killed before the manifest; no shard is stored a second time."""
        store(cache, ns, *many_prompts(5, ns))
        export_snapshot(cache, repo, tag="prod")
        for kind in ("manifests", "catalogs", "refs"):
            for info in list(repo.list(f"{kind}/")):
                repo.delete(info.name)
        repo.count.clear()

        again = export_snapshot(cache, repo, tag="prod")

        assert (again.sent_shards, again.num_chunks, again.is_new) == (0, 20, True)
        assert {key for key in repo.count if key[1] == "shards"} <= {("list", "shards"), ("head", "shards")}

    def test_shards_stand_in_order_of_heat(self, cache: Path, ns: Namespace, repo: CountingStorage) -> None:
        """Hottest first, so that a byte budget takes a start of the list."""
        prompts = many_prompts(5, ns)
        store(cache, ns, *prompts)
        for i, chunks in enumerate(prompts):
            heat(cache, ns, chunks, (i * 3) % 5)

        export_snapshot(cache, repo, tag="prod")

        manifest = Repository(repo).manifest(Repository(repo).resolve("prod"))
        catalog = Repository(repo).catalog(manifest)
        hits = [int(catalog.hits[rows].mean()) for rows in catalog.rows_of_shards(5)]
        assert hits == [4, 3, 2, 1, 0]

    def test_a_failing_store_ends_it_and_nothing_is_named(self, cache: Path, ns: Namespace) -> None:
        """Invariant 3: a shard that could not be stored is in no manifest."""

        class Broken(CountingStorage):
            def put_stream(self, pieces: Callable[[], Iterable[Buffer]], name: Callable[[], str]) -> bool:
                if self.count["put_stream", ""] >= 3:
                    raise StorageError("the store is down")
                return super().put_stream(pieces, name)

        store(cache, ns, *many_prompts(9, ns))
        broken = Broken(MemoryStorage())

        with pytest.raises(StorageError, match="down"):
            export_snapshot(cache, broken, tag="prod")

        assert [info.name for info in broken.list("manifests/")] == []
        assert export_snapshot(cache, broken.inner, tag="prod").num_shards == 9


def export_of(cache: Path, ns: Namespace, repo: Storage) -> ExportReport:
    """One prompt of four chunks from a cache of its own."""
    store(cache, ns, chain(ns, prompt(1, 256)))
    return export_snapshot(cache, repo, tag="prod")
