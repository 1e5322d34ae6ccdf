# `make help` lists the commands. Each makes the environment that it needs first.
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2

PIP = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: agents bench bench-agents demo test test-all check format clean help

help:
	@echo "make demo    make a small model, train it with GRPO, show before and after"
	@echo "make agents  train two small agents: one with a calculator, one in an environment"
	@echo "make test    run the test suite"
	@echo "make bench   time groupgrad and TRL on the same work (an hour or more; BENCH_ARGS=\"--only uniform --quick\")"
	@echo "make bench-agents   time both at training agents with tools (ten minutes or so)"
	@echo "make check   lint, format, types, import floors"

demo: $(VENV)/.groupgrad
	$(VENV)/bin/python examples/demo.py $(DEMO_ARGS)

agents: $(VENV)/.groupgrad
	$(VENV)/bin/python examples/agent_calculator.py $(AGENTS_ARGS)
	$(VENV)/bin/python examples/agent_environment.py $(AGENTS_ARGS)

test: $(VENV)/.groupgrad-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(TEST_ARGS)

test-all: $(VENV)/.groupgrad-dev
	OMP_NUM_THREADS=1 $(VENV)/bin/python -m pytest -n $(WORKERS) $(TEST_ARGS)

bench: $(VENV)/.groupgrad
	$(VENV)/bin/python bench/run.py $(BENCH_ARGS)

bench-agents: $(VENV)/.groupgrad
	$(VENV)/bin/python bench/agents.py $(BENCH_ARGS)

check: $(VENV)/.groupgrad-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.groupgrad-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.groupgrad: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing groupgrad and what it needs into $(VENV) ..."
	$(PIP) torch
	$(PIP) --editable ".[math,plot]"
	@touch $@

$(VENV)/.groupgrad-dev: $(VENV)/.groupgrad pyproject.toml constraints.txt
	@echo "installing what the tests need into $(VENV) ..."
	$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache
