#!/bin/sh
# Builds the library for the CPU against another torch, headers and libraries alone: torch.sh PYTHON VERSION
# It is not optimised, because nobody runs it.
set -eu
python=$1
version=$2
folder=build/torch-$version
bin=$(cd "$(dirname "$python")" && pwd)
PATH=$bin:$PATH
export PATH

mkdir -p "$folder"
"$python" cmake/fetch.py "torch==$version" "build/torches/$version"
PYTHONPATH=$PWD/build/torches/$version cmake -S . -B "$folder" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DPython_EXECUTABLE="$bin/python" -DDPA_CUDA=off -DCMAKE_CXX_FLAGS_RELEASE=-O0 >"$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }
cmake --build "$folder" >"$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }
echo "built against torch $version"
