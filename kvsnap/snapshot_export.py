"""Export: from a cache directory into a repository, as one snapshot.

What the snapshot holds is cut at the call: live engines flush, then the shards that are
there are listed. Everything becomes durable in one order, so that whatever can be listed
is complete: shards, catalog, manifest, ref (invariant 3). Killed before the manifest, an
export leaves objects that no snapshot names; the next one finds and uses them.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvsnap
from kvsnap.canonical import sha256_hex
from kvsnap.catalog import Catalog, encode_catalog
from kvsnap.engines import FLUSH_TIMEOUT_S, flush_engines
from kvsnap.errors import (
    ConfigError,
    CorruptChunkError,
    IncompatibleError,
    KvsnapError,
    NotFoundError,
    UntrustedError,
)
from kvsnap.gc_lists import removed_snapshots
from kvsnap.known import KnownChunks, StoredShard, list_shards
from kvsnap.local_shards import LocalShard, read_usage, scan_shards
from kvsnap.manifest import CatalogRecord, Digest, Manifest, ShardRecord, Totals
from kvsnap.namespace import Namespace
from kvsnap.refs import publish_ref
from kvsnap.repository import Repository, manifest_name, now_text, ref_name, shard_name
from kvsnap.selection import SELECTS, Select, Selection, select_chunks
from kvsnap.shard import ChunkEntry
from kvsnap.signing import SigningKey, store_signature
from kvsnap.storage import Storage
from kvsnap.tiers.paths import open_namespaces
from kvsnap.transfer import Progress
from kvsnap.trust import installed_keys
from kvsnap.upload import DamagedObjectError, Source, UploadedShard, Uploader
from kvsnap.writing import WriteSession, publish_snapshot, under_lease

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What an export did."""

    snapshot: Digest
    """Id of the snapshot."""
    url: str
    tag: str | None
    """The ref that names it now, if one was asked for."""
    is_new: bool
    """False: the repository had a snapshot of the same shards and chunks; nothing was published."""
    namespace: str
    """Id of the namespace, 64 hex."""
    parent: Digest | None
    """The snapshot that it follows."""
    content: str
    """Tells which chunks it holds, 64 hex: equal contents, equal chunks."""
    num_chunks: int
    num_tokens: int
    num_prefixes: int
    num_shards: int
    nbytes: int
    """Bytes of its shards."""
    sent_shards: int
    """Shards that the repository did not have yet."""
    sent_bytes: int
    num_broken: int = 0
    """Chunks left out because an ancestor is missing."""
    num_salted: int = 0
    """Chunks left out because they belong to a tenant."""
    num_unselected: int = 0
    """Chunks left out by `select` or `max_bytes`."""
    damaged: tuple[str, ...] = ()
    """Shards of the cache directory left out because they are damaged: what is wrong with each."""
    vanished: int = 0
    """Shards that were evicted while the export ran, left out."""
    flushed: Mapping[str, Mapping[str, Any]]
    """Answers of the live engines that flushed, by engine id."""

    def without(self, selection: Selection, damaged: Mapping[str, str], vanished: set[str]) -> ExportReport:
        """With what was left out."""
        return replace(
            self,
            num_broken=selection.num_broken,
            num_salted=selection.num_salted,
            num_unselected=selection.num_unselected,
            damaged=tuple(damaged.values()),
            vanished=len(vanished),
        )


def match_namespaces(cache_dir: Path, prefix: str | None = None) -> list[tuple[Path, Namespace]]:
    """The namespaces of a cache directory whose id or directory's name starts with `prefix`; all without one.

    Raises:
        NotFoundError: there is no such directory, or no namespace in it matches.
    """
    if not cache_dir.is_dir():
        raise NotFoundError(f"there is no directory {cache_dir}")
    found = open_namespaces(cache_dir)
    if not found:
        raise NotFoundError(f"{cache_dir} holds no namespace; no engine has stored anything in it")
    matching = [(d, ns) for d, ns in found if not prefix or d.name.startswith(prefix) or ns.id().startswith(prefix)]
    if not matching:
        names = ", ".join(directory.name for directory, _ in found)
        raise NotFoundError(f"no namespace in {cache_dir} starts with {prefix}; there are: {names}")
    return matching


def export_snapshot(
    cache_dir: Path,
    url: str | Storage,
    *,
    namespace: str | None = None,
    tag: str | None = None,
    select: Select = "all",
    max_bytes: int | None = None,
    include_salted: bool = False,
    flush: bool = True,
    flush_timeout_s: float = FLUSH_TIMEOUT_S,
    single_writer: bool = False,
    moves_if_unchanged: Callable[[Digest], bool] = lambda snapshot: True,
    last: ExportReport | None = None,
    signer: SigningKey | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Export chunks of one namespace of `cache_dir` to the repository at `url`, made there if nothing is.

    Shards go as they are; the catalog names the chunks that belong to the snapshot. May
    be killed and repeated; what is in the repository already is not sent again. Holds a
    lease while it runs, so no prune deletes what it relies on; when it was stopped for so
    long that the lease ran out, it looks again and sends what is missing.

    Args:
        namespace: Start of the id or of the directory's name; needed where there are several.
        tag: Ref that shall name the snapshot afterwards.
        select, max_bytes, include_salted: See `select_chunks`.
        flush: Have live engines write what only their DRAM holds first. Without, export what is on disk.
        single_writer: See `Repository.open`.
        moves_if_unchanged: Asked whether `tag` is moved, too, to this snapshot, which the repository had already.
        last: The caller's own last export. Where the chunks are the same ones still, and that snapshot was removed
            since, while `tag` names another: that was meant, and nothing is published.
        signer: Signs the manifest. Then what the repository has is relied on only where this key, or one of the
            trusted keys of this user (`kvsnap.trust`), has signed it; anything else is read here and hashed.

    Raises:
        ConfigError: several namespaces match; a wrong name; `url` holds something else.
        NotFoundError: no namespace, or no chunk to export.
        CorruptChunkError: the repository is damaged where this export would rely on it: `tag`, or a shard that lies
            there in another size. Nothing was published.
        StorageError: an engine did not flush, or a disk or the repository failed.
    """
    if tag is not None:
        ref_name(tag)
    if select not in SELECTS:
        raise ConfigError(f"select is {select!r}, expected one of {', '.join(SELECTS)}")
    matching = match_namespaces(cache_dir, namespace)
    if len(matching) > 1:
        names = ", ".join(directory.name for directory, _ in matching)
        raise ConfigError(f"{cache_dir} holds several namespaces, choose one: {names}")
    directory, ns = matching[0]
    repository = Repository.open_or_create(url, single_writer=single_writer)
    repository.storage.sweep()
    flushed = flush_engines(cache_dir, ns.id(), timeout_s=flush_timeout_s) if flush else {}
    act = partial(
        _export,
        repository,
        directory=directory,
        ns=ns,
        tag=tag,
        select=select,
        max_bytes=max_bytes,
        include_salted=include_salted,
        flushed=flushed,
        moves_if_unchanged=moves_if_unchanged,
        last=last,
        signer=signer,
        progress=progress,
    )
    try:
        return under_lease(repository, "export", act)
    except CorruptChunkError as error:  # damage here is left out and reported; this is damage there
        raise type(error)(f"not exported: {error}") from error


def _export(
    repository: Repository,
    session: WriteSession,
    *,
    directory: Path,
    ns: Namespace,
    tag: str | None,
    select: Select,
    max_bytes: int | None,
    include_salted: bool,
    flushed: Mapping[str, Mapping[str, Any]],
    moves_if_unchanged: Callable[[Digest], bool],
    last: ExportReport | None,
    signer: SigningKey | None,
    progress: Progress | None,
) -> ExportReport:
    """Export under the lease of `session`."""
    scan = scan_shards(directory, ns)
    damaged = {shard.id: f"shard {shard.path}: {shard.reason}" for shard in scan.damaged}
    vanished: set[str] = set()
    usage = read_usage(directory)
    removed = removed_snapshots(session.lists)
    earlier = {
        snapshot: manifest
        for snapshot, manifest in _earlier_snapshots(repository, ns, signer).items()
        if manifest_name(snapshot) not in removed
    }
    named = None if tag is None else _named_by(repository, tag)
    parent = named if named in earlier else next(iter(earlier), None)
    known = KnownChunks(_base(repository, parent, earlier), list_shards(repository.storage))
    uploader = Uploader(repository, known)
    now = time.time()
    while True:
        selection = select_chunks(
            ns,
            tuple(shard for shard in scan.shards if shard.id not in damaged and shard.id not in vanished),
            usage,
            known=known,
            select=select,
            max_bytes=max_bytes,
            include_salted=include_salted,
            now=now,
        )
        if not selection.entries:
            raise NotFoundError(_nothing(directory, selection, damaged))
        content = _content(selection)
        if last is not None and last.content == content and _was_removed(last.snapshot, named, earlier):
            again = replace(last, is_new=False, tag=None, sent_shards=0, sent_bytes=0, flushed=flushed)
            return again.without(selection, damaged, vanished)
        lost = len(damaged) + len(vanished)
        uploaded = _upload(selection, uploader, damaged, vanished, progress)
        if len(damaged) + len(vanished) > lost or _pruned_meanwhile(repository, session, uploader, uploaded):
            continue
        if not _learned(known, selection, uploaded):
            break

    publisher = _Publisher(repository, ns, selection, uploaded, parent, signer)
    snapshot, is_new = publisher.publish(earlier, session)
    is_tagged = tag is not None and (is_new or moves_if_unchanged(snapshot))
    if tag is not None and is_tagged:
        try:
            publish_ref(repository, session, tag, snapshot)
        except KvsnapError:
            log.warning("kvsnap: snapshot %s is published; ref %s was not moved to it", snapshot, tag)
            raise
    report = ExportReport(
        snapshot=snapshot,
        url=repository.url,
        tag=tag if is_tagged else None,
        is_new=is_new,
        namespace=ns.id(),
        parent=parent,
        content=content,
        num_chunks=publisher.totals.num_chunks,
        num_tokens=publisher.totals.num_tokens,
        num_prefixes=publisher.totals.num_prefixes,
        num_shards=len(selection.shards),
        nbytes=publisher.totals.nbytes,
        sent_shards=sum(shard.sent_bytes > 0 for shard in uploader.done.values()),
        sent_bytes=sum(shard.sent_bytes for shard in uploader.done.values()),
        flushed=flushed,
    )
    return report.without(selection, damaged, vanished)


def _upload(
    selection: Selection,
    uploader: Uploader,
    damaged: dict[str, str],
    vanished: set[str],
    progress: Progress | None,
) -> list[UploadedShard]:
    """Upload the chosen shards; those that can't be are added to `damaged` or `vanished`."""
    total = sum(shard.nbytes for shard in selection.shards)
    finished = 0

    def failed(shard: Source, error: Exception) -> bool:
        if not isinstance(shard, LocalShard):
            return False
        if isinstance(error, CorruptChunkError) and not isinstance(error, DamagedObjectError):
            damaged[shard.id] = str(error)
            return True
        if isinstance(error, NotFoundError) and not shard.path.exists():
            vanished.add(shard.id)
            return True
        return False

    def done(shard: Source) -> None:
        nonlocal finished
        finished += shard.nbytes
        if progress is not None:
            progress(finished, total)

    uploaded = uploader.upload_all(selection.shards, _split(selection), failed=failed, done=done)
    return [shard for shard in uploaded if shard is not None]


def _pruned_meanwhile(
    repository: Repository, session: WriteSession, uploader: Uploader, uploaded: list[UploadedShard]
) -> bool:
    """Whether a prune was deleting some of the shards already; these are to be uploaded again."""
    gone = set()
    for name in session.keep(shard_name(shard.digest) for shard in uploaded):
        try:
            repository.storage.head(name)
        except NotFoundError:
            gone.add(name)
    uploader.forget(gone)
    return bool(gone)


def _learned(known: KnownChunks, selection: Selection, uploaded: list[UploadedShard]) -> bool:
    """Whether shards turned out to be one and the same file, which a snapshot names only once.

    So it is where an earlier snapshot took a part of a local shard, and this one takes more of it: a shard is always
    uploaded whole, and the earlier catalog doesn't tell of the rest.
    """
    times = Counter(shard.digest for shard in uploaded)
    again = [
        (source, shard)
        for source, shard in zip(selection.shards, uploaded, strict=True)
        if isinstance(source, LocalShard) and times[shard.digest] > 1
    ]
    for source, shard in again:
        stored = StoredShard(digest=shard.digest, nbytes=shard.nbytes, scope=source.scope)
        known.learn(stored, source.header.chunks, shard.blake3)
    return bool(again)


def _split(selection: Selection) -> list[list[ChunkEntry]]:
    rows: list[list[ChunkEntry]] = [[] for _ in selection.shards]
    for entry, position in zip(selection.entries, selection.shard.tolist(), strict=True):
        rows[position].append(entry)
    return rows


class _Publisher:
    """Builds catalog and manifest of a finished upload and puts them into the repository."""

    def __init__(
        self,
        repository: Repository,
        ns: Namespace,
        selection: Selection,
        uploaded: list[UploadedShard],
        parent: Digest | None,
        signer: SigningKey | None,
    ) -> None:
        self._repository = repository
        self._signer = signer
        self._ns = ns
        self._selection = selection
        self._digests = [shard.digest for shard in uploaded]
        self._parent = parent
        self._catalog = _catalog_of(selection, uploaded)
        rows = np.bincount(selection.shard, minlength=len(selection.shards)).tolist()
        self._shards = tuple(
            ShardRecord(digest=shard.digest, nbytes=shard.nbytes, num_chunks=rows[i])
            for i, shard in enumerate(uploaded)
        )
        self.totals = Totals(
            num_chunks=len(self._catalog),
            num_tokens=int(self._catalog.tokens.sum()),
            nbytes=sum(shard.nbytes for shard in self._shards),
            num_prefixes=len(np.setdiff1d(np.arange(len(self._catalog)), self._catalog.parent_row)),
        )

    def publish(self, earlier: Mapping[Digest, Manifest], session: WriteSession) -> tuple[Digest, bool]:
        """The id, and whether the snapshot is new."""
        for snapshot, manifest in earlier.items():
            if self._is_same(manifest):
                session.renew()
                if self._signer is not None:
                    data = self._repository.manifest_bytes(snapshot)
                    store_signature(self._repository.storage, snapshot, self._signer.sign(data))
                return snapshot, False
        catalog = encode_catalog(self._catalog)
        catalog_digest = Digest(sha256_hex(catalog))
        human = self._ns.human
        manifest = Manifest(
            namespace=self._ns,
            created=now_text(),
            writer={"name": "kvsnap", "version": kvsnap.__version__},
            shards=self._shards,
            catalog=CatalogRecord(digest=catalog_digest, nbytes=len(catalog), num_rows=len(self._catalog)),
            totals=self.totals,
            parent=self._parent,
            annotations={name: human[name] for name in sorted(human) if name not in ("model", "revision")},
        )
        data = manifest.encode()
        snapshot = Digest(sha256_hex(data))
        signature = None if self._signer is None else self._signer.sign(data)
        publish_snapshot(self._repository, session, catalog=catalog, manifest=data, signature=signature)
        return snapshot, True

    def _is_same(self, manifest: Manifest) -> bool:
        """Whether an earlier snapshot has the same shards and the same chunks; hits and times don't count."""
        theirs = {shard.digest: (shard.nbytes, shard.num_chunks) for shard in manifest.shards}
        if theirs != {shard.digest: (shard.nbytes, shard.num_chunks) for shard in self._shards}:
            return False
        try:
            return set(self._repository.catalog(manifest).keys()) == set(self._catalog.keys())
        except CorruptChunkError:
            return False


def _catalog_of(selection: Selection, uploaded: list[UploadedShard]) -> Catalog:
    entries, shard = selection.entries, selection.shard.tolist()
    scopes = sorted({s.scope for s in selection.shards})
    code = {scope: i for i, scope in enumerate(scopes)}
    codes = np.array([code[s.scope] for s in selection.shards], np.int64)
    blake3 = [uploaded[i].blake3[entry.key] for entry, i in zip(entries, shard, strict=True)]
    return Catalog(
        key=_bytes(entry.key for entry in entries).reshape(-1, 32),
        parent_row=selection.parent_row,
        depth=np.array([entry.depth for entry in entries], np.int64),
        tokens=np.array([entry.tokens for entry in entries], np.int64),
        shard=selection.shard,
        offset=np.array([entry.offset for entry in entries], np.int64),
        nbytes=np.array([entry.nbytes for entry in entries], np.int64),
        xxh3=_bytes(entry.xxh3 for entry in entries).reshape(-1, 16),
        blake3=_bytes(blake3).reshape(-1, 32),
        scope=tuple(scopes),
        scope_code=codes[selection.shard],
        hits=selection.hits,
        last_use=selection.last_use,
    )


def _bytes(parts: Any) -> Any:
    return np.frombuffer(b"".join(parts), np.uint8)


def _earlier_snapshots(repository: Repository, ns: Namespace, signer: SigningKey | None) -> dict[Digest, Manifest]:
    """Manifests of the same namespace, newest first. What can't be read doesn't count.

    Nor does, where this export is to be signed, what nobody trusted has signed: the signature would vouch for it.
    """
    found = {}
    trusted = None if signer is None else signer.trusted_with(installed_keys())
    for snapshot in repository.snapshots():
        try:
            manifest = repository.manifest(snapshot, trusted=trusted)
        except UntrustedError as error:
            log.info("kvsnap: %s", error)
            continue
        except (CorruptChunkError, IncompatibleError, NotFoundError) as error:
            log.warning("kvsnap: %s", error)
            continue
        if manifest.namespace.id() == ns.id():
            found[snapshot] = manifest
    return dict(sorted(found.items(), key=lambda item: (item[1].created, item[0]), reverse=True))


def _named_by(repository: Repository, tag: str) -> Digest | None:
    try:
        return repository.ref(tag).snapshot
    except NotFoundError:
        return None


def _was_removed(snapshot: Digest, named: Digest | None, earlier: Mapping[Digest, Manifest]) -> bool:
    """Whether a snapshot is gone on purpose, since the ref names another one. Else it is damaged or lost."""
    return snapshot not in earlier and named not in (None, snapshot)


def _content(selection: Selection) -> str:
    keys = np.frombuffer(b"".join(entry.key for entry in selection.entries), np.uint8).reshape(-1, 32)
    content: bytes = np.bitwise_xor.reduce(keys, axis=0).tobytes()
    return content.hex()


def _base(
    repository: Repository, parent: Digest | None, earlier: Mapping[Digest, Manifest]
) -> tuple[Manifest, Catalog] | None:
    if parent is None:
        return None
    try:
        return earlier[parent], repository.catalog(earlier[parent])
    except KvsnapError as error:
        log.warning("kvsnap: %s", error)
        return None


def _nothing(directory: Path, selection: Selection, damaged: Mapping[str, str]) -> str:
    reasons = [
        f"{count} {why}"
        for count, why in (
            (selection.num_broken, "chunks lack an ancestor"),
            (selection.num_salted, "chunks are salted"),
            (selection.num_unselected, "chunks were not selected or do not fit"),
            (len(damaged), "shards are damaged"),
        )
        if count
    ]
    why = ", ".join(reasons) or "it has no shard"
    return "; ".join((f"{directory} holds no chunk to export: {why}", *damaged.values()))
