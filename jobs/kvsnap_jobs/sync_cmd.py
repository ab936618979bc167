"""kvsnap sync"""

from __future__ import annotations

from pathlib import Path

import click

from kvsnap.rounds import Pace
from kvsnap.snapshot_sync import SnapshotSync, SyncRound
from kvsnap_jobs.import_cmd import tell_left_out
from kvsnap_jobs.options import (
    EXIT_FAILED,
    EXIT_PROBLEMS,
    PACE,
    SIZE,
    SNAPSHOT_URL,
    cache_dir_option,
    json_option,
    other_engines_option,
)
from kvsnap_jobs.output import ProgressBar, print_json, print_json_line, size_text
from kvsnap_jobs.signals import stopped_by_signals
from kvsnap_jobs.trust_options import keys_to_trust, trust_options


@click.command()
@click.argument("snapshot", metavar="URL@REF", type=SNAPSHOT_URL)
@cache_dir_option()
@click.option("--follow", is_flag=True, help="Go on until SIGTERM, and import whatever REF names then.")
@click.option(
    "--interval", "interval_s", type=PACE, default="60s", show_default=True,
    help="With --follow: how often to ask what REF names, give or take a fifth; longer after failures.",
)  # fmt: skip
@click.option("--max-bytes", metavar="SIZE", type=SIZE, help="Most bytes of shards of a snapshot, the hottest first.")
@other_engines_option
@trust_options
@json_option
@click.pass_context
def sync(
    ctx: click.Context,
    snapshot: tuple[str, str],
    cache_dir: Path,
    follow: bool,
    interval_s: float,
    max_bytes: int | None,
    other_engines: bool,
    require_signature: bool | None,
    trusted_keys: Path | None,
    as_json: bool,
) -> None:
    """Keep a cache directory at a moving ref.

    Imports the snapshot that REF names, as `kvsnap import` does: only what the directory
    lacks is fetched, and a live engine has it within 2 seconds. What REF names no more
    stays until it is evicted, and what was evicted or cleared is not fetched again before
    REF moves. One process at a time downloads into a directory; engines
    that import their configured snapshot count too, and whoever waited finds the work done.

    With --follow, failures are said and tried again, at growing intervals; one line is
    printed for each change and each failure (with --json one for each round). SIGTERM
    ends it; what is there is a valid part then.

    \b
    Exit status:
      0  the directory is at REF; with --follow: it was ended by a signal, and the last round did well
      1  it could not be done (no such snapshot, no access, the disk failed)
      2  wrong usage
      3  the snapshot is damaged, made for another engine, or not signed as required; or nothing fits under
         --max-bytes or the cap of DIR
    """
    url, ref = snapshot
    trusted = keys_to_trust(require_signature, trusted_keys)
    last: SyncRound | None = None

    def told(found: SyncRound) -> None:
        nonlocal last
        last = found
        _tell(found, cache_dir, is_json_lines=as_json and follow)

    with stopped_by_signals() as stop, ProgressBar("sync") as bar:
        syncing = SnapshotSync(
            url,
            ref,
            cache_dir,
            max_bytes=max_bytes,
            other_engines=other_engines,
            trusted=trusted,
            stop=stop,
            progress=None if follow else bar,
        )
        try:
            if follow:
                syncing.follow(Pace(interval_s), told)
            else:
                told(syncing.round())
        finally:
            syncing.close()
    if as_json and not follow and last is not None:
        print_json(last)
    if (status := _status(last)) != 0:
        ctx.exit(status)


def _tell(found: SyncRound, cache_dir: Path, *, is_json_lines: bool) -> None:
    if found.outcome == "failed":
        times = f" ({found.failures} times in a row)" if found.failures > 1 else ""
        click.echo(f"kvsnap: sync of {found.ref}: {found.error}{times}", err=True)
    if is_json_lines:
        print_json_line(found)
        return
    report = found.report
    if report is None or click.get_current_context().params.get("as_json"):
        return
    tell_left_out(report, cache_dir)
    fetched = f"{report.imported_shards} shards, {size_text(report.imported_bytes)} fetched"
    click.echo(f"{found.ref} {report.snapshot[:12]}: {report.num_chunks} of {report.total_chunks} chunks, {fetched}")


def _status(last: SyncRound | None) -> int:
    """Of the last round. None: stopped before the first one ended."""
    if last is None:
        return 0
    if last.outcome == "failed":
        return EXIT_PROBLEMS if last.is_refused else EXIT_FAILED
    report = last.report
    return EXIT_PROBLEMS if report is not None and not report.num_chunks else 0
