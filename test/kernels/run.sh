#!/bin/sh
# Builds a kernel test on a machine with nvcc and a Hopper GPU and runs it:
#   run.sh [test|quick|bench]...                     kernels/cuda/unet1d
#   KERNELS=conv1d run.sh [test|bench]...            kernels/cuda/conv1d
# EXTRA=-DDPA_TEST_DELAYS run.sh quick: warps fall asleep at random places, which must change no result
set -e
cd "$(dirname "$0")/../.."
kernels=${KERNELS:-unet1d}
out=${BUILD_DIR:-/tmp/$kernels}
mkdir -p "$out"
flags="-O3 -std=c++20 -gencode=arch=compute_90a,code=sm_90a -DDPA_SM90A -I. $EXTRA"
for f in kernels/cuda/"$kernels"/*.cu kernels/cuda/"$kernels"/*.cpp kernels/plans/"$kernels"/*.cpp test/kernels/"$kernels"_*.cu; do
  nvcc $flags -c "$f" -o "$out/$(basename "$f").o" &
done
wait
nvcc $flags -o "$out/${kernels}_test" "$out"/*.o
for what in "$@"; do "$out/${kernels}_test" "$what"; done
