"""The warm-up: render every prompt, have each computed once, then prove by a second request that all are hits."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from kvsnap.engines import FLUSH_TIMEOUT_S
from kvsnap.errors import ConfigError, KvsnapError
from kvsnap.warmup import grouping
from kvsnap.warmup.engine_tiers import TierBytes, namespace_in_use, tier_bytes
from kvsnap.warmup.estimate import estimate, resident_keys
from kvsnap.warmup.findings import Findings
from kvsnap.warmup.outcome import Outcome, Summary
from kvsnap.warmup.passes import Pass
from kvsnap.warmup.prompts import Prompt
from kvsnap.warmup.report import WarmupPlan, WarmupReport
from kvsnap.warmup.server import Answer, Counters, Server
from kvsnap.warmup.transport import RequestError
from kvsnap.warmup.volatile import clock_calls

Progress = Callable[[str, int, int], None]
"""Called now and then with what is done, how many prompts are done, and how many there are."""

CLOCK_OFFSET_S = 400 * 86_400.0 + 3 * 3600 + 25 * 60 + 7
"""Another year, month, day, weekday, hour, minute and second."""
LEAST_FLUSH_S = 5.0
"""What was computed in time is worth so much more of it."""
NO_DETAILS = (
    "the server does not report cached tokens for each request (start it with --enable-prompt-tokens-details); its "
    "counters on /metrics are used instead, with one request at a time, and other traffic blurs them"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to warm up."""

    model: str | None = None
    """Name of the served model that prompts without one are for; the first one."""
    wait_s: float = 0.0
    """How long to wait for a server that isn't up."""
    concurrency: int = 8
    """Requests at once."""
    budget_s: float | None = None
    """All is over after so many seconds."""
    shard: tuple[int, int] | None = None
    """This worker's number, and how many there are."""
    shard_tokens: int = grouping.SHARD_TOKENS
    """Prompts that start with the same so many tokens stay on one worker."""
    block_tokens: int | None = None
    """Where the server doesn't tell."""
    prove_tiers: bool = False
    """Empty vLLM's own prefix cache before the proofs, so that they prove kvsnap's tiers."""
    cache_dir: Path | None = None
    """Ask its engines what they hold."""
    start: Callable[[float | None], None] | None = None
    """Starts the engine, within so many seconds."""
    set_clock: Callable[[float], None] | None = None
    """Moves the clock that chat templates see, where that is possible."""
    flush: Callable[[float], list[str]] | None = None
    """Has the engine write to disk what only its DRAM holds, at the end, within so many seconds; what it could not."""


class Warmup:
    """One warm-up of one server; `run` or `plan`, once.

    Args:
        now: The present, with a time zone.
    """

    def __init__(
        self,
        server: Server,
        prompts: Sequence[Prompt],
        options: Options,
        *,
        now: datetime,
        num_duplicates: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self._server = server
        self._options = options
        self._now = now
        self._progress = progress
        self._num_duplicates = num_duplicates
        self._started = time.monotonic()
        self._deadline = None if options.budget_s is None else self._started + options.budget_s
        server.deadline = self._deadline
        self._all = [Outcome(prompt) for prompt in prompts]
        self._groups: list[list[int]] = [[i] for i in range(len(prompts))]
        self._findings = Findings(now, 1)
        self._warnings: list[str] = []
        self._tiers_before: TierBytes | None = None
        self._counters_before: Counters | None = None
        self._by_counters = False
        self._is_late = False

    def plan(self) -> WarmupPlan:
        """Render only; what would be computed and stored.

        Raises:
            KvsnapError: the server can't be used.
        """
        self._prepare()
        mine = self._mine()
        if any(outcome.ids is None and outcome.error is None for outcome in mine):
            raise ConfigError(f"{self._server.transport.name} has no /tokenize, so nothing can be said beforehand")
        known = [(outcome.ids, outcome.prompt.salt) for outcome in mine if outcome.ids is not None]
        block_tokens = self._all[0].block_tokens
        tokens = grouping.distinct_tokens(known, block_tokens)
        size = None
        if (namespace := namespace_in_use(self._options.cache_dir)) is not None:
            directory, ns = namespace
            size = estimate(ns, resident_keys(directory, ns), known)
        summary = Summary.of(mine, needs_proof=False)
        return WarmupPlan(
            target=self._server.transport.name,
            model=self._server.model,
            num_prompts=len(mine),
            num_duplicates=self._num_duplicates,
            num_short=summary.fates.get("short", 0),
            num_failed=summary.fates.get("failed", 0),
            prompt_tokens=sum(len(ids) for ids, _ in known),
            store_tokens=tokens,
            resident_tokens=size.resident_tokens if size else None,
            compute_tokens=max(tokens - (size.resident_tokens if size else 0), 0),
            store_bytes=size.missing_bytes if size else None,
            shard=self._shard_text(),
            num_groups=len(self._groups),
            failures=tuple(summary.failures),
            volatile=self._findings.all(),
            warnings=tuple(self._warnings),
        )

    def run(self) -> WarmupReport:
        """Warm up, and prove it.

        Raises:
            KvsnapError: the server can't be used, or went away.
        """
        try:
            self._prepare()
            self._compute()
            self._prove()
        except RequestError as error:
            if not (error.is_timeout and self._deadline is not None and time.monotonic() >= self._deadline):
                raise
            if not self._is_late:
                self._warnings.append(f"the budget ran out: {error}")
            self._is_late = True
        return self._report()

    # -- steps -----------------------------------------------------------------------

    def _prepare(self) -> None:
        """Render all prompts, drop equal ones, group, take this worker's part."""
        if self._options.start is not None:
            self._options.start(None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0))
        self._server.connect(self._options.model, wait_s=self._options.wait_s)
        self._check_models()
        self._tiers_before = tier_bytes(self._options.cache_dir)
        block_tokens = self._find_block_tokens()
        self._findings = Findings(self._now, block_tokens)
        for outcome in self._all:
            outcome.block_tokens = block_tokens
        self._pass("render", [[i] for i in range(len(self._all))], self._render)
        self._check_late()
        self._check_template()
        self._drop_equal()
        self._groups = grouping.group([self._group_key(outcome) for outcome in self._all])
        if self._options.shard is not None:
            self._take_shard(*self._options.shard)

    def _compute(self) -> None:
        """The first request of each prompt."""
        groups = [[i for i in members if self._is_to_do(i)] for members in self._groups]
        groups = self._find_way([members for members in groups if members])
        self._pass("compute", groups, self._send_first)
        self._check_late()

    def _prove(self) -> None:
        """The second request, of all that were not resident; once more where it was no hit."""
        if self._options.prove_tiers and not self._server.reset_prefix_cache():
            raise ConfigError(
                "the server offers no /reset_prefix_cache (it needs VLLM_SERVER_DEV_MODE=1), or is busy; "
                "leave --prove-tiers out"
            )
        self._counters_before = self._server.counters()
        needs = [i for members in self._groups for i in members if self._needs_proof(self._all[i])]
        self._pass("prove", [[i] for i in needs], self._send_proof)
        self._check_late()
        missed = [i for i in needs if self._all[i].error is None and not self._all[i].is_proved]
        self._pass("prove again", [[i] for i in missed], self._send_proof)
        self._check_late()

    def _check_models(self) -> None:
        for outcome in self._all:
            model = outcome.prompt.model
            if model is not None and model not in self._server.models:
                raise ConfigError(
                    f"{outcome.prompt.source} is for model {model}, the server has {', '.join(self._server.models)}; "
                    "serve it under that name, or leave the name out"
                )

    def _find_block_tokens(self) -> int:
        found = self._options.block_tokens or self._server.block_tokens()
        if found is None and (namespace := namespace_in_use(self._options.cache_dir)) is not None:
            found = namespace[1].layout.block_tokens
        if found is None:
            raise ConfigError("the server does not tell its block size on /metrics; give it with --block-tokens")
        return found

    def _render(self, i: int) -> None:
        outcome = self._all[i]
        rendered = self._server.tokenize(outcome.prompt, with_pieces=True)
        if rendered is not None:
            self._findings.look_at(outcome.prompt, rendered)
            outcome.ids = rendered.token_ids

    def _check_template(self) -> None:
        """Does the chat template read the clock? By its text where the server shows it, else by trying."""
        chats = [o for o in self._all if "messages" in o.prompt.body and o.ids is not None]
        if not chats:
            return
        template = self._server.chat_template()
        if template is not None and (calls := clock_calls(template)):
            self._warnings.append(f"the chat template calls {', '.join(calls)}: what it writes changes by itself")
        set_clock = self._options.set_clock
        if set_clock is not None:
            set_clock(CLOCK_OFFSET_S)
            try:
                later = self._server.tokenize(chats[0].prompt)
            finally:
                set_clock(0.0)
        else:
            later = self._server.tokenize(chats[0].prompt)
        if later is not None:
            self._findings.compare(chats[0].prompt, chats[0].ids or (), later.token_ids)

    def _drop_equal(self) -> None:
        """Prompts that were written differently and are the same tokens, as far as /tokenize could tell."""
        kept: dict[Hashable, Outcome] = {}
        for i, outcome in enumerate(self._all):
            key: Hashable = i
            if outcome.ids is not None and not outcome.prompt.has_media:
                rest = json.dumps(outcome.prompt.beyond_tokenize, sort_keys=True)
                key = (outcome.ids, rest, outcome.prompt.salt, outcome.prompt.model or self._server.model)
            kept.setdefault(key, outcome)
        self._num_duplicates += len(self._all) - len(kept)
        self._all = list(kept.values())

    def _group_key(self, outcome: Outcome) -> Hashable:
        if outcome.ids is None:
            return outcome.prompt.key()
        model = outcome.prompt.model or self._server.model
        return grouping.group_key(outcome.ids, salt=outcome.prompt.salt, model=model, tokens=self._options.shard_tokens)

    def _take_shard(self, index: int, count: int) -> None:
        if any(outcome.ids is None and outcome.error is None for outcome in self._all):
            raise ConfigError(f"{self._server.transport.name} has no /tokenize, so prompts can't be split into shards")
        if len(self._groups) < count:
            self._warnings.append(
                f"there are {len(self._groups)} groups of prompts with a common start for {count} shards, so some have "
                "nothing to do"
            )
        self._groups = grouping.shard(self._groups, index, count)

    def _find_way(self, groups: list[list[int]]) -> list[list[int]]:
        """Send prompts one by one until an answer shows whether its usage tells cached tokens; the rest is returned."""
        while groups:
            i = groups[0].pop(0)
            groups = [members for members in groups if members]
            self._pass("compute", [[i]], self._send_probe)
            self._check_late()
            if self._all[i].first is not None:
                break
        if self._by_counters:
            self._warnings.append(NO_DETAILS)
        return groups

    def _send_probe(self, i: int) -> None:
        before = self._server.counters()
        answer = self._server.send(self._all[i].prompt)
        if answer.cached_tokens is None:
            if before is None:
                raise ConfigError(
                    "the server tells cached tokens neither for a request (--enable-prompt-tokens-details) nor on "
                    "/metrics, so nothing can be proved"
                )
            self._by_counters = True
            answer = self._counted(answer, before)
        self._all[i].first = answer

    def _send_first(self, i: int) -> None:
        self._all[i].first = self._send(self._all[i].prompt)

    def _send_proof(self, i: int) -> None:
        self._all[i].proof = self._send(self._all[i].prompt)

    def _send(self, prompt: Prompt) -> Answer:
        before = self._server.counters() if self._by_counters else None
        answer = self._server.send(prompt)
        return answer if before is None or answer.cached_tokens is not None else self._counted(answer, before)

    def _counted(self, answer: Answer, before: Counters) -> Answer:
        cached = self._server.cached_by_counters(before, answer.prompt_tokens)
        return dataclasses.replace(answer, cached_tokens=cached)

    def _pass(self, label: str, groups: Sequence[Sequence[int]], work: Callable[[int], None]) -> None:
        if not groups or self._is_late:
            return
        progress = self._progress
        run = Pass(
            groups,
            work,
            concurrency=1 if self._by_counters else self._options.concurrency,
            hang_up=self._server.transport.hang_up,
            progress=None if progress is None else lambda done, total: progress(label, done, total),
        )
        run.run(self._deadline)
        self._is_late = run.is_late
        for number, error in run.failures.items():
            if not (error.is_timeout and self._deadline is not None and time.monotonic() >= self._deadline):
                self._all[number].error = str(error)
        if run.fatal is not None:
            raise run.fatal

    def _check_late(self) -> None:
        if self._is_late:
            raise RequestError("the budget ran out", is_timeout=True)

    # -- what is known ---------------------------------------------------------------

    def _mine(self) -> list[Outcome]:
        return [self._all[i] for members in self._groups for i in members]

    def _is_to_do(self, i: int) -> bool:
        return self._all[i].error is None and not self._all[i].is_short

    def _needs_proof(self, outcome: Outcome) -> bool:
        if outcome.first is None or outcome.error is not None or outcome.is_short:
            return False
        return self._options.prove_tiers or not outcome.was_resident

    def _flush_seconds(self) -> float:
        if self._deadline is None:
            return FLUSH_TIMEOUT_S
        return min(max(self._deadline - time.monotonic(), LEAST_FLUSH_S), FLUSH_TIMEOUT_S)

    def _sources(self) -> dict[str, int] | None:
        """Where the proofs' cached tokens came from."""
        before = self._counters_before
        if before is None or self._is_late:
            return None
        try:
            now = self._server.counters()
        except KvsnapError:
            return None
        if now is None:
            return None
        moved = {source: int(value - before.by_source.get(source, 0.0)) for source, value in now.by_source.items()}
        return {source: tokens for source, tokens in sorted(moved.items()) if tokens}

    def _shard_text(self) -> str | None:
        return None if self._options.shard is None else "{}/{}".format(*self._options.shard)

    def _report(self) -> WarmupReport:
        mine = self._mine()
        if self._options.flush is not None:
            self._warnings += self._options.flush(self._flush_seconds())
        for outcome in mine:
            if outcome.first and outcome.proof and outcome.first.token_ids and outcome.proof.token_ids:
                self._findings.compare(outcome.prompt, outcome.first.token_ids, outcome.proof.token_ids)
        summary = Summary.of(mine, needs_proof=self._options.prove_tiers)
        fates = summary.fates
        if fates.get("short"):
            self._warnings.append(
                f"{fates['short']} prompts are shorter than one block of {mine[0].block_tokens} tokens: nothing to keep"
            )
        is_cold = self._is_late or any(fates.get(fate) for fate in ("failed", "unproved", "left"))
        now, before = tier_bytes(self._options.cache_dir), self._tiers_before
        return WarmupReport(
            target=self._server.transport.name,
            model=self._server.model,
            state="cold" if is_cold else "warm",
            num_prompts=len(mine),
            num_duplicates=self._num_duplicates,
            num_warmed=fates.get("warmed", 0),
            num_resident=fates.get("resident", 0),
            num_short=fates.get("short", 0),
            num_failed=fates.get("failed", 0),
            num_unproved=fates.get("unproved", 0),
            num_left=fates.get("left", 0),
            prompt_tokens=summary.prompt_tokens,
            computed_tokens=summary.computed_tokens,
            proved_tokens=summary.proved_tokens,
            cached_by_source=self._sources(),
            dram_bytes=None if now is None or before is None else max(now.dram - before.dram, 0),
            disk_bytes=None if now is None or before is None else max(now.disk - before.disk, 0),
            ttft_before_s=summary.ttft_before_s,
            ttft_after_s=summary.ttft_after_s,
            seconds=round(time.monotonic() - self._started, 3),
            budget_s=self._options.budget_s,
            is_budget_spent=self._is_late,
            proof="metrics" if self._by_counters else "usage",
            shard=self._shard_text(),
            num_groups=len(self._groups),
            failures=tuple(summary.failures),
            volatile=self._findings.all(),
            warnings=tuple(self._warnings),
        )
