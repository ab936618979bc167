"""What a cache directory holds, at rest and by the word of its live engines. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvsnap.engines import STATUS_TIMEOUT_S, ask, engines_of
from kvsnap.errors import KvsnapError, NotFoundError
from kvsnap.local_shards import live_entries, scan_shards
from kvsnap.namespace import Namespace
from kvsnap.tiers import dram_lock, paths, quota

DRAM_DIR = Path("/dev/shm")
"""Where the files of the DRAM tier lie unless an engine is told otherwise (`dram_dir`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """One live engine."""

    engine: str
    pid: int
    namespace: str
    socket: str
    answer: dict[str, Any] | None
    """Its own answer to `status`; None if it gave none."""
    error: str | None
    """Why it gave none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceStatus:
    """One namespace's disk tier, as its files tell."""

    directory: str
    namespace: str
    """Id, 64 hex"""
    human: dict[str, Any]
    """What is known for people: model, revision, engine version."""
    num_shards: int
    num_chunks: int
    """Chunks with all their ancestors: those that can be used."""
    num_tokens: int
    """Tokens in them."""
    dead_chunks: int
    """Chunks that lack an ancestor, and second copies."""
    shard_bytes: int
    """Bytes of the shards as files."""
    real_bytes: int
    """What the shards take on disk."""
    damaged_shards: int
    """Shards whose header is wrong."""
    quarantined_shards: int
    quarantined_bytes: int
    is_used: bool
    """Whether an engine or a job uses it now; else it gives way when room is needed (`kvsnap prune` removes it)."""
    last_use: float
    """Unix time [s]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DramFileStatus:
    """One DRAM tier's file at rest or in use."""

    path: str
    namespace: str
    num_chunks: int
    nbytes: int
    """What it takes in memory."""
    is_used: bool
    """Whether an engine or a worker holds it; else the next engine of its namespace takes it over."""
    last_use: float
    """Unix time [s]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    """What is in the tiers of a cache directory."""

    cache_dir: str
    cap_bytes: int
    """Most real bytes that the directory may take."""
    is_cap_recorded: bool
    """Whether an engine recorded the cap; else it is 80 % of the file system."""
    used_bytes: int
    """Real bytes of everything in the directory."""
    engines: tuple[EngineStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]
    dram_files: tuple[DramFileStatus, ...]
    """Of this directory."""
    other_dram_files: tuple[DramFileStatus, ...]
    """Of this user's other cache directories, those that nobody holds."""


def read_status(cache_dir: Path, *, dram_dir: Path = DRAM_DIR, timeout_s: float = STATUS_TIMEOUT_S) -> StatusReport:
    """Ask the live engines of `cache_dir`, and look at what lies there.

    Raises:
        NotFoundError: there is no such directory.
        ConfigError: it is something else than a cache directory.
    """
    if not cache_dir.is_dir():
        raise NotFoundError(f"there is no directory {cache_dir}")
    recorded = quota.read_marker(cache_dir)
    namespaces = paths.open_namespaces(cache_dir)
    in_memory = dram_lock.list_dram_files(dram_dir)
    return StatusReport(
        cache_dir=str(cache_dir),
        cap_bytes=recorded or quota.default_cap(cache_dir),
        is_cap_recorded=recorded is not None,
        used_bytes=quota.Meter(cache_dir).used_bytes(),
        engines=tuple(_ask_all(cache_dir, timeout_s)),
        namespaces=tuple(_namespace_status(directory, ns) for directory, ns in namespaces),
        dram_files=tuple(_dram_status(info) for info in in_memory if info.is_of(cache_dir)),
        other_dram_files=tuple(
            _dram_status(info) for info in in_memory if not info.is_used and not info.is_of(cache_dir)
        ),
    )


def dram_files(cache_dir: Path, dram_dir: Path, namespaces: Iterable[Namespace]) -> list[dram_lock.DramFileInfo]:
    """The DRAM tiers' files of these namespaces of this cache directory, and of no other directory."""
    bases = tuple(dram_lock.base_name(cache_dir, ns.id()) + "-" for ns in namespaces)
    found = dram_lock.list_dram_files(dram_dir)
    return [info for info in found if Path(info.path).name.startswith(bases)] if bases else []


def _ask_all(cache_dir: Path, timeout_s: float) -> list[EngineStatus]:
    found = []
    for record in engines_of(cache_dir):
        answer, error = None, None
        try:
            answer = ask(record, "status", {}, timeout_s=timeout_s)
        except KvsnapError as failure:
            error = str(failure)
        found.append(
            EngineStatus(
                engine=record.engine_id,
                pid=record.pid,
                namespace=record.namespace,
                socket=record.socket,
                answer=answer,
                error=error,
            )
        )
    return found


def _namespace_status(directory: Path, ns: Namespace) -> NamespaceStatus:
    scan = scan_shards(directory, ns)
    live, _ = live_entries(ns, scan.shards)
    quarantined = [e for e in paths.entries(directory / paths.QUARANTINE) if paths.is_own_file(e.name)]
    return NamespaceStatus(
        directory=directory.name,
        namespace=ns.id(),
        human=dict(ns.human),
        num_shards=len(scan.shards),
        num_chunks=len(live),
        num_tokens=sum(entry.tokens for _, entry in live.values()),
        dead_chunks=sum(len(shard.header.chunks) for shard in scan.shards) - len(live),
        shard_bytes=sum(shard.header.file_bytes for shard in scan.shards),
        real_bytes=sum(paths.real_bytes(shard.path) for shard in scan.shards),
        damaged_shards=len(scan.damaged),
        quarantined_shards=len(quarantined),
        quarantined_bytes=sum(paths.real_bytes(entry) for entry in quarantined),
        is_used=quota.is_used(directory),
        last_use=quota.last_use(directory),
    )


def _dram_status(info: dram_lock.DramFileInfo) -> DramFileStatus:
    return DramFileStatus(
        path=info.path,
        namespace=info.namespace_id,
        num_chunks=info.chunks,
        nbytes=info.bytes,
        is_used=info.is_used,
        last_use=info.last_use,
    )
