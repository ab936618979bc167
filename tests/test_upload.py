"""Upload: what the cache directory's disk can't give is left out; what the repository doesn't take is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvsnap.errors import StorageError
from kvsnap.namespace import Namespace
from kvsnap.snapshot_export import export_snapshot
from kvsnap.storage import LocalStorage, MemoryStorage, Storage
from kvsnap.testing import Fault, FaultyStorage, Rule
from kvsnap.verify import verify_snapshot
from tests.snapshot_fakes import break_reads, chain, prompt, store


@pytest.mark.parametrize("where", ["memory", "directory"])
def test_a_shard_that_can_not_be_read_is_left_out(
    where: str, cache: Path, ns: Namespace, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is damaged: else a bad sector would end every export of the directory."""
    storage: Storage = MemoryStorage() if where == "memory" else LocalStorage(repo)
    added = store(cache, ns, chain(ns, prompt(9, 128)))
    break_reads(monkeypatch, added[0].path)

    report = export_snapshot(cache, storage, tag="prod")

    assert report.num_chunks == 7
    assert len(report.damaged) == 1
    assert f"shard {added[0].path} can't be read: " in report.damaged[0]
    assert report.damaged[0].endswith("; it is left out")
    assert verify_snapshot(storage, "prod", read_data=True).is_good


def test_a_repository_that_fails_ends_it(cache: Path, ns: Namespace) -> None:
    storage = FaultyStorage(MemoryStorage(), [Rule(fault=Fault.ERROR_AFTER, operation="put_stream")])

    with pytest.raises(StorageError, match="put_stream : injected"):
        export_snapshot(cache, storage, tag="prod")
