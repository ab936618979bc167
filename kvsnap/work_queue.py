"""Threads and what they have to do, in levels: the next act is always of the most urgent level that has one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvsnap.runtime import widen_affinity

Act = Callable[[], None]
"""Must not raise: whoever queues it sees to its failures."""

_STOP_SECONDS = 1.0


class WorkQueue:
    """A few daemon threads with queues.

    Args:
        name: Of the threads; a number follows.
        num_levels: Level 0 is the most urgent one.
    """

    def __init__(self, name: str, num_threads: int, num_levels: int = 1) -> None:
        self.num_threads = num_threads
        self._name = name
        self._queues: list[deque[Act]] = [deque() for _ in range(num_levels)]
        self._num_running = [0] * num_levels
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def start(self) -> None:
        """Start the threads, once."""
        with self._changed:
            if self._threads or self._stopping:
                return
            for number in range(self.num_threads):
                thread = threading.Thread(target=self._run, name=f"{self._name}-{number}", daemon=True)
                self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let what runs finish, within a second for each thread; what has not begun is dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=_STOP_SECONDS)

    def add(self, level: int, acts: Iterable[Act]) -> None:
        """Queue acts, in order."""
        with self._changed:
            self._queues[level].extend(acts)
            self._changed.notify_all()

    def count(self, level: int) -> int:
        """Acts of a level that are not done yet."""
        return len(self._queues[level]) + self._num_running[level]

    def wait(self, level: int, deadline: float) -> bool:
        """Wait until nothing of the level is left, or the threads stop; False if `deadline` (monotonic) comes first."""
        with self._changed:
            while self.count(level) and not self._stopping:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _run(self) -> None:
        widen_affinity()
        while True:
            with self._changed:
                while not (any(self._queues) or self._stopping):
                    self._changed.wait()
                if self._stopping:
                    return
                level = next(level for level, queue in enumerate(self._queues) if queue)
                act = self._queues[level].popleft()
                self._num_running[level] += 1
            try:
                act()
            finally:
                with self._changed:
                    self._num_running[level] -= 1
                    self._changed.notify_all()
