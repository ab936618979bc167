"""kvsnap copy"""

from __future__ import annotations

import click

from kvsnap.manifest import DIGEST_PREFIX
from kvsnap.repository import split_snapshot_url
from kvsnap.repository_copy import THREADS, CopyReport, copy_snapshots
from kvsnap.storage.s3_options import MAX_THREADS
from kvsnap_jobs.options import EXIT_PROBLEMS, REPOSITORY_URL, TAG, dry_run_option, json_option, single_writer_option
from kvsnap_jobs.output import ProgressBar, print_facts, print_json, size_text


@click.command()
@click.argument("source", metavar="URL[@REF]")
@click.argument("target", metavar="URL", type=REPOSITORY_URL)
@click.option("--tag", metavar="NAME", type=TAG, help="Ref of the target that names the snapshot afterwards.")
@click.option(
    "--threads", metavar="N", type=click.IntRange(1, MAX_THREADS), default=THREADS, show_default=True,
    help="Shards at once.",
)  # fmt: skip
@dry_run_option
@single_writer_option
@json_option
@click.pass_context
def copy(
    ctx: click.Context,
    source: str,
    target: str,
    tag: str | None,
    threads: int,
    dry_run: bool,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Copy a snapshot to another repository; without @REF all snapshots and all refs.

    Of all snapshots those that are damaged are named and left out, with their refs.

    What the target has is not moved again. Every object is checked by its digest on the
    way; between two places of one store the store copies shards by itself, and vouches
    for them (`kvsnap verify --read-data` reads them). May be killed and repeated.

    \b
    Exit status:
      0  copied
      1  it could not be copied (no such snapshot, no access, a storage failed)
      2  wrong usage
      3  an object is damaged or missing in the source, or another lies under its name in the target
    """
    url, ref = split_snapshot_url(source)
    if tag is not None and ref is None:
        raise click.UsageError("--tag names one snapshot, give URL@REF")
    with ProgressBar("copy") as bar:
        report = copy_snapshots(
            url, target, ref=ref, tag=tag, dry_run=dry_run, single_writer=single_writer, threads=threads, progress=bar
        )
    for problem in report.problems:
        click.echo(f"kvsnap: {problem}", err=True)
    if as_json:
        print_json(report)
    else:
        _print_text(report)
    if report.problems:
        ctx.exit(EXIT_PROBLEMS)


def _print_text(report: CopyReport) -> None:
    for snapshot in report.snapshots:
        click.echo(DIGEST_PREFIX + snapshot)
    server = f", {report.server_side_shards} of them by the store" if report.server_side_shards else ""
    print_facts(
        (
            ("refs", ", ".join(report.refs) or None),
            ("shards", f"{report.num_shards}, {size_text(report.nbytes)}"),
            ("there already", report.present_shards),
            (
                "to copy" if report.dry_run else "copied",
                f"{report.copied_shards} shards, {size_text(report.copied_bytes)}{server}",
            ),
        ),
        indent="  ",
    )
