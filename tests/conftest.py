"""What every test shares."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.register_assert_rewrite("kvsnap.testing")


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or leaves anything in, the runtime directory of the user who runs it."""
    path = tmp_path_factory.mktemp("run")
    path.chmod(0o700)
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(path))
    return path
