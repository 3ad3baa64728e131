#!/bin/sh
# Runs every test on the CPU with another torch: torch_suite.sh PYTHON VERSION [arguments for pytest]. The environment, with
# the other packages as they are pinned, and the library lie in build/suite-VERSION. Tests that need a package which that
# torch has no version of yet, such as torchvision, are skipped.
set -eu
python=$1
version=$2
shift 2
folder=$PWD/build/suite-$version
bin=$folder/venv/bin

if ! [ -f "$folder/ready" ]; then
  echo "setting up $folder with torch $version (3 GB: this takes minutes)"
  "$python" -m venv "$folder/venv"
  sed "s/^torch==.*/torch==$version/" requirements/build.txt >"$folder/build.txt"
  grep -v '^torchvision' requirements/lerobot.txt >"$folder/lerobot.txt"
  pip="$bin/pip --disable-pip-version-check -q install"
  $pip -r "$folder/build.txt" -r requirements/demo.txt -r requirements/dev.txt
  $pip --no-deps -r "$folder/lerobot.txt" -r requirements/simulators.txt
  for pins in requirements/diffusers-*.txt; do
    $pip --no-deps --upgrade --target "$folder/venv/$(basename "$pins" .txt)" -r "$pins"
  done
  touch "$folder/ready"
fi
PATH=$bin:$PATH
export PATH
"$bin/pip" --disable-pip-version-check -q install --no-build-isolation --no-deps --editable . \
  --config-settings=build-dir="$folder/build" --config-settings=cmake.define.DPA_CUDA=off
"$bin/python" -m pytest "$@"
