"""What the engine tests share: models, and a folder in shared memory for the DRAM tiers' files.

An engine takes half a minute to start, so tests share one wherever they can (module-scoped fixtures), and each
test uses prompts of its own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.build_model import SMOLLM2, TINY, ensure
from tools.serving import SHM


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """Four layers of random weights: whatever is wrong in its KV shows in its output, and it is fast."""
    return ensure(TINY)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct."""
    return ensure(SMOLLM2)


@pytest.fixture(scope="module")
def shm_folder() -> Iterator[Path]:
    """A folder in shared memory that no other test uses."""
    with tempfile.TemporaryDirectory(prefix="kvsnap-test-", dir=SHM) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a module's engines keep caches, logs and runtime directories."""
    return tmp_path_factory.mktemp("engine")
