# The whole developer interface. `make demo` shows what this is, `make test` says whether it is right.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A second environment without torch, onnx and transformers: what is deployed.
BARE := .venv-deployed
PIP := --quiet --disable-pip-version-check
CODE := models exporters runtime toolkit tests examples benchmarks
BUNDLE := bundles/zh-en
# A third one, with Optimum and the transformers that it wants, and npm's packages for the examples in Node.
INTEROP := .venv-interop
NODE := examples/node

.PHONY: help demo test nightly lint types arrows unit deployed parity gate examiner interop bench format clean

help:
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: $(VENV)/installed ## export the shipped model, verify it, translate the example sentences
	$(BIN)/toolkit export --force models/pretrained/zh_en $(BUNDLE)
	$(BIN)/toolkit verify $(BUNDLE)
	$(BIN)/toolkit run --bundle $(BUNDLE) --file examples/sentences.txt | paste examples/sentences.txt -

test: lint types arrows unit deployed parity ## everything that a change must pass

nightly: $(VENV)/installed ## what takes longer: 500 random combinations of search options against transformers
	GENERATION_CASES=500 $(BIN)/pytest tests/test_exporters_generation_options.py

lint: $(VENV)/installed ## formatting and lint
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)

types: $(VENV)/installed ## mypy --strict
	$(BIN)/mypy

arrows: $(VENV)/installed ## who may import whom
	$(BIN)/lint-imports

unit: $(VENV)/installed ## the tests, in two processes of one thread each
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile

deployed: $(BARE)/installed ## the wheel where torch is not installed: runtime tests and commands
	$(BARE)/bin/pytest -p no:cacheprovider -o pythonpath= tests/test_runtime_*.py tests/test_deployed.py

parity: $(BARE)/installed $(BUNDLE)/bundle.json ## the parity suite of the wheel, on the test bundle and on the shipped model's
	$(BARE)/bin/pytest -p no:cacheprovider --quiet --pyargs runtime.parity_suite --bundle tests/data/tiny
	$(BARE)/bin/pytest -p no:cacheprovider --quiet --pyargs runtime.parity_suite --bundle $(BUNDLE)

gate: $(VENV)/installed $(BUNDLE)/bundle.json ## what lower precisions are judged by, and why: the tables in docs/parity.md
	$(BIN)/python tests/gate_table.py $(BUNDLE)

examiner: $(VENV)/installed ## the table of faults and of good bundles in docs/parity.md
	$(BIN)/python tests/examiner_table.py

interop: $(INTEROP)/installed $(NODE)/node_modules/.package-lock.json $(BUNDLE)/bundle.json $(BUNDLE)-js/bundle.json ## other runtimes on our bundles: Optimum, and onnxruntime-node and transformers.js in Node
	OMP_NUM_THREADS=1 $(BIN)/python tests/interop.py $(BUNDLE) $(BUNDLE)-js

ROUNDS ?= 7
THREADS ?= 2
PROVIDER ?= cpu
ONLY ?=

bench: $(VENV)/bench ## this runtime against CTranslate2 and others: ROUNDS=7 THREADS=2 PROVIDER=cpu|cuda ONLY=greedy-1,...
	$(BIN)/python benchmarks/bench.py --rounds $(ROUNDS) --threads $(THREADS) --provider $(PROVIDER) --only "$(ONLY)"

$(BUNDLE)/bundle.json: $(VENV)/installed $(shell find models exporters runtime -name '*.py')
	$(BIN)/toolkit export --force models/pretrained/zh_en $(BUNDLE)

$(BUNDLE)-js/bundle.json: $(VENV)/installed $(shell find models exporters runtime -name '*.py')
	$(BIN)/toolkit export --force --layout transformersjs models/pretrained/zh_en $(BUNDLE)-js

format: $(VENV)/installed ## put the code into shape
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP) --constraint constraints.txt --editable '.[train,export,dev]'
	touch $@

$(VENV)/bench: $(VENV)/installed
	$(BIN)/python -m pip install $(PIP) --constraint constraints.txt --editable '.[train,export,dev,bench]'
	touch $@

$(BARE)/installed: $(VENV)/installed constraints.txt $(shell find models exporters runtime toolkit -name '*.py')
	rm -rf $(BARE) dist
	$(BIN)/python -m build --wheel --outdir dist . >/dev/null
	$(PYTHON) -m venv $(BARE)
	$(BARE)/bin/python -m pip install $(PIP) --constraint constraints.txt dist/*.whl pytest hypothesis
	touch $@

$(INTEROP)/installed: tests/interop_constraints.txt
	rm -rf $(INTEROP)
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install $(PIP) --constraint tests/interop_constraints.txt optimum-onnx onnxruntime torch
	touch $@

# The runtime for the CPU is in the package; its install script would fetch that for CUDA.
$(NODE)/node_modules/.package-lock.json: $(NODE)/package-lock.json
	cd $(NODE) && ONNXRUNTIME_NODE_INSTALL=skip npm ci --silent
	touch $@

clean: ## remove what was built, but no runs and no bundles
	rm -rf $(VENV) $(BARE) $(INTEROP) $(NODE)/node_modules dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
