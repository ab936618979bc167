"""How far the tiers can serve a prompt: pieces of chunks, as found and as promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvsnap.index import READY, Chunk
from kvsnap.layout import Geometry
from kvsnap.remote import RemoteChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive blocks of one chunk that a prompt can use."""

    chunk: Chunk
    first_block: int
    """First block inside the chunk, 0-based."""
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How far the tiers can serve a prompt beyond what the engine holds itself."""

    pieces: tuple[Piece, ...]
    """In order of position, without gaps."""
    start_tokens: int
    end_tokens: int
    remote: tuple[RemoteChunk, ...] = ()
    """Full chunks after the last whole one that only a snapshot has."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the pieces hold."""
        return self.end_tokens - self.start_tokens

    @property
    def is_ready(self) -> bool:
        """Whether every piece is in DRAM and checked, and nothing more is to be had."""
        return not self.remote and all(piece.chunk.state == READY for piece in self.pieces)

    def ready_part(self, block_tokens: int) -> Match:
        """The leading pieces that are in DRAM and checked."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            if piece.chunk.state != READY:
                break
            pieces.append(piece)
        end = self.start_tokens + block_tokens * sum(piece.num_blocks for piece in pieces)
        return Match(pieces=tuple(pieces), start_tokens=self.start_tokens, end_tokens=end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Pieces that are held for one request, and where their bytes are."""

    pieces: tuple[Piece, ...]
    places: tuple[tuple[int, int], ...]
    """(slot, generation) of each piece."""
    start_tokens: int
    end_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens that the request gets."""
        return self.end_tokens - self.start_tokens


def cut(
    run: Sequence[Chunk],
    sibling: Chunk | None,
    sibling_blocks: int,
    geometry: Geometry,
    start_tokens: int,
    limit_tokens: int,
) -> Match:
    """The pieces of a run of full chunks, then of a chunk that begins alike, between two positions.

    Args:
        run: Full chunks in order; the first one holds position `start_tokens`.
        sibling: A chunk that shares the `sibling_blocks` first blocks of what comes next.
        geometry: Gives the size of blocks and chunks.
        start_tokens, limit_tokens: Multiples of the block size.
    """
    block_tokens = geometry.layout.block_tokens
    per_chunk = geometry.blocks_per_chunk
    start, limit = start_tokens // block_tokens, limit_tokens // block_tokens
    at = start - start % per_chunk
    pieces: list[Piece] = []
    position = start
    spans = [(chunk, per_chunk) for chunk in run]
    if sibling is not None:
        spans.append((sibling, sibling_blocks))
    for chunk, blocks in spans:
        first = position - at
        last = min(at + blocks, limit) - at
        if last <= first:
            break
        pieces.append(Piece(chunk=chunk, first_block=first, num_blocks=last - first))
        position = at + last
        at += per_chunk
    return Match(pieces=tuple(pieces), start_tokens=start_tokens, end_tokens=position * block_tokens)
