# make demo | test | check | compile | clean. The environment is .venv, made from requirements.lock; PYTHON chooses the
# interpreter.
PYTHON ?= python3
JOBS ?= 2
VENV := .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
TOOLCHAIN := $(VENV)/toolchain

.PHONY: help demo test check compile clean
.DELETE_ON_ERROR:

help:
	@echo "make demo     run kernelgraft on the bundled model and write demo-out/"
	@echo "make test     run the tests"
	@echo "make check    ruff and mypy"
	@echo "make compile  compile every cuTile kernel for five architectures; needs no GPU"
	@echo "make clean    remove .venv, demo-out and caches"

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

$(TOOLCHAIN)/.installed: requirements-compile.lock $(STAMP)
	@rm -rf $(TOOLCHAIN)
	@echo "Installing requirements-compile.lock into $(TOOLCHAIN)" >&2
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --target $(TOOLCHAIN) -r requirements-compile.lock
	@touch $@

# The compiler is NVIDIA's and stays out of .venv's own packages: cuTile finds it on the path of modules.
compile: $(TOOLCHAIN)/.installed
	PYTHONPATH=$(TOOLCHAIN) $(BIN)/kernelgraft inventory --compile

clean:
	rm -rf $(VENV) demo-out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
