"""kvsnap prune"""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from kvsnap.cache_prune import CachePruneReport, prune_cache
from kvsnap_jobs.options import (
    AGE,
    EXIT_FAILED,
    REPOSITORY_URL,
    cache_dir_option,
    dram_dir_option,
    json_option,
    single_writer_option,
)
from kvsnap_jobs.output import print_json, print_table, size_text, time_text
from kvsnap_jobs.prune_repository_text import prune_url

_OF_CACHES = ("unused_for_s", "dram_dir", "all_dram")
_OF_REPOSITORIES = ("grace_s", "untagged_s", "single_writer")


@click.command()
@click.argument("url", metavar="[URL]", type=REPOSITORY_URL, required=False)
@cache_dir_option(required=False)
@click.option(
    "--unused-for", "unused_for_s", type=AGE, default="30d", show_default=True, metavar="AGE",
    help="With --cache-dir: what nobody has used for so long goes, as 30d or 12h.",
)  # fmt: skip
@dram_dir_option
@click.option("--all-dram", is_flag=True, help="With --cache-dir: also DRAM files of your other cache directories.")
@click.option(
    "--grace", "grace_s", type=AGE, default="1d", show_default=True, metavar="AGE",
    help="With URL: how long what no snapshot needs stays after a prune first found it so.",
)  # fmt: skip
@click.option(
    "--untagged-for", "untagged_s", type=AGE, metavar="AGE",
    help="With URL: also remove snapshots older than this that no ref names or named before its last move. Those that "
    "a roll back took out of use stay as well. Without, all stay.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Show what would go; remove nothing.")
@single_writer_option
@json_option
@click.pass_context
def prune(
    ctx: click.Context,
    url: str | None,
    cache_dir: Path | None,
    unused_for_s: float,
    dram_dir: Path,
    all_dram: bool,
    grace_s: float,
    untagged_s: float | None,
    dry_run: bool,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Remove what nobody needs any more.

    With --cache-dir: namespaces (of models, dtypes or layouts that no engine serves any
    more) and DRAM files without an owner, both when unused for long enough; quarantined
    shards; what dead writers and engines left. Never anything that a live engine uses.
    Lists all of it with size and last use, also what stays, and why.

    With URL: shards, catalogs and manifests that no snapshot of the repository needs,
    after the grace period, and what interrupted writes left (files that nobody has touched
    for an hour, uploads begun a day ago). Never anything that a running export, copy or
    merge may rely on. Bytes go in two steps: the first prune
    marks them, and one that runs after the grace period deletes them.

    \b
    Exit status:
      0  done (or with --dry-run: shown)
      1  it could not be done (no such directory, no access, something did not go, another prune runs)
      2  wrong usage
      3  with URL: a manifest or a ref is damaged, missing or of a later version; nothing was deleted
    """
    if (url is None) == (cache_dir is None):
        raise click.UsageError("name either a repository (URL) or a cache directory (--cache-dir DIR)")
    for name in _OF_CACHES if cache_dir is None else _OF_REPOSITORIES:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = next(param.opts[0] for param in ctx.command.params if param.name == name)
            raise click.UsageError(f"{option} goes with {'--cache-dir' if cache_dir is None else 'a repository (URL)'}")
    if cache_dir is None:
        prune_url(
            url or "",
            grace_s=grace_s,
            untagged_s=untagged_s,
            dry_run=dry_run,
            single_writer=single_writer,
            as_json=as_json,
        )
        return
    report = prune_cache(
        cache_dir, unused_for_s=unused_for_s, dram_dir=dram_dir, all_dram=all_dram, dry_run=dry_run
    )  # fmt: skip
    if as_json:
        print_json(report)
    else:
        _print_cache(report)
    if report.failed:
        for path in report.failed:
            click.echo(f"kvsnap: {path} is still there: in use by now, or no permission", err=True)
        ctx.exit(EXIT_FAILED)


def _print_cache(report: CachePruneReport) -> None:
    if report.items:
        rows = [
            (
                ("would go" if report.dry_run else "removed") if item.goes else "stays",
                item.kind, size_text(item.nbytes), time_text(item.last_use), item.why, item.path,
            )
            for item in report.items
        ]  # fmt: skip
        print_table(("", "what", "size", "last use", "why", "path"), rows)
    count = sum(item.goes for item in report.items) - len(report.failed)
    click.echo(f"{'would remove' if report.dry_run else 'removed'} {count} things, {size_text(report.freed_bytes)}")
