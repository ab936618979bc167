"""Records of live engines: `engines/<id>.json`, by which jobs find the engine of a cache directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvsnap.canonical import canonical_json
from kvsnap.runtime import process_start_time
from kvsnap.tiers import paths, writers


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """One engine that uses a namespace of this directory."""

    engine_id: str
    """vLLM's id of the engine: letters, digits, `_` and `-`."""
    pid: int
    """Of the process that holds the scheduler half."""
    start: int
    """Start time of that process in clock ticks since boot; pid and start name a process for good."""
    socket: str
    """Path of its control socket; empty if it has none."""
    namespace: str
    """Id of the namespace, 64 hex digits."""
    identity: Mapping[str, Any]
    """The identity with all its fields."""
    layout: str
    """Hash of the layout, 64 hex digits."""
    writer: str = ""
    """Name of its temporary directory, whose lock also tells that it lives."""

    @classmethod
    def from_json(cls, obj: object) -> EngineRecord:
        """Strict; raises ValueError."""
        types = {"pid": int, "start": int, "identity": dict}
        names = [field.name for field in fields(cls)]
        if not isinstance(obj, dict) or sorted(obj) != sorted(names):
            raise ValueError("an engine record has other fields")
        for name in names:
            if type(obj[name]) is not types.get(name, str):
                raise ValueError(f"an engine record has {name} {obj[name]!r:.80}")
        if obj["writer"] and not paths.is_writer_name(obj["writer"]):
            raise ValueError(f"an engine record has writer {obj['writer']!r:.80}")
        paths.engine_name(obj["engine_id"])
        return cls(**obj)


def write_record(namespace_dir: Path, record: EngineRecord, writer: writers.WriterDir) -> Path:
    """Write the record of an engine, replacing an older one of the same id.

    Raises:
        ConfigError: an engine id that can't be a file name.
        StorageError: it can't be written.
    """
    path = namespace_dir / paths.ENGINES / paths.engine_name(record.engine_id)
    paths.make_dir(path.parent)
    writer.write_file(path, canonical_json({**asdict(record), "identity": dict(record.identity)}))
    return path


def remove_record(namespace_dir: Path, engine_id: str) -> None:
    """Remove the record of an engine that stops."""
    paths.remove_file(namespace_dir / paths.ENGINES / paths.engine_name(engine_id))


def read_records(namespace_dir: Path) -> list[EngineRecord]:
    """All records of a namespace that can be read, of live and dead engines."""
    return [record for _, record in _read(namespace_dir) if record is not None]


def is_live(record: EngineRecord, namespace_dir: Path) -> bool:
    """Whether the engine's process is there, or (it may be in another container) its writer's lock is held."""
    if record.pid > 0 and process_start_time(record.pid) == record.start:
        return True
    return bool(record.writer) and writers.is_alive(namespace_dir / paths.TEMPORARY / record.writer)


def dead_records(namespace_dir: Path) -> list[Path]:
    """Record files of engines that don't live any more, and unreadable ones."""
    return [path for path, record in _read(namespace_dir) if record is None or not is_live(record, namespace_dir)]


def live_engines(cache_dir: Path, *, remove_dead: bool = True) -> list[EngineRecord]:
    """The live engines of all namespaces of a cache directory; records of dead ones, and unreadable ones, are removed.

    With `remove_dead` off, nothing in the directory changes.
    """
    found = []
    for directory in paths.namespace_dirs(cache_dir):
        for path, record in _read(directory):
            if record is not None and is_live(record, directory):
                found.append(record)
            elif remove_dead:
                paths.remove_file(path)
    return found


def _read(namespace_dir: Path) -> list[tuple[Path, EngineRecord | None]]:
    records: list[tuple[Path, EngineRecord | None]] = []
    for entry in sorted(paths.entries(namespace_dir / paths.ENGINES), key=lambda entry: entry.name):
        if not entry.name.endswith(".json") or not entry.is_file(follow_symlinks=False):
            continue
        path = namespace_dir / paths.ENGINES / entry.name
        try:
            record = EngineRecord.from_json(paths.read_json(path))
            records.append((path, record if paths.engine_name(record.engine_id) == entry.name else None))
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            records.append((path, None))
    return records
