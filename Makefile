# Two commands do all the set-up: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS_STAMP := $(VENV)/.peers-installed
CONSTRAINTS := .ci/constraints.txt
# On a terminal pip shows what it downloads. Elsewhere errors only: warnings about its local set-up help nobody here.
QUIET := $(if $(MAKE_TERMOUT),,-qq)
PIP := $(BIN)/python -m pip install $(QUIET) --root-user-action=ignore --disable-pip-version-check

# Else each of the many processes that tests and services start compiles all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install upgrade demo test test-long check bench gpu-check clean

install: $(STAMP)

$(STAMP): pyproject.toml $(CONSTRAINTS)
	@echo "Installing windlass, PyTorch and the tests' packages into $(VENV)/; this takes some minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade pip
	@$(PIP) -c $(CONSTRAINTS) -e '.[dev]'
	@echo "Installed"
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

# In shards: what has passed is not run again. `make test-long ARGS="--shards 1 2"` runs two of twenty.
test-long: install
	$(BIN)/python -m tests.support.long_tests $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python .ci/check_words.py

bench: $(PEERS_STAMP)
	$(BIN)/python -m benchmarks

# DeepSpeed's build looks at the torch that is there, so it has no environment of its own. What builds need comes first.
$(PEERS_STAMP): $(STAMP)
	@echo "Installing what the benchmarks compare with: DeepSpeed and fio"
	@bash .ci/install_packages.sh fio g++ libaio-dev
	@$(PIP) -c $(CONSTRAINTS) editables setuptools
	@DS_BUILD_OPS=0 $(PIP) --no-build-isolation -c $(CONSTRAINTS) -e '.[bench]'
	@touch $@

# Runs in one process, without Ray or FastAPI, on whatever `python3` has torch; skips with a reason where there is no GPU.
# Each case takes at most ten minutes: make gpu-check ARGS="--list", ARGS="--only link", ARGS="--resume"; see docs/gpu.md.
gpu-check:
	PYTHONPATH=src $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m benchmarks.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) .demo
