#!/bin/sh
# Installs a wheel into a new environment, and goes the way of docs/deploy.md there, without the checkout and without a
# compiler: wheel.sh PYTHON WHEEL. The environment borrows the packages of PYTHON's, torch among them, but not its dpa.
set -eu
python=$1
wheel=$(realpath "$2")
page=$(dirname "$(realpath "$0")")/../../docs/deploy.md
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$python" -m venv "$folder/venv"
bin=$folder/venv/bin
"$bin/pip" --disable-pip-version-check -q install --no-deps "$wheel"
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sys; print(*(p for p in sys.path if p.endswith("site-packages")), sep="\n")' >"$site/borrowed.pth"

cd "$folder"
clean() { env -i PATH="$bin" HOME="$folder" ${OMP_NUM_THREADS:+OMP_NUM_THREADS=$OMP_NUM_THREADS} "$@"; }
clean python -c 'import shutil, sys; sys.exit(any(map(shutil.which, ("cc", "c++", "g++", "nvcc"))))' ||
  { echo "wheel: the environment has a compiler"; exit 1; }
clean dpa info --json >info.json
sed -n 's/^\(dpa [^#]*\).*/\1/p' "$page" >commands
[ -s commands ] || { echo "wheel: docs/deploy.md shows no command"; exit 1; }
while read -r command; do
  echo "wheel: $command"
  clean $command >log 2>&1 </dev/null || { cat log; exit 1; }
done <commands

clean python - <<'EOF'
import json
from importlib.metadata import requires

import torch

import dpa

facts = json.load(open("info.json"))
assert facts["library"].startswith(dpa.__path__[0]), facts["library"]
assert set(facts["smoke test"].values()) == {"ok"}, facts["smoke test"]
assert "torch>=2.9" in requires("torch-dpa"), requires("torch-dpa")
inputs = [torch.randn(entry["shape"]) for entry in json.load(open("policy.pt.json"))["inputs"]]
with torch.inference_mode():
    assert torch.jit.load("policy.pt")(*inputs).isfinite().all()
print("wheel: works in a new environment, without a compiler")
EOF
