#!/bin/sh
# Makes a wheel of the kernels once and ops for each torch: wheel.sh BIN FOLDER LABEL TORCHES DEFINITION...
# BIN has the programs, FOLDER gets the wheel, LABEL is its local version or empty, TORCHES are folders of torch packages, a
# DEFINITION is one of CMake's.
# The tag promises the oldest glibc that the libraries run on; torch comes with the torch package.
set -eu
bin=$(cd "$1" && pwd)
folder=$2
name=$(basename "$2")
label=$3
torches=$(echo "$4" | tr ' ' ';')
shift 4
set -- "DPA_TORCHES=$torches" "$@"
for definition; do
  shift
  set -- "$@" "--config-settings=cmake.define.$definition"
done

rm -rf "build/raw-$name" "$folder"/*.whl
"$bin/pip" --disable-pip-version-check -q wheel --no-build-isolation --no-deps --wheel-dir "build/raw-$name" . \
  "--config-settings=build-dir=build/wheel-$name" "$@"
[ -z "$label" ] || "$bin/python" cmake/local_version.py "build/raw-$name"/*.whl "$label"
PATH=$bin:$PATH "$bin/auditwheel" repair --wheel-dir "$folder" --exclude 'libtorch*' --exclude 'libc10*' \
  --exclude libdpa_kernels.so --exclude 'libcudart.so*' --exclude 'libgomp.so*' "build/raw-$name"/*.whl
ls -sh "$folder"/*.whl
