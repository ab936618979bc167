"""What every test shares."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# The same examples in every run of CI: new ones are for people to find, not for a merge to fail on.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

pytest.register_assert_rewrite("kvsnap.testing")


@pytest.fixture(autouse=True)
def own_runtime_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or leaves anything in, the runtime directory of the user who runs it."""
    path = tmp_path_factory.mktemp("run")
    path.chmod(0o700)
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(path))
    return path
