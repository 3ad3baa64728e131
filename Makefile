# Every target does its own set-up. Needs Python 3.10 or later, a C++ compiler and make.
PYTHON ?= python3
CUDA ?= auto
CUDA_ARCHS ?= auto
SANITIZE ?=
DEMO_ARGS ?=
BENCH_ARGS ?=
TEST_ARGS ?=
TORCH ?= 2.15.0
SUITE ?=
FUZZ_CASES ?= 10000

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
SETUP := $(VENV)/.setup-$(CUDA)

.PHONY: build demo test test-cpp fuzz mutations soak test-wheel test-torch test-threads bench lint docs wheel sdist clean

build: $(SETUP)
	@$(PIP) install --no-build-isolation --no-deps --editable . \
	  --config-settings=cmake.define.DPA_CUDA=$(CUDA) \
	  --config-settings='cmake.define.DPA_CUDA_ARCHS=$(CUDA_ARCHS)'
	@$(BIN)/python -c 'import dpa; print("dpa is built for", dpa.info()["built for"])'

# The environment, made anew when the pins change.
$(SETUP): requirements/build.txt requirements/dev.txt requirements/lerobot.txt requirements/nvcc.txt \
          requirements/robomimic.txt requirements/simulators.txt $(wildcard requirements/diffusers-*.txt)
	@echo "setting up $(VENV) with the pinned dependencies (torch is 3 GB: the first time takes minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements/build.txt -r requirements/dev.txt
	@$(PIP) install --no-deps -r requirements/lerobot.txt || \
	  echo "no LeRobot for this Python: its tests will be skipped"
	@$(PIP) install --no-deps -r requirements/robomimic.txt || \
	  echo "no robomimic for this Python: its tests will be skipped"
	@$(PIP) install --no-deps -r requirements/simulators.txt || \
	  echo "no simulators for this Python: dpa eval will not be tested"
	@for pins in requirements/diffusers-*.txt; do \
	  $(PIP) install --no-deps --upgrade --target $(VENV)/$$(basename $$pins .txt) -r $$pins; done
	@if [ "$(CUDA)" = on ] && ! command -v nvcc >/dev/null && ! [ -x /usr/local/cuda/bin/nvcc ]; then \
	  echo "no nvcc here: taking the compiler from PyPI"; $(PIP) install -r requirements/nvcc.txt; fi
	@touch $@

demo: build
	$(BIN)/dpa demo $(DEMO_ARGS)

# SANITIZE=address,undefined runs the tests on a second build, in build/sanitize; the installed one stays as it is.
ifeq ($(SANITIZE),)
test: build test-cpp
	$(BIN)/python -m pytest $(TEST_ARGS)
else
test: build
	@sh test/scripts/sanitize.sh $(BIN)/python $(SANITIZE) $(TEST_ARGS)
endif

test-cpp: build
	@sh test/cpp/run.sh $(BIN)/python

fuzz: build
	DPA_FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest test/ops/test_properties.py $(TEST_ARGS)

mutations: $(SETUP)
	$(BIN)/python test/support/mutations.py

soak: build
	$(BIN)/python test/support/soak.py

bench: build
	$(BIN)/dpa bench $(BENCH_ARGS)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

docs: $(SETUP)
	$(PIP) install -r requirements/docs.txt
	$(BIN)/mkdocs build --strict --quiet
	@echo "the site is in site/: open site/index.html"

# The tag promises the oldest glibc that the library runs on; torch and CUDA's runtime come with the torch package.
wheel: $(SETUP)
	@$(PIP) install -r requirements/wheel.txt
	@rm -rf build/wheel dist/*.whl
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/wheel . \
	  --config-settings=cmake.define.DPA_CUDA=$(CUDA) \
	  --config-settings='cmake.define.DPA_CUDA_ARCHS=$(CUDA_ARCHS)'
	@PATH="$$PWD/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist --exclude 'libtorch*' --exclude 'libc10*' \
	  --exclude 'libcudart.so*' --exclude 'libgomp.so*' build/wheel/*.whl
	@ls -sh dist/*.whl

sdist: $(SETUP)
	@rm -f dist/*.tar.gz
	@$(BIN)/python -c 'from scikit_build_core.build import build_sdist; print("dist/" + build_sdist("dist"))'

# The wheel in an environment without the checkout and without a compiler; and whether the source distribution is whole.
test-wheel: build wheel sdist
	@tar -tzf dist/*.tar.gz | sed 's,^[^/]*/,,' >build/in-sdist
	@! git ls-files | grep -vxFf build/in-sdist
	@sh test/scripts/wheel.sh $(BIN)/python dist/*.whl

# Host code against another torch: it compiles and links. SUITE=1 runs every test on it too, on the CPU.
test-torch: $(SETUP)
	@sh test/scripts/torch$(if $(SUITE),_suite).sh $(BIN)/python $(TORCH) $(if $(SUITE),$(TEST_ARGS))

# Every op from many threads, in a program without Python, under ThreadSanitizer.
test-threads: $(SETUP)
	@sh test/scripts/threads.sh $(BIN)/python

clean:
	rm -rf build dist out site .venv
