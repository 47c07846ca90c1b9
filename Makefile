# `make help` lists the targets. CI runs the same ones (.ci/run, .github/workflows/ci.yml).

PYTHON ?= python3
VENV ?= .venv
# Where PyTorch's own indexes can be reached, `make setup TORCH_BACKEND=cpu` leaves 3 GB of CUDA libraries out.
TORCH_BACKEND ?=
# Arguments for pytest, such as ARGS="-k recorder".
ARGS ?=

BIN := $(VENV)/bin
UV := $(BIN)/uv
STAMP := $(VENV)/.trajlake-setup
FINGERPRINT = $$(cat pyproject.toml constraints.txt | cksum)

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench lint-format constraints docs clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv with the locked versions; does nothing when it is up to date
	@if [ "$$(cat $(STAMP) 2>/dev/null)" = "$(FINGERPRINT)" ]; then exit 0; fi; set -e; \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is $$($(PYTHON) --version 2>&1); trajlake needs Python 3.11 or newer. Try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 2; }; \
	if [ ! -x $(BIN)/python ]; then \
	  echo "setup: making $(VENV)"; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "error: $(PYTHON) can't make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 2; }; \
	fi; \
	if [ ! -x $(UV) ]; then echo "setup: installing uv"; $(BIN)/python -m pip install --quiet -c constraints.txt uv; fi; \
	constraints=$$(mktemp); trap 'rm -f '$$constraints EXIT; \
	if $(BIN)/python -c 'import sys; from importlib.metadata import version; sys.exit([int(n) for n in version("torch").split(".")[:2]] < [2, 7])' 2>/dev/null; then \
	  echo "setup: keeping the torch that is there"; \
	  grep -v -E '^(torch|triton|nvidia-.*|cuda-.*)==' constraints.txt > $$constraints; \
	else cp constraints.txt $$constraints; fi; \
	echo "setup: installing packages (PyTorch is large: minutes on a cold cache)"; \
	$(UV) pip install --python $(BIN)/python $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) \
	  -c $$constraints --build-constraints constraints.txt -e '.[dev]'; \
	echo "$(FINGERPRINT)" > $(STAMP)

demo: setup ## Run the whole loop: rollout, log, tables, training; says what to look at next
	$(BIN)/trajlake demo

test: setup ## Run every test
	$(BIN)/pytest $(ARGS)

check: setup ## Lint, formatting, types, layers
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup ## Run every benchmark against its baseline (one: make bench NAME=record)
	$(BIN)/python -m bench $(if $(NAME),$(NAME),--all) --check

lint-format: setup ## Format, and fix what can be fixed
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

docs: setup ## Write the generated pages of docs/
	$(BIN)/python -m trajlake.docs

constraints: ## Lock the versions that are installed
	@{ sed -n '/^#/p' constraints.txt; $(UV) pip freeze --python $(BIN)/python | grep -v -E '^(-e |pip==)|://'; } > constraints.new
	@mv constraints.new constraints.txt

clean: ## Remove build outputs and caches; keeps .venv and .trajlake
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
