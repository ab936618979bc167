"""Send prompts in parallel, bounded in time as a whole.

The first prompt of a group goes ahead alone, the others of it follow once it is done: what they share is computed
once. At the deadline the caller goes on at once, whatever hangs; workers are daemons.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kvsnap.warmup.server import FATAL_STATUSES
from kvsnap.warmup.transport import RequestError


class Pass:
    """One run over groups of prompts (numbers).

    Args:
        work: Does one prompt; called by several threads. A RequestError fails this prompt, or the whole pass if
            it says that no other prompt can fare better.
        hang_up: Ends what `work` waits for; called at the deadline.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[int]],
        work: Callable[[int], None],
        *,
        concurrency: int,
        hang_up: Callable[[], None],
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.failures: dict[int, RequestError] = {}
        """Why single prompts failed."""
        self.fatal: BaseException | None = None
        """Why the pass ended early."""
        self.is_late = False
        """The deadline ended it."""
        self._followers = {members[0]: list(members[1:]) for members in groups if members}
        self._ready = deque(self._followers)
        self._left = sum(len(members) for members in groups)
        self._total = self._left
        self._work = work
        self._hang_up = hang_up
        self._progress = progress
        self._threads = max(1, min(concurrency, self._left))
        self._changed = threading.Condition()
        self._stopping = False

    def run(self, deadline: float | None) -> None:
        """Do all of it, or what is possible until `deadline` (monotonic)."""
        for number in range(self._threads):
            threading.Thread(target=self._run, name=f"kvsnap-warmup-{number}", daemon=True).start()
        try:
            with self._changed:
                while self._left and self.fatal is None:
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        self.is_late = True
                        break
                    self._changed.wait(0.1 if left is None else min(left, 0.1))
                    if self._progress is not None:
                        self._progress(self._total - self._left, self._total)
                self._stopping = True
                self._changed.notify_all()
                is_whole = not self._left
        except BaseException:
            self._stopping = True
            self._hang_up()
            raise
        if not is_whole:
            self._hang_up()

    def _run(self) -> None:
        while (number := self._next()) is not None:
            error: BaseException | None = None
            try:
                self._work(number)
            except BaseException as caught:  # whatever it is, the caller must hear of it
                error = caught
            with self._changed:
                if self._stopping:
                    return  # too late to count
                if isinstance(error, RequestError) and not _is_fatal(error):
                    self.failures[number] = error
                elif error is not None:
                    self.fatal = error
                self._ready.extend(self._followers.pop(number, ()))
                self._left -= 1
                self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            while not self._stopping and not self._ready and self._left:
                self._changed.wait()
            if self._stopping or not self._ready:
                return None
            return self._ready.popleft()


def _is_fatal(error: RequestError) -> bool:
    """Whether all prompts would fail like this: no access, nothing there, or nobody answers any more."""
    return error.status in FATAL_STATUSES or (error.status is None and not error.is_timeout)
