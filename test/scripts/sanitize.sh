#!/bin/sh
# Builds the library and the C++ tests with sanitizers, beside the installed ones, and runs every test on them:
# sanitize.sh PYTHON SANITIZERS [arguments for pytest]. The sanitizers' runtime must be there before Python's first
# allocation, so it is preloaded. Leaks are not looked for: Python and PyTorch keep what they have until the end.
set -eu
python=$1
sanitizers=$2
shift 2
bin=$(cd "$(dirname "$python")" && pwd)
PATH=$bin:$PATH
export PATH

cmake -S . -B build/sanitize -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$bin/python" \
  -DDPA_CUDA=off -DDPA_SANITIZE="$sanitizers" >build/sanitize.log 2>&1 || { cat build/sanitize.log; exit 1; }
cmake --build build/sanitize

compiler=${CXX:-c++}
preload=
for name in address:asan undefined:ubsan thread:tsan; do
  case ",$sanitizers," in
    *",${name%:*},"*) preload="$preload $("$compiler" -print-file-name="lib${name#*:}.so")" ;;
  esac
done
# The runtime looks up what C++ exceptions need while it starts, so their library comes with it.
preload="$preload $("$compiler" -print-file-name=libstdc++.so.6)"
export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}" UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"

SANITIZE_FLAGS="-fsanitize=$sanitizers -fno-sanitize-recover=all -fno-omit-frame-pointer" sh test/cpp/run.sh "$bin/python"
# test_jit and test_own_op build libraries of their own, with compilers that do not run under a preloaded sanitizer.
LD_PRELOAD=$preload DPA_LIBRARY=$PWD/build/sanitize/libdpa.so \
  "$bin/python" -m pytest --ignore test/library/test_jit.py --ignore test/ops/test_own_op.py "$@"
