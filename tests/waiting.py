"""Wait for what another thread does."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 30.0
"""Then it is called a hang; a busy machine needs some."""


def wait_for(condition: Callable[[], bool]) -> None:
    """Until a background thread has done its part.

    Raises:
        AssertionError: it did not in `SECONDS`.
    """
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)
