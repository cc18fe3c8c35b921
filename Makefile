# Every target sets up its environment; only python3 (with venv) and g++ are required.
# `make help` lists the targets. Settings: for example `make test TORCH=torch==2.11.0`.

PYTHON     ?= python3
TORCH      ?= torch==2.13.0
# The torch of the CUDA build; its CUDA and nvcc must have the same major version.
CUDA_TORCH ?= torch==2.11.0
# More options for installing torch, such as an index of CPU builds.
TORCH_PIP  ?=
SOAK_MINUTES ?= 30
DEMO_ARGS  ?=
DIST       ?= $(CURDIR)/dist
# Options of scripts/test_matrix.py.
MATRIX     ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=
# The number of parallel test processes; tests of one file run one after the other. Many
# tests wait for processes and threads, so this is one more than the cores of most CI machines.
PYTEST_JOBS ?= 3
# Options of scripts/mutations.py: --only "event", --record.
MUTATIONS ?=
# Seconds of all targets of libFuzzer together: 1800 for `make fuzz`, 60 for `fuzz-core`.
FUZZ_SECONDS ?=
# Generated cases of `make fuzz`, in one process for each core.
FUZZ_CASES ?= 1000000
# The same under AddressSanitizer and UBSan.
SANITIZED_CASES ?= 100000
# The Python of the machine for which `make gpu-bundle` downloads wheels.
WHEELS_PYTHON ?= 3.12
# The torch of `make wheels`.
WHEELS_TORCH  ?= 2.13
# Machines with a GPU have this Python, so the CUDA build has it too, where it is found.
CUDA_PYTHON   ?= $(or $(shell $(PYTHON) scripts/test_matrix.py --find 3.12),$(PYTHON))
# Compiler warnings are errors in all builds here.
export WERROR ?= 1
# Each module is compiled at its first import, not at its installation, and then kept.
# Variables of containers often prevent the latter.
export PIP_COMPILE ?= 0
unexport PYTHONDONTWRITEBYTECODE

ifneq ($(words $(CURDIR)),1)
$(error The path of this folder must have no space, because make cannot have one in the \
	name of a target, but is "$(CURDIR)". Move the folder)
endif
V     := $(CURDIR)/.venv
VCUDA := $(CURDIR)/.venv-cuda
VPEER := $(CURDIR)/.venv-peers
# The CUDA build has its own tree, because its extension has the name of the CPU build's.
TREE  := $(CURDIR)/build/cuda-tree
FAKE  := $(CURDIR)/build/fakecuda
# The newest installed Python with the newest torch: a cell of the matrix.
CELL  := $(CURDIR)/build/newest
RUN_CELL := scripts/test_matrix.py --quick --cells newest:newest --jobs $(PYTEST_JOBS)
CMAKE := $(or $(shell command -v cmake),$(V)/bin/cmake)
CTEST := $(or $(shell command -v ctest),$(V)/bin/ctest)

# Memory of a running thread is no leak, so valgrind reports only lost memory.
empty :=
MEMCHECK := $(subst $(empty) $(empty),;,valgrind --quiet --error-exitcode=9 \
	--leak-check=full --show-leak-kinds=definite,indirect \
	--errors-for-leak-kinds=definite,indirect \
	--suppressions=$(CURDIR)/tests/csrc/support/valgrind.supp)

PIP     := -m pip install -q --disable-pip-version-check
# torch 2.11 requires setuptools < 82, and mmcv 1.7.2 requires pkg_resources (< 81).
TOOLS   := "setuptools>=77,<81" wheel ninja "pybind11>=2.11"
# Prints one line for a command, and its output if it fails.
STEP    := scripts/step
# It asks the first Python of PATH for the folders of packages.
PYRIGHT := env PATH="$(V)/bin:$(PATH)" PYTHONPATH="$(CURDIR)" $(V)/bin/pyright
# A venv without pip is the rest of one that failed.
NEW_VENV = test -x $(1)/bin/pip || $(STEP) "make $(notdir $(1))" $(PYTHON) -m venv --clear $(1) || \
	{ echo "$(PYTHON) -m venv must work, but does not. Install the module (Debian and" \
	"Ubuntu: python3-venv), or name another Python: make PYTHON=python3.12" >&2; exit 1; }
# Dependencies and metadata only; the extension has its own stamp file.
DEPS    := PYPARALLEL_BUILD=python PYTHON_BIN $(PIP) --no-build-isolation -e
SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu*')

# The fake CUDA runtime replaces the driver.
ON_FAKE = cd $(TREE) && . $(FAKE)/env.sh && PYPARALLEL_REQUIRE_CUDA=1 \
	PYPARALLEL_BACKEND=native $(IN_TREE)
# Wheels for the Python of that environment, downloaded by its pip.
VCUDA_VERSION = $$($(VCUDA)/bin/python -c "import sys; print('%d.%d' % sys.version_info[:2])")
FOR_VCUDA = $(MAKE) PYTHON=$(VCUDA)/bin/python
# Folders of tests without a GPU whose results depend on whether torch knows CUDA. Stage 1 of
# the bundle runs all operators of this build.
ON_CUDA_TORCH := tests/core tests/scatter_gather tests/transfer
# The bundle's tools and build.
IN_TREE := PYPARALLEL_MMENGINE=off PYTHONPATH=$(TREE)/build/site $(VCUDA)/bin/python
BUNDLE  ?= $(CURDIR)/build/gpu-bundle
GPU_WHEELS := $(CURDIR)/build/gpu-wheels
# A test that hangs in C ignores the timeout of pytest, which is a Python exception: after
# these seconds its process prints the stacks of all threads and exits, which ends the run.
HANGS  := --max-worker-restart 0 -o faulthandler_timeout=400 -o faulthandler_exit_on_timeout=true
# Markers select tests: pyproject.toml describes them. Files with slow tests start first, not
# those with most tests.
PYTEST := -m pytest -q -r fE -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder $(HANGS)

.DELETE_ON_ERROR:
.PHONY: help test test-all test-matrix test-newest test-native test-python test-core test-busy test-asan test-tsan \
	test-valgrind test-peers test-ray fuzz fuzz-core fuzz-corpus mutations soak wheel docs lint \
	lint-python lint-prose lint-types lint-cpp lint-workflows bench bench-loader bench-training demo ahead peers \
	cuda-build cuda-tools fake-cuda gpu-check gpu-bundle wheels release-check clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

# ---------------------------------------------------------------- environments
$(V)/.deps: pyproject.toml
	@$(call NEW_VENV,$(V))
	@$(STEP) "install the build tools" $(V)/bin/python $(PIP) $(TOOLS) "build>=1.2,<2"
	@$(STEP) "install $(TORCH)" $(V)/bin/python $(PIP) $(TORCH_PIP) "$(TORCH)"
	@test -x "$(CMAKE)" || $(STEP) "install CMake" $(V)/bin/python $(PIP) "cmake>=3.22"
	@$(STEP) "install the packages of tests, lint and demo" \
		env $(DEPS:PYTHON_BIN=$(V)/bin/python) ".[test,lint,demo]"
	@touch $@

$(V)/.built: $(V)/.deps $(SOURCES)
	@$(STEP) "compile the extension" \
		env FORCE_ONLY_CPU=1 $(V)/bin/python setup.py -q build_ext --inplace
	@touch $@

# A separate target, because tests do not need these packages.
$(V)/.docs: $(V)/.deps pyproject.toml
	@$(STEP) "install the packages of the documentation" \
		env $(DEPS:PYTHON_BIN=$(V)/bin/python) ".[docs]"
	@touch $@

$(VPEER)/.others: Makefile
	@$(call NEW_VENV,$(VPEER))
	$(VPEER)/bin/python $(PIP) $(TOOLS)
	$(VPEER)/bin/python $(PIP) $(TORCH_PIP) "$(TORCH)" numpy mmengine==0.10.7 torchdata==0.11.0 \
		"accelerate>=1.2,<2" "lightning>=2.4,<3" "transformers>=5,<6" \
		"albumentations>=2,<3" "monai>=1.4,<2" "uv>=0.9,<1" \
		"torch_geometric>=2.6,<3" "torchio>=1,<2" "skorch>=1.2,<2" "pytorch-ignite>=0.5,<1" \
		"hyperpyyaml>=1.2,<2" "sentencepiece>=0.2,<1" "soundfile>=0.12,<1" "pandas>=2,<4" \
		"fastprogress>=1,<2" "fastdownload>=0.0.7,<1" "fasttransform>=0.0.2,<1" \
		"python-fasthtml>=0.12,<1" "datasets>=4,<6" "webdataset>=1,<2" \
		"ipykernel>=7,<8" "jupyter_client>=8,<9"
# litdata without torchvision. boto3 and obstore are its clients of cloud storage.
	$(VPEER)/bin/python $(PIP) "boto3>=1.40,<2" "obstore>=0.8,<1"
# Without torchvision and the compiled half of torchaudio, which need the build of torch for
# CUDA. The loaders need neither.
	$(VPEER)/bin/python $(PIP) --no-deps "litdata>=0.2.60,<0.3" "fastai>=2.8,<3" "speechbrain>=1.1,<2" "torchaudio>=2.11,<3"
	rm -f $(VPEER)/lib/python*/site-packages/torchaudio/lib/*.so
# In a folder of its own, because other peers use torchvision if they find it.
	$(VPEER)/bin/python $(PIP) --no-deps --upgrade --target $(VPEER)/timm "timm>=1,<2" "torchvision>=0.28,<0.29"
	$(VPEER)/bin/python $(PIP) --no-build-isolation mmcv==1.7.2
# Both require an OpenCV that needs display libraries; the headless one is sufficient.
	$(VPEER)/bin/python -m pip uninstall -q -y opencv-python
	$(VPEER)/bin/python $(PIP) --force-reinstall --no-deps opencv-python-headless
# The first import of YAPF writes its cache. Two processes must not do so at once.
	$(VPEER)/bin/python -c "import yapf"
	touch $@

$(VPEER)/.deps: $(VPEER)/.others pyproject.toml
	$(DEPS:PYTHON_BIN=$(VPEER)/bin/python) ".[test,bench]"
	touch $@

$(VCUDA)/.deps: Makefile
	test -x $(VCUDA)/bin/python || $(CUDA_PYTHON) -m venv $(VCUDA)
	$(VCUDA)/bin/python $(PIP) --no-cache-dir "$(CUDA_TORCH)"
	touch $@

$(GPU_WHEELS)-%/.done: pyproject.toml scripts/gpu_bundle.py
	$(PYTHON) scripts/gpu_bundle.py wheels $(@D) --python $*
	touch $@

$(CELL)/.built: $(SOURCES) scripts/test_matrix.py
	$(PYTHON) $(RUN_CELL) --prepare $(CELL)
	touch $@

# Long downloads, which can run beside other targets. The cell comes first, because it
# copies the tree before tests write caches there.
ahead: $(CELL)/.built $(VPEER)/.others $(VCUDA)/.deps ## download the packages for test-newest, test-peers and cuda-build
	$(FOR_VCUDA) $(GPU_WHEELS)-$(VCUDA_VERSION)/.done

# ----------------------------------------------------------------------- checks
test: WITHOUT_SLOW := and not slow
test: test-native test-python test-core-address,undefined ## the tests of both backends and of the C++ core, without the slow tests; about 5 minutes
	@echo
	@echo "Passed: the tests with the extension, in pure Python, and of the C++ core under"
	@echo "ASan and UBSan. Not run: tests marked slow, ThreadSanitizer, libFuzzer, the newest"
	@echo "torch, mmcv, the CUDA build, packages, lint. make test-all runs everything."

test-all: ## all checks of CI, with a list of their times
	.ci/run

# Only these runs overwrite freed slabs and check the edges of slabs.
test-native: $(V)/.built
	@echo "tests with the extension"
	@PYPARALLEL_DEBUG=poison PYPARALLEL_BACKEND=native \
		$(V)/bin/python $(PYTEST) -m "not peers and not python_optimized $(WITHOUT_SLOW)" \
		$(PYTEST_ARGS)

test-python: $(V)/.built
	@echo "tests in pure Python"
	@PYPARALLEL_BACKEND=python \
		$(V)/bin/python $(PYTEST) -m "not one_backend and not peers $(WITHOUT_SLOW)" $(PYTEST_ARGS)

test-core: test-core-address,undefined test-core-thread

test-core-%: $(V)/.deps
	@$(STEP) "configure the C++ core, $*" \
		$(CMAKE) -S . -B "build/core-$*" -DPP_SANITIZE=$*
	@$(STEP) "compile the C++ core, $*" $(CMAKE) --build "build/core-$*" -j2
	@$(STEP) "test the C++ core, $*" \
		$(CTEST) --test-dir "build/core-$*" -j2 --output-on-failure

# Tests that depend on timing fail sooner on a busy machine.
test-busy: $(V)/.built ## the tests of both backends beside BUSY=4 busy processes
	scripts/busy $(or $(BUSY),4) $(MAKE) test-native test-python

test-newest: export PYTEST_ADDOPTS := $(HANGS)
test-newest: $(CELL)/.built ## the newest torch on the newest installed Python: the tests that depend on torch
	$(PYTHON) $(RUN_CELL) --prepared $(CELL)

test-matrix: ## build, import and test with the oldest and newest Python and torch; a long run
	$(PYTHON) scripts/test_matrix.py $(MATRIX)

# Finds leaks and reads of uninitialized memory, which the sanitizers above do not see.
test-valgrind: $(V)/.deps ## the C++ core under valgrind; a long run
	$(CMAKE) -S . -B build/core-valgrind -DCMAKE_BUILD_TYPE=Debug -DPP_RUN="$(MEMCHECK)"
	$(CMAKE) --build build/core-valgrind -j2
	$(CTEST) --test-dir build/core-valgrind -j2 --output-on-failure

fuzz: $(V)/.built ## libFuzzer on the C++ core, then FUZZ_CASES cases on both backends and an oracle; a long run
	$(MAKE) fuzz-core FUZZ_SECONDS=$(or $(FUZZ_SECONDS),1800)
	$(V)/bin/python -m tests.support.fuzzing.fuzz --cases $(FUZZ_CASES) --first $$(date +%s)000000

fuzz-core: $(V)/.deps ## libFuzzer on the C++ core for FUZZ_SECONDS in total; needs clang
	$(PYTHON) scripts/fuzz_core.py --cmake "$(CMAKE)" --seconds $(or $(FUZZ_SECONDS),60)

fuzz-corpus: $(V)/.deps ## save the libFuzzer inputs with the most coverage in tests/csrc/fuzz/corpus
	$(PYTHON) scripts/fuzz_core.py --cmake "$(CMAKE)" --keep

# In their own trees, like the CUDA build; they take minutes to compile and longer to run.
test-asan: test-extension-address,undefined ## the extension under AddressSanitizer and UBSan; a long run

test-tsan: test-extension-thread ## the extension under ThreadSanitizer; a long run

test-extension-%: $(V)/.deps
	scripts/copy_tree "$(CURDIR)/build/$*-tree"
	cd "build/$*-tree" && FORCE_ONLY_CPU=1 PYPARALLEL_SANITIZE=$* \
		$(V)/bin/python setup.py -q build_ext --inplace
	cd "build/$*-tree" && PYPARALLEL_BACKEND=native $(V)/bin/python \
		scripts/sanitizers.py $* $(V)/bin/python -m pytest \
		-m "$(if $(findstring address,$*),asan,tsan)" $(PYTEST_ARGS)
	$(if $(findstring address,$*),cd "build/$*-tree" && PYTHONPATH=. $(V)/bin/python \
		scripts/sanitizers.py $* $(V)/bin/python -m tests.support.fuzzing.fuzz \
		--cases $(SANITIZED_CASES))

mutations: $(V)/.built cuda-tools ## remove one protection at a time and check that a test fails; a long run
	$(V)/bin/python scripts/mutations.py --cmake "$(CMAKE)" $(MUTATIONS)

soak: $(V)/.built ## leaks over 10,000 batches; a network that fails; loaders with random faults for SOAK_MINUTES=30
	PYPARALLEL_LEAK_BATCHES=10000 PYPARALLEL_LONG=1 PYPARALLEL_BACKEND=native \
		$(V)/bin/python -m pytest -m "soak" $(PYTEST_ARGS)
	PYTHONPATH=. $(V)/bin/python -m tests.support.loader.soak --minutes $(SOAK_MINUTES) --limit 900

# Uses the settings of .built, so nothing is compiled again. Start from a fresh clone:
# otherwise deleted files stay in the wheel, and the check reports them.
wheel: $(V)/.built ## an sdist and a wheel for this Python and torch in dist/, or DIST=folder
	FORCE_ONLY_CPU=1 $(V)/bin/python -m build --no-isolation --sdist --wheel \
		--outdir "$(DIST)" . >"$(V)/wheel.log" 2>&1 || { cat "$(V)/wheel.log"; false; }
	$(V)/bin/python scripts/check_dist.py "$(DIST)"

# The short checks come first. make bench needs an idle machine, and make gpu-check a GPU.
release-check: $(V)/.built ## all checks before a release, but the benchmarks and a GPU's; about 3 hours
	rm -rf build/release && mkdir -p build/release
	$(V)/bin/python scripts/release_notes.py \
		"$$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)" >build/release/notes.md
	NATIVE=1 scripts/check_sdist build/release
	.ci/run
	$(MAKE) test-ray test-matrix soak

# Each wheel requires the torch of its build. FORCE_CUDA=1 builds for CUDA.
wheels: ## a wheel for each Python and one torch, WHEELS_TORCH=2.13, in dist/
	$(PYTHON) scripts/test_matrix.py --wheels "$(DIST)" \
		--torch $(WHEELS_TORCH) $(MATRIX)

# This needs no network, no extension and no compiler.
docs: $(V)/.docs ## the documentation site in build/docs; a warning is an error
	PYPARALLEL_BACKEND=python PYPARALLEL_MMENGINE=off \
		$(V)/bin/python -m sphinx -W --keep-going -n -q -c docs \
		-d build/docs-doctrees . build/docs

lint: lint-python lint-prose lint-types lint-cpp lint-workflows ## style, wording, types, formatting, workflows

lint-python: $(V)/.deps
	$(V)/bin/ruff check .
	$(V)/bin/ruff format --check .

lint-prose:
	$(PYTHON) scripts/check_prose.py

lint-types: $(V)/.deps
	$(V)/bin/mypy
	$(V)/bin/mypy --config-file= --ignore-missing-imports setup.py
	@$(STEP) "programs with the package, by pyright" $(PYRIGHT) tests/typed
	@$(STEP) "known types of all public names, by pyright" \
		$(PYRIGHT) --verifytypes pyparallel --ignoreexternal

lint-cpp: $(V)/.deps
	find csrc tests/csrc tests/fakecuda \( -name '*.h' -o -name '*.cpp' -o -name '*.cu*' \) -print0 \
		| xargs -0 $(V)/bin/clang-format --dry-run -Werror

# The tool contains the schemas. actionlint finds more, where it is installed.
SCHEMA = $(V)/bin/check-jsonschema -q --builtin-schema vendor
lint-workflows: $(V)/.deps
	@$(SCHEMA).github-workflows .github/workflows/*.yml
	@$(SCHEMA).github-issue-forms .github/ISSUE_TEMPLATE/defect.yml .github/ISSUE_TEMPLATE/proposal.yml
	@$(SCHEMA).github-issue-config .github/ISSUE_TEMPLATE/config.yml
	@$(SCHEMA).dependabot .github/dependabot.yml
	@$(SCHEMA).readthedocs .readthedocs.yaml
	@$(SCHEMA).citation-file-format --force-filetype yaml CITATION.cff
	@if command -v actionlint >/dev/null; then actionlint; fi

# ------------------------------------------------------------- beside the peers
# Both environments use the extension in the tree: they have the same torch and Python.
peers: $(VPEER)/.deps $(V)/.built ## an environment with mmcv 1.7.2, mmengine, torchdata, accelerate, Lightning, transformers, albumentations, MONAI, other frameworks and the benchmark's packages

test-peers: peers ## the comparison with mmcv, mmengine and torchdata, the benchmark; a skipped test fails
	PYPARALLEL_BACKEND=native PYPARALLEL_NO_SKIP=1 \
		$(VPEER)/bin/python $(PYTEST) -m "(peers or also_peers) and not ray" $(PYTEST_ARGS)

$(VPEER)/.ray: $(VPEER)/.deps
	$(VPEER)/bin/python $(PIP) "ray[train]>=2.60,<3"
	touch $@

# Each program starts a cluster of about 20 processes.
test-ray: $(VPEER)/.ray $(V)/.built ## the examples with Ray, on a local cluster; some minutes
	PYPARALLEL_BACKEND=native PYPARALLEL_NO_SKIP=1 \
		$(VPEER)/bin/python -m pytest -q -m ray $(PYTEST_ARGS)

# Peers of the benchmarks alone. DALI comes without most of its dependencies, which are CUDA
# libraries.
$(VPEER)/.dali: $(VPEER)/.deps
	$(VPEER)/bin/python $(PIP) --no-deps "nvidia-dali-cuda130>=2.4,<3" \
		"nvidia-nvimgcodec-cu13>=0.9,<0.10" optree gast astunparse nvtx makefun
	$(VPEER)/bin/python $(PIP) six wheel "lhotse>=1.30,<2"
	touch $@

BENCH := $(VPEER)/bin/python -m benchmarks
bench: peers $(VPEER)/.dali ## run all benchmarks: write benchmarks/results, the charts, the tables of README.md; about 45 minutes on an idle machine, refused on a loaded one
	$(BENCH) all $(BENCH_ARGS)

bench-loader: peers ## run only the benchmarks of loaders; about 16 minutes on an idle machine
	$(BENCH) loader summary $(BENCH_ARGS)

bench-training: peers $(VPEER)/.dali ## epochs of training beside torch's loader, torchdata, SPDL and DALI (600 MB); 18 minutes on an idle machine
	$(BENCH) training summary $(BENCH_ARGS)

demo: $(V)/.built ## a training run on two processes
	@OMP_NUM_THREADS=1 $(V)/bin/torchrun --nproc_per_node=2 \
		examples/ragged_digits.py $(DEMO_ARGS)

# ------------------------------------------------------------------------- CUDA
cuda-build: $(VCUDA)/.deps fake-cuda ## check the kernels; run the bundle of gpu-bundle on a fake runtime: compile, tests marked cuda, a benchmark; then the tests of transfers, which depend on a CUDA torch; no GPU needed
	$(VCUDA)/bin/python scripts/check_kernels.py
	$(FOR_VCUDA) gpu-bundle WHEELS_PYTHON=$(VCUDA_VERSION)
	tests/fakecuda/rehearse $(BUNDLE) $(FAKE) $(VCUDA)/bin/python $(TREE)
	cd $(TREE) && PYPARALLEL_BACKEND=native $(IN_TREE) -c \
		"from pyparallel import backend as b; print(b.devices); assert 'cuda' in b.devices"
	cd $(TREE) && PYPARALLEL_BACKEND=native $(IN_TREE) $(PYTEST) \
		-m "cuda_torch and not slow" $(ON_CUDA_TORCH) $(PYTEST_ARGS)
	cd $(TREE) && $(IN_TREE) -m pytest -q tests/fakecuda
	export FAKECUDA_DEVICES=2 && $(ON_FAKE) $(PYTEST) -n 0 -m "two_gpus" $(PYTEST_ARGS)

# The bundle's run brings its own, so the environment has none.
cuda-tools: fake-cuda ## the fake CUDA runtime, and the test tools for it in build/cuda-tools
	$(FOR_VCUDA) $(GPU_WHEELS)-$(VCUDA_VERSION)/.done
	test -e build/cuda-tools/pytest || $(VCUDA)/bin/python $(PIP) --no-index --no-deps \
		--target build/cuda-tools $(GPU_WHEELS)-$(VCUDA_VERSION)/*.whl

fake-cuda: $(VCUDA)/.deps ## the fake CUDA runtime in build/fakecuda: tests/fakecuda
	$(MAKE) -j2 -C tests/fakecuda OUT="$(FAKE)" PYTHON="$(VCUDA)/bin/python"

# GPU_PYTHON=python3 selects an interpreter with torch for CUDA. scripts/gpu_check.py lists
# its variables.
gpu-check: $(if $(GPU_PYTHON),,$(VCUDA)/.deps) ## compile for the GPU here: tests, compute-sanitizer, benchmarks
	$(PYTHON) scripts/gpu_check.py $(TREE) $(or $(GPU_PYTHON),$(VCUDA)/bin/python)

gpu-bundle: $(GPU_WHEELS)-$(WHEELS_PYTHON)/.done ## write build/gpu-bundle: sources, wheels for WHEELS_PYTHON=3.12 and a script, for gpu-check on a machine without an index
	$(PYTHON) scripts/gpu_bundle.py bundle $(BUNDLE) --wheels $(<D)

clean: ## remove all build results and environments
	rm -rf build dist .venv .venv-* *.egg-info .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis pyparallel/backend/_C*.so pyparallel/backend/_C*.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
