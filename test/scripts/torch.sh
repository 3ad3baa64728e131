#!/bin/sh
# Builds the library for the CPU against another torch, headers and libraries alone: torch.sh PYTHON VERSION
# PyPI's torch brings CUDA's libraries with it, 3 GB; to compile and to link, its own 1 GB package is enough.
set -eu
python=$1
version=$2
folder=$PWD/build/torch-$version
bin=$(cd "$(dirname "$python")" && pwd)

if ! [ -f "$folder/site/torch/version.py" ]; then
  mkdir -p "$folder"
  "$python" -m pip --disable-pip-version-check -q download --no-deps --dest "$folder" "torch==$version"
  "$python" - "$folder" <<'EOF'
import sys
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("torch-*.whl")
wanted = ("torch/include/", "torch/__init__.py", "torch/lib/libtorch_cpu.so", "torch/lib/libc10.so")
with zipfile.ZipFile(wheel) as package:
    names = [name for name in package.namelist() if name.startswith(wanted)]
    package.extractall(folder / "site", [*names, "torch/version.py"])
wheel.unlink()
EOF
fi
PATH=$bin:$PATH PYTHONPATH=$folder/site cmake -S . -B "$folder/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
  -DPython_EXECUTABLE="$bin/python" -DDPA_CUDA=off >"$folder/cmake.log" 2>&1 || { cat "$folder/cmake.log"; exit 1; }
PATH=$bin:$PATH cmake --build "$folder/build" >"$folder/build.log" 2>&1 || { cat "$folder/build.log"; exit 1; }
echo "built against torch $version"
