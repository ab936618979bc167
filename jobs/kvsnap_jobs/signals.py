"""SIGTERM and SIGINT as a request to come to an end, for commands that run until they are told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvsnap.rounds import Stop

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stopped_by_signals() -> Iterator[Stop]:
    """Inside, the first of these signals says stop; a second one ends the process as it always did."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        stop.set()

    for number in _SIGNALS:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
