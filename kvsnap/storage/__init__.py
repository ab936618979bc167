"""Where repositories keep their bytes."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from kvsnap.errors import ConfigError
from kvsnap.storage.base import Buffer, ObjectInfo, Reader, Storage, is_valid_name, validate_name
from kvsnap.storage.local import LocalStorage

__all__ = [
    "Buffer",
    "LocalStorage",
    "ObjectInfo",
    "Reader",
    "Storage",
    "is_valid_name",
    "open_storage",
    "validate_name",
]


def open_storage(url: str) -> Storage:
    """The storage at `url`: a path or `file://` URL of a local directory. Touches nothing yet.

    Raises:
        ConfigError: the URL is of a kind that this version can't open.
    """
    if "://" not in url:
        if not url:
            raise ConfigError("the repository's URL is empty; give a path or a file:// URL")
        return LocalStorage(Path(url).expanduser())
    parts = urlsplit(url)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise ConfigError(f"URL {url} names host {parts.netloc!r}; write file:///absolute/path")
        return LocalStorage(Path(unquote(parts.path)))
    if parts.scheme == "s3":
        raise ConfigError(f"URL {url}: S3 repositories are not supported yet; use a local directory")
    raise ConfigError(f"URL {url} has scheme {parts.scheme!r}, expected a path or file://")
