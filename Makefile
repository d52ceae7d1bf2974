# Everything that is done with this repository. `make help` lists it.
#
# A target installs what it needs into .venv on its own; a second run installs nothing.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
RUN    := $(BIN)/python -m torch.distributed.run

# Another release of torch, for `make test-torch`: it stands in an environment of its own.
TORCH  ?= 2.11.0
OTHER  := $(VENV)-torch-$(TORCH)

# What looks after dependencies has an environment of its own: it is no part of what it looks at.
AUDIT  := $(VENV)-audit

# Other people's programs, with an environment of their own; checkouts are put where their tests are
# in no package, such as $(CHECKOUTS)/accelerate.
SUITES    ?= $(VENV)-suites
CHECKOUTS ?= .checkouts
SUITE     ?=

# One process for each GPU, or two processes where there are none.
NPROC  ?= $(shell $(BIN)/python -c "import torch; print(torch.accelerator.device_count() or 2)" 2>/dev/null || echo 2)
# Workers that run tests side by side; each starts processes of its own, mostly two to four.
WORKERS ?= 2
PYTEST  := -m pytest --numprocesses $(WORKERS) --dist worksteal
PYTEST_ARGS ?=
# One part of the slow tests, such as 1/3; all of them if it is empty.
PART ?=
DEMO_ARGS   ?=
BENCH_ARGS  ?=

.DEFAULT_GOAL := help
.PHONY: help install demo demo-clean test test-quick test-slow test-full test-torch test-processors suites lint types contracts check format wheel release audit sbom bench bench-gpu bench-gpu-offload bench-offload bench-optimizer bench-scale foresight docs site tree clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# ---- installation -----------------------------------------------------------------------------

$(VENV)/.base:
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit("hadal needs Python 3.10 or newer; make PYTHON=... chooses one" if v < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/.base
	$(PIP) install --quiet -c constraints.txt -e '.[demo]' 'torch==2.13.0'
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.base
	$(PIP) install --quiet -c constraints.txt -e '.[test]' 'torch==2.13.0'
	@touch $@ $(VENV)/.demo

install: $(VENV)/.test  ## make .venv with everything that tests and tools need

# ---- the demo ---------------------------------------------------------------------------------

demo: $(VENV)/.demo  ## train a small GPT with ZeRO-2 on Python's own source text (under 5 minutes)
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(RUN) --standalone --nproc_per_node=$(NPROC) examples/gpt/train.py $(DEMO_ARGS)

demo-clean:  ## forget the demo's checkpoint and picture
	rm -rf demo

# ---- checks -----------------------------------------------------------------------------------

test: $(VENV)/.test  ## run the tests, but for the slow ones (4 to 9 minutes on two cores)
	$(BIN)/python $(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-quick: $(VENV)/.test  ## run arithmetic, configuration and one pass of the contracts (50 to 95 seconds)
	$(BIN)/python $(PYTEST) --quick -m "not slow" $(PYTEST_ARGS)

test-slow: $(VENV)/.test  ## run the slow tests: rare cells, every example, jobs on several hosts (PART=1/3: a third)
	$(BIN)/python $(PYTEST) -m slow $(addprefix --part=,$(PART)) $(PYTEST_ARGS)

test-full: $(VENV)/.test  ## run everything, with every cell of the matrix of contracts (an hour and more)
	$(BIN)/python $(PYTEST) --full $(PYTEST_ARGS)

$(OTHER)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet -c $(OTHER)/constraints.txt -e '.[test]' 'torch==$(TORCH)'
	@touch $@

test-torch: $(OTHER)/.test  ## run the tests with another release of torch, on CPUs (TORCH=2.11.0; gigabytes)
	CUDA_VISIBLE_DEVICES= $(OTHER)/bin/python $(PYTEST) -m "not slow" $(PYTEST_ARGS)

# Vectors of other lengths, and the orders of summation that other processors have.
PROCESSORS := ATEN_CPU_CAPABILITY=default ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2

test-processors: $(VENV)/.test  ## run the contracts and what compares bits as other processors round
	for setting in $(PROCESSORS); do \
		echo "== $$setting"; \
		env $$setting $(BIN)/python $(PYTEST) -m "not slow" tests/contracts tests/engine/test_wire.py \
			tests/comm/test_rows.py tests/comm/test_factors.py tests/device/test_kernels.py \
			$(PYTEST_ARGS) || exit 1; \
	done

$(SUITES)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(SUITES)
	$(SUITES)/bin/python -m pip install --quiet -c constraints.txt 'torch==2.13.0' -e . -e '.[compat]' ./compat/deepspeed-stub \
		trl datasets evaluate pytest parameterized==0.9.0 hjson==3.1.0 py-cpuinfo==9.0.0
	@touch $@

# DeepSpeed itself, which the rows `deepspeed` and `losses` are compared with.
.venv-deepspeed/.suites: | $(SUITES)/.installed
	$(SUITES)/bin/python benchmarks/step.py --install-deepspeed --timeout 3600
	.venv-deepspeed/bin/python -m pip install --quiet -c constraints.txt 'torch==2.13.0' trl datasets
	@touch $@

suites: $(SUITES)/.installed $(if $(filter deepspeed losses,$(or $(SUITE),losses)),.venv-deepspeed/.suites)  ## run other people's programs and tests on Hadal (SUITE="accelerate trl"; an hour for all)
	$(SUITES)/bin/python benchmarks/suites/run.py --work $(SUITES)/work --checkouts $(CHECKOUTS) $(SUITE)

lint: $(VENV)/.test  ## look at style and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test  ## check the types
	$(BIN)/mypy

contracts: $(VENV)/.test  ## check that imports go down only
	$(BIN)/lint-imports --no-logo

check: lint types contracts test  ## lint, types, import contracts and tests: what CI runs first

format: $(VENV)/.test  ## lay the code out and mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.test  ## generate docs/configuration*.md from the fields of the configuration
	$(BIN)/python -m hadal.config.document

site: $(VENV)/.test  ## build the site of docs/ in site/; a broken link or docstring is an error
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs site

tree:  ## print every file of hadal/ with its first line
	@$(PYTHON) -c 'import ast, pathlib; [print(f"{str(p):56}", " ".join(ast.get_docstring(ast.parse(p.read_text())).split("\n\n")[0].split())) for p in sorted(pathlib.Path("hadal").rglob("*.py"))]'

# ---- distribution -----------------------------------------------------------------------------

wheel: $(VENV)/.test  ## build dist/: the same commit gives the same bytes
	rm -rf dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --no-isolation --outdir dist .
	sha256sum dist/*

$(AUDIT)/.tools: constraints.txt
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet -c constraints.txt pip-audit cyclonedx-bom twine zizmor
	@touch $@

release: wheel $(AUDIT)/.tools  ## build, check and try a release with each Python on this machine (10 to 20 minutes); uploads nothing
	.ci/release $(VENV) $(AUDIT)

audit: $(AUDIT)/.tools  ## look for known vulnerabilities in constraints.txt, and for faults in workflow files
	@if [ -d .github/workflows ]; then $(AUDIT)/bin/zizmor .github/workflows; else \
		echo "no workflow files: zizmor has nothing to look at"; fi
	$(AUDIT)/bin/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

sbom: $(AUDIT)/.tools $(VENV)/.test  ## write sbom.json: what is installed in .venv, in the CycloneDX format
	$(AUDIT)/bin/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --mc-type library \
		--output-reproducible --of JSON --output-file sbom.json

# ---- measurements -----------------------------------------------------------------------------

bench: $(VENV)/.test  ## measure one training step on this machine's CPUs, beside other libraries
	$(BIN)/python benchmarks/step.py $(BENCH_ARGS)

bench-optimizer: $(VENV)/.test  ## measure the optimizers beside a plain copy of memory
	$(BIN)/python benchmarks/optimizer.py $(BENCH_ARGS)

bench-scale: $(VENV)/.test  ## measure what one rank holds and sends among up to 1024
	$(BIN)/python benchmarks/scale.py $(BENCH_ARGS)

foresight: $(VENV)/.test  ## compare `hadal plan` with real runs and write docs/foresight.md (7 minutes)
	$(BIN)/python benchmarks/foresight.py --page docs/foresight.md $(BENCH_ARGS)

bench-offload: $(VENV)/.test  ## measure updates of offloaded state beside torch, DeepSpeed and a copy of memory
	$(BIN)/python benchmarks/offload.py --step $(BENCH_ARGS)

bench-gpu: $(VENV)/.test  ## measure one step of a GPT-2-XL on this machine's GPUs, beside a loop by hand
	$(BIN)/python benchmarks/gpu.py --json bench-gpu.json --output bench-gpu.png $(BENCH_ARGS)

bench-gpu-offload: $(VENV)/.test  ## measure offloading on one GPU, and the largest GPT that trains there
	$(BIN)/python benchmarks/offload_gpu.py --json bench-gpu-offload.json $(BENCH_ARGS)

clean:  ## remove what was built, and .venv
	rm -rf $(VENV) $(VENV)-torch-* $(AUDIT) $(SUITES) sbom.json build dist demo site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	rm -rf docs/api docs/commands docs/configuration docs/examples docs/index.md
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
