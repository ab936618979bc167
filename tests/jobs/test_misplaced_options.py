"""Options that would be ignored, or make no sense where they stand, are wrong usage."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvsnap.repository import split_snapshot_url
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


@pytest.mark.parametrize("url", ["", "http://host/repo", "s3://", "s3://bucket/a?colour=red", "s3://bucket/a/../b"])
def test_a_url_that_makes_no_sense_is_wrong_usage(url: str, tmp_path: Path) -> None:
    """Seen before anything is read or made, also where a snapshot is named in it."""
    (tmp_path / "cache").mkdir()
    for command in (
        ("export", "--cache-dir", tmp_path / "cache", "--to", url),
        ("list", url),
        ("prune", url),
        ("copy", f"{tmp_path}/repo@prod", url),
        ("import", f"{url}@prod", "--cache-dir", tmp_path / "cache"),
        ("verify", f"{url}@prod"),
    ):
        assert run(*command).exit_code == 2, command


def test_a_repository_is_not_a_snapshot(tmp_path: Path) -> None:
    """Else `export --to URL@prod` would make a directory of that name and move no ref."""
    (tmp_path / "cache").mkdir()
    result = run("export", "--cache-dir", tmp_path / "cache", "--to", f"{tmp_path}/repo@prod")

    assert result.exit_code == 2
    assert "names a snapshot, expected a repository alone" in result.stderr
    assert not list(tmp_path.glob("repo*"))


@pytest.mark.parametrize("tag", ["a/../b", "", "-x", "0" * 64])
def test_a_ref_that_makes_no_sense_is_wrong_usage(tag: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    result = run("export", "--cache-dir", tmp_path / "cache", "--to", tmp_path / "repo", "--tag", tag)

    assert result.exit_code == 2
    assert "ref name" in result.stderr


def test_help_names_every_kind_of_repository() -> None:
    words = " ".join(run("--help").stdout.split())

    assert all(kind in words for kind in ("a path", "file://", "s3://"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://bucket/p?region=x@prod", ("s3://bucket/p?region=x", "prod")),
        ("s3://bucket/p@prod?region=x", ("s3://bucket/p?region=x", "prod")),
        ("s3://bucket/p@prod?endpoint=http://h:9", ("s3://bucket/p?endpoint=http://h:9", "prod")),
        ("s3://bucket/p?endpoint=http://h:9@prod", ("s3://bucket/p?endpoint=http://h:9", "prod")),
        ("s3://bucket/p?region=x", ("s3://bucket/p?region=x", None)),
        ("/a@b/c@d?e", ("/a@b/c", "d?e")),
    ],
)
def test_options_of_a_url_stand_before_or_after_the_ref(text: str, expected: tuple[str, str | None]) -> None:
    assert split_snapshot_url(text) == expected
