"""An engine of its own, in a child process: vLLM's own API server without a port, spoken to over pipes.

Rendering, identity and caching are those of `vllm serve` with the same flags, since it is the same code. One JSON
object a line: `{"id", "method", "path", "body"}` goes in, `{"id", "status"}`, `{"id", "data"}`... and
`{"id", "end": true}` come back. The child ends when its input does, so it never outlives a killed job for long.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from kvsnap.config import Config
from kvsnap.engines import engines_of, flush_engine
from kvsnap.errors import ConfigError, KvsnapError, StorageError
from kvsnap.warmup.transport import RequestError

CHILD = "kvsnap_connector.offline"
CONNECTOR = "KVSnapConnector"
LOG_LINES = 30
STOP_SECONDS = 60.0


def server_flags(model: str, flags: Sequence[str], cache_dir: Path | None) -> list[str]:
    """vLLM's flags for the child: those given, with kvsnap added where they don't bring it.

    Raises:
        ConfigError: neither the flags nor `cache_dir` say where to store.
    """
    full = ["--model", model, *flags]
    if any(flag.replace("_", "-").startswith("--kv-transfer-config") for flag in flags):
        return full
    if cache_dir is None:
        raise ConfigError(
            "nothing says where the offline engine shall store: give --cache-dir, or the server's --kv-transfer-config "
            "behind --"
        )
    config = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "kvsnap_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cache_dir": str(cache_dir)},
    }
    return [*full, "--kv-transfer-config", json.dumps(config)]


class OfflineTransport:
    """The engine; its start is waited for in `start`.

    Args:
        flags: Of `vllm serve`, see `server_flags`.
        log_path: Where its log goes; None: a temporary file, shown only if it fails.
    """

    def __init__(self, flags: Sequence[str], *, log_path: Path | None = None) -> None:
        self.name = "the offline engine"
        self.facts: dict[str, Any] = {}
        """What it is: `model`, `cache_dir`, `version`; known after `start`."""
        self._flags = list(flags)
        self._log: BinaryIO = tempfile.TemporaryFile() if log_path is None else log_path.open("a+b")  # noqa: SIM115
        self._lock = threading.Lock()
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._next_id = 0
        self._has_ended = False
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, timeout_s: float) -> None:
        """Start it and wait until it takes requests.

        Raises:
            RequestError: not within `timeout_s`.
            StorageError: it ended; the end of its log is in the message.
        """
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD, *self._flags],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},  # /reset_prefix_cache; nobody else can reach it
                start_new_session=True,
            )
        except OSError as error:
            raise StorageError(f"the offline engine can't be started: {error}") from error
        hello = self._register()
        threading.Thread(target=self._read, name="kvsnap-offline", daemon=True).start()
        try:
            found = hello[1].get(timeout=timeout_s)
        except queue.Empty:
            raise RequestError(f"the offline engine wasn't ready within {timeout_s:.3g} s", is_timeout=True) from None
        if found is None:
            raise StorageError(f"the offline engine ended before it was ready:\n{self.log_tail()}")
        if "refused" in found:
            raise ConfigError(str(found["refused"]))
        self.facts = found["ready"]
        self.name = f"the offline engine of {self.facts.get('model')}"

    def log_tail(self) -> str:
        """The end of its log."""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(size - 16_384, 0))
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-LOG_LINES:])

    @contextlib.contextmanager
    def lines(
        self, method: str, path: str, body: Mapping[str, Any] | None, *, timeout_s: float
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        deadline = time.monotonic() + timeout_s
        number, answers = self._register()
        try:
            self._write({"id": number, "method": method, "path": path, "body": body})
            status = int(self._take(answers, path, deadline)["status"])
            yield status, self._read_lines(answers, path, deadline)
        finally:
            with self._lock:
                del self._answers[number]

    @property
    def cache_dir(self) -> Path:
        """Where it stores, as its flags say."""
        return Path(str(self.facts.get("cache_dir") or Config().cache_dir)).expanduser()

    def flush(self, timeout_s: float) -> list[str]:
        """Have it write to disk what only its DRAM holds, within `timeout_s`; what it could not, for people."""
        problems: list[str] = []
        if not self.facts:
            return problems
        for record in engines_of(self.cache_dir):
            if self._process is None or not _is_in_group(record.pid, self._process.pid):
                continue
            try:
                unsaved = flush_engine(record, timeout_s=timeout_s).get("unsaved_chunks")
            except KvsnapError as error:
                problems.append(f"the offline engine did not flush: {error}")
                continue
            if unsaved:
                problems.append(f"the offline engine could not write {unsaved} chunks to disk; see its log")
        return problems

    def set_clock(self, offset_s: float) -> None:
        """Have chat templates see another time."""
        with self.lines("POST", f"/kvsnap/clock?offset_s={offset_s:g}", None, timeout_s=10.0) as (_, lines):
            list(lines)

    def hang_up(self) -> None:
        self._end()  # the engine goes on to `close`, so that what it has is kept

    def kill(self) -> None:
        """End the engine's processes, in no good order."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End of input: the child shuts its engine down and ends. Killed if it doesn't, or isn't up yet."""
        process = self._process
        if process is None or process.stdin is None:
            return
        if not self.facts:
            self.kill()  # it reads its input only once the engine is up, and has nothing to lose before
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()  # also what it may have left behind
            process.wait()
            self._log.close()

    def _register(self) -> tuple[int, queue.SimpleQueue[dict[str, Any] | None]]:
        answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        with self._lock:
            number = self._next_id
            self._next_id += 1
            self._answers[number] = answers
            if self._has_ended:
                answers.put(None)
        return number, answers

    def _write(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._process.stdin.write(data)
                self._process.stdin.flush()
        except (OSError, ValueError):
            raise RequestError(f"{self.name} has ended", is_final=True) from None

    def _take(self, answers: queue.SimpleQueue[dict[str, Any] | None], path: str, deadline: float) -> dict[str, Any]:
        try:
            found = answers.get(timeout=max(deadline - time.monotonic(), 0.001))
        except queue.Empty:
            raise RequestError(f"{self.name} gave no answer to {path} in time", is_timeout=True) from None
        if found is None:
            raise RequestError(f"{self.name} has ended", is_final=True)
        return found

    def _read_lines(
        self, answers: queue.SimpleQueue[dict[str, Any] | None], path: str, deadline: float
    ) -> Iterator[bytes]:
        rest = b""
        while True:
            found = self._take(answers, path, deadline)
            if "end" in found:
                if rest:
                    yield rest
                return
            *whole, rest = (rest + str(found["data"]).encode()).split(b"\n")
            yield from (line + b"\n" for line in whole)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                try:
                    message = json.loads(line)
                    number = message["id"]
                except (ValueError, KeyError, TypeError):
                    continue
                with self._lock:
                    answers = self._answers.get(number)
                if answers is not None:
                    answers.put(message)
        self._end()

    def _end(self) -> None:
        with self._lock:
            self._has_ended = True
            for answers in self._answers.values():
                answers.put(None)


def _is_in_group(pid: int, leader: int) -> bool:
    try:
        return os.getpgid(pid) == leader
    except ProcessLookupError:
        return False
