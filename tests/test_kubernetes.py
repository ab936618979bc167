"""examples/kubernetes: valid for Kubernetes, for kvsnap's command line and configuration; the sizes fit each other."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvsnap.config import Config, parse_size
from kvsnap.warmup.prompts import read_prompts
from kvsnap_jobs.cli import main

yaml: Any = pytest.importorskip("yaml")
kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")

FOLDER = Path(__file__).parents[1] / "examples" / "kubernetes"
FILES = sorted(FOLDER.glob("*.yaml"))
GIB = 1 << 30
OLDEST = "1.29.0"
"""The oldest Kubernetes that the example promises."""
VLLM_SHM = GIB
"""What vLLM itself puts into /dev/shm, generously."""
ENGINE_MEMORY = 16 * GIB
"""What an engine needs beside /dev/shm: its processes, pinned buffers, weights on their way to the GPU."""
BETWEEN = ("||", "&&", ";")

Object = dict[str, Any]

DEPLOY = "20261129-120000"
"""What the pipeline calls a deploy."""


def documents() -> list[Object]:
    return [found for path in FILES for found in yaml.safe_load_all(path.read_text())]


def named(name: str) -> Object:
    (found,) = [doc for doc in documents() if doc["metadata"]["name"] == name and doc["kind"] != "Service"]
    return found


def pod_of(doc: Object) -> Object | None:
    """The pod template's spec, for kinds that have one."""
    spec = doc.get("spec", {})
    spec = spec.get("jobTemplate", {}).get("spec", spec)
    pod: Object | None = spec.get("template", {}).get("spec")
    return pod


def pods() -> dict[str, Object]:
    return {doc["metadata"]["name"]: pod for doc in documents() if (pod := pod_of(doc)) is not None}


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def container(pod: str, name: str) -> Object:
    (found,) = [one for one in containers(pods()[pod]) if one["name"] == name]
    return found


def scripts() -> Iterator[tuple[str, list[str]]]:
    """Every kvsnap command: where it is, and its words."""
    for name, pod in pods().items():
        for one in containers(pod):
            hook = one.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [])
            for words in ([*one["command"], *one.get("args", [])], hook):
                if words[:2] == ["sh", "-c"]:
                    assert len(words) == 3
                    lexer = shlex.shlex(words[2], posix=True, punctuation_chars=True)
                    lexer.whitespace_split = True
                    yield from ((f"{name}/{one['name']}", part) for part in split(list(lexer)) if part[0] == "kvsnap")
                elif words and words[0] == "kvsnap":
                    yield f"{name}/{one['name']}", words


def split(words: list[str]) -> list[list[str]]:
    """A script's simple commands."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in BETWEEN:
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part]


def engine_options() -> Iterator[tuple[str, Object]]:
    """Name of the pod and kvsnap's options, of every container that runs an engine."""
    for name, pod in pods().items():
        for one in containers(pod):
            words = one.get("args", [])
            if "--kv-transfer-config" in words:
                transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
                yield name, transfer["kv_connector_extra_config"]


def quantity(text: str) -> int:
    """Kubernetes' `48Gi`."""
    return parse_size(text)


def volume(pod: str, path: str) -> Object:
    """What a pod has mounted at a path."""
    mounts = [mount for one in containers(pods()[pod]) for mount in one["volumeMounts"] if mount["mountPath"] == path]
    (found,) = [v for v in pods()[pod]["volumes"] if v["name"] == mounts[0]["name"]]
    return dict(found)


@pytest.mark.parametrize("version", [OLDEST, kubernetes_validate.latest_version()])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_schema(path: Path, version: str) -> None:
    """Strict: an unknown field is a mistake, not ignored."""
    for doc in yaml.safe_load_all(path.read_text()):
        kubernetes_validate.validate(doc, version, strict=True)
        assert doc["kind"] == "Namespace" or doc["metadata"]["namespace"] == "kvsnap"


def test_every_volume_and_config_exists() -> None:
    kinds = {(doc["kind"], doc["metadata"]["name"]) for doc in documents()}
    for pod in pods().values():
        names = {entry["name"] for entry in pod["volumes"]}
        assert len(names) == len(pod["volumes"])
        for entry in pod["volumes"]:
            if claim := entry.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in kinds
            if config := entry.get("configMap"):
                assert ("ConfigMap", config["name"]) in kinds
        assert {mount["name"] for one in containers(pod) for mount in one["volumeMounts"]} == names


@pytest.mark.parametrize("name", sorted(pods()))
def test_pods_need_no_rights(name: str) -> None:
    """What the namespace's label demands (`restricted`), and a bit more: no token, nothing writable but volumes."""
    pod = pods()[name]

    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName"} & set(pod)
    assert all(set(entry) & {"emptyDir", "configMap", "persistentVolumeClaim"} for entry in pod["volumes"])
    for one in containers(pod):
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"cpu", "memory"} <= set(one["resources"]["requests"])
        assert one["resources"]["limits"]["memory"] == one["resources"]["requests"]["memory"]
        assert "/tmp" in {mount["mountPath"] for mount in one["volumeMounts"]}
        assert {"name": "HOME", "value": "/tmp"} in one["env"]


def test_every_command_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No flag can drift from the command line; what runs where is as the README says."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    found = list(scripts())
    for where, words in found:
        command = main.commands[words[1]]
        with command.make_context(words[1], expanded(words[2:])) as context:
            assert context.params, where

    assert [(where, words[1]) for where, words in found] == [
        ("kvsnap-warmup/warmup", "warmup"),
        ("kvsnap-merge/merge", "merge"),
        ("kvsnap-serve/import", "import"),
        ("kvsnap-serve/vllm", "flush"),
        ("kvsnap-export/export", "export"),
        ("kvsnap-prune/prune", "prune"),
    ]


def expanded(words: list[str]) -> list[str]:
    """As Kubernetes does it in the fourth worker."""
    return [word.replace("$(JOB_COMPLETION_INDEX)", "3").replace("$(DEPLOY)", DEPLOY) for word in words]


def params(where: str, command: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The parsed options of one of the commands."""
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    (words,) = [words for at, words in scripts() if at == where and words[1] == command]
    with main.commands[command].make_context(command, expanded(words[2:])) as context:
        return dict(context.params)


@pytest.mark.parametrize(("pod", "options"), [*engine_options()], ids=[name for name, _ in engine_options()])
def test_configuration_and_sizes(pod: str, options: Object) -> None:
    """Both tiers fit where they are put; shared memory counts against the memory limit."""
    config = Config.parse(options)
    (engine,) = [one for one in containers(pods()[pod]) if "--kv-transfer-config" in one.get("args", [])]
    shm = volume(pod, str(config.dram_dir))["emptyDir"]
    cache = volume(pod, str(config.cache_dir))

    assert shm["medium"] == "Memory"
    assert quantity(shm["sizeLimit"]) >= parse_size(config.dram) + VLLM_SHM
    assert quantity(engine["resources"]["limits"]["memory"]) >= quantity(shm["sizeLimit"]) + ENGINE_MEMORY
    if "emptyDir" in cache:
        room = quantity(cache["emptyDir"]["sizeLimit"])
        disk = sum(quantity(v["emptyDir"]["sizeLimit"]) for v in pods()[pod]["volumes"] if is_disk(v))
        assert quantity(engine["resources"]["limits"]["ephemeral-storage"]) >= disk
    else:
        claim = named(cache["persistentVolumeClaim"]["claimName"])
        room = quantity(claim["spec"]["resources"]["requests"]["storage"])
    assert parse_size(config.disk) <= 0.95 * room


def is_disk(entry: Object) -> bool:
    """Whether a volume counts as ephemeral storage."""
    return "emptyDir" in entry and entry["emptyDir"].get("medium") != "Memory"


def test_engines_agree_on_what_decides_the_namespace() -> None:
    """One file of flags, one model; nothing else that enters identity, layout or chunk size is given apart."""
    warmup, serve = container("kvsnap-warmup", "warmup")["args"], container("kvsnap-serve", "vllm")["args"]
    config = {"chunk_tokens", "weights_digest", "identity_tag"}
    flags = {word.partition("=")[0] for word in [*warmup[warmup.index("--") + 1 :], *serve] if word.startswith("--")}

    assert "--model=" + serve[0] in warmup
    assert warmup[warmup.index("--config") + 1] == serve[serve.index("--config") + 1]
    assert flags == {
        "--config", "--kv-transfer-config", "--port", "--shutdown-timeout", "--enable-prompt-tokens-details",
    }  # fmt: skip
    first, second = ({name: options.get(name) for name in config} for _, options in engine_options())
    assert first == second


def test_snapshot_flows_from_job_to_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker's part is merged; the ref that the merge moves is what the servers import."""
    job = named("kvsnap-warmup")["spec"]
    warmup = params("kvsnap-warmup/warmup", "warmup", monkeypatch)
    merge = params("kvsnap-merge/merge", "merge", monkeypatch)
    imported = params("kvsnap-serve/import", "import", monkeypatch)
    export = params("kvsnap-export/export", "export", monkeypatch)
    (serve,) = [options for pod, options in engine_options() if pod == "kvsnap-serve"]
    repository, ref = imported["snapshot"] if "snapshot" in imported else imported["url"]
    workers = job["completions"]

    assert job["completionMode"] == "Indexed"
    assert warmup["shard"] == (3, workers)
    assert warmup["tag"] == f"part-{DEPLOY}-3"
    assert merge["first"] == (repository, f"part-{DEPLOY}-0")
    assert list(merge["others"]) == [f"@part-{DEPLOY}-{i}" for i in range(1, workers)]
    assert merge["tag"] == ref
    assert warmup["export_url"] == repository
    assert f"{repository}@{ref}" == serve["snapshot"]
    assert repository in export.values()
    assert export["tag"] not in (ref, None)
    assert warmup["budget_s"] < job["activeDeadlineSeconds"]
    assert imported["max_bytes"] <= parse_size(serve["disk"])


def test_parts_are_of_one_deploy() -> None:
    """A worker without prompts exports nothing; under a name used before, the merge would take an older part."""
    text = (FOLDER / "README.md").read_text()
    for one in (container("kvsnap-warmup", "warmup"), container("kvsnap-merge", "merge")):
        (deploy,) = [entry["valueFrom"] for entry in one["env"] if entry["name"] == "DEPLOY"]
        assert deploy == {"configMapKeyRef": {"name": "kvsnap-deploy", "key": "id"}}

    assert text.index("create configmap kvsnap-deploy --from-literal=id=") < text.index("-f 20-warmup.yaml")
    assert 'kvsnap rm "s3://example-kv/qwen3-8b@part-$DEPLOY-$i"' in text


def test_import_beside_the_servers_of_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Old and new pods share the directory while a deploy goes on."""
    (claim,) = {
        volume(pod, "/cache")["persistentVolumeClaim"]["claimName"] for pod in ("kvsnap-serve", "kvsnap-export")
    }

    assert claim == "kvsnap-cache"
    assert params("kvsnap-serve/import", "import", monkeypatch)["other_engines"]
    assert params("kvsnap-export/export", "export", monkeypatch)["namespace"] is None


def test_probes_leave_time_for_the_preload() -> None:
    """The start-up probe bounds loading, hashing, compiling and the preload; readiness and liveness wait for it."""
    engine = container("kvsnap-serve", "vllm")
    (options,) = [Config.parse(options) for pod, options in engine_options() if pod == "kvsnap-serve"]
    startup = engine["startupProbe"]

    assert options.preload == "blocking"
    assert startup["failureThreshold"] * startup["periodSeconds"] >= options.preload_seconds + 600
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert named("kvsnap-serve")["spec"]["progressDeadlineSeconds"] > startup["failureThreshold"] * 5 + 600


def test_grace_covers_flush_and_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    """preStop, requests in flight and the last flush, one after the other, end before the kill."""
    pod = pods()["kvsnap-serve"]
    engine = container("kvsnap-serve", "vllm")
    (options,) = [Config.parse(options) for name, options in engine_options() if name == "kvsnap-serve"]
    hook = engine["lifecycle"]["preStop"]["exec"]["command"][2]
    slept = float(re.findall(r"sleep (\d+)", hook)[0])
    flush = params("kvsnap-serve/vllm", "flush", monkeypatch)["timeout_s"]
    (shutdown,) = [float(word.partition("=")[2]) for word in engine["args"] if word.startswith("--shutdown-timeout")]

    assert shutdown > options.flush_seconds
    assert pod["terminationGracePeriodSeconds"] >= slept + flush + shutdown + options.flush_seconds + 10


def test_prompts_are_read(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(named("kvsnap-config")["data"]["prompts.jsonl"])

    prompts, num_repeated = read_prompts([str(file)])

    assert len(prompts) >= named("kvsnap-warmup")["spec"]["completions"]
    assert num_repeated == 0


def test_readme_names_every_file_and_size() -> None:
    text = (FOLDER / "README.md").read_text()

    assert not [path.name for path in FOLDER.iterdir() if path.name != "README.md" and path.name not in text]
    for _, options in engine_options():
        assert options["dram"].replace("GiB", " GiB") in text
