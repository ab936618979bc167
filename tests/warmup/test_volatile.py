"""C04: what changes by itself in a prompt is found, with its place and its cost; dates in documents are not."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from kvsnap.warmup.volatile import (
    Finding,
    clock_calls,
    find_volatile,
    first_difference,
    lost_tokens,
    merge,
    readable,
)

NOW = datetime(2026, 3, 5, 14, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("It is 2026-03-05 in Berlin", "date", "2026-03-05"),
        ("date: 2026-03-05T14:29:59Z", "date", "2026-03-05"),
        ("Cutting Knowledge\nToday Date: 05 Mar 2026", "date", "05 Mar 2026"),
        ("Thursday, March 5th, 2026.", "date", "March 5th, 2026"),
        ("05/03/2026 report", "date", "05/03/2026"),
        ("03/05/2026 report", "date", "03/05/2026"),
        ("yesterday was 2026-03-04", "date", "2026-03-04"),
        ("Current date: 2024-01-01", "date", "2024-01-01"),
        ("current_time = 09:15", "time", "09:15"),
        (f"ts={int(NOW.timestamp()) - 30}", "timestamp", str(int(NOW.timestamp()) - 30)),
        (f"ts={int(NOW.timestamp())}123 ms", "timestamp", f"{int(NOW.timestamp())}123"),
        ("user 0b0e8a3e-58a4-4c8e-9d0c-0a3a1f2b3c4d asks", "id", "0b0e8a3e-58a4-4c8e-9d0c-0a3a1f2b3c4d"),
        ('"session_id": "abc123xyz"', "id", "abc123xyz"),
    ],
)
def test_finds(text: str, kind: str, found: str) -> None:
    first = find_volatile(text, NOW)[0]

    assert (first.kind, first.text, text[first.start :].startswith(found)) == (kind, found, True)


@pytest.mark.parametrize(
    "text",
    [
        "The treaty of 1848-02-02 and the letter of May 5, 2019.",
        "Lunch is from 12:30 to 13:15.",
        "Order 1700000000 has 2000000000 items",
        "version 2026.1.2, section 3.4.5",
        "session id: required",
        "ISO 8601 dates look like 2020-12-31",
    ],
)
def test_leaves_documents_alone(text: str) -> None:
    assert find_volatile(text, NOW) == []


def test_date_and_time_are_two_findings() -> None:
    assert [m.kind for m in find_volatile("2026-03-05 14:29:59", NOW)] == ["date", "time"]


def test_template_that_calls_a_clock() -> None:
    assert clock_calls("{{ strftime_now('%d %b %Y') }}{% for m in messages %}") == ["strftime_now"]
    assert clock_calls("{% for message in messages %}{{ message.known }}{% endfor %}") == []


def test_cost_is_the_block_and_all_behind_it() -> None:
    assert first_difference([1, 2, 3], [1, 2, 4]) == 2
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([1, 2], [1, 2]) is None
    assert lost_tokens(20, 100, 16) == 84


def test_pieces_of_a_vocabulary_read_as_text() -> None:
    text, starts = readable(["\u0120Today", "\u0120is", "\u010a", "\u25812026", "-03-05"])

    assert (text, starts) == (" Today is\n 2026-03-05", [0, 6, 9, 10, 15])


def test_same_findings_are_one() -> None:
    def finding(source: str) -> Finding:
        return Finding(
            kind="date", text="2026-03-05", origin="template", source=source, num_prompts=1, position=4, lost_tokens=96
        )

    (merged,) = merge([finding("p:1"), finding("p:2")])

    assert merged.num_prompts == 2
    assert str(merged) == (
        "p:1 (and 1 more): the chat template writes a date, '2026-03-05', at token 4; each change loses the 96 tokens "
        "behind it; move it to the end"
    )
