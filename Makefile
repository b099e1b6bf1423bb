# make run       set up and run the main job: a ViT teacher distilled into a small ViT, on this machine, in minutes
# make test      set up and run the tests, then lint and types
# make test-xla  the same engine on real torch_xla (CPU), in an environment of its own (7 GB)
# make soak      faults, kills, fuzz, hostile clients, a thousand ranks: 20 minutes at most, one table
# make bench     repeat the measurements under benchmarks/

PYTHON ?= python3
VENV := .venv
XLA := .venv-xla
PIP := -m pip install --quiet --disable-pip-version-check

.PHONY: run test test-xla soak bench lint clean

run: $(VENV)/.run
	$(VENV)/bin/kd-train configs/vit_food.yaml

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest -q --numprocesses 2 --dist loadfile
	@$(MAKE) --no-print-directory lint

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python kd

test-xla: $(XLA)/.xla
	PJRT_DEVICE=CPU $(XLA)/bin/python -m pytest -q tests/xla

soak: $(VENV)/.dev
	$(VENV)/bin/python tools/soak.py

bench: $(VENV)/.run
	$(VENV)/bin/python benchmarks/step.py
	$(VENV)/bin/python benchmarks/teacher.py
	$(VENV)/bin/python benchmarks/cache.py
	$(VENV)/bin/python benchmarks/loading.py
	$(VENV)/bin/python benchmarks/serve.py
	$(VENV)/bin/python benchmarks/seeds.py
	$(VENV)/bin/python benchmarks/cached_run.py
	$(VENV)/bin/python tools/sift_study.py food_mini
	@echo "with data of your own: benchmarks/loading.py --data FOLDER --size 224; benchmarks/timm_distillation.py --timm FOLDER --data FOLDER; tools/sift_study.py cifar10 --root FOLDER"

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

clean:
	rm -rf $(VENV) $(XLA) runs data .pytest_cache .ruff_cache
