"""A snapshot's life on S3, from the command line: exported and signed, looked at, verified, imported, released, pruned.

No engine and no cloud account: the cache directory is filled with made-up KV of a tiny model, and the store is
moto's server on the loopback interface. With --url s3://BUCKET/PREFIX it is your own bucket (its leftovers stay).

    python examples/s3_snapshot/run.py [--url s3://bucket/prefix]
"""

from __future__ import annotations

import argparse
import io
import logging
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "jobs"))

from kvsnap.direct_io import aligned_buffer
from kvsnap.identity import ModelIdentity
from kvsnap.keys import KeyChain, root_key
from kvsnap.layout import Layout, SliceLayout
from kvsnap.namespace import Namespace
from kvsnap.shard import checksum
from kvsnap.tiers.disk import ChunkToWrite, DiskTier
from kvsnap_jobs.cli import main as main_command

HANDBOOK_TOKENS = 1024


def namespace() -> Namespace:
    """Of a model with 4 layers and 2 KV heads of 64, in blocks of 16 tokens: 512 KiB per chunk."""
    return Namespace(
        identity=ModelIdentity(
            weights="declared:example", config={"model_type": "example"}, dtype="bfloat16", kv_dtype="bfloat16"
        ),
        layout=Layout(
            block_tokens=16,
            dtype="BF16",
            page_shape=(2, 2, 16, 64),
            page_format={"backend": "EXAMPLE", "order": "HNC"},
            slices=(SliceLayout(num_layers=4, kv_heads=2, ranks=(0,)),),
        ),
        chunk_tokens=256,
        human={"model": "example/tiny"},
    )


def serve(cache_dir: Path, question: int) -> None:
    """What an engine would store that was asked a question about the handbook: a shared prefix, and its own end."""
    ns = namespace()
    ids = [*range(HANDBOOK_TOKENS), *range(10_000 * question, 10_000 * question + ns.chunk_tokens)]
    chain = KeyChain(root_key(ns.identity.hash(), ns.chunk_tokens), ns.chunk_tokens, ns.layout.block_tokens)
    chain.extend(ids)
    with DiskTier(cache_dir, ns, cap_bytes=1 << 30) as disk:
        stored = {entry.key for shard in disk.scan() for entry in shard.entries}
        chunks = []
        for depth, key in enumerate(chain.keys):
            view = aligned_buffer(ns.geometry.chunk_bytes(ns.chunk_tokens))
            view[:] = random.Random(key).randbytes(len(view))
            end = (depth + 1) * ns.chunk_tokens
            block_keys = chain.tail_block_keys(depth, end)
            parent = chain.parent_of(depth)
            chunk = ChunkToWrite(key, parent, depth, ns.chunk_tokens, block_keys, checksum([view]), [view])
            if key not in stored:
                chunks.append(chunk)
        disk.write("", chunks)


def kvsnap(*arguments: object, status: int = 0) -> str:
    """Run a command, show it and what it says; its stdout."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ kvsnap {shlex.join(words)}", flush=True)
    out, err, exit_status = io.StringIO(), io.StringIO(), 0
    try:
        # in this process: a new one for each command would take most of the time
        with redirect_stdout(out), redirect_stderr(err):
            main_command(words, prog_name="kvsnap")
    except SystemExit as end:
        exit_status = end.code if isinstance(end.code, int) else int(end.code is not None)
    print(out.getvalue() + err.getvalue(), end="", flush=True)
    if exit_status != status:
        raise SystemExit(f"exit status {exit_status}, expected {status}")
    return out.getvalue()


@contextmanager
def bucket(url: str | None) -> Iterator[str]:
    """A repository's URL: the one given, or one on a server of our own."""
    if url is not None:
        yield url
        return
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        os.environ |= {
            "AWS_ENDPOINT_URL_S3": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "example",
            "AWS_SECRET_ACCESS_KEY": "example",
            "AWS_REGION": "us-east-1",
        }
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
        client.create_bucket(Bucket="kvsnap-example")
        client.close()
        yield "s3://kvsnap-example/team"
    finally:
        server.stop()


def make_key(path: Path) -> None:
    """As `openssl genpkey -algorithm ed25519 -out PATH` does."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    private = Ed25519PrivateKey.generate()
    path.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)


def play(url: str, folder: Path) -> None:
    """The commands, in the order of a release."""
    cache, replica, key, keys = (folder / name for name in ("cache", "replica", "release.pem", "trusted_keys"))
    make_key(key)
    os.environ["KVSNAP_TRUSTED_KEYS"] = str(keys)
    keys.touch(0o644)

    print("# an engine has answered two questions; the release job exports and signs")
    serve(cache, 1)
    serve(cache, 2)
    kvsnap("export", "--cache-dir", cache, "--to", url, "--tag", "canary", "--sign-key", key)

    print("\n# the public key goes to those who import; from now on they take signed snapshots only")
    public = kvsnap("sign", f"{url}@canary", "--key", key).split()[-1]
    keys.write_text(f"release {public}\n")

    print("\n# look, verify, release")
    kvsnap("list", url)
    kvsnap("show", f"{url}@canary")
    kvsnap("verify", f"{url}@canary", "--sample", "50%")
    kvsnap("tag", f"{url}@canary", "prod")

    print("\n# a new replica starts warm (an engine does the same with `snapshot`)")
    kvsnap("import", f"{url}@prod", "--cache-dir", replica)
    kvsnap("verify", "--cache-dir", replica, "--read-data")

    print("\n# a third question: only its own chunks are sent; the handbook is there")
    serve(cache, 3)
    kvsnap("export", "--cache-dir", cache, "--to", url, "--tag", "canary", "--sign-key", key)
    kvsnap("diff", f"{url}@prod", f"{url}@canary")
    kvsnap("tag", f"{url}@canary", "prod")

    print("\n# back to what it was, and what an unsigned snapshot gets")
    kvsnap("tag", f"{url}@prod", "--back", "1")
    kvsnap("export", "--cache-dir", replica, "--to", f"{url}-unsigned", "--tag", "prod")
    kvsnap("import", f"{url}-unsigned@prod", "--cache-dir", folder / "other", status=3)

    print("\n# clean up: nothing goes before its grace period")
    kvsnap("rm", f"{url}@canary", "--with-snapshot")
    kvsnap("prune", url, "--dry-run")
    kvsnap("verify", f"{url}@prod", "--read-data")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a repository of your own; by default one on a server in this process")
    arguments = parser.parse_args()
    with bucket(arguments.url) as url, tempfile.TemporaryDirectory(prefix="kvsnap-example-") as folder:
        play(url, Path(folder))


if __name__ == "__main__":
    main()
