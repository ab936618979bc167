"""Import: from a repository into the disk tier of a cache directory.

Everything that can be known beforehand is checked before anything is touched: manifest
and catalog by their digests, the engines that use the directory, presence and size of
the shards. Then shard by shard, hottest first, but parents before their children: each is one
request, and is copied, hashed and checked under a temporary name, and only then linked
into place (`kvsnap.import_run`). When it stops half-way, what is there is a valid part, and
repeating it goes on from there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np

from kvsnap.catalog import Catalog
from kvsnap.damage import missing, wrong_size
from kvsnap.engines import check_expected, check_live_engines, engines_of
from kvsnap.errors import CorruptChunkError, IncompatibleError, KvsnapError, NotFoundError
from kvsnap.fetch import ShardFetcher
from kvsnap.import_plan import ImportPlan
from kvsnap.import_run import ImportRun, ImportUnit
from kvsnap.manifest import Digest, Manifest
from kvsnap.namespace import Namespace
from kvsnap.plan import Mask
from kvsnap.repository import Repository, shard_name
from kvsnap.storage import RefusedError, Storage
from kvsnap.tiers.disk import DiskTier
from kvsnap.tiers.paths import SHARDS
from kvsnap.tiers.quota import read_marker, room_bytes
from kvsnap.tiers.writers import only_importer
from kvsnap.transfer import Progress
from kvsnap.trust import TrustedKeys

log = logging.getLogger(__name__)

MAX_LISTED = 20_000
"""Shards of a repository that are looked at beforehand; of the others it shows when they are fetched."""


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
    is_last_in_part: bool = False
    """Of the last of these only the start is taken, as `max_bytes` demands."""
    present_shards: int = 0
    """Of these, shards whose chunks were all there already."""
    imported_shards: int = 0
    imported_bytes: int = 0
    """Bytes of shards fetched."""
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
    url: str | Storage,
    ref: str,
    cache_dir: Path,
    *,
    max_bytes: int | None = None,
    expect: Namespace | None = None,
    allow_partial: bool = False,
    other_engines: bool = False,
    dry_run: bool = False,
    tier: DiskTier | None = None,
    trusted: TrustedKeys | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> ImportReport:
    """Import the snapshot `ref` (a ref, an id or its start) of the repository at `url` into `cache_dir`.

    It goes into the manifest's own namespace. May be killed and repeated. One import at a time downloads into a
    directory; another one waits for it, and then fetches what is still missing.

    Args:
        max_bytes: Most bytes of shards, the hottest first; those there already count too. Whole shards, and the start
            of one more (not with `trusted`: no signature covers a part).
        expect: The namespace of the engine that will use it. Without, the live engines
            of the directory are asked: if there are any, one must match.
        allow_partial: Import what is whole of a damaged snapshot instead of refusing it.
        other_engines: Import it, too, where live engines use the directory and none of them matches.
        dry_run: Check and plan; touch nothing.
        tier: The open disk tier of an engine that imports for itself: it may be asked to evict, and its next `poll`
            reports the new shards.
        trusted: Import it only if one of these signed it.
        sleep: How to wait for another import. May raise to end the wait.

    Raises:
        NotFoundError: no such repository or snapshot.
        ConfigError: `cache_dir` is something else, e.g. a repository. Nothing was touched.
        UntrustedError: none of `trusted` signed it. Nothing was touched.
        IncompatibleError: of another model, layout or version; `fields` says which differ. Nothing was touched.
        CorruptChunkError: damaged; names the object, and the chunk where it can. Nothing was touched, or a valid part
            is there.
        StorageError: the repository or the disk failed. Nothing was touched, or a valid part is there.
    """
    read_marker(cache_dir)
    repository = Repository.open(url)
    snapshot, manifest = repository.open_snapshot(ref, trusted=trusted)
    ns, what = manifest.namespace, f"snapshot {ref}"
    if expect is not None:
        check_expected(ns, expect, what)
        engines = []
    elif other_engines:
        engines = engines_of(cache_dir, ns.id())
    else:
        engines = check_live_engines(cache_dir, ns, what)
    catalog = repository.catalog(manifest)

    report = ImportReport(
        snapshot=snapshot,
        url=repository.url,
        directory=str(cache_dir / ns.dirname),
        namespace=ns.id(),
        total_shards=len(manifest.shards),
        total_chunks=len(catalog),
        total_bytes=manifest.totals.nbytes,
        engines=[record.engine_id for record in engines],
    )
    plan = ImportPlan(manifest, catalog, max_bytes, may_split=trusted is None)
    report.chosen_shards = len(plan.units)
    report.is_last_in_part = any(unit.is_part for unit in plan.units)
    seen = _shards_time(cache_dir / ns.dirname)
    is_there = plan.rows_there(cache_dir / ns.dirname)
    present = plan.present(is_there)
    report.present_shards = len(present)
    missing = [unit for unit in plan.units if unit.shard not in present]
    usable = _check_stored(repository, manifest, missing, report, allow_partial=allow_partial)
    if dry_run:
        usable, report.is_full = _fitting(usable, room_bytes(cache_dir, cache_dir / ns.dirname))
        report.imported_shards = len(usable)
        report.imported_bytes = sum(unit.nbytes for unit in usable)
        present |= {unit.shard for unit in usable}
        report.num_chunks, report.num_tokens = plan.count(present, is_there)
        return report
    if not usable:
        report.num_chunks, report.num_tokens = plan.count(present, is_there)
        return report
    # Always a tier of its own: to the engine's tier the shards are then new ones, which its next `poll` reports.
    with DiskTier(cache_dir, ns) as disk, only_importer(cache_dir, sleep=sleep):
        if _shards_time(disk.dir) != seen:
            is_there = plan.rows_there(disk.dir)
            present = plan.present(is_there)
            report.present_shards = len(present)
            usable = [unit for unit in usable if unit.shard not in present]
        disk.evict = None if tier is None else tier.evict
        _add_usage(disk, catalog, plan.live(present | {unit.shard for unit in usable}))
        placed = _fetch(repository, disk, plan, usable, present, report, allow_partial=allow_partial, progress=progress)
        report.num_chunks, report.num_tokens = plan.count(placed, is_there)
    return report


def _fitting(units: Sequence[ImportUnit], room: int) -> tuple[list[ImportUnit], bool]:
    """Those that fit in `room` bytes, and whether that ends them early."""
    fitting: list[ImportUnit] = []
    for unit in units:
        room -= unit.nbytes
        if room < 0:
            return fitting, True
        fitting.append(unit)
    return fitting, False


def _shards_time(directory: Path) -> int | None:
    """When a shard last came or went; None without a directory."""
    try:
        return (directory / SHARDS).stat().st_mtime_ns
    except OSError:
        return None


def _check_stored(
    repository: Repository,
    manifest: Manifest,
    wanted: Sequence[ImportUnit],
    report: ImportReport,
    *,
    allow_partial: bool,
) -> list[ImportUnit]:
    """Those of the units whose shards the repository holds in their full size, by one listing: no request per shard."""
    if not wanted:
        return []
    try:
        found = {info.name: info.nbytes for info in islice(repository.storage.list("shards/"), MAX_LISTED)}
    except RefusedError as error:
        log.debug("kvsnap: %s: not checked beforehand: %s", repository.url, error)
        return list(wanted)
    usable = []
    for unit in wanted:
        record = manifest.shards[unit.shard]
        name = shard_name(record.digest)
        nbytes = found.get(name)
        if nbytes is None and len(found) == MAX_LISTED:
            nbytes = record.nbytes
        problem = None
        try:
            if nbytes is None:
                nbytes = repository.storage.head(name).nbytes
            if nbytes != record.nbytes:
                problem = wrong_size(name, repository.url, expected=record.nbytes, found=nbytes)
        except NotFoundError:
            problem = missing(name, repository.url)
        if problem is None:
            usable.append(unit)
        elif allow_partial:
            report.problems.append(str(problem))
        else:
            raise problem
    return usable


def _fetch(
    repository: Repository,
    disk: DiskTier,
    plan: ImportPlan,
    usable: Sequence[ImportUnit],
    present: set[int],
    report: ImportReport,
    *,
    allow_partial: bool,
    progress: Progress | None,
) -> set[int]:
    """Fetch the units until the directory is full; the shards that are there now."""
    total = sum(unit.nbytes for unit in usable)

    def placed(unit: ImportUnit) -> None:
        report.imported_shards += 1
        report.imported_bytes += unit.nbytes
        if progress is not None:
            progress(report.imported_bytes, total)

    run = ImportRun(
        ShardFetcher(repository.storage, disk),
        plan.manifest,
        plan.catalog,
        is_useful=plan.is_useful,
        is_whole=not report.problems,
        allow_partial=allow_partial,
        placed=placed,
        problem=report.problems.append,
    )
    try:
        there = run.run(usable, present)
    except (CorruptChunkError, IncompatibleError) as error:
        raise CorruptChunkError(f"{error} ({report.imported_shards} shards were imported before)") from error
    if run.is_full:
        report.is_full = True
        log.warning("kvsnap: the cap of %s ends the import after %d shards", disk.cache_dir, len(there))
    return there


def _add_usage(disk: DiskTier, catalog: Catalog, live: Mask) -> None:
    """Tell engines how hot the chunks were where they come from; what is known here counts more.

    Before they come: a live engine that makes room for them would take the hottest, which come first, for the oldest.
    """
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
