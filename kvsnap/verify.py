"""The verify ladder for a snapshot in a repository, on any storage. Nothing is changed.

quick      the manifest by its digest; catalog and shards exist in their size
default    also the catalog by its digest, the headers of all shards, and that all of them agree
sample     also the bytes of some chunks, chosen at random: XXH3 and BLAKE3
read-data  also every byte: sha256 of each shard, XXH3 and BLAKE3 of each chunk

Requests: a few and one listing, then with `default` one or two ranged reads per shard, with
`sample` one more per chunk, with `read-data` one of the whole shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvsnap.catalog import Catalog
from kvsnap.damage import dangling, missing, wrong_size
from kvsnap.errors import (
    CorruptChunkError,
    IncompatibleError,
    KvsnapError,
    MissingObjectError,
    NotFoundError,
    StorageError,
    UntrustedError,
)
from kvsnap.fetch import ShardTarget, check_against_catalog
from kvsnap.known import list_shards
from kvsnap.manifest import Digest, Manifest, decode_manifest
from kvsnap.namespace import Namespace
from kvsnap.repository import Repository, catalog_name, manifest_name, ref_name, shard_name
from kvsnap.runtime import widen_affinity
from kvsnap.shard import FIRST_READ, ShardHeader, decode_header, header_length
from kvsnap.signing import check_signed, signature_name
from kvsnap.storage import RefusedError, ShortReadError, Storage
from kvsnap.transfer import NUM_WORKERS, Progress, ShardHasher, pieces
from kvsnap.trust import TrustedKeys
from kvsnap.verify_cache import verify_cache_dir
from kvsnap.verify_report import (
    Depth,
    Problem,
    VerifyReport,
    choose_depth,
    choose_sample,
    compare_chunks,
    read_digests,
)

__all__ = ["Depth", "Problem", "VerifyReport", "verify_cache_dir", "verify_snapshot"]

HEADER_WORKERS = 8
"""Shards whose headers, or samples, are read at once."""

T = TypeVar("T")


def verify_snapshot(
    url: str | Storage,
    ref: str,
    *,
    quick: bool = False,
    sample: float | None = None,
    seed: int | None = None,
    read_data: bool = False,
    trusted: TrustedKeys | None = None,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify the snapshot `ref` of the repository at `url`.

    Also notes shards of the repository that no snapshot names: what an export that was
    killed leaves, and the next one uses.

    Args:
        quick, sample, read_data: How deep, at most one of them; `sample` is a share of the chunks.
        seed: Chooses the sample; without, another one each time.
        trusted: It is a problem if none of these has signed the snapshot.

    Raises:
        NotFoundError: no such repository, or nothing of this name in it.
        ConfigError: a wrong argument.
        IncompatibleError: it needs a later kvsnap.
        StorageError: the repository can't be read.
    """
    depth = choose_depth(quick=quick, sample=sample, read_data=read_data)
    repository = Repository.open(url, operation="verify")
    snapshot = repository.resolve(ref)
    report = VerifyReport(subject=snapshot, depth=depth, seed=seed)
    try:
        data = repository.manifest_bytes(snapshot)
        if trusted is not None:
            _check_signature(repository, snapshot, data, trusted, report)
        manifest = decode_manifest(data, expect=snapshot)
    except NotFoundError:
        if not repository.is_ref(ref):
            raise
        report.add("missing", ref_name(ref), str(dangling(ref, manifest_name(snapshot), repository.url)))
        manifest = None
    except CorruptChunkError as error:
        report.add("damaged", manifest_name(snapshot), str(error))
        manifest = None
    stored = _list_shards(repository, report)
    if manifest is not None:
        _Verification(repository, manifest, stored or {}, report, sample, progress).run()
    if stored is not None:
        _note_strays(repository, stored, report)
    return report


def _check_signature(
    repository: Repository, snapshot: Digest, manifest: bytes, trusted: TrustedKeys, report: VerifyReport
) -> None:
    try:
        report.signed_by = check_signed(repository.storage, manifest, trusted)
    except UntrustedError as error:
        report.add("untrusted", signature_name(snapshot), str(error))


class _Verification:
    """Of one snapshot whose manifest is right."""

    def __init__(
        self,
        repository: Repository,
        manifest: Manifest,
        stored: Mapping[str, int],
        report: VerifyReport,
        sample: float | None,
        progress: Progress | None,
    ) -> None:
        self._repository = repository
        self._storage = repository.storage
        self._manifest = manifest
        self._stored = stored
        self._report = report
        self._share = sample
        self._progress = progress
        self._sampled: set[int] = set()
        self._total = manifest.totals.nbytes
        self._unreadable: list[StorageError] = []

    def run(self) -> None:
        report, manifest = self._report, self._manifest
        catalog = None
        if report.depth == "quick":
            report.num_chunks = manifest.totals.num_chunks
            self._check_catalog_size()
        else:
            catalog = self._read_catalog()
        rows = None if catalog is None else catalog.rows_of_shards(len(manifest.shards))
        if self._share is not None and catalog is not None:
            self._sampled, report.seed = choose_sample(len(catalog), self._share, report.seed)
            self._total = int(catalog.nbytes[sorted(self._sampled)].sum())
        targets = []
        for i, record in enumerate(manifest.shards):
            target = None
            if catalog is not None and rows is not None:
                target = ShardTarget(digest=record.digest, nbytes=record.nbytes, catalog=catalog, rows=rows[i])
            targets.append((record.digest, record.nbytes, target))
        # Counts what was seen: one object that can't be read is a finding, a repository that can't be is none.
        for part in _in_parallel(self._shard, targets, NUM_WORKERS if report.depth == "read-data" else HEADER_WORKERS):
            report.join(part)
            if self._progress is not None:
                self._progress(report.read_bytes, self._total)
        if self._unreadable and len(self._unreadable) == len(manifest.shards):
            raise self._unreadable[0]

    def _check_catalog_size(self) -> None:
        record = self._manifest.catalog
        name = catalog_name(record.digest)
        try:
            found = self._storage.head(name).nbytes
        except NotFoundError:
            self._report.add("missing", name, str(missing(name, self._repository.url)))
            return
        if found != record.nbytes:
            error = wrong_size(name, self._repository.url, expected=record.nbytes, found=found)
            self._report.add("damaged", name, str(error))

    def _read_catalog(self) -> Catalog | None:
        name = catalog_name(self._manifest.catalog.digest)
        try:
            catalog = self._repository.catalog(self._manifest)
        except CorruptChunkError as error:
            kind = "missing" if isinstance(error, MissingObjectError) else "damaged"
            self._report.add(kind, name, str(error))
            return None
        if (tokens := int(catalog.tokens.sum())) != self._manifest.totals.num_tokens:
            message = f"it has {tokens} tokens, its manifest {self._manifest.totals.num_tokens}"
            self._report.add("mismatch", name, message)
        return catalog

    def _shard(self, item: tuple[Digest, int, ShardTarget | None]) -> VerifyReport:
        """One shard; called by several threads."""
        digest, nbytes, target = item
        part, name = self._report.part(), shard_name(digest)
        part.num_shards = 1
        if target is not None:
            part.num_chunks = len(target.rows)
        try:
            self._check_shard(digest, nbytes, name, target, part)
        except NotFoundError:
            part.add("missing", name, str(missing(name, self._repository.url)))
        except StorageError as error:
            message = str(error)
            if isinstance(error, ShortReadError):  # every try broke off: nobody can tell which of the two it is
                message = f"{error}; expected sha256 {digest[:12]}: the object is cut off, or connections to it are"
            part.add("unreadable", name, message)
            self._unreadable.append(error)
        return part

    def _check_shard(
        self, digest: Digest, nbytes: int, name: str, target: ShardTarget | None, part: VerifyReport
    ) -> None:
        found = self._stored.get(name)
        if found is None:  # not listed: it may have come since, or be no regular file
            found = self._storage.head(name).nbytes
        depth = self._report.depth
        if found != nbytes:
            part.add("damaged", name, str(wrong_size(name, self._repository.url, expected=nbytes, found=found)))
        if depth == "quick" or (found != nbytes and depth != "read-data"):
            return
        header = self._check_header(name, found, target, part)
        if depth == "read-data":
            self._read_whole(name, digest, nbytes, header, target, part)
        elif depth == "sample" and header is not None and target is not None:
            self._read_sample(name, target, part)

    def _check_header(
        self, name: str, nbytes: int, target: ShardTarget | None, part: VerifyReport
    ) -> ShardHeader | None:
        ns = self._manifest.namespace
        try:
            header = _stored_header(self._storage, ns, name, nbytes)
        except (CorruptChunkError, IncompatibleError) as error:
            part.add("damaged", name, f"shard {name} is damaged: {error}")
            return None
        if target is not None:
            try:
                check_against_catalog(header, target, ns)
            except CorruptChunkError as error:
                part.add("mismatch", name, f"shard {name} and its catalog disagree: {error}")
        return header

    def _read_sample(self, name: str, target: ShardTarget, part: VerifyReport) -> None:
        catalog = target.catalog
        for row in target.rows.tolist():
            if row not in self._sampled:
                continue
            nbytes = int(catalog.nbytes[row])
            with self._storage.open_read(name, offset=int(catalog.offset[row]), nbytes=nbytes) as reader:
                found = read_digests(reader, nbytes)
            part.read_chunks += 1
            part.read_bytes += nbytes
            for what, read, expected in (
                ("blake3", found.blake3, catalog.blake3[row].tobytes()),
                ("xxh3", found.xxh3, catalog.xxh3[row].tobytes()),
            ):
                if read != expected:
                    _add_wrong_chunk(part, name, catalog.key_of(row), what, expected, read)
                    break

    def _read_whole(
        self,
        name: str,
        digest: Digest,
        nbytes: int,
        header: ShardHeader | None,
        target: ShardTarget | None,
        part: VerifyReport,
    ) -> None:
        entries = () if header is None else header.chunks
        hasher = ShardHasher(entries)
        with self._storage.open_read(name) as reader:
            for piece in pieces(reader, limit=nbytes):
                hasher.update(piece)
        part.read_bytes += hasher.nbytes
        wanted = None if target is None else {target.catalog.key_of(row) for row in target.rows.tolist()}
        read = entries[: len(hasher.digests)]
        part.read_chunks += sum(wanted is None or entry.key in wanted for entry in read)
        before = len(part.problems)
        compare_chunks(name, entries, hasher.digests, part)
        if target is not None:
            catalog = target.catalog
            blake3 = {catalog.key_of(row): catalog.blake3[row].tobytes() for row in target.rows.tolist()}
            for entry, digests in zip(entries, hasher.digests, strict=False):
                expected = blake3.get(entry.key, digests.blake3)
                if digests.xxh3 == entry.xxh3 and digests.blake3 != expected:
                    _add_wrong_chunk(part, name, entry.key, "blake3", expected, digests.blake3)
        if hasher.sha256() != digest and len(part.problems) == before:
            message = f"shard {name} is damaged: expected sha256 {digest[:12]}, read {hasher.sha256()[:12]}"
            part.add("damaged", name, message)


def _add_wrong_chunk(report: VerifyReport, name: str, key: bytes, what: str, expected: bytes, read: bytes) -> None:
    message = (
        f"shard {name} is damaged in chunk {key.hex()[:12]}: expected {what} {expected.hex()[:12]}, "
        f"read {read.hex()[:12]}"
    )
    report.add("damaged", name, message, key)


def _in_parallel(act: Callable[[T], VerifyReport], items: Iterable[T], workers: int) -> Iterable[VerifyReport]:
    """What `act` says of each item, in order; the rest is given up when somebody stops."""
    pool = ThreadPoolExecutor(workers, "kvsnap-verify", initializer=widen_affinity)
    try:
        yield from pool.map(act, items)
    finally:
        pool.shutdown(cancel_futures=True)


def _stored_header(storage: Storage, ns: Namespace, name: str, nbytes: int) -> ShardHeader:
    """Read a shard's header: one request, or two where it is long."""
    start = bytearray(min(FIRST_READ, nbytes))
    found = storage.read_into(name, memoryview(start), 0)
    length = header_length(start[:found], nbytes)
    if length > found:
        rest = bytearray(length - found)
        found += storage.read_into(name, memoryview(rest), found)
        start += rest
    if found < length:
        raise CorruptChunkError(f"it ends at byte {found}, inside its header of {length} bytes")
    return decode_header(start[:length], nbytes, ns)


def _list_shards(repository: Repository, report: VerifyReport) -> dict[str, int] | None:
    """Sizes of all shards; None where that may not be asked."""
    try:
        return list_shards(repository.storage)
    except RefusedError as error:
        report.notes.append(f"shards that belong to no snapshot are not looked for: {error}")
        return None


def _note_strays(repository: Repository, stored: Mapping[str, int], report: VerifyReport) -> None:
    """Note shards that no manifest names, and files that have no business there."""
    named: set[Digest] = set()
    for snapshot in repository.snapshots():
        try:
            named.update(shard.digest for shard in repository.manifest(snapshot).shards)
        except KvsnapError as error:
            if snapshot != report.subject:
                report.notes.append(f"another snapshot can't be read: {error}")
    known = {shard_name(digest) for digest in named}
    for name, nbytes in stored.items():
        if name not in known:
            report.notes.append(f"{name} ({nbytes} bytes) belongs to no snapshot that can be read")
