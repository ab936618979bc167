"""Threads and levels: what is urgent goes first, and a wait is for one level only."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvsnap.work_queue import WorkQueue
from tests.waiting import SECONDS


@pytest.fixture
def queue() -> Iterator[WorkQueue]:
    queue = WorkQueue("test", 1, num_levels=3)
    yield queue
    queue.stop()


def test_the_most_urgent_goes_first_and_in_order(queue: WorkQueue) -> None:
    done: list[str] = []
    for level, names in ((2, "ef"), (0, "ab"), (1, "cd")):
        queue.add(level, [lambda name=name: done.append(name) for name in names])  # type: ignore[misc]

    queue.start()

    assert all(queue.wait(level, time.monotonic() + SECONDS) for level in range(3))
    assert "".join(done) == "abcdef"


def test_a_wait_is_for_its_level_only(queue: WorkQueue) -> None:
    gate, began = threading.Event(), threading.Event()
    queue.add(1, [lambda: None])
    queue.start()
    assert queue.wait(1, time.monotonic() + SECONDS)

    def hold() -> None:
        began.set()
        gate.wait(SECONDS)

    queue.add(2, [hold])
    assert began.wait(SECONDS)

    assert queue.wait(1, time.monotonic() + SECONDS)
    assert queue.count(2) == 1
    assert not queue.wait(2, time.monotonic() + 0.05)
    gate.set()
    assert queue.wait(2, time.monotonic() + SECONDS)


def test_a_stop_ends_whoever_waits(queue: WorkQueue) -> None:
    """Also where the threads never ran."""
    queue.add(0, [lambda: None])

    queue.stop()

    assert queue.wait(0, time.monotonic() + SECONDS)
    queue.start()
    assert queue.count(0) == 1
