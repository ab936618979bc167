"""kvsnap verify"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.verify import verify_cache_dir, verify_snapshot
from kvsnap_jobs.options import EXIT_PROBLEMS, SNAPSHOT_URL, cache_dir_option, json_option, namespace_option
from kvsnap_jobs.output import ProgressBar, print_json, size_text


@click.command()
@click.argument("snapshot", metavar="[URL@REF]", type=SNAPSHOT_URL, required=False)
@cache_dir_option(required=False)
@namespace_option
@click.option("--read-data", is_flag=True, help="Also read every byte: hashes of shards and chunks.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    snapshot: tuple[str, str] | None,
    cache_dir: Path | None,
    namespace: str | None,
    read_data: bool,
    as_json: bool,
) -> None:
    """Check that a snapshot, or a cache directory, is complete and undamaged.

    By default: manifest and catalog by their digests, existence, size and header of
    every shard, and that all of them agree. With --read-data every byte: sha256 of each
    shard, XXH3 and BLAKE3 of each chunk, which names the chunk that is damaged. With
    --cache-dir the shards there, also beside a live engine. Changes nothing.

    Problems are listed on stdout; what is unusual and harmless too, as notes.

    \b
    Exit status:
      0  it is good
      1  it could not be read (no such snapshot or directory, no access)
      2  wrong usage
      3  it was read and has problems
    """
    if (snapshot is None) == (cache_dir is None):
        raise click.UsageError("give either URL@REF or --cache-dir DIR")
    with ProgressBar("verify") as bar:
        if cache_dir is not None:
            report = verify_cache_dir(cache_dir, namespace=namespace, read_data=read_data, progress=bar)
        elif snapshot is not None:
            if namespace is not None:
                raise click.UsageError("--namespace goes with --cache-dir; a snapshot has one namespace")
            report = verify_snapshot(*snapshot, read_data=read_data, progress=bar)
    if as_json:
        print_json(report, is_good=report.is_good)
    else:
        for problem in report.problems:
            click.echo(f"{problem.kind}: {problem.message}")
        for note in report.notes:
            click.echo(f"note: {note}")
        read = f", {size_text(report.read_bytes)} read" if read_data else ""
        verdict = "good" if report.is_good else f"{len(report.problems)} problems"
        click.echo(f"{verdict}: {report.num_shards} shards, {report.num_chunks} chunks{read}")
    if not report.is_good:
        ctx.exit(EXIT_PROBLEMS)
