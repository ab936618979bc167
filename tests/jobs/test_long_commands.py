"""Commands that go on until a signal: `sync --follow`, `export --every`; and any export that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvsnap.namespace import Namespace
from kvsnap.refs import remove
from kvsnap.repository import Repository
from kvsnap.snapshot_export import export_snapshot
from kvsnap.storage import LocalStorage
from tests.disk_fakes import make_namespace
from tests.jobs.command import invoke
from tests.repository_fakes import check_whole
from tests.snapshot_fakes import chain, chunks_at, filled_cache, flip, prompt, store
from tests.storage.fake_s3 import BUCKET, Trouble, fake_s3
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    filled_cache(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def ns() -> Namespace:
    return make_namespace()


@pytest.fixture
def repo(tmp_path: Path, cache: Path) -> Path:
    export_snapshot(cache, str(tmp_path / "repo"), tag="latest")
    return tmp_path / "repo"


@contextmanager
def process(*args: object, **env: str) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own; killed at the end."""
    paths = os.pathsep.join(str(ROOT / part) for part in ("", "connector", "jobs"))
    command = [sys.executable, "-m", "kvsnap_jobs", *map(str, args)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, **env},
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def next_line(child: subprocess.Popen[str]) -> Any:
    assert child.stdout is not None
    return json.loads(child.stdout.readline())


class TestSync:
    def test_once(self, repo: Path, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        first = invoke("sync", f"{repo}@latest", "--cache-dir", tmp_path / "other")
        again = invoke("sync", f"{repo}@latest", "--cache-dir", tmp_path / "other", "--json")

        assert (first.exit_code, again.exit_code) == (0, 0)
        assert "7 of 7 chunks" in first.stdout
        report = json.loads(again.stdout)
        assert (report["outcome"], report["report"]["imported_shards"]) == ("synced", 0)
        assert chunks_at(tmp_path / "other", ns) == chunks_at(cache, ns)

    @pytest.mark.parametrize("what", ["no repository", "no ref", "damage"])
    def test_what_fails_is_one_line(self, repo: Path, tmp_path: Path, what: str) -> None:
        url, ref, status = str(repo), "latest", 1
        if what == "no repository":
            url = str(tmp_path / "none")
        elif what == "no ref":
            ref = "none"
        else:
            flip(next(repo.glob("shards/*/*")), -1)
            status = 3

        result = invoke("sync", f"{url}@{ref}", "--cache-dir", tmp_path / "other")

        assert result.exit_code == status
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith(f"kvsnap: sync of {ref}: ")

    def test_wrong_usage(self, repo: Path, tmp_path: Path) -> None:
        assert invoke("sync", repo, "--cache-dir", tmp_path).exit_code == 2
        assert invoke("sync", f"{repo}@latest", "--cache-dir", tmp_path, "--interval", "soon").exit_code == 2

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_follow_until_a_signal(
        self, repo: Path, cache: Path, ns: Namespace, tmp_path: Path, number: signal.Signals
    ) -> None:
        """New snapshots arrive, a ref that vanishes is said, and the end is a clean one."""
        other = tmp_path / "other"
        command = ("sync", f"{repo}@latest", "--cache-dir", other, "--follow", "--interval", "20ms", "--json")
        with process(*command) as child:
            assert next_line(child)["outcome"] == "synced"
            store(cache, ns, chain(ns, prompt(7, 128)))
            export_snapshot(cache, str(repo), tag="latest")
            while (line := next_line(child))["outcome"] == "unchanged":
                pass
            assert (line["outcome"], line["report"]["imported_shards"]) == ("synced", 1)
            remove(str(repo), "latest")
            while (line := next_line(child))["outcome"] != "failed":
                pass
            assert line["last_success"] > 0
            export_snapshot(cache, str(repo), tag="latest")
            while (line := next_line(child))["outcome"] == "failed":
                pass
            child.send_signal(number)
            _, errors = child.communicate(timeout=30)

        assert child.returncode == 0
        assert "has no ref and no snapshot latest" in errors
        assert chunks_at(other, ns) == chunks_at(cache, ns)

    def test_a_failure_shows_in_the_exit_status(self, tmp_path: Path) -> None:
        command = ("sync", f"{tmp_path / 'none'}@latest", "--cache-dir", tmp_path / "other", "--follow", "--json")
        with process(*command) as child:
            assert next_line(child)["outcome"] == "failed"
            child.terminate()
            child.communicate(timeout=30)

        assert child.returncode == 1

    def test_two_followers_download_once(self, repo: Path, tmp_path: Path) -> None:
        command = ("sync", f"{repo}@latest", "--cache-dir", tmp_path / "other", "--follow", "--json")
        with process(*command) as one, process(*command) as two:
            lines = [next_line(one), next_line(two)]
            for child in (one, two):
                child.terminate()

        assert [line["outcome"] for line in lines] == ["synced"] * 2
        assert sum(line["report"]["imported_shards"] for line in lines) == 2


class TestExportEvery:
    def test_until_a_signal(self, repo: Path, cache: Path, ns: Namespace) -> None:
        command = ("export", "--cache-dir", cache, "--to", repo, "--tag", "latest", "--every", "20ms", "--json")
        with process(*command) as child:
            assert next_line(child)["outcome"] == "unchanged"
            store(cache, ns, chain(ns, prompt(7, 128)))
            while (line := next_line(child))["outcome"] == "unchanged":
                pass
            child.terminate()
            child.communicate(timeout=30)

        assert child.returncode == 0
        assert line["outcome"] == "exported"
        assert line["last_successful_export"] == pytest.approx(time.time(), abs=60)
        assert Repository(LocalStorage(repo)).ref("latest").snapshot == line["report"]["snapshot"]

    def test_a_failing_store_is_said_and_shows_in_the_exit_status(self, cache: Path, tmp_path: Path) -> None:
        """D14"""
        (tmp_path / "file").write_text("no directory")
        url = tmp_path / "file" / "repo"
        command = ("export", "--cache-dir", cache, "--to", url, "--tag", "latest", "--every", "20ms", "--json")
        with process(*command) as child:
            lines = [next_line(child), next_line(child)]
            child.terminate()
            _, errors = child.communicate(timeout=30)

        assert [line["failures"] for line in lines] == [1, 2]
        assert [line["last_successful_export"] for line in lines] == [None, None]
        assert child.returncode == 1
        assert "never since the start" in errors

    def test_several_namespaces_end_it(self, cache: Path, repo: Path) -> None:
        other = make_namespace(tag="other")
        store(cache, other, chain(other, prompt(1, 64)))

        assert invoke("export", "--cache-dir", cache, "--to", repo, "--every", "1h").exit_code == 2


@pytest.mark.parametrize("every", [(), ("--every", "1h")], ids=["once", "every"])
def test_killed_in_the_middle_of_an_export(cache: Path, ns: Namespace, every: tuple[str, ...]) -> None:
    """D22, D02: SIGTERM while the store hangs, then SIGKILL: the earlier snapshot is whole, the rest goes later."""
    pytest.importorskip("boto3")
    aws = {"AWS_ACCESS_KEY_ID": "t", "AWS_SECRET_ACCESS_KEY": "t", "AWS_EC2_METADATA_DISABLED": "true"}
    with fake_s3() as state:
        command = (
            "export",
            "--cache-dir",
            cache,
            "--to",
            f"s3://{BUCKET}/p?endpoint={state.endpoint}",
            "--tag",
            "prod",
        )
        with process(*command, **aws) as first:
            first.communicate(timeout=60)
        assert first.returncode == 0
        before = {name: data for name, data in state.objects.items() if not name.startswith("p/leases/")}
        store(cache, ns, chain(ns, prompt(7, 128)), chain(ns, prompt(8, 128)))
        state.settings.troubles = [Trouble("PUT", "silence", "p/shards/*")]
        requests = len(state.requests)

        def is_hanging() -> bool:
            return any(r.method == "PUT" and r.key.startswith("p/shards/") for r in state.requests[requests:])

        with process(*command, *every, **aws) as killed:
            wait_for(is_hanging)
            killed.terminate()
            time.sleep(0.05)
            killed.kill()
            killed.wait(timeout=30)
        stored = {name: data for name, data in state.objects.items() if not name.startswith("p/leases/")}
        assert {name: stored[name] for name in before} == before
        assert [name for name in stored if "/manifests/" in name] == [n for n in before if "/manifests/" in n]

        with process(*command, "--json", **aws) as last:
            output, _ = last.communicate(timeout=60)
        assert json.loads(output)["sent_shards"] in (1, 2)
        memory = LocalStorage(cache.parent / "copy")
        for name, data in state.objects.items():
            memory.put(name.removeprefix("p/"), data)
        assert len(check_whole(memory)) == 2
