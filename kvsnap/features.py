"""What a program must know to do something with a repository: format version and features, per operation.

`kvsnap.json` lists for each operation the features without which it would go wrong. A
program refuses an operation whose list has a name that it doesn't know, and may do the
others: a new kind of object may matter to who deletes, and not to who reads. Whatever else
stands there that it doesn't know is optional, and stays when the object is written again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import kvsnap
from kvsnap.canonical import canonical_json
from kvsnap.damage import damaged_marker
from kvsnap.errors import ConfigError, IncompatibleError, StorageError
from kvsnap.leases import swap
from kvsnap.namespace import FORMAT
from kvsnap.storage import Storage

MARKER_NAME = "kvsnap.json"
MAX_MARKER_BYTES = 64 << 10
OPERATIONS = ("delete", "read", "verify", "write")
KIND = "repository"
FEATURES: Mapping[str, frozenset[str]] = {name: frozenset() for name in OPERATIONS}
"""Features of a repository that this version knows, per operation; none yet."""

_TRIES = 20


def decode_marker(data: bytes, url: str) -> dict[str, Any]:
    """`kvsnap.json` of the repository at `url`.

    Raises:
        ConfigError: it is of something else.
        CorruptChunkError: it makes no sense.
    """
    try:
        marker = json.loads(data)
    except (ValueError, RecursionError):
        marker = None
    if not isinstance(marker, dict):
        raise damaged_marker(url, "it is no JSON object")
    version = marker.get("format")
    if marker.get("kind") != KIND or isinstance(version, bool) or not isinstance(version, int):
        raise ConfigError(f"{url} is no kvsnap repository (kvsnap.json names another kind); is it a cache?")
    return marker


def check_marker(marker: Mapping[str, Any], operation: str, url: str) -> None:
    """Whether this version may do `operation` (one of `OPERATIONS`) in the repository at `url`.

    Raises:
        IncompatibleError: it needs a later kvsnap; says which, as far as the repository says.
        CorruptChunkError: the list of features makes no sense.
    """
    version = marker["format"]
    if version > FORMAT:
        raise IncompatibleError(
            f"repository {url} has format version {version}, this kvsnap {kvsnap.__version__} reads up to {FORMAT}; "
            "upgrade kvsnap",
            ("format",),
        )
    if unknown := sorted(_required(marker, operation, url) - FEATURES[operation]):
        raise IncompatibleError(
            f"repository {url} requires features {names_text(unknown, marker.get('since'))} to {operation}, which this "
            f"kvsnap {kvsnap.__version__} doesn't know; upgrade kvsnap",
            ("features",),
        )


def names_text(names: Iterable[str], since: object) -> str:
    """Names of features for a message, each with the version of kvsnap that brought it, where `since` says so."""
    versions = since if isinstance(since, Mapping) else {}
    texts = [f"{name:.40} (kvsnap {versions[name]!s:.20})" if name in versions else f"{name:.40}" for name in names]
    return ", ".join(texts)[:400]


def record_features(storage: Storage, features: Mapping[str, Iterable[str]]) -> bool:
    """Add to a repository's lists, before anything is written that needs it; False if all of it is there.

    By compare-and-swap; everything else in `kvsnap.json` stays, also what this version doesn't know.

    Raises:
        NotFoundError: there is no repository.
        IncompatibleError: it needs a later kvsnap to be written to.
        StorageError: the storage failed.
    """
    for _ in range(_TRIES):
        data, version = storage.get_versioned(MARKER_NAME, max_bytes=MAX_MARKER_BYTES)
        marker = decode_marker(data, storage.url)
        check_marker(marker, "write", storage.url)
        lists = dict(marker.get("features") or {})
        since = dict(marker["since"]) if isinstance(marker.get("since"), dict) else {}
        is_there = True
        for operation, names in features.items():
            missing = set(names) - _required(marker, operation, storage.url)
            is_there &= not missing
            lists[operation] = sorted(set(lists.get(operation) or ()) | missing)
            since |= {name: kvsnap.__version__ for name in missing if name not in since}
        if is_there:
            return False
        if swap(storage, MARKER_NAME, canonical_json({**marker, "features": lists, "since": since}), version):
            return True
    raise StorageError(f"kvsnap.json in {storage.url} changed {_TRIES} times meanwhile; try again")


def _required(marker: Mapping[str, Any], operation: str, url: str) -> set[str]:
    lists = marker.get("features")
    names = lists.get(operation, []) if isinstance(lists, Mapping) else None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise damaged_marker(url, f"its features to {operation} are no list of names")
    return set(names)
