"""The command group, and how errors become exit statuses.

0  done, and what was looked at is good
1  could not run: no such thing, no access, a disk or an engine failed
2  wrong usage
3  ran and found problems: damage, or a mismatch of model or format
"""

from __future__ import annotations

import logging
import sys
from typing import Any

import click

import kvsnap
from kvsnap.errors import CorruptChunkError, IncompatibleError, KvsnapError
from kvsnap_jobs.clear_cmd import clear
from kvsnap_jobs.copy_cmd import copy
from kvsnap_jobs.diff_cmd import diff
from kvsnap_jobs.export_cmd import export
from kvsnap_jobs.flush_cmd import flush
from kvsnap_jobs.import_cmd import import_
from kvsnap_jobs.list_cmd import list_
from kvsnap_jobs.merge_cmd import merge
from kvsnap_jobs.options import EXIT_FAILED, EXIT_PROBLEMS
from kvsnap_jobs.prune_cmd import prune
from kvsnap_jobs.rm_cmd import rm
from kvsnap_jobs.show_cmd import show
from kvsnap_jobs.sign_cmd import sign
from kvsnap_jobs.status_cmd import status
from kvsnap_jobs.sync_cmd import sync
from kvsnap_jobs.tag_cmd import tag
from kvsnap_jobs.verify_cmd import verify
from kvsnap_jobs.warmup_cmd import warmup


class Group(click.Group):
    """A group whose commands fail with one line on stderr instead of a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvsnapError as error:
            click.echo(f"kvsnap: {error}", err=True)
            ctx.exit(EXIT_PROBLEMS if isinstance(error, CorruptChunkError | IncompatibleError) else EXIT_FAILED)
        except BrokenPipeError:
            raise  # click ends quietly
        except OSError as error:
            click.echo(f"kvsnap: {error}", err=True)
            ctx.exit(EXIT_FAILED)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvsnap.__version__, prog_name="kvsnap")
@click.option("-v", "--verbose", is_flag=True, help="Also log what is done, on stderr.")
def main(verbose: bool) -> None:
    """Persistent KV cache snapshots for vLLM.

    A cache directory (DIR) is where engines keep the disk tier. A repository (URL: a
    path, file:// or s3://bucket/prefix) is where snapshots are; URL@REF names one of
    them by a ref, an id or the first 8 or more digits of an id.

    \b
    Exit status of every command:
      0  done, and what was looked at is good
      1  could not run (no such thing, no access, a disk or an engine failed)
      2  wrong usage
      3  ran and found problems (damage, or a mismatch of model or format)
    """
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=level, format="%(message)s", force=True)


for _command in (
    clear, copy, diff, export, flush, import_, list_, merge, prune, rm, show, sign, status, sync, tag, verify,
    warmup,
):  # fmt: skip
    main.add_command(_command)
