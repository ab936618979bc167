"""How the processes of one engine find each other at start, through small files.

vLLM builds the workers' connectors before the scheduler's, and gives no channel
between them that early. So each rank leaves its geometry in the runtime directory,
the scheduler half reads all of them and leaves the tier's name (or "declined" and
why), and the workers map it when they are asked for handshake data.

Files are named by vLLM's engine id, which is the same in all processes of an
engine. One of a process that is gone counts as not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvsnap.atomic import write_file
from kvsnap.errors import KvsnapError
from kvsnap.runtime import process_start_time, runtime_dir

_PREFIX = "rendezvous-"
_MAX_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGeometry:
    """What one worker's KV cache looks like, as found in its registered tensors."""

    rank: int
    """Global rank inside the engine."""
    tp_rank: int
    """Rank inside its pipeline stage."""
    tp_size: int
    """Ranks of a pipeline stage."""
    pp_rank: int
    """Pipeline stage."""
    pp_size: int
    """Pipeline stages."""
    layers: tuple[str, ...]
    """Names of the layers with a KV cache of their own, in the order of a slice."""
    kv_heads: int
    """KV heads (or head slots) in a page."""
    block_tokens: int
    """Tokens of an engine block."""
    page_shape: tuple[int, ...]
    """Dimensions of a page in memory order, in elements."""
    page_bytes: int
    """Bytes of a page, without padding."""
    dtype: str
    """Element type, by its safetensors name."""
    page_format: dict[str, str]
    """Backend, instruction set and order inside a page: opaque, compared for equality."""
    replicated: bool
    """Whether all ranks of a pipeline stage hold the same bytes (MLA)."""
    kv_scales: tuple[tuple[float, float], ...] | None
    """Static (key, value) scale of each layer; None if the cache isn't quantized."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> RankGeometry:
        """Rebuild; `KvsnapError` where a field is missing or unknown."""
        names = {field.name for field in fields(cls)}
        if set(obj) != names:
            raise KvsnapError(f"a rank's geometry has fields {sorted(set(obj) ^ names)} too many or too few")
        values = dict(obj)
        for name in ("layers", "page_shape"):
            values[name] = tuple(values[name])
        if values["kv_scales"] is not None:
            values["kv_scales"] = tuple((float(key), float(value)) for key, value in values["kv_scales"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Why kvsnap stays out of this engine."""

    reason: str
    """For people, one line."""


def write_rank(engine_id: str, rank: int, answer: RankGeometry | Declined) -> None:
    """Leave what this worker found, for the scheduler half."""
    _write(_path(engine_id, f"rank{rank}"), answer)


def read_ranks(engine_id: str, world_size: int) -> list[RankGeometry] | Declined:
    """The geometry of all ranks, by rank; or why there is none."""
    found: list[RankGeometry] = []
    for rank in range(world_size):
        content = _read(_path(engine_id, f"rank{rank}"))
        if content is None:
            return Declined(
                reason=f"rank {rank} of {world_size} left no geometry on this host; "
                "ranks on several hosts are not supported"
            )
        if "declined" in content:
            return Declined(reason=str(content["declined"]))
        geometry = RankGeometry.from_json(content["content"])
        if geometry.rank != rank:
            return Declined(reason=f"rank {rank}'s geometry says rank {geometry.rank}")
        found.append(geometry)
    return found


def write_tier(engine_id: str, answer: Mapping[str, Any] | Declined) -> None:
    """Leave the tier's name and geometry, for the workers."""
    _write(_path(engine_id, "tier"), answer)


def read_tier(engine_id: str) -> dict[str, Any] | Declined:
    """What the scheduler half left, or why there is no tier."""
    content = _read(_path(engine_id, "tier"))
    if content is None:
        return Declined(reason="the scheduler half left no tier on this host")
    if "declined" in content:
        return Declined(reason=str(content["declined"]))
    return dict(content["content"])


def sweep() -> int:
    """Remove the files of processes that are gone; how many."""
    removed = 0
    for path in list(runtime_dir().glob(f"{_PREFIX}*.json")):
        if _read(path) is None:
            with contextlib.suppress(OSError):
                path.unlink()
                removed += 1
    return removed


def remove_own(engine_id: str) -> None:
    """Remove what this process left for `engine_id`."""
    for path in _files_of(engine_id):
        content = _read(path)
        if content is not None and content["pid"] == os.getpid():
            with contextlib.suppress(OSError):
                path.unlink()


def _files_of(engine_id: str) -> Iterator[Path]:
    return runtime_dir().glob(f"{_tag(engine_id)}.*.json")


def _tag(engine_id: str) -> str:
    """An engine id may be anything the operator types, so it never becomes part of a path."""
    return _PREFIX + hashlib.sha256(engine_id.encode()).hexdigest()[:24]


def _path(engine_id: str, what: str) -> Path:
    return runtime_dir() / f"{_tag(engine_id)}.{what}.json"


def _write(path: Path, answer: RankGeometry | Mapping[str, Any] | Declined) -> None:
    pid = os.getpid()
    content: dict[str, Any] = {"pid": pid, "start": process_start_time(pid)}
    match answer:
        case Declined():
            content["declined"] = answer.reason
        case RankGeometry():
            content["content"] = answer.to_json()
        case _:
            content["content"] = dict(answer)
    write_file(path, json.dumps(content).encode(), mode=0o600)


def _read(path: Path) -> dict[str, Any] | None:
    """The file's content; None if it is not there, not ours, or its process is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid() or info.st_size > _MAX_BYTES:
            return None
        try:
            content = json.loads(file.read())
            alive = process_start_time(int(content["pid"])) == int(content["start"])
        except (ValueError, KeyError, TypeError):
            return None
    if not alive or ("declined" not in content and not isinstance(content.get("content"), dict)):
        return None
    return dict(content)
