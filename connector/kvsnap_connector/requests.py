"""What the scheduler half remembers of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvsnap.keys import ChunkKey, KeyChain
from kvsnap.match import Match, Promise


class RequestView(Protocol):
    """A live request, seen without vLLM's types."""

    @property
    def request_id(self) -> str:
        """Unique inside the engine."""

    @property
    def token_ids(self) -> Sequence[int]:
        """All tokens whose ids are known: the prompt, then the confirmed output."""

    @property
    def num_tokens(self) -> int:
        """Length of `token_ids`."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""

    @property
    def salt(self) -> str | None:
        """`cache_salt`."""

    @property
    def cacheable(self) -> str | None:
        """None where the request can be cached, else why not."""

    @property
    def wants_store(self) -> bool:
        """False where the client asked not to store."""

    @property
    def may_load(self) -> bool:
        """False where vLLM would not use a hit."""


@dataclass(slots=True)
class RequestState:
    """One request from its arrival to its end."""

    view: RequestView
    chain: KeyChain
    scope: str
    epoch: int
    """Epoch of the DRAM tier at arrival; a request of an older one never stores."""
    may_store: bool
    local: int = 0
    """Tokens of the engine's own hit when last asked."""
    promise: Promise | None = None
    memo: tuple[int, int, int] | None = None
    """(residency version, local tokens, limit) that `answer` holds for."""
    answer: int | None = 0
    deadline: float = 0.0
    """Monotonic end of the wait for a promotion; 0: never waited."""
    rounds: int = 0
    """Promotions started for it."""
    is_waiting: bool = False
    next_chunk: int = 0
    """First chunk not yet considered for storing."""
    loaded: tuple[int, int] = (0, 0)
    """Positions that kvsnap loaded for it."""
    from_disk: set[ChunkKey] = field(default_factory=set)
    """Chunks that had to be promoted for it."""
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of its last hit by tier."""
    has_seen_miss: bool = False
    is_resumed: bool = False
    """It was preempted: what it meets again is its own."""

    def start_over(self) -> None:
        """Its blocks are gone, or were computed again: consider every chunk anew."""
        self.next_chunk = 0
        self.is_resumed = True

    def end_of_tokens(self, block_tokens: int) -> int:
        """The furthest position that a hit may reach: one token must be computed, blocks are whole."""
        return (self.view.num_tokens - 1) // block_tokens * block_tokens

    def note_cold(self, match: Match) -> None:
        """Remember which pieces are on disk only, for the report of sources."""
        for piece in match.pieces:
            if piece.chunk.slot < 0:
                self.from_disk.add(piece.chunk.key)
        self.from_disk.update(chunk.key for chunk in match.remote)  # vLLM knows no source further away
