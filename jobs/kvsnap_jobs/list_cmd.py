"""kvsnap list"""

from __future__ import annotations

import click

from kvsnap.listing import list_snapshots
from kvsnap_jobs.options import EXIT_PROBLEMS, REPOSITORY_URL, json_option
from kvsnap_jobs.output import print_json, print_table, size_text


@click.command("list")
@click.argument("url", metavar="URL", type=REPOSITORY_URL)
@json_option
@click.pass_context
def list_(ctx: click.Context, url: str, as_json: bool) -> None:
    """List the snapshots of a repository, the newest first.

    \b
    Exit status:
      0  listed
      1  it could not be read (no repository, no access)
      2  wrong usage
      3  listed, but some manifests or refs can't be read, or a ref's snapshot is missing
    """
    report = list_snapshots(url)
    for problem in report.problems:
        click.echo(f"kvsnap: {problem}", err=True)
    if as_json:
        print_json(report)
    else:
        print_table(
            ("SNAPSHOT", "REFS", "CREATED", "MODEL", "CHUNKS", "TOKENS", "BYTES"),
            (
                (
                    row.snapshot[:12],
                    ",".join(row.refs) or "-",
                    row.created,
                    row.model or "-",
                    row.num_chunks,
                    row.num_tokens,
                    size_text(row.nbytes),
                )
                for row in report.snapshots
            ),
        )
    if report.problems:
        ctx.exit(EXIT_PROBLEMS)
