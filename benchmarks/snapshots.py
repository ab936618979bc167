"""Export and import of snapshots against the bare work: copying, hashing, writing, downloading the same bytes.

Both sides take turns and the medians of the rounds' ratios count. Chunks of SmolLM2 (5.9 MB) and of 32 MiB; the worse
of the two is the row. Then 8 GiB for peak memory and for what a second export sends, and a catalog of a million chunks.

    python -m benchmarks.snapshots [ratios] [http] [large] [catalog]     # default: all
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from benchmarks import snapshot_catalog
from benchmarks.namespaces import llama_8b, smollm2
from benchmarks.object_server import BUCKET
from benchmarks.report import emit, note, table
from benchmarks.snapshot_data import (
    copy_buffered,
    copy_direct,
    directory_bytes,
    fill,
    forget,
    in_parallel,
    recall,
    seconds,
    sha256_of,
    shard_files,
    write_like,
)
from kvsnap.namespace import Namespace
from kvsnap.snapshot_export import export_snapshot
from kvsnap.snapshot_import import import_snapshot
from kvsnap.transfer import NUM_WORKERS
from tools.build_model import cache_folder

GIB = 1 << 30
RATIO_BYTES = 3 * GIB
LARGE_BYTES = 8 * GIB
ROUNDS = 3
EXPORT_ROUNDS = 7
"""More: the speed of writing swings most."""
KINDS: dict[str, Callable[[], Namespace]] = {"smollm2": smollm2, "32 MiB": llama_8b}
REPOSITORY = Path(__file__).resolve().parents[1]


def chunks_for(ns: Namespace, nbytes: int) -> int:
    """How many chunks take about `nbytes`."""
    return nbytes // ns.geometry.chunk_bytes(ns.chunk_tokens)


def fresh(folder: Path) -> Path:
    """`folder`, empty."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def measure_local(root: Path) -> None:
    """Export to and import from a local repository."""
    exports, imports, rows = [], [], []
    for kind, make in KINDS.items():
        cache = root / "cache"
        nbytes = fill(cache, make(), chunks_for(make(), RATIO_BYTES))
        export_ratios = [_export_round(root, cache) for _ in range(EXPORT_ROUNDS)]
        for prepare, state in ((forget, "disk"), (recall, "memory")):
            rounds = [_import_round(root, prepare) for _ in range(ROUNDS)]
            took, ratio = (statistics.median(column) for column in zip(*rounds, strict=True))
            rows.append((f"import, {kind}, from {state}", f"{nbytes / GIB / took:.2f}", f"{ratio:.2f}", "copy"))
            if state == "disk":
                imports.append(ratio)
        took, ratio, parallel = (statistics.median(column) for column in zip(*export_ratios, strict=True))
        rows.append((f"export, {kind}", f"{nbytes / GIB / took:.2f}", f"{ratio:.2f}", "sha256 or write, one stream"))
        rows.append((f"export, {kind}", f"{nbytes / GIB / took:.2f}", f"{parallel:.2f}", f"... {NUM_WORKERS} streams"))
        exports.append(ratio)
        shutil.rmtree(cache)
        shutil.rmtree(root / "repo")
    table(("what", "GiB/s", "ratio", "to"), rows)
    emit("import_over_copy", min(imports), at_least=0.85)
    emit("export_over_hash_or_write", min(exports), at_least=0.85)


def _export_round(root: Path, cache: Path) -> tuple[float, float, float]:
    """Seconds of an export, and its speed over that of the slower of sha256 and write: one stream, several streams.

    The source lies in the page cache, for both sides: reading and writing one disk at once is another limit.
    """
    files = shard_files(cache)
    slower = []
    for threads in (1, NUM_WORKERS):
        recall(files)
        hashed = seconds(partial(in_parallel, sha256_of, files, threads))
        write = partial(write_like, folder=fresh(root / "plain"))
        slower.append(max(hashed, seconds(partial(in_parallel, write, files, threads))))
    shutil.rmtree(root / "repo", ignore_errors=True)
    recall(files)
    took = seconds(lambda: export_snapshot(cache, str(root / "repo"), tag="bench", flush=False))
    fresh(root / "plain")
    note(f"  export {took:.2f} s; sha256 or write {slower[0]:.2f} s, in several streams {slower[1]:.2f} s")
    return took, slower[0] / took, slower[1] / took


def _import_round(root: Path, prepare: Callable[[list[Path]], None]) -> tuple[float, float]:
    """Seconds of an import, and its speed over that of the faster of two plain copies by as many threads."""
    files = shard_files(root / "repo")
    copies = []
    for copy in (copy_buffered, copy_direct):
        folder = fresh(root / "plain")
        prepare(files)
        copies.append(seconds(partial(in_parallel, partial(copy, folder=folder), files)))
    fresh(root / "plain")
    shutil.rmtree(root / "other", ignore_errors=True)
    prepare(files)
    took = seconds(lambda: import_snapshot(str(root / "repo"), "bench", root / "other"))
    shutil.rmtree(root / "other")
    note(f"  import {took:.2f} s; copy {copies[0]:.2f} s, past the page cache {copies[1]:.2f} s")
    return took, min(copies) / took


def measure_http(root: Path) -> None:
    """Import over HTTP on loopback, against boto3's get_object, which keeps nothing: a slow disk shows in the ratio."""
    ratios, rows, per_shard = [], [], []
    for kind, make in KINDS.items():
        cache, repo = root / "cache", root / "repo"
        nbytes = fill(cache, make(), chunks_for(make(), RATIO_BYTES))
        export_snapshot(cache, str(repo), tag="bench", flush=False)
        shutil.rmtree(cache)
        files = shard_files(repo)
        recall(files)
        with object_server(repo) as endpoint:
            plain, ours, unchecked, written = [], [], [], []
            for _ in range(ROUNDS):
                plain.append(seconds(lambda: download(endpoint, repo, files)))  # noqa: B023
                unchecked.append(seconds(lambda: download(endpoint, repo, files, checked=False)))  # noqa: B023
                shutil.rmtree(root / "other", ignore_errors=True)
                write = partial(write_like, folder=fresh(root / "plain"))
                written.append(seconds(partial(in_parallel, write, files)))
                fresh(root / "plain")
                recall(files)
                before = len(_log(endpoint))
                url = f"s3://{BUCKET}/?endpoint={endpoint}"
                ours.append(seconds(lambda: import_snapshot(url, "bench", root / "other")))  # noqa: B023
                shards = [line for line in _log(endpoint)[before:] if " shards/" in line]
                per_shard.append(len(shards) / len(files))
        for name, times in (
            ("get_object", plain), ("get_object, body not checked", unchecked), ("write alone", written),
            ("import", ours),
        ):  # fmt: skip
            ratio = statistics.median(t / mine for t, mine in zip(times, ours, strict=True))
            rows.append((f"{name}, {kind}", f"{nbytes / GIB / statistics.median(times):.2f}", f"{1 / ratio:.2f}"))
        ratios.append(statistics.median(t / mine for t, mine in zip(plain, ours, strict=True)))
        shutil.rmtree(repo)
        shutil.rmtree(root / "other")
    table(("what", "GiB/s", "to import"), rows)
    emit("import_http_over_boto3", min(ratios), at_least=0.9)
    emit("requests_per_shard", max(per_shard), at_most=1)


@contextmanager
def object_server(folder: Path) -> Iterator[str]:
    """A server process; its endpoint."""
    command = [sys.executable, "-m", "benchmarks.object_server", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


def _log(endpoint: str) -> list[str]:
    with urllib.request.urlopen(f"{endpoint}/-/log") as answer:
        return str(answer.read().decode()).splitlines()


def download(endpoint: str, repo: Path, files: list[Path], *, checked: bool = True) -> None:
    """Plain boto3, as many threads as an import has; each body read into memory, then dropped."""
    import boto3
    from botocore.config import Config

    config = Config(
        max_pool_connections=NUM_WORKERS,
        s3={"addressing_style": "path"},
        response_checksum_validation="when_supported" if checked else "when_required",
    )
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", config=config)

    def get(path: Path) -> None:
        answer = client.get_object(Bucket=BUCKET, Key=str(path.relative_to(repo)))
        assert len(answer["Body"].read()) == path.stat().st_size

    in_parallel(get, files)


def measure_large(root: Path) -> None:
    """Peak memory of 8 GiB; then what exports of a cache that has not changed, or a little, send."""
    wanted = min(LARGE_BYTES, (shutil.disk_usage(root).free - 4 * GIB) // 3)
    if wanted < LARGE_BYTES:
        note(f"only {wanted / GIB:.1f} GiB instead of 8: the disk has no room for three copies")
    ns, cache, repo = smollm2(), root / "cache", root / "repo"
    num_chunks = chunks_for(ns, wanted)
    fill(cache, ns, num_chunks)
    peak_export = _child("export", cache, repo)
    before = directory_bytes(repo)
    _child("export", cache, repo)
    emit("export_again_bytes", directory_bytes(repo) - before, at_most=0)
    before = _all_bytes(repo)
    fill(cache, ns, num_chunks // 100, seed=2)
    _child("export", cache, repo)
    emit("export_1pct_bytes_share", (_all_bytes(repo) - before) / before, at_most=0.02)
    shutil.rmtree(cache)
    peak_import = _child("import", root / "other", repo)
    shutil.rmtree(repo)
    shutil.rmtree(root / "other")
    emit("peak_mib_export", peak_export, at_most=600)
    emit("peak_mib_import", peak_import, at_most=600)


def _all_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _child(what: str, cache: Path, repo: Path) -> float:
    """Do it in a process of its own; the peak of its resident memory [MiB]."""
    command = [sys.executable, "-m", "benchmarks.snapshots", what, str(cache), str(repo)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, cwd=REPOSITORY)
    return float(done.stdout.splitlines()[-1])


def _run_child(what: str, cache: Path, repo: str) -> None:
    if what == "export":
        export_snapshot(cache, repo, tag="bench", flush=False)
    else:
        import_snapshot(repo, "bench", cache)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            print(int(line.split()[1]) / 1024)


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[1] in ("export", "import"):
        _run_child(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
        return
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ[name] = "benchmark"  # the server asks for none
    cache_folder().mkdir(parents=True, exist_ok=True)
    wanted = sys.argv[1:] or ["ratios", "http", "large", "catalog"]
    with tempfile.TemporaryDirectory(prefix="snapshots-", dir=cache_folder()) as folder:
        root = Path(folder)
        parts: dict[str, Callable[[Path], None]] = {
            "ratios": measure_local,
            "http": measure_http,
            "large": measure_large,
            "catalog": lambda root: snapshot_catalog.measure(root / "none"),
        }
        for name in wanted:
            parts[name](root)


if __name__ == "__main__":
    main()
