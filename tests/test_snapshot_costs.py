"""docs/snapshots.md says what an export and an import cost; this counts."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from kvsnap.namespace import Namespace
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import MemoryStorage
from kvsnap.testing import FaultyStorage
from tests.disk_fakes import make_namespace
from tests.snapshot_fakes import chain, prompt, store

PAGE = (Path(__file__).parent.parent / "docs" / "snapshots.md").read_text()


def row(start: str) -> str:
    """The calls in the page's table."""
    found = re.search(rf"^\| {re.escape(start)} \| ([^|]+) \|", PAGE, re.MULTILINE)
    assert found is not None, start
    return found[1]


@pytest.mark.parametrize("n", [1, 3, 5])
def test_calls(tmp_path: Path, n: int) -> None:
    ns = make_namespace()
    inner, cache = MemoryStorage(), tmp_path / "cache"
    counts = {}

    def count(what: str) -> FaultyStorage:
        counts[what] = FaultyStorage(inner)
        return counts[what]

    store(cache, ns, *[chain(ns, prompt(seed, 128)) for seed in range(n)])
    export_snapshot(cache, count("first"), tag="prod")
    export_snapshot(cache, count("nothing new"), tag="prod")
    store(cache, ns, *[chain(ns, prompt(100 + seed, 128)) for seed in range(n)])
    export_snapshot(cache, count("something new"), tag="prod")
    import_snapshot(count("import"), "prod", tmp_path / "other")
    import_snapshot(count("again"), "prod", tmp_path / "other")

    calls = {what: len(storage.calls) for what, storage in counts.items()}
    assert calls == {
        "first": 34 + n,
        "nothing new": 19 + 1,
        "something new": 21 + 1 + n,
        "import": 5 + 2 * n,
        "again": 4,
    }
    assert row("first export") == "34 + n"
    assert row("later export, something new") == "21 + m + n"
    assert row("later export, nothing new") == "19 + m"
    assert row("import") == "5 + n"
    assert row("import, all there") == "4"


def test_one_get_per_shard_and_no_head(tmp_path: Path) -> None:
    ns: Namespace = make_namespace()
    inner = MemoryStorage()
    store(tmp_path / "cache", ns, *[chain(ns, prompt(seed, 128)) for seed in range(4)])
    export_snapshot(tmp_path / "cache", inner, tag="prod")
    storage = FaultyStorage(inner)

    import_snapshot(storage, "prod", tmp_path / "other")

    count = Counter(call.operation for call in storage.calls if call.name.startswith("shards/"))
    assert count == {"open_read": 4, "list": 1}
