# From a bare machine with Python 3.11, 3.12 or 3.13: `make demo`, `make test`.
# Choose an interpreter with PYTHON=..., the environment's folder with VENV=...

VENV ?= .venv
PYTHON ?=
JOBS ?= 2
# `lock` installs the very versions that requirements/lock.txt names, `ranges` the newest
# ones that pyproject.toml allows, `wheelhouse` what the folder WHEELHOUSE holds, without
# any network.
WHEELHOUSE ?=
FROM ?= $(if $(WHEELHOUSE),wheelhouse,lock)
LOCK := requirements/lock.txt
# What `test-gpu` runs in: an environment that has JAX with CUDA, or else a new one.
GPU_PYTHON ?=
GPU_OPTIONS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))

.DEFAULT_GOAL := help
.PHONY: help install demo test test-nightly test-latest test-gpu prove lint docs wheel lock docs-lock sbom audit clean

help:
	@echo 'make demo      plan a small model on this machine and show what was found'
	@echo 'make test      lint, then all tests but the nightly ones'
	@echo 'make test-nightly  the nightly ones, in an hour or more'
	@echo 'make test-latest  the same with the newest dependencies that pyproject.toml allows'
	@echo 'make test-gpu  tests on the GPUs of this machine, in ten minutes; build/gpu.md is'
	@echo '               the page to attach to an issue'
	@echo 'make prove     run every op under every sharding of its rule; counts in build/rules.json'
	@echo 'make lint      ruff, the order of imports, and pyright'
	@echo 'make docs      the documentation as a site, in build/site; a warning is an error'
	@echo 'make wheel     wheel and source distribution in dist/, tried in an empty place'
	@echo 'make install   only create $(VENV), from $(LOCK)'
	@echo 'make lock      write $(LOCK) again, after pyproject.toml has changed;'
	@echo '               UPGRADE=1 takes the newest versions of everything'
	@echo 'make sbom      write build/sbom.json: what $(VENV) is made of, in CycloneDX'
	@echo 'make audit     known vulnerabilities of all dependencies'
	@echo 'make clean     remove the environments and what tools left behind'
	@echo
	@echo 'PYTHON=...     interpreter to create $(VENV) with (3.11, 3.12 or 3.13)'
	@echo 'VENV=...       another folder for the environment'
	@echo 'WHEELHOUSE=... install from what build_jaxlib/build.py made, without a network'
	@echo 'GPU_PYTHON=... what test-gpu runs in, with JAX for CUDA; $(VENV)-gpu unless given'
	@echo 'GPU_OPTIONS=... for it, such as --planted, or --cpu 2 where there is no GPU'
	@echo 'JOBS=...       test processes, $(JOBS) unless given'

install: $(STAMP)

# What a user does next: a plan, and steps under it, compared with one device.
DEMO := gpt --layers 2 --hidden 128 --heads 4 --seq 32 --vocab 4096 --batch 8 --dtype float32
DEMO_FOLDER := $(abspath build/demo)
demo = mkdir -p $(DEMO_FOLDER) && cd $(DEMO_FOLDER) && \
    $(1) -m cfp plan $(DEMO) --platform cpu --devices 4 --quick --per-kind 8 \
        --workdir . -o plan.json && \
    $(1) -m cfp run $(DEMO) --plan plan.json --steps 2 --check

demo: $(STAMP)
	$(call demo,$(abspath $(BIN))/python)

# A file's tests run in one process and in their order, since they share what is slow; the
# longest files come first (cfp_test/conftest.py).
test: lint
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=10

test-nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly -n $(JOBS) --dist loadfile --no-loadscope-reorder \
	    --durations=10

# New releases change nothing here that make could see, so this always installs.
test-latest:
	rm -f $(VENV)-latest/.installed
	$(MAKE) test VENV=$(VENV)-latest FROM=ranges

test-gpu: $(if $(GPU_PYTHON),,$(VENV)-gpu/.installed)
	$(or $(GPU_PYTHON),$(VENV)-gpu/bin/python) -m cfp_test.gpu --page build/gpu.md $(GPU_OPTIONS)

# The lock is of CPUs only.
$(VENV)-gpu/.installed: pyproject.toml
	$(create) $(VENV)-gpu; $(VENV)-gpu/bin/python -m pip install --quiet -e '.[cuda,dev]'
	@touch $@

# With KEEP=... a run that was ended goes on from what that folder has.
prove: $(STAMP)
	mkdir -p build
	$(BIN)/python -m cfp_test.proving --jobs $(JOBS) --json build/rules.json $(if $(KEEP),--keep $(KEEP))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)-docs/.installed
	$(VENV)-docs/bin/mkdocs build --strict

$(VENV)-docs/.installed: requirements/docs.txt
	$(create) $(VENV)-docs; \
	    $(VENV)-docs/bin/python -m pip install --quiet --require-hashes -r $<
	@touch $@

docs-lock: $(VENV)-lock/bin/uv
	$< pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --custom-compile-command 'make docs-lock' \
	    $(if $(UPGRADE),--upgrade) --output-file requirements/docs.txt requirements/docs.in

# The wheel is used where no clone is: what it lacks would come from there.
wheel: $(STAMP) $(VENV)-audit/.installed
	rm -rf dist
	$(VENV)-audit/bin/python -m build --quiet
	$(create) $(VENV)-wheel --clear; \
	    $(VENV)-wheel/bin/python -m pip install --quiet --require-hashes -r $(LOCK); \
	    $(VENV)-wheel/bin/python -m pip install --quiet --no-deps dist/*.whl
	$(call demo,$(abspath $(VENV)-wheel)/bin/python)

# One resolution for all versions of Python and all systems, made by uv; pip installs it.
lock: $(VENV)-lock/bin/uv
	$< pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --extra dev --no-emit-index-url --custom-compile-command 'make lock' \
	    $(if $(UPGRADE),--upgrade) --output-file $(LOCK) pyproject.toml

sbom: $(STAMP) $(VENV)-audit/.installed
	mkdir -p build
	$(VENV)-audit/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml \
	    --mc-type library --output-reproducible --output-file build/sbom.json

# Strict: what cannot be looked up is no pass.
audit: $(STAMP) $(VENV)-audit/.installed
	$(VENV)-audit/bin/pip-audit --strict --disable-pip --require-hashes -r $(LOCK)

clean:
	rm -rf $(VENV) $(VENV)-latest $(VENV)-gpu $(VENV)-lock $(VENV)-audit $(VENV)-docs $(VENV)-wheel build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter counts if it runs and is new enough: a version manager's stand-in may
# be on the PATH without any Python behind it.
define find-python
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
set -ex
endef

define create
$(find-python); "$$python" -m venv
endef

# What the lock names is all that is fetched: cfp itself is built with its setuptools.
INSTALL_lock = "$$python" -m venv $(VENV); \
    $(BIN)/python -m pip install --quiet --require-hashes -r $(LOCK); \
    $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
INSTALL_ranges = "$$python" -m venv $(VENV); \
    $(BIN)/python -m pip install --quiet --upgrade \
    --upgrade-strategy eager -e '.[dev]'; $(BIN)/python -m pip list
INSTALL_wheelhouse = sh $(WHEELHOUSE)/install.sh $(VENV) "$$python"

$(STAMP): pyproject.toml setup.py $(LOCK)
	$(find-python); $(INSTALL_$(FROM))
	@touch $@

$(VENV)-lock/bin/uv:
	$(create) $(VENV)-lock; $(VENV)-lock/bin/python -m pip install --quiet uv

$(VENV)-audit/.installed: third_party/tools.txt
	$(create) $(VENV)-audit; $(VENV)-audit/bin/python -m pip install --quiet -r $<
	@touch $@
