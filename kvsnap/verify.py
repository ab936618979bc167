"""The verify ladder: is a snapshot, or a cache directory, complete and undamaged?

By default structure only: objects exist in their size, digests of manifest and catalog,
headers of all shards, and all of them agree. With `read_data` also every byte: sha256 of
each shard, XXH3 and BLAKE3 of each chunk. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvsnap.catalog import Catalog
from kvsnap.errors import ConfigError, CorruptChunkError, IncompatibleError, KvsnapError, NotFoundError, StorageError
from kvsnap.fetch import ShardTarget, check_against_catalog
from kvsnap.local_shards import (
    IMPORTED_ID_DIGITS,
    FdReader,
    LocalShard,
    header_length,
    live_entries,
    open_shard,
    parse_header,
    scan_shards,
)
from kvsnap.manifest import Digest, Manifest
from kvsnap.namespace import Namespace
from kvsnap.repository import Repository, ref_name, shard_name
from kvsnap.shard import ChunkEntry, ShardHeader
from kvsnap.snapshot_export import match_namespaces
from kvsnap.storage import Storage
from kvsnap.tiers import paths
from kvsnap.transfer import Progress, RangeDigests, ShardHasher, pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong."""

    kind: str
    """`missing`, `damaged` or `mismatch`."""
    object: str
    """Name in the repository, or path, of what it concerns."""
    chunk: str | None
    """Key of the chunk that it concerns, 64 hex, if it is only one."""
    message: str


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """What a verification found. Good if there are no problems."""

    subject: str
    """The snapshot's id, or the directory."""
    read_data: bool
    """Whether every byte was read."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is unusual and harmless: shards that no snapshot names, chunks without a full chain."""
    num_shards: int = 0
    """Shards looked at."""
    num_chunks: int = 0
    """Chunks looked at."""
    read_bytes: int = 0
    """Bytes of shards read."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def add(self, kind: str, object_name: str, message: str, chunk: bytes | None = None) -> None:
        """Note a problem."""
        key = None if chunk is None else chunk.hex()
        self.problems.append(Problem(kind=kind, object=object_name, chunk=key, message=message))


def verify_snapshot(
    url: str | Storage, ref: str, *, read_data: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Verify the snapshot `ref` of the repository at `url`.

    Also notes shards of the repository that no snapshot names: what an export that was
    killed leaves, and the next one uses.

    Raises:
        NotFoundError: no such repository, or nothing of this name in it.
        IncompatibleError: it needs a later kvsnap.
        StorageError: the repository can't be read.
    """
    repository = Repository.open(url, operation="verify")
    snapshot = repository.resolve(ref)
    report = VerifyReport(subject=snapshot, read_data=read_data)
    try:
        manifest = repository.manifest(snapshot)
    except NotFoundError as error:
        if not _is_ref(repository, ref):
            raise
        report.add("missing", ref_name(ref), f"ref {ref} names a snapshot that is gone: {error}")
    except CorruptChunkError as error:
        report.add("damaged", f"manifests/{snapshot}.json", str(error))
    else:
        _verify_content(repository, manifest, report, read_data=read_data, progress=progress)
    _note_strays(repository, report)
    return report


def verify_cache_dir(
    cache_dir: Path, *, namespace: str | None = None, read_data: bool = False, progress: Progress | None = None
) -> VerifyReport:
    """Verify the shards of all namespaces of a cache directory, or of those that start with `namespace`.

    Works beside a live engine: a shard that it evicts meanwhile is no problem.

    Raises:
        NotFoundError: there is no such directory, or no such namespace in it.
        StorageError: it can't be read.
    """
    report = VerifyReport(subject=str(cache_dir), read_data=read_data)
    directories = match_namespaces(cache_dir, namespace)
    if namespace is None:
        known = {directory for directory, _ in directories}
        for directory in paths.namespace_dirs(cache_dir):
            if directory not in known:
                message = f"{directory / paths.NAMESPACE} is missing or damaged; its chunks can't be used"
                report.add("damaged", str(directory / paths.NAMESPACE), message)
    scans = [(directory, ns, scan_shards(directory, ns)) for directory, ns in directories]
    total = sum(shard.header.file_bytes for _, _, scan in scans for shard in scan.shards)
    for directory, ns, scan in scans:
        for bad in scan.damaged:
            if bad.path.exists():
                report.add("damaged", str(bad.path), f"shard {bad.path} is damaged: {bad.reason}")
        live, num_dead = live_entries(ns, scan.shards)
        report.num_shards += len(scan.shards)
        report.num_chunks += len(live) + num_dead
        if num_dead:
            report.notes.append(f"{directory.name}: {num_dead} chunks lack an ancestor and can't be used")
        if quarantined := len(paths.entries(directory / paths.QUARANTINE)):
            report.notes.append(f"{directory.name}: {quarantined} files are in quarantine")
        for shard in scan.shards:
            if read_data:
                _read_local(shard, report)
                if progress is not None:
                    progress(report.read_bytes, total)
    return report


def _verify_content(
    repository: Repository, manifest: Manifest, report: VerifyReport, *, read_data: bool, progress: Progress | None
) -> None:
    catalog: Catalog | None = None
    try:
        catalog = repository.catalog(manifest)
    except (NotFoundError, CorruptChunkError) as error:
        kind = "missing" if isinstance(error, NotFoundError) else "damaged"
        report.add(kind, f"catalogs/{manifest.catalog.digest}.parquet", str(error))
    else:
        if (tokens := int(catalog.tokens.sum())) != manifest.totals.num_tokens:
            name = f"catalogs/{manifest.catalog.digest}.parquet"
            report.add("mismatch", name, f"it has {tokens} tokens, its manifest {manifest.totals.num_tokens}")
    rows = None if catalog is None else catalog.rows_of_shards(len(manifest.shards))
    for i, record in enumerate(manifest.shards):
        name = shard_name(record.digest)
        report.num_shards += 1
        try:
            found = repository.storage.head(name).nbytes
        except NotFoundError:
            report.add("missing", name, f"shard {name} is missing; export the snapshot again")
            continue
        except StorageError as error:
            report.add("damaged", name, str(error))
            continue
        if found != record.nbytes:
            report.add("damaged", name, f"shard {name} is damaged: expected {record.nbytes} bytes, found {found}")
            if not read_data:
                continue
        target = None
        if catalog is not None and rows is not None:
            report.num_chunks += len(rows[i])
            target = ShardTarget(digest=record.digest, nbytes=record.nbytes, catalog=catalog, rows=rows[i])
        header = _check_header(repository, manifest.namespace, name, found, target, report)
        if read_data:
            _read_stored(repository, name, record.digest, record.nbytes, header, target, report)
            if progress is not None:
                progress(report.read_bytes, manifest.totals.nbytes)


def _check_header(
    repository: Repository, ns: Namespace, name: str, nbytes: int, target: ShardTarget | None, report: VerifyReport
) -> ShardHeader | None:
    try:
        header = _stored_header(repository, ns, name, nbytes)
    except (CorruptChunkError, IncompatibleError) as error:
        report.add("damaged", name, f"shard {name} is damaged: {error}")
        return None
    if target is not None:
        try:
            check_against_catalog(header, target, ns)
        except CorruptChunkError as error:
            report.add("mismatch", name, f"shard {name} and its catalog disagree: {error}")
    return header


def _stored_header(repository: Repository, ns: Namespace, name: str, nbytes: int) -> ShardHeader:
    """Read a shard's header by ranges."""
    start = bytearray(8)
    repository.storage.read_into(name, memoryview(start), 0)
    head = bytearray(header_length(start, nbytes))
    repository.storage.read_into(name, memoryview(head), 0)
    return parse_header(head, nbytes, ns)


def _read_stored(
    repository: Repository,
    name: str,
    digest: Digest,
    nbytes: int,
    header: ShardHeader | None,
    target: ShardTarget | None,
    report: VerifyReport,
) -> None:
    entries = () if header is None else header.chunks
    hasher = ShardHasher(entries)
    with repository.storage.open_read(name) as reader:
        for piece in pieces(reader, limit=nbytes):
            hasher.update(piece)
    report.read_bytes += hasher.nbytes
    before = len(report.problems)
    _compare_chunks(f"shard {name}", name, entries, hasher.digests, report)
    if target is not None and header is not None:
        catalog = target.catalog
        blake3 = {catalog.key_of(row): catalog.blake3[row].tobytes() for row in target.rows.tolist()}
        for entry, digests in zip(entries, hasher.digests, strict=False):
            if digests.xxh3 == entry.xxh3 and blake3.get(entry.key, digests.blake3) != digests.blake3:
                message = (
                    f"shard {name} is damaged in chunk {entry.key.hex()[:12]}: expected blake3 "
                    f"{blake3[entry.key].hex()[:12]}, read {digests.blake3.hex()[:12]}"
                )
                report.add("damaged", name, message, entry.key)
    if hasher.sha256() != digest and len(report.problems) == before:
        report.add(
            "damaged",
            name,
            f"shard {name} is damaged: expected sha256 {digest[:12]}, read {hasher.sha256()[:12]}",
        )


def _read_local(shard: LocalShard, report: VerifyReport) -> None:
    entries = shard.header.chunks
    hasher = ShardHasher(entries)
    name = str(shard.path)
    try:
        with open_shard(shard.path, direct=True) as fd:
            for piece in pieces(FdReader(fd, name), limit=shard.header.file_bytes):
                hasher.update(piece)
    except NotFoundError:
        return
    except StorageError as error:
        report.add("damaged", name, str(error))
        return
    report.read_bytes += hasher.nbytes
    before = len(report.problems)
    _compare_chunks(f"shard {name}", name, entries, hasher.digests, report)
    is_imported = len(shard.id) == IMPORTED_ID_DIGITS
    if is_imported and hasher.sha256() != shard.id and len(report.problems) == before:
        message = f"shard {name} is damaged: expected sha256 {shard.id[:12]}, read {hasher.sha256()[:12]}"
        report.add("damaged", name, message)


def _compare_chunks(
    where: str, name: str, entries: Sequence[ChunkEntry], found: Sequence[RangeDigests], report: VerifyReport
) -> None:
    for entry, digests in zip(entries, found, strict=False):
        if digests.xxh3 != entry.xxh3:
            message = (
                f"{where} is damaged in chunk {entry.key.hex()[:12]}: expected xxh3 {entry.xxh3.hex()[:12]}, "
                f"read {digests.xxh3.hex()[:12]}"
            )
            report.add("damaged", name, message, entry.key)
    for entry in entries[len(found) :]:
        message = f"{where} is damaged in chunk {entry.key.hex()[:12]}: the file ends before the chunk does"
        report.add("damaged", name, message, entry.key)


def _is_ref(repository: Repository, name: str) -> bool:
    try:
        repository.ref(name)
    except (ConfigError, NotFoundError):
        return False
    return True


def _note_strays(repository: Repository, report: VerifyReport) -> None:
    """Note shards that no manifest names, and files that have no business there."""
    named: set[Digest] = set()
    for snapshot in repository.snapshots():
        try:
            named.update(shard.digest for shard in repository.manifest(snapshot).shards)
        except KvsnapError as error:
            if snapshot != report.subject:
                report.notes.append(f"another snapshot can't be read: {error}")
    known = {shard_name(digest) for digest in named}
    for info in repository.storage.list("shards/"):
        if info.name not in known:
            report.notes.append(f"{info.name} ({info.nbytes} bytes) belongs to no snapshot that can be read")
