"""kvsnap tag"""

from __future__ import annotations

from dataclasses import asdict

import click

from kvsnap.manifest import DIGEST_PREFIX
from kvsnap.refs import ref_history, roll_back, tag_snapshot
from kvsnap_jobs.options import SNAPSHOT_URL, json_option, single_writer_option
from kvsnap_jobs.output import print_json, print_table


@click.command()
@click.argument("snapshot", metavar="URL@REF", type=SNAPSHOT_URL)
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--expect", metavar="REF", help="Only if NAME names this snapshot now.")
@click.option("--back", metavar="N", type=click.IntRange(min=1), help="Roll the ref REF back by N moves.")
@click.option("--history", is_flag=True, help="Print what the ref REF names, and named before. Changes nothing.")
@single_writer_option
@json_option
def tag(
    snapshot: tuple[str, str],
    name: str | None,
    expect: str | None,
    back: int | None,
    history: bool,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Make the ref NAME name the snapshot URL@REF.

    A ref remembers its last 100 states. Rolling back is a move too: --back 1 twice is
    where it began. A snapshot that was removed comes back with a tag until it is pruned.

    \b
    Exit status:
      0  done (or it named the snapshot already)
      1  it could not be done (no such snapshot, NAME doesn't name --expect, no access)
      2  wrong usage
      3  the snapshot is damaged, or parts of it are gone
    """
    url, ref = snapshot
    if sum((name is not None, back is not None, history)) != 1:
        raise click.UsageError("give one of NAME, --back N and --history")
    if expect is not None and name is None:
        raise click.UsageError("--expect goes with NAME")
    if history:
        rows = ref_history(url, ref)
        if as_json:
            print_json({"ref": ref, "history": [asdict(row) for row in rows]})
        else:
            print_table(
                ("SNAPSHOT", "SINCE", ""),
                ((row.snapshot[:12], row.updated, "" if row.is_there else "gone") for row in rows),
            )
        return
    if back is not None:
        report = roll_back(url, ref, steps=back, single_writer=single_writer)
    else:
        report = tag_snapshot(url, ref, name or "", expect=expect, single_writer=single_writer)
    if as_json:
        print_json(report)
    else:
        click.echo(f"{report.ref} {DIGEST_PREFIX}{report.snapshot}{'' if report.is_changed else ' (as before)'}")
