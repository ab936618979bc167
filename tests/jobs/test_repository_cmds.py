"""The commands that change a repository: tag, rm, prune URL, copy, diff, merge."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvsnap.leases import PRUNE_LEASE, Lease
from kvsnap.namespace import Namespace
from kvsnap.storage import LocalStorage
from kvsnap.tiers.disk import DiskTier
from tests.disk_fakes import Snapshot, make_namespace
from tests.jobs.command import invoke, run, run_json
from tests.repository_fakes import check_whole
from tests.snapshot_fakes import chain, prompt, store


@pytest.fixture
def first(cache: Path, ns: Namespace, repo: Path) -> str:
    return str(run_json("export", "--cache-dir", cache, "--to", repo, "--tag", "prod")["snapshot"])


@pytest.fixture
def second(cache: Path, ns: Namespace, repo: Path, first: str) -> str:
    store(cache, ns, chain(ns, prompt(9, 128)))
    return str(run_json("export", "--cache-dir", cache, "--to", repo, "--tag", "prod")["snapshot"])


def test_tag_moves_and_rolls_back(repo: Path, first: str, second: str) -> None:
    assert run("tag", f"{repo}@{first[:8]}", "stable").stdout == f"stable sha256:{first}\n"
    assert "(as before)" in run("tag", f"{repo}@{first}", "stable").stdout
    assert run_json("tag", f"{repo}@prod", "--back", 1)["snapshot"] == first
    assert [row["snapshot"] for row in run_json("tag", f"{repo}@prod", "--history")["history"]] == [
        first, second, first,
    ]  # fmt: skip
    assert first[:12] in run("tag", f"{repo}@prod", "--history").stdout

    assert "expected" in run("tag", f"{repo}@{second}", "prod", "--expect", second, status=1).stderr
    run("tag", f"{repo}@nothing", "x", status=1)
    for usage in ((), ("x", "--history"), ("--expect", "y", "--back", 1)):
        run("tag", f"{repo}@prod", *usage, status=2)


def test_rm_then_prune_frees_what_nobody_needs(repo: Path, first: str, second: str) -> None:
    assert "is named by prod" in run("rm", f"{repo}@{second}", status=1).stderr
    assert "would remove ref prod" in run("rm", f"{repo}@prod", "--dry-run").stdout
    assert run_json("rm", f"{repo}@prod", "--with-snapshot")["snapshots"] == [second]

    marking = run_json("prune", repo)
    planned = run_json("prune", repo, "--grace", "0s", "--dry-run")
    done = run_json("prune", repo, "--grace", "0s")

    assert (marking["deleted_objects"], marking["waiting_objects"]) == (0, 3)
    assert planned["deleted_bytes"] == done["deleted_bytes"] > 0
    assert check_whole(LocalStorage(repo)) == {first}


def test_prune_prints_bytes(repo: Path, first: str) -> None:
    run("rm", f"{repo}@prod", "--with-snapshot")

    text = run("prune", repo, "--grace", "0", "--dry-run").stdout

    assert "would be deleted  4 objects" in text
    assert "kept              0 snapshots" in text


def test_prune_of_untagged_snapshots(repo: Path, first: str, second: str) -> None:
    """The one before stays for a roll back; after another move it goes."""
    assert run_json("prune", repo, "--untagged-for", "0s")["retired"] == []
    run("rm", f"{repo}@prod")
    run("tag", f"{repo}@{second}", "prod")

    assert run_json("prune", repo, "--untagged-for", "0s")["retired"] == [first]


def test_prune_while_another_runs_says_who(repo: Path, first: str) -> None:
    Lease.acquire(LocalStorage(repo), "prune", name=PRUNE_LEASE)

    assert f"prune by {os.environ.get('USER') or ''}" in run("prune", repo, status=1).stderr


def test_prune_of_what_it_can_not_read(repo: Path, first: str, second: str) -> None:
    (repo / "manifests" / f"{first}.json").write_bytes(b"garbage")

    assert "nothing is pruned" in run("prune", repo, "--grace", "0", status=3).stderr
    run("prune", status=2)
    run("prune", repo, "--cache-dir", repo, status=2)


def test_copy(repo: Path, first: str, second: str, tmp_path: Path) -> None:
    target = tmp_path / "target"

    assert run_json("copy", f"{repo}@{first}", target, "--tag", "one", "--dry-run")["copied_shards"] == 2
    assert not target.exists()
    assert f"sha256:{first}" in run("copy", f"{repo}@{first}", target, "--tag", "one").stdout
    report = run_json("copy", repo, target)

    assert (report["copied_shards"], report["refs"]) == (1, ["prod"])
    assert check_whole(LocalStorage(target)) == {first, second}
    run("copy", repo, target, "--tag", "x", status=2)
    run("copy", f"{repo}@nothing", target, status=1)
    damaged = next(repo.glob("shards/*/*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\1")
    assert "is damaged" in run("copy", repo, tmp_path / "another", status=3).stderr


def test_bounds_that_nothing_fits_under(repo: Path, first: str, tmp_path: Path) -> None:
    for command in ("import", "sync"):
        result = run(command, f"{repo}@prod", "--cache-dir", tmp_path / "other", "--max-bytes", "1", status=3)
        assert "no chunk of the snapshot fits under --max-bytes" in result.stderr
    assert not list(tmp_path.glob("other/**/*.safetensors"))


def test_a_dry_run_of_an_import_knows_the_cap(repo: Path, first: str, ns: Namespace, tmp_path: Path) -> None:
    """Invariant 7: it says what the import will do, no more."""
    shards = [path.stat().st_size for path in repo.glob("shards/*/*")]
    for cap in (sum(shards) * 4, max(shards) + (400 << 10), 20_000):
        caches = [tmp_path / f"{cap}-{i}" for i in range(2)]
        for directory in caches:
            DiskTier(directory, ns, cap_bytes=cap).close()
        args = ("import", f"{repo}@prod", "--cache-dir")
        done = invoke(*args, caches[0], "--json")
        planned = invoke(*args, caches[1], "--dry-run", "--json")
        assert planned.exit_code == done.exit_code
        facts = [json.loads(result.stdout) for result in (planned, done)]
        for name in ("num_chunks", "imported_shards", "imported_bytes", "is_full"):
            assert facts[0][name] == facts[1][name], (cap, name)


def test_an_import_into_a_repository_touches_nothing(repo: Path, first: str) -> None:
    before = Snapshot.of(repo)

    assert "is not a cache directory" in run("import", f"{repo}@prod", "--cache-dir", repo, status=1).stderr

    assert Snapshot.of(repo) == before


def test_a_ref_that_is_also_the_start_of_an_id(repo: Path, first: str, second: str) -> None:
    """Nobody can tell which one is meant."""
    run("tag", f"{repo}@{second}", first[:8])

    assert "is a ref" in run("show", f"{repo}@{first[:8]}", status=1).stderr
    assert first in run("show", f"{repo}@sha256:{first}").stdout
    run("tag", f"{repo}@{second}", "20261130")
    assert second in run("show", f"{repo}@20261130").stdout
    assert f"removed ref {first[:8]}" in run("rm", f"{repo}@{first[:8]}").stdout
    assert first in run("show", f"{repo}@{first[:8]}").stdout


def test_a_removed_refs_snapshot_that_stays_is_said(repo: Path, first: str) -> None:
    run("tag", f"{repo}@prod", "other")

    assert "the snapshot stays, since it is named by other" in run("rm", f"{repo}@prod", "--with-snapshot").stdout


def test_diff(repo: Path, first: str, second: str, tmp_path: Path) -> None:
    report = run_json("diff", f"{repo}@{first}", "@prod")

    assert (report["added"]["num_chunks"], report["gone"]["num_chunks"], report["shared"]["num_chunks"]) == (2, 0, 7)
    assert run("diff", f"{repo}@{first}", f"{repo}@prod").stdout.splitlines()[1].split()[:2] == ["added", "2"]
    other = make_namespace(tag="tuned")
    store(tmp_path / "other", other, chain(other, prompt(1, 64)))
    run("export", "--cache-dir", tmp_path / "other", "--to", repo, "--tag", "tuned")
    assert "differs: identity_tag" in run("diff", f"{repo}@prod", "@tuned", status=3).stdout
    run("diff", f"{repo}@prod", "prod", status=2)


def test_merge(repo: Path, first: str, tmp_path: Path) -> None:
    ns = make_namespace()
    store(tmp_path / "part", ns, chain(ns, prompt(5, 128)))
    run("export", "--cache-dir", tmp_path / "part", "--to", repo, "--tag", "part")

    report = run_json("merge", f"{repo}@prod", "@part", "--tag", "all")

    assert report["num_chunks"] == 9
    assert report["snapshot"] in run("merge", f"{repo}@prod", f"{repo}@part").stdout
    run("merge", f"{repo}@prod", status=2)
    run("merge", f"{repo}@prod", "elsewhere@part", status=2)
    run("merge", f"{repo}@prod", "@nothing", status=1)


def test_looking_changes_nothing(repo: Path, first: str, second: str) -> None:
    before = Snapshot.of(repo)

    run("diff", f"{repo}@{first}", "@prod")
    run("tag", f"{repo}@prod", "--history")
    run("rm", f"{repo}@prod", "--dry-run", "--with-snapshot")

    assert Snapshot.of(repo) == before


def test_a_snapshot_whose_shard_is_gone_is_damage(repo: Path, first: str, tmp_path: Path) -> None:
    ns = make_namespace()
    store(tmp_path / "part", ns, chain(ns, prompt(5, 128)))
    run("export", "--cache-dir", tmp_path / "part", "--to", repo, "--tag", "part")
    lost = run_json("show", f"{repo}@prod")["shards"][0]["digest"].removeprefix("sha256:")
    (repo / "shards" / lost[:2] / f"{lost}.safetensors").unlink()

    for command in (
        ("tag", f"{repo}@prod", "next"),
        ("merge", f"{repo}@prod", "@part", "--tag", "next"),
        ("copy", f"{repo}@prod", tmp_path / "target", "--tag", "next"),
    ):
        assert f"{lost}.safetensors is missing in {repo}; export the snapshot again" in run(*command, status=3).stderr
    assert run_json("list", repo)["problems"] == []
    assert not list(repo.glob("refs/next*"))
    assert not list(tmp_path.glob("target/*/*.json"))
