# Everything a contributor or a first-time user runs. `make help` lists it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# One worker more than cores, since many tests wait for processes they killed.
WORKERS = -n $(shell $(PYTHON) -c "import os; print(min(8, 1 + (os.cpu_count() or 1)))") --dist loadfile
VLLM_VENV := .venv-vllm
LOOPS_VENV := .venv-loops
SITE_VENV := .venv-site
ECOSYSTEM_VENV := .venv-ecosystem
SEEDS ?= 0

# Tests of TransferQueue that look for the files of its own in-memory backend.
SIMPLE_STORAGE_ONLY := test_tensor_fields or test_storage_saved_is_true or test_load_raises_on_storage_unit_count_mismatch

.DEFAULT_GOAL := help
.PHONY: help run run-sampled seeds recipes smollm2 test test-slow test-browser test-quantise test-vllm test-transferqueue test-loops test-ecosystem faults faults-long coverage mutations lint format schemas docs models site bench gpu clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[train,lora,jobs,files,triton,ray,dev]"
	@touch $@

run: $(INSTALLED)  ## the quickstart: base, specialists, MOPD; ends with the table and runs/quickstart/report.html
	$(BIN)/mopd run jobs/quickstart

run-sampled: $(INSTALLED)  ## the quickstart with sampled-token reverse KL
	$(BIN)/mopd run jobs/quickstart --set 'stages.student.objective="sampled"' --set stages.student.iterations=24 \
	  --store runs/quickstart-sampled

seeds: $(INSTALLED)  ## the quickstart over three seeds and its objectives
	$(BIN)/python jobs/quickstart/seeds.py

recipes: $(INSTALLED)  ## every published recipe, an hour on 2 cores; docs/recipes.md is of SEEDS="0 1 2"
	$(BIN)/python evidence/recipes.py --seeds $(SEEDS)

smollm2: $(INSTALLED)  ## a real language model: on-policy context distillation of SmolLM2-135M
	$(BIN)/mopd run jobs/smollm2

test: $(INSTALLED)  ## the tests
	$(BIN)/python -m pytest -q --durations=10 $(WORKERS)
	$(BIN)/python -m pytest -q -m device tests/unit/test_devices.py tests/unit/train/test_train_device.py
	$(BIN)/python -m pytest -q tests/kernels  # by itself: Triton's interpreter is chosen when triton is first imported

test-slow: $(INSTALLED)  ## what `make test` leaves out: whole jobs, kills, races, ranks
	$(BIN)/python -m pytest -q -m slow
	$(BIN)/python -m pytest -q -m slow tests/kernels

test-browser: $(INSTALLED)  ## the pages in a real browser: needs Chromium (Debian: apt-get install chromium)
	$(BIN)/python -m pytest -q -m browser tests/browser

test-quantise: $(INSTALLED)  ## teachers with rounded weights; last, since torchao slows down every process that finds it
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[quantise]"
	$(BIN)/python -m pytest -q -m quantise

test-transferqueue: $(INSTALLED)  ## this store behind TransferQueue: its own end-to-end tests, and ours
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[transferqueue]"
	$(BIN)/python -m pytest -q tests/transferqueue
	for file in e2e.test_kv_interface_e2e e2e.test_checkpoint_e2e e2e.test_e2e_lifecycle_consistency \
	    test_kv_storage_manager test_storage_client_factory; do \
	  TQ_TEST_BACKEND=MopdStore PYTHONPATH=tests/transferqueue $(BIN)/python -m pytest -q -p upstream \
	    -k "not ($(SIMPLE_STORAGE_ONLY))" --pyargs tests.$$file || exit 1; \
	done

$(LOOPS_VENV)/installed: pyproject.toml constraints.txt requirements-loops.txt
	$(PYTHON) -m venv $(LOOPS_VENV)
	$(LOOPS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -e ".[train,lora,jobs,transferqueue,dev]"
	$(LOOPS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-loops.txt
	@touch $@

test-loops: $(LOOPS_VENV)/installed  ## other trainers' own loops around this store, in an environment of their own
	$(LOOPS_VENV)/bin/python -m pytest -q tests/loops

$(VLLM_VENV)/installed: pyproject.toml requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.txt
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

test-vllm: $(VLLM_VENV)/installed  ## the tests with real vLLM on the CPU, in an environment of their own
	$(VLLM_VENV)/bin/python -m pytest -q tests/vllm

$(ECOSYSTEM_VENV)/installed: pyproject.toml constraints-ecosystem.txt
	$(PYTHON) -m venv $(ECOSYSTEM_VENV)
	$(ECOSYSTEM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-ecosystem.txt -e ".[train,lora,jobs,files,triton,trl,eval,track,dev]" verifiers tinker chz
	$(ECOSYSTEM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-ecosystem.txt --no-deps tinker-cookbook verl skyrl  # their writers alone: they want other versions of what is here
	@touch $@

test-ecosystem: $(ECOSYSTEM_VENV)/installed  ## round trips with real trl, verifiers, datasets, lm-eval and wandb, in an environment of their own
	$(ECOSYSTEM_VENV)/bin/python -m pytest -q tests/ecosystem

faults: $(INSTALLED)  ## inject faults and print the figures
	$(BIN)/python tests/faults/inject.py

faults-long: $(INSTALLED)  ## the same with many more cases (hours)
	$(BIN)/python tests/faults/inject.py --tier long

coverage: $(INSTALLED)  ## branch coverage of the token log by its tests
	$(BIN)/coverage run -m pytest -q tests/unit/rollout
	$(BIN)/coverage report

mutations: $(INSTALLED)  ## break one rule at a time and show which test notices
	$(BIN)/python tests/faults/mutations.py

lint: $(INSTALLED)  ## ruff, mypy --strict (also of the scripts in jobs and evidence), and the form of the container files
	$(BIN)/ruff check --no-cache . && $(BIN)/ruff format --no-cache --check . && $(BIN)/mypy && $(BIN)/mypy $$(find jobs evidence -name "*.py")
	$(BIN)/hadolint containers/Containerfile.*

format: $(INSTALLED)  ## let ruff rewrite what it can
	$(BIN)/ruff check --no-cache --fix-only -q . && $(BIN)/ruff format --no-cache -q .

schemas: $(INSTALLED)  ## write schemas/*/v2.json from tables.py
	$(BIN)/python -m mopd_dataplane.store.format.schemas schemas

docs: $(INSTALLED)  ## write docs/cli.md, docs/fields.md and docs/job.md from help texts, fields and sections of a job file
	$(BIN)/python -m mopd_dataplane.cli.reference > docs/cli.md
	$(BIN)/python -m mopd_dataplane.cli.reference fields > docs/fields.md
	$(BIN)/python -m mopd_dataplane.job.reference docs/job.md

models: $(INSTALLED)  ## measure every model family beside transformers' plain pass, into docs/models.md: minutes
	PYTHONPATH=tests $(BIN)/python tests/model_table.py docs/models.md

$(SITE_VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SITE_VENV)
	$(SITE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt zensical mkdocstrings mkdocstrings-python
	@touch $@

site: $(SITE_VENV)/installed  ## the documentation as a site with search and API reference; follows every link
	$(SITE_VENV)/bin/python docs/site/build.py build/site

bench: $(INSTALLED)  ## plan, loader, store and token log against the limits of this machine
	$(BIN)/mopd bench plan && $(BIN)/mopd bench load && $(BIN)/mopd bench write && $(BIN)/mopd bench wal

PARTS ?= kernels,attention,sampler,step,engine,score,loader,smollm2
gpu:  ## what was never run on a GPU, into docs/benchmarks/gpu.md: PYTHON=… PARTS=kernels,sampler; installs nothing
	PYTHONPATH=.:kernels $(PYTHON) -m mopd_dataplane.bench.gpu --parts $(PARTS)

clean:  ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(VLLM_VENV) $(LOOPS_VENV) $(SITE_VENV) $(ECOSYSTEM_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
