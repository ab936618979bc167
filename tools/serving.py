"""Start, watch, kill and stop a vLLM server with kvsnap in it, for tests, demo and benchmarks.

A `Server` is one process group: the API server, its engine core and its workers. It can be killed as a whole or
process by process, which is what most tests here are about.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.client import MODEL_NAME, Client, ServerError

REPOSITORY = Path(__file__).resolve().parent.parent
SHM = Path("/dev/shm")
START_SECONDS = 300.0


def connector_config(extra: Mapping[str, Any], *, role: str = "kv_both", module_path: bool = True) -> dict[str, Any]:
    """What --kv-transfer-config takes."""
    config: dict[str, Any] = {
        "kv_connector": "KVSnapConnector",
        "kv_role": role,
        "kv_connector_extra_config": dict(extra),
    }
    if module_path:
        config["kv_connector_module_path"] = "kvsnap_connector"
    return config


def tree_environment(runtime_dir: Path | None = None) -> dict[str, str]:
    """This process's environment, with kvsnap from this tree and, if given, a runtime directory."""
    paths = [str(REPOSITORY / part) for part in ("", "connector", "jobs")]
    inherited = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths + ([inherited] if inherited else []))}
    if runtime_dir is not None:
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        environment["KVSNAP_RUNTIME_DIR"] = str(runtime_dir)
    return environment


def engine_environment(runtime_dir: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an engine's processes: offline, quiet, kvsnap from this tree, its own runtime directory."""
    return {
        **tree_environment(runtime_dir),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **(extra or {}),
    }


class Server:
    """One vLLM API server with its engine. Use it as a context manager: leaving kills whatever is left.

    Args:
        model: The model's folder.
        folder: Where its log and runtime directory go.
        connector: kvsnap's options (`kv_connector_extra_config`); None: a server without kvsnap.
        role: `kv_both`, `kv_producer` or `kv_consumer`.
        args: More command line options of vLLM.
        env: More environment variables.
        name: Distinguishes the logs of several servers in one folder.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        role: str = "kv_both",
        module_path: bool = True,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        name: str = "server",
    ) -> None:
        self.port = free_port()
        self.runtime_dir = folder / f"{name}-run"
        self.log_path = folder / f"{name}.log"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--enforce-eager", "--disable-uvicorn-access-log", "--dtype", best_dtype(), *args]
        if connector is not None:
            transfer = connector_config(connector, role=role, module_path=module_path)
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self._command = command
        self._env = engine_environment(self.runtime_dir, env)
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[Client] = []
        self.start_s = 0.0

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if isinstance(error, ServerError | OSError):  # what broke it stands in a log that may be gone soon
            print(f"{error}; the server's log ends:\n{self.log_tail(200)}", file=sys.stderr)
        self.kill()

    def launch(self) -> None:
        """Start the processes and return at once."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def start(self, timeout_s: float = START_SECONDS) -> Server:
        """Start and wait until the server takes requests; `start_s` is how long that took."""
        began = time.monotonic()
        self.launch()
        try:
            self.wait_ready(timeout_s)
        except BaseException:
            self.kill()
            raise
        self.start_s = time.monotonic() - began
        return self

    def wait_ready(self, timeout_s: float = START_SECONDS) -> None:
        """Wait for /health."""
        deadline = time.monotonic() + timeout_s
        client = self.client(timeout_s=10)
        while True:
            if self.exit_code() is not None:
                raise RuntimeError(f"the server ended with {self.exit_code()}:\n{self.log_tail()}")
            try:
                status, _ = client.get("/health")
            except OSError:
                status = 0
            if status == 200:
                client.close()
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server wasn't ready after {timeout_s:.0f} s:\n{self.log_tail()}")
            time.sleep(0.1)

    def client(self, timeout_s: float = 600.0) -> Client:
        """A client with a connection of its own; closed at the latest when the server is killed."""
        self._clients.append(Client(self.port, timeout_s=timeout_s))
        return self._clients[-1]

    def exit_code(self) -> int | None:
        """The API server's exit status; None while it runs."""
        return None if self._process is None else self._process.poll()

    def log(self) -> str:
        """All that the server has written so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 60) -> str:
        """The end of it."""
        return "\n".join(self.log().splitlines()[-lines:])

    def pids(self) -> list[int]:
        """The live processes of the group."""
        return [] if self._process is None else group_members(self._process.pid)

    def pids_named(self, part: str) -> list[int]:
        """Those whose title has `part` in it: `EngineCore`, `Worker`, or `api_server`."""
        return [pid for pid in self.pids() if part in process_title(pid)]

    def kill(self) -> None:
        """`kill -9` of all its processes at once; returns when none is left."""
        while self._clients:
            self._clients.pop().close()
        if self._process is None:
            return
        leader = self._process.pid
        deadline = time.monotonic() + 30
        while group_members(leader):
            try:
                os.killpg(leader, signal.SIGKILL)
            except ProcessLookupError:
                break
            self._process.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {group_members(leader)} outlived kill -9")
            time.sleep(0.01)
        self._process.wait(timeout=30)

    def kill_pid(self, pid: int, sig: signal.Signals = signal.SIGKILL) -> None:
        """Signal one of its processes."""
        if pid not in self.pids():
            raise ProcessLookupError(f"{pid} is no process of this server")
        os.kill(pid, sig)

    def stop(self, timeout_s: float = 60.0) -> int:
        """SIGTERM; returns the exit status once all its processes have ended."""
        if self._process is None:
            raise RuntimeError("the server was never started")
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
            deadline = time.monotonic() + 20
            while self.pids() and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            self.kill()
        return self._process.returncode


def best_dtype() -> str:
    """The dtype that this machine computes fast: bfloat16 where the CPU (or a GPU) has it, else float32.

    A CPU without AVX512-BF16 or AMX emulates bfloat16 products, about seven times slower than float32.
    """
    if shutil.which("nvidia-smi"):
        return "bfloat16"
    flags = Path("/proc/cpuinfo").read_text().split()
    return "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(flags) else "float32"


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def group_members(leader: int) -> list[int]:
    """Pids of a process group, without zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # gone meanwhile
            state, _, group = stat.rpartition(")")[2].split()[:3]
            if int(group) == leader and state not in "ZX":
                members.append(int(entry.name))
    return sorted(members)


def process_title(pid: int) -> str:
    """A process's command line; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def dram_files(dram_dir: Path = SHM) -> list[Path]:
    """The DRAM tiers' files that lie in a directory."""
    return sorted(dram_dir.glob(f"kvsnap-{os.getuid()}-*"))


def kvsnap_command(*arguments: str | Path) -> list[str]:
    """The command line of `kvsnap …`; run it with an environment of this tree."""
    return [sys.executable, "-m", "kvsnap_jobs", *map(str, arguments)]


def kvsnap(*arguments: str | Path, runtime_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line tool from this tree; never raises for its exit status."""
    environment = tree_environment(runtime_dir)
    return subprocess.run(
        kvsnap_command(*arguments), env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def kvsnap_json(*arguments: str | Path, runtime_dir: Path | None = None) -> Any:
    """Run a command with --json that must do well, and return what it printed.

    Raises:
        RuntimeError: its exit status wasn't 0.
    """
    done = kvsnap(*arguments, "--json", runtime_dir=runtime_dir)
    if done.returncode != 0:
        raise RuntimeError(f"kvsnap {' '.join(map(str, arguments))} exited with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)
