"""kvsnap diff"""

from __future__ import annotations

import click

from kvsnap.repository import split_snapshot_url
from kvsnap.snapshot_diff import Part, diff_snapshots
from kvsnap_jobs.options import EXIT_PROBLEMS, SNAPSHOT_URL, json_option
from kvsnap_jobs.output import print_json, print_table, size_text


@click.command()
@click.argument("a", metavar="URL@A", type=SNAPSHOT_URL)
@click.argument("b", metavar="[URL]@B")
@json_option
@click.pass_context
def diff(ctx: click.Context, a: tuple[str, str], b: str, as_json: bool) -> None:
    """Compare two snapshots: what B has more than A, what it lacks, what both have.

    They may be of two repositories; without a second URL both are in the first.

    \b
    Exit status:
      0  compared
      1  it could not be compared (no such snapshot, no access)
      2  wrong usage
      3  compared, but no engine could use both: what differs is named; or one is damaged
    """
    url_b, ref_b = (a[0], b[1:]) if b.startswith("@") else split_snapshot_url(b)
    if not ref_b:
        raise click.UsageError(f"{b} names no snapshot, expected [URL]@B")
    report = diff_snapshots(*a, url_b, ref_b)
    if as_json:
        print_json(report)
    else:
        for name in report.identity_fields + report.layout_fields:
            click.echo(f"differs: {name}")
        print_table(
            ("", "CHUNKS", "TOKENS", "BYTES", "SHARDS", "SHARD BYTES"),
            (_row("added", report.added), _row("gone", report.gone), _row("shared", report.shared)),
        )
    if not report.is_same_namespace:
        ctx.exit(EXIT_PROBLEMS)


def _row(name: str, part: Part) -> tuple[object, ...]:
    return (
        name,
        part.num_chunks,
        part.num_tokens,
        size_text(part.chunk_bytes),
        part.num_shards,
        size_text(part.shard_bytes),
    )
