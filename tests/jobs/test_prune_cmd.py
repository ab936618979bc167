"""kvsnap prune --cache-dir: exit statuses and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvsnap_jobs.cli import main
from tests.disk_fakes import make_namespace
from tests.test_cache_prune import fill, make_old


def run(*args: object) -> Result:
    return CliRunner().invoke(main, ["prune", *map(str, args)])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return fill(tmp_path / "cache", make_namespace(), days=40)


@pytest.fixture
def args(tmp_path: Path) -> tuple[object, ...]:
    (tmp_path / "shm").mkdir()
    return ("--cache-dir", tmp_path / "cache", "--dram-dir", tmp_path / "shm")


def test_shows_and_then_removes(old: Path, args: tuple[object, ...]) -> None:
    shown = run(*args, "--dry-run")
    assert shown.exit_code == 0
    assert "would go  namespace  " in shown.stdout
    assert "unused for 40.0 d" in shown.stdout
    assert old.exists()

    done = run(*args)

    assert done.exit_code == 0
    assert "removed 1 things" in done.stdout
    assert not old.exists()


def test_json(old: Path, args: tuple[object, ...]) -> None:
    report = json.loads(run(*args, "--unused-for", "50d", "--json").stdout)

    assert report["freed_bytes"] == 0
    [item] = report["items"]
    assert item["path"] == str(old)
    assert not item["goes"]
    assert item["nbytes"] > 0


def test_wrong_usage(args: tuple[object, ...], tmp_path: Path) -> None:
    assert run().exit_code == 2
    assert run(tmp_path, *args).exit_code == 2
    assert run(*args, "--unused-for", "soon").exit_code == 2


def test_no_such_directory(tmp_path: Path) -> None:
    result = run("--cache-dir", tmp_path / "nowhere")

    assert result.exit_code == 1
    assert "there is no directory" in result.stderr


def test_what_does_not_go_is_an_error(old: Path, args: tuple[object, ...]) -> None:
    (old / "shards" / f"{'ab' * 16}.safetensors").mkdir()
    make_old(old, 40)

    result = run(*args)

    assert result.exit_code == 1
    assert f"{old} is still there" in result.stderr
