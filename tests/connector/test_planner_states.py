"""Random lives of an engine: whatever happens in whatever order, no block holds a wrong byte.

Invariants 1 (no wrong hit), 2 (no hang), 6 (prefix-closed) and 8 (killed at any instant)
at once. The toy engine compares every block of every running request after every step.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvsnap.cache import CacheOptions
from kvsnap.index import Chunk
from tests.connector.toy_engine import ToyEngine, ToyRequest, request
from tests.disk_fakes import make_namespace

CHUNK, BLOCK = 64, 16


def prompt(family: int, shared: int, length: int) -> list[int]:
    """A prompt whose first `shared` tokens are those of all its family."""
    own = random.Random(family * 1000 + shared)
    return [
        random.Random(family * 100_000 + i).randrange(50_000) if i < shared else own.randrange(50_000)
        for i in range(length)
    ]


class EngineLife(RuleBasedStateMachine):
    """One cache directory and DRAM directory, one engine at a time."""

    persist = "auto"
    with_disk = True

    def __init__(self) -> None:
        super().__init__()
        self.dir = Path(tempfile.mkdtemp(prefix="kvsnap-life-"))
        (self.dir / "shm").mkdir()
        self.count = 0
        self.engine: ToyEngine

    @initialize(prefix_caching=st.booleans(), ranks=st.sampled_from([1, 2]), slots=st.integers(3, 12))
    def start(self, prefix_caching: bool, ranks: int, slots: int) -> None:
        self.namespace = make_namespace(ranks=ranks, page=(2, 8), layers=1)
        self.prefix_caching, self.slots = prefix_caching, slots
        self._start()

    def _start(self) -> None:
        self.engine = ToyEngine(
            self.namespace,
            self.dir / "cache",
            self.dir / "shm",
            slots=self.slots,
            num_blocks=40,
            step_tokens=96,
            prefix_caching=self.prefix_caching,
            options=CacheOptions(persist=self.persist, shard_seconds=0.0, num_readers=2),
            disk_cap=(1 << 26) if self.with_disk else None,
        )

    @rule(
        family=st.integers(0, 2),
        shared=st.sampled_from([0, 20, 64, 100, 130, 200]),
        extra=st.integers(1, 120),
        salt=st.sampled_from([None, None, None, "x"]),
        output=st.sampled_from([1, 1, 3, 40]),
    )
    def submit(self, family: int, shared: int, extra: int, salt: str | None, output: int) -> None:
        self.count += 1
        tokens = prompt(family, shared, shared + extra)
        self.engine.submit(request(f"r{self.count}", tokens, salt=salt, max_tokens=output))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    # What runs at a given moment depends on the reading threads, so nothing is drawn from it.

    @rule(which=st.integers(0, 11))
    def abort(self, which: int) -> None:
        alive = self.engine.running + self.engine.waiting
        if alive:
            self.engine.abort(alive[which % len(alive)])

    @rule(which=st.integers(0, 11))
    def preempt(self, which: int) -> None:
        if self.engine.running:
            self.engine.preempt(self.engine.running[which % len(self.engine.running)])

    @rule(tier=st.sampled_from(["dram", "disk", "all"]))
    def clear(self, tier: str) -> None:
        self.engine.cache.clear(tier)

    @rule()
    def flush(self) -> None:
        self.engine.cache.flush(0.2)

    @rule(of=st.sampled_from([0, 0, 2, 5]))
    def let_loads_fail(self, of: int) -> None:
        """From here on one load in `of` fails; 0: none."""
        rng = random.Random(of)
        self.engine.fails_load = lambda rank, block_ids: of > 0 and rng.randrange(of) == 0

    @rule()
    def forget_own_cache(self) -> None:
        """The engine's own prefix cache is emptied: what it needs next comes from kvsnap."""
        self.engine.reset(connector=False)

    @rule(graceful=st.booleans())
    def restart(self, graceful: bool) -> None:
        if graceful:
            self.engine.stop()
        else:
            self.engine.kill()
        self._start()

    @invariant()
    def tiers_are_prefix_closed(self) -> None:
        if not hasattr(self, "engine"):
            return
        with self.engine.cache.lock:
            for chunk in self.engine.cache.residency.index:
                check_closed(chunk)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self._drain()
            self.engine.kill()
        shutil.rmtree(self.dir, ignore_errors=True)

    def _drain(self) -> None:
        """Everything ends, and then nothing is held any more."""
        steps = 0
        while self.engine.waiting or self.engine.running:
            if not self.engine.step_makes_progress():
                victim = max(self.engine.running + self.engine.waiting, key=_size)
                self.engine.abort(victim)
            steps += 1
            assert steps < 5000, "a request hangs"
        cache = self.engine.cache
        cache.flush(5.0)
        cache.poll()
        with cache.lock:
            held = [s for s in range(cache.residency.num_slots) if cache.residency.has_ops(s)]
            assert not cache.has_pending_copies
        assert not held or cache.promoter.num_pending, f"slots {held} are held for ever"


class LifeWithNewWeights(EngineLife):
    """DRAM only, with resets after which all KV is different: what was stored before must never come back."""

    persist = "none"
    with_disk = False

    @rule(preempt=st.booleans())
    def new_weights(self, preempt: bool) -> None:
        self.engine.reset(preempt=preempt)
        self.engine.change_weights()

    @rule(graceful=st.booleans())
    def restart(self, graceful: bool) -> None:
        version = self.engine.version
        self.engine.kill()
        self._start()
        self.engine.version = version


def check_closed(chunk: Chunk) -> None:
    """Invariant 6 for one chunk."""
    parent = chunk.parent
    if parent is not None:
        assert chunk.slot < 0 or parent.slot >= 0, "a chunk is in DRAM without its parent"
        assert chunk.shard is None or parent.shard is not None, "a chunk is on disk without its parent"


def _size(req: ToyRequest) -> int:
    return req.num_tokens


_settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = _settings
TestLifeWithNewWeights = LifeWithNewWeights.TestCase
TestLifeWithNewWeights.settings = _settings
