"""What commands print: results on stdout as text or JSON, a progress bar on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import click

_BAR_AFTER_S = 1.0
_BAR_EVERY_S = 0.1
_BAR_WIDTH = 30


def print_json(report: Any, **more: Any) -> None:
    """One JSON object: the fields of a report dataclass (or of a mapping), and `more`."""
    click.echo(json.dumps({**_mapping(report), **more}, indent=2, sort_keys=True, default=str))


def print_json_line(report: Any, **more: Any) -> None:
    """The same in one line, at once: of a command that goes on."""
    click.echo(json.dumps({**_mapping(report), **more}, sort_keys=True, default=str))
    sys.stdout.flush()


def _mapping(report: Any) -> Any:
    return dataclasses.asdict(report) if dataclasses.is_dataclass(report) and not isinstance(report, type) else report


def print_facts(facts: Iterable[tuple[str, object]], *, indent: str = "") -> None:
    """Aligned `name  value` lines; those with no value are left out."""
    shown = [(name, value) for name, value in facts if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        click.echo(f"{indent}{name:<{width}}  {value}")


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Aligned columns below a head line."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def size_text(nbytes: int) -> str:
    """Bytes for people: `1.5 GiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{int(value)} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def time_text(unix_s: float) -> str:
    """A point in time for people, local: `2026-05-01 14:03`."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


class ProgressBar:
    """A bar on stderr, if that is a terminal and the work takes longer than a second."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._shown = 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._shown:
            click.echo("\r\033[K", err=True, nl=False)

    def __call__(self, done: int, total: int) -> None:
        """Bytes done and in all."""
        now = time.monotonic()
        if not self._is_terminal or now - self._start < _BAR_AFTER_S or now - self._shown < _BAR_EVERY_S:
            return
        self._shown = now
        share = min(done / total, 1.0) if total else 1.0
        bar = ("#" * int(share * _BAR_WIDTH)).ljust(_BAR_WIDTH)
        speed = done / (now - self._start) / 2**20
        text = f"{self._label} [{bar}] {size_text(done)} of {size_text(total)}, {speed:.0f} MiB/s"
        click.echo(f"\r\033[K{text}", err=True, nl=False)
