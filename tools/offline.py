"""An offline vLLM engine in a process of its own, driven line by line.

`OfflineEngine` starts this module as a child (an engine can't be killed cleanly from inside its own process) and
talks JSON lines with it. Beyond generating it can do what the tests need and no server offers: keep the KV pages
of a request as they lie in the engine's blocks, and compare them with those of another.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.serving import best_dtype, connector_config, engine_environment, group_members


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What one prompt gave."""

    tokens: tuple[tuple[int, ...], ...]
    """Token ids, one sequence for each of `n`."""
    logprobs: dict[str, float]
    """Of the first sampled token: candidates (as token ids) and their log probabilities."""
    cached: int
    """Prompt tokens that were not computed: vLLM's own hit and the connector's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageDifference:
    """How the KV pages of two requests differ, over all layers and ranks."""

    equal: bool
    """Every byte is the same."""
    largest: float
    """Largest absolute difference between two values."""
    scale: float
    """Largest absolute value."""


class OfflineEngine:
    """One engine; leaving the context kills it.

    Args:
        model: The model's folder.
        folder: Where the log and the runtime directory go.
        connector: kvsnap's options, or None for an engine without it.
        engine: More arguments of vLLM's `LLM`.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        role: str = "kv_both",
        engine: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        arguments: dict[str, Any] = {
            "model": str(model),
            "dtype": best_dtype(),
            "enforce_eager": True,
            "disable_log_stats": False,
        }
        if connector is not None:
            arguments["kv_transfer_config"] = connector_config(connector, role=role)
        arguments.update(engine or {})
        self.runtime_dir = folder / "offline-run"
        self.log_path = folder / "offline.log"
        environment = engine_environment(self.runtime_dir, {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", **(env or {})})
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.offline", json.dumps(arguments)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._reply()
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> OfflineEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        keep: Sequence[str] = (),
        salts: Sequence[str | None] = (),
        store: bool = True,
        **params: Any,
    ) -> list[Output]:
        """Run the prompts together: greedy, 8 tokens, 5 log probabilities, unless `params` say otherwise.

        Args:
            keep: Names under which the requests' KV pages are kept in the workers afterwards.
            salts: A `cache_salt` for each prompt.
            store: False asks kvsnap not to store these prompts.
        """
        found = self._call(
            "generate",
            prompts=[list(prompt) for prompt in prompts],
            keep=list(keep),
            salts=list(salts) or [None] * len(prompts),
            params={"temperature": 0.0, "max_tokens": 8, "logprobs": 5, "ignore_eos": True, **params},
            transfer=None if store else {"kvsnap": {"store": False}},
        )
        return [
            Output(tokens=tuple(tuple(t) for t in o["tokens"]), logprobs=o["logprobs"], cached=o["cached"])
            for o in found
        ]

    def compare_pages(self, first: str, second: str, *, blocks: int) -> PageDifference:
        """Compare the first `blocks` blocks of two kept requests."""
        return PageDifference(**self._call("compare", first=first, second=second, blocks=blocks))

    def reset_prefix_cache(self, *, connector: bool = False) -> bool:
        """Empty vLLM's own prefix cache, and the connector's if asked to."""
        return bool(self._call("reset", connector=connector))

    def metric(self, name: str, **labels: str) -> float:
        """The sum of one of vLLM's metrics over the samples with these labels."""
        found: list[tuple[str, dict[str, str], float]] = self._call("metrics")
        return sum(v for n, have, v in found if n == name and all(have.get(k) == want for k, want in labels.items()))

    def pids(self) -> list[int]:
        """The live processes of the engine."""
        return group_members(self._process.pid)

    def log(self) -> str:
        """All that the engine has written so far."""
        return self.log_path.read_text(errors="replace")

    def kill(self) -> None:
        """`kill -9` of all its processes."""
        while group_members(self._process.pid):
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                break
            self._process.poll()
            time.sleep(0.01)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def _call(self, op: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
        self._process.stdin.flush()
        return self._reply()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        tail = "\n".join(self.log().splitlines()[-60:])
        if not line:
            raise RuntimeError(f"the engine died:\n{tail}")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(f"{reply['error']}\n{tail}")
        return reply["ok"]


# What follows runs in the child.


def main() -> None:
    """Read one JSON object per line on stdin, answer with one line each on what was stdout."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its children print to stdout
    engine = _Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ok": None}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = {"ok": getattr(engine, request.pop("op"))(**request)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


class _Engine:
    """The operations, by name."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._llm.collective_rpc(_record_block_tables)

    def generate(
        self,
        prompts: list[list[int]],
        keep: list[str],
        salts: list[str | None],
        params: dict[str, Any],
        transfer: dict[str, Any] | None,
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        inputs: list[dict[str, Any]] = []
        for prompt, salt in zip(prompts, salts, strict=True):
            inputs.append({"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt}))
        extra = None if transfer is None else {"kv_transfer_params": transfer}
        outputs = self._llm.generate(inputs, SamplingParams(extra_args=extra, **params), use_tqdm=False)
        for output, name in zip(outputs, keep, strict=False):
            self._llm.collective_rpc(_keep_pages, args=(output.request_id, name))
        return [
            {
                "tokens": [list(choice.token_ids) for choice in output.outputs],
                "logprobs": {str(t): lp.logprob for t, lp in (output.outputs[0].logprobs or [{}])[0].items()},
                "cached": output.num_cached_tokens or 0,
            }
            for output in outputs
        ]

    def compare(self, first: str, second: str, blocks: int) -> dict[str, Any]:
        found = self._llm.collective_rpc(_compare_pages, args=(first, second, blocks))
        return {
            "equal": all(equal for equal, _, _ in found),
            "largest": max(largest for _, largest, _ in found),
            "scale": max(scale for _, _, scale in found),
        }

    def reset(self, connector: bool) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_connector=connector))

    def metrics(self) -> list[tuple[str, dict[str, str], float]]:
        return [(m.name, m.labels, m.value) for m in self._llm.get_metrics() if hasattr(m, "value")]


# What follows runs in the workers; sent there by value, so each function stands for itself.


def _record_block_tables(worker: Any) -> None:
    """Remember which blocks each request was given, in order."""
    runner = worker.model_runner
    execute = runner.execute_model
    tables: dict[str, list[int]] = {}

    def recording(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            tables[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if req_id in cached.resumed_req_ids:
                tables[req_id] = list(blocks[0])
            elif blocks:
                tables[req_id].extend(blocks[0])
        return execute(scheduler_output, *args, **kwargs)

    runner.execute_model = recording
    runner.kvsnap_test_tables = tables
    runner.kvsnap_test_pages = {}


def _keep_pages(worker: Any, request_id: str, name: str) -> None:
    """Copy a request's pages of all layers: one tensor `[layers, blocks, *page]`."""
    import torch

    runner = worker.model_runner
    tables = runner.kvsnap_test_tables
    (table,) = [blocks for req, blocks in tables.items() if req == request_id or req.startswith(f"{request_id}-")]
    runner.kvsnap_test_pages[name] = torch.stack([layer[table].clone() for layer in runner.kv_caches])
    tables.clear()


def _compare_pages(worker: Any, first: str, second: str, blocks: int) -> tuple[bool, float, float]:
    """Equal to the bit? Largest difference? Largest value?"""
    import torch

    a, b = (worker.model_runner.kvsnap_test_pages[name][:, :blocks] for name in (first, second))
    equal = a.shape == b.shape and a.shape[1] == blocks
    equal = equal and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    return bool(equal), float((a.float() - b.float()).abs().max()), float(a.float().abs().max())


if __name__ == "__main__":
    main()
