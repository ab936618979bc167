"""How a benchmark says what it found: one JSON line per target on stdout, everything else on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence


def emit(name: str, value: float, *, at_most: float | None = None, at_least: float | None = None) -> None:
    """Print `{"id", "value", "target", "ok"}`. A target is a text such as "<= 1.25"; null where there is none."""
    if at_most is not None:
        target, ok = f"<= {at_most:g}", value <= at_most
    elif at_least is not None:
        target, ok = f">= {at_least:g}", value >= at_least
    else:
        target, ok = None, True
    digits = 1 if abs(value) >= 100 else 3
    print(json.dumps({"id": name, "value": round(value, digits), "target": target, "ok": ok}), flush=True)


def note(text: str) -> None:
    """A remark for people."""
    print(text, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns on stderr."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    for line in lines:
        note("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
