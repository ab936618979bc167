"""The scheduler half: the planner, the tiers, and what surrounds them.

Owns the cache, the control socket and the engine's record in the cache directory; does
the start-up in the order that vLLM gives: made in the connector's constructor, started
once all workers have answered, ready when `start` returns.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvsnap.config import Config
from kvsnap.control import ControlServer
from kvsnap.errors import ConfigError, KvsnapError
from kvsnap.namespace import Namespace
from kvsnap.runtime import process_start_time, runtime_dir
from kvsnap.tiers.dram import TierInfo
from kvsnap.tiers.engines import EngineRecord, remove_record
from kvsnap_connector.metadata import StepPlan, WorkerReport
from kvsnap_connector.planner import Planner, Scheduled
from kvsnap_connector.tiers import open_cache
from kvsnap_connector.warm_start import WarmStart

_MIB = 1 << 20


class SchedulerHalf:
    """One engine's brain; see `planner.Planner` for what it decides.

    Raises:
        ConfigError: the operator's configuration is wrong.
    """

    def __init__(
        self,
        *,
        namespace: Namespace,
        config: Config,
        engine_id: str,
        world_size: int,
        may_store: bool = True,
        may_load: bool = True,
        async_loads: bool = False,
        max_prompt_tokens: int = 8192,
        num_engines: int = 1,
        log: logging.Logger | None = None,
    ) -> None:
        self._log = log or logging.getLogger(__name__)
        self._namespace = namespace
        self._config = config
        self._engine_id = engine_id
        self._num_engines = num_engines
        self._control: ControlServer | None = None
        self._started = time.time()
        self.cache = open_cache(
            namespace,
            config,
            world_size=world_size,
            num_engines=num_engines,
            max_prompt_tokens=max_prompt_tokens,
        )
        self.planner = Planner(
            self.cache,
            may_store=may_store,
            may_load=may_load,
            async_loads=async_loads,
            load_policy=config.load_policy,
            lookup_seconds=config.lookup_seconds,
        )
        self.new_request = self.planner.new_request
        self.match = self.planner.match
        self.admitted = self.planner.admitted
        self.hit_sources = self.planner.hit_sources
        self.finished = self.planner.finished
        self.reset = self.planner.reset

    @property
    def tier(self) -> TierInfo | None:
        """What the workers map; None when kvsnap is off."""
        return None if self.off_reason else self.cache.dram.info

    @property
    def off_reason(self) -> str | None:
        """Why kvsnap does nothing; None while it works."""
        return self.planner.off_reason

    def start(self, answers: Mapping[int, str | None]) -> None:
        """All workers have answered: import the snapshot, preload, say what was found.

        Args:
            answers: Rank -> None if it has mapped the tier, else why not.

        Raises:
            ConfigError: `snapshot_required` and the snapshot can't be used.
        """
        bad = [f"rank {rank}: {reason}" for rank, reason in sorted(answers.items()) if reason is not None]
        if bad:
            self.planner.off_reason = "; ".join(bad)
            self.cache.close()
            return
        try:
            self.cache.start()
            WarmStart(self.cache, self._config, num_engines=self._num_engines, log=self._log).run()
            self._log_start()
            self._open_control()
        except BaseException:
            self.cache.close()  # so that the next engine finds the DRAM file without an owner
            raise

    @property
    def planned_seq(self) -> int:
        """Number of the newest plan."""
        return self.planner.seq

    def turn_off(self, reason: str) -> None:
        """Do nothing from now on; `kvsnap status` says why."""
        if self.planner.off_reason is None:
            self.planner.off_reason = reason
        self.cache.writer.stop_soon()

    def plan_step(self, scheduled: Sequence[Scheduled]) -> StepPlan:
        """See `Planner.plan_step`."""
        return self.planner.plan_step(scheduled)

    def step_done(self, reports: Sequence[WorkerReport] | None, load_errors: set[int]) -> None:
        """A step's output is back; `load_errors` are blocks that vLLM now computes itself."""
        if load_errors:
            self.cache.counts["blocks_not_loaded"] += len(load_errors)
        self.planner.step_done(reports or (), are_blocks_lost=bool(load_errors))

    def preempted(self, request_ids: Iterable[str]) -> None:
        """See `Planner.preempted`."""
        self.planner.preempted(request_ids)

    def take_stats(self) -> dict[str, int] | None:
        """See `Planner.take_stats`."""
        return self.planner.take_stats() or None

    def status(self) -> dict[str, Any]:
        """What `kvsnap status` shows of this engine."""
        return {
            "engine_id": self._engine_id,
            "pid": os.getpid(),
            "started": self._started,
            "model": self._namespace.human.get("model"),
            **self.planner.status(),
        }

    def shutdown(self) -> None:
        """Flush within `flush_seconds`, then close. Nothing depends on this being called."""
        if self._control is not None:
            self._control.close()
        if self.off_reason is None and not self._config.read_only:
            self.cache.flush(self._config.flush_seconds)
        if self.cache.disk is not None and not self._config.read_only:
            try:
                remove_record(self.cache.disk.dir, self._engine_id)
            except KvsnapError as error:
                self._log.warning("kvsnap: %s", error)
        self.cache.close()

    # -- start-up --------------------------------------------------------------------

    def _log_start(self) -> None:
        status = self.cache.status()
        dram, disk = status["dram"], status["disk"]
        self._log.info(
            "kvsnap: namespace %s; DRAM %d MiB in %d slots at %s, found %d chunks (%d MiB); disk %s, found %d chunks "
            "(%d MiB) in %d shards, cap %d MiB; chunks of %d tokens, smallest prefix that can hit: %d tokens",
            self._namespace.dirname,
            dram["bytes"] // _MIB,
            dram["slots"],
            dram["path"],
            dram["chunks"],
            dram["chunk_bytes"] // _MIB,
            self._config.cache_dir if self.cache.disk is not None else "off",
            disk["chunks"],
            disk["chunk_bytes"] // _MIB,
            disk["shards"],
            disk["cap_bytes"] // _MIB,
            self._namespace.chunk_tokens,
            self._namespace.layout.block_tokens,
        )

    def _open_control(self) -> None:
        """The socket and the record by which jobs find this engine. Without them it serves all the same."""
        if self.cache.disk is None:
            return
        name = hashlib.sha256(f"{self._engine_id}-{os.getpid()}".encode()).hexdigest()[:16]
        try:
            path = runtime_dir() / f"{name}.sock"
            self._control = ControlServer(
                path,
                {
                    "status": lambda args: self.status(),
                    "flush": lambda args: self.cache.flush(float(args.get("timeout_s", 600.0))),
                    "clear": lambda args: self._clear(str(args.get("tier", "all"))),
                },
            )
            if not self._config.read_only:
                self.cache.disk.register(
                    EngineRecord(
                        engine_id=self._engine_id,
                        pid=os.getpid(),
                        start=process_start_time(os.getpid()) or 0,
                        socket=str(path),
                        namespace=self._namespace.id(),
                        identity=self._namespace.identity.to_json(),
                        layout=self._namespace.layout_hash,
                        writer=self.cache.disk.writer.path.name if self.cache.disk.writer else "",
                    )
                )
        except (KvsnapError, OSError) as error:
            self._log.warning("kvsnap: no control socket: %s; kvsnap flush and status can't reach this engine", error)

    def _clear(self, tier: str) -> dict[str, int]:
        if tier not in ("dram", "disk", "all"):
            raise ConfigError(f"tier is {tier!r}, expected dram, disk or all")
        if tier != "dram" and self._config.read_only:
            raise ConfigError("this engine is read_only: it may not clear the disk tier")
        return self.cache.clear(tier)
