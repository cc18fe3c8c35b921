# Every target sets up what it needs, from python3 (with venv) and g++ alone.
# `make help` lists them. Settings: make test TORCH=torch==2.11.0, and so on.

PYTHON     ?= python3
TORCH      ?= torch==2.13.0
# The torch of the CUDA build; its CUDA must be of nvcc's major version.
CUDA_TORCH ?= torch==2.11.0
CUDA_ARCHS ?= 8.0;9.0
# More options for installing torch, such as an index of CPU builds.
TORCH_PIP  ?=
SOAK_MINUTES ?= 30
DEMO_ARGS  ?=
DIST       ?= $(CURDIR)/dist
# What goes to scripts/test_matrix.py.
MATRIX     ?=
BENCH_ARGS ?=
LOADER_ARGS ?=
PYTEST_ARGS ?=
# How many tests run at a time; those of one file run one after the other. Many wait for
# processes and threads, so there is one more than most machines of CI have cores.
PYTEST_JOBS ?= 3
# What goes to scripts/mutations.py: --only "event", --record.
MUTATIONS ?=
# Seconds of all targets of libFuzzer together: 1800 for `make fuzz`, 60 for `fuzz-core`.
FUZZ_SECONDS ?=
# Generated cases of `make fuzz`, in as many processes as there are cores.
FUZZ_CASES ?= 1000000
# The same under AddressSanitizer and UBSan.
SANITIZED_CASES ?= 100000
# For the Python of a machine with a GPU: the test tools and peers that few torch images
# have, with their needs.
WHEELS_PYTHON ?= 3.12
# The torch of `make wheels`.
WHEELS_TORCH  ?= 2.13
WHEELS_ARCH   ?= x86_64
WHEELS ?= optree pytest-timeout tensordict cloudpickle pyvers mmengine==0.10.7 addict \
	platformdirs termcolor yapf
# Warnings of the compilers are errors in what is built here.
export WERROR ?= 1

V     := $(CURDIR)/.venv
VCUDA := $(CURDIR)/.venv-cuda
VPEER := $(CURDIR)/.venv-peers
# The CUDA build has its own tree: a module of one torch never replaces another's.
TREE  := $(CURDIR)/build/cuda-tree
FAKE  := $(CURDIR)/build/fakecuda
# The newest Python here with the newest torch: a cell of the matrix.
CELL  := $(CURDIR)/build/newest
RUN_CELL := scripts/test_matrix.py --quick --cells newest:newest
CMAKE := $(or $(shell command -v cmake),$(V)/bin/cmake)
CTEST := $(or $(shell command -v ctest),$(V)/bin/ctest)

# A thread that lives on has memory that is no leak: only lost memory is one.
empty :=
MEMCHECK := $(subst $(empty) $(empty),;,valgrind --quiet --error-exitcode=9 \
	--leak-check=full --show-leak-kinds=definite,indirect \
	--errors-for-leak-kinds=definite,indirect \
	--suppressions=$(CURDIR)/tests/csrc/support/valgrind.supp)

PIP     := -m pip install -q --disable-pip-version-check
# torch 2.11 wants setuptools < 82, and mmcv 1.7.2 wants pkg_resources (< 81).
TOOLS   := "setuptools>=77,<81" wheel ninja "pybind11>=2.11"
# The dependencies and the metadata; the extension follows, with its own stamp.
DEPS    := PYPARALLEL_BUILD=python PYTHON_BIN $(PIP) --no-build-isolation -e
SOURCES := setup.py pyproject.toml $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu*')

# The fake CUDA runtime takes the place of a driver.
ON_FAKE = cd $(TREE) && . $(FAKE)/env.sh && PYPARALLEL_REQUIRE_CUDA=1 \
	PYPARALLEL_BACKEND=native $(VCUDA)/bin/python
# Markers select tests: pyproject.toml describes them. Files marked slow start first, not
# those with most tests.
PYTEST := -m pytest -n $(PYTEST_JOBS) --dist loadfile --no-loadscope-reorder

.DELETE_ON_ERROR:
.PHONY: help test test-matrix test-newest test-native test-python test-core test-busy test-asan test-tsan \
	test-valgrind test-peers fuzz fuzz-core fuzz-corpus mutations soak wheel docs lint \
	lint-python lint-types lint-cpp bench bench-loader demo ahead peers \
	cuda-build fake-cuda gpu-check gpu-wheels wheels clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 14

# ---------------------------------------------------------------- environments
$(V)/.deps: pyproject.toml
	test -x $(V)/bin/python || $(PYTHON) -m venv $(V)
	$(V)/bin/python $(PIP) $(TOOLS) "build>=1.2,<2"
	$(V)/bin/python $(PIP) $(TORCH_PIP) "$(TORCH)"
	test -x "$(CMAKE)" || $(V)/bin/python $(PIP) "cmake>=3.22"
	$(DEPS:PYTHON_BIN=$(V)/bin/python) ".[test,lint,demo]"
	touch $@

$(V)/.built: $(V)/.deps $(SOURCES)
	FORCE_ONLY_CPU=1 $(V)/bin/python setup.py -q build_ext --inplace
	touch $@

# Apart from the rest, so that tests need none of it.
$(V)/.docs: $(V)/.deps pyproject.toml
	$(DEPS:PYTHON_BIN=$(V)/bin/python) ".[docs]"
	touch $@

$(VPEER)/.others: Makefile
	test -x $(VPEER)/bin/python || $(PYTHON) -m venv $(VPEER)
	$(VPEER)/bin/python $(PIP) $(TOOLS)
	$(VPEER)/bin/python $(PIP) $(TORCH_PIP) "$(TORCH)" numpy mmengine==0.10.7 torchdata==0.11.0 \
		"accelerate>=1.2,<2" "lightning>=2.4,<3"
	$(VPEER)/bin/python $(PIP) --no-build-isolation mmcv==1.7.2
# Both ask for the OpenCV that needs a display's libraries; the headless one is enough.
	$(VPEER)/bin/python -m pip uninstall -q -y opencv-python
	$(VPEER)/bin/python $(PIP) --force-reinstall --no-deps opencv-python-headless
	touch $@

$(VPEER)/.deps: $(VPEER)/.others pyproject.toml
	$(DEPS:PYTHON_BIN=$(VPEER)/bin/python) ".[test,bench]"
	touch $@

$(VCUDA)/.deps: Makefile
	test -x $(VCUDA)/bin/python || $(PYTHON) -m venv $(VCUDA)
	$(VCUDA)/bin/python $(PIP) --no-cache-dir $(TOOLS) "$(CUDA_TORCH)"
	touch $@

$(CELL)/.built: $(SOURCES) scripts/test_matrix.py
	$(PYTHON) $(RUN_CELL) --prepare $(CELL)
	touch $@

# What takes long to fetch and touches nothing here, while something else runs. The cell
# is first: it copies the tree, in which tests write caches.
ahead: $(CELL)/.built $(VPEER)/.others $(VCUDA)/.deps ## fetch what test-newest, test-peers and cuda-build need

# ----------------------------------------------------------------------- checks
test: test-native test-python test-core ## everything without a GPU: both backends, poisoned slabs, the C++ core

# Freed slabs are overwritten here and their edges checked; in the other runs they are not.
test-native: $(V)/.built
	PYPARALLEL_DEBUG=poison PYPARALLEL_BACKEND=native \
		$(V)/bin/python $(PYTEST) -m "not peers and not python_optimized" \
		$(PYTEST_ARGS)

test-python: $(V)/.built
	PYPARALLEL_BACKEND=python \
		$(V)/bin/python $(PYTEST) -m "not one_backend and not peers" $(PYTEST_ARGS)

test-core: test-core-address,undefined test-core-thread

test-core-%: $(V)/.deps
	$(CMAKE) -S . -B "build/core-$*" -DPP_SANITIZE=$*
	$(CMAKE) --build "build/core-$*" -j2
	$(CTEST) --test-dir "build/core-$*" --output-on-failure

# A test that relies on how soon something happens fails here sooner than elsewhere.
test-busy: $(V)/.built ## the tests of both backends beside BUSY=4 processes that never wait
	scripts/busy $(or $(BUSY),4) $(MAKE) test-native test-python

test-newest: $(CELL)/.built ## the newest torch on the newest Python here: operators, loader, wrappers
	$(PYTHON) $(RUN_CELL) --prepared $(CELL)

test-matrix: ## build, import and test with the oldest and newest Python and torch; a long run
	$(PYTHON) scripts/test_matrix.py $(MATRIX)

# What reads memory that nobody has written, which no sanitizer above sees, and leaks.
test-valgrind: $(V)/.deps ## the C++ core under valgrind; a long run
	$(CMAKE) -S . -B build/core-valgrind -DCMAKE_BUILD_TYPE=Debug -DPP_RUN="$(MEMCHECK)"
	$(CMAKE) --build build/core-valgrind -j2
	$(CTEST) --test-dir build/core-valgrind -j2 --output-on-failure

fuzz: $(V)/.built ## for long: libFuzzer on the C++ core, then FUZZ_CASES on both backends and an oracle
	$(MAKE) fuzz-core FUZZ_SECONDS=$(or $(FUZZ_SECONDS),1800)
	$(V)/bin/python tests/support/fuzz.py --cases $(FUZZ_CASES) --first $$(date +%s)000000

fuzz-core: $(V)/.deps ## libFuzzer on the C++ core for FUZZ_SECONDS in all; needs clang
	$(PYTHON) scripts/fuzz_core.py --cmake "$(CMAKE)" --seconds $(or $(FUZZ_SECONDS),60)

fuzz-corpus: $(V)/.deps ## keep the inputs of libFuzzer that reach most in tests/csrc/fuzz/corpus
	$(PYTHON) scripts/fuzz_core.py --cmake "$(CMAKE)" --keep

# In trees of their own, as the CUDA build; some minutes to compile, more to run.
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
		scripts/sanitizers.py $* $(V)/bin/python tests/support/fuzz.py \
		--cases $(SANITIZED_CASES))

mutations: $(V)/.built ## take protections out one at a time, and see a test fail; a long run
	$(V)/bin/python scripts/mutations.py --cmake "$(CMAKE)" $(MUTATIONS)

soak: $(V)/.built ## leaks over 10,000 batches; a link that is cut; loaders with random faults for SOAK_MINUTES=30
	PYPARALLEL_LEAK_BATCHES=10000 PYPARALLEL_LONG=1 PYPARALLEL_BACKEND=native \
		$(V)/bin/python -m pytest -m "soak" $(PYTEST_ARGS)
	PYTHONPATH=. $(V)/bin/python tests/support/soak.py --minutes $(SOAK_MINUTES) --limit 900

# Compiled with the settings of .built, so nothing is compiled again. From a fresh clone:
# what was deleted since stays in the wheel otherwise, which the check finds.
wheel: $(V)/.built ## an sdist and a wheel for this Python and torch in dist/, or DIST=folder
	FORCE_ONLY_CPU=1 $(V)/bin/python -m build --no-isolation --sdist --wheel \
		--outdir "$(DIST)" . >"$(V)/wheel.log" 2>&1 || { cat "$(V)/wheel.log"; false; }
	$(V)/bin/python scripts/check_dist.py "$(DIST)"

# Each wheel requires the torch that it was built for. FORCE_CUDA=1 builds for CUDA.
wheels: ## a wheel for each Python and one torch, WHEELS_TORCH=2.13, in dist/
	$(PYTHON) scripts/test_matrix.py --wheels "$(DIST)" \
		--torch $(WHEELS_TORCH) $(MATRIX)

# It needs no network, and neither the extension nor a compiler.
docs: $(V)/.docs ## the documentation site in build/docs; a warning is an error
	PYPARALLEL_BACKEND=python PYPARALLEL_MMENGINE=off \
		$(V)/bin/python -m sphinx -W --keep-going -n -q -c docs \
		-d build/docs-doctrees . build/docs

lint: lint-python lint-types lint-cpp ## style, types, formatting

lint-python: $(V)/.deps
	$(V)/bin/ruff check .
	$(V)/bin/ruff format --check .

lint-types: $(V)/.deps
	$(V)/bin/mypy
	$(V)/bin/mypy --config-file= --ignore-missing-imports setup.py

lint-cpp: $(V)/.deps
	find csrc tests/csrc tests/fakecuda \( -name '*.h' -o -name '*.cpp' -o -name '*.cu*' \) -print0 \
		| xargs -0 $(V)/bin/clang-format --dry-run -Werror

# ------------------------------------------------------------- beside the peers
# The extension in the tree serves both environments: same torch, same python.
peers: $(VPEER)/.deps $(V)/.built ## an environment with mmcv 1.7.2, mmengine, torchdata, accelerate, Lightning and what the benchmark needs

test-peers: peers ## the comparison with mmcv, mmengine and torchdata, the benchmark; a skipped test fails
	PYPARALLEL_BACKEND=native PYPARALLEL_NO_SKIP=1 \
		$(VPEER)/bin/python $(PYTEST) -m "peers or also_peers" $(PYTEST_ARGS)

bench: peers ## measure; write JSON and tables to benchmarks/results, the charts, the tables of README.md
	$(VPEER)/bin/python -m benchmarks $(BENCH_ARGS)
	$(VPEER)/bin/python -m benchmarks.loader $(LOADER_ARGS)
	$(VPEER)/bin/python -m benchmarks.summary

bench-loader: peers ## measure loaders alone; some five minutes on a quiet machine
	$(VPEER)/bin/python -m benchmarks.loader $(LOADER_ARGS)
	$(VPEER)/bin/python -m benchmarks.summary

demo: $(V)/.built ## a training run on two processes
	OMP_NUM_THREADS=1 $(V)/bin/torchrun --nproc_per_node=2 \
		examples/ragged_digits.py $(DEMO_ARGS)

# ------------------------------------------------------------------------- CUDA
cuda-build: $(VCUDA)/.deps fake-cuda ## look at the kernels, compile for CUDA, run on its torch what depends on either, and the tests marked cuda on a fake runtime; no GPU needed
	$(VCUDA)/bin/python scripts/check_kernels.py
	scripts/copy_tree $(TREE)
	cd $(TREE) && $(DEPS:PYTHON_BIN=$(VCUDA)/bin/python) ".[test]"
	cd $(TREE) && FORCE_CUDA=1 TORCH_CUDA_ARCH_LIST="$(CUDA_ARCHS)" \
		$(VCUDA)/bin/python setup.py -q build_ext --inplace
	cd $(TREE) && PYPARALLEL_BACKEND=native $(VCUDA)/bin/python -c \
		"from pyparallel import backend as b; print(b.devices); assert 'cuda' in b.devices"
	cd $(TREE) && PYPARALLEL_BACKEND=native $(VCUDA)/bin/python $(PYTEST) \
		-m "cuda_torch" $(PYTEST_ARGS)
	cd $(TREE) && $(VCUDA)/bin/python -m pytest -q tests/fakecuda
	$(ON_FAKE) $(PYTEST) -m "cuda and not two_gpus" $(PYTEST_ARGS)
	export FAKECUDA_DEVICES=2 && $(ON_FAKE) $(PYTEST) -m "two_gpus" $(PYTEST_ARGS)

fake-cuda: $(VCUDA)/.deps ## the fake CUDA runtime in build/fakecuda: tests/fakecuda
	$(MAKE) -C tests/fakecuda OUT="$(FAKE)" PYTHON="$(VCUDA)/bin/python"

# GPU_PYTHON=python3 uses an interpreter that has torch for CUDA. scripts/gpu_check.py says
# which variables it reads.
gpu-check: $(if $(GPU_PYTHON),,$(VCUDA)/.deps) ## compile for the GPU here: tests, compute-sanitizer, benchmarks
	$(PYTHON) scripts/gpu_check.py $(TREE) $(or $(GPU_PYTHON),$(VCUDA)/bin/python)

gpu-wheels: ## fill wheels/ for gpu-check on a machine without an index: WHEELS_PYTHON=3.12
	rm -rf wheels
	$(PYTHON) -m pip download -q --disable-pip-version-check --no-deps --dest wheels \
		--only-binary :all: --python-version $(WHEELS_PYTHON) \
		$(patsubst %,--platform %_$(WHEELS_ARCH),manylinux_2_28 manylinux2014) $(WHEELS)

clean: ## remove everything that is built or installed here
	rm -rf build dist .venv .venv-* *.egg-info .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis pyparallel/backend/_C*.so pyparallel/backend/_C*.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
