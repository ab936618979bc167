"""`kvsnap warmup`: exit statuses, the ready file, usage, and an export that follows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvsnap.repository import Repository
from kvsnap.snapshot_export import ExportReport, export_snapshot
from kvsnap.storage import Capabilities, LocalStorage
from kvsnap.trust import TrustedKeys
from kvsnap_jobs import warmup_cmd
from kvsnap_jobs.cli import main
from tests.snapshot_fakes import filled_cache
from tests.waiting import wait_for
from tests.warmup.fake_server import FakeServer, running

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with running(FakeServer()) as fake:
        yield fake


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i:03}" + "-" * 40}) + "\n" for i in range(4)))
    return path


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    return tmp_path / "ready"


def run(*args: object, status: int = 0, env: dict[str, str] | None = None) -> Result:
    result = CliRunner().invoke(main, ["warmup", *map(str, args)], env=env)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def run_json(*args: object, status: int = 0) -> Any:
    return json.loads(run(*args, "--json", status=status).stdout)


def test_warm(fake: FakeServer, prompts: Path, ready: Path) -> None:
    result = run(prompts, "--url", fake.url + "/v1/", "--ready-file", ready)

    assert result.stdout.startswith(f"warm: {fake.url}, model fake\n")
    assert "warmed       4\n" in result.stdout
    assert result.stderr == ""
    written = json.loads(ready.read_text())
    assert (written["state"], written["num_warmed"]) == ("warm", 4)


def test_json_is_the_report(fake: FakeServer, prompts: Path) -> None:
    report = run_json(prompts, "--url", fake.url)

    assert (report["state"], report["num_prompts"], report["failures"]) == ("warm", 4, [])


def test_old_ready_file_goes_first(fake: FakeServer, prompts: Path, ready: Path) -> None:
    """A container that starts again must not be found ready by its last life's file."""
    ready.write_text("{}")
    fake.api_key = "x"

    run(prompts, "--url", fake.url, "--ready-file", ready, status=1)

    assert not ready.exists()


def test_budget_fails_open(fake: FakeServer, prompts: Path, ready: Path) -> None:
    fake.hangs_after = 1

    result = run(prompts, "--url", fake.url, "--budget", "200ms", "--ready-file", ready)

    assert result.stdout.startswith("cold:")
    assert "NOT WARM: the budget ran out; 0 of 4 prompts are warm; ready cold" in result.stderr
    assert json.loads(ready.read_text())["state"] == "cold"


def test_budget_fails_open_where_no_server_comes_up(prompts: Path, ready: Path) -> None:
    """As any other end of the budget: said loudly, and not the replica's end."""
    with running(FakeServer()) as gone:
        pass
    common = [prompts, "--url", gone.url, "--wait", "10m", "--budget", "200ms", "--ready-file", ready]

    result = run(*common)

    assert f"warning: the budget ran out: {gone.url}/v1/models gave no answer: Connection refused" in result.stderr
    assert "NOT WARM: the budget ran out; 0 of 4 prompts are warm; ready cold" in result.stderr
    assert json.loads(ready.read_text())["state"] == "cold"
    run(*common, "--require-warm", status=3)
    assert not ready.exists()


def test_require_warm_fails_closed(fake: FakeServer, prompts: Path, ready: Path) -> None:
    fake.hangs_after = 1

    result = run(prompts, "--url", fake.url, "--budget", "0.2", "--ready-file", ready, "--require-warm", status=3)

    assert "NOT WARM" in result.stderr
    assert not ready.exists()


def test_failed_prompts_are_problems(fake: FakeServer, prompts: Path, ready: Path) -> None:
    """Traffic may come (the ready file says cold), but the job did not do what it should."""
    fake.refuses = "001"

    result = run(prompts, "--url", fake.url, "--ready-file", ready, status=3)

    assert f"kvsnap: {prompts}:2: " in result.stderr
    assert "answered 400: no, 400" in result.stderr
    assert json.loads(ready.read_text())["num_failed"] == 1


def test_bad_input_names_the_line(fake: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"promt": "b"}\n')

    result = run(tmp_path / "p.jsonl", "--url", fake.url, status=1)

    assert "p.jsonl:2: expected one of" in result.stderr
    assert fake.sent == []


def test_key_comes_from_the_environment(fake: FakeServer, prompts: Path) -> None:
    fake.api_key = "secret"

    refused = run(prompts, "--url", fake.url, status=1)
    run(prompts, "--url", fake.url, env={"KVSNAP_API_KEY": "secret"})

    assert "answered 401" in refused.stderr


def test_clock_is_warned_of(fake: FakeServer, tmp_path: Path) -> None:
    """C04"""
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "x" * 50}]}))
    fake.template = lambda text: f"Today Date: {date.today():%d %b %Y}\n{text}"

    result = run(tmp_path / "p.jsonl", "--url", fake.url)

    assert "p.jsonl:1: the chat template writes a date" in result.stderr
    assert "at token 12; each change loses the" in result.stderr


def test_dry_run(fake: FakeServer, prompts: Path, ready: Path) -> None:
    ready.touch()

    text = run(prompts, "--url", fake.url, "--dry-run", "--ready-file", ready).stdout
    plan = run_json(prompts, "--url", fake.url, "--dry-run")

    assert text.startswith("dry run: ")
    assert (plan["num_prompts"], plan["compute_tokens"]) == (4, 4 * 32)
    assert fake.sent == []
    assert ready.exists()


def test_shard_of_an_indexed_job(fake: FakeServer, prompts: Path) -> None:
    by_option = run_json(prompts, "--url", fake.url, "--shard", "1/3", "--shard-tokens", "16")
    by_environment = run(
        *[prompts, "--url", fake.url, "--shard", "3", "--shard-tokens", "16", "--json"],
        env={"JOB_COMPLETION_INDEX": "1"},
    )

    assert (by_option["shard"], by_option["num_prompts"]) == ("1/3", 1)
    assert json.loads(by_environment.stdout)["num_resident"] == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "either --url"),
        (["--url", "http://x", "--model", "m"], "either --url"),
        (["--url", "http://x", "--", "--dtype", "float32"], "go with --model"),
        (["--url", "http://x", "--shard", "3/3"], "no shard"),
        (["--url", "http://x", "--shard", "3"], "JOB_COMPLETION_INDEX"),
        (["--url", "http://x", "--budget", "soon"], "no duration"),
        (["--url", "http://x", "--export", "repo"], "needs --cache-dir"),
        (["--url", "http://x", "--tag", "prod"], "go with --export"),
        (["--url", "http://x", "--sign-key", "key.pem"], "go with --export"),
        (["--url", "http://x", "--single-writer"], "go with --export"),
        (["--url", "http://x", "--ready-file", "/no/such/folder/ready"], "doesn't exist"),
    ],
)
def test_usage(prompts: Path, args: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOB_COMPLETION_INDEX", raising=False)

    assert words in run(prompts, *args, status=2).stderr


def test_wrong_url(prompts: Path) -> None:
    assert "is no URL of a server" in run(prompts, "--url", "localhost:8000", status=1).stderr


def test_exports_when_warm(fake: FakeServer, prompts: Path, tmp_path: Path) -> None:
    filled_cache(tmp_path / "cache")
    common = [prompts, "--url", fake.url, "--cache-dir", tmp_path / "cache"]

    report = run_json(*common, "--export", tmp_path / "repo", "--tag", "prod")

    repository = Repository.open(str(tmp_path / "repo"))
    assert repository.resolve("prod") == report["snapshot"]


def test_exports_nothing_when_cold(fake: FakeServer, prompts: Path, tmp_path: Path) -> None:
    """A ref never moves to half of what it should hold."""
    filled_cache(tmp_path / "cache")
    fake.hangs_after = 1
    common = [prompts, "--url", fake.url, "--cache-dir", tmp_path / "cache", "--budget", "0.1"]

    result = run(*common, "--export", tmp_path / "repo", "--tag", "prod", status=3)

    assert "nothing was exported" in result.stderr
    assert not (tmp_path / "repo").exists()


def test_ready_does_not_wait_for_the_export(
    fake: FakeServer, prompts: Path, tmp_path: Path, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is warm: traffic may come while its cache is published."""
    filled_cache(tmp_path / "cache")
    seen = []

    def export(*args: Any, **options: Any) -> ExportReport:
        seen.append(json.loads(ready.read_text())["state"])
        return export_snapshot(*args, **options)

    monkeypatch.setattr(warmup_cmd, "export_snapshot", export)
    common = [prompts, "--url", fake.url, "--cache-dir", tmp_path / "cache", "--ready-file", ready]

    report = run_json(*common, "--export", tmp_path / "repo")

    assert seen == ["warm"]
    assert json.loads(ready.read_text())["snapshot"] == report["snapshot"]
    assert report["snapshot"] is not None


def test_export_signs(fake: FakeServer, prompts: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from tests.test_signing import new_key

    filled_cache(tmp_path / "cache")
    common = [prompts, "--url", fake.url, "--cache-dir", tmp_path / "cache", "--export", tmp_path / "repo"]
    wrong = run(*common, "--sign-key", tmp_path / "none.pem", status=1)
    key = new_key(tmp_path / "key.pem")

    report = run_json(*common, "--sign-key", tmp_path / "key.pem")

    assert "none.pem" in wrong.stderr
    assert report["num_warmed"] == 4, "nothing was computed before the key was read"
    trusted = TrustedKeys(names={key.public: "me"}, source="the test")
    Repository.open(str(tmp_path / "repo")).manifest(report["snapshot"], trusted=trusted)  # else an UntrustedError


def test_export_to_a_store_that_ignores_conditions(
    fake: FakeServer, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = Capabilities(conditional_create=False, conditional_replace=False, ranges=True, checksums=False)
    monkeypatch.setattr(LocalStorage, "capabilities", lambda storage: poor)
    filled_cache(tmp_path / "cache")
    common = [prompts, "--url", fake.url, "--cache-dir", tmp_path / "cache", "--export", tmp_path / "repo"]

    assert "--single-writer" in run(*common, status=1).stderr
    assert run_json(*common, "--single-writer")["snapshot"] is not None


def test_a_worker_without_prompts_says_whose_part_would_be_merged(fake: FakeServer, tmp_path: Path) -> None:
    """Its ref may still name what an earlier deploy exported."""
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "-" * 40}))
    filled_cache(tmp_path / "cache")
    common = [tmp_path / "p.jsonl", "--url", fake.url, "--cache-dir", tmp_path / "cache", "--shard", "1/2"]

    result = run(*common, "--export", tmp_path / "repo", "--tag", "part-1")

    assert "NOTHING EXPORTED" in result.stderr
    assert "ref part-1 stays: if an earlier deploy made it, `kvsnap merge` would take that older part" in result.stderr
    assert not (tmp_path / "repo").exists()


def test_failed_export_is_said(fake: FakeServer, prompts: Path, tmp_path: Path, ready: Path) -> None:
    """The server is warm all the same."""
    common = [prompts, "--url", fake.url, "--cache-dir", tmp_path / "none", "--ready-file", ready]

    result = run(*common, "--export", tmp_path / "repo", status=1)

    assert "kvsnap: export: there is no directory" in result.stderr
    assert json.loads(ready.read_text())["state"] == "warm"


def test_bar_is_for_terminals_and_long_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warmup_cmd, "BAR_AFTER_S", 0.0)
    warmup_cmd.CountBar()("compute", 1, 4)
    piped = capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = warmup_cmd.CountBar()

    bar("compute", 1, 4)
    bar.clear()

    assert piped == ""
    assert "compute [#######" in capsys.readouterr().err


def command(*args: object, before: str = "") -> list[str]:
    """`kvsnap warmup` as a process of its own."""
    return [sys.executable, "-c", f"{before}from kvsnap_jobs.cli import main; main()", "warmup", *map(str, args)]


def environment() -> dict[str, str]:
    paths = (str(REPOSITORY / part) for part in ("", "connector", "jobs"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_killed_leaves_no_ready_file(fake: FakeServer, prompts: Path, ready: Path) -> None:
    """D22: SIGTERM in the middle of the work; nothing half is left, and the next run does it."""
    fake.hangs_after = 2
    process = subprocess.Popen(command(prompts, "--url", fake.url, "--ready-file", ready), env=environment())
    while len(fake.sent) < 2:
        assert process.poll() is None
        fake.release.wait(0.01)

    process.send_signal(signal.SIGTERM)

    assert process.wait(timeout=10) == -signal.SIGTERM
    assert list(ready.parent.glob("*ready*")) == []
    fake.hangs_after = None
    run(prompts, "--url", fake.url, "--ready-file", ready)
    assert ready.exists()


@pytest.mark.parametrize("behaviour", ["loads", "hangs at work"])
def test_killed_takes_its_engine_along(prompts: Path, tmp_path: Path, behaviour: str) -> None:
    """D22: also one that still loads, and would see the end of its input only after that."""
    log = tmp_path / "engine.log"
    log.touch()
    before = "from kvsnap.warmup import offline; offline.CHILD = 'tests.warmup.fake_child'; "
    options = ["--model", "m", "--engine-log", log, "--", f"fake:{behaviour}", "--kv-transfer-config", "{}"]
    process = subprocess.Popen(command(prompts, *options, before=before), env=environment())
    try:
        wait_for(lambda: log.read_text().endswith("\n"))
        engine = Path("/proc") / log.read_text().split()[0]
        assert engine.exists()

        process.send_signal(signal.SIGTERM)

        assert process.wait(timeout=30) == -signal.SIGTERM
        assert not engine.exists()
    finally:
        process.kill()


def test_sigterm_ends_the_first_process_of_a_container(fake: FakeServer, prompts: Path, ready: Path) -> None:
    """The kernel spares it every signal that it doesn't handle: the pod would be waited for until it is killed."""
    container = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*container, "true"], check=False).returncode:
        pytest.skip("needs namespaces of users and processes")
    fake.hangs_after = 1
    args = command(prompts, "--url", fake.url, "--ready-file", ready)
    with subprocess.Popen([*container, *args], env=environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: bool(fake.sent))
            first = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())

            os.kill(first, signal.SIGTERM)

            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert "ended by SIGTERM" in errors
    assert not ready.exists()
