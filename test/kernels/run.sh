#!/bin/sh
# Builds test/kernels/unet1d_test on a machine with nvcc and a Hopper GPU and runs it: run.sh [test|quick|bench]...
set -e
cd "$(dirname "$0")/../.."
out=${BUILD_DIR:-/tmp/unet1d}
mkdir -p "$out"
flags="-O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -DDPA_SM90A -I."
for f in kernels/unet1d/*.cu kernels/unet1d/*.cpp test/kernels/unet1d_test.cu; do
  nvcc $flags -c "$f" -o "$out/$(basename "$f").o" &
done
wait
nvcc $flags -o "$out/unet1d_test" "$out"/*.o
for what in "$@"; do "$out/unet1d_test" "$what"; done
