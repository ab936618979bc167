"""Nothing that goes wrong in kvsnap reaches vLLM (invariant 2)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_ERRORS = 20
"""After so many the connector turns itself off: something is broken, not unlucky."""


def is_strict() -> bool:
    """Whether tests want to see what went wrong."""
    return os.environ.get("KVSNAP_STRICT") == "1"


class Guard:
    """Counts what went wrong in hooks, logs it once per kind, and turns the connector off after too much of it."""

    def __init__(self) -> None:
        self.num_errors = 0
        self.off_reason: str | None = None
        self.on_off: Callable[[str], None] | None = None
        """Told the reason when the connector turns itself off."""
        self._seen: set[tuple[str, type[BaseException]]] = set()

    @property
    def is_off(self) -> bool:
        """Whether the connector does nothing any more."""
        return self.off_reason is not None

    def call(self, hook: str, action: Callable[[], T], neutral: T) -> T:
        """`action()`, or `neutral` if it raises or the connector is off."""
        if self.is_off:
            return neutral
        try:
            return action()
        except Exception as error:
            self.failed(hook, error)
            return neutral

    def failed(self, hook: str, error: Exception) -> None:
        """Count one failure; raises it in strict mode only."""
        self.num_errors += 1
        kind = hook, type(error)
        if kind not in self._seen:
            self._seen.add(kind)
            log.error("kvsnap: %s failed, its answer is a miss (said once)", hook, exc_info=error)
        if self.num_errors >= MAX_ERRORS:
            self.turn_off(f"{self.num_errors} errors, the last one in {hook}: {error}")
        if is_strict():
            raise error

    def turn_off(self, reason: str) -> None:
        """Do nothing from now on, and say why, once."""
        if self.off_reason is None:
            self.off_reason = reason
            log.warning("kvsnap: turned off: %s", reason)
            if self.on_off is not None:
                self.on_off(reason)
