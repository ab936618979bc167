"""The verify ladder: each step finds what it looks at, costs what it says, and says what it did."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

from kvsnap.errors import ConfigError, StorageError
from kvsnap.namespace import Namespace
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import LocalStorage, MemoryStorage, RefusedError, open_storage
from kvsnap.testing import Fault, FaultyStorage, Rule
from kvsnap.tiers.disk import DiskTier
from kvsnap.verify import VerifyReport, verify_cache_dir, verify_snapshot
from kvsnap_jobs.cli import main
from tests.disk_fakes import Snapshot
from tests.snapshot_fakes import DAMAGE, chain, flip, prompt
from tests.test_signing import new_key

T = TypeVar("T")

LADDER: tuple[dict[str, Any], ...] = ({"quick": True}, {}, {"sample": 1.0}, {"read_data": True})


def counted(storage: FaultyStorage) -> Counter[str]:
    """Requests by method and kind of object."""
    return Counter(f"{call.operation} {call.name.split('/')[0]}" for call in storage.calls)


@pytest.fixture
def repo(tmp_path: Path, cache: Path, ns: Namespace) -> Path:
    export_snapshot(cache, str(tmp_path / "repo"), tag="prod")
    return tmp_path / "repo"


def largest(directory: Path) -> Path:
    return max(directory.rglob("*.safetensors"), key=lambda path: path.stat().st_size)


def found_by(check: Callable[..., VerifyReport]) -> list[bool]:
    """For each step of the ladder whether it finds something."""
    return [not check(**step).is_good for step in LADDER]


class TestSnapshot:
    def test_a_good_one_is_good_at_each_step(self, repo: Path) -> None:
        before = Snapshot.of(repo)

        reports = [verify_snapshot(str(repo), "prod", **step) for step in LADDER]

        assert all(report.is_good for report in reports)
        assert [report.depth for report in reports] == ["quick", "default", "sample", "read-data"]
        assert [report.num_shards for report in reports] == [2] * 4
        assert [report.num_chunks for report in reports] == [7] * 4
        assert [report.read_chunks for report in reports] == [0, 0, 7, 7]
        assert Snapshot.of(repo) == before

    @pytest.mark.parametrize(
        ("what", "finds"),
        [
            ("deleted", [True] * 4),
            ("truncated", [True] * 4),
            ("header", [False, True, True, True]),
            ("chunk", [False, False, True, True]),
        ],
    )
    def test_each_step_finds_more(self, repo: Path, what: str, finds: list[bool]) -> None:
        shard = largest(repo)
        match what:
            case "deleted" | "truncated":
                DAMAGE[what](shard)
            case "header":
                flip(shard, 100)
            case "chunk":
                flip(shard, -4097)

        assert found_by(lambda **step: verify_snapshot(str(repo), "prod", **step)) == finds

    def test_a_sample_is_a_share_and_can_be_repeated(self, repo: Path) -> None:
        first = verify_snapshot(str(repo), "prod", sample=0.3)
        again = verify_snapshot(str(repo), "prod", sample=0.3, seed=first.seed)
        least = verify_snapshot(str(repo), "prod", sample=0.0001)

        assert first.seed is not None
        assert (first.read_chunks, first.read_bytes) == (again.read_chunks, again.read_bytes) == (3, first.read_bytes)
        assert least.read_chunks == 1

    def test_different_seeds_reach_every_chunk(self, repo: Path) -> None:
        flip(largest(repo), -4097)

        assert any(not verify_snapshot(str(repo), "prod", sample=0.1, seed=seed).is_good for seed in range(60))
        assert not all(not verify_snapshot(str(repo), "prod", sample=0.1, seed=seed).is_good for seed in range(20))

    def test_costs_what_it_says(self, cache: Path, ns: Namespace) -> None:
        inner = MemoryStorage()
        export_snapshot(cache, inner, tag="prod")
        shard_requests = []
        for step in LADDER:
            storage = FaultyStorage(inner)
            verify_snapshot(storage, "prod", **step)
            shard_requests.append({name: n for name, n in counted(storage).items() if name.endswith(" shards")})
            assert shard_requests[-1].pop("list shards") == 1

        quick, default, sample, everything = shard_requests
        assert quick == {}
        assert default == {"read_into shards": 2}
        assert sample == {"read_into shards": 2, "open_read shards": 7}
        assert everything == {"read_into shards": 2, "open_read shards": 2}

    def test_on_every_storage(self, cache: Path, ns: Namespace, repo: Path) -> None:
        memory = MemoryStorage()
        export_snapshot(cache, memory, tag="prod")

        for storage in (memory, LocalStorage(repo), open_storage(f"file://{repo}")):
            for step in LADDER:
                assert verify_snapshot(storage, "prod", **step).is_good

    def test_a_body_shorter_than_announced_fails_that_shard(self, cache: Path, ns: Namespace) -> None:
        """D03, with the expected hash; not called damage, which one deletes: a bad connection looks the same."""
        inner = MemoryStorage()
        export_snapshot(cache, inner, tag="prod")
        storage = FaultyStorage(inner, [Rule(fault=Fault.TRUNCATE, operation="open_read", name="shards/*")])

        (problem,) = verify_snapshot(storage, "prod", read_data=True).problems

        digest = problem.object.split("/")[-1].removesuffix(".safetensors")
        assert problem.kind == "unreadable"
        assert f"expected sha256 {digest[:12]}" in problem.message
        short = FaultyStorage(inner, [Rule(fault=Fault.TRUNCATE, operation="open_read", name=problem.object)])
        with pytest.raises(StorageError, match=digest):
            import_snapshot(short, "prod", cache.parent / "other")

    def test_a_store_that_is_down_is_no_finding(self, cache: Path, ns: Namespace) -> None:
        inner = MemoryStorage()
        export_snapshot(cache, inner, tag="prod")
        rule = Rule(fault=Fault.ERROR_BEFORE, operation="read_into", name="shards/*", times=None)

        with pytest.raises(StorageError):
            verify_snapshot(FaultyStorage(inner, [rule]), "prod")

    def test_listing_may_be_forbidden(self, cache: Path, ns: Namespace) -> None:
        class Unlisted(FaultyStorage):
            def _call(self, operation: str, name: str, act: Callable[[], T]) -> T:
                if operation == "list" and name.startswith("shards"):
                    raise RefusedError("no s3:ListBucket")
                return super()._call(operation, name, act)

        inner = MemoryStorage()
        export_snapshot(cache, inner, tag="prod")
        storage = Unlisted(inner)

        report = verify_snapshot(storage, "prod")

        assert report.is_good
        assert "no s3:ListBucket" in report.notes[0]
        assert counted(storage)["head shards"] == 2

    @pytest.mark.parametrize(
        "arguments",
        [{"sample": 0.0}, {"sample": 1.5}, {"sample": 0.5, "quick": True}, {"quick": True, "read_data": True}],
    )
    def test_wrong_arguments(self, repo: Path, cache: Path, arguments: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            verify_snapshot(str(repo), "prod", **arguments)
        with pytest.raises(ConfigError):
            verify_cache_dir(cache, **arguments)

    def test_chunks_that_the_snapshot_does_not_name_are_read_with_all_data_only(
        self, cache: Path, ns: Namespace, tmp_path: Path
    ) -> None:
        """A shard goes as it is; what a snapshot needs of it may be less, but its sha256 covers all."""
        hot = chain(ns, prompt(2, 256, shared=128))[1]
        with DiskTier(cache, ns) as disk:
            disk.store_usage([(hot.key, 1, 1.0)])
        export_snapshot(cache, str(tmp_path / "repo"), select="hot", tag="hot")
        flip(largest(tmp_path / "repo"), -4097)

        assert found_by(lambda **step: verify_snapshot(str(tmp_path / "repo"), "hot", **step)) == [
            False, False, False, True,
        ]  # fmt: skip


class TestCacheDirectory:
    def test_a_good_one_is_good_at_each_step(self, cache: Path, ns: Namespace) -> None:
        before = Snapshot.of(cache)

        reports = [verify_cache_dir(cache, **step) for step in LADDER]

        assert all(report.is_good for report in reports)
        assert [report.num_shards for report in reports] == [2] * 4
        assert [report.read_chunks for report in reports] == [0, 0, 7, 7]
        assert Snapshot.of(cache) == before

    @pytest.mark.parametrize(
        ("what", "finds"),
        [
            ("odd size", [True] * 4),
            ("truncated", [False, True, True, True]),
            ("header", [False, True, True, True]),
            ("chunk", [False, False, True, True]),
        ],
    )
    def test_each_step_finds_more(self, cache: Path, ns: Namespace, what: str, finds: list[bool]) -> None:
        shard = largest(cache)
        match what:
            case "odd size":
                shard.write_bytes(shard.read_bytes()[:-1])
            case "truncated":
                DAMAGE[what](shard)
            case "header":
                flip(shard, 100)
            case "chunk":
                flip(shard, -4097)

        assert found_by(lambda **step: verify_cache_dir(cache, **step)) == finds

    def test_a_shard_that_vanishes_is_no_problem(self, cache: Path, ns: Namespace, repo: Path) -> None:
        """A live engine evicts when it likes."""
        paths = list(cache.rglob("*.safetensors"))

        def gone(done: int, total: int) -> None:
            for path in paths:
                path.unlink(missing_ok=True)

        assert verify_cache_dir(cache, read_data=True, progress=gone).is_good

    def test_damaged_marker_and_usage(self, cache: Path, ns: Namespace) -> None:
        """The usage file is advisory: losing it is worth a note."""
        (cache / "kvsnap.json").write_bytes(b"{")
        (cache / ns.dirname / "usage").write_bytes(b"KVSUSE01")

        report = verify_cache_dir(cache, quick=True)

        assert [problem.object for problem in report.problems] == [str(cache / "kvsnap.json")]
        assert "usage is damaged" in report.notes[0]


class TestCommand:
    def run(self, *args: object) -> Result:
        return CliRunner().invoke(main, ["verify", *(str(arg) for arg in args)])

    def test_exit_statuses(self, cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
        url = f"{repo}@prod"
        for step in ((), ("--quick",), ("--sample", "5%"), ("--read-data",)):
            assert self.run(url, *step).exit_code == 0
            assert self.run("--cache-dir", cache, *step).exit_code == 0
        assert self.run(f"{tmp_path}/nothing@prod", "--quick").exit_code == 1
        for wrong in (
            (url, "--quick", "--read-data"), (url, "--sample", "0%"), (url, "--sample", "120%"), (url, "--seed", "1"),
            ("--cache-dir", cache, "--require-signature"),
        ):  # fmt: skip
            assert self.run(*wrong).exit_code == 2, wrong
        flip(largest(repo), -4097)
        assert self.run(url, "--quick").exit_code == 0
        assert self.run(url, "--sample", "100%").exit_code == 3

    def test_says_what_was_read_and_how_to_do_it_again(self, repo: Path) -> None:
        text = self.run(f"{repo}@prod", "--sample", "20%", "--seed", "3").stdout

        assert "2 of them read" in text
        assert "seed 3" in text
        assert json.loads(self.run(f"{repo}@prod", "--sample", "20%", "--json").stdout)["depth"] == "sample"

    def test_signatures(self, cache: Path, ns: Namespace, repo: Path, tmp_path: Path) -> None:
        pytest.importorskip("cryptography")
        key, keys, url = tmp_path / "key.pem", tmp_path / "keys", f"{repo}@prod"
        new_key(key)
        invoke = CliRunner().invoke
        required = ("--require-signature", "--trusted-keys", keys)
        public = invoke(main, ["sign", url, "--key", str(key)]).stdout.split()[-1]
        keys.write_text(f"ci {public}\n")

        assert "signed by ci" in self.run(url, *required).stdout
        assert "ci: good" in invoke(main, ["show", url, "--trusted-keys", str(keys)]).stdout
        assert "not trusted" in invoke(main, ["show", url]).stdout
        keys.write_text(f"other {'0' * 64}\n")
        assert self.run(url, *required).exit_code == 3
        assert self.run(url, "--trusted-keys", keys).exit_code == 3
        assert self.run(url).exit_code == 0
        assert self.run(url, "--require-signature").exit_code == 1
        for command in (("show", url), ("import", url, "--cache-dir", tmp_path / "other")):
            assert invoke(main, [str(arg) for arg in (*command, *required)]).exit_code == 3
        assert not (tmp_path / "other").exists()

    def test_installed_keys_count_unless_told_otherwise(
        self, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("cryptography")
        (tmp_path / "keys").write_text(f"ci {'1' * 64}\n")
        monkeypatch.setenv("KVSNAP_TRUSTED_KEYS", str(tmp_path / "keys"))
        import_ = ["import", f"{repo}@prod", "--cache-dir", str(tmp_path / "other")]

        assert self.run(f"{repo}@prod").exit_code == 3
        assert CliRunner().invoke(main, import_).exit_code == 3
        assert CliRunner().invoke(main, [*import_, "--no-require-signature"]).exit_code == 0
