"""Options that would be ignored, or make no sense where they stand, are wrong usage."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvsnap_jobs.cli import main


def run(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


@pytest.mark.parametrize("pause", ["0", "0s", "0.0m"])
def test_rounds_without_a_pause_are_refused(pause: str, tmp_path: Path) -> None:
    """They would keep a core and the store busy for nothing."""
    (tmp_path / "cache").mkdir()
    export = run("export", "--cache-dir", tmp_path / "cache", "--to", tmp_path / "repo", "--every", pause)
    sync = run("sync", f"{tmp_path}/repo@prod", "--cache-dir", tmp_path / "cache", "--follow", "--interval", pause)

    for result in (export, sync):
        assert result.exit_code == 2
        assert "no pause between rounds" in result.stderr
    assert not (tmp_path / "repo").exists()


@pytest.mark.parametrize("option", [("--unused-for", "90d"), ("--dram-dir", "/dev/shm"), ("--all-dram",)])
def test_prune_of_a_repository_takes_no_option_of_a_cache(option: tuple[str, ...], tmp_path: Path) -> None:
    """Who says how long something must stay is not to learn afterwards that nobody listened."""
    result = run("prune", tmp_path / "repo", *option)

    assert result.exit_code == 2
    assert f"{option[0]} goes with --cache-dir" in result.stderr


@pytest.mark.parametrize("option", [("--grace", "90d"), ("--untagged-for", "90d"), ("--single-writer",)])
def test_prune_of_a_cache_takes_no_option_of_a_repository(option: tuple[str, ...], tmp_path: Path) -> None:
    result = run("prune", "--cache-dir", tmp_path, *option)

    assert result.exit_code == 2
    assert f"{option[0]} goes with a repository" in result.stderr


def test_help_names_every_kind_of_repository() -> None:
    words = " ".join(run("--help").stdout.split())

    assert all(kind in words for kind in ("a path", "file://", "s3://"))
