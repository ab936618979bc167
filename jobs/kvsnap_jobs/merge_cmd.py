"""kvsnap merge"""

from __future__ import annotations

import click

from kvsnap.manifest import DIGEST_PREFIX
from kvsnap.snapshot_merge import merge_snapshots
from kvsnap_jobs.options import SNAPSHOT_URL, TAG, json_option, single_writer_option
from kvsnap_jobs.output import print_facts, print_json, size_text


@click.command()
@click.argument("first", metavar="URL@REF", type=SNAPSHOT_URL)
@click.argument("others", metavar="@REF…", nargs=-1, required=True)
@click.option("--tag", metavar="NAME", type=TAG, help="Make this ref name the merged snapshot.")
@single_writer_option
@json_option
def merge(first: tuple[str, str], others: tuple[str, ...], tag: str | None, single_writer: bool, as_json: bool) -> None:
    """Join snapshots of one repository and one namespace into one that has every chunk of any.

    Shards are referenced, not copied; the parts stay as they are. Parts of other
    repositories come by `kvsnap copy` first. Prints the snapshot's id.

    \b
    Exit status:
      0  merged (or such a snapshot was there)
      1  it could not be merged (no such snapshot, no access)
      2  wrong usage
      3  they are of different models or layouts (what differs is named), or one is damaged or lacks a part
    """
    url, ref = first
    refs = [ref]
    for text in others:
        other_url, at, other = text.rpartition("@")
        if not at or not other or other_url not in ("", url):
            raise click.UsageError(f"{text} is no snapshot of {url}, expected @REF")
        refs.append(other)
    report = merge_snapshots(url, refs, tag=tag, single_writer=single_writer)
    if as_json:
        print_json(report)
        return
    click.echo(DIGEST_PREFIX + report.snapshot)
    print_facts(
        (
            ("published", "yes" if report.is_new else "no, the repository has this snapshot already"),
            ("ref", report.tag),
            ("holds", f"{report.num_chunks} chunks, {report.num_tokens} tokens, {report.num_prefixes} prefixes"),
            ("shards", f"{report.num_shards}, {size_text(report.nbytes)}"),
        ),
        indent="  ",
    )
