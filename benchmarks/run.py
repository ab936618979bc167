"""Run every benchmark, each in a process of its own, and end with a table of all targets.

    python -m benchmarks.run [NAME ...]        # default: all

Exit status: 0 everything was measured, whether its target was met or not; 1 something could not be measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from benchmarks.report import note, table
from tools.serving import REPOSITORY, tree_environment

NAMES = ("index", "start", "disk", "snapshots", "ttft", "restart")


def run(name: str) -> tuple[list[dict[str, Any]], bool]:
    """The JSON lines of one benchmark, passed on as they come, and whether it ended well."""
    note(f"\n{name}")
    command = [sys.executable, "-m", f"benchmarks.{name}"]
    rows = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=tree_environment()) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                rows.append(json.loads(line))
    return rows, child.returncode == 0


def main() -> None:
    rows: list[dict[str, Any]] = []
    failed = []
    for name in sys.argv[1:] or NAMES:
        found, is_good = run(name)
        rows += found
        failed += [] if is_good else [name]
    note("")
    marks = {True: "", False: "missed"}
    table(("id", "value", "target", ""), [(r["id"], r["value"], r["target"] or "-", marks[r["ok"]]) for r in rows])
    if failed:
        raise SystemExit(f"could not be measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
