"""A damaged repository, seen from the command line: each command says so, and doing what it advises mends it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvsnap.namespace import Namespace
from tests.jobs.command import invoke, run, run_json
from tests.snapshot_fakes import DAMAGE, chain, flip, prompt, store

READERS = {"import", "diff", "tag", "merge", "copy", "verify", "verify data"}
"""Commands that look at all parts of a snapshot."""
NAMES = {"show", "list", "prune", "copy all"}
"""Commands that read manifests and refs alone (a copy of all reads more)."""

CASES: dict[tuple[str, str], set[str]] = {
    ("shards", "deleted"): READERS - {"diff"} | {"copy all"},
    ("shards", "truncated"): READERS - {"diff"} | {"copy all", "export"},
    ("shards", "flipped"): {"import", "copy", "copy all", "verify data"},
    ("catalogs", "deleted"): READERS | {"copy all"},
    ("catalogs", "truncated"): READERS | {"copy all", "export"},
    ("catalogs", "flipped"): READERS - {"tag"} | {"copy all", "export"},
    ("manifests", "deleted"): READERS | NAMES,
    ("manifests", "truncated"): READERS | NAMES,
    ("manifests", "flipped"): READERS | NAMES,
    ("refs", "truncated"): READERS | NAMES | {"export"},
    ("kvsnap.json", "deleted"): READERS | NAMES | {"export"},
    ("kvsnap.json", "truncated"): READERS | NAMES | {"export"},
    ("kvsnap.json", "flipped"): READERS | NAMES | {"export"},
}
"""What is damaged, and how: the commands that end with exit status 3. All others do well."""


@pytest.fixture
def damaged(
    request: pytest.FixtureRequest,
    cache: Path,
    ns: Namespace,
    repo: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Damages an object that `prod` needs, in a repository that has another snapshot, too; its path."""
    store(tmp_path / "part", ns, chain(ns, prompt(5, 128)))
    run("export", "--cache-dir", tmp_path / "part", "--to", repo, "--tag", "part")
    others = set(repo.glob("*/*")) | set(repo.glob("shards/*/*"))
    with monkeypatch.context() as patches:  # a later export writes another manifest
        patches.setattr("kvsnap.snapshot_export.now_text", lambda: "2026-01-01T00:00:00Z")
        run("export", "--cache-dir", cache, "--to", repo, "--tag", "prod")
    kind, how = request.param
    pattern = {"shards": "shards/*/*.safetensors", "kvsnap.json": "kvsnap.json"}.get(kind, f"{kind}/*")
    found = sorted(set(repo.glob(pattern)) - others)
    path = found[0]
    if how == "flipped":
        flip(path, -1 if kind == "shards" else path.stat().st_size * 3 // 4)
    else:
        DAMAGE[how](path)
    return path


def commands(cache: Path, repo: Path, target: Path) -> dict[str, tuple[object, ...]]:
    """Those that only look, or write elsewhere, first."""
    return {
        "show": ("show", f"{repo}@prod"),
        "list": ("list", repo),
        "diff": ("diff", f"{repo}@prod", "@part"),
        "verify": ("verify", f"{repo}@prod"),
        "verify data": ("verify", f"{repo}@prod", "--read-data"),
        "import": ("import", f"{repo}@prod", "--cache-dir", target / "cache"),
        "copy": ("copy", f"{repo}@prod", target / "one", "--tag", "prod"),
        "copy all": ("copy", repo, target / "all"),
        "prune": ("prune", repo, "--grace", "0"),
        "tag": ("tag", f"{repo}@prod", "next"),
        "merge": ("merge", f"{repo}@prod", "@part", "--tag", "merged"),
        "export": ("export", "--cache-dir", cache, "--to", repo, "--tag", "prod"),
    }


@pytest.mark.parametrize(
    ("damaged", "failing"), CASES.items(), ids=[" ".join(case) for case in CASES], indirect=["damaged"]
)
def test_is_said_by_every_command_that_meets_it(
    damaged: Path, failing: set[str], cache: Path, repo: Path, tmp_path: Path
) -> None:
    """Invariant 5, too: a prune that does not know what is needed deletes nothing."""
    kept = {path for path in repo.rglob("*.*") if path.is_file() and "leases" not in path.parts}
    for name, args in commands(cache, repo, tmp_path / "target").items():
        result = invoke(*args)
        assert (name, result.exit_code) == (name, 3 if name in failing else 0), result.output
        if name in failing:
            assert damaged.stem in result.output, name
        if name == "prune":
            assert kept <= set(repo.rglob("*.*"))


@pytest.mark.parametrize("damaged", CASES, ids=" ".join, indirect=True)
def test_what_is_advised_mends_it(damaged: Path, cache: Path, repo: Path, tmp_path: Path) -> None:
    """Delete what is damaged, then export again. For a broken ref: remove the ref."""
    advice = run("import", f"{repo}@prod", "--cache-dir", tmp_path / "other", status=3).stderr
    if "put back a copy of it, or kvsnap.json of another repository" in advice:
        run("export", "--cache-dir", tmp_path / "part", "--to", tmp_path / "another")
        shutil.copy(tmp_path / "another" / "kvsnap.json", damaged)
    elif f"remove it: kvsnap rm {repo}@prod" in advice and damaged.parent.name == "refs":
        run("rm", f"{repo}@prod")
    elif "delete it" in advice:
        damaged.unlink()
    else:
        assert "missing" in advice

    run("export", "--cache-dir", cache, "--to", repo, "--tag", "prod")

    assert run_json("verify", f"{repo}@prod", "--read-data")["is_good"]
    assert run_json("list", repo)["problems"] == []
    assert run_json("import", f"{repo}@prod", "--cache-dir", tmp_path / "other")["num_chunks"] == 7
    run("prune", repo, "--grace", "0")
    run("prune", repo, "--grace", "0")
    assert run_json("verify", f"{repo}@prod", "--read-data")["is_good"]


def test_of_a_list_of_what_is_to_go(cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
    """It says what was removed: who would delete or publish stops, who looks goes on."""
    store(tmp_path / "part", ns, chain(ns, prompt(5, 128)))
    gone = run_json("export", "--cache-dir", tmp_path / "part", "--to", repo)["snapshot"]
    kept = run_json("export", "--cache-dir", cache, "--to", repo, "--tag", "prod")["snapshot"]
    run("rm", f"{repo}@{gone}")
    (path,) = repo.glob("gc/*.json")
    path.write_bytes(b"garbage")

    listed = run_json("list", repo, status=3)
    assert {row["snapshot"] for row in listed["snapshots"]} == {gone, kept}
    assert path.name in listed["problems"][0]
    assert run_json("copy", repo, tmp_path / "target", status=3)["snapshots"] == sorted([gone, kept])
    run("verify", f"{repo}@prod")
    for command in (("tag", f"{repo}@prod", "x"), ("prune", repo), ("export", "--cache-dir", cache, "--to", repo)):
        assert "delete it. Snapshots that it lists as removed are listed again" in run(*command, status=3).stderr

    path.unlink()
    run("rm", f"{repo}@{gone}")
    assert [row["snapshot"] for row in run_json("list", repo)["snapshots"]] == [kept]


def test_damage_in_the_cache_directory(cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
    """An import doesn't read again what is there; doing what verify advises mends it."""
    run("export", "--cache-dir", cache, "--to", repo, "--tag", "prod")
    run("import", f"{repo}@prod", "--cache-dir", tmp_path / "other")
    shard = next((tmp_path / "other").rglob("*.safetensors"))
    flip(shard, -1)

    run("import", f"{repo}@prod", "--cache-dir", tmp_path / "other")
    found = run("verify", "--cache-dir", tmp_path / "other", "--read-data", status=3)

    assert str(shard) in found.stdout
    assert "remove these files" in found.stderr
    shard.unlink()
    run("import", f"{repo}@prod", "--cache-dir", tmp_path / "other")
    run("verify", "--cache-dir", tmp_path / "other", "--read-data")
