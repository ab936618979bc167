"""What an import takes of a snapshot: pure but for `rows_there`, which reads the headers of what is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvsnap.catalog import Catalog
from kvsnap.import_run import ImportUnit
from kvsnap.local_shards import live_entries, scan_shards
from kvsnap.manifest import Manifest
from kvsnap.plan import I64, Mask, choose_part, choose_shards, live_rows


class ImportPlan:
    """What to have of a snapshot, in which order, and what a set of its shards is worth.

    Args:
        max_bytes: Most bytes to fetch; None: all.
        may_split: Whether the last shard may be taken in part.
    """

    def __init__(self, manifest: Manifest, catalog: Catalog, max_bytes: int | None, *, may_split: bool = True) -> None:
        self.manifest = manifest
        self.catalog = catalog
        num_shards = len(manifest.shards)
        rows: list[I64] = catalog.rows_of_shards(num_shards)
        choice = choose_shards(
            range(num_shards),
            [shard.nbytes for shard in manifest.shards],
            catalog.shard,
            catalog.parent_row,
            catalog.depth,
            max_bytes=max_bytes,
        )
        self.units = [
            ImportUnit(shard=i, rows=rows[i], nbytes=manifest.shards[i].nbytes, is_part=False)
            for i in choice.shards
            if len(rows[i])
        ]
        """Parents first, else hottest first."""
        self._is_wanted = np.zeros(len(catalog), np.bool_)
        for unit in self.units:
            self._is_wanted[unit.rows] = True
        if max_bytes is not None and may_split:
            taken = set(choice.shards)
            part = choose_part(
                [i for i in range(num_shards) if i not in taken],
                rows,
                catalog.offset,
                catalog.nbytes,
                catalog.parent_row,
                choice.live,
                room=max_bytes - choice.nbytes,
            )
            if part is not None:
                self.units.append(ImportUnit(shard=part.shard, rows=part.rows, nbytes=part.nbytes, is_part=True))
                self._is_wanted[part.rows] = True

    def live(self, shards: set[int]) -> Mask:
        """For each row whether it is wanted and it and all its ancestors are in `shards`."""
        is_there = np.zeros(max(len(self.manifest.shards), 1), np.bool_)
        is_there[list(shards)] = True
        return live_rows(self.catalog.parent_row, self.catalog.depth, is_there[self.catalog.shard] & self._is_wanted)

    def is_useful(self, shards: set[int], unit: ImportUnit) -> bool:
        """Whether `unit` gives any chunk with a full chain when `shards` are there."""
        return bool(self.live(shards | {unit.shard})[unit.rows].any())

    def count(self, shards: set[int], is_there: Mask) -> tuple[int, int]:
        """Chunks and tokens that `shards` give, and those that were there before."""
        live = self.live(shards) | is_there
        return int(live.sum()), int(self.catalog.tokens[live].sum())

    def rows_there(self, directory: Path) -> Mask:
        """For each row whether it is in the namespace's `directory` already, with all its ancestors."""
        scan = scan_shards(directory, self.manifest.namespace)
        if not scan.shards:
            return np.zeros(len(self.catalog), np.bool_)
        live, _ = live_entries(self.manifest.namespace, scan.shards)
        return np.fromiter(map(live.__contains__, self.catalog.keys()), np.bool_, len(self.catalog))

    def present(self, is_there: Mask) -> set[int]:
        """Shards that need not be fetched, since all that is wanted of them is there."""
        return {unit.shard for unit in self.units if is_there[unit.rows].all()}
