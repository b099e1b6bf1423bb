# make run       set up and run the main job: a ViT teacher distilled into a small ViT, on this machine, in minutes
# make test      set up and run the tests but the slow ones, then lint and types
# make test-slow   fuzz, hostile clients, scale, clusters, further worlds, and the tests that take long
# make test-xla  the same engine on real torch_xla (CPU), in an environment of its own (7 GB)
# make test-floor  the core with the oldest packages that pyproject.toml allows, in an environment of its own (6 GB)
# make gpu       everything that needs an NVIDIA GPU, without a network; TINY=1 rehearses it on a CPU
# make soak      faults, kills, fuzz, hostile clients, a thousand ranks: 20 minutes at most, one table
# make compare   kd against timm's train.py, accuracy over time: TIMM=FOLDER, a checkout of pytorch-image-models
# make mutants  300 small mistakes in kd/, and which of them the tests miss; hours, resumable
# make proof     what a teacher with pretrained weights adds, three seeds: DATA=FOLDER WEIGHTS=FOLDER; hours, resumable
# make story     a script with the usual mistakes, and six changes that its findings name: 15 CPU minutes, resumable
# make docs      the documentation as a site with search, in build/site, which works from a folder
# make bench     repeat the measurements under benchmarks/

PYTHON ?= python3
VENV := .venv
XLA := .venv-xla
FLOOR := .venv-floor
FLOOR_TESTS := tests/test_floor.py tests/unit/config tests/contracts/test_backends.py tests/contracts/test_losses.py tests/reference \
	tests/unit/engine tests/unit/parts/tasks tests/unit/parts/sifters tests/unit/files/test_checkpoint.py \
	tests/unit/models/test_cache.py tests/unit/models/test_load.py tests/unit/models/test_classifier.py \
	tests/distributed/test_equal_worlds.py tests/distributed/test_resume.py tests/distributed/test_stand_ins.py
# one worker more than cores: some tests wait for processes
WORKERS := $(or $(KD_TEST_WORKERS),$(shell echo $$(($$(nproc 2>/dev/null || sysctl -n hw.ncpu) + 1))))
PYTEST := -m pytest -q --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0
# not compiled: of 24,000 modules a run imports a few thousand, and all of them took 66 CPU seconds
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
# so the first import writes what later ones read; without it `import torch` takes 4.9 CPU seconds in each process, not 2.0
unexport PYTHONDONTWRITEBYTECODE

.PHONY: docs run test test-slow test-xla test-floor gpu soak mutants compare proof story bench lint clean

run: $(VENV)/.run
	$(VENV)/bin/kd-train configs/vit_food.yaml

test: $(VENV)/.dev
	@$(MAKE) --no-print-directory lint & \
		$(VENV)/bin/python $(PYTEST) -m "not slow"; tests=$$?; wait $$! && exit $$tests

test-slow: $(VENV)/.dev
	$(VENV)/bin/python $(PYTEST) -m slow

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

docs: $(VENV)/.dev
	$(VENV)/bin/python tools/site.py build

test-xla: $(XLA)/.xla
	PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest -q tests/xla

test-floor: $(FLOOR)/.floor
	$(FLOOR)/bin/python -m pytest -q --numprocesses $(WORKERS) --dist loadfile -m "not slow" $(FLOOR_TESTS)

# With the packages that are there: PYTHON's where there is no $(VENV). OUT: folder of the CSV. TIMM: a checkout of timm.
gpu:
	PYTHONPATH=. $(firstword $(wildcard $(VENV)/bin/python) $(PYTHON)) benchmarks/gpu.py \
		$(if $(TINY),--tiny) $(if $(TIMM),--timm $(TIMM)) $(if $(OUT),--out $(OUT))

soak: $(VENV)/.dev
	$(VENV)/bin/python tools/soak.py

mutants: $(VENV)/.dev
	$(VENV)/bin/python $(PIP) 'mutmut>=3.8'
	$(VENV)/bin/python tools/mutants.py $(MUTANTS)

ARGS ?= run.epochs=10
# ARGS: other arguments of tools/compare.py, such as --config FILE, --seeds 0, or key=value of the configuration
compare: $(VENV)/.run
	$(VENV)/bin/python tools/compare.py --timm $(TIMM) $(ARGS)

proof: $(VENV)/.dev
	$(VENV)/bin/python benchmarks/proof.py --data $(DATA) --weights $(WEIGHTS) $(PROOF)

# STORY: other arguments of benchmarks/story.py, such as --images 320
story: $(VENV)/.run
	$(VENV)/bin/python benchmarks/story.py $(STORY)

bench: $(VENV)/.run
	$(VENV)/bin/python benchmarks/loading.py
	$(VENV)/bin/python benchmarks/serve.py
	$(VENV)/bin/python benchmarks/cached_run.py
	$(VENV)/bin/python benchmarks/regimes.py --work runs/regimes
	$(VENV)/bin/python benchmarks/losses.py --work runs/regimes
	@echo "with data of your own: benchmarks/loading.py --data FOLDER --size 224; benchmarks/remote.py --data FOLDER; benchmarks/timm_distillation.py --timm FOLDER --data FOLDER; benchmarks/sifting.py --cifar FOLDER --tiny FOLDER"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml | $(VENV)/bin/python
	@echo "installing torch, timm and the rest into $(VENV) (one to three minutes)"
	$(VENV)/bin/python $(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	@echo "installing the tests' packages into $(VENV)"
	$(VENV)/bin/python $(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.run

$(XLA)/.xla: pyproject.toml
	@echo "installing torch 2.9.1 and torch_xla 2.9.0 into $(XLA) (two to four minutes)"
	test -x $(XLA)/bin/python || $(PYTHON) -m venv $(XLA)
	$(XLA)/bin/python $(PIP) --editable '.[xla]' pytest pytest-timeout
	@touch $@

$(FLOOR)/.floor: pyproject.toml
	@echo "installing torch 2.4.1 and the oldest of the other packages into $(FLOOR) (two to four minutes)"
	test -x $(FLOOR)/bin/python || $(PYTHON) -m venv $(FLOOR)
	sed -n '/^dependencies/,/^]/s/^ *"\([a-z]*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml > $(FLOOR)/oldest.txt
	$(FLOOR)/bin/python $(PIP) --requirement $(FLOOR)/oldest.txt --editable . pytest pytest-timeout pytest-xdist hypothesis jsonschema
	@touch $@

clean:
	rm -rf $(VENV) $(XLA) $(FLOOR) runs data .pytest_cache .ruff_cache
