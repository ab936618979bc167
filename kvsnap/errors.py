"""Exceptions, grouped by what the caller can do about them.

KvsnapError
├── CorruptChunkError   recompute: drop the chunk and treat it as a miss
│   └── MissingObjectError  a part of a snapshot is gone
├── IncompatibleError   refuse: made by another model, layout or format version
│   └── UntrustedError  refuse: nobody who is trusted has signed it
├── NotFoundError       check the name (also a KeyError)
├── StorageError        retry: the disk or the object store failed
└── ConfigError         fix the configuration or the input (also a ValueError)
"""

from __future__ import annotations


class KvsnapError(Exception):
    """Base of everything that kvsnap raises on purpose."""


class CorruptChunkError(KvsnapError):
    """Stored bytes are not what was written. Drop them; a miss is the answer."""


class MissingObjectError(CorruptChunkError):
    """What a snapshot or a ref names isn't there."""


class IncompatibleError(KvsnapError):
    """Made by, or for, another model, layout or format version. Never use it."""

    def __init__(self, message: str, fields: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.fields = fields
        """Dotted names of the fields that differ or are wrong, as `differing_fields` gives them."""


class UntrustedError(IncompatibleError):
    """Not signed by anybody who is trusted. Never use it."""


class NotFoundError(KvsnapError, KeyError):
    """Nothing has this name."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument; people should read the message.
        return str(self.args[0]) if self.args else ""


class StorageError(KvsnapError):
    """The disk, the shared memory or the object store failed. Trying again may help."""


class ConfigError(KvsnapError, ValueError):
    """A wrong configuration or a wrong input. Stops an engine's start; exit status 1 in jobs."""
