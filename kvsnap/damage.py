"""What is said of an object of a repository that is gone or wrong: its name, what is wrong with it, what to do."""

from __future__ import annotations

from kvsnap.errors import CorruptChunkError, MissingObjectError

RESTORE_MARKER = "put back a copy of it, or kvsnap.json of another repository of the same kvsnap in the same store"
"""What to do without a marker: it tells nothing of the snapshots, which are all there."""


def missing(name: str, url: str) -> MissingObjectError:
    """An object `name` of the repository at `url` should be there, and isn't."""
    return MissingObjectError(f"{name} is missing in {url}; export the snapshot again")


def dangling(ref: str, manifest: str, url: str) -> MissingObjectError:
    """A ref names a snapshot whose manifest, an object of that name, is gone."""
    return MissingObjectError(
        f"ref {ref} names a snapshot that is gone: {manifest} is missing in {url}; export with --tag {ref}, have it "
        f"name another snapshot (kvsnap tag), or remove it: kvsnap rm {url}@{ref}"
    )


def damaged(name: str, url: str, what: str) -> CorruptChunkError:
    """An object is there and isn't what its name says. An export never replaces it, so it must go first."""
    return CorruptChunkError(f"{name} in {url} is damaged: {what}; delete it, then export the snapshot again")


def wrong_size(name: str, url: str, *, expected: int, found: int) -> CorruptChunkError:
    """An object is there in another size than the manifest gives it [bytes]."""
    return damaged(name, url, f"expected {expected} bytes, found {found}")


def damaged_manifest(name: str, snapshot: str, url: str, what: str) -> CorruptChunkError:
    """A manifest, an object `name`, isn't that of `snapshot`. The same snapshot doesn't come back by an export."""
    return CorruptChunkError(
        f"{name} in {url} is damaged: {what}; delete it, then export again with --tag (or remove the snapshot: "
        f"kvsnap rm {url}@{snapshot})"
    )


def damaged_ref(ref: str, url: str, what: str) -> CorruptChunkError:
    """The object of a ref makes no sense."""
    return CorruptChunkError(
        f"ref {ref} in {url} is damaged: {what}; remove it: kvsnap rm {url}@{ref}, then tag again what it named"
    )


def damaged_marker(url: str, what: str) -> CorruptChunkError:
    """`kvsnap.json` makes no sense."""
    return CorruptChunkError(f"kvsnap.json in {url} is damaged: {what}; {RESTORE_MARKER}")


def missing_marker(url: str) -> MissingObjectError:
    """There are snapshots, and no `kvsnap.json`."""
    return MissingObjectError(f"kvsnap.json is missing in {url}, where snapshots are; {RESTORE_MARKER}")
