# Every target does its own set-up. Needs Python 3.10 or later, a C++ compiler and make.
PYTHON ?= python3
CUDA ?= auto
CUDA_ARCHS ?= auto
SANITIZE ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=
TORCH ?= 2.15.0
# What `make wheels` makes: ops for these torches, machine code for these GPUs (PTX serves the others); and CUDA 12's nvcc.
TORCHES ?= $(shell sed -n 's/^torch==//p' requirements/torches.txt)
WHEEL_ARCHS ?= 75;80;86;89;90a;100f;120f
CUDA12_ARCHS ?= 75;80;86;89;90a
ARM_ARCHS ?= 87;90a;110f
CASE ?=
ALLOW_MISSING ?=
CUDA12 ?= $(lastword $(sort $(wildcard /usr/local/cuda-12*/bin/nvcc)))
SUITE ?=
GPU_JOBS ?= 8
FUZZ_CASES ?= 10000

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# What the library is built with and runs on, and what the tests and the checks need besides.
BUILD_SETUP := $(VENV)/.setup-build-$(CUDA)
SETUP := $(VENV)/.setup-$(CUDA)
GPU := $(shell nvidia-smi -L 2>/dev/null)
# CUDA's compiler, where one is installed; else PyPI's will do.
NVCC := $(or $(CUDACXX),$(shell command -v nvcc),$(wildcard $(addsuffix /bin/nvcc,$(CUDA_HOME) /usr/local/cuda)))
fetch_nvcc = $(if $(NVCC),,echo "no nvcc here: taking the compiler from PyPI"; $(PIP) install -r requirements/nvcc.txt)

# Tests start Python hundreds of times: what an import compiles is kept, whatever the environment says.
unexport PYTHONDONTWRITEBYTECODE

# Test processes, which must not spin where they wait for threads: they share the cores. One where there is a GPU, whose
# memory and time some tests measure.
JOBS ?= $(if $(GPU),1,$(shell nproc))
PYTEST := $(if $(filter-out 1,$(JOBS)),OMP_WAIT_POLICY=passive) $(BIN)/python -m pytest \
  $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

.PHONY: build demo check test test-gpu test-cpp fuzz op mutations soak test-wheel test-wheels test-wheel-aarch64 test-torch test-threads \
  bench lint docs wheel wheels wheel-cpu wheel-cuda wheel-cuda12 wheel-aarch64 torches cuda12 sdist clean

build: $(BUILD_SETUP)
	@$(PIP) uninstall --yes dpa 2>/dev/null # what is installed under the import's name would hide the package
	@$(PIP) install --no-build-isolation --no-deps --editable . \
	  --config-settings=cmake.define.DPA_CUDA=$(CUDA) \
	  --config-settings='cmake.define.DPA_CUDA_ARCHS=$(CUDA_ARCHS)'
	@$(BIN)/python -c 'import dpa; print("dpa is built for", dpa.info()["built for"])'

# The environments, made anew when the pins change.
$(BUILD_SETUP): requirements/build.txt requirements/demo.txt requirements/nvcc.txt
	@echo "setting up $(VENV) with the pinned dependencies (torch is 3 GB: the first time takes minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install --no-compile -r requirements/build.txt -r requirements/demo.txt
	@$(if $(filter on,$(CUDA)),$(fetch_nvcc))
	@touch $@

$(SETUP): $(BUILD_SETUP) requirements/dev.txt requirements/lerobot.txt requirements/robomimic.txt \
          requirements/simulators.txt $(wildcard requirements/diffusers-*.txt)
	@echo "adding what the tests and the checks need"
	@$(PIP) install -r requirements/dev.txt
	@$(PIP) install --no-deps -r requirements/lerobot.txt || \
	  echo "no LeRobot for this Python: its tests will be skipped"
	@$(PIP) install --no-deps -r requirements/robomimic.txt || \
	  echo "no robomimic for this Python: its tests will be skipped"
	@$(PIP) install --no-deps -r requirements/simulators.txt || \
	  echo "no simulators for this Python: dpa eval will not be tested"
	@for pins in requirements/diffusers-*.txt; do \
	  $(PIP) install --no-deps --upgrade --target $(VENV)/$$(basename $$pins .txt) -r $$pins; done
	@touch $@

# Where there is no GPU the demo does not wait for CUDA code: it has a build of its own, and the installed one stays as it is.
ifeq ($(CUDA)$(GPU),auto)
demo: $(BUILD_SETUP)
	@mkdir -p build
	@PATH="$$PWD/$(BIN):$$PATH" cmake -S . -B build/demo -G Ninja -DCMAKE_BUILD_TYPE=Release -DDPA_CUDA=off \
	  -DPython_EXECUTABLE="$$PWD/$(BIN)/python" >build/demo.log 2>&1 || { cat build/demo.log; exit 1; }
	@$(BIN)/cmake --build build/demo >build/demo.log 2>&1 || { cat build/demo.log; exit 1; }
	PYTHONPATH=python DPA_LIBRARY=build/demo/libdpa.so $(BIN)/python -m dpa demo $(DEMO_ARGS)
else
demo: build
	$(BIN)/dpa demo $(DEMO_ARGS)
endif

# For the loop at the desk: the tools, and the tests that are quick. test/support/slow.py says which are not.
check: lint build
	$(PYTEST) -m "not slow" $(TEST_ARGS)

# SANITIZE=address,undefined runs the tests on a second build, in build/sanitize; the installed one stays as it is.
ifeq ($(SANITIZE),)
test: $(SETUP) build test-cpp
	$(PYTEST) $(TEST_ARGS)
else
test: $(SETUP) build
	@sh test/scripts/sanitize.sh $(BIN)/python $(SANITIZE) $(TEST_ARGS)
endif

# What only a GPU runs, in several processes: for a change of a kernel. TEST_ARGS names folders or files.
test-gpu: $(SETUP) build
	$(BIN)/python -m pytest -m gpu -n $(GPU_JOBS) --dist load $(TEST_ARGS)

test-cpp: $(SETUP) build
	@sh test/cpp/run.sh $(BIN)/python

fuzz: $(SETUP) build
	DPA_FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest test/ops/test_properties.py \
	  test/faults/test_user_actions.py $(TEST_ARGS)

# A new op, laid out as a copy of one that works.
op: $(SETUP)
	@$(BIN)/python ops/new_op.py $(NAME)

mutations: $(SETUP)
	$(BIN)/python test/support/mutations.py

soak: $(SETUP) build
	$(BIN)/python test/support/soak.py

bench: build
	$(BIN)/dpa bench $(BENCH_ARGS)

# clang-tidy takes 6 s a file: one is analysed again when it, a header or the rules have changed.
lint: $(SETUP)
	SKIP=clang-tidy PRE_COMMIT_HOME=$(abspath build/pre-commit) $(BIN)/pre-commit run --all-files --color never
	@$(MAKE) --no-print-directory -j$(shell nproc) $(patsubst %.cpp,build/tidy/%,$(wildcard kernels/plans/*/*.cpp))

build/tidy/%: %.cpp .clang-tidy requirements/dev.txt $(wildcard kernels/plans/*/*.h kernels/math/*.h kernels/common/*.h)
	@mkdir -p $(@D)
	@$(BIN)/clang-tidy --quiet $< -- -std=c++20 -I. >$@.log 2>&1 || { cat $@.log; exit 1; }
	@touch $@

docs: $(SETUP)
	$(PIP) install -r requirements/docs.txt
	$(BIN)/mkdocs build --strict --quiet
	@echo "the site is in site/: open site/index.html"

# Wheels: of the checkout's own torch; or for every torch in requirements/torches.txt (a GB of each, in build/), with CUDA, for the
# CPU alone, with CUDA 12, and for 64-bit ARM where the cross compiler is. Each has a folder of its own, because pip takes
# the highest of one folder's versions, and 0.1.0+cpu is higher than 0.1.0.
$(BIN)/auditwheel: requirements/wheel.txt | $(SETUP)
	@$(PIP) install -r requirements/wheel.txt
	@touch $@

own_torch = $(shell $(BIN)/python -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])')
torch_folders = $(foreach torch,$(TORCHES),$(CURDIR)/$(1)/$(torch)/torch)
fetch_torches = for torch in $(TORCHES); do $(BIN)/python cmake/fetch.py torch==$$torch $(1)/$$torch $(2) || exit 1; done
make_wheel = sh cmake/wheel.sh $(BIN) $(1) '$(2)' '$(3)'
ARM_CUDART := build/torches-aarch64/cudart

wheel: $(BIN)/auditwheel
	@$(call make_wheel,dist,,$(own_torch)) DPA_CUDA=$(CUDA) 'DPA_CUDA_ARCHS=$(CUDA_ARCHS)'

wheels:
	@mkdir -p build dist
	@touch build/wheels-begun
	@$(MAKE) --no-print-directory wheel-cpu $(if $(filter off,$(CUDA)),,wheel-cuda wheel-cuda12) wheel-aarch64
	@echo "made:"
	@find dist -name '*.whl' -newer build/wheels-begun | sort | sed 's/^/  /'

torches: $(SETUP)
	@$(call fetch_torches,build/torches)

wheel-cpu: torches $(BIN)/auditwheel
	@$(call make_wheel,dist/cpu,cpu,$(call torch_folders,build/torches)) DPA_CUDA=off

wheel-cuda: torches $(BIN)/auditwheel
	@$(fetch_nvcc)
	@$(call make_wheel,dist,,$(call torch_folders,build/torches)) DPA_CUDA=on 'DPA_CUDA_ARCHS=$(WHEEL_ARCHS)'

# CUDA 12's nvcc, for machines that have none.
cuda12: build/cuda12/complete
	@echo "CUDACXX=$(CURDIR)/build/cuda12/bin/nvcc names CUDA 12's compiler"

build/cuda12/complete: requirements/cuda12.txt cmake/cuda12.sh cmake/fetch.py | $(BUILD_SETUP)
	@sh cmake/cuda12.sh build/cuda12
	@$(BIN)/python cmake/fetch.py nvidia-cuda-cccl-cu12==12.9.27 build/cuda12/cccl
	@touch $@

wheel-cuda12: torches $(BIN)/auditwheel
	@mkdir -p build
	@$(if $(CUDA12),,$(MAKE) --no-print-directory build/cuda12/complete 2>build/cuda12.log || \
	  { echo "no CUDA 12 wheel: $$(grep -v '^make' build/cuda12.log | tail -n 1) (CUDA12= names an nvcc)"; exit 0; };) \
	  export CUDACXX=$(or $(CUDA12),$(CURDIR)/build/cuda12/bin/nvcc); \
	  $(call make_wheel,dist/cu12,cu12,$(call torch_folders,build/torches)) DPA_CUDA=on 'DPA_CUDA_ARCHS=$(CUDA12_ARCHS)'

wheel-aarch64: $(BIN)/auditwheel
ifeq ($(shell command -v aarch64-linux-gnu-g++),)
	@echo "no wheel for 64-bit ARM: no cross compiler (Debian: apt-get install g++-aarch64-linux-gnu)"
else
	@$(call fetch_torches,build/torches-aarch64,aarch64)
	@$(BIN)/python cmake/fetch.py nvidia-cuda-runtime==13.0.96 $(ARM_CUDART) aarch64
	@export _PYTHON_HOST_PLATFORM=linux-aarch64; \
	  $(call make_wheel,dist/aarch64,,$(call torch_folders,build/torches-aarch64)) DPA_CUDA=$(CUDA) \
	  'CMAKE_TOOLCHAIN_FILE=$(CURDIR)/cmake/aarch64.cmake' 'DPA_CUDA_ARCHS=$(ARM_ARCHS)' \
	  'DPA_CUDART_STATIC=$(CURDIR)/$(ARM_CUDART)/nvidia/cu13/lib/libcudart_static.a'
endif

sdist: $(SETUP)
	@rm -f dist/*.tar.gz
	@$(BIN)/python -c 'from scikit_build_core.build import build_sdist; print("dist/" + build_sdist("dist"))'

# The wheel in an environment without the checkout and without a compiler; and whether the source distribution is whole.
test-wheel: $(SETUP) build wheel sdist
	@tar -tzf dist/*.tar.gz | sed 's,^[^/]*/,,' >build/in-sdist
	@! git ls-files | grep -vxFf build/in-sdist
	@sh test/scripts/wheel.sh $(BIN)/python dist/*.whl

# The wheels for this machine in new environments with torch 2.9, LeRobot 0.4, LeRobot 0.6 and torch 2.15, 3 to 8 GB each, which
# are made one after another and removed. CASE="3.11 torch==2.10.*" names another. Without python3.12 LeRobot 0.6 is not run and the
# target fails, unless ALLOW_MISSING=1.
test-wheels: $(SETUP)
	@sh test/scripts/wheels.sh $(if $(ALLOW_MISSING),--allow-missing )"$(wildcard dist/*.whl dist/cpu/*.whl dist/cu12/*.whl)" $(if $(CASE),"$(CASE)")

# The one for 64-bit ARM under emulation.
test-wheel-aarch64: $(SETUP)
	@sh test/scripts/wheel_aarch64.sh $(BIN)/python dist/aarch64/*.whl

# Host code against another torch: it compiles and links. SUITE=1 runs every test on it too, on the CPU.
test-torch: $(SETUP)
	@sh test/scripts/torch$(if $(SUITE),_suite).sh $(BIN)/python $(TORCH) $(if $(SUITE),$(TEST_ARGS))

# Every op from many threads, in a program without Python, under ThreadSanitizer.
test-threads: $(SETUP)
	@sh test/scripts/threads.sh $(BIN)/python

clean:
	rm -rf build dist out site .venv
