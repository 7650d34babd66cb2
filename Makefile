# Loopwright's commands. `make` alone lists them; each is one or two commands that work without make, too.
#   make train STEPS=200 DEVICES=1      a small GPT on the source of Python's standard library
#   make test TESTS=tests/unit/trainer  a part of the tests

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
XLA    := .venv-xla
COMPAT := .venv-compat
PEERS  := .venv-peers
DOCS   := .venv-docs
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# What the examples and the tests take from the command line.
STEPS   ?=
DEVICES ?=
FRESH   ?=
ARGS    ?=
WHEELS  ?=
TESTS   ?= tests

# What runs with torch 2.9 as well, in less than two minutes: devices, precisions, strategies, Fabric, and the Trainer.
TORCH29 := $(addprefix tests/unit/,accelerators precision strategies fabric) \
           $(patsubst %,tests/unit/trainer/%.py,loop/test_window loop/test_manual test_evaluate test_checkpoints test_precision test_limits) \
           tests/integration/ddp/test_ddp.py tests/integration/fsdp/test_fsdp.py \
           tests/integration/strategies/test_conformance.py --ignore-glob "*deepspeed*"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train digits gpu test test-slow test-mesh test-gpu test-xla test-engines test-lightning test-compat check format bench bench-peers docs docs-test all clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

setup: $(VENV)/installed-dev  ## make .venv with everything that developers need

train: $(VENV)/installed  ## train a small GPT for some minutes: STEPS=, DEVICES=, FRESH=1, ARGS="--help"
	@$(BIN)/python examples/gpt/train.py $(if $(STEPS),--steps $(STEPS)) $(if $(DEVICES),--devices $(DEVICES)) $(if $(FRESH),--fresh) $(ARGS)

digits: $(VENV)/installed-examples  ## train a classifier of handwritten digits, in seconds
	@$(BIN)/python examples/digits.py $(ARGS)

test: export OMP_NUM_THREADS ?= 1
test: setup $(VENV)/apart/installed  ## run the tests: TESTS=path, ARGS="-k name"
	$(BIN)/python -m pytest -c tests/pytest.ini --rootdir tests -n 2 --dist worksteal -m "not gpu and not slow" $(TESTS) $(ARGS)

test-slow: export OMP_NUM_THREADS ?= 1
test-slow: setup $(VENV)/apart/installed $(VENV)/hydra/installed $(VENV)/lightning/installed  ## run the tests that take long: the examples, kills, the benchmarks in short
	$(BIN)/python -m pytest -c tests/pytest.ini --rootdir tests -n 2 --dist worksteal -m "slow and not gpu" $(TESTS) $(ARGS)

test-mesh: export OMP_NUM_THREADS ?= 1
test-mesh: setup  ## run the tests of N-D parallelism, on up to eight processes: ARGS="-k name"
	$(BIN)/python -m pytest -c tests/pytest.ini --rootdir tests -n 2 --dist worksteal -m "not gpu" tests/integration/mesh $(ARGS)

gpu: $(VENV)/installed-gpu  ## measure on a GPU, at most ten minutes; writes benchmarks/GPU.md: WHEELS=folder
	$(BIN)/python benchmarks/accelerator/run.py $(ARGS)

test-gpu: setup  ## run the tests that need a GPU
	$(BIN)/python -m pytest -c tests/pytest.ini --rootdir tests -m gpu $(TESTS) $(ARGS)

test-xla: export OMP_NUM_THREADS ?= 1
test-xla: $(XLA)/installed  ## run the tests of XLA, in .venv-xla with torch 2.9: ARGS="-k name"
	$(XLA)/bin/python -m pytest -c tests/integration/xla/pytest.ini --rootdir tests/integration/xla -n 2 tests/integration/xla $(ARGS)
	$(XLA)/bin/python -m pytest -c tests/pytest.ini --rootdir tests -n 2 -m "not gpu and not slow" $(TORCH29) \
		-k "not deepspeed" $(ARGS)

test-engines: export OMP_NUM_THREADS ?= 1
test-engines: setup  ## run the tests of DeepSpeed that take minutes: compiled operators, disks: ARGS="-k name"
	-@[ -e /usr/include/libaio.h ] || [ "$$(id -u)" != 0 ] || { apt-get update -qq && apt-get install -qq -y libaio-dev; }
	$(BIN)/python -m pytest -c tests/pytest.ini --rootdir tests -o timeout=2400 tests/integration/deepspeed/slow $(ARGS)

# Two interpreters in each test, and one worker for each file: files share what they ran.
test-lightning: export LIGHTNING_PYTHON := $(CURDIR)/$(BIN)/python
test-lightning: export PYTHONPATH := $(CURDIR)/$(VENV)/lightning
test-lightning: export ACCELERATE_FOLDER := $(CURDIR)/$(VENV)/accelerate
test-lightning: export OMP_NUM_THREADS ?= 1
test-lightning: setup $(VENV)/lightning/installed $(VENV)/accelerate/installed  ## compare with Lightning and Accelerate themselves: names, trainings, checkpoints: ARGS="-k name"
	$(BIN)/python -m pytest -c tests/pytest.ini --rootdir tests -n 2 --dist loadfile -o timeout=2400 -m "not libraries" tests/compat tests/compat_accelerate $(ARGS)

test-compat: export LIGHTNING_PYTHON := $(CURDIR)/$(COMPAT)/bin/python
test-compat: setup $(COMPAT)/installed  ## the same, and with libraries built on Lightning, in .venv-compat: ARGS="-k name"
	$(BIN)/python -m pytest -c tests/pytest.ini --rootdir tests -o timeout=2400 tests/compat $(ARGS)

check: setup $(VENV)/types/loopwright  ## lint, formatting, phrases in the documentation, and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/python docs/check_english.py
	MYPYPATH=$(VENV)/types:examples:examples/gpt:benchmarks:docs $(BIN)/mypy --strict -p loopwright

format: setup  ## format the code and apply automatic fixes
	$(BIN)/ruff check --fix-only . && $(BIN)/ruff format .

bench: setup  ## measure against a hand-written loop; writes benchmarks/RESULTS.md
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-peers: setup $(PEERS)/installed  ## measure a step beside other trainers, in .venv-peers
	$(BIN)/python benchmarks/run.py --only peers $(ARGS)

docs docs-test: export NO_MKDOCS_2_WARNING := 1
docs: $(VENV)/installed $(DOCS)/installed  ## write docs/lifecycle.md, and the site: open site/index.html
	$(BIN)/python -m loopwright lifecycle > docs/lifecycle.md
	$(DOCS)/bin/mkdocs build --quiet

docs-test: setup $(DOCS)/installed  ## run the examples of README and docs, and look at the site in a browser
	$(BIN)/python docs/check_docs.py
	$(DOCS)/bin/mkdocs build --quiet --strict
	$(BIN)/python docs/check_site.py

all: check test test-slow test-mesh test-lightning docs-test  ## what CI runs, but for test-xla

clean:  ## remove caches and generated pages; keeps .venv and runs/
	rm -rf build site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Each installation is a stamp file, so that a second `make` costs nothing until pyproject.toml or constraints.txt changes.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/installed-examples: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[examples]'
	@touch $@ $(VENV)/installed

# For `make gpu`, from a folder of wheels where there is no network; CONTRIBUTING.md says which.
$(VENV)/installed-gpu: pyproject.toml constraints.txt | $(BIN)/python
	[ -e $(VENV)/installed-dev ] || $(PIP) $(if $(WHEELS),--no-index --find-links $(WHEELS)) -e . numpy pytest pytest-timeout
	@touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/installed $(VENV)/installed-examples

# torch_xla works with one version of torch only, so that it has an environment of its own: a gigabyte to download.
$(XLA)/installed: tests/integration/xla/support/environment.py tests/integration/xla/support/stub_cuda.py pyproject.toml
	$(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python tests/integration/xla/support/environment.py
	@touch $@

# Hydra, with the OmegaConf that it asks for, in a folder that only its test puts on the path.
$(VENV)/hydra/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(@D) hydra-core==1.3.2 omegaconf==2.3.0 \
		antlr4-python3-runtime==4.9.3
	@touch $@

# Packages that ask for other versions than .venv has, in a folder that only their tests put on the path.
$(VENV)/apart/installed: tests/apart.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(@D) -r $<
	@touch $@

# Lightning, in a folder that only its tests put on the path: 15 MB, with the torch, torchmetrics and jsonargparse of .venv.
$(VENV)/lightning/installed: tests/compat/lightning.txt | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(@D) -r $<
	@touch $@

# Accelerate, in a folder that only the processes of its tests put on the path; what it imports is in .venv.
$(VENV)/accelerate/installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(@D) accelerate==1.15.0
	@touch $@

# Lightning, and libraries that are built on it, with the torch of constraints.txt: a gigabyte to download.
$(COMPAT)/installed: tests/compat/environment.py tests/compat/requirements.txt tests/compat/lightning.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(COMPAT)
	$(COMPAT)/bin/python tests/compat/environment.py
	@touch $@

# Other trainers, for `make bench-peers` and `python benchmarks/run.py --only recipes`, with the torch of constraints.txt.
$(PEERS)/installed: benchmarks/peers_environment.py benchmarks/peers_requirements.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python benchmarks/peers_environment.py
	@touch $@

# The generator of the site; it reads the package's source without importing it, so torch is not installed here.
$(DOCS)/installed: docs/site/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/site/requirements.txt
	@touch $@

# The repository root is the package, whatever its folder is called; mypy finds it here under its own name. Examples and
# benchmarks are not part of it, but mypy checks them as well, and finds their imports next to them.
$(VENV)/types/loopwright: | $(BIN)/python
	mkdir -p $(VENV)/types && ln -sfn ../.. $@
