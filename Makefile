# make demo | test | check | clean. The environment is .venv, made from requirements.lock; PYTHON chooses the interpreter.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.PHONY: help demo test check clean
.DELETE_ON_ERROR:

help:
	@echo "make demo   run kernelgraft on the bundled model and write demo-out/"
	@echo "make test   run the tests"
	@echo "make check  ruff and mypy"
	@echo "make clean  remove .venv, demo-out and caches"

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "kernelgraft needs Python 3.11 or newer, \`$(PYTHON)\` is not: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing requirements.lock into $(VENV)" >&2
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements.lock
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-build-isolation -c requirements.lock -e .
	@touch $@

demo: $(STAMP)
	$(BIN)/kernelgraft run tiny --out demo-out

test: $(STAMP)
	$(BIN)/python -m pytest -q -n $(JOBS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo-out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
