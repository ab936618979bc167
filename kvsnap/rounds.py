"""Rounds: the same work again and again at a jittered pace, until somebody says stop.

Whoever waits the same time comes back at the same time; a thousand hosts that follow one ref, or several leaders that
export to it, spread by waiting a random share more or less. After failures the pauses grow.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

from kvsnap.errors import KvsnapError

JITTER = 0.2
"""Share by which a pause is longer or shorter than it would be."""


class StoppedError(KvsnapError):
    """Somebody said stop; what is done so far is valid."""


class Stop:
    """Says stop to work that may be in the middle of something."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def is_set(self) -> bool:
        """Whether somebody has said it."""
        return self._event.is_set()

    def set(self) -> None:
        """Say it. May be called by a signal handler."""
        self._event.set()

    def check(self) -> None:
        """Raises StoppedError if somebody has said it."""
        if self._event.is_set():
            raise StoppedError("stopped")

    def sleep(self, seconds: float) -> None:
        """Like `time.sleep`, but raises StoppedError as soon as somebody says stop."""
        if self._event.wait(seconds):
            raise StoppedError("stopped")


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to wait between rounds."""

    interval_s: float
    """From the end of a round to the start of the next one."""
    longest_s: float = 900.0
    """To this the pause grows when rounds fail one after another (or `interval_s`, if that is longer)."""
    rng: random.Random = field(default_factory=random.Random)

    def pause_s(self, failures: int) -> float:
        """How long to wait now, after so many failures in a row."""
        base = self.interval_s
        if failures > 1:
            base = min(base * 2 ** min(failures - 1, 16), max(self.longest_s, base))
        return base * self.rng.uniform(1 - JITTER, 1 + JITTER)
