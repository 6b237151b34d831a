# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := .ci/constraints.txt

# Else each of the many processes that tests and services start compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install upgrade demo test test-long check bench gpu-check clean

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'
	@touch $@

# The newest of every package, and what they are written down. Commit that once `make check` and `make test` pass.
upgrade: install
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]'
	grep '^#' $(CONSTRAINTS) > $(CONSTRAINTS).new
	$(BIN)/python -m pip freeze --exclude-editable | grep -v '^torch==' | sed 's/==/<=/' >> $(CONSTRAINTS).new
	mv $(CONSTRAINTS).new $(CONSTRAINTS)
	touch $(STAMP)

demo: install
	$(BIN)/python -m windlass.service.demo

# Side by side, as tests/conftest.py says. Jobs yield to whatever else runs, which must not be the tests beside them: all
# yield as much as a process can.
test: install
	nice -n 19 $(BIN)/python -m pytest --numprocesses=auto

test-long: install
	$(BIN)/python -m pytest -m 'not gpu' --durations=20

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: install
	$(BIN)/python -m benchmarks

# Runs in one process, without Ray or FastAPI, on whatever `python3` has torch; skips with a reason where there is no GPU.
# In two calls: make gpu-check ARGS="--part parity", and ARGS="--part speed".
gpu-check:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) .demo
