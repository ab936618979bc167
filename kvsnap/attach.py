"""Takes over what the last owner left in the DRAM tier's file."""

from __future__ import annotations

from kvsnap.index import UNCHECKED, Chunk
from kvsnap.keys import ChunkKey
from kvsnap.residency import Residency
from kvsnap.tiers.dram import DramTier


def attach(residency: Residency, dram: DramTier) -> int:
    """Enter the chunks that `dram` found, parents first, whole chains only; returns how many.

    They are not offered before their bytes have been checked. Slots of chunks without a
    whole chain are free.
    """
    residency.take_found_slots({record.slot for record in dram.found})
    chunks: list[Chunk] = []
    by_key: dict[ChunkKey, Chunk] = {}
    for record in sorted(dram.found, key=lambda r: r.depth):
        above = by_key.get(record.parent) if record.depth else record.parent
        if above is None or record.key in by_key:
            dram.free(record.slot)
            residency.give_back(record.slot)
            continue
        chunk = Chunk(record.key, above, record.depth, record.tokens, record.scope, record.block_keys)
        chunk.hits, chunk.last_use, chunk.dram_xxh3 = record.hits, record.last_use, record.xxh3
        by_key[record.key] = chunk
        residency.occupy(chunk, record.slot, record.generation, UNCHECKED)
        chunks.append(chunk)
    residency.index.add_all(chunks)
    dram.found = []
    return len(chunks)
