"""What several commands' options share."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvsnap.config import parse_size
from kvsnap.errors import ConfigError
from kvsnap.repository import ref_name, split_snapshot_url
from kvsnap.status import DRAM_DIR
from kvsnap.storage import open_storage

EXIT_FAILED = 1
EXIT_PROBLEMS = 3

F = TypeVar("F", bound=Callable[..., Any])


class SizeType(click.ParamType[int]):
    """A size in bytes: `20GiB`, `1.5MB` or a number."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_size(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class RepositoryUrlType(click.ParamType[str]):
    """`URL` of a repository: a path, `file://` or `s3://`, without a snapshot."""

    name = "url"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            url, ref = split_snapshot_url(value)
            open_storage(value)  # looks at the URL alone
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        if ref is not None and not Path(value).exists():
            self.fail(f"{value} names a snapshot, expected a repository alone, for example {url}", param, ctx)
        return str(value)


class SnapshotUrlType(click.ParamType[tuple[str, str]]):
    """`URL@REF` as a pair."""

    name = "url@ref"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        try:
            url, ref = split_snapshot_url(value)
            open_storage(url)  # looks at the URL alone
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        if ref is None:
            self.fail(f"{value} names no snapshot, expected URL@REF", param, ctx)
        return url, ref


class TagType(click.ParamType[str]):
    """The name of a ref."""

    name = "ref"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            ref_name(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class AgeType(click.ParamType[float]):
    """How long ago, in seconds: `30d`, `12h`, `2w`, or a number of seconds."""

    name = "age"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no age, expected e.g. 30d, 12h or 90s", param, ctx)
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[match[2]]


class DurationType(click.ParamType[float]):
    """Seconds: `90`, `120s`, `10m`, `1.5h`.

    Args:
        is_pace: It is a pause between rounds, so none at all is refused.
    """

    name = "duration"

    def __init__(self, *, is_pace: bool = False) -> None:
        self._is_pace = is_pace

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, int | float):
            return float(value)
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no duration, expected for example 90, 120s, 10m or 1h", param, ctx)
        seconds = float(match[1]) * {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[match[2]]
        if self._is_pace and not seconds:
            self.fail(f"{value!r} leaves no pause between rounds, expected for example 60s or 10m", param, ctx)
        return seconds


class ShareType(click.ParamType[float]):
    """A share of something: `5%` or `0.05`."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            self.fail(f"{value!r} is no share, expected e.g. 5% or 0.05", param, ctx)
        return share


AGE = AgeType()
DURATION = DurationType()
PACE = DurationType(is_pace=True)
REPOSITORY_URL = RepositoryUrlType()
SHARE = ShareType()
SIZE = SizeType()
SNAPSHOT_URL = SnapshotUrlType()
TAG = TagType()


def cache_dir_option(*, required: bool = True) -> Callable[[F], F]:
    """`--cache-dir DIR`"""
    return click.option(
        "--cache-dir",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        required=required,
        help="The cache directory of the engines.",
    )


def json_option(function: F) -> F:
    """`--json`"""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object on stdout; none where it could not run."
    )(function)


def namespace_option(function: F) -> F:
    """`--namespace PREFIX`"""
    return click.option(
        "--namespace", metavar="PREFIX", help="Start of the id, or of the directory's name, of a namespace."
    )(function)


def dry_run_option(function: F) -> F:
    """`--dry-run`"""
    return click.option("--dry-run", is_flag=True, help="Show what would be done; change nothing.")(function)


def single_writer_option(function: F) -> F:
    """`--single-writer`"""
    return click.option(
        "--single-writer",
        is_flag=True,
        help="Write although the store ignores conditional requests: you make sure that nobody else writes or prunes.",
    )(function)


def other_engines_option(function: F) -> F:
    """`--other-engines`"""
    return click.option(
        "--other-engines",
        is_flag=True,
        help="Also beside live engines of which none could use the snapshot, for those that are to come.",
    )(function)


def dram_dir_option(function: F) -> F:
    """`--dram-dir DIR`"""
    return click.option(
        "--dram-dir",
        metavar="DIR",
        type=click.Path(path_type=Path, file_okay=False),
        default=DRAM_DIR,
        show_default=True,
        help="Where the DRAM tier's files lie (dram_dir of the engines).",
    )(function)
