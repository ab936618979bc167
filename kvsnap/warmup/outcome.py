"""What became of each prompt."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvsnap.warmup.grouping import usable_tokens
from kvsnap.warmup.prompts import Prompt
from kvsnap.warmup.report import Failure
from kvsnap.warmup.server import Answer

Fate = Literal["warmed", "resident", "short", "failed", "unproved", "left"]


@dataclass(slots=True)
class Outcome:
    """One prompt, from its rendering to its proof."""

    prompt: Prompt
    block_tokens: int = 1
    ids: tuple[int, ...] | None = None
    """As it was rendered beforehand; None where the server doesn't do that."""
    first: Answer | None = None
    proof: Answer | None = None
    error: str | None = None

    @property
    def is_short(self) -> bool:
        """Whether it holds no whole block that a later request could use."""
        if self.first is not None:
            return usable_tokens(self.first.prompt_tokens, self.block_tokens) == 0
        known = self.ids is not None and not self.prompt.has_media and not self.prompt.beyond_tokenize
        return known and usable_tokens(len(self.ids or ()), self.block_tokens) == 0

    @property
    def was_resident(self) -> bool:
        """Whether its first request was a full hit."""
        return self._covers(self.first)

    @property
    def is_proved(self) -> bool:
        """Whether its last request was a full hit."""
        return self._covers(self.proof or self.first)

    def fate(self, *, needs_proof: bool) -> Fate:
        """What became of it; `needs_proof`: even a prompt that was resident needs a second request."""
        if self.error is not None:
            return "failed"
        if self.is_short:
            return "short"
        if self.first is None or (self.proof is None and (needs_proof or not self.was_resident)):
            return "left"
        if not self.is_proved:
            return "unproved"
        return "resident" if self.was_resident else "warmed"

    def why_unproved(self) -> str:
        """For people."""
        answer = self.proof or self.first
        if answer is None or answer.cached_tokens is None:
            return "the server's counters did not tell whether the second request was a hit"
        usable = usable_tokens(answer.prompt_tokens, self.block_tokens)
        return f"the second request had {answer.cached_tokens} of {usable} tokens in whole blocks cached"

    def _covers(self, answer: Answer | None) -> bool:
        if answer is None or answer.cached_tokens is None:
            return False
        return answer.cached_tokens >= usable_tokens(answer.prompt_tokens, self.block_tokens)


@dataclass(slots=True)
class Summary:
    """Of all prompts: how many had which fate, and what they cost."""

    fates: dict[Fate, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    prompt_tokens: int = 0
    computed_tokens: int = 0
    proved_tokens: int = 0
    ttft_before_s: float | None = None
    ttft_after_s: float | None = None

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], *, needs_proof: bool) -> Summary:
        """Count."""
        summary = cls()
        before, after = [], []
        for outcome in outcomes:
            fate = outcome.fate(needs_proof=needs_proof)
            summary.fates[fate] = summary.fates.get(fate, 0) + 1
            if fate in ("failed", "unproved"):
                reason = outcome.error or outcome.why_unproved()
                summary.failures.append(Failure(source=outcome.prompt.source, reason=reason))
            first, last = outcome.first, outcome.proof or outcome.first
            if first is None or last is None:
                continue
            summary.prompt_tokens += first.prompt_tokens
            summary.computed_tokens += first.prompt_tokens - (first.cached_tokens or 0)
            if fate in ("warmed", "resident"):
                summary.proved_tokens += last.cached_tokens or 0
            if fate == "warmed":
                before.append(first.ttft_s)
                after.append(last.ttft_s)
        summary.ttft_before_s = statistics.median(before) if before else None
        summary.ttft_after_s = statistics.median(after) if after else None
        return summary
