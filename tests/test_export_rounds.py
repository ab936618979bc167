"""Export every so often: several leaders, failures, and refs that others move meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from kvsnap.errors import ConfigError, StorageError
from kvsnap.export_rounds import ExportRound, ExportRounds, IsOwed
from kvsnap.namespace import Namespace
from kvsnap.refs import remove, roll_back, tag_snapshot
from kvsnap.repository import Repository
from kvsnap.repository_prune import prune_repository
from kvsnap.rounds import Pace, Stop
from kvsnap.snapshot_export import ExportReport, export_snapshot
from kvsnap.storage import LocalStorage, MemoryStorage, Storage
from kvsnap.storage.stoppable import StoppableStorage
from kvsnap.verify import verify_snapshot
from tests.disk_fakes import make_namespace
from tests.repository_fakes import StoppingStorage, check_whole, names_in
from tests.snapshot_fakes import chain, filled_cache, prompt, store


@pytest.fixture
def ns() -> Namespace:
    return make_namespace()


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def leader(
    cache: Path, storage: Storage, *, stop: Stop | None = None, clock: Callable[[], float] | None = None
) -> ExportRounds:
    def export(last: ExportReport | None, moves_if_unchanged: IsOwed) -> ExportReport:
        return export_snapshot(cache, storage, tag="latest", last=last, moves_if_unchanged=moves_if_unchanged)

    return ExportRounds(export, storage, "latest", stop=stop or Stop(), clock=clock or time.time)


def latest(storage: Storage) -> str:
    return Repository(storage).ref("latest").snapshot


def down(operation: str, name: str) -> None:
    """A storage that is."""
    raise StorageError("down")


def down_for_refs(operation: str, name: str) -> None:
    """Everything but moving a ref works."""
    if name.startswith("refs/") and operation == "put_if_match":
        raise StorageError("down")


def test_a_round_publishes_what_is_new(tmp_path: Path, ns: Namespace, storage: MemoryStorage) -> None:
    filled_cache(tmp_path)
    rounds = leader(tmp_path, storage)

    first, same = rounds.round(), rounds.round()
    store(tmp_path, ns, chain(ns, prompt(7, 128)))
    more = rounds.round()

    assert [found.outcome for found in (first, same, more)] == ["exported", "unchanged", "exported"]
    assert more.report is not None
    assert latest(storage) == more.report.snapshot
    assert len(check_whole(storage)) == 2


def test_a_roll_back_stands_until_there_is_something_new(tmp_path: Path, ns: Namespace, storage: MemoryStorage) -> None:
    filled_cache(tmp_path)
    rounds = leader(tmp_path, storage)
    first = rounds.round().report
    store(tmp_path, ns, chain(ns, prompt(7, 128)))
    rounds.round()
    roll_back(storage, "latest")

    assert rounds.round().outcome == "unchanged"
    assert first is not None
    assert latest(storage) == first.snapshot
    store(tmp_path, ns, chain(ns, prompt(8, 128)))
    found = rounds.round().report
    assert found is not None
    assert latest(storage) == found.snapshot


@pytest.mark.parametrize("what", ["a failed round", "a restart", "both"])
def test_a_roll_back_stands_whatever_happens_to_the_exporter(
    tmp_path: Path, ns: Namespace, storage: MemoryStorage, what: str
) -> None:
    """An operator who took a bad snapshot out of use must not find it back because the store was down for a moment."""
    filled_cache(tmp_path)
    failing = StoppingStorage(storage)
    rounds = leader(tmp_path, failing)
    first = rounds.round().report
    store(tmp_path, ns, chain(ns, prompt(7, 128)))
    rounds.round()
    roll_back(storage, "latest")

    if what != "a failed round":
        rounds = leader(tmp_path, failing)
    if what != "a restart":
        failing.before = down
        assert rounds.round().outcome == "failed"
        failing.before = lambda operation, name: None

    assert [rounds.round().outcome, rounds.round().outcome] == ["unchanged", "unchanged"]
    assert first is not None
    assert latest(storage) == first.snapshot
    store(tmp_path, ns, chain(ns, prompt(8, 128)))
    found = rounds.round().report
    assert found is not None
    assert latest(storage) == found.snapshot


def test_a_ref_that_is_not_there_is_made_for_what_is(tmp_path: Path, storage: MemoryStorage) -> None:
    """The snapshot was exported before, without a name."""
    filled_cache(tmp_path)
    snapshot = export_snapshot(tmp_path, storage).snapshot

    assert leader(tmp_path, storage).round().outcome == "unchanged"

    assert latest(storage) == snapshot


def test_leaders_do_not_undo_each_other(tmp_path: Path, ns: Namespace, storage: MemoryStorage) -> None:
    """Two hosts with other content: without anything new the ref rests."""
    for name in "ab":
        filled_cache(tmp_path / name)
        store(tmp_path / name, ns, chain(ns, prompt(ord(name), 128)))
    a, b = (leader(tmp_path / name, storage) for name in "ab")
    a.round()
    theirs = b.round().report

    for _ in range(3):
        assert [a.round().outcome, b.round().outcome] == ["unchanged", "unchanged"]

    assert theirs is not None
    assert latest(storage) == theirs.snapshot
    assert len(Repository(storage).ref("latest").history) == 1


@pytest.mark.parametrize("how", ["retired", "removed", "restarted"])
def test_a_roll_back_outlives_what_it_took_out_of_use(
    tmp_path: Path, ns: Namespace, storage: MemoryStorage, how: str
) -> None:
    """Two moves back; then retention, or an operator, gets rid of the bad snapshot that the cache still holds."""
    filled_cache(tmp_path)
    rounds = leader(tmp_path, storage)
    found = [rounds.round().report]
    for seed in (7, 8):
        store(tmp_path, ns, chain(ns, prompt(seed, 128)))
        found.append(rounds.round().report)
    good, middle, bad = (report.snapshot for report in found if report is not None)
    tag_snapshot(storage, good, "latest")
    tag_snapshot(storage, middle, "latest")
    if how == "removed":
        remove(storage, bad)
    prune_repository(storage, grace_s=0, untagged_s=-1)
    if how == "restarted":
        rounds = leader(tmp_path, storage)

    again = [rounds.round() for _ in range(2)]

    assert [item.outcome for item in again] == ["unchanged", "unchanged"]
    assert latest(storage) == middle
    assert check_whole(storage) == ({good, middle} if how == "removed" else {good, middle, bad})
    store(tmp_path, ns, chain(ns, prompt(9, 128)))
    new = rounds.round().report
    assert new is not None
    assert latest(storage) == new.snapshot


def test_retention_makes_nothing_of_the_other_leaders_new(
    tmp_path: Path, ns: Namespace, storage: MemoryStorage
) -> None:
    """It would be sent again after each prune, and take the ref from what is newer."""
    for name in "ab":
        filled_cache(tmp_path / name)
        store(tmp_path / name, ns, chain(ns, prompt(ord(name), 128)))
    a, b = (leader(tmp_path / name, storage) for name in "ab")
    for rounds in (b, a):
        rounds.round()
    store(tmp_path / "a", ns, chain(ns, prompt(7, 128)))
    a.round()
    prune_repository(storage, grace_s=0, untagged_s=-1)
    newest, objects = latest(storage), set(names_in(storage, "shards/"))

    assert b.round().outcome == "unchanged"

    assert latest(storage) == newest
    assert set(names_in(storage, "shards/")) == objects


def test_a_ref_that_is_gone_is_made_again(tmp_path: Path, storage: MemoryStorage) -> None:
    """By a leader that runs as by one that starts; with its snapshot, where that is gone as well."""
    filled_cache(tmp_path)
    rounds = leader(tmp_path, storage)
    rounds.round()
    for with_snapshot in (False, True):
        remove(storage, "latest", with_snapshot=with_snapshot)
        if with_snapshot:
            prune_repository(storage, grace_s=0)
            prune_repository(storage, grace_s=0)

        assert rounds.round().outcome == ("exported" if with_snapshot else "unchanged")

        assert {latest(storage)} == check_whole(storage)


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_lost_manifest_is_published_anew(
    tmp_path: Path, storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nobody has removed that snapshot: its ref names it."""
    filled_cache(tmp_path)
    rounds = leader(tmp_path, storage)
    rounds.round()
    lost = latest(storage)
    storage.delete(f"manifests/{lost}.json")
    if how == "damaged":
        storage.put(f"manifests/{lost}.json", b"garbage")
    monkeypatch.setattr("kvsnap.snapshot_export.now_text", lambda: "2030-01-01T00:00:00Z")  # so, another manifest

    assert rounds.round().outcome == "exported"

    assert latest(storage) != lost
    assert verify_snapshot(storage, "latest", read_data=True).is_good


def test_leaders_at_the_same_time(tmp_path: Path, ns: Namespace) -> None:
    """Invariant 3: whoever wins, the ref names a whole snapshot, and its history all the others."""
    storage = LocalStorage(tmp_path / "repo")
    caches = [tmp_path / f"cache-{i}" for i in range(4)]
    for i, cache in enumerate(caches):
        filled_cache(cache)
        store(cache, ns, chain(ns, prompt(20 + i, 128)))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda rounds: rounds.round(), [leader(cache, storage) for cache in caches]))

    assert {item.outcome for item in found} == {"exported"}
    snapshots = {item.report.snapshot for item in found if item.report is not None}
    ref = Repository(storage).ref("latest")
    assert {ref.snapshot, *(state.snapshot for state in ref.history)} == snapshots == check_whole(storage)


def test_a_failure_is_said_and_the_next_round_goes_on(tmp_path: Path, storage: MemoryStorage) -> None:
    """D14: with the age of the last success."""
    filled_cache(tmp_path)
    failing = StoppingStorage(storage)
    rounds = leader(tmp_path, failing, clock=lambda: 1234.5)
    rounds.round()

    def before(operation: str, name: str) -> None:
        raise StorageError("403 Forbidden")

    failing.before = before
    bad = [rounds.round(), rounds.round()]
    failing.before = lambda operation, name: None
    good = rounds.round()

    assert [(found.outcome, found.failures, found.last_successful_export) for found in bad] == [
        ("failed", 1, 1234.5),
        ("failed", 2, 1234.5),
    ]
    assert "403" in (bad[0].error or "")
    assert (good.outcome, good.failures) == ("unchanged", 0)


def test_a_snapshot_that_missed_its_ref_gets_it_in_the_next_round(tmp_path: Path, storage: MemoryStorage) -> None:
    """Published, but the store went down before the ref moved."""
    filled_cache(tmp_path)
    failing = StoppingStorage(storage)
    failing.before = down_for_refs
    rounds = leader(tmp_path, failing)
    assert rounds.round().outcome == "failed"
    failing.before = lambda operation, name: None

    found = rounds.round()

    assert found.outcome == "unchanged"
    assert found.report is not None
    assert latest(storage) == found.report.snapshot


@pytest.mark.parametrize("has_restarted", [False, True])
def test_a_ref_that_names_an_earlier_snapshot_gets_the_one_that_it_missed(
    tmp_path: Path, ns: Namespace, storage: MemoryStorage, has_restarted: bool
) -> None:
    """Published, and then the store went down or the exporter died: never named, so nobody took it out of use."""
    filled_cache(tmp_path)
    failing = StoppingStorage(storage)
    rounds = leader(tmp_path, failing)
    rounds.round()
    store(tmp_path, ns, chain(ns, prompt(7, 128)))
    failing.before = down_for_refs
    assert rounds.round().outcome == "failed"
    failing.before = lambda operation, name: None

    found = (leader(tmp_path, storage) if has_restarted else rounds).round()

    assert found.outcome == "unchanged"
    assert found.report is not None
    assert latest(storage) == found.report.snapshot
    assert len(Repository(storage).ref("latest").history) == 1


def test_an_empty_directory_is_a_failure_until_there_is_something(tmp_path: Path, storage: MemoryStorage) -> None:
    rounds = leader(tmp_path / "cache", storage)
    assert rounds.round().outcome == "failed"

    filled_cache(tmp_path / "cache")

    assert rounds.round().outcome == "exported"


def test_a_wrong_configuration_ends_it(tmp_path: Path, storage: MemoryStorage) -> None:
    filled_cache(tmp_path)
    rounds = ExportRounds(
        lambda last, moves: export_snapshot(tmp_path, storage, tag="a b"), storage, "a b", stop=Stop()
    )

    with pytest.raises(ConfigError):
        rounds.run(Pace(0.001), lambda found: None)


def test_a_stop_in_the_middle_leaves_the_ref(tmp_path: Path, ns: Namespace, storage: MemoryStorage) -> None:
    """D22: the earlier snapshot is whole, the lease is given back, and the next export does the rest."""
    filled_cache(tmp_path)
    leader(tmp_path, storage).round()
    before, objects = latest(storage), set(names_in(storage, "shards/"))
    store(tmp_path, ns, chain(ns, prompt(7, 128)))
    stop = Stop()
    stopping = StoppingStorage(storage)
    stopping.before = lambda operation, name: stop.set() if operation in ("put_stream", "put_known") else None
    told: list[ExportRound] = []

    leader(tmp_path, StoppableStorage(stopping, stop), stop=stop).run(Pace(3600.0), told.append)

    assert told == []
    assert (latest(storage), set(names_in(storage, "shards/"))) == (before, objects)
    assert check_whole(storage) == {before}
    assert leader(tmp_path, storage).round().outcome == "exported"


def test_rounds_go_on_until_a_stop(tmp_path: Path, storage: MemoryStorage) -> None:
    filled_cache(tmp_path)
    stop = Stop()
    told: list[ExportRound] = []

    def hear(found: ExportRound) -> None:
        told.append(found)
        if len(told) == 3:
            stop.set()

    leader(tmp_path, storage, stop=stop).run(Pace(0.001), partial(hear))

    assert [found.outcome for found in told] == ["exported", "unchanged", "unchanged"]
