"""What the commands that write to a repository share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


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
