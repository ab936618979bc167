"""examples/kubernetes: what stands there for vLLM is what vLLM takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("vllm")]
yaml: Any = pytest.importorskip("yaml")

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"


def load(name: str, kind: str) -> Any:
    (found,) = [doc for doc in yaml.safe_load_all((FOLDER / name).read_text()) if doc["kind"] == kind]
    return found


@pytest.mark.parametrize(
    ("name", "kind", "role"), [("20-warmup.yaml", "Job", "offline"), ("40-serve.yaml", "Deployment", "serve")]
)
def test_vllm_takes_the_flags(name: str, kind: str, role: str, tmp_path: Path) -> None:
    """`--config` of both is the file of 00-config.yaml; `vllm serve` wants its value as a word of its own."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = list(load(name, kind)["spec"]["template"]["spec"]["containers"][0]["args"])
    config = tmp_path / "vllm.yaml"
    config.write_text(load("00-config.yaml", "ConfigMap")["data"]["vllm.yaml"])
    if role == "offline":
        (model,) = [word.partition("=")[2] for word in args if word.startswith("--model=")]
        args = ["--model", model, *args[args.index("--") + 1 :]]
    args = [str(config) if word == "/etc/kvsnap/vllm.yaml" else word for word in args]

    parsed = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(args)

    assert (parsed.model_tag or parsed.model) == "/models/Qwen3-8B"
    assert parsed.served_model_name == ["qwen3-8b"]
    assert parsed.max_model_len == 32768
    assert parsed.kv_transfer_config.kv_connector == "KVSnapConnector"
    assert parsed.kv_transfer_config.kv_connector_extra_config == json.loads(args[-1])["kv_connector_extra_config"]
    if role == "serve":
        assert parsed.shutdown_timeout == 30
