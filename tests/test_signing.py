"""Signatures: who vouches for a snapshot, and that every link of the chain below the manifest holds."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvsnap.canonical import canonical_json, sha256_hex
from kvsnap.catalog import encode_catalog
from kvsnap.errors import ConfigError, CorruptChunkError, UntrustedError
from kvsnap.manifest import CatalogRecord, Digest
from kvsnap.namespace import Namespace
from kvsnap.refs import remove
from kvsnap.repository import Repository
from kvsnap.repository_copy import copy_snapshots
from kvsnap.repository_prune import prune_repository
from kvsnap.signing import (
    MAX_SIGNATURES,
    Signature,
    SigningKey,
    decode_signatures,
    encode_signatures,
    read_signatures,
    sign_snapshot,
    signature_name,
    store_signature,
)
from kvsnap.snapshot_export import ExportReport, export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.storage import LocalStorage, MemoryStorage
from kvsnap.trust import TrustedKeys, installed_keys, read_trusted_keys
from kvsnap.verify import verify_snapshot
from tests.repository_fakes import TimedStorage
from tests.snapshot_fakes import chain, chunks_at, flip, prompt, store

pytest.importorskip("cryptography")


def new_key(path: Path) -> SigningKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = Ed25519PrivateKey.generate()
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    return SigningKey.read(path)


def trust(**keys: SigningKey) -> TrustedKeys:
    return TrustedKeys(names={key.public: name for name, key in keys.items()}, source="the test")


@pytest.fixture
def key(tmp_path: Path) -> SigningKey:
    return new_key(tmp_path / "key.pem")


@pytest.fixture
def stranger(tmp_path: Path) -> SigningKey:
    return new_key(tmp_path / "stranger.pem")


@pytest.fixture
def signed(cache: Path, ns: Namespace, repo: Path, key: SigningKey) -> ExportReport:
    return export_snapshot(cache, str(repo), tag="prod", signer=key)


class TestWhoSigned:
    def test_a_signed_snapshot_is_imported(
        self, cache: Path, ns: Namespace, repo: Path, signed: ExportReport, key: SigningKey, tmp_path: Path
    ) -> None:
        import_snapshot(str(repo), "prod", tmp_path / "other", trusted=trust(release=key))

        assert chunks_at(tmp_path / "other", ns) == chunks_at(cache, ns)
        assert verify_snapshot(str(repo), "prod", trusted=trust(release=key)).signed_by == "release"

    @pytest.mark.parametrize("how", ["none", "stranger", "nobody trusted", "garbage", "other manifest", "changed"])
    def test_anything_else_is_refused_before_anything_is_touched(
        self, repo: Path, signed: ExportReport, key: SigningKey, stranger: SigningKey, tmp_path: Path, how: str
    ) -> None:
        path = repo / signature_name(signed.snapshot)
        trusted = trust(release=key)
        good = read_signatures(LocalStorage(repo), signed.snapshot)[0]
        match how:
            case "none":
                path.unlink()
            case "stranger":
                trusted = trust(other=stranger)
            case "nobody trusted":
                trusted = trust()
            case "garbage":
                path.write_bytes(b"\x00" * 100)
            case "other manifest":
                path.write_bytes(encode_signatures([key.sign(b"another manifest")]))
            case "changed":
                wrong = f"{int(good.signature[0], 16) ^ 1:x}{good.signature[1:]}"
                path.write_bytes(encode_signatures([Signature(key=good.key, signature=wrong)]))

        report = verify_snapshot(str(repo), "prod", trusted=trusted)
        with pytest.raises(UntrustedError, match=r"sign|trusted"):
            import_snapshot(str(repo), "prod", tmp_path / "other", trusted=trusted)

        assert [problem.kind for problem in report.problems] == ["untrusted"]
        assert not (tmp_path / "other").exists()

    def test_a_signature_of_another_snapshot_does_not_fit(
        self, cache: Path, ns: Namespace, repo: Path, signed: ExportReport, key: SigningKey, tmp_path: Path
    ) -> None:
        """Replay: whoever can write to the repository puts a good signature beside a manifest of their own."""
        store(cache, ns, chain(ns, prompt(9, 128)))
        unsigned = export_snapshot(cache, str(repo), tag="prod")
        shutil.copy(repo / signature_name(signed.snapshot), repo / signature_name(unsigned.snapshot))

        with pytest.raises(UntrustedError, match="the signature of release is not one of this manifest"):
            import_snapshot(str(repo), "prod", tmp_path / "other", trusted=trust(release=key))

    def test_several_people_sign(
        self, repo: Path, signed: ExportReport, key: SigningKey, stranger: SigningKey, tmp_path: Path
    ) -> None:
        added = sign_snapshot(str(repo), "prod", stranger)
        again = sign_snapshot(str(repo), "prod", stranger)

        assert (added.is_new, again.is_new) == (True, False)
        for someone in (key, stranger):
            assert verify_snapshot(str(repo), "prod", trusted=trust(someone=someone)).is_good
        assert not list(LocalStorage(repo).list("leases/"))

    def test_signatures_that_make_no_sense_are_replaced(
        self, repo: Path, signed: ExportReport, key: SigningKey
    ) -> None:
        (repo / signature_name(signed.snapshot)).write_bytes(b"[]")

        sign_snapshot(str(repo), "prod", key)

        assert verify_snapshot(str(repo), "prod", trusted=trust(release=key)).is_good

    def test_there_is_a_most(self) -> None:
        storage, snapshot = MemoryStorage(), Digest("0" * 64)
        for i in range(MAX_SIGNATURES):
            store_signature(storage, snapshot, Signature(key=f"{i:064x}", signature="0" * 128))

        with pytest.raises(ConfigError, match="64 signatures"):
            store_signature(storage, snapshot, Signature(key="f" * 64, signature="0" * 128))
        with pytest.raises(CorruptChunkError):
            decode_signatures(canonical_json({"signatures": [{}] * (MAX_SIGNATURES + 1)}), "x")

    def test_openssl_agrees(self, repo: Path, signed: ExportReport, tmp_path: Path) -> None:
        """What is signed are the manifest's bytes and nothing else: any tool can check it."""
        if shutil.which("openssl") is None:
            pytest.skip("needs openssl")
        signature = read_signatures(LocalStorage(repo), signed.snapshot)[0]
        (tmp_path / "raw").write_bytes(bytes.fromhex(signature.signature))
        subprocess.run(["openssl", "pkey", "-in", "key.pem", "-pubout", "-out", "public.pem"], cwd=tmp_path, check=True)
        manifest = repo / "manifests" / f"{signed.snapshot}.json"
        check = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "public.pem", "-rawin", "-in", str(manifest)]

        done = subprocess.run([*check, "-sigfile", "raw"], cwd=tmp_path, capture_output=True, check=False)

        assert done.returncode == 0, done.stderr
        assert read_trusted_keys(tmp_path / "public.pem").names.keys() == {signature.key}


class TestChain:
    """The signature covers the manifest; each link below is checked where the object is read."""

    @pytest.mark.parametrize("link", ["manifest", "catalog", "shard", "chunk"])
    def test_each_broken_link_is_noticed(
        self, ns: Namespace, repo: Path, signed: ExportReport, key: SigningKey, tmp_path: Path, link: str
    ) -> None:
        """A stranger changes an object and everything that needs no key."""
        repository = Repository.open(str(repo))
        manifest = repository.manifest(signed.snapshot)
        catalog = repository.catalog(manifest)
        path = repo / "manifests" / f"{signed.snapshot}.json"
        shard = max(repo.glob("shards/*/*"), key=lambda item: item.stat().st_size)
        match link:
            case "manifest":  # a new one under its own digest, with the old signature
                obj = json.loads(path.read_bytes())
                obj["annotations"] = {"by": "a stranger"}
                data = canonical_json(obj)
                (repo / "manifests" / f"{sha256_hex(data)}.json").write_bytes(data)
                shutil.copy(repo / signature_name(signed.snapshot), repo / signature_name(Digest(sha256_hex(data))))
                ref = repo / "refs" / "prod.json"
                ref.write_bytes(ref.read_bytes().replace(signed.snapshot.encode(), sha256_hex(data).encode(), 1))
            case "catalog":  # another good catalog under the old name
                other = replace(catalog, hits=catalog.hits + 1)
                (repo / "catalogs" / f"{manifest.catalog.digest}.parquet").write_bytes(encode_catalog(other))
            case "shard":  # a byte of a header that the header's own check would notice too
                flip(shard, 30)
            case "chunk":
                flip(shard, -4097)

        with pytest.raises((CorruptChunkError, UntrustedError)):
            import_snapshot(str(repo), "prod", tmp_path / "other", trusted=trust(release=key))

        assert not list((tmp_path / "other").rglob(f"{shard.stem}*")) or link in ("manifest", "catalog")
        assert not verify_snapshot(str(repo), "prod", read_data=True, trusted=trust(release=key)).is_good

    def test_a_chunk_whose_checksums_were_made_to_fit_is_noticed(
        self, ns: Namespace, repo: Path, signed: ExportReport, key: SigningKey
    ) -> None:
        """XXH3 keeps nobody out: a ranged read is proved by the BLAKE3 of the signed catalog."""
        repository = Repository.open(str(repo))
        manifest = repository.manifest(signed.snapshot, trusted=trust(release=key))
        catalog = repository.catalog(manifest)
        shard = repo / "shards" / manifest.shards[0].digest[:2] / f"{manifest.shards[0].digest}.safetensors"
        flip(shard, int(catalog.offset[catalog.rows_of_shards(len(manifest.shards))[0][0]]))

        problems = verify_snapshot(str(repo), "prod", sample=1.0).problems

        assert [problem.kind for problem in problems] == ["damaged"]
        assert "blake3" in problems[0].message


class TestExport:
    def test_relies_on_nothing_that_nobody_trusted_has_signed(
        self, cache: Path, ns: Namespace, repo: Path, key: SigningKey
    ) -> None:
        """Else a signed manifest would name what a stranger made up, and the exporter never read."""
        export_snapshot(cache, str(repo))
        repository = Repository.open(str(repo))
        (snapshot,) = repository.snapshots()
        manifest = repository.manifest(snapshot)
        data = encode_catalog(replace(repository.catalog(manifest), blake3=np.zeros((7, 32), np.uint8)))
        record = CatalogRecord(digest=Digest(sha256_hex(data)), nbytes=len(data), num_rows=7)
        forged = replace(manifest, catalog=record).encode()
        (repo / "manifests" / f"{snapshot}.json").unlink()
        repository.storage.put(f"catalogs/{record.digest}.parquet", data)
        repository.storage.put(f"manifests/{sha256_hex(forged)}.json", forged)

        unsigned = export_snapshot(cache, str(repo))
        own = export_snapshot(cache, str(repo), tag="prod", signer=key)

        assert unsigned.snapshot == sha256_hex(forged), "this is what it would have relied on"
        assert (own.is_new, own.parent) == (True, None)
        assert own.sent_bytes == 0, "its own bytes were hashed here, and are there already"
        assert verify_snapshot(str(repo), "prod", read_data=True, trusted=trust(release=key)).is_good

    def test_follows_what_it_signed_itself(
        self, cache: Path, ns: Namespace, repo: Path, signed: ExportReport, key: SigningKey
    ) -> None:
        again = export_snapshot(cache, str(repo), signer=key)
        store(cache, ns, chain(ns, prompt(9, 128)))
        more = export_snapshot(cache, str(repo), signer=key)

        assert (again.snapshot, again.is_new) == (signed.snapshot, False)
        assert more.parent == signed.snapshot
        assert more.sent_shards == 1

    def test_the_signature_is_there_before_the_snapshot_can_be_listed(
        self, cache: Path, ns: Namespace, key: SigningKey
    ) -> None:
        """Invariant 3"""
        written: list[str] = []

        class Watched(MemoryStorage):
            def _store(self, name: str, data: object) -> None:
                written.append(name)
                super()._store(name, data)  # type: ignore[arg-type]

        report = export_snapshot(cache, Watched(), signer=key)

        order = [written.index(name) for name in (signature_name(report.snapshot), f"manifests/{report.snapshot}.json")]
        assert order == sorted(order)


class TestOtherCommands:
    def test_copies_carry_signatures_along(
        self, repo: Path, signed: ExportReport, key: SigningKey, stranger: SigningKey
    ) -> None:
        """They are bound to the manifest's bytes, not to a place; the target's own stay."""
        target = MemoryStorage()
        copy_snapshots(str(repo), target, ref="prod", tag="prod")
        (repo / signature_name(signed.snapshot)).unlink()
        sign_snapshot(str(repo), "prod", stranger)

        copy_snapshots(str(repo), target, ref="prod", tag="prod")

        for someone in (key, stranger):
            assert verify_snapshot(target, "prod", trusted=trust(someone=someone)).is_good

    def test_prune_takes_a_signature_with_its_snapshot_and_no_other(
        self, cache: Path, ns: Namespace, key: SigningKey
    ) -> None:
        storage = TimedStorage()
        kept = export_snapshot(cache, storage, tag="prod", signer=key)
        store(cache, ns, chain(ns, prompt(9, 128)))
        gone = export_snapshot(cache, storage, signer=key)
        remove(storage, gone.snapshot)

        for _ in range(3):
            storage.time += 100_000
            prune_repository(storage)

        names = {info.name for info in storage.list("manifests/")}
        assert names == {f"manifests/{kept.snapshot}.json", signature_name(kept.snapshot)}

    def test_a_snapshot_for_an_engine_must_be_signed_where_keys_are_installed(
        self, cache: Path, ns: Namespace, repo: Path, signed: ExportReport, key: SigningKey, stranger: SigningKey,
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        from kvsnap.tiers.disk import DiskTier
        from kvsnap_connector.snapshot import import_into, open_remote

        file = tmp_path / "keys"
        monkeypatch.setenv("KVSNAP_TRUSTED_KEYS", str(file))
        file.write_text(f"other {stranger.public}\n")
        with DiskTier(tmp_path / "engine", ns, cap_bytes=1 << 30) as tier:
            for act in (import_into, open_remote):
                with pytest.raises(UntrustedError):
                    act(f"{repo}@prod", tier)
            file.write_text(f"release {key.public}\n")

            assert import_into(f"{repo}@prod", tier).startswith("7 of 7")
            assert len(open_remote(f"{repo}@prod", tier)) > 0


class TestKeyFiles:
    def test_both_forms(self, tmp_path: Path) -> None:
        """The example of the module and of RFC 8032."""
        public = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
        pem = "MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="
        file = tmp_path / "keys"
        file.write_text(
            f"# two keys\n\nrelease   {'a' * 64}\n# ci\n-----BEGIN PUBLIC KEY-----\n{pem}\n-----END PUBLIC KEY-----\n"
        )

        assert read_trusted_keys(file).names == {"a" * 64: "release", public: "ci"}

    @pytest.mark.parametrize(
        "text",
        [
            "release",
            f"release {'a' * 63}",
            f"release {'A' * 64}",
            f"two names {'a' * 64}",
            "a" * 64,
            "-----BEGIN PUBLIC KEY-----\nMCow\n-----END PUBLIC KEY-----",
            "-----BEGIN PUBLIC KEY-----\n",
            "-----BEGIN PRIVATE KEY-----\nMCow\n-----END PRIVATE KEY-----",
        ],
    )
    def test_a_file_that_makes_no_sense_is_an_error(self, tmp_path: Path, text: str) -> None:
        """Left out in silence, a line would mean that a key is missing, or that nobody is asked."""
        (tmp_path / "keys").write_text(text)

        with pytest.raises(ConfigError, match="keys"):
            read_trusted_keys(tmp_path / "keys")

    def test_a_file_that_anybody_may_write_to_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "keys").write_text("")
        (tmp_path / "keys").chmod(0o666)

        with pytest.raises(ConfigError, match="chmod"):
            read_trusted_keys(tmp_path / "keys")

    def test_where_it_lies(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("KVSNAP_TRUSTED_KEYS", raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert installed_keys() is None

        (tmp_path / "kvsnap").mkdir()
        (tmp_path / "kvsnap" / "trusted_keys").write_text(f"release {'a' * 64}\n")
        assert installed_keys() == read_trusted_keys(tmp_path / "kvsnap" / "trusted_keys")

        monkeypatch.setenv("KVSNAP_TRUSTED_KEYS", str(tmp_path / "nowhere"))
        with pytest.raises(ConfigError, match="nowhere"):
            installed_keys()

    @pytest.mark.parametrize(
        "content", [b"", b"garbage", b"-----BEGIN PRIVATE KEY-----\nMC\n-----END PRIVATE KEY-----\n"]
    )
    def test_a_key_file_of_something_else(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "key").write_bytes(content)

        with pytest.raises(ConfigError, match="openssl genpkey"):
            SigningKey.read(tmp_path / "key")

    def test_another_kind_of_key_and_an_encrypted_one(self, tmp_path: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519
        from cryptography.hazmat.primitives.serialization import (
            BestAvailableEncryption,
            Encoding,
            NoEncryption,
            PrivateFormat,
        )

        for private, encryption in (
            (ec.generate_private_key(ec.SECP256R1()), NoEncryption()),
            (ed25519.Ed25519PrivateKey.generate(), BestAvailableEncryption(b"secret")),
        ):
            (tmp_path / "key").write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
            with pytest.raises(ConfigError, match="unencrypted Ed25519"):
                SigningKey.read(tmp_path / "key")


def test_without_the_package_everything_else_works_and_the_error_names_the_extra(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["cryptography"] = None
from pathlib import Path
import kvsnap.signing, kvsnap.repository, kvsnap_jobs.cli
from kvsnap.errors import ConfigError
try:
    kvsnap.signing.SigningKey.read(Path("key"))
except ConfigError as error:
    assert "kvsnap[sign]" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
