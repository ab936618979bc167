"""Look for what changes from one request to the next, in prompts as they are rendered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from kvsnap.warmup.prompts import Prompt
from kvsnap.warmup.server import Rendered
from kvsnap.warmup.volatile import Finding, find_volatile, first_difference, lost_tokens, merge, readable


class Findings:
    """Collects; may be used by several threads.

    Args:
        now: The present, with a time zone.
        block_tokens: Tokens of a KV block.
    """

    def __init__(self, now: datetime, block_tokens: int) -> None:
        self._now = now
        self._block_tokens = block_tokens
        self._found: list[Finding] = []

    def look_at(self, prompt: Prompt, rendered: Rendered) -> None:
        """Clocks and ids in one rendering (with pieces)."""
        text, starts = readable(rendered.pieces)
        given = "\n".join(_strings(dict(prompt.body)))
        for match in find_volatile(text, self._now):
            position = max(sum(start <= match.start for start in starts) - 1, 0)
            self._found.append(
                Finding(
                    kind=match.kind,
                    text=match.text,
                    origin="prompt" if match.text in given else "template",
                    source=prompt.source,
                    num_prompts=1,
                    position=position,
                    lost_tokens=lost_tokens(position, len(rendered.token_ids), self._block_tokens),
                )
            )

    def compare(self, prompt: Prompt, a: Sequence[int], b: Sequence[int]) -> None:
        """Two renderings of one prompt, at different times."""
        position = first_difference(a, b)
        if position is None:
            return
        self._found.append(
            Finding(
                kind="change",
                text="",
                origin="template",
                source=prompt.source,
                num_prompts=1,
                position=position,
                lost_tokens=lost_tokens(position, len(a), self._block_tokens),
            )
        )

    def all(self) -> tuple[Finding, ...]:
        """Same ones together, the most expensive first."""
        return tuple(merge(self._found))


def _strings(value: object) -> list[str]:
    """All texts in a request."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [json.dumps(value), *(text for item in value.values() for text in _strings(item))]
    if isinstance(value, list) and not (value and isinstance(value[0], int)):
        return [text for item in value for text in _strings(item)]
    return []
