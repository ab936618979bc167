"""`kvsnap prune URL`: the half of `kvsnap prune` that concerns a repository."""

from __future__ import annotations

import click

from kvsnap.repository_prune import PruneReport, prune_repository
from kvsnap_jobs.output import ProgressBar, print_facts, print_json, size_text


def prune_url(
    url: str, *, grace_s: float, untagged_s: float | None, dry_run: bool, single_writer: bool, as_json: bool
) -> None:
    """Prune a repository and print what was done."""
    with ProgressBar("prune") as bar:
        report = prune_repository(
            url, grace_s=grace_s, untagged_s=untagged_s, dry_run=dry_run, single_writer=single_writer, progress=bar
        )
    for owner in report.writers:
        click.echo(f"kvsnap: running: {owner}; what it may use stays", err=True)
    for owner in report.broken_leases:
        click.echo(f"kvsnap: ended without saying so: {owner}", err=True)
    if as_json:
        print_json(report)
    else:
        _print_text(report)


def _print_text(report: PruneReport) -> None:
    would = "would be " if report.dry_run else ""
    print_facts(
        (
            (
                "kept",
                f"{report.num_snapshots} snapshots, {report.kept_objects} objects, {size_text(report.kept_bytes)}",
            ),
            ("retired", f"{len(report.retired)} snapshots without a ref" if report.retired else None),
            (f"{would}deleted", f"{report.deleted_objects} objects, {size_text(report.deleted_bytes)}"),
            (f"{would}marked", f"{report.marked_objects} objects, {size_text(report.marked_bytes)}"),
            ("waiting", f"{report.waiting_objects} objects, {size_text(report.waiting_bytes)}, for a later prune"),
            ("leftovers", f"{report.leftovers} interrupted writes {would}removed" if report.leftovers else None),
            ("foreign", f"{report.foreign} objects are none of kvsnap's, left alone" if report.foreign else None),
        )
    )
