# Needs python3 (3.10 to 3.13) and make. Everything else goes into .venv.
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint fix clean gluon-versions

# The interpreter: yours (make PYTHON=python3.12 ...), else the one .venv was made with, else python3.
PYTHON ?= $(shell p=$$(sed -n 1p .venv/.ready 2>/dev/null); [ -x "$$p" ] && echo "$$p" || echo python3)
RUN := .venv/bin/python -m
ARGS ?=

help:
	@echo 'make demo    see what nosquare does, on this machine     (ARGS=--quick for the short form)'
	@echo 'make test    run the tests                               (ARGS=tests/test_house.py for some)'
	@echo 'make lint    ruff, mypy and the bans of .pre-commit-config.yaml'
	@echo 'make fix     let ruff mend what it can'
	@echo 'make gluon-versions   which releases of Triton compile the kernels for Hopper'
	@echo 'make setup   only make .venv; the others do it by themselves'
	@echo 'make clean   remove .venv and all caches'
	@echo
	@echo 'PYTHON=python3.12   the interpreter to make .venv with'
	@echo 'NOSQUARE_CUDA=1     accept the CUDA build of torch (several GB)'

setup:
	@command -v "$(PYTHON)" >/dev/null 2>&1 && "$(PYTHON)" -c '' 2>/dev/null || { \
	  echo "error: there is no Python that runs under the name '$(PYTHON)'." >&2; \
	  echo "Try: install Python 3.10 to 3.13 (Debian, Ubuntu: apt-get install python3 python3-venv)," >&2; \
	  echo "     or name one that is here: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || { \
	  echo "error: '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1); this project is tested on 3.10 to 3.13." >&2; \
	  echo "Try: make PYTHON=python3.12, or another name of a Python in that range" >&2; exit 1; }
	@"$(PYTHON)" scripts/setup_venv.py

demo: setup
	@.venv/bin/nosquare demo $(ARGS)

# One torch thread in each of at most eight processes beats many threads in one: the tests are small.
test: export NOSQUARE_TEST_THREADS ?= 1
test: setup
	@$(RUN) pytest -q -n auto --maxprocesses=8 $(ARGS)

lint: setup
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@if [ -e .git ]; then SKIP=ruff-check,ruff-format,mypy $(RUN) pre_commit run --all-files; fi

fix: setup
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

# Not a part of continuous integration: it fetches four releases of Triton, 200 MB each.
gluon-versions: export PYTHONPATH := src
gluon-versions: setup
	@.venv/bin/python tests/gluon_versions.py $(ARGS)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests scripts -name __pycache__ -prune -exec rm -rf {} +
