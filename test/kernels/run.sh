#!/bin/sh
# Builds a kernel test on a machine with nvcc and a Hopper GPU and runs it:
#   run.sh [test|quick|bench]...                     kernels/cuda/unet1d
#   KERNELS=conv1d run.sh [test|bench]...            kernels/cuda/conv1d
# EXTRA=-DDPA_TEST_DELAYS run.sh quick: warps fall asleep at random places, which must change no result
# ARCH=80 run.sh ...: the code that other GPUs run, in a folder of its own
set -e
cd "$(dirname "$0")/../.."
kernels=${KERNELS:-unet1d}
arch=${ARCH:-90a}
out=${BUILD_DIR:-/tmp/$kernels-$arch}
case $arch in *a) code=sm_$arch ;; *) code=compute_$arch ;; esac
[ "$arch" = 90a ] && EXTRA="-DDPA_SM90A $EXTRA"
mkdir -p "$out"
flags="-O3 -std=c++20 -gencode=arch=compute_$arch,code=$code -I. $EXTRA"
for f in kernels/cuda/"$kernels"/*.cu kernels/cuda/"$kernels"/*.cpp kernels/plans/"$kernels"/*.cpp test/kernels/"$kernels"_*.cu; do
  nvcc $flags -c "$f" -o "$out/$(basename "$f").o" &
done
wait
nvcc $flags -o "$out/${kernels}_test" "$out"/*.o
for what in "$@"; do "$out/${kernels}_test" "$what"; done
