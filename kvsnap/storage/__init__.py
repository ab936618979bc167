"""Where repositories keep their bytes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kvsnap.errors import ConfigError
from kvsnap.storage.base import (
    Buffer,
    Capabilities,
    ObjectInfo,
    Reader,
    RefusedError,
    ShortReadError,
    Storage,
    Versioned,
    is_valid_name,
    validate_name,
)
from kvsnap.storage.limits import LimitStorage
from kvsnap.storage.local import LocalStorage
from kvsnap.storage.memory import MemoryStorage
from kvsnap.storage.probe import probe_storage
from kvsnap.storage.retry import RetryPolicy, RetryStorage
from kvsnap.storage.s3 import S3Storage
from kvsnap.storage.s3_options import S3Options, parse_s3_url

__all__ = [
    "Buffer",
    "Capabilities",
    "LimitStorage",
    "LocalStorage",
    "MemoryStorage",
    "ObjectInfo",
    "Reader",
    "RefusedError",
    "RetryPolicy",
    "RetryStorage",
    "S3Options",
    "S3Storage",
    "ShortReadError",
    "Storage",
    "Versioned",
    "is_valid_name",
    "open_storage",
    "parse_s3_url",
    "probe_storage",
    "validate_name",
]


_SCHEME = re.compile(r"(s3|file):", re.ASCII | re.IGNORECASE)


def open_storage(
    url: str,
    options: S3Options | Mapping[str, Any] | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> Storage:
    """The storage at `url`: a path or `file://` URL of a local directory, or `s3://bucket/prefix`. Touches nothing yet.

    `options` (of S3; the URL's query may hold some too) win over the environment. `sleep` is how to wait before trying
    again; it may raise to end that.

    Raises:
        ConfigError: the URL or an option makes no sense.
    """
    if "://" not in url:
        if not url:
            raise ConfigError("the repository's URL is empty; give a path, a file:// or an s3:// URL")
        if scheme := _SCHEME.match(url):
            raise ConfigError(f"URL {url} lacks slashes: write {scheme[1]}://…, or for a path of this name ./{url}")
        return LocalStorage(Path(url).expanduser())
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ConfigError(f"URL {url} names host {parts.netloc!r}; write file:///absolute/path")
        return LocalStorage(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        location, settings = parse_s3_url(url, options)
        storage: Storage = S3Storage(location, settings)
        if settings.max_rate is not None:
            storage = LimitStorage(storage, settings.max_rate, sleep=sleep)
        return RetryStorage(storage, settings.retry, sleep=sleep)
    raise ConfigError(f"URL {url} has scheme {parts.scheme!r}, expected a path, file:// or s3://")
