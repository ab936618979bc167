"""Find out what a storage does, by trying it: what it says of itself is no proof.

An S3-compatible store that doesn't know a condition ignores it and answers 200, and two
writers then overwrite each other in silence. So before the first write to a repository a
few tiny objects are written under `gc/`, compared and removed; about fifteen requests.
"""

from __future__ import annotations

import logging
import secrets
from contextlib import suppress

from kvsnap.errors import NotFoundError, StorageError
from kvsnap.storage.base import ALL_CAPABILITIES, Capabilities, RefusedError, Storage

log = logging.getLogger(__name__)

_MAX = 1024


def probe_storage(storage: Storage) -> Capabilities:
    """What `storage` does with conditions, ranges and checksums. Leaves nothing behind.

    Call it before the first write, record the answer, and hand it to `Storage.use` whenever
    the repository is opened for writing.

    Raises:
        RefusedError: it can't be written to at all.
        StorageError: it failed.
    """
    base = f"gc/probe-{secrets.token_hex(8)}"
    names = [f"{base}-{what}" for what in ("create", "replace", "checksum")]
    storage.use(ALL_CAPABILITIES)
    try:
        storage.put(names[1], b"0123456789")
        return Capabilities(
            conditional_create=_creates(storage, names[0]),
            ranges=_has_ranges(storage, names[1]),
            conditional_replace=_replaces(storage, names[1]),
            checksums=storage.refuses_wrong_checksum(names[2]),
        )
    finally:
        for name in names:
            with suppress(StorageError):
                storage.delete(name)


def _creates(storage: Storage, name: str) -> bool:
    try:
        storage.put_if_absent(name, b"first")
        again = storage.put_if_absent(name, b"second")
    except RefusedError as error:
        log.debug("kvsnap: %s refuses conditional creation: %s", storage.url, error)
        return False
    return not again and storage.get(name, max_bytes=_MAX) == b"first"


def _replaces(storage: Storage, name: str) -> bool:
    first = storage.get_versioned(name, max_bytes=_MAX).version
    try:
        right = storage.put_if_match(name, b"second", first)
        stale = storage.put_if_match(name, b"third", first)
        missing = storage.put_if_match(f"{name}-none", b"fourth", first)
    except RefusedError as error:
        log.debug("kvsnap: %s refuses conditional replacement: %s", storage.url, error)
        return False
    if missing:
        storage.delete(f"{name}-none")
    return right and not stale and not missing and storage.get(name, max_bytes=_MAX) == b"second"


def _has_ranges(storage: Storage, name: str) -> bool:
    buffer = bytearray(4)
    try:
        found = storage.read_into(name, memoryview(buffer), 3)
    except (RefusedError, NotFoundError) as error:
        log.debug("kvsnap: %s refuses ranges: %s", storage.url, error)
        return False
    return found == 4 and buffer == b"3456"
