# make demo | make test: each does all of its own set-up and can be run again.
# A virtual environment that is active is used; otherwise .venv is made here.

PYTHON ?= python3
VENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
PY := $(VENV)/bin/python
OUTER_PATH := $(PATH)
PATH := $(VENV)/bin:$(PATH)
export PATH
# Of this environment alone: extensions built for another torch would be loaded without a question.
export TORCH_EXTENSIONS_DIR := $(VENV)/torch_extensions
unexport PYTHONHOME

PYTEST := $(PY) -m pytest --ignore=tests/mpi -rs
# Fast tests must end within this many seconds, all of them together.
TEST_LIMIT_S ?= 2400
MPI_RANKS ?= 2

.PHONY: env demo test test-all test-mpi lint clean help

help:
	@echo "make demo      train a small GPT natively and compressed, then by a dense optimizer and by SCAPE, and compare"
	@echo "make test      lint and all tests that take seconds (make test-all: also the slow ones)"
	@echo "make test-mpi  the tests that run under mpirun"
	@echo "make clean     remove everything that was built or written here"

env:
	@PATH="$(OUTER_PATH)" $(PYTHON) requirements/setup_env.py

demo: env
	$(PY) examples/demo.py

test: env lint test-mpi
	timeout --foreground -k 30 $(TEST_LIMIT_S) $(PYTEST) -m "not slow" tests

test-all: env lint test-mpi
	$(PYTEST) tests

lint: env
	$(PY) -m ruff check .

# The launcher's variables must be unset, or DeepSpeed does not ask MPI; it does ask `hostname`.
# -x: where one rank fails, the ranks are out of step, and mpirun ends them all.
test-mpi: env
	@if ! ls tests/mpi/test_*.py >/dev/null 2>&1; then \
	    echo "test-mpi: no tests in tests/mpi"; \
	elif ! command -v hostname >/dev/null; then \
	    echo "test-mpi: NOT RUN: DeepSpeed needs the command 'hostname' under mpirun" \
	         "(Debian, Ubuntu: apt-get install hostname)"; \
	    test -z "$(CI)"; \
	else \
	    set -x; env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_SIZE -u MASTER_ADDR -u MASTER_PORT \
	        OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
	        timeout --foreground -k 30 600 mpirun -n $(MPI_RANKS) --oversubscribe --tag-output \
	        $(PY) -m pytest -x -p no:cacheprovider tests/mpi; \
	fi

clean:
	rm -rf .venv .venv.lock build dist runs *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
