"""Detached Ed25519 signatures over manifests: `manifests/<sha256>.sig`.

A digest tells damage from what was written; a signature tells who wrote it. What is signed
are the manifest's bytes. They name the catalog and the shards by sha256, and the catalog the
chunks by BLAKE3: so one signature covers every byte of a snapshot, and each link is checked
where the object is read. It does not cover refs: `prod` may be moved back to an older
snapshot that was signed too.

The object is canonical JSON, `{"signatures": [{"algorithm", "key", "signature"}, …]}`, in
order of key; several people may sign a snapshot. Needs the package `cryptography`.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvsnap.canonical import canonical_json, sha256_hex
from kvsnap.errors import ConfigError, CorruptChunkError, NotFoundError, StorageError, UntrustedError
from kvsnap.leases import swap
from kvsnap.manifest import Digest
from kvsnap.storage import Storage
from kvsnap.trust import TrustedKeys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

log = logging.getLogger(__name__)

ALGORITHM = "ed25519"
MAX_SIGNATURE_BYTES = 64 << 10
MAX_SIGNATURES = 64
"""In one object."""
_MAX_KEY_FILE_BYTES = 64 << 10
_TRIES = 20

_KEY = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SIGNATURE = re.compile(r"[0-9a-f]{128}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One signature, as it is stored. Not checked."""

    key: str
    """Public key of the signer, 64 hex digits."""
    signature: str
    """128 hex digits"""

    def is_good(self, manifest: bytes) -> bool:
        """Whether this key signed these bytes.

        Raises:
            ConfigError: `cryptography` is not installed.
        """
        ed25519, _ = _cryptography()
        from cryptography.exceptions import InvalidSignature

        try:
            public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.key))
            public.verify(bytes.fromhex(self.signature), manifest)
        except (InvalidSignature, ValueError):
            return False
        return True


class SigningKey:
    """A private key."""

    def __init__(self, private: ed25519.Ed25519PrivateKey) -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()
        """64 hex digits: what a trusted keys file holds."""

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """Read an unencrypted PEM file, as `openssl genpkey -algorithm ed25519` writes it.

        Raises:
            ConfigError: it can't be read, or holds something else; `cryptography` is not installed.
        """
        ed25519, serialization = _cryptography()
        from cryptography.exceptions import UnsupportedAlgorithm

        try:
            with path.open("rb") as file:
                data = file.read(_MAX_KEY_FILE_BYTES)
            if path.stat().st_mode & 0o007:
                log.warning("kvsnap: the private key %s may be used by anybody; run `chmod 600 %s`", path, path)
        except OSError as error:
            raise ConfigError(f"key file {path} can't be read: {error.strerror or error}") from error
        try:
            private = serialization.load_pem_private_key(data, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            private = None
        if not isinstance(private, ed25519.Ed25519PrivateKey):
            raise ConfigError(
                f"key file {path} holds no unencrypted Ed25519 private key in PEM; make one with "
                f"`openssl genpkey -algorithm ed25519 -out {path}`"
            )
        return cls(private)

    def trusted_with(self, others: TrustedKeys | None) -> TrustedKeys:
        """This key, besides others."""
        names = {} if others is None else dict(others.names)
        return TrustedKeys(names={self.public: "this key", **names}, source="this key and the trusted keys")

    def sign(self, manifest: bytes) -> Signature:
        """Sign the bytes of a manifest. The same bytes give the same signature."""
        return Signature(key=self.public, signature=self._private.sign(manifest).hex())


def signature_name(snapshot: Digest) -> str:
    """Name of the object that holds a snapshot's signatures."""
    return f"manifests/{snapshot}.sig"


def encode_signatures(signatures: list[Signature]) -> bytes:
    """The object's bytes."""
    rows = [
        {"algorithm": ALGORITHM, "key": item.key, "signature": item.signature}
        for item in sorted(signatures, key=lambda item: item.key)
    ]
    return canonical_json({"signatures": rows})


def decode_signatures(data: bytes, what: str) -> list[Signature]:
    """The signatures in an object; those of algorithms that aren't known are left out.

    Raises:
        CorruptChunkError: it makes no sense.
    """
    try:
        obj = json.loads(data)
    except (ValueError, RecursionError):
        obj = None
    rows = obj.get("signatures") if isinstance(obj, dict) else None
    if not isinstance(rows, list) or len(rows) > MAX_SIGNATURES:
        raise CorruptChunkError(f"{what} holds no list of at most {MAX_SIGNATURES} signatures")
    found = []
    for row in rows:
        if not isinstance(row, dict):
            raise CorruptChunkError(f"{what} makes no sense: a signature is {row!r:.40}")
        if row.get("algorithm") != ALGORITHM:
            continue
        key, signature = row.get("key"), row.get("signature")
        if not _matches(_KEY, key) or not _matches(_SIGNATURE, signature):
            raise CorruptChunkError(f"{what} makes no sense: key or signature is not hex of the right length")
        found.append(Signature(key=str(key), signature=str(signature)))
    return found


def read_signatures(storage: Storage, snapshot: Digest) -> list[Signature]:
    """What is stored beside a manifest; nothing if it is not signed. Not checked.

    Raises:
        CorruptChunkError: the object makes no sense.
        StorageError: the storage failed.
    """
    name = signature_name(snapshot)
    try:
        data = storage.get(name, max_bytes=MAX_SIGNATURE_BYTES)
    except NotFoundError:
        return []
    return decode_signatures(data, f"{name} in {storage.url}")


def check_signed(storage: Storage, manifest: bytes, trusted: TrustedKeys) -> str:
    """Who of `trusted` signed the manifest with these bytes. Nothing in them has been parsed before.

    Raises:
        UntrustedError: nobody; says why.
        ConfigError: `cryptography` is not installed.
    """
    _cryptography()
    snapshot = Digest(sha256_hex(manifest))
    what = f"snapshot {snapshot[:12]} in {storage.url}"
    if not trusted.names:
        raise UntrustedError(f"{what} is not trusted: {trusted.source} holds no key")
    try:
        signatures = read_signatures(storage, snapshot)
    except CorruptChunkError as error:
        raise UntrustedError(f"{what} is not trusted: {error}; sign it again") from None
    if not signatures:
        raise UntrustedError(f"{what} is not signed, and a signature is required; sign it with `kvsnap sign`")
    wrong = []
    for item in signatures:
        name = trusted.name_of(item.key)
        if name is not None:
            if item.is_good(manifest):
                return name
            wrong.append(name)
    if wrong:
        raise UntrustedError(f"{what} is not trusted: the signature of {', '.join(wrong)} is not one of this manifest")
    keys = ", ".join(item.key[:12] for item in signatures)
    raise UntrustedError(f"{what} is not trusted: it is signed by {keys}, and none of these is in {trusted.source}")


def store_signature(storage: Storage, snapshot: Digest, signature: Signature) -> bool:
    """Add a signature to those that a manifest has; False if it is there already.

    Signatures that make no sense are replaced: they are of no use to anybody.

    Raises:
        StorageError: others keep changing the object, or the storage failed.
        ConfigError: the manifest has as many signatures as one may have.
    """
    name = signature_name(snapshot)
    for _ in range(_TRIES):
        version: str | None = None
        present: list[Signature] = []
        try:
            data, version = storage.get_versioned(name, max_bytes=MAX_SIGNATURE_BYTES)
            present = decode_signatures(data, name)
        except NotFoundError:
            pass
        except CorruptChunkError as error:
            if version is None:
                raise
            log.warning("kvsnap: %s: it is replaced", error)
        if signature in present:
            return False
        kept = [item for item in present if item.key != signature.key]
        if len(kept) >= MAX_SIGNATURES:
            raise ConfigError(f"snapshot {snapshot[:12]} has {len(kept)} signatures already, which is the most")
        if swap(storage, name, encode_signatures([*kept, signature]), version):
            return True
    raise StorageError(f"{name} in {storage.url} changed {_TRIES} times meanwhile; try again")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignReport:
    """What was signed."""

    snapshot: Digest
    key: str
    """Public key of the signer, 64 hex digits."""
    is_new: bool
    """False: this key had signed it already."""


def sign_snapshot(url: str | Storage, ref: str, signer: SigningKey, *, single_writer: bool = False) -> SignReport:
    """Sign the snapshot `ref` of the repository at `url` as it is there. Says nothing of whether it is undamaged.

    Raises:
        NotFoundError: no such repository or snapshot.
        CorruptChunkError: its manifest is damaged.
        IncompatibleError: it needs a later kvsnap.
    """
    from kvsnap.repository import Repository  # which checks signatures
    from kvsnap.writing import WriteSession

    repository = Repository.open(url, operation="write", single_writer=single_writer)
    snapshot, _ = repository.open_snapshot(ref)
    with WriteSession(repository, "sign") as session:
        session.keep([signature_name(snapshot)])
        data = repository.manifest_bytes(snapshot)
        is_new = store_signature(repository.storage, snapshot, signer.sign(data))
    return SignReport(snapshot=snapshot, key=signer.public, is_new=is_new)


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigError(f"signatures need cryptography ({error}); run `pip install kvsnap[sign]`") from None
    return ed25519, serialization


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None
