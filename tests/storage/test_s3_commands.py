"""The whole command line against servers that speak S3. Some of it on moto's always, all of it with `pytest -m s3`."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from kvsnap.namespace import Namespace
from kvsnap.storage import S3Storage, open_storage, parse_s3_url
from kvsnap_jobs.cli import main
from tests.repository_fakes import check_whole, names_in, reachable
from tests.snapshot_fakes import chain, chunks_at, prompt, store
from tests.storage.fake_s3 import BUCKET, fake_s3
from tests.storage.s3_servers import client_of, make_buckets, ministack_server, rclone_server

pytest.importorskip("boto3")

BUCKETS = ("first", "second")
SINGLE_WRITER = "--single-writer"
WRITERS = {"export", "tag", "copy", "merge", "sign", "rm", "prune"}
"""Commands that must be told that there is one writer, where the store ignores conditions."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running store with the buckets `BUCKETS`."""

    endpoint: str
    keeps_conditions: bool
    checks_sums: bool

    def url(self, *, bucket: str = "first", more: str = "") -> str:
        """A place where nothing is."""
        return f"s3://{bucket}/{secrets.token_hex(4)}/deep?endpoint={self.endpoint}{more}"

    def run(self, *args: object, status: int = 0) -> Result:
        """A command, with the word for a single writer where the store needs it."""
        words = [str(arg) for arg in args]
        if not self.keeps_conditions and words[0] in WRITERS and SINGLE_WRITER not in words:
            words.append(SINGLE_WRITER)
        return run(*words, status=status)

    def json(self, *args: object, status: int = 0) -> Any:
        return json.loads(self.run(*args, "--json", status=status).stdout)


def run(*args: object, status: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def whole(url: str) -> set[str]:
    """Ids of the snapshots at `url`, all of which are whole."""
    storage = open_storage(url)
    try:
        return check_whole(storage)
    finally:
        storage.close()


def spoil(server: Server, url: str, name: str, data: bytes | None) -> None:
    """Put other bytes under a name; None: nothing at all."""
    bucket, _, prefix = url.removeprefix("s3://").partition("?")[0].partition("/")
    client = client_of(server.endpoint)
    if data is None:
        client.delete_object(Bucket=bucket, Key=f"{prefix}/{name}")
    else:
        client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=data)
    client.close()


@pytest.fixture
def url(server: Server) -> str:
    return server.url()


@pytest.fixture
def first(server: Server, cache: Path, ns: Namespace, url: str) -> str:
    return str(server.json("export", "--cache-dir", cache, "--to", url, "--tag", "prod")["snapshot"])


@pytest.fixture
def second(server: Server, cache: Path, ns: Namespace, url: str, first: str) -> str:
    """One shard and 2 chunks more than the first."""
    store(cache, ns, chain(ns, prompt(9, 128)))
    return str(server.json("export", "--cache-dir", cache, "--to", url, "--tag", "canary")["snapshot"])


class SomeCommands:
    """Those that ask most of a store. Subclasses give the fixture `server`."""

    def test_import_with_max_bytes(
        self, server: Server, cache: Path, ns: Namespace, url: str, first: str, tmp_path: Path
    ) -> None:
        """The last shard in part: a ranged read."""
        done = server.json("import", f"{url}@prod", "--cache-dir", tmp_path / "other", "--max-bytes", "60KiB")

        assert (done["imported_shards"], done["is_last_in_part"], done["num_chunks"]) == (1, True, 2)
        assert done["imported_bytes"] <= 60 << 10
        assert chunks_at(tmp_path / "other", ns).items() < chunks_at(cache, ns).items()
        run("verify", "--cache-dir", tmp_path / "other", "--read-data")

    def test_copy_inside_the_store(self, server: Server, url: str, first: str, second: str) -> None:
        prefix, bucket = server.url(), server.url(bucket="second")

        near = server.json("copy", f"{url}@prod", prefix, "--tag", "one")
        planned = server.json("copy", url, bucket, "--dry-run")
        far = server.json("copy", url, bucket)
        again = server.json("copy", url, bucket)

        assert (near["copied_shards"], near["server_side_shards"], near["refs"]) == (2, 2, ["one"])
        assert planned["copied_shards"] == 3
        assert (far["copied_shards"], far["server_side_shards"], far["refs"]) == (3, 3, ["canary", "prod"])
        assert again["copied_shards"] == 0
        assert whole(prefix) == {first}
        assert whole(bucket) == {first, second}
        server.run("verify", f"{bucket}@canary", "--read-data")

    @pytest.mark.parametrize("is_cut", [True, False])
    def test_copy_of_a_damaged_source_inside_the_store(
        self, server: Server, url: str, first: str, is_cut: bool
    ) -> None:
        """Found before the store copies it under the name of the whole shard, where it would stay."""
        storage, target = open_storage(url), server.url(bucket="second")
        name = next(name for name in sorted(reachable(storage, first)) if name.startswith("shards/"))
        spoil(server, url, name, storage.get(name, max_bytes=1 << 30)[:1000] if is_cut else None)

        said = server.run("copy", f"{url}@prod", target, status=3).stderr.splitlines()[-1]

        assert (f"{name} is damaged" if is_cut else f"{name} is missing") in said
        assert storage.url in said
        assert target.partition("?")[0] not in said
        storage.close()
        storage = open_storage(target)
        assert name not in names_in(storage)
        assert names_in(storage, "manifests/") == []
        storage.close()

    def test_rm_and_prune(self, server: Server, url: str, first: str, second: str) -> None:
        assert "is named by canary" in server.run("rm", f"{url}@{second}", status=1).stderr
        assert "would remove" in server.run("rm", f"{url}@canary", "--dry-run").stdout
        removed = server.json("rm", f"{url}@canary", "--with-snapshot")
        assert (removed["refs"], removed["snapshots"]) == (["canary"], [second])
        assert [row["snapshot"] for row in server.json("list", url)["snapshots"]] == [first]

        marking = server.json("prune", url)
        planned = server.json("prune", url, "--grace", "0", "--dry-run")
        assert planned["deleted_objects"] == marking["waiting_objects"] == 3
        done = server.json("prune", url, "--grace", "0")
        empty = server.json("prune", url, "--grace", "0")

        assert (marking["deleted_objects"], done["deleted_objects"], empty["deleted_objects"]) == (0, 3, 0)
        assert done["deleted_bytes"] == planned["deleted_bytes"]
        assert whole(url) == {first}
        storage = open_storage(url)
        assert {name for name in names_in(storage) if name.split("/")[0] not in ("leases", "refs")} == {
            "kvsnap.json",
            *reachable(storage, first),
        }
        storage.close()
        server.run("tag", f"{url}@{second}", "canary", status=1)


class AllCommands(SomeCommands):
    """All that reads or writes a repository."""

    def test_export(self, server: Server, cache: Path, ns: Namespace, url: str) -> None:
        done = server.json("export", "--cache-dir", cache, "--to", url, "--tag", "prod")
        again = server.json("export", "--cache-dir", cache, "--to", url, "--tag", "prod")
        store(cache, ns, chain(ns, prompt(9, 128)))
        later = server.json("export", "--cache-dir", cache, "--to", url, "--tag", "prod")

        assert (done["is_new"], done["sent_shards"], done["num_chunks"]) == (True, 2, 7)
        assert (again["is_new"], again["sent_shards"], again["snapshot"]) == (False, 0, done["snapshot"])
        assert (later["is_new"], later["sent_shards"], later["num_shards"]) == (True, 1, 3)
        assert whole(url) == {done["snapshot"], later["snapshot"]}

    def test_what_the_probe_found_is_recorded(self, server: Server, url: str, first: str) -> None:
        storage = open_storage(url)
        marker = json.loads(storage.get("kvsnap.json", max_bytes=1 << 20))
        left = [name for name in names_in(storage) if name.startswith(("gc/", "leases/"))]
        storage.close()

        assert marker["store"] == {
            "conditional_create": server.keeps_conditions,
            "conditional_replace": server.keeps_conditions,
            "ranges": True,
            "checksums": server.checks_sums,
        }
        assert left == []

    def test_list_show_diff(self, server: Server, url: str, first: str, second: str) -> None:
        rows = server.json("list", url)["snapshots"]
        shown = server.json("show", f"{url}@{second[:10]}")
        report = server.json("diff", f"{url}@prod", "@canary")

        assert {row["snapshot"]: row["refs"] for row in rows} == {first: ["prod"], second: ["canary"]}
        assert (shown["snapshot"], len(shown["shards"])) == (f"sha256:{second}", 3)
        assert [report[what]["num_chunks"] for what in ("added", "gone", "shared")] == [2, 0, 7]
        assert first[:12] in server.run("list", url).stdout

    def test_tag(self, server: Server, url: str, first: str, second: str) -> None:
        server.run("tag", f"{url}@canary", "prod", "--expect", first)
        back = server.json("tag", f"{url}@prod", "--back", 1)
        history = server.json("tag", f"{url}@prod", "--history")["history"]

        assert back["snapshot"] == first
        assert [row["snapshot"] for row in history] == [first, second, first]
        assert "expected" in server.run("tag", f"{url}@canary", "prod", "--expect", second, status=1).stderr
        server.run("tag", f"{url}@nothing", "prod", status=1)

    @pytest.mark.parametrize("depth", [(), ("--quick",), ("--sample", "50%"), ("--read-data",)], ids=str)
    def test_verify(self, server: Server, url: str, first: str, depth: tuple[str, ...]) -> None:
        report = server.json("verify", f"{url}@prod", *depth)

        assert (report["is_good"], report["num_shards"], report["num_chunks"]) == (True, 2, 7)
        assert report["read_chunks"] == {"--sample": 4, "--read-data": 7}.get("".join(depth[:1]), 0)

    def test_verify_and_import_find_damage(
        self, server: Server, url: str, first: str, ns: Namespace, tmp_path: Path
    ) -> None:
        storage = open_storage(url)
        short, flipped = (name for name in sorted(reachable(storage, first)) if name.startswith("shards/"))
        data = bytearray(storage.get(flipped, max_bytes=1 << 30))
        storage.close()
        data[-100] ^= 1

        spoil(server, url, flipped, bytes(data))
        assert server.json("verify", f"{url}@prod")["is_good"]
        found = server.json("verify", f"{url}@prod", "--read-data", status=3)["problems"]
        assert [(problem["kind"], problem["object"]) for problem in found] == [("damaged", flipped)]
        assert "is damaged" in server.run("import", f"{url}@prod", "--cache-dir", tmp_path / "a", status=3).stderr

        spoil(server, url, short, None)
        quick = server.json("verify", f"{url}@prod", "--quick", status=3)["problems"]
        assert [(problem["kind"], problem["object"]) for problem in quick] == [("missing", short)]
        server.run("import", f"{url}@prod", "--cache-dir", tmp_path / "b", status=3)
        assert not (tmp_path / "b").exists() or chunks_at(tmp_path / "b", ns) == {}

    def test_import(
        self, server: Server, cache: Path, ns: Namespace, url: str, first: str, second: str, tmp_path: Path
    ) -> None:
        other = tmp_path / "other"
        planned = server.json("import", f"{url}@prod", "--cache-dir", other, "--dry-run")
        assert not other.exists()
        done = server.json("import", f"{url}@prod", "--cache-dir", other)
        later = server.json("import", f"{url}@canary", "--cache-dir", other)
        again = server.json("import", f"{url}@sha256:{second}", "--cache-dir", other)

        assert [report["imported_shards"] for report in (planned, done, later, again)] == [2, 2, 1, 0]
        assert chunks_at(other, ns) == chunks_at(cache, ns)
        run("verify", "--cache-dir", other, "--read-data")
        server.run("import", f"{url}@nothing", "--cache-dir", other, status=1)

    def test_sync(
        self, server: Server, cache: Path, ns: Namespace, url: str, first: str, second: str, tmp_path: Path
    ) -> None:
        one = server.json("sync", f"{url}@prod", "--cache-dir", tmp_path / "other")
        server.run("tag", f"{url}@canary", "prod")
        two = server.json("sync", f"{url}@prod", "--cache-dir", tmp_path / "other")

        assert [(round_["outcome"], round_["snapshot"]) for round_ in (one, two)] == [
            ("synced", first),
            ("synced", second),
        ]
        assert [round_["report"]["imported_shards"] for round_ in (one, two)] == [2, 1]
        assert chunks_at(tmp_path / "other", ns) == chunks_at(cache, ns)

    def test_copy_to_a_directory_and_back(
        self, server: Server, url: str, first: str, second: str, tmp_path: Path
    ) -> None:
        back = server.url(bucket="second")

        down = server.json("copy", url, tmp_path / "repo")
        up = server.json("copy", tmp_path / "repo", back)

        assert [(report["copied_shards"], report["server_side_shards"]) for report in (down, up)] == [(3, 0), (3, 0)]
        assert whole(str(tmp_path / "repo")) == whole(back) == {first, second}
        server.run("verify", f"{back}@canary", "--read-data")
        assert server.json("diff", f"{url}@canary", f"{back}@canary")["shared"]["num_chunks"] == 9

    def test_merge(self, server: Server, ns: Namespace, url: str, first: str, tmp_path: Path) -> None:
        store(tmp_path / "part", ns, chain(ns, prompt(5, 128)))
        server.run("export", "--cache-dir", tmp_path / "part", "--to", url, "--tag", "part")

        done = server.json("merge", f"{url}@prod", "@part", "--tag", "all")
        again = server.json("merge", f"{url}@prod", "@part", "--tag", "all")

        assert (done["is_new"], done["num_chunks"], done["num_shards"]) == (True, 9, 3)
        assert (again["is_new"], again["snapshot"]) == (False, done["snapshot"])
        assert server.json("import", f"{url}@all", "--cache-dir", tmp_path / "other")["num_chunks"] == 9

    def test_sign(self, server: Server, cache: Path, url: str, first: str, second: str, tmp_path: Path) -> None:
        pytest.importorskip("cryptography")
        key, keys = new_key(tmp_path / "key.pem"), tmp_path / "trusted_keys"
        signed = server.json("sign", f"{url}@{first}", "--key", key)
        again = server.json("sign", f"{url}@prod", "--key", key)
        keys.write_text(f"release {signed['key']}\n")
        demand = ("--require-signature", "--trusted-keys", keys)

        assert (signed["is_new"], again["is_new"]) == (True, False)
        assert server.json("verify", f"{url}@prod", *demand)["signed_by"] == "release"
        assert server.json("import", f"{url}@prod", "--cache-dir", tmp_path / "a", *demand)["num_chunks"] == 7
        refused = server.run("import", f"{url}@canary", "--cache-dir", tmp_path / "b", *demand, status=3)
        assert "not signed" in refused.stderr
        server.run("export", "--cache-dir", cache, "--to", url, "--tag", "canary", "--sign-key", key)
        target = server.url(bucket="second")
        server.run("copy", f"{url}@canary", target, "--tag", "canary")
        assert server.json("import", f"{target}@canary", "--cache-dir", tmp_path / "b", *demand)["num_chunks"] == 9

    def test_what_was_removed_comes_back_with_a_tag(self, server: Server, url: str, first: str, second: str) -> None:
        server.run("rm", f"{url}@canary", "--with-snapshot")
        server.run("prune", url)

        server.run("tag", f"{url}@{second}", "again")

        server.run("prune", url, "--grace", "0")
        assert whole(url) == {first, second}
        server.run("verify", f"{url}@again", "--read-data")

    def test_max_rate(self, server: Server, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        """Pieces smaller than a chunk, through every command that moves shards."""
        url = server.url(more="&max_rate=128KiB")
        began = time.monotonic()
        server.run("export", "--cache-dir", cache, "--to", url, "--tag", "prod")
        server.run("import", f"{url}@prod", "--cache-dir", tmp_path / "whole")
        server.run("import", f"{url}@prod", "--cache-dir", tmp_path / "part", "--max-bytes", "60KiB")
        took = time.monotonic() - began
        server.run("verify", f"{url}@prod", "--sample", "50%")
        server.run("copy", f"{url}@prod", tmp_path / "repo", "--tag", "prod")

        assert took > 2 * 100 / 128
        assert chunks_at(tmp_path / "whole", ns) == chunks_at(cache, ns)
        assert len(chunks_at(tmp_path / "part", ns)) == 2
        run("verify", f"{tmp_path / 'repo'}@prod", "--read-data")

    def test_what_is_not_there_is_said(self, server: Server, cache: Path, ns: Namespace, tmp_path: Path) -> None:
        empty, nowhere = server.url(), server.url(bucket="third")

        for command in (("list", empty), ("show", f"{empty}@prod"), ("verify", f"{empty}@prod"), ("prune", empty)):
            assert "no kvsnap repository" in server.run(*command, status=1).stderr
        for args in (["list", nowhere], ["export", "--cache-dir", cache, "--to", nowhere]):
            assert "bucket third does not exist" in server.run(*args, status=1).stderr

    def test_a_store_without_conditions_wants_the_word(
        self, server: Server, cache: Path, ns: Namespace, url: str, tmp_path: Path
    ) -> None:
        """Reading never does."""
        if server.keeps_conditions:
            pytest.skip("it keeps them")
        for _ in range(2):
            refused = run("export", "--cache-dir", cache, "--to", url, "--tag", "prod", status=1)
            assert "say so with --single-writer" in refused.stderr
        said = run("export", "--cache-dir", cache, "--to", url, "--tag", "prod", SINGLE_WRITER)
        assert "snapshot" in said.stdout + said.stderr

        key = new_key(tmp_path / "key.pem")
        for command in (
            ("tag", f"{url}@prod", "x"),
            ("merge", f"{url}@prod", "@prod"),
            ("copy", f"{url}@prod", server.url()),
            ("sign", f"{url}@prod", "--key", key),
            ("rm", f"{url}@prod"),
            ("prune", url),
        ):
            assert "say so with --single-writer" in run(*command, status=1).stderr
        for command in (("list", url), ("verify", f"{url}@prod"), ("import", f"{url}@prod", "--cache-dir", tmp_path)):
            run(*command)


def new_key(path: Path) -> Path:
    """As `openssl genpkey -algorithm ed25519 -out PATH` does."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    private = ed25519.Ed25519PrivateKey.generate()
    path.write_bytes(
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    path.chmod(0o600)
    return path


def test_there_are_as_many_connections_as_copy_has_threads(endpoint: str) -> None:
    threads = next(param for param in main.commands["copy"].params if param.name == "threads").type
    storage = S3Storage(*parse_s3_url(f"s3://first/x?endpoint={endpoint}"))

    assert isinstance(threads, click.IntRange)
    assert threads.max is not None
    assert storage._s3().meta.config.max_pool_connections >= threads.max
    storage.close()


@pytest.fixture(scope="module")
def moto(endpoint: str) -> Server:
    make_buckets(endpoint, *BUCKETS)
    return Server(endpoint, keeps_conditions=True, checks_sums=False)


@pytest.fixture(scope="module")
def ministack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with ministack_server(tmp_path_factory.mktemp("ministack")) as endpoint:
        make_buckets(endpoint, *BUCKETS)
        yield Server(endpoint, keeps_conditions=True, checks_sums=True)


@pytest.fixture(scope="module")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with rclone_server(tmp_path_factory.mktemp("rclone")) as endpoint:
        make_buckets(endpoint, *BUCKETS)
        yield Server(endpoint, keeps_conditions=False, checks_sums=False)


class TestMoto(SomeCommands):
    @pytest.fixture
    def server(self, moto: Server) -> Server:
        return moto


@pytest.mark.s3
class TestAllOnMoto(AllCommands):
    @pytest.fixture
    def server(self, moto: Server) -> Server:
        return moto


@pytest.mark.s3
class TestMinistack(AllCommands):
    @pytest.fixture
    def server(self, ministack: Server) -> Server:
        return ministack


@pytest.mark.s3
class TestRclone(AllCommands):
    @pytest.fixture
    def server(self, rclone: Server) -> Server:
        return rclone


def test_a_store_that_ignores_ranges_is_read_all_the_same(cache: Path, ns: Namespace, tmp_path: Path) -> None:
    """The probe found it out and recorded it; readers must know, too."""
    with fake_s3(ranges=False) as state:
        url = f"s3://{BUCKET}/p?endpoint={state.endpoint}"
        run("export", "--cache-dir", cache, "--to", url, "--tag", "prod")

        for depth in ((), ("--sample", "50%"), ("--read-data",)):
            run("verify", f"{url}@prod", *depth)
        run("import", f"{url}@prod", "--cache-dir", tmp_path / "part", "--max-bytes", "60KiB")

    assert chunks_at(tmp_path / "part", ns).items() < chunks_at(cache, ns).items()
