"""examples/s3_snapshot runs as its README says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("moto.server")
pytest.importorskip("cryptography")

SCRIPT = Path(__file__).parent.parent / "examples" / "s3_snapshot" / "run.py"


def test_a_snapshots_life_on_s3(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"TMPDIR": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/dev/null"}

    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False, env=environment)

    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("sent       1 shards", "signed by release", "not signed, and a signature is required", "good: "):
        assert text in done.stdout, done.stdout
    assert list(tmp_path.iterdir()) == []
