"""The examples do what their tables say. Each is one command; their servers are the only ones that start here.

`restart_recovery` starts three servers one after the other and runs with `make soak`: what it
shows is tested in `test_lives.py` at every change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.common import table
from examples.cross_replica import run as cross_replica
from examples.predeploy_warmup import run as predeploy_warmup
from examples.restart_recovery import run as restart_recovery

pytestmark = pytest.mark.engine


@pytest.mark.soak
def test_restart_recovery(smollm2: Path, tmp_path: Path, shm_folder: Path) -> None:
    """C02, invariant 8: after `kill -9` from DRAM, after a reboot from disk."""
    rows, problems = restart_recovery.run(tmp_path, shm_folder, smollm2)

    assert not problems
    assert [row.tokens.get("host", 0) > 0 for row in rows[:3]] == [False, True, True]
    assert rows[3].tokens["disk"] > 0
    assert table(rows).count("\n") == 5


def test_predeploy_warmup(smollm2: Path, tmp_path: Path, shm_folder: Path) -> None:
    """A replica that is asked before it is warm refuses connections; the first answer that it gives is a hit."""
    rows, problems = predeploy_warmup.run(tmp_path, shm_folder, smollm2)

    assert not problems
    assert rows[1].tokens["host"] >= 1_900
    assert (tmp_path / "ready.json").exists()


def test_cross_replica(smollm2: Path, tmp_path: Path, shm_folder: Path) -> None:
    """C07: what one replica computed, root first, serves another; refs promote and take back."""
    rows, problems = cross_replica.run(tmp_path, shm_folder, smollm2)

    assert not problems
    assert all(row.tokens["computed"] < rows[0].tokens["computed"] / 2 for row in rows[1:])
