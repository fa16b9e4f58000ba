# make run    set up what is needed, then show the main job
# make test   set up every framework, then run every test
# make lint   format, lint, types       make prove   proofs of the rules
# make kills  kill runs and resume them, a hundred times an adapter
# make fuzz   random scripts over all adapters
# make mutants      faults in a copy, each of which some test must find
# make test-doctor  what the doctor says of every script in tests/doctor
# make bench  measure                   make clean   remove .venv, .venv-mxnet

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip --disable-pip-version-check -qq install --prefer-binary -c constraints.txt

# MXNet 1.9.1 wants a NumPy that nobody else wants, and that NumPy a Python up to 3.11.
MXNET     := .venv-mxnet
MXNET_PIP := $(MXNET)/bin/pip --disable-pip-version-check -qq install --prefer-binary -c constraints-mxnet.txt

# What the frameworks need; tests and examples inherit it.
export ONEDNN_MAX_CPU_ISA := AVX512_CORE_FP16
export TF_CPP_MIN_LOG_LEVEL := 3
export HF_HUB_OFFLINE := 1
export JAX_PLATFORMS := cpu
export OMP_NUM_THREADS ?= 2

# One pytest process a folder: two frameworks never meet in one process. The longest come first.
SUITES := torch observe integrations keras-tensorflow jax keras-jax core keras-torch mxnet doctor-slice
SUITES += logs browser numpy

.PHONY: run test lint prove kills fuzz mutants bench docs clean always

run: $(VENV)/.run
	@$(BIN)/gradlift run examples/torch_gpt.py

# Two suites at a time, a thread each; what a suite has to say is shown when it is through.
SYNC := $(if $(filter output-sync,$(.FEATURES)),-Orecurse)
test: export OMP_NUM_THREADS := 1
test: $(VENV)/.test
	@$(MAKE) --no-print-directory -j2 -k $(SYNC) $(SUITES:%=test-%)

test-keras-%: $(VENV)/.test always
	@echo "== tests/keras on $*"
	@KERAS_BACKEND=$* $(BIN)/pytest tests/keras

test-mxnet: always
	@if $(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then \
		$(MAKE) --no-print-directory $(MXNET)/.test && \
		echo "== tests/mxnet" && $(MXNET)/bin/pytest --disable-warnings tests/mxnet; \
	else \
		echo "== tests/mxnet: left out, MXNet 1.9.1 needs Python 3.11 or older and this is $$($(PYTHON) -V)"; \
	fi

# `make test` has a slice of the scripts; this is all of them, and the matrix.
test-doctor: export DOCTOR := all
test-doctor test-doctor-slice: $(VENV)/.test always
	@echo "== tests/doctor"
	@OMP_NUM_THREADS=1 $(BIN)/pytest tests/doctor

test-%: $(VENV)/.test always
	@echo "== tests/$*"
	@$(BIN)/pytest tests/$*

lint: $(VENV)/.test
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

# What the rules promise, proved by z3 from their own source; faulty rules must be refuted.
prove: $(VENV)/.test
	@$(BIN)/python -m proofs.prove --mutants

# Killed at any instant and resumed: the same bits, and a journal that can be read.
kills: export OMP_NUM_THREADS := 1
kills: $(VENV)/.test
	@PYTHONPATH=tests $(BIN)/python -m kills

# Whatever a user may do, in any order, on every adapter (MXNet if its environment is there):
# hours on one core. STEPS=20000 for a short one.
STEPS ?= 1000000
SEED ?= 0
fuzz: $(VENV)/.test
	@PYTHONPATH=tests $(BIN)/python -m machines.fuzz --steps $(STEPS) --seed $(SEED)

# Deliberate faults, put into a copy of the tree one by one: some test must fail.
mutants: export OMP_NUM_THREADS := 1
mutants: $(VENV)/.test
	@PYTHONPATH=tests $(BIN)/python -m mutants -j 2

bench: $(VENV)/.test
	@$(BIN)/python benchmarks/core.py
	@$(BIN)/python benchmarks/controllers.py
	@$(BIN)/python benchmarks/training.py
	@$(BIN)/python benchmarks/report.py
	@$(BIN)/python benchmarks/torch_step.py
	@$(BIN)/python benchmarks/torch_masters.py
	@$(BIN)/python benchmarks/torch_overhead.py
	@$(BIN)/python benchmarks/torch_ranks.py
	@$(BIN)/python benchmarks/jax_step.py
	@$(BIN)/python benchmarks/keras_step.py

docs: $(VENV)/.test
	@$(BIN)/python docs/draw_rules.py
	@$(BIN)/python benchmarks/controllers.py
	@$(BIN)/python docs/draw_auto.py

# Light: enough for the example. torch goes first and alone: pinned by its exact version it takes
# the CPU build, and what comes after finds it there.
$(VENV)/.run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV) ..."
	@$(PIP) torch==2.13.0
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e ".[numpy,torch,report]"
	@touch $@

# Everything. deepspeed has no wheel and is built here (none of its ops), in this environment, so
# that no isolated build pulls another torch.
$(VENV)/.test: $(VENV)/.run
	@echo "Setting up the frameworks for the tests (a few minutes) ..."
	@$(PIP) setuptools wheel
	@$(PIP) --no-build-isolation -e ".[dev]"
	@touch $@

$(MXNET)/.test: pyproject.toml constraints-mxnet.txt
	@test -x $(MXNET)/bin/python || $(PYTHON) -m venv $(MXNET)
	@echo "Setting up $(MXNET) ..."
	@$(MXNET_PIP) hatchling editables pytest hypothesis
	@$(MXNET_PIP) --no-build-isolation -e ".[mxnet]"
	@touch $@

clean:
	rm -rf $(VENV) $(MXNET)
