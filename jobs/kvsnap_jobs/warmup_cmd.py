"""kvsnap warmup"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from kvsnap.errors import ConfigError, KvsnapError
from kvsnap.manifest import DIGEST_PREFIX
from kvsnap.signing import SigningKey
from kvsnap.snapshot_export import export_snapshot
from kvsnap.warmup.engine_tiers import namespace_in_use
from kvsnap.warmup.grouping import SHARD_TOKENS
from kvsnap.warmup.job import Options, Warmup
from kvsnap.warmup.offline import OfflineTransport, server_flags
from kvsnap.warmup.prompts import INPUT_FORMATS, TEXT_AS, InputFormat, TextAs, read_prompts
from kvsnap.warmup.report import Failure, WarmupPlan, WarmupReport, write_ready_file
from kvsnap.warmup.server import Server
from kvsnap.warmup.transport import HttpTransport
from kvsnap.warmup.volatile import Finding
from kvsnap_jobs.options import (
    DURATION,
    EXIT_FAILED,
    EXIT_PROBLEMS,
    REPOSITORY_URL,
    TAG,
    cache_dir_option,
    json_option,
    namespace_option,
    single_writer_option,
)
from kvsnap_jobs.output import print_facts, print_json, size_text
from kvsnap_jobs.signals import ended_by_sigterm
from kvsnap_jobs.trust_options import signing_key_option

START_SECONDS = 1800.0
BAR_AFTER_S = 1.0
SHOWN_FAILURES = 10
_FLAGS = "kvsnap.server_flags"


class ShardType(click.ParamType[tuple[int, int]]):
    """`i/n`, or `n` where $JOB_COMPLETION_INDEX is i."""

    name = "shard"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        index, slash, count = str(value).rpartition("/")
        if not slash or not index:
            index = os.environ.get("JOB_COMPLETION_INDEX", "")
            if not index:
                self.fail(f"{value!r} has no number of this worker, and JOB_COMPLETION_INDEX isn't set", param, ctx)
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            self.fail(f"{index}/{count} is no shard, expected i/n with i from 0 to n - 1", param, ctx)
        return int(index), int(count)


class WarmupCommand(click.Command):
    """What stands behind `--` are flags of vLLM, not prompt files."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_FLAGS] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)


class CountBar:
    """Prompts done, on stderr, if that is a terminal and the work takes longer than a second."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._start = time.monotonic()
        self._is_shown = False

    def __call__(self, label: str, done: int, total: int) -> None:
        """How far the step `label` is."""
        seconds = time.monotonic() - self._start
        if not self._is_terminal or seconds < BAR_AFTER_S:
            return
        self._is_shown = True
        bar = ("#" * int(30 * done / max(total, 1))).ljust(30)
        click.echo(f"\r\033[K{label} [{bar}] {done} of {total} prompts, {seconds:.0f} s", err=True, nl=False)

    def clear(self) -> None:
        """Remove it."""
        if self._is_shown:
            click.echo("\r\033[K", err=True, nl=False)


@click.command(cls=WarmupCommand)
@click.argument("files", nargs=-1, required=True, metavar="PROMPTS... [-- VLLM FLAGS]")
@click.option("--url", metavar="URL", help="Warm up this running server (OpenAI-compatible, of vLLM).")
@click.option("--model", metavar="MODEL", help="Warm up an engine of its own, with the server's flags behind --.")
@click.option(
    "--served-model-name", "model_name", metavar="NAME", help="Which of the server's models. Default: its first."
)
@click.option(
    "--api-key", metavar="KEY", envvar=["KVSNAP_API_KEY", "VLLM_API_KEY"], show_envvar=True, help="The server's key."
)
@click.option("--concurrency", type=click.IntRange(1, 1024), default=8, show_default=True, help="Requests at once.")
@click.option("--timeout", "timeout_s", type=DURATION, default="5m", show_default=True, help="For each request.")
@click.option("--wait", "wait_s", type=DURATION, default=0.0, help="Wait so long for a server that isn't up yet.")
@click.option("--budget", "budget_s", type=DURATION, help="Longest time until it is ready, as 120s.")
@click.option("--require-warm", is_flag=True, help="Not everything warm: write no ready file, exit with 3.")
@click.option(
    "--ready-file", type=click.Path(path_type=Path, dir_okay=False), metavar="PATH",
    help="Written when it is over, with the report as JSON; removed at the start.",
)  # fmt: skip
@click.option(
    "--input-format", type=click.Choice(INPUT_FORMATS), default="auto", show_default=True, help="Of the prompt files."
)
@click.option(
    "--text-as", type=click.Choice(TEXT_AS), default="prompt", show_default=True,
    help="What a plain text file is: a prompt as it stands, or the first message of a chat.",
)  # fmt: skip
@click.option("--shard", type=ShardType(), metavar="i/n", help="Only every n-th group of prompts with a common start.")
@click.option(
    "--shard-tokens", type=click.IntRange(1), default=SHARD_TOKENS, show_default=True,
    help="Prompts that start with the same so many tokens are a group.",
)  # fmt: skip
@click.option("--block-tokens", type=click.IntRange(1), help="The server's KV block, where its /metrics is off.")
@click.option(
    "--prove-tiers", is_flag=True,
    help="Empty vLLM's own prefix cache before the proofs, so that they prove kvsnap's tiers "
    "(needs VLLM_SERVER_DEV_MODE=1 there; always done with --model).",
)  # fmt: skip
@cache_dir_option(required=False)
@click.option(
    "--export",
    "export_url",
    metavar="URL",
    type=REPOSITORY_URL,
    help="Then export the cache directory to this repository.",
)
@click.option("--tag", metavar="NAME", type=TAG, help="With --export: make this ref name the snapshot.")
@namespace_option
@click.option("--engine-log", type=click.Path(path_type=Path, dir_okay=False), help="With --model: where vLLM logs.")
@click.option("--dry-run", is_flag=True, help="Only tokenise; say what would be computed and stored.")
@signing_key_option("--sign-key")
@single_writer_option
@json_option
@click.pass_context
@ended_by_sigterm()
def warmup(
    ctx: click.Context,
    files: tuple[str, ...],
    url: str | None,
    model: str | None,
    model_name: str | None,
    api_key: str | None,
    concurrency: int,
    timeout_s: float,
    wait_s: float,
    budget_s: float | None,
    require_warm: bool,
    ready_file: Path | None,
    input_format: InputFormat,
    text_as: TextAs,
    shard: tuple[int, int] | None,
    shard_tokens: int,
    block_tokens: int | None,
    prove_tiers: bool,
    cache_dir: Path | None,
    export_url: str | None,
    tag: str | None,
    namespace: str | None,
    engine_log: Path | None,
    dry_run: bool,
    key_file: Path | None,
    single_writer: bool,
    as_json: bool,
) -> None:
    """Have an engine compute known PROMPTS, and prove that they are cached afterwards.

    PROMPTS are files (- is standard input) of JSON lines: {"prompt"}, {"messages", "tools"},
    {"token_ids"} or OpenAI batch lines; any other file is one prompt as it stands. Each
    prompt is sent once with one token to generate; what is resident already costs
    nothing. Then a second request must be a hit of all its whole blocks, as vLLM itself
    reports it (start the server with --enable-prompt-tokens-details; else its /metrics
    is read, one request at a time).

    With --budget it ends in time and fails open: the ready file is written and says
    "cold". With --require-warm it fails closed. A server that isn't up when --wait is over
    ends it before. With --model the engine is flushed with what is left of the budget, at
    least 5 seconds, and then shut down (at most a minute; killed if it isn't up yet).

    --export publishes, if all is warm: what makes ready doesn't wait for it, so it is no
    part of the budget, and with --url comes after the ready file. May be killed and
    repeated.

    \b
    Exit status:
      0  all warm; or the budget ran out and --require-warm was not given
      1  it could not run (bad input, no server, no access, the export failed)
      2  wrong usage
      3  not warm: prompts failed or were no hits, or --require-warm and the budget ran out
    """
    flags = ctx.meta.get(_FLAGS, [])
    _check_usage(url, model, flags, export_url, tag, cache_dir, namespace, engine_log, key_file, single_writer)
    signer = None if key_file is None else SigningKey.read(key_file)
    if ready_file is not None:
        if not ready_file.absolute().parent.is_dir():
            raise click.UsageError(f"the folder of --ready-file {ready_file} doesn't exist")
        if not dry_run:
            ready_file.unlink(missing_ok=True)  # an earlier run's word about another server
    prompts, num_duplicates = read_prompts(files, input_format=input_format, text_as=text_as)

    offline = None
    if model is not None:
        offline = OfflineTransport(server_flags(model, flags, cache_dir), log_path=engine_log)
    transport = offline or HttpTransport(url or "", api_key=api_key)
    bar = CountBar()

    def start(left_s: float | None) -> None:
        assert offline is not None
        offline.start(timeout_s=START_SECONDS if left_s is None else left_s)
        if cache_dir is not None and offline.cache_dir.resolve() != cache_dir.resolve():
            raise ConfigError(f"--kv-transfer-config has cache_dir {offline.cache_dir}, --cache-dir is {cache_dir}")

    try:
        job = Warmup(
            Server(transport, timeout_s=timeout_s),
            prompts,
            Options(
                model=model_name,
                wait_s=wait_s,
                concurrency=concurrency,
                budget_s=budget_s,
                shard=shard,
                shard_tokens=shard_tokens,
                block_tokens=block_tokens,
                prove_tiers=prove_tiers or offline is not None,
                cache_dir=cache_dir,
                start=start if offline else None,
                set_clock=offline.set_clock if offline else None,
                flush=offline.flush if offline else None,
            ),
            now=datetime.now().astimezone(),
            num_duplicates=num_duplicates,
            progress=bar,
        )
        if dry_run:
            plan = job.plan()
            bar.clear()
            _show_plan(plan, as_json)
            if plan.failures:
                ctx.exit(EXIT_PROBLEMS)
            return
        report = job.run()
        bar.clear()
        if export_url is not None:
            assert cache_dir is not None
            if offline is None:
                _make_ready(report, ready_file, require_warm=require_warm)
            report = _export(report, cache_dir, export_url, tag, namespace, signer, single_writer=single_writer)
    finally:
        bar.clear()
        transport.close()
    _finish(ctx, report, ready_file, require_warm=require_warm, has_export=export_url is not None, as_json=as_json)


def _check_usage(
    url: str | None,
    model: str | None,
    flags: list[str],
    export_url: str | None,
    tag: str | None,
    cache_dir: Path | None,
    namespace: str | None,
    engine_log: Path | None,
    key_file: Path | None,
    single_writer: bool,
) -> None:
    if (url is None) == (model is None):
        raise click.UsageError("give either --url (a running server) or --model (an engine of its own)")
    if url is not None and flags:
        raise click.UsageError("flags of vLLM behind -- go with --model; a running server has its own")
    if url is not None and engine_log is not None:
        raise click.UsageError("--engine-log goes with --model")
    if export_url is not None and cache_dir is None:
        raise click.UsageError("--export needs --cache-dir, the cache directory of the engine")
    if export_url is None and (single_writer or any(value is not None for value in (tag, namespace, key_file))):
        raise click.UsageError("--tag, --namespace, --sign-key and --single-writer go with --export")


def _export(
    report: WarmupReport,
    cache_dir: Path,
    url: str,
    tag: str | None,
    namespace: str | None,
    signer: SigningKey | None,
    *,
    single_writer: bool,
) -> WarmupReport:
    """Publish what is there now, if that is everything."""
    if report.state != "warm":
        return dataclasses.replace(report, export_error="not everything is warm, so nothing was exported")
    if not report.num_warmed and not report.num_resident:
        return dataclasses.replace(report, warnings=(*report.warnings, _nothing_exported(tag)))
    if namespace is None and (found := namespace_in_use(cache_dir)) is not None:
        namespace = found[1].id()
    try:
        exported = export_snapshot(
            cache_dir, url, namespace=namespace, tag=tag, single_writer=single_writer, signer=signer
        )
    except (KvsnapError, OSError) as error:
        return dataclasses.replace(report, export_error=str(error))
    lost = [f"engine {e} could not write {n} chunks" for e, a in exported.flushed.items() if (n := a["unsaved_chunks"])]
    problems = [*lost, *exported.damaged]
    return dataclasses.replace(report, snapshot=exported.snapshot, export_error="; ".join(problems) or None)


def _nothing_exported(tag: str | None) -> str:
    text = "NOTHING EXPORTED: there was no prompt to warm up for this worker"
    if tag is None:
        return text
    return f"{text}; ref {tag} stays: if an earlier deploy made it, `kvsnap merge` would take that older part"


def _make_ready(report: WarmupReport, ready_file: Path | None, *, require_warm: bool) -> None:
    """Write the ready file, unless what isn't warm isn't to be ready."""
    if ready_file is not None and (report.state == "warm" or not require_warm):
        write_ready_file(ready_file, report)


def _finish(
    ctx: click.Context,
    report: WarmupReport,
    ready_file: Path | None,
    *,
    require_warm: bool,
    has_export: bool,
    as_json: bool,
) -> None:
    """Print, write the ready file, choose the exit status."""
    is_warm = report.state == "warm"
    _make_ready(report, ready_file, require_warm=require_warm)
    _warn(report.warnings, report.volatile, report.failures)
    if as_json:
        print_json(report)
    else:
        _print_report(report)
    if report.export_error is not None:
        click.echo(f"kvsnap: export: {report.export_error}", err=True)
    if not is_warm:
        why = "the budget ran out" if report.is_budget_spent else "prompts failed or were no hits"
        then = (
            "fails closed (--require-warm)" if require_warm else "ready cold (fails open; --require-warm fails closed)"
        )
        done = report.num_warmed + report.num_resident
        click.echo(f"kvsnap: NOT WARM: {why}; {done} of {report.num_prompts} prompts are warm; {then}", err=True)
        if require_warm or has_export or not report.is_budget_spent or report.num_failed or report.num_unproved:
            ctx.exit(EXIT_PROBLEMS)
    elif report.export_error is not None:
        ctx.exit(EXIT_FAILED if report.snapshot is None else EXIT_PROBLEMS)


def _warn(warnings: Iterable[str], volatile: Iterable[Finding], failures: tuple[Failure, ...]) -> None:
    for warning in warnings:
        click.echo(f"kvsnap: warning: {warning}", err=True)
    for finding in volatile:
        click.echo(f"kvsnap: warning: {finding}", err=True)
    for failure in failures[:SHOWN_FAILURES]:
        click.echo(f"kvsnap: {failure.source}: {failure.reason}", err=True)
    if len(failures) > SHOWN_FAILURES:
        click.echo(f"kvsnap: and {len(failures) - SHOWN_FAILURES} more; --json lists them all", err=True)


def _print_report(report: WarmupReport) -> None:
    click.echo(f"{report.state}: {report.target}, model {report.model or 'unknown'}")
    skipped = report.num_resident + report.num_short + report.num_duplicates
    details = f"{report.num_resident} resident, {report.num_short} too short, {report.num_duplicates} equal"
    sources = ", ".join(f"{tokens} from {source}" for source, tokens in (report.cached_by_source or {}).items())
    print_facts(
        (
            ("prompts", f"{report.num_prompts}" + (f", shard {report.shard}" if report.shard else "")),
            ("warmed", report.num_warmed),
            ("failed", report.num_failed or None),
            ("no hit", report.num_unproved or None),
            ("not reached", report.num_left or None),
            ("skipped", f"{skipped} ({details})"),
            ("tokens", f"{report.prompt_tokens}, {report.computed_tokens} computed, {report.proved_tokens} proved"),
            ("proofs", sources or None),
            ("stored", _stored(report)),
            ("TTFT before", _ms(report.ttft_before_s)),
            ("TTFT after", _ms(report.ttft_after_s)),
            ("snapshot", None if report.snapshot is None else DIGEST_PREFIX + report.snapshot),
            ("took", f"{report.seconds:.1f} s"),
        ),
        indent="  ",
    )


def _stored(report: WarmupReport) -> str | None:
    if report.dram_bytes is None or report.disk_bytes is None:
        return None
    return f"{size_text(report.dram_bytes)} more in DRAM, {size_text(report.disk_bytes)} more on disk"


def _ms(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1000:.1f} ms (median)"


def _show_plan(plan: WarmupPlan, as_json: bool) -> None:
    _warn(plan.warnings, plan.volatile, plan.failures)
    if as_json:
        print_json(plan)
        return
    click.echo(f"dry run: {plan.target}, model {plan.model}")
    print_facts(
        (
            ("prompts", f"{plan.num_prompts}, {plan.num_duplicates} equal ones left out"),
            ("shard", None if plan.shard is None else f"{plan.shard}, {plan.num_groups} groups"),
            ("too short", plan.num_short or None),
            ("failed", plan.num_failed or None),
            ("tokens", f"{plan.prompt_tokens} in all prompts"),
            ("to compute", f"{plan.compute_tokens} tokens in whole blocks, shared ones once"),
            ("on disk", None if plan.resident_tokens is None else f"{plan.resident_tokens} tokens"),
            ("to store", None if plan.store_bytes is None else size_text(plan.store_bytes)),
        ),
        indent="  ",
    )
