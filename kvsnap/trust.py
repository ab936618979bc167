"""Whose signatures are trusted: a file of public keys, and where it lies when nobody names one.

    # comment
    release    3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29
    # ci
    -----BEGIN PUBLIC KEY-----
    MCowBQYDK2VwAyEAO2onvM62pC1imjQCpvDXNlMhV3HeJDpjrASKGLWdopk=
    -----END PUBLIC KEY-----

One key per line, its name first; or a PEM block, named by the comment right above it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvsnap.errors import ConfigError

ENVIRONMENT = "KVSNAP_TRUSTED_KEYS"
MAX_FILE_BYTES = 1 << 20

_LINE = re.compile(r"([^\s#-]\S{0,99})\s+([0-9a-f]{64})", re.ASCII)
_BEGIN, _END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"
_DER = bytes.fromhex("302a300506032b6570032100")
"""What comes before the 32 bytes of an Ed25519 key in its SubjectPublicKeyInfo (RFC 8410)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKeys:
    """Public keys whose signatures count."""

    names: Mapping[str, str]
    """Name of each key, by the key: 64 hex digits."""
    source: str
    """Where they come from, for messages."""

    def name_of(self, key: str) -> str | None:
        """None for a key that isn't trusted."""
        return self.names.get(key)


def read_trusted_keys(path: Path) -> TrustedKeys:
    """Read a trusted keys file. One without any key trusts nobody.

    Raises:
        ConfigError: it can't be read, a line makes no sense, or anybody may write to it.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_ISREG(found.st_mode) and found.st_mode & stat.S_IWOTH:
                raise ConfigError(f"trusted keys file {path} may be written by anybody; run `chmod o-w {path}`")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"trusted keys file {path} can't be read: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"trusted keys file {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return TrustedKeys(names=_parse(data.decode(), str(path)), source=str(path))
    except UnicodeDecodeError:
        raise ConfigError(f"trusted keys file {path} is not a text file") from None


def trusted_keys_path() -> Path | None:
    """Where trusted keys lie when nobody names a file: `$KVSNAP_TRUSTED_KEYS`, else `kvsnap/trusted_keys` in
    `$XDG_CONFIG_HOME` or `~/.config`. None where there is no such file; one that the variable names must exist.
    """
    if named := os.environ.get(ENVIRONMENT):
        return Path(named)
    try:
        base = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    except RuntimeError:  # no home
        return None
    path = base / "kvsnap" / "trusted_keys"
    return path if os.path.lexists(path) else None


def installed_keys() -> TrustedKeys | None:
    """The trusted keys of this user or container. Where there are some, only signed snapshots are used.

    Raises:
        ConfigError: as `read_trusted_keys`.
    """
    path = trusted_keys_path()
    return None if path is None else read_trusted_keys(path)


def _parse(text: str, where: str) -> dict[str, str]:
    names: dict[str, str] = {}
    comment, block = "", None
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if block is not None:
            if line != _END:
                block += line
                continue
            key = _key_of(block)
            if key is None:
                raise ConfigError(f"{where}, line {number}: this is no Ed25519 public key")
            names[key] = comment or f"key {key[:12]}"
            comment, block = "", None
        elif line == _BEGIN:
            block = ""
        elif line.startswith("#") or not line:
            comment = line.removeprefix("#").strip()
        elif (match := _LINE.fullmatch(line)) is not None:
            names[match[2]] = match[1]
            comment = ""
        else:
            raise ConfigError(
                f"{where}, line {number}: {line!r:.60} is no key; write a name and 64 hex digits, or a PEM block "
                "of an Ed25519 public key"
            )
    if block is not None:
        raise ConfigError(f"{where} ends inside a PEM block")
    return names


def _key_of(block: str) -> str | None:
    try:
        der = base64.b64decode(block, validate=True)
    except (binascii.Error, ValueError):
        return None
    return der[len(_DER) :].hex() if der.startswith(_DER) and len(der) == len(_DER) + 32 else None
