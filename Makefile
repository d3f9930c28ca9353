# `make train` and `make test` need nothing but Python 3.11: both install into .venv first, once.
#
#   SEED=1        the run's seed
#   ARGS="..."    further arguments of train.py, or of pytest
#   CONFIG=FILE   another experiment

CONFIG ?= configs/grid_pathfinding.yaml

VENV := .venv
PYTHON := $(VENV)/bin/python
TORCH_PYTHON := .venv-torch/bin/python
# Made last, so that an installation that was cut short is done again.
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train study bench test check clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## install the project and its tools into .venv, at the versions of constraints.txt

$(STAMP): pyproject.toml constraints.txt
	@rm -f $@
	@found=; \
	for candidate in python3.11 python3; do \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			found=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "Python 3.11 or newer is needed: neither python3.11 nor python3 on the PATH is one." >&2; exit 1; \
	fi; \
	$(PYTHON) -m pip --version >/dev/null 2>&1 || $$found -m venv --clear $(VENV)
	@echo "installing into $(VENV), which takes some minutes the first time"
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

train: setup ## run the four stages of the default experiment, or go on with them
	$(PYTHON) train.py --config $(CONFIG) $(if $(SEED),--seed $(SEED)) $(ARGS)

study: setup ## run what the study lacks, into docs/study
	$(PYTHON) -m surprisal_jax.study $(ARGS)

bench: setup ## measure side by side, also with PyTorch in .venv-torch, into benchmarks/RESULTS.md
	@$(TORCH_PYTHON) -c 'import torch' 2>/dev/null || { \
		$(PYTHON) -m venv --clear .venv-torch && \
		$(TORCH_PYTHON) -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' 'numpy<3'; }
	$(PYTHON) -m benchmarks $(ARGS)

test: setup ## run the tests
	$(PYTHON) -m pytest $(ARGS)

check: setup ## lint, formatting and types, as CI runs them
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean: ## remove .venv, caches and build files, and keep the runs
	rm -rf $(VENV) .venv-torch build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
