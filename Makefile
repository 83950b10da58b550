# make demo and make test do all their set-up: a virtual environment in .venv, then the package and what it needs.

VENV ?= .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
DEMO ?= demo-zoo

.PHONY: demo test lint format bench small-zoo soak compat sanitize clean

demo: $(VENV)/.demo
	@BIN="$(BIN)" tests/demo.sh "$(DEMO)"

test: $(VENV)/.dev
	"$(BIN)/python" -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(VENV)/.dev
	"$(BIN)/ruff" format --check .
	"$(BIN)/ruff" check .
	"$(BIN)/mypy"

format: $(VENV)/.dev
	"$(BIN)/ruff" format .
	"$(BIN)/ruff" check --fix .

small-zoo: $(VENV)/.dev
	"$(BIN)/python" tests/benchmarks/small_zoo.py $(ARGS)

bench: $(VENV)/.dev
	"$(BIN)/python" tests/benchmarks/run.py $(ARGS)

soak: $(VENV)/.dev
	"$(BIN)/python" tests/soak.py $(ARGS)

compat:
	tests/compat.sh

sanitize: $(VENV)/.dev
	"$(BIN)/python" tests/generators/engines/sanitize.py

clean:
	rm -rf "$(VENV)" "$(DEMO)"

# torch and torchvision come through pip, so that its own settings (an index, a find-links folder) decide which wheels.
$(VENV)/.base: pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: found no Python 3.11 to 3.13; install one, or name it: make PYTHON=python3.12" >&2; exit 2; }
	test -x "$(BIN)/python" || "$(PYTHON)" -m venv "$(VENV)"
	"$(BIN)/python" -m pip install --quiet "torch>=2.9" "torchvision>=0.24"
	@touch "$@"

$(VENV)/.demo: $(VENV)/.base
	"$(BIN)/python" -m pip install --quiet --editable ".[demo]"
	@touch "$@"

$(VENV)/.dev: $(VENV)/.base
	"$(BIN)/python" -m pip install --quiet --editable ".[dev]"
	@touch "$@" "$(VENV)/.demo"
