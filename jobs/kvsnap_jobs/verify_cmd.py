"""kvsnap verify"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.verify import verify_cache_dir, verify_snapshot
from kvsnap_jobs.options import EXIT_PROBLEMS, SHARE, SNAPSHOT_URL, cache_dir_option, json_option, namespace_option
from kvsnap_jobs.output import ProgressBar, print_json, size_text
from kvsnap_jobs.trust_options import keys_to_trust, trust_options


@click.command()
@click.argument("snapshot", metavar="[URL@REF]", type=SNAPSHOT_URL, required=False)
@cache_dir_option(required=False)
@namespace_option
@click.option("--quick", is_flag=True, help="Only existence and sizes.")
@click.option("--sample", metavar="SHARE", type=SHARE, help="Also read this share of the chunks, e.g. 5%.")
@click.option("--seed", metavar="N", type=int, help="Choose the same chunks as an earlier --sample did.")
@click.option("--read-data", is_flag=True, help="Also read every byte: hashes of shards and chunks.")
@trust_options
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    snapshot: tuple[str, str] | None,
    cache_dir: Path | None,
    namespace: str | None,
    quick: bool,
    sample: float | None,
    seed: int | None,
    read_data: bool,
    require_signature: bool | None,
    trusted_keys: Path | None,
    as_json: bool,
) -> None:
    """Check that a snapshot, or a cache directory, is complete and undamaged.

    By default: manifest and catalog by their digests, existence, size and header of
    every shard, and that all of them agree. --quick looks at existence and sizes only;
    --sample reads some chunks too; --read-data reads every byte: sha256 of each shard,
    XXH3 and BLAKE3 of each chunk, which names the chunk that is damaged. With
    --cache-dir the shards there, also beside a live engine. Changes nothing.

    Where trusted keys are installed, one of them must have signed the snapshot.
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
    if quick + (sample is not None) + read_data > 1:
        raise click.UsageError("--quick, --sample and --read-data exclude each other")
    if seed is not None and sample is None:
        raise click.UsageError("--seed goes with --sample")
    with ProgressBar("verify") as bar:
        if cache_dir is not None:
            if require_signature or trusted_keys is not None:
                raise click.UsageError("signatures are a snapshot's; give URL@REF")
            report = verify_cache_dir(
                cache_dir,
                namespace=namespace,
                quick=quick,
                sample=sample,
                seed=seed,
                read_data=read_data,
                progress=bar,
            )
        elif snapshot is not None:
            if namespace is not None:
                raise click.UsageError("--namespace goes with --cache-dir; a snapshot has one namespace")
            trusted = keys_to_trust(require_signature, trusted_keys)
            report = verify_snapshot(
                *snapshot,
                quick=quick,
                sample=sample,
                seed=seed,
                read_data=read_data,
                trusted=trusted,
                progress=bar,
            )
    if as_json:
        print_json(report, is_good=report.is_good)
    else:
        for problem in report.problems:
            click.echo(f"{problem.kind}: {problem.message}")
        for note in report.notes:
            click.echo(f"note: {note}")
        objects = len({problem.object for problem in report.problems})
        verdict = "good" if report.is_good else f"{len(report.problems)} problems in {objects} objects"
        text = f"{verdict}: {report.num_shards} shards"
        if report.num_chunks or not quick:  # headers aren't opened for a quick look at a cache directory
            text += f", {report.num_chunks} chunks"
        if report.read_chunks:
            text += f", {report.read_chunks} of them read ({size_text(report.read_bytes)})"
        if report.depth == "sample":
            text += f", seed {report.seed}"
        if report.signed_by is not None:
            text += f", signed by {report.signed_by}"
        click.echo(text)
    if not report.is_good:
        if cache_dir is not None:
            click.echo(
                "kvsnap: engines take what is damaged for a miss; remove these files, and import or compute again",
                err=True,
            )
        else:
            click.echo("kvsnap: delete what is damaged, then export again (docs/snapshots.md, section 4)", err=True)
        ctx.exit(EXIT_PROBLEMS)
