# Every target makes .venv by itself; a second run installs nothing.
.DEFAULT_GOAL := help
.PHONY: help install demo test lint format bench docs wheel clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TEST_WORKERS ?= 2

help:
	@echo "make demo    train, score and explain three fusions on the embedded model -> crossfuse-demo/report.html"
	@echo "make test    the whole test suite        make lint    ruff and mypy"
	@echo "make bench   every benchmark             make docs    guides and API reference -> build/docs"

install: $(STAMP)

# torch and torchvision come first, as the one pair that is tested: resolved together with everything else, pip may
# pick halves of two pairs.
$(STAMP): pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "crossfuse needs Python 3.11 or newer; got $$("$(PYTHON)" --version) (set PYTHON=/path/to/python3.11)"; exit 2; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install torch==2.14.1 torchvision==0.29.1
	$(BIN)/python -m pip install --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python -m crossfuse demo

test: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_WORKERS) tests

lint: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

bench: $(STAMP)
	@for script in benchmarks/bench_*.py; do \
	  test -e "$$script" || { echo "no benchmark found: benchmarks/bench_*.py"; exit 2; }; \
	  echo "== $$script"; $(BIN)/python "$$script" || exit 1; \
	done

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --site-dir build/docs
	@echo "open build/docs/index.html"

wheel: $(STAMP)
	$(BIN)/python -m build --outdir build/dist

clean:
	rm -rf build crossfuse-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
