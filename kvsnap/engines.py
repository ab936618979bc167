"""The live engines of a cache directory, asked over their control sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvsnap import control
from kvsnap.errors import IncompatibleError, KvsnapError, NotFoundError, StorageError
from kvsnap.identity import ModelIdentity, differing_fields
from kvsnap.namespace import Namespace
from kvsnap.tiers.engines import EngineRecord, live_engines

FLUSH_TIMEOUT_S = 600.0
STATUS_TIMEOUT_S = 10.0
ANSWER_SECONDS = 5.0
"""An engine ends a flush in time by itself; its answer is waited for so much longer."""


def engines_of(cache_dir: Path, namespace: str | None = None) -> list[EngineRecord]:
    """The live engines of a cache directory, or only those of one namespace (its id). Changes nothing there."""
    found = live_engines(cache_dir, remove_dead=False)
    return [record for record in found if namespace is None or record.namespace == namespace]


def namespaces_in_use(cache_dir: Path, found: Sequence[tuple[Path, Namespace]]) -> list[tuple[Path, Namespace]]:
    """Those namespaces of a cache directory that its live engines use; all of `found` where no engine lives."""
    live = {record.namespace for record in engines_of(cache_dir)}
    return [(directory, ns) for directory, ns in found if ns.id() in live] if live else list(found)


def ask(record: EngineRecord, command: str, args: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Ask one engine.

    Raises:
        NotFoundError: it has no control socket, or has stopped.
        StorageError: it did not answer.
        KvsnapError: it refused or failed.
    """
    if not record.socket:
        raise NotFoundError(f"engine {record.engine_id} (pid {record.pid}) has no control socket; see its log")
    return control.call(Path(record.socket), command, args, timeout_s)


def flush_engine(record: EngineRecord, *, timeout_s: float) -> dict[str, Any]:
    """Have one engine write what only its DRAM holds to disk, as far as it gets within `timeout_s`; its answer.

    Raises:
        KvsnapError: as `ask`.
    """
    return ask(record, "flush", {"timeout_s": timeout_s}, timeout_s=timeout_s + ANSWER_SECONDS)


def flush_engines(
    cache_dir: Path, namespace: str | None = None, *, timeout_s: float = FLUSH_TIMEOUT_S
) -> dict[str, dict[str, Any]]:
    """Have the live engines write what only their DRAM holds to disk; their answers by engine id.

    An engine that stops meanwhile is left out. One that can't be asked (in another container of a shared directory)
    keeps nobody from asking the others.

    Raises:
        KvsnapError: one of them did not; what it holds only in DRAM isn't on disk. All were asked.
    """
    answers: dict[str, dict[str, Any]] = {}
    failed: list[str] = []
    for record in engines_of(cache_dir, namespace):
        try:
            answers[record.engine_id] = flush_engine(record, timeout_s=timeout_s)
        except KvsnapError as error:
            if record in engines_of(cache_dir, namespace):
                failed.append(f"engine {record.engine_id} (pid {record.pid}) did not flush: {error}")
    if failed:
        raise StorageError("; ".join(failed))
    return answers


def check_expected(found: Namespace, expected: Namespace, what: str) -> None:
    """Refuse a snapshot that isn't of the namespace that an engine expects.

    Raises:
        IncompatibleError: names the fields that differ.
    """
    fields = list(differing_fields(found.identity, expected.identity))
    ours, theirs = expected.layout.to_json(), found.layout.to_json()
    fields += [f"layout.{name}" for name in sorted(ours) if ours[name] != theirs[name]]
    fields += [name for name in ("chunk_tokens", "key_scheme", "format") if _differs(found, expected, name)]
    if fields:
        first = fields[0]
        raise IncompatibleError(
            f"{what} was made for another engine: {', '.join(fields)} differ; {first} is {_value(found, first)}, "
            f"this engine has {_value(expected, first)}; export it again from this engine",
            tuple(fields),
        )


def check_live_engines(cache_dir: Path, found: Namespace, what: str) -> list[EngineRecord]:
    """Refuse a snapshot that none of the directory's live engines could use; those that can.

    Raises:
        IncompatibleError: there are live engines and none matches; names the fields that differ from the closest.
    """
    records = engines_of(cache_dir)
    matching = [record for record in records if record.namespace == found.id()]
    if records and not matching:
        record, fields = min(((r, _fields_of(r, found)) for r in records), key=lambda pair: len(pair[1]))
        raise IncompatibleError(
            f"{what} was made for another engine than those that use {cache_dir}: engine {record.engine_id} "
            f"(pid {record.pid}) differs in {', '.join(fields)}; export it again from this engine, or import "
            "into another directory",
            fields,
        )
    return matching


def _fields_of(record: EngineRecord, found: Namespace) -> tuple[str, ...]:
    try:
        fields = list(differing_fields(ModelIdentity.from_json(dict(record.identity)), found.identity))
    except IncompatibleError as error:
        fields = list(error.fields or ("identity",))
    if record.layout != found.layout_hash:
        fields.append("layout")
    return tuple(fields) or ("chunk_tokens",)


def _differs(a: Namespace, b: Namespace, name: str) -> bool:
    return bool(getattr(a, name) != getattr(b, name))


def _value(ns: Namespace, dotted: str) -> str:
    """The value of a field as `differing_fields` names it, for a message."""
    value: Any = {
        **ns.identity.to_json(),
        "layout": ns.layout.to_json(),
        "chunk_tokens": ns.chunk_tokens,
        "key_scheme": ns.key_scheme,
        "format": ns.format,
    }
    rest = dotted
    while rest:
        if not isinstance(value, Mapping):
            return "nothing"
        if rest in value:
            return f"{value[rest]!s:.100}"
        name, _, rest = rest.partition(".")
        value = value.get(name)
    return f"{value!s:.100}"
