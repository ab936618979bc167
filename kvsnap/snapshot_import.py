"""Import: from a repository into the disk tier of a cache directory.

Everything that can be known beforehand is checked before anything is touched: manifest
and catalog by their digests, the engines that use the directory, presence and size of
the shards. Then shard by shard, parents first and hottest first: copied, hashed and
checked under a temporary name, and only then linked into place. When it stops half-way,
what is there is a valid part, and repeating it goes on from there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvsnap.catalog import Catalog
from kvsnap.engines import check_expected, check_live_engines
from kvsnap.errors import CorruptChunkError, IncompatibleError, KvsnapError, NotFoundError
from kvsnap.fetch import ShardFetcher, ShardTarget
from kvsnap.local_shards import live_entries, scan_shards
from kvsnap.manifest import Digest, Manifest
from kvsnap.namespace import Namespace
from kvsnap.plan import I64, choose_shards, live_rows
from kvsnap.repository import Repository, shard_name
from kvsnap.tiers.disk import DiskTier
from kvsnap.transfer import Progress

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class ImportReport:
    """What an import did, or with `dry_run` would do."""

    snapshot: Digest
    """Id of the snapshot."""
    url: str
    directory: str
    """The namespace's directory in the cache directory."""
    namespace: str
    """Id of the namespace, 64 hex."""
    total_shards: int
    """Shards of the snapshot."""
    total_chunks: int
    total_bytes: int
    chosen_shards: int = 0
    """Shards that `max_bytes` allows."""
    present_shards: int = 0
    """Of these, shards whose chunks were all there already."""
    imported_shards: int = 0
    imported_bytes: int = 0
    num_chunks: int = 0
    """Chunks of the snapshot that are there now, with all their ancestors."""
    num_tokens: int = 0
    """Tokens in them."""
    is_full: bool = False
    """The cap of the directory ended it early."""
    problems: list[str] = field(default_factory=list)
    """With `allow_partial`: what was left out, and why."""
    engines: list[str] = field(default_factory=list)
    """Live engines that use the namespace; they notice the shards by themselves."""


def import_snapshot(
    url: str,
    ref: str,
    cache_dir: Path,
    *,
    max_bytes: int | None = None,
    expect: Namespace | None = None,
    allow_partial: bool = False,
    dry_run: bool = False,
    tier: DiskTier | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Import the snapshot `ref` (a ref, an id or its start) of the repository at `url` into `cache_dir`.

    It goes into the manifest's own namespace. May be killed and repeated.

    Args:
        max_bytes: Most bytes of shards, the hottest first; those there already count too.
        expect: The namespace of the engine that will use it. Without, the live engines
            of the directory are asked: if there are any, one must match.
        allow_partial: Import what is whole of a damaged snapshot instead of refusing it.
        dry_run: Check and plan; touch nothing.
        tier: The open disk tier of an engine that imports for itself: it may be asked to evict, and its next `poll`
            reports the new shards.

    Raises:
        NotFoundError: no such repository or snapshot.
        IncompatibleError: of another model, layout or version; `fields` says which differ. Nothing was touched.
        CorruptChunkError: damaged; names the object, and the chunk where it can. Nothing was touched, or a valid part
            is there.
        StorageError: the repository or the disk failed. Nothing was touched, or a valid part is there.
    """
    repository = Repository.open(url)
    snapshot = repository.resolve(ref)
    manifest = repository.manifest(snapshot)
    ns, what = manifest.namespace, f"snapshot {ref}"
    if expect is not None:
        check_expected(ns, expect, what)
        engines = []
    else:
        engines = check_live_engines(cache_dir, ns, what)
    catalog = repository.catalog(manifest)

    report = ImportReport(
        snapshot=snapshot,
        url=url,
        directory=str(cache_dir / ns.dirname),
        namespace=ns.id(),
        total_shards=len(manifest.shards),
        total_chunks=len(catalog),
        total_bytes=manifest.totals.nbytes,
        engines=[record.engine_id for record in engines],
    )
    plan = _Plan(manifest, catalog, max_bytes)
    report.chosen_shards = len(plan.chosen)
    present = _present(cache_dir / ns.dirname, ns, catalog, plan)
    report.present_shards = len(present)
    missing = [i for i in plan.chosen if i not in present]
    usable = _check_stored(repository, manifest, missing, report, allow_partial=allow_partial)
    if dry_run:
        report.imported_shards = len(usable)
        report.imported_bytes = sum(manifest.shards[i].nbytes for i in usable)
        plan.count(report, present | set(usable))
        return report
    if not usable:
        plan.count(report, present)
        return report
    # Always a tier of its own: to the engine's tier the shards are then new ones, which its next `poll` reports.
    with DiskTier(cache_dir, ns) as disk:
        disk.evict = None if tier is None else tier.evict
        placed = _fetch(repository, disk, plan, usable, present, report, allow_partial=allow_partial, progress=progress)
        plan.count(report, placed)
        _add_usage(disk, catalog, plan.live(placed))
    return report


class _Plan:
    """Which shards to have, in which order, and what a set of them is worth."""

    def __init__(self, manifest: Manifest, catalog: Catalog, max_bytes: int | None) -> None:
        self.manifest = manifest
        self.catalog = catalog
        self.rows: list[I64] = catalog.rows_of_shards(len(manifest.shards))
        choice = choose_shards(
            range(len(manifest.shards)),
            [shard.nbytes for shard in manifest.shards],
            catalog.shard,
            catalog.parent_row,
            catalog.depth,
            max_bytes=max_bytes,
        )
        self.chosen = [i for i in choice.shards if len(self.rows[i])]

    def live(self, shards: set[int]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For each row whether it and all its ancestors are in `shards`."""
        return live_rows(self.catalog.parent_row, self.catalog.depth, np.isin(self.catalog.shard, list(shards)))

    def count(self, report: ImportReport, shards: set[int]) -> None:
        """Fill in what `shards` give."""
        live = self.live(shards)
        report.num_chunks = int(live.sum())
        report.num_tokens = int(self.catalog.tokens[live].sum())


def _present(directory: Path, ns: Namespace, catalog: Catalog, plan: _Plan) -> set[int]:
    """Chosen shards that need not be fetched: all their chunks are there with all their ancestors."""
    scan = scan_shards(directory, ns)
    if not scan.shards:
        return set()
    live, _ = live_entries(ns, scan.shards)
    return {i for i in plan.chosen if all(catalog.key_of(row) in live for row in plan.rows[i].tolist())}


def _check_stored(
    repository: Repository, manifest: Manifest, wanted: Sequence[int], report: ImportReport, *, allow_partial: bool
) -> list[int]:
    """Those of the shards that the repository holds in their full size."""
    usable = []
    for i in wanted:
        record = manifest.shards[i]
        name = shard_name(record.digest)
        try:
            found = repository.storage.head(name).nbytes
            if found != record.nbytes:
                raise CorruptChunkError(
                    f"shard {name} is damaged: expected {record.nbytes} bytes, found {found}; export it again"
                )
        except (CorruptChunkError, NotFoundError) as error:
            problem = (
                CorruptChunkError(f"shard {name} is missing in {repository.url}; export it again")
                if isinstance(error, NotFoundError)
                else error
            )
            if not allow_partial:
                raise problem from None
            report.problems.append(str(problem))
        else:
            usable.append(i)
    return usable


def _fetch(
    repository: Repository,
    disk: DiskTier,
    plan: _Plan,
    usable: Sequence[int],
    present: set[int],
    report: ImportReport,
    *,
    allow_partial: bool,
    progress: Progress | None,
) -> set[int]:
    """Fetch shards in order until the directory is full; those that are there now."""
    fetcher = ShardFetcher(repository.storage, disk)
    placed = set(present)
    total = sum(plan.manifest.shards[i].nbytes for i in usable)
    done = 0
    for i in usable:
        record = plan.manifest.shards[i]
        if report.problems and not plan.live(placed | {i})[plan.rows[i]].any():
            continue  # nothing in it would have a full chain
        target = ShardTarget(digest=record.digest, nbytes=record.nbytes, catalog=plan.catalog, rows=plan.rows[i])
        try:
            if not fetcher.fetch(target):
                report.is_full = True
                log.warning("kvsnap: the cap of %s ends the import after %d shards", disk.cache_dir, len(placed))
                break
        except (CorruptChunkError, IncompatibleError) as error:
            if not allow_partial:
                raise CorruptChunkError(
                    f"{error}; {report.imported_shards} shards are imported, export the snapshot again"
                ) from error
            report.problems.append(str(error))
            continue
        placed.add(i)
        report.imported_shards += 1
        report.imported_bytes += record.nbytes
        done += record.nbytes
        if progress is not None:
            progress(done, total)
    return placed


def _add_usage(disk: DiskTier, catalog: Catalog, live: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Tell the next engine how hot the chunks were where they come from; what is known here counts more."""
    known = disk.load_usage()
    rows = [(key, hits, last_use) for key, (hits, last_use) in known.items()]
    for row in np.flatnonzero(live).tolist():
        key = catalog.key_of(row)
        if key not in known:
            rows.append((key, int(catalog.hits[row]), float(catalog.last_use[row])))
    try:
        disk.store_usage(rows)
    except KvsnapError as error:
        log.warning("kvsnap: %s", error)
