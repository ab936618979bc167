"""Lists of objects that are to be deleted: objects under `gc/`.

A list starts as `marked`: a prune found its objects unneeded, or somebody removed a
snapshot. Whoever wants one of them again takes its name off the list; a prune that has
waited long enough turns the list to `sweeping`, deletes what is on it, then the list.
Both are compare-and-swaps on the one object, so one of them sees the other.

    marked --(a writer needs an object)--> marked, without it
    marked --(grace is over, a prune)----> sweeping --> gone
    sweeping --(a writer, and that prune is dead)--> sweeping, without it
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from kvsnap.canonical import canonical_json
from kvsnap.errors import CorruptChunkError, NotFoundError
from kvsnap.leases import swap
from kvsnap.storage import Storage, is_valid_name

Reason = Literal["removed", "unneeded"]

MAX_LIST_BYTES = 4 << 20
MAX_OBJECTS = 5_000
"""On one list, so that sweeping it is short."""

_NAME = re.compile(r"gc/([0-9a-f]{32})\.json", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcList:
    """One list, as it was read."""

    id: str
    """32 hex, random"""
    reason: Reason
    """`removed`: a snapshot that somebody removed; `unneeded`: no snapshot needs these."""
    marked: int
    """When, by the storage's clock [Unix time, s]."""
    sweeper: str | None
    """Id of the lease of the prune that deletes them; None while they are only marked."""
    objects: Mapping[str, int]
    """Names, with their sizes in bytes."""
    version: str = ""

    @property
    def name(self) -> str:
        """Of the object."""
        return f"gc/{self.id}.json"

    @property
    def nbytes(self) -> int:
        """Of all its objects."""
        return sum(self.objects.values())


def list_ids(storage: Storage) -> list[str]:
    """Ids of all lists."""
    return [match[1] for info in storage.list("gc/") if (match := _NAME.fullmatch(info.name))]


def read_list(storage: Storage, list_id: str) -> GcList | None:
    """One list; None if it is gone.

    Raises:
        CorruptChunkError: it makes no sense.
        StorageError: the storage failed.
    """
    name = f"gc/{list_id}.json"
    try:
        data, version = storage.get_versioned(name, max_bytes=MAX_LIST_BYTES)
    except NotFoundError:
        return None
    try:
        obj = json.loads(data)
        reason, marked, sweeper = obj["reason"], obj["marked"], obj["sweeper"]
        objects = {row["name"]: row["bytes"] for row in obj["objects"]}
        if (
            reason not in ("removed", "unneeded")
            or type(marked) is not int
            or not (sweeper is None or isinstance(sweeper, str))
            or not all(isinstance(key, str) and is_valid_name(key) for key in objects)
            or not all(type(value) is int and value >= 0 for value in objects.values())
        ):
            raise ValueError("a field is wrong")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptChunkError(
            f"{name} in {storage.url} is damaged ({error}); delete it. Snapshots that it lists as removed are listed "
            "again then: remove them once more"
        ) from None
    return GcList(id=list_id, reason=reason, marked=marked, sweeper=sweeper, objects=objects, version=version)


def read_lists(storage: Storage) -> list[GcList]:
    """All lists, the oldest first, those of removed snapshots before others."""
    found = [item for list_id in list_ids(storage) if (item := read_list(storage, list_id)) is not None]
    return sorted(found, key=lambda item: (item.reason, item.marked, item.id))


def new_list(storage: Storage, reason: Reason, objects: Mapping[str, int]) -> GcList:
    """Mark objects, at most `MAX_OBJECTS`."""
    item = GcList(
        id=secrets.token_hex(16), reason=reason, marked=int(storage.now()), sweeper=None, objects=dict(objects)
    )
    storage.put_if_absent(item.name, _encode(item))
    return item


def replace_list(storage: Storage, item: GcList, objects: Mapping[str, int], *, sweeper: str | None = None) -> bool:
    """Change a list if it is still as it was read. `sweeper`: who deletes its objects from now on."""
    changed = replace(item, objects=dict(objects), sweeper=sweeper or item.sweeper)
    return swap(storage, item.name, _encode(changed), item.version)


def removed_snapshots(lists: list[GcList]) -> set[str]:
    """Names of the manifests that somebody removed."""
    return {name for item in lists if item.reason == "removed" for name in item.objects}


def _encode(item: GcList) -> bytes:
    return canonical_json(
        {
            "marked": item.marked,
            "objects": [{"bytes": item.objects[name], "name": name} for name in sorted(item.objects)],
            "reason": item.reason,
            "sweeper": item.sweeper,
            "write_id": secrets.token_hex(16),
        }
    )
