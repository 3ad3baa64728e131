#!/bin/sh
# Builds the library and test/cpp/threads.cpp with ThreadSanitizer and runs every op from many threads:
# threads.sh PYTHON [ROUNDS]. PyTorch itself is not built with it; what of its own is then reported, and why that is no
# race, is in test/scripts/threads.supp.
set -eu
python=$1
rounds=${2:-20}
bin=$(cd "$(dirname "$python")" && pwd)
PATH=$bin:$PATH
export PATH

cmake -S . -B build/threads -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE="$bin/python" \
  -DDPA_CUDA=off -DDPA_SANITIZE=thread >build/threads.log 2>&1 || { cat build/threads.log; exit 1; }
cmake --build build/threads
torch=$("$python" -c 'import torch; print(torch.__path__[0])')
"${CXX:-c++}" -std=c++20 -g -O1 -fsanitize=thread -Wall -Wextra -I. -isystem "$torch/include" test/cpp/threads.cpp \
  kernels/plans/unet1d/plan.cpp -o build/threads/threads \
  -L"$torch/lib" -Wl,-rpath,"$torch/lib" -Wl,-rpath-link,"$torch/lib" \
  -ltorch_cpu -lc10 -ldl
# ThreadSanitizer of GCC wants memory where Linux puts it without scattering.
TSAN_OPTIONS="suppressions=$PWD/test/scripts/threads.supp:history_size=7:${TSAN_OPTIONS:-}" \
  setarch -R build/threads/threads "$PWD/build/threads/libdpa.so" "$rounds"
