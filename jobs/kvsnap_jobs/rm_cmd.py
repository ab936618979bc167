"""kvsnap rm"""

from __future__ import annotations

import click

from kvsnap.refs import remove
from kvsnap_jobs.options import SNAPSHOT_URL, dry_run_option, json_option, single_writer_option
from kvsnap_jobs.output import print_json, size_text


@click.command()
@click.argument("snapshot", metavar="URL@REF", type=SNAPSHOT_URL)
@click.option("--with-snapshot", is_flag=True, help="Also the snapshot that the ref names, if no other ref does.")
@dry_run_option
@single_writer_option
@json_option
def rm(snapshot: tuple[str, str], with_snapshot: bool, dry_run: bool, single_writer: bool, as_json: bool) -> None:
    """Remove a ref, or a snapshot by its id.

    A removed snapshot is listed no more. Its bytes go with a `kvsnap prune` after the
    grace period; until then `kvsnap tag URL@ID NAME` brings it back. A snapshot that refs
    name is not removed: remove the refs first.

    \b
    Exit status:
      0  removed
      1  it could not be removed (nothing of this name, refs name it, no access)
      2  wrong usage
      3  what is to be deleted can't be read, as it is damaged; nothing was removed
    """
    url, ref = snapshot
    report = remove(url, ref, with_snapshot=with_snapshot, dry_run=dry_run, single_writer=single_writer)
    if as_json:
        print_json(report)
        return
    verb = "would remove" if dry_run else "removed"
    for name in report.refs:
        click.echo(f"{verb} ref {name}")
    if report.named_by:
        click.echo(f"the snapshot stays, since it is named by {', '.join(report.named_by)}")
    for digest in report.snapshots:
        click.echo(f"{verb} snapshot {digest[:12]}, {size_text(report.nbytes)}; prune frees what no other needs")
