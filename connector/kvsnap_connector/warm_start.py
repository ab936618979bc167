"""Before the engine is ready, or beside it: imports the configured snapshot, promotes the hottest chunks into DRAM."""

from __future__ import annotations

import logging
import random
import threading
import time
from concurrent.futures import Future
from itertools import chain, repeat

from kvsnap.cache import TieredCache
from kvsnap.config import Config, parse_size
from kvsnap.errors import ConfigError, KvsnapError
from kvsnap.preload import Preload
from kvsnap.runtime import widen_affinity
from kvsnap.tiers.disk import DiskTier
from kvsnap_connector.snapshot import import_into, may_pass, open_remote
from kvsnap_connector.tiers import dram_budget

_MIB = 1 << 20
PROGRESS_S = 5.0
RETRY_PAUSES_S = (5.0, 15.0, 60.0, 300.0)
"""Between tries to import in the background; give or take a half, since replicas start together."""


class WarmStart:
    """What `snapshot` and the `preload` options ask for.

    Args:
        cache: Its threads must run.
        num_engines: Engines of the server that share the DRAM budget.
    """

    def __init__(self, cache: TieredCache, config: Config, *, num_engines: int, log: logging.Logger) -> None:
        self._cache = cache
        self._config = config
        self._num_engines = num_engines
        self._log = log

    def run(self) -> None:
        """Import and preload; after `preload_seconds`, or at once with `preload: background`, they go on by themselves.

        Raises:
            ConfigError: `snapshot_required` and the snapshot can't be used.
        """
        seconds = 0.0 if self._config.preload == "background" else self._config.preload_seconds
        deadline = time.monotonic() + seconds
        if self._config.snapshot is not None:
            self._use_snapshot(self._config.snapshot, deadline)
        self._preload(max(0.0, deadline - time.monotonic()))

    # -- the snapshot ----------------------------------------------------------------

    def _use_snapshot(self, url: str, deadline: float) -> None:
        disk, is_background = self._cache.disk, self._config.preload == "background"
        running: Future[None] | None = None
        try:
            if disk is None:
                raise ConfigError("the disk tier is off, and that is where a snapshot goes")
            if not is_background:
                running = self._import_until(deadline, url, disk)
                is_background = running is not None
            if is_background:
                self._serve_from(url, disk)
        except (KvsnapError, OSError) as error:
            if self._config.snapshot_required:
                raise ConfigError(f"snapshot {url} can't be used, and snapshot_required is set: {error}") from error
            self._log.warning("kvsnap: snapshot %s can't be used, starting without it: %s", url, error)
            is_background = is_background and may_pass(error)
        if is_background and disk is not None:
            args = (url, disk, running)
            threading.Thread(target=self._import_later, args=args, name="kvsnap-import", daemon=True).start()

    def _serve_from(self, url: str, disk: DiskTier) -> None:
        self._cache.remote = open_remote(url, disk)
        self._log.info("kvsnap: snapshot %s: serving from it while it is imported", url)

    def _import(self, url: str, disk: DiskTier) -> None:
        self._log.info("kvsnap: snapshot %s: %s", url, import_into(url, disk, ProgressLines(self._log, "import")))
        self._cache.writer.read_directory()

    def _import_until(self, deadline: float, url: str, disk: DiskTier) -> Future[None] | None:
        """Import; None if that is done, else, at the deadline (monotonic), what it will come to."""
        finished: Future[None] = Future()

        def work() -> None:
            widen_affinity()
            try:
                self._import(url, disk)
                finished.set_result(None)
            except BaseException as error:
                finished.set_exception(error)

        threading.Thread(target=work, name="kvsnap-import", daemon=True).start()
        try:
            finished.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if finished.done():
                raise
            self._log.warning(
                "kvsnap: snapshot %s is not imported within preload_seconds (%g s): starting with what is here, the "
                "rest follows in the background",
                url,
                self._config.preload_seconds,
            )
            return finished
        return None

    def _import_later(self, url: str, disk: DiskTier, running: Future[None] | None) -> None:
        """Import and preload beside the engine; where a store is down, again until it is back."""
        widen_affinity()
        for pause_s in chain(RETRY_PAUSES_S, repeat(RETRY_PAUSES_S[-1])):
            try:
                if self._cache.remote is None:
                    self._serve_from(url, disk)
                if running is None:
                    self._import(url, disk)
                else:
                    begun, running = running, None
                    begun.result()
                self._preload(0.0)
                self._cache.remote = None  # not closed: a fetch may be under way; it goes with the last one
                return
            except Exception as error:  # what is there is a valid part; the rest is still fetched chunk by chunk
                if not may_pass(error):
                    self._log.warning("kvsnap: the import of %s stopped: %s; chunks are fetched one by one", url, error)
                    return
                self._log.info("kvsnap: the import of %s stopped: %s; again in about %.0f s", url, error, pause_s)
            ends_at = time.monotonic() + random.uniform(0.5, 1.5) * pause_s
            while time.monotonic() < ends_at:
                if self._cache.is_closed:
                    return
                time.sleep(min(1.0, pause_s))

    # -- the preload -----------------------------------------------------------------

    def _preload(self, seconds: float) -> None:
        config = self._config
        if config.preload == "off" or self._cache.disk is None:
            return
        budget = dram_budget(config, self._num_engines)
        most = budget if config.preload_bytes is None else parse_size(config.preload_bytes, of=budget)
        lines = ProgressLines(self._log, "preload")
        begun = Preload(self._cache, most)
        if begun.wait(seconds, lines):
            lines.end(*begun.loaded())
            return
        if seconds > 0:
            self._log.info("kvsnap: preload: not through after %.0f s, the rest follows in the background", seconds)

        def follow() -> None:
            begun.wait(float("inf"), lines)
            if not self._cache.is_closed:
                lines.end(*begun.loaded())

        threading.Thread(target=follow, name="kvsnap-preload", daemon=True).start()


class ProgressLines:
    """Called with bytes and bytes in all, logs every few seconds how far something is, how fast, and what remains."""

    def __init__(self, log: logging.Logger, what: str) -> None:
        self._log = log
        self._what = what
        self._started = time.monotonic()
        self._next = self._started + PROGRESS_S

    def __call__(self, done: int, in_all: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PROGRESS_S
        took = max(now - self._started, 1e-6)
        self._log.info(
            "kvsnap: %s: %d of %d MiB, %d %%, %.2f GB/s, %s left",
            self._what,
            done // _MIB,
            in_all // _MIB,
            100 * done // max(in_all, 1),
            done / took / 1e9,
            f"about {(in_all - done) * took / done:.0f} s" if done else "all of it is",
        )

    def end(self, chunks: int, nbytes: int) -> None:
        """The line with the result of a preload."""
        took = max(time.monotonic() - self._started, 1e-6)
        self._log.info(
            "kvsnap: preloaded %d chunks, %d MiB, in %.2f s (%.2f GB/s)",
            chunks,
            nbytes // _MIB,
            took,
            nbytes / took / 1e9,
        )
