# One command for people, pre-commit and CI alike.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: demo test check bench clean help

help:  ## show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# torch first and pinned: an open range may pull a build with gigabytes of GPU libraries.
$(READY): pyproject.toml constraints.txt
	@echo "installing into $(VENV) (a few minutes the first time)"
	@test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)' -c constraints.txt
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## train, lose a node, gain one, and compare the weights with an undisturbed run
	@$(BIN)/raytrain demo

test: check  ## everything, real Ray clusters included
	$(BIN)/pytest tests -m ray

check: $(READY)  ## format, lint, types, layering and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests -m 'not ray'

bench: $(READY)  ## all benchmarks, or one: make bench NAME=recovery
	@$(BIN)/python -m benchmarks $(NAME)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info
