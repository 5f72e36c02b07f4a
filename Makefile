# `make train` and `make test` set themselves up: they need python3 (3.11 or newer), pip and gcc, nothing else.

PYTHON = python3
# Bytecode is written: each of a thousand processes would compile the package anew.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/python -m pytest
PIP = .venv/bin/python -m pip --disable-pip-version-check
CPU_BUILDS = https://download.pytorch.org/whl/cpu

# The stamp holds the TORCH that was asked for. It stays the choice until another one is asked for.
STAMP = .venv/.installed
INSTALLED := $(shell cat $(STAMP) 2>/dev/null)
TORCH = $(or $(INSTALLED),torch==2.13.0)
ifneq ($(TORCH),$(INSTALLED))
.PHONY: $(STAMP)
endif

.PHONY: help train check test test-all test-peers bench docs wheels release clean

help:  ## list these commands (the default)
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Options: ARGS='...' is passed on; TORCH=torch==2.11.0 and PYTHON=python3.12 choose what .venv is made of."

train: $(STAMP)  ## train a small GPT
	.venv/bin/python examples/train_gpt.py $(ARGS)

check: $(STAMP)  ## lint, types, architecture and one test of every kind: before each commit
	.venv/bin/ruff check
	.venv/bin/mypy
	$(PYTEST) -n 2 --one-of-each $(ARGS)

# Three processes for two cores: tests of several ranks often wait for each other.
test: $(STAMP)  ## run the tests, but for the long proofs
	$(PYTEST) -n 3 --dist worksteal --forks -m "not long" $(ARGS)

# Two files at a time, so that a run that was cut off goes on where it was: what passed is noted until a source changes.
PARTS = $(patsubst tests/%.py,.tests/%.passed,$(wildcard tests/test_*.py))
SOURCES = pyproject.toml $(shell git ls-files globaltensor csrc tests benchmarks examples docs README.md 2>/dev/null)

test-all: $(STAMP)  ## run all the tests, file by file; go on where the last run stopped
	@$(MAKE) --no-print-directory --keep-going -j 2 --output-sync $(PARTS)

.tests/%.passed: tests/%.py $(SOURCES)
	$(PYTEST) $< $(ARGS) || test $$? = 5
	@mkdir -p .tests && touch $@

test-peers: $(STAMP)  ## run OneFlow's own tests of global tensors: PEERS=FOLDER is a clone of it
	OMP_NUM_THREADS=1 .venv/bin/python tests/peers/run.py $(PEERS)

bench: $(STAMP)  ## run the benchmarks
	.venv/bin/globaltensor bench $(ARGS)

wheels:  ## build the wheels into dist/, for each Python 3.11 to 3.13 that is installed
	$(PYTHON) .github/scripts/wheels.py $(ARGS)

release: $(STAMP)  ## version, changelog, tag, wheels, docs: VERSION=0.2.0; ARGS=--dry-run changes nothing
	.venv/bin/python .github/scripts/release.py $(VERSION) $(ARGS)

# Another interpreter that has the extra `docs` is named by DOCS_PYTHON=...; then no .venv is made.
DOCS_PYTHON = .venv/bin/python

docs: $(if $(filter .venv/bin/python,$(DOCS_PYTHON)),$(STAMP))  ## build the site: build/site/index.html
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR) $(DOCS_PYTHON) -m sphinx --fail-on-warning --fresh-env --quiet \
	  -c docs -d build/doctrees -b html . build/site
	@echo "Open build/site/index.html: it needs no server and no network."

clean:  ## remove .venv and all that was built
	rm -rf .venv .tests build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
	find globaltensor -name '*.so' -delete

$(STAMP): pyproject.toml setup.py $(wildcard csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "globaltensor needs Python 3.11 or newer. Name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu type: sudo apt install python3-venv"; exit 1; }
	test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	$(PIP) install -q --upgrade pip setuptools
# Without a GPU, torch's build without CUDA: from where pip already looks, or else from pytorch.org.
	@nvidia-smi -L >/dev/null 2>&1 || $(PIP) install --no-deps '$(TORCH)+cpu' 2>/dev/null || \
	  $(PIP) install --no-deps --extra-index-url $(CPU_BUILDS) '$(TORCH)'
	$(PIP) install '$(TORCH)'
	$(PIP) install -q --no-build-isolation -e '.[all]'
	@.venv/bin/python -c 'import torch; print("Ready: torch", torch.__version__)'
	@echo '$(TORCH)' >$(STAMP)
