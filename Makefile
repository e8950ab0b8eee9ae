# Every target sets up what it needs; `make install` alone does just that.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# With a GPU, name another build: make install TORCH="torch --index-url <wheel index for your CUDA version>"
TORCH  ?=
CPUS   ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() or 1)")

.PHONY: install demo test test-slow lint format bench docs clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH),$(BIN)/pip install --quiet --disable-pip-version-check $(TORCH))
	$(BIN)/pip install --quiet --disable-pip-version-check $(if $(TORCH),,-c constraints.txt) -e '.[all,dev]'
	@touch $@

demo: install
	@$(BIN)/bayesify demo

test: install
	$(BIN)/pytest -n $(CPUS) -q

test-slow: install
	$(BIN)/pytest -n $(CPUS) -q -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m benchmarks.run

docs: install
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .pytest_cache
