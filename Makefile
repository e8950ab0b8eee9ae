# Every target sets up what it needs first; nothing but Python 3.11 or newer and make has to be there.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CONSTRAINTS := constraints.txt
INSTALL := bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS)
PIP    := $(VENV)/$(INSTALL)
# torch is the build that constraints.txt and pip's own configuration lead to. With a GPU, say which one to take:
#   make install TORCH="torch==2.13.0 --index-url <wheel index of your CUDA version>"
TORCH  ?= torch

.PHONY: install demo test test-all test-slow test-gpu test-lowest coverage lint format bench bench-peers docs wheel smoke clean help

help:
	@echo "make install   environment in $(VENV)         make lint    ruff and mypy"
	@echo "make demo      all methods on toy problems   make bench   ratios and the aims they meet; overwrites benchmarks/results"
	@echo "make test      the tests                     make docs    the site, in site/"
	@echo "make test-all  slow ones too, all extras     make wheel   wheel and source distribution, in dist/"
	@echo "make test-lowest  with the lowest versions   make smoke   both, tried in empty environments"
	@echo "make coverage  share of lines that tests run"

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml papers/pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"python {v[0]}.{v[1]} is too old; name a newer one: make install PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e '.[all,dev]' -e ./papers
	@touch $@

demo: install
	@$(BIN)/bayesify demo

# One thread per worker: workers share the cores already. Each begins with files of its own, so that what a file sets up is
# set up once, and takes tests from others when it is done. Compiled files are kept: tests start dozens of processes. Memory that
# was freed is kept for the next tensors (32 MiB, 512 MiB), which halves the time in the kernel.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=536870912 \
  $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal
test: install
	$(PYTEST)

# Everything that needs no GPU, slow tests too, with the extras that are too large for `all` and with Triton, whose interpreter runs the
# kernels of draws on the CPU. A build of torch without CUDA does not install it.
test-all: install
	$(PIP) -e '.[lora,botorch,dask,ray]' triton
	$(PYTEST) -m 'not gpu'

test-slow: install
	$(BIN)/python -m pytest -q -m slow

test-gpu: install
	$(BIN)/python -m pytest -q -m gpu

# With the lowest versions that pyproject.toml allows, in an environment of its own.
test-lowest:
	$(MAKE) test VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt TORCH=torch

# A table of files with the lines that no test runs, and the whole as coverage.xml. Lines that only other processes run do not count.
coverage: install
	$(PIP) pytest-cov
	$(PYTEST) --cov=bayesify --cov-report=xml --cov-report=term-missing:skip-covered

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Overwrites the committed benchmarks/results and the tables of docs/speed.md with this machine's figures.
bench: install
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m tools.speed_table
	$(BIN)/python -m benchmarks.aims

# laplace-torch beside ours, in an environment of its own: it asks for packages that the library does not want (torchvision).
bench-peers: .venv-peers/.installed
	PYTHONPATH=src .venv-peers/bin/python -m benchmarks.peers

.venv-peers/.installed: constraints.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/$(INSTALL) $(TORCH)
	.venv-peers/$(INSTALL) safetensors rich typer torchmetrics opt-einsum scipy tqdm einops
	.venv-peers/$(INSTALL) --no-deps laplace-torch==0.3 asdfghjkl==0.1a4 backpack-for-pytorch curvlinops-for-pytorch \
		einconv unfoldNd linear_operator
	@touch $@

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

wheel: install
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# Extras to try, all by default: make smoke EXTRAS="sklearn onnx"
smoke: wheel
	$(BIN)/python -m tools.smoke --torch "$(TORCH)" $(EXTRAS)

clean:
	rm -rf $(VENV) .venv-peers .venv-lowest build dist site coverage.xml .mypy_cache .ruff_cache .pytest_cache
