# Every target sets up what it needs; `make help` lists them. Python 3.11 or newer is looked for under PYTHON.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests wait for some of their time: four processes keep two cores busy.
PYTEST_ARGS ?= --processes 4

# Compiled modules are kept, whatever the shell says: without them every process compiles torch anew, in three seconds.
export PYTHONDONTWRITEBYTECODE =

# The build of torch for setup: `cpu` where there is no GPU, if PyTorch's index can be reached; empty: the default index's.
TORCH ?= $(if $(wildcard /dev/nvidiactl /dev/dxg),,cpu)

.DEFAULT_GOAL := help
.PHONY: help setup run test test-cluster test-all lint style format protos docs notebooks site bench faults cuda clean images kind-up kind-test kind-down

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv with FedLoom and everything its tests need

$(STAMP): pyproject.toml images/constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "make setup: $(PYTHON) is $$($(PYTHON) --version 2>&1 || true); allowed: Python 3.11 or newer." >&2; \
		echo "  Name one with: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "setup: making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@if $(BIN)/uv --version >/dev/null 2>&1 || $(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --requirement images/uv.txt; then \
		if [ "$(TORCH)" ] && ! ls -d $(VENV)/lib/python3.*/site-packages/torch >/dev/null 2>&1; then \
			: "constraints.txt has the hashes of the default index's builds: these two have their versions alone, as in the images"; \
			UV_HTTP_RETRIES=0 UV_HTTP_CONNECT_TIMEOUT=5 $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --torch-backend $(TORCH) \
				torch==$$(sed -n 's/^ARG TORCH_VERSION=//p' images/Dockerfile) $$(sed -n 's/^\(torchvision==[^ ]*\) .*/\1/p' images/constraints.txt) \
				2>/dev/null || echo "setup: no $(TORCH) build of torch can be had here, installing the default one (on Linux with CUDA, 4 GB more)"; \
		fi; \
		echo "setup: installing FedLoom with uv"; \
		$(BIN)/uv pip install --quiet --python $(BIN)/python --constraints images/constraints.txt -e '.[dev]'; \
	else \
		echo "setup: uv cannot be had, installing FedLoom with pip (slower)"; \
		sed -n 's/^\([^ ]*==[^ ]*\) .*/\1/p' images/constraints.txt >$(VENV)/versions.txt; : "pip takes no hashes beside -e"; \
		$(BIN)/pip install --quiet --disable-pip-version-check --constraint $(VENV)/versions.txt -e '.[dev]'; \
	fi
	@touch $@
	@echo "setup: done"

run: setup ## train PeFLL, FedAvg and Local on Fashion-MNIST, and compare what each client gets, here and as published
	@$(BIN)/fedloom reproduce quickstart/make-run

# One thread per process: the tests run in several, and two that fight over a core are slower than one. Threads of the
# runs that ask for more sleep while they wait for each other: an eighth of the tests' processor time was spinning.
test test-cluster test-all: export OMP_NUM_THREADS = 1
test test-cluster test-all: export MKL_NUM_THREADS = 1
test test-cluster test-all: export OMP_WAIT_POLICY = passive
test: style ## lint, and the quick tests: minutes
	$(call tested,-m "not cluster and not exhaustive and not slow")

test-cluster: setup ## federations as pods (on a stand-in, or on a cluster: docs/e2e.md), pipelines from end to end
	@$(BIN)/python -m pytest -m cluster $(PYTEST_ARGS)

test-all: style ## lint, and every test; what CI runs
	$(call tested,)

# Style is checked first, in two seconds. Types take half a minute of one core: they are checked beside the tests, and
# what is wrong with them is told at the end.
define tested
@types=$$(mktemp); $(BIN)/mypy --no-error-summary >$$types 2>&1 & mypy=$$!; \
trap 'kill $$mypy 2>/dev/null; rm -f $$types; exit 130' INT TERM; \
$(BIN)/python -m pytest $(1) $(PYTEST_ARGS); code=$$?; \
wait $$mypy || { cat $$types >&2; code=1; }; \
rm -f $$types; exit $$code
endef

lint: style ## ruff, mypy --strict, buf
	@$(BIN)/mypy --no-error-summary

style: setup
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/buf lint

format: setup ## let ruff fix what it can
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

protos: setup ## generate src/fedloom/transport/wire from protos/
	@mkdir -p build/protos
	@$(BIN)/python -m grpc_tools.protoc -I protos --python_out=build/protos --pyi_out=build/protos protos/fedloom/v1/*.proto
	@sed -i 's/from fedloom\.v1 import/from fedloom.transport.wire import/' build/protos/fedloom/v1/*
	@cp build/protos/fedloom/v1/* src/fedloom/transport/wire/

docs: setup ## write the pages that are made from the code
	@$(BIN)/python docs/generate_keys.py
	@$(BIN)/python docs/generate_chart.py
	@$(BIN)/python docs/generate_reference.py
	@$(BIN)/python docs/generate_notebooks.py
	@$(BIN)/fedloom pipeline compile --out pipelines

notebooks: setup ## run the cells of the tutorials again, and write their outputs into the notebooks: minutes
	@$(BIN)/python docs/generate_notebooks.py --run

site: setup ## build the documentation as a site, in build/site; a warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: setup ## measure FedLoom against bare PyTorch, bare gRPC, Flower (docs/benchmarks.md)
	@for name in start local_training module_model aggregator_overhead registered_clients serving scale resume flower; do \
		echo "research/benchmarks/$$name.py"; $(BIN)/python research/benchmarks/$$name.py || exit; echo; \
	done

faults: setup ## kills, cuts, hostile peers, garbage, full disks for MINUTES=30 [KINDS=...] [SEED=1] [TRIES=...] (docs/e2e.md)
	@OMP_NUM_THREADS=1 PYTHONPATH=tests:tests/integration:tests/conformance $(BIN)/python -m faults $(if $(MINUTES),--minutes $(MINUTES)) \
		$(if $(KINDS),--kinds "$(KINDS)") $(if $(SEED),--seed $(SEED)) $(if $(TRIES),--tries $(TRIES)) $(if $(OUT),--out $(OUT)) $(if $(KEEP),--keep) $(if $(JOBS),--jobs $(JOBS))

cuda: setup ## what only a GPU can tell, where one is at hand: at most 40 minutes (docs/benchmarks.md)
	@for part in agreement speed table table table; do $(BIN)/python research/benchmarks/gpu.py $$part || exit; done

images: ## build worker, aggregator and components with docker buildx or buildah (docs/chart.md): TARGETS="worker ..."
	@images/build.sh $(TARGETS)

kind-up: ## make a Kubernetes in Docker with our image and an object store (docs/e2e.md)
	@images/kind/kind.sh up

kind-test: setup ## run the end-to-end tests on it
	@PYTHON=$(BIN)/python images/kind/kind.sh test

kind-down: ## remove it
	@images/kind/kind.sh down

clean: ## remove what tests and tools leave behind; .venv, data and runs stay
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis dist build
