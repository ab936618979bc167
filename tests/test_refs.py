"""Refs: moved by compare-and-swap, with a memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from kvsnap.canonical import canonical_json
from kvsnap.errors import ConfigError, CorruptChunkError, NotFoundError, StorageError
from kvsnap.gc_lists import read_lists, replace_list
from kvsnap.listing import list_snapshots
from kvsnap.manifest import Digest
from kvsnap.refs import RefMovedError, move_ref, ref_history, remove, roll_back, tag_snapshot
from kvsnap.repository import MAX_HISTORY, Repository
from kvsnap.repository_prune import prune_repository
from kvsnap.signing import Signature, read_signatures, store_signature
from kvsnap.snapshot_export import export_snapshot
from kvsnap.storage import LocalStorage, Storage
from kvsnap.testing import Fault, FaultyStorage, Rule
from tests.disk_fakes import make_namespace
from tests.repository_fakes import Gate, StoppingStorage, Task, TimedStorage, check_whole, names_in, reachable
from tests.snapshot_fakes import chain, prompt, store

IDS = [Digest(f"{i:064x}") for i in range(300)]


@pytest.fixture
def storage() -> TimedStorage:
    return TimedStorage()


@pytest.fixture
def repository(storage: Storage) -> Repository:
    return Repository.open_or_create(storage)


@pytest.fixture
def snapshots(tmp_path: Path, storage: TimedStorage) -> list[Digest]:
    """Three, each with a chunk more; none is tagged."""
    cache, ns = tmp_path / "cache", make_namespace()
    found = []
    for seed in range(3):
        store(cache, ns, chain(ns, prompt(seed, 64)))
        found.append(export_snapshot(cache, storage).snapshot)
    return found


class TestMove:
    def test_remembers_what_it_named_before(self, repository: Repository) -> None:
        for snapshot in (*IDS[:3], IDS[2]):
            move_ref(repository, "prod", snapshot)

        ref = repository.ref("prod")
        assert (ref.snapshot, ref.previous) == (IDS[2], IDS[1])
        assert [state.snapshot for state in ref.history] == [IDS[1], IDS[0]]

    def test_its_memory_is_bounded(self, repository: Repository) -> None:
        for snapshot in IDS[: MAX_HISTORY + 20]:
            move_ref(repository, "prod", snapshot)

        assert len(repository.ref("prod").history) == MAX_HISTORY

    def test_from_what_was_expected_only(self, repository: Repository) -> None:
        with pytest.raises(RefMovedError, match=f"prod names nothing, expected {IDS[0][:12]}"):
            move_ref(repository, "prod", IDS[1], expect=IDS[0])
        move_ref(repository, "prod", IDS[0])
        assert move_ref(repository, "prod", IDS[1], expect=IDS[0]).is_changed
        with pytest.raises(RefMovedError, match=f"prod names {IDS[1][:12]}"):
            move_ref(repository, "prod", IDS[2], expect=IDS[0])

    @pytest.mark.parametrize("fault", [Fault.ERROR_AFTER, Fault.DROP, Fault.DUPLICATE])
    def test_a_lost_answer_is_no_conflict(self, storage: TimedStorage, repository: Repository, fault: Fault) -> None:
        """An SDK that sends again after a lost answer is told that the ref has changed: by itself."""
        move_ref(repository, "prod", IDS[0])
        faulty = FaultyStorage(storage, [Rule(fault=fault, operation="put_if_match", name="refs/*")])

        report = move_ref(Repository(faulty), "prod", IDS[1], expect=IDS[0])

        assert report.is_changed
        assert [state.snapshot for state in repository.ref("prod").history] == [IDS[0]]

    def test_a_write_that_failed_is_told(self, storage: TimedStorage, repository: Repository) -> None:
        faulty = FaultyStorage(storage, [Rule(fault=Fault.SLOW_DOWN, operation="put_if_match", name="refs/*")])

        with pytest.raises(StorageError):
            move_ref(Repository(faulty), "prod", IDS[0])
        assert repository.ref_names() == []

    @pytest.mark.parametrize("where", ["memory", "directory"])
    def test_no_move_is_lost_between_many_writers(self, where: str, storage: TimedStorage, tmp_path: Path) -> None:
        repository = Repository.open_or_create(storage if where == "memory" else LocalStorage(tmp_path / "repo"))
        barrier = threading.Barrier(4, timeout=20)

        def move(part: int) -> None:
            barrier.wait()
            for snapshot in IDS[part * 5 : part * 5 + 5]:
                move_ref(repository, "prod", snapshot)

        for task in [Task(lambda part=part: move(part)) for part in range(4)]:  # type: ignore[misc]
            task.result()

        ref = repository.ref("prod")
        assert sorted([ref.snapshot, *(state.snapshot for state in ref.history)]) == IDS[:20]


class TestTag:
    def test_names_a_snapshot_by_any_of_its_names(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        tag_snapshot(storage, snapshots[0][:8], "a")
        tag_snapshot(storage, "a", "b")

        assert Repository(storage).ref("b").snapshot == snapshots[0]
        with pytest.raises(NotFoundError):
            tag_snapshot(storage, "nothing", "c")
        with pytest.raises(ConfigError, match="not valid"):
            tag_snapshot(storage, "a", "../c")
        assert names_in(storage, "leases/") == []

    def test_rolls_back_and_forth(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        for snapshot in snapshots:
            tag_snapshot(storage, snapshot, "prod")

        assert roll_back(storage, "prod").snapshot == snapshots[1]
        assert roll_back(storage, "prod").snapshot == snapshots[2]
        assert roll_back(storage, "prod", steps=4).snapshot == snapshots[0]
        rows = ref_history(storage, "prod")
        assert [row.snapshot for row in rows] == [snapshots[i] for i in (0, 2, 1, 2, 1, 0)]
        with pytest.raises(NotFoundError, match="has 5 earlier states, so none 6 moves ago"):
            roll_back(storage, "prod", steps=6)

    def test_history_tells_what_is_gone(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        tag_snapshot(storage, snapshots[0], "prod")
        tag_snapshot(storage, snapshots[1], "prod")
        remove(storage, snapshots[0])
        prune_repository(storage, grace_s=0)

        assert [row.is_there for row in ref_history(storage, "prod")] == [True, False]
        with pytest.raises(NotFoundError):
            roll_back(storage, "prod")

    def test_brings_a_removed_snapshot_back(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        remove(storage, snapshots[0])
        prune_repository(storage)  # its own parts are on a list too
        assert snapshots[0] not in check_whole(storage)

        tag_snapshot(storage, snapshots[0], "back")
        prune_repository(storage, grace_s=0)

        assert set(snapshots) == check_whole(storage)

    def test_a_snapshot_whose_parts_are_gone_is_refused(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        """A prune has begun with it and died; what is left isn't a snapshot."""
        tag_snapshot(storage, snapshots[0], "keep")
        remove(storage, snapshots[2])
        prune_repository(storage)
        item = next(item for item in read_lists(storage) if item.reason == "unneeded")
        assert replace_list(storage, item, item.objects, sweeper="0" * 32)
        storage.delete(next(name for name in item.objects if name.startswith("shards/")))

        with pytest.raises(CorruptChunkError, match="a prune has deleted"):
            tag_snapshot(storage, snapshots[2], "late")
        assert Repository(storage).ref_names() == ["keep"]

    def test_a_list_that_makes_no_sense_ends_a_removal_before_it_began(
        self, storage: TimedStorage, snapshots: list[Digest]
    ) -> None:
        tag_snapshot(storage, snapshots[0], "prod")
        storage.put(f"gc/{'0' * 32}.json", b"garbage")

        with pytest.raises(CorruptChunkError):
            remove(storage, "prod", with_snapshot=True)
        assert Repository(storage).ref_names() == ["prod"]
        assert remove(storage, "prod").refs == ("prod",)

    def test_a_snapshot_of_a_later_version_can_be_removed(self, storage: TimedStorage, repository: Repository) -> None:
        """As prune advises."""
        data = canonical_json({"format": 99})
        name = sha256(data).hexdigest()
        storage.put(f"manifests/{name}.json", data)

        assert remove(storage, name, dry_run=True).snapshots == (name,)
        assert remove(storage, name).snapshots == (name,)

    @pytest.mark.parametrize(
        ("kind", "data", "problem"),
        [
            ("shards/", None, "is missing in memory; export the snapshot again"),
            ("catalogs/", None, "is missing in memory; export the snapshot again"),
            ("shards/", b"short", r"in memory is damaged: expected \d+ bytes, found 5; delete it, then export"),
            ("catalogs/", b"short", r"in memory is damaged: expected \d+ bytes, found 5; delete it, then export"),
        ],
    )
    def test_a_snapshot_that_lacks_something_is_refused(
        self, storage: TimedStorage, snapshots: list[Digest], kind: str, data: bytes | None, problem: str
    ) -> None:
        """A ref that names it would stop every replica that starts."""
        tag_snapshot(storage, snapshots[0], "prod")
        tag_snapshot(storage, snapshots[1], "prod")
        lost = next(name for name in reachable(storage, snapshots[0]) if name.startswith(kind))
        storage.delete(lost)
        if data is not None:
            storage.put(lost, data)

        acts: tuple[Callable[[], object], ...] = (
            lambda: tag_snapshot(storage, snapshots[0], "prod"),
            lambda: tag_snapshot(storage, snapshots[0], "other"),
            lambda: roll_back(storage, "prod"),
        )
        for act in acts:
            with pytest.raises(CorruptChunkError, match=f"snapshot {snapshots[0][:12]} .*{lost} {problem}"):
                act()
        assert Repository(storage).ref("prod").snapshot == snapshots[1]
        assert Repository(storage).ref_names() == ["prod"]

    def test_keeps_the_signature_too(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        """A prune has just looked what is needed when the snapshot comes back."""
        signature = Signature(key="1" * 64, signature="2" * 128)
        store_signature(storage, snapshots[0], signature)
        remove(storage, snapshots[0])
        prune_repository(storage)
        stopping = StoppingStorage(storage)
        stopping.before = gate = Gate(lambda operation, name: operation == "put_if_match" and name.startswith("gc/"))
        prune = Task(lambda: prune_repository(stopping, grace_s=0))

        with gate.reached():
            tag_snapshot(storage, snapshots[0], "back")
        prune.result()

        assert snapshots[0] in check_whole(storage)
        assert read_signatures(storage, snapshots[0]) == [signature]


class TestRemove:
    def test_a_ref_leaves_its_snapshot(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        tag_snapshot(storage, snapshots[0], "prod")

        assert remove(storage, "prod", dry_run=True).refs == ("prod",)
        assert Repository(storage).ref_names() == ["prod"]
        assert remove(storage, "prod").snapshots == ()
        assert Repository(storage).ref_names() == []
        assert check_whole(storage) == set(snapshots)

    def test_a_ref_and_its_snapshot_if_no_other_names_it(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        tag_snapshot(storage, snapshots[0], "a")
        tag_snapshot(storage, snapshots[0], "b")

        assert remove(storage, "a", with_snapshot=True).snapshots == ()
        assert remove(storage, "b", with_snapshot=True).snapshots == (snapshots[0],)
        assert check_whole(storage) == set(snapshots[1:])

    def test_a_snapshot_with_a_name_is_refused(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        tag_snapshot(storage, snapshots[0], "prod")

        with pytest.raises(ConfigError, match="is named by prod; remove these refs first"):
            remove(storage, snapshots[0])
        assert check_whole(storage) == set(snapshots)

    def test_deletes_no_bytes(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        """Invariant 4: only prune deletes."""
        before = set(names_in(storage))

        report = remove(storage, snapshots[0])

        assert before < set(names_in(storage))
        assert report.nbytes > 0
        assert [row.snapshot for row in list_snapshots(storage).snapshots] != snapshots

    def test_can_be_repeated(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        remove(storage, snapshots[0])
        remove(storage, snapshots[0])

        assert len(names_in(storage, "gc/")) == 1
        with pytest.raises(NotFoundError):
            remove(storage, "nothing")
        with pytest.raises(NotFoundError):
            remove(storage, "0" * 64)

    def test_a_damaged_ref_can_be_removed(self, storage: TimedStorage, snapshots: list[Digest]) -> None:
        tag_snapshot(storage, snapshots[0], "prod")
        storage.put("refs/prod.json", b"garbage")

        assert remove(storage, "prod").refs == ("prod",)
        assert list_snapshots(storage).problems == ()


@pytest.mark.parametrize("history", ['"x"', "[1]", '[{"snapshot": "../../etc"}]', "{}"])
def test_a_history_of_garbage_is_damage(storage: TimedStorage, repository: Repository, history: str) -> None:
    """D17: no name is made of what isn't a digest."""
    text = f'{{"history":{history},"previous":null,"snapshot":"sha256:{IDS[0]}","updated":"x","write_id":"y"}}'
    storage.put("refs/prod.json", text.encode())

    with pytest.raises(CorruptChunkError, match="ref prod in memory"):
        repository.ref("prod")
