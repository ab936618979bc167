"""The command line: exit statuses, what goes to stdout, and that every command says what it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kvsnap.control import ControlServer
from kvsnap.engines import engines_of
from kvsnap.errors import KvsnapError
from kvsnap.namespace import Namespace
from kvsnap.runtime import process_start_time
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.dram import DramTier
from kvsnap.tiers.dram_lock import list_dram_files
from kvsnap.tiers.engines import EngineRecord
from kvsnap_jobs.cli import main
from tests.disk_fakes import Snapshot, make_namespace
from tests.jobs.command import invoke, run_json
from tests.snapshot_fakes import chain, filled_cache, flip, prompt, store


@pytest.fixture
def exported(cache: Path, ns: Namespace, repo: Path) -> dict[str, Any]:
    report: dict[str, Any] = run_json("export", "--cache-dir", cache, "--to", repo, "--tag", "prod")
    return report


class FakeEngine:
    """A live engine as jobs see it: a record in the cache directory and a control socket."""

    def __init__(self, cache: Path, ns: Namespace, path: Path) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.flushes = True
        self.unsaved = 0
        self.takes_all = False
        """A flush ends only when its time is over."""
        self._disk = DiskTier(cache, ns, cap_bytes=1 << 30)
        self._server = ControlServer(
            path,
            {
                "status": lambda args: self._note("status", args, {"dram": {"chunks": 3}}),
                "flush": self._flush,
                "clear": lambda args: self._note("clear", args, {"dram_chunks": 3}),
            },
        )
        self._disk.register(
            EngineRecord(
                engine_id="engine-1",
                pid=os.getpid(),
                start=process_start_time(os.getpid()) or 0,
                socket=str(path),
                namespace=ns.id(),
                identity=ns.identity.to_json(),
                layout=ns.layout_hash,
            )
        )

    def close(self) -> None:
        self._server.close()
        self._disk.close()

    def _note(self, command: str, args: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        self.calls.append((command, args))
        return answer

    def _flush(self, args: dict[str, Any]) -> dict[str, Any]:
        if not self.flushes:
            raise KvsnapError("the disk is gone")
        if self.takes_all:
            time.sleep(args["timeout_s"])
        return self._note("flush", args, {"written_chunks": 2, "unsaved_chunks": self.unsaved})


@pytest.fixture
def engine(cache: Path, ns: Namespace, own_runtime_dir: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(cache, ns, own_runtime_dir / "e.sock")
    yield engine
    engine.close()


class TestHelp:
    @pytest.mark.parametrize("name", sorted(main.commands))
    def test_every_command_says_what_it_does_and_its_exit_statuses(self, name: str) -> None:
        result = invoke(name, "--help")

        assert result.exit_code == 0
        assert "Exit status:" in result.stdout
        for status in ("  0  ", "  1  ", "  2  "):
            assert status in result.stdout

    @pytest.mark.parametrize("name", sorted(main.commands))
    def test_every_option_has_help(self, name: str) -> None:
        for param in main.commands[name].params:
            if isinstance(param, click.Option):
                assert param.help, f"{name} {param.name}"

    @pytest.mark.parametrize("name", sorted(main.commands))
    def test_every_command_takes_json(self, name: str) -> None:
        assert "--json" in invoke(name, "--help").stdout

    def test_every_command_that_deletes_has_a_dry_run(self) -> None:
        assert "--dry-run" in invoke("clear", "--help").stdout

    def test_the_commands_of_the_design_are_there(self) -> None:
        assert set(main.commands) >= {"clear", "export", "flush", "import", "list", "show", "status", "verify"}


class TestSnapshots:
    def test_export_prints_the_id_first(self, cache: Path, ns: Namespace, repo: Path) -> None:
        result = invoke("export", "--cache-dir", cache, "--to", repo)
        again = invoke("export", "--cache-dir", cache, "--to", repo)

        assert result.exit_code == again.exit_code == 0
        first = result.stdout.splitlines()[0]
        assert first.startswith("sha256:")
        assert again.stdout.splitlines()[0] == first
        assert "has this snapshot already" in again.stdout

    def test_export_moves_a_ref_only_when_told(self, cache: Path, ns: Namespace, repo: Path) -> None:
        invoke("export", "--cache-dir", cache, "--to", repo)
        assert run_json("list", repo)["snapshots"][0]["refs"] == []

        invoke("export", "--cache-dir", cache, "--to", repo, "--tag", "prod")

        assert run_json("list", repo)["snapshots"][0]["refs"] == ["prod"]

    def test_several_namespaces_and_none_chosen_is_a_usage_error(self, cache: Path, ns: Namespace, repo: Path) -> None:
        other = make_namespace(tag="other")
        store(cache, other, chain(other, prompt(1, 64)))

        result = invoke("export", "--cache-dir", cache, "--to", repo)

        assert result.exit_code == 2
        assert ns.dirname in result.stderr
        assert other.dirname in result.stderr
        assert not repo.exists()

    def test_the_round_trip(self, repo: Path, exported: dict[str, Any], tmp_path: Path) -> None:
        report = run_json("import", f"{repo}@prod", "--cache-dir", tmp_path / "other")

        assert report["snapshot"] == exported["snapshot"]
        assert report["num_chunks"] == exported["num_chunks"] == 7
        assert invoke("verify", "--read-data", f"{repo}@prod").exit_code == 0
        assert invoke("verify", "--read-data", "--cache-dir", tmp_path / "other").exit_code == 0

    def test_a_flipped_byte_is_named_by_verify_and_import(
        self, repo: Path, exported: dict[str, Any], tmp_path: Path
    ) -> None:
        shard = max(repo.glob("shards/*/*"), key=lambda path: path.stat().st_size)
        flip(shard, -4097)

        verified = run_json("verify", "--read-data", f"{repo}@prod", status=3)
        imported = invoke("import", f"{repo}@prod", "--cache-dir", tmp_path / "other")

        (problem,) = verified["problems"]
        assert shard.name in problem["message"]
        assert imported.exit_code == 3
        assert len(imported.stderr.splitlines()) == 1
        for text in (shard.name, problem["chunk"][:12]):
            assert text in imported.stderr
            assert text in invoke("verify", "--read-data", f"{repo}@prod").stdout

    def test_show_prints_the_manifest(self, repo: Path, exported: dict[str, Any]) -> None:
        manifest = run_json("show", f"{repo}@prod")

        assert manifest["snapshot"] == f"sha256:{exported['snapshot']}"
        assert manifest["totals"]["chunks"] == 7
        assert manifest["model"]["identity"]["weights"] == "dummy:0"
        assert "dummy:0" in invoke("show", f"{repo}@prod").stdout

    def test_list_tells_what_it_can_not_read(self, repo: Path, exported: dict[str, Any]) -> None:
        next((repo / "manifests").iterdir()).unlink()

        report = run_json("list", repo, status=3)

        assert report["snapshots"] == []
        assert "prod" in report["problems"][0]

    def test_failures_are_one_line_on_stderr_and_status_1(self, tmp_path: Path, ns: Namespace, repo: Path) -> None:
        for args in (
            ("list", repo),
            ("show", f"{repo}@prod"),
            ("verify", f"{repo}@prod"),
            ("verify", "--cache-dir", tmp_path / "nothing"),
            ("import", f"{repo}@prod", "--cache-dir", tmp_path / "other"),
            ("export", "--cache-dir", tmp_path / "nothing", "--to", repo),
            ("list", "s3://bucket/x"),
            ("status", "--cache-dir", tmp_path / "nothing"),
            ("flush", "--cache-dir", tmp_path / "cache"),
        ):
            result = invoke(*args)

            assert result.exit_code == 1, args
            assert result.stdout == ""
            assert len(result.stderr.splitlines()) == 1
            assert result.stderr.startswith("kvsnap: ")

    @pytest.mark.parametrize(
        "args",
        [
            ("show", "/repo"),
            ("show", "/repo@"),
            ("verify",),
            ("verify", "/repo@prod", "--cache-dir", "/cache"),
            ("export", "--cache-dir", "/cache"),
            ("export", "--cache-dir", "/cache", "--to", "/repo", "--max-bytes", "lots"),
            ("clear", "--cache-dir", "/cache"),
            ("clear", "--cache-dir", "/cache", "--tier", "tape"),
            ("nonsense",),
        ],
    )
    def test_wrong_usage_is_status_2(self, args: tuple[str, ...]) -> None:
        assert invoke(*args).exit_code == 2


class TestLiveEngine:
    def test_export_flushes_it_first(self, cache: Path, engine: FakeEngine, repo: Path) -> None:
        """C07: what only the DRAM tier holds belongs to the snapshot."""
        report = run_json("export", "--cache-dir", cache, "--to", repo)

        assert [command for command, _ in engine.calls] == ["flush"]
        assert report["flushed"] == {"engine-1": {"unsaved_chunks": 0, "written_chunks": 2}}

    def test_export_says_what_could_not_be_flushed(self, cache: Path, engine: FakeEngine, repo: Path) -> None:
        engine.unsaved = 5
        assert "5 chunks" in invoke("export", "--cache-dir", cache, "--to", repo).stderr

        engine.flushes = False
        result = invoke("export", "--cache-dir", cache, "--to", repo)

        assert result.exit_code == 1
        assert "the disk is gone" in result.stderr
        assert invoke("export", "--cache-dir", cache, "--to", repo, "--no-flush").exit_code == 0

    def test_import_names_the_field_when_no_engine_matches(
        self, cache: Path, engine: FakeEngine, tmp_path: Path, repo: Path
    ) -> None:
        """A02: a sibling fine-tune's snapshot, into the directory of a live engine."""
        other = make_namespace(tag="sibling")
        filled_cache(tmp_path / "elsewhere", other)
        run_json("export", "--cache-dir", tmp_path / "elsewhere", "--to", repo, "--tag", "prod")
        before = Snapshot.of(cache)

        result = invoke("import", f"{repo}@prod", "--cache-dir", cache)

        assert result.exit_code == 3
        assert "identity_tag" in result.stderr
        assert "engine-1" in result.stderr
        assert Snapshot.of(cache) == before

    def test_import_beside_a_matching_engine(
        self, cache: Path, ns: Namespace, engine: FakeEngine, tmp_path: Path, repo: Path
    ) -> None:
        store(tmp_path / "elsewhere", ns, chain(ns, prompt(7, 128)))
        run_json("export", "--cache-dir", tmp_path / "elsewhere", "--to", repo, "--tag", "prod")

        report = run_json("import", f"{repo}@prod", "--cache-dir", cache)

        assert report["engines"] == ["engine-1"]
        assert report["imported_shards"] == 1

    def test_import_for_engines_that_are_to_come(
        self, cache: Path, ns: Namespace, engine: FakeEngine, tmp_path: Path, repo: Path
    ) -> None:
        """A deploy of another model: its snapshot comes while the old engines still use the directory."""
        other = make_namespace(tag="sibling")
        filled_cache(tmp_path / "elsewhere", other)
        run_json("export", "--cache-dir", tmp_path / "elsewhere", "--to", repo, "--tag", "prod")
        args = (f"{repo}@prod", "--cache-dir", cache)

        refused = invoke("sync", *args)
        synced = run_json("sync", *args, "--other-engines")
        report = run_json("import", *args, "--other-engines")

        assert refused.exit_code == 3
        assert synced["report"]["imported_shards"] == 2
        assert (report["engines"], report["num_chunks"]) == ([], 7)
        assert (cache / other.dirname / "shards").is_dir()

    def test_export_takes_the_namespace_in_use(
        self, cache: Path, ns: Namespace, engine: FakeEngine, repo: Path, own_runtime_dir: Path
    ) -> None:
        """What an earlier model left in the directory is no reason to stop; two live ones are."""
        other = make_namespace(tag="other")
        store(cache, other, chain(other, prompt(1, 64)))
        args = ("export", "--cache-dir", cache, "--to", repo)

        assert run_json(*args)["namespace"] == ns.id()
        assert run_json(*args, "--namespace", other.dirname)["namespace"] == other.id()
        second = FakeEngine(cache, other, own_runtime_dir / "other.sock")
        result = invoke(*args)
        second.close()

        assert result.exit_code == 2
        assert ns.dirname in result.stderr
        assert other.dirname in result.stderr

    def test_status_shows_its_answer(self, cache: Path, ns: Namespace, engine: FakeEngine) -> None:
        report = run_json("status", "--cache-dir", cache)

        assert report["engines"][0]["answer"] == {"dram": {"chunks": 3}}
        assert report["namespaces"][0]["num_chunks"] == 7
        assert report["cap_bytes"] == 1 << 30
        assert "dram.chunks" in invoke("status", "--cache-dir", cache).stdout

    def test_status_survives_a_silent_engine(self, cache: Path, engine: FakeEngine) -> None:
        engine._server.close()

        report = run_json("status", "--cache-dir", cache)

        assert report["engines"][0]["answer"] is None
        assert "stopped" in report["engines"][0]["error"]

    def test_flush(self, cache: Path, engine: FakeEngine) -> None:
        assert run_json("flush", "--cache-dir", cache)["engines"]["engine-1"]["written_chunks"] == 2
        engine.unsaved = 1
        assert invoke("flush", "--cache-dir", cache).exit_code == 3

    def test_flush_ends_in_the_engine(self, cache: Path, engine: FakeEngine) -> None:
        """The engine knows how long it may write and says what it did not; it isn't left to it to go on for minutes."""
        engine.takes_all = True
        engine.unsaved = 3

        result = invoke("flush", "--cache-dir", cache, "--timeout", "0.05")

        assert result.exit_code == 3
        assert engine.calls == [("flush", {"timeout_s": 0.05})]

    def test_flush_reaches_an_engine_beside_one_that_it_can_not_ask(
        self, cache: Path, ns: Namespace, engine: FakeEngine, own_runtime_dir: Path
    ) -> None:
        """A directory shared by containers: an engine of another one lives, but its socket isn't here."""
        record = json.loads((cache / ns.dirname / "engines" / "engine-1.json").read_text())
        other = {**record, "engine_id": "engine-0", "socket": str(own_runtime_dir / "elsewhere.sock")}
        (cache / ns.dirname / "engines" / "engine-0.json").write_text(json.dumps(other))

        done = invoke("flush", "--cache-dir", cache)

        assert done.exit_code == 1
        assert "engine-0" in done.stderr
        assert [command for command, _ in engine.calls] == ["flush"]

    def test_clear_is_left_to_the_engine(self, cache: Path, ns: Namespace, engine: FakeEngine) -> None:
        """Files under a live engine's index are its own to remove."""
        report = run_json("clear", "--cache-dir", cache, "--tier", "all")

        assert engine.calls == [("clear", {"tier": "all"})]
        assert report["engines"]["engine-1"] == {"dram_chunks": 3}
        assert len(list((cache / ns.dirname / "shards").iterdir())) == 2

    def test_clear_dry_run_only_asks_for_the_status(self, cache: Path, engine: FakeEngine) -> None:
        run_json("clear", "--cache-dir", cache, "--tier", "dram", "--dry-run")

        assert [command for command, _ in engine.calls] == ["status"]

    def test_a_dead_engine_is_none(self, cache: Path, ns: Namespace, engine: FakeEngine) -> None:
        record = cache / ns.dirname / "engines" / "engine-1.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "start": 1}))

        assert engines_of(cache) == []
        assert invoke("flush", "--cache-dir", cache).exit_code == 1


class TestAtRest:
    def test_clear_disk(self, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        """C13: clear says what it removed, and removed it."""
        args = ("clear", "--cache-dir", cache, "--tier", "disk", "--dram-dir", tmp_path)
        before = Snapshot.of(cache)

        planned = run_json(*args, "--dry-run")
        assert Snapshot.of(cache) == before
        done = run_json(*args)

        assert planned["disk_shards"] == done["disk_shards"] == 2
        assert planned["disk_bytes"] == done["disk_bytes"] > 100_000
        assert run_json("status", "--cache-dir", cache)["namespaces"][0]["num_chunks"] == 0

    def test_clear_one_namespace(self, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        other = make_namespace(tag="other")
        store(cache, other, chain(other, prompt(1, 64)))

        invoke("clear", "--cache-dir", cache, "--tier", "all", "--namespace", other.id()[:12], "--dram-dir", tmp_path)

        found = {row["namespace"]: row["num_chunks"] for row in run_json("status", "--cache-dir", cache)["namespaces"]}
        assert found == {ns.id(): 7, other.id(): 0}

    def test_status_counts_what_is_there(self, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        store(cache, ns, chain(ns, prompt(3, 256), start=3))

        report = run_json("status", "--cache-dir", cache, "--dram-dir", tmp_path)

        (row,) = report["namespaces"]
        assert (row["num_shards"], row["num_chunks"], row["dead_chunks"]) == (3, 7, 1)
        assert row["num_tokens"] == 6 * 64 + 32
        assert report["used_bytes"] >= row["real_bytes"] > 0
        assert report["engines"] == report["dram_files"] == []
        assert "dead chunks" in invoke("status", "--cache-dir", cache, "--dram-dir", tmp_path).stdout

    def test_dram_files_at_rest_are_shown_and_cleared(self, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        """Only those of this directory: another one's of the same namespace may be about to serve."""
        dram_dir = tmp_path / "dram"
        dram_dir.mkdir()
        for directory in (cache, tmp_path / "other"):
            directory.mkdir(exist_ok=True)
            DramTier.open(dram_dir, directory, ns.id(), ns.geometry, budget_bytes=1 << 20, ranks=1).close()
        args = ("--cache-dir", cache, "--dram-dir", dram_dir)

        (file,) = run_json("status", *args)["dram_files"]
        planned = run_json("clear", *args, "--tier", "dram", "--dry-run")
        done = run_json("clear", *args, "--tier", "dram")

        assert not file["is_used"]
        assert planned["dram_files"] == done["dram_files"] == 1
        assert run_json("status", *args)["dram_files"] == []
        assert len(list_dram_files(dram_dir)) == 1
        assert run_json("status", *args)["namespaces"][0]["num_chunks"] == 7

    def test_a_dram_file_in_use_stays(self, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        tier = DramTier.open(tmp_path, cache, ns.id(), ns.geometry, budget_bytes=1 << 20, ranks=1)
        args = ("--cache-dir", cache, "--dram-dir", tmp_path)

        report = run_json("clear", *args, "--tier", "dram")

        assert report["dram_files"] == 0
        assert run_json("status", *args)["dram_files"][0]["is_used"]
        tier.close()


def test_starting_the_command_loads_nothing_heavy() -> None:
    """Commands that need no catalog must not wait for pyarrow; an engine without a snapshot never loads it."""
    heavy = ("pyarrow", "blake3", "boto3", "torch", "vllm")
    code = f"import sys, kvsnap_jobs.cli; print([name for name in {heavy} if name in sys.modules])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_env())

    assert done.stdout.strip() == "[]"


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
