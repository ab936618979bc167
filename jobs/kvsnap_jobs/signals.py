"""SIGTERM and SIGINT as a request to come to an end, for commands that run until they are told."""

from __future__ import annotations

import os
import signal
import sys
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


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the work in good order, as Ctrl-C does; then the process ends by the signal.

    Without a handler the first process of a container never hears of it. Nor can it end by a signal: it exits with 143.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    is_ended = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_ended
        is_ended = True
        signal.signal(signal.SIGTERM, before)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        if is_ended:
            print("kvsnap: ended by SIGTERM before it was done", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
