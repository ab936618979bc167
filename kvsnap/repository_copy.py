"""Copy snapshots from one repository to another.

Shards, catalog, manifest, ref, in this order, each checked by its digest on the way. What
the target has already isn't moved, so a copy may be killed and repeated. Where both lie in one
store that can copy by itself, the bytes of shards don't come by here.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kvsnap.damage import damaged, missing
from kvsnap.errors import ConfigError, CorruptChunkError, NotFoundError
from kvsnap.gc_lists import read_lists
from kvsnap.known import list_shards
from kvsnap.manifest import Digest, Manifest, ShardRecord
from kvsnap.reachable import reachable_snapshots
from kvsnap.refs import publish_ref
from kvsnap.repository import Repository, ref_name, shard_name
from kvsnap.runtime import widen_affinity
from kvsnap.signing import read_signatures, signature_name, store_signature
from kvsnap.storage import Storage
from kvsnap.transfer import Progress, pieces
from kvsnap.writing import WriteSession, publish_snapshot, under_lease

log = logging.getLogger(__name__)

THREADS = 4


@dataclass(slots=True, kw_only=True)
class CopyReport:
    """What a copy did, or with `dry_run` would do."""

    source: str
    target: str
    dry_run: bool
    snapshots: tuple[Digest, ...]
    refs: tuple[str, ...]
    """Refs of the target that name a copied snapshot now."""
    num_shards: int = 0
    """Different shards of the snapshots."""
    nbytes: int = 0
    present_shards: int = 0
    """Of these, shards that the target had already."""
    copied_shards: int = 0
    copied_bytes: int = 0
    server_side_shards: int = 0
    """Of the copied ones, shards that the store copied by itself. It vouches for their bytes; their sizes are
    compared."""
    problems: list[str] = field(default_factory=list)
    """Of a copy of all: what is damaged, and was left out."""


def copy_snapshots(
    source_url: str | Storage,
    target_url: str | Storage,
    *,
    ref: str | None = None,
    tag: str | None = None,
    dry_run: bool = False,
    single_writer: bool = False,
    threads: int = THREADS,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy the snapshot `ref`, or all snapshots and refs, to the repository at `target_url`, made if nothing is there.

    Args:
        tag: Ref of the target that shall name the snapshot `ref` afterwards.

    Raises:
        NotFoundError: no such repository or snapshot; a manifest was removed meanwhile.
        CorruptChunkError: an object of the snapshot `ref` is damaged or missing in the source, or another lies under
            its name in the target. What was copied before is whole. Without `ref` such snapshots are left out.
        StorageError: a repository failed.
    """
    if tag is not None:
        ref_name(tag)
        if ref is None:
            raise ConfigError("a tag names one snapshot; say which one to copy")
    source = Repository.open(source_url)
    problems: list[str] = []
    if ref is not None:
        snapshot, manifest = source.open_snapshot(ref)
        manifests = {snapshot: manifest}
        refs = {} if tag is None else {tag: snapshot}
    else:
        try:
            lists = read_lists(source.storage)
        except CorruptChunkError as error:
            problems.append(str(error))
            lists = []
        found = reachable_snapshots(source, lists, lambda error: problems.append(str(error)))
        manifests, refs = found.snapshots, found.refs
    report = CopyReport(
        source=source.url,
        target=str(target_url if isinstance(target_url, str) else target_url.url),
        dry_run=dry_run,
        snapshots=tuple(manifests),
        refs=tuple(refs),
        problems=problems,
    )
    records = list({shard.digest: shard for manifest in manifests.values() for shard in manifest.shards}.values())
    report.num_shards = len(records)
    report.nbytes = sum(record.nbytes for record in records)
    if dry_run:
        try:
            target = Repository.open(target_url)
        except NotFoundError:
            absent = records
        else:
            absent = _missing(target, records)
        report.copied_shards, report.copied_bytes = len(absent), sum(record.nbytes for record in absent)
        report.present_shards = len(records) - len(absent)
        return report
    target = Repository.open_or_create(target_url, single_writer=single_writer)
    copy = _Copy(source, target, report, may_leave_out=ref is None, threads=threads, progress=progress)
    under_lease(target, "copy", lambda session: copy.run(session, manifests, refs))
    report.present_shards = report.num_shards - report.copied_shards
    return report


class _Copy:
    def __init__(
        self,
        source: Repository,
        target: Repository,
        report: CopyReport,
        *,
        may_leave_out: bool,
        threads: int,
        progress: Progress | None,
    ) -> None:
        self._source = source
        self._target = target
        self._report = report
        self._may_leave_out = may_leave_out
        self._threads = threads
        self._progress = progress
        self._lock = threading.Lock()
        self._copied: dict[Digest, tuple[int, bool]] = {}
        """Bytes of each shard that was copied, and whether the store copied it by itself."""
        self._done = 0

    def run(self, session: WriteSession, manifests: dict[Digest, Manifest], refs: dict[str, Digest]) -> None:
        self._done = 0
        failed: dict[Digest, str] = {}
        for snapshot, manifest in manifests.items():
            try:
                self._copy_snapshot(session, snapshot, manifest)
            except CorruptChunkError as error:
                if not self._may_leave_out:
                    raise
                failed[snapshot] = f"snapshot {snapshot[:12]} is left out: {error}"
        for name, snapshot in refs.items():
            if snapshot not in failed:
                publish_ref(self._target, session, name, snapshot)
        self._report.problems += failed.values()
        self._report.snapshots = tuple(s for s in manifests if s not in failed)
        self._report.refs = tuple(name for name, snapshot in refs.items() if snapshot not in failed)

    def _copy_snapshot(self, session: WriteSession, snapshot: Digest, manifest: Manifest) -> None:
        catalog = self._source.catalog_bytes(manifest)
        data = self._source.manifest_bytes(snapshot)
        self._copy_shards(session, manifest.shards)
        self._copy_signatures(session, snapshot)
        publish_snapshot(self._target, session, catalog=catalog, manifest=data)

    def _copy_shards(self, session: WriteSession, records: Sequence[ShardRecord]) -> None:
        absent = _missing(self._target, records)
        self._report_done(sum(record.nbytes for record in records) - sum(record.nbytes for record in absent))
        while True:
            with ThreadPoolExecutor(self._threads, "kvsnap-copy", initializer=widen_affinity) as pool:
                futures = [pool.submit(self._copy_shard, record) for record in absent]
                try:
                    for future in futures:
                        future.result()
                except BaseException:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
            doubtful = session.keep(shard_name(record.digest) for record in records)
            absent = _missing(self._target, [r for r in records if shard_name(r.digest) in doubtful])
            if not absent:
                return

    def _copy_shard(self, record: ShardRecord) -> None:
        name = shard_name(record.digest)
        source, target = self._source.storage, self._target.storage
        try:
            is_new = target.copy_from(source, name, nbytes=record.nbytes)
        except NotFoundError:
            raise missing(name, self._source.url) from None
        is_server_side = is_new is not None
        if is_new is None:
            is_new = target.put_known(name, lambda: self._read(record), nbytes=record.nbytes, sha256=record.digest)
        if (found := target.head(name).nbytes) != record.nbytes:
            raise _wrong_size(self._target, record, found)
        with self._lock:
            if is_new:  # perhaps again, where a prune took it while the lease was lost
                self._copied[record.digest] = record.nbytes, is_server_side
                self._report.copied_shards = len(self._copied)
                self._report.copied_bytes = sum(nbytes for nbytes, _ in self._copied.values())
                self._report.server_side_shards = sum(by_store for _, by_store in self._copied.values())
        self._report_done(record.nbytes)

    def _read(self, record: ShardRecord) -> Iterator[memoryview]:
        """The bytes of a shard of the source; raises after the last one if they are wrong."""
        name = shard_name(record.digest)
        state, nbytes = hashlib.sha256(), 0
        try:
            with self._source.storage.open_read(name) as reader:
                for piece in pieces(reader, limit=record.nbytes):
                    state.update(piece)
                    nbytes += len(piece)
                    if nbytes <= record.nbytes:
                        yield piece
        except NotFoundError:
            raise missing(name, self._source.url) from None
        if (found := state.hexdigest()) != record.digest:
            what = f"expected sha256 {record.digest[:12]} of {record.nbytes} bytes, read {found[:12]} of {nbytes}"
            raise damaged(name, self._source.url, what)

    def _copy_signatures(self, session: WriteSession, snapshot: Digest) -> None:
        """They are bound to the manifest's bytes, so they are as good there; the target's own stay."""
        try:
            signatures = read_signatures(self._source.storage, snapshot)
        except CorruptChunkError as error:
            log.warning("kvsnap: %s: not copied", error)
            return
        if signatures:
            session.keep([signature_name(snapshot)])
        for item in signatures:
            store_signature(self._target.storage, snapshot, item)

    def _report_done(self, nbytes: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._done += nbytes
                self._progress(min(self._done, self._report.nbytes), self._report.nbytes)


def _missing(target: Repository, records: Sequence[ShardRecord]) -> list[ShardRecord]:
    """Those that the target doesn't have.

    Raises:
        CorruptChunkError: it has one in another size.
    """
    if not records:
        return []
    there = list_shards(target.storage)
    for record in records:
        found = there.get(shard_name(record.digest), record.nbytes)
        if found != record.nbytes:
            raise _wrong_size(target, record, found)
    return [record for record in records if shard_name(record.digest) not in there]


def _wrong_size(repository: Repository, record: ShardRecord, found: int) -> CorruptChunkError:
    return CorruptChunkError(
        f"{shard_name(record.digest)} in {repository.url} is damaged: expected {record.nbytes} bytes, found {found}; "
        "delete it and copy again"
    )
