"""What every test shares."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from kvsnap.namespace import Namespace
from tests.snapshot_fakes import filled_cache

# The same examples in every run of CI: new ones are for people to find, not for a merge to fail on.
# And no deadline for one example, which on a busy machine says nothing about the code.
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
hypothesis.settings.register_profile("people", deadline=None)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "people")

pytest.register_assert_rewrite("kvsnap.testing")


VLLM_USERS = tuple(f"test_{name}.py" for name in ("connector", "contract", "example_flags", "interleavings", "stats"))
"""Run in one process of those of `-n`, so that the others needn't import vLLM."""
FORKS = ("test_kills.py", "test_disk_crash.py")
"""Fork hundreds of times: meanwhile, in a process that is still small."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is long and can't be shared out comes first."""
    items.sort(key=lambda item: (item.path.name not in VLLM_USERS, item.path.name not in FORKS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A process of `-n` takes a file at a time, or one test of those that fork."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    def scope(nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path.endswith(VLLM_USERS):
            return "vllm"
        return nodeid if path.endswith(FORKS) else path

    config.option.loadscopereorder = False
    scheduling: Any = LoadScopeScheduling(config, log)
    scheduling._split_scope = scope
    return scheduling


@pytest.fixture(scope="session")
def vllm() -> None:
    """For tests that import vLLM, which takes ten seconds: they do it when they run, never at collection.

    A process without it also forks faster, and tests of crashes do that hundreds of times.
    """
    pytest.importorskip("vllm", exc_type=ImportError)


@pytest.fixture(scope="session")
def _runtime_dirs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """New paths. `mktemp` would list all directories of the session, for every test."""
    base = tmp_path_factory.mktemp("run")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def own_runtime_dir(_runtime_dirs: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or leaves anything in, the runtime directory of the user who runs it."""
    path = next(_runtime_dirs)
    path.mkdir(mode=0o700)
    monkeypatch.setenv("KVSNAP_RUNTIME_DIR", str(path))
    return path


@pytest.fixture(autouse=True)
def _without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a killed process loses nothing that it has written; only a power cut does, which no test can tell."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache directory; there is something in it for tests that also take `ns`."""
    return tmp_path / "cache"


@pytest.fixture
def ns(cache: Path) -> Namespace:
    """What the cache directory was filled for."""
    return filled_cache(cache)


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """Where a local repository may be made."""
    return tmp_path / "repo"
