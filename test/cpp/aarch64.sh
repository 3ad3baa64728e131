#!/bin/sh
# Builds the CPU's packed U-Net for 64-bit ARM and runs it in an emulator, where Debian's cross compiler and qemu are here
# or can be installed: aarch64.sh NETWORKS (the file that make_models.py wrote).
set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
if ! command -v aarch64-linux-gnu-g++ >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "installing the cross compiler for 64-bit ARM"
  apt-get -qq -y install --no-install-recommends g++-aarch64-linux-gnu qemu-user >/dev/null 2>&1 || true
fi
if ! command -v aarch64-linux-gnu-g++ >/dev/null; then
  echo "ARM skipped: no cross compiler (Debian: apt-get install g++-aarch64-linux-gnu qemu-user)"
  exit 0
fi
mkdir -p build/aarch64
for file in "$source"/kernels/cpu/*.cpp "$source/kernels/plans/unet1d/plan.cpp" "$source/test/cpp/cpu_unet_test.cpp"; do
  echo "$file"
done | xargs -P 2 -I FILE sh -c 'aarch64-linux-gnu-g++ -std=c++20 -O1 -Wall -Wextra -Werror -fno-math-errno \
  -fno-trapping-math -I "$1" -c "$2" -o "build/aarch64/$(basename "$2").o"' sh "$source" FILE
aarch64-linux-gnu-g++ -static build/aarch64/*.o -pthread -o build/aarch64/cpu_unet_test
if command -v qemu-aarch64 >/dev/null; then
  qemu-aarch64 -cpu max build/aarch64/cpu_unet_test "$1"
else
  echo "built for 64-bit ARM, not run: no qemu-aarch64"
fi
