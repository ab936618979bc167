"""Memory storage, bare and behind retries over a storage that fails: the suite can't tell."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvsnap.storage import LocalStorage, MemoryStorage, RetryPolicy, RetryStorage, Storage
from kvsnap.testing import Fault, FaultyStorage, StorageSuite

PATIENT = RetryPolicy(tries=60, first_pause_s=0, longest_pause_s=0)


class TestMemoryStorage(StorageSuite):
    @pytest.fixture
    def storage(self) -> Storage:
        return MemoryStorage()


class TestRetryStorageOverFaults(StorageSuite):
    """Every third call fails, half of the failures after the effect; nobody notices."""

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        chance = (Fault.ERROR_BEFORE, Fault.ERROR_AFTER, Fault.DROP, Fault.SLOW_DOWN, Fault.TRUNCATE)
        faulty = FaultyStorage(LocalStorage(tmp_path / "root"), rate=0.33, seed=7, chance=chance)
        return RetryStorage(faulty, PATIENT, rng=random.Random(1))
