# From a bare machine with Python 3.11, 3.12 or 3.13: `make demo`, `make test`.
# Choose an interpreter with PYTHON=..., the environment's folder with VENV=...

VENV ?= .venv
PYTHON ?=
JOBS ?= 2

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

.DEFAULT_GOAL := help
.PHONY: help install demo test lint clean

help:
	@echo 'make demo      plan a small model on this machine and show what was found'
	@echo 'make test      lint, then all tests but the nightly ones'
	@echo 'make lint      ruff and pyright'
	@echo 'make install   only create $(VENV)'
	@echo 'make clean     remove $(VENV) and what tools left behind'
	@echo
	@echo 'PYTHON=...     interpreter to create $(VENV) with (3.11, 3.12 or 3.13)'
	@echo 'VENV=...       another folder for the environment'
	@echo 'JOBS=...       test processes, $(JOBS) unless given'

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m cfp.demo

test: lint
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter counts if it runs and is new enough: a version manager's stand-in may
# be on the PATH without any Python behind it.
$(STAMP): pyproject.toml setup.py
	@python=; \
	for candidate in $(if $(PYTHON),'$(PYTHON)',python3 python3.11 python3.12 python3.13); do \
	    if "$$candidate" -c '$(SUPPORTED)' >/dev/null 2>&1; then \
	        python=$$candidate; break; \
	    fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo 'cfp needs Python 3.11, 3.12 or 3.13. Tried: $(or $(PYTHON),python3 python3.11 python3.12 python3.13).' >&2; \
	    echo 'Install one, or name it: make PYTHON=/path/to/python3.11' >&2; \
	    exit 1; \
	fi; \
	set -ex; \
	"$$python" -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@touch $@
