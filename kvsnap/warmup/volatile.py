"""What changes from one request to the next: clocks and ids in a prompt, or in the template around it.

Everything behind such a text is computed again once it has changed, however much of the prompt is the same. Only
what looks like *now* is reported, or stands behind words that say so: a date in a document is no clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

Kind = Literal["date", "time", "timestamp", "id", "change"]

_MONTHS = (
    "Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sep(?:t(?:ember)?)?|Oct(?:ober)?"
)
_MONTHS += "|Nov(?:ember)?|Dec(?:ember)?"
_DATES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<!\d)(?P<y>20\d\d)[-/.](?P<m>\d\d)[-/.](?P<d>\d\d)(?!\d)"), ""),
    (re.compile(r"(?<!\d)(?P<d>\d{1,2})[-/.](?P<m>\d{1,2})[-/.](?P<y>20\d\d)(?!\d)"), "swap"),
    (re.compile(rf"(?<!\d)(?P<d>\d\d?)(?:st|nd|rd|th)? (?P<mon>{_MONTHS})\.?,? (?P<y>20\d\d)(?!\d)", re.I), ""),
    (re.compile(rf"\b(?P<mon>{_MONTHS})\.? (?P<d>\d\d?)(?:st|nd|rd|th)?,? (?P<y>20\d\d)(?!\d)", re.I), ""),
)
_TIME = re.compile(r"(?<![\d:])(?P<h>[01]?\d|2[0-3]):(?P<min>[0-5]\d)(?P<s>:[0-5]\d)?(?![\d:])")
_STAMP = re.compile(r"(?<![\d.])(?P<s>1[5-9]\d{8}|2\d{9})(?P<ms>\d{3})?(?!\d)")
_UUID = re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}\b", re.I)
_NAMED_ID = re.compile(
    r"\b(?:request|session|trace|conversation|thread|run|chat|correlation|message)[ _-]?id\b[\"' ]*[:=]+[\"' ]*"
    r"(?P<value>[\w.-]{6,})",
    re.I,
)
_SAYS_NOW = re.compile(r"(?:\b(?:current|today|now|as of|knowledge date|local)\b|current_?(?:date|time))", re.I)
_TEMPLATE_CALLS = re.compile(
    r"\b(strftime_now|utcnow|datetime\s*\.\s*now|now\s*\(|uuid\w*\s*\(|random\w*\s*\(|\|\s*random\b)"
)
_BEFORE_CHARS = 40
_DAY = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Match:
    """A piece of text that will be another one soon."""

    kind: Kind
    text: str
    start: int
    """Position of its first character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that changes, and what it costs."""

    kind: Kind
    """`date`, `time`, `timestamp`, `id`; `change`: two renderings differed."""
    text: str
    """As it stands there."""
    origin: Literal["prompt", "template"]
    """Who writes it."""
    source: str
    """The first prompt with it."""
    num_prompts: int
    """How many prompts have it at this position."""
    position: int
    """Position of its first token."""
    lost_tokens: int
    """Tokens of that prompt that are computed again after each change."""

    def __str__(self) -> str:
        writer = "the chat template writes" if self.origin == "template" else "the prompt holds"
        what = {"change": "something that changes with each rendering", "id": f"an id, {self.text!r},"}.get(
            self.kind, f"a {self.kind}, {self.text!r},"
        )
        more = f" (and {self.num_prompts - 1} more)" if self.num_prompts > 1 else ""
        return (
            f"{self.source}{more}: {writer} {what} at token {self.position}; each change loses the {self.lost_tokens} "
            "tokens behind it; move it to the end"
        )


def find_volatile(text: str, now: datetime) -> list[Match]:
    """Clocks and ids in a text, in order; `now` has a time zone."""
    found: list[Match] = []
    taken: list[tuple[int, int]] = []
    for match, kind in _candidates(text, now):
        if all(match.end() <= start or match.start() >= end for start, end in taken):
            taken.append((match.start(), match.end()))
            start = match.start("value") if "value" in match.re.groupindex else match.start()
            found.append(Match(kind, text[start : match.end()], start))
    return sorted(found, key=lambda m: m.start)


def _candidates(text: str, now: datetime) -> Iterator[tuple[re.Match[str], Kind]]:
    dates: list[int] = []
    for pattern, swap in _DATES:
        for match in pattern.finditer(text):
            if _is_now(match, bool(swap), now) or _SAYS_NOW.search(_before(text, match.start())):
                dates.append(match.end())
                yield match, "date"
    for match in _TIME.finditer(text):
        is_after_date = any(0 <= match.start() - end <= 3 for end in dates)
        if is_after_date or _SAYS_NOW.search(_before(text, match.start())):
            yield match, "time"
    for match in _STAMP.finditer(text):
        if abs(int(match["s"]) - now.timestamp()) < 2 * _DAY.total_seconds():
            yield match, "timestamp"
    for match in _NAMED_ID.finditer(text):
        if any(char.isdigit() for char in match["value"]):
            yield match, "id"
    for match in _UUID.finditer(text):
        yield match, "id"


def _before(text: str, start: int) -> str:
    """What stands on the same line just before."""
    return text[max(start - _BEFORE_CHARS, 0) : start].rpartition("\n")[2]


def _is_now(match: re.Match[str], may_swap: bool, now: datetime) -> bool:
    """Whether a date is that of today, give or take one day (time zones)."""
    groups = match.groupdict()
    year, day = int(groups["y"]), int(groups["d"])
    month = int(groups["m"]) if groups.get("m") else _month(groups["mon"])
    for m, d in ((month, day), (day, month)) if may_swap else ((month, day),):
        try:
            found = datetime(year, m, d, tzinfo=UTC)
        except ValueError:
            continue
        if abs(found - datetime(now.year, now.month, now.day, tzinfo=UTC)) <= _DAY:
            return True
    return False


def _month(name: str) -> int:
    return "janfebmaraprmayjunjulaugsepoctnovdec".index(name[:3].lower()) // 3 + 1


def clock_calls(template: str) -> list[str]:
    """Calls in a chat template that give something else each time."""
    return sorted({match[1].rstrip("( ") for match in _TEMPLATE_CALLS.finditer(template)})


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Position of the first token that differs; None where both are equal."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def lost_tokens(position: int, num_tokens: int, block_tokens: int) -> int:
    """Tokens that a change at `position` has computed again: its block and all behind it."""
    return num_tokens - min(position // block_tokens * block_tokens, num_tokens)


def readable(pieces: Iterable[str]) -> tuple[str, list[int]]:
    """The text of vocabulary entries, as far as ASCII goes, and where each one starts in it."""
    starts, parts, length = [], [], 0
    for piece in pieces:
        part = piece.replace("\u0120", " ").replace("\u010a", "\n").replace("\u2581", " ").replace("\u0109", "\t")
        part = "\n" if part == "<0x0A>" else part
        starts.append(length)
        parts.append(part)
        length += len(part)
    return "".join(parts), starts


def merge(findings: Iterable[Finding]) -> list[Finding]:
    """One for each kind, text, origin and position; the most expensive first."""
    merged: dict[tuple[str, str, str, int], list[Finding]] = {}
    for finding in findings:
        merged.setdefault((finding.kind, finding.text, finding.origin, finding.position), []).append(finding)
    result = []
    for same in merged.values():
        first = same[0]
        result.append(
            Finding(
                kind=first.kind,
                text=first.text,
                origin=first.origin,
                source=first.source,
                num_prompts=len(same),
                position=first.position,
                lost_tokens=max(f.lost_tokens for f in same),
            )
        )
    return sorted(result, key=lambda f: (-f.lost_tokens * f.num_prompts, f.position))
