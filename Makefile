# Every command of the project. `make setup` alone prepares .venv; the others call it.
PYTHON ?= python3
PIP_ARGS ?=
TEST_PROCESSES ?= 3
VENV := .venv
BIN := $(VENV)/bin
TYPED := .mypy_cache/typed/any-exprs.txt
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e
PYTEST = $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder \
	--durations 30
TEST = $(PYTEST) -m 'not slow'
export PYTHONHASHSEED ?= 0
# The tests start hundreds of processes, which need not compile the same modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train train-distributed test test-fast coverage test-slow check format bench results compare faults docs clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 20

setup: $(VENV)/.ready ## Create .venv with the pinned dependencies

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("dmiddleware needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another one: make setup PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo 'Installing the dependencies and all extras into $(VENV), which takes a few minutes'
	$(INSTALL) '.[dev]'
	@touch $@

train: setup ## Train DQN on CartPole-v1 until it is solved (less than a minute)
	$(BIN)/python -m examples.cartpole_dqn

train-distributed: setup ## Train the same in four processes: a learner, two collectors, an evaluator
	$(BIN)/ditask --package . --main examples.cartpole_dqn.main --parallel-workers 4

test: setup ## Run the test suite (about 8 minutes on two cores)
	$(TEST)

test-fast: setup ## Run the tests that start no process (about 4 minutes on two cores)
	$(PYTEST) -m 'not slow and not process'

coverage: setup ## Run it and list the lines that no test runs; fails below 95%
	$(TEST) --cov --cov-report=term-missing:skip-covered

test-slow: setup ## Run the tests and variants that test leaves out because they take long
	$(BIN)/python -m pytest -m slow --timeout 1800 -o faulthandler_timeout=1860

check: setup ## Format check, lint, types, spelling, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory $(TYPED)
	$(BIN)/mypy
	$(BIN)/codespell
	$(BIN)/lint-imports

# mypy reads no cache when it reports, but writes one, which the plain run of `make check` reads.
$(TYPED): $(wildcard dmiddleware/policy/*.py dmiddleware/reward/*.py)
	$(BIN)/mypy --any-exprs-report $(@D)
	$(BIN)/python -m tests.typed_algorithms $@

format: setup ## Format the code and apply safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## Measure the speed bars and write docs/benchmarks.md (about 40 minutes)
	$(INSTALL) '.[bench]' --quiet
	$(BIN)/python -m tests.benchmarks

results: setup ## Train what has no record yet, and write docs/results.md (about 16 hours)
	$(INSTALL) '.[bench]' --quiet
	$(BIN)/python -m tests.results

compare: setup ## Train the same here and in other libraries, for docs/results.md (hours)
	$(INSTALL) '.[bench]' --quiet
	$(BIN)/python -m tests.results --compare

faults: setup ## Inject every fault in full and write docs/faults.md (about an hour)
	$(BIN)/python -m tests.faults

docs: setup ## Build the documentation into docs/_build/html
	$(INSTALL) '.[docs]' --quiet
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

clean: ## Remove what the commands above made
	rm -rf $(VENV) docs/_build build dist *.egg-info
