#!/bin/sh
# Runs a wheel for 64-bit ARM under emulation, with Debian's Python for it and PyPI's torch: wheel_aarch64.sh PYTHON WHEEL.
# Needs qemu-aarch64 and Debian's apt-get, no root. The folder build/aarch64-python keeps what was fetched, 0.7 GB. Emulated, to
# import torch takes minutes.
set -eu
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
wheel=$(realpath "$2")
use=$(dirname "$(realpath "$0")")/first_use.py
if ! command -v qemu-aarch64 >/dev/null || ! command -v apt-get >/dev/null; then
  echo "ARM wheel not run: needs Debian's apt-get and qemu-user"
  exit 0
fi
mkdir -p build/aarch64-python
cd build/aarch64-python
here=$PWD

if ! [ -x root/usr/bin/python3.11 ]; then
  mkdir -p lists/partial cache/archives/partial packages
  touch status
  set -- -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$here" -o Dir::State::status="$here/status" \
    -o Dir::Cache="$here/cache"
  apt-get "$@" update
  (cd packages && apt-get "$@" download python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 \
    libgomp1 zlib1g libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 2>/dev/null)
  for package in packages/*.deb; do dpkg-deb -x "$package" root; done
fi
# Without dependencies, because pip would take those of the machine that it runs on.
if ! [ -d site/diffusers ]; then
  set -- --platform manylinux_2_28_aarch64 --platform manylinux2014_aarch64 --python-version 3.11 --only-binary=:all: --no-deps \
    --no-compile --target site
  "$python" -m pip --disable-pip-version-check -q install "$@" torch==2.9.1 filelock typing-extensions sympy mpmath networkx jinja2 \
    markupsafe fsspec numpy==2.2.6 rich markdown-it-py mdurl pygments typer==0.29.1 shellingham click annotated-doc \
    annotated-types typing-inspection pydantic==2.14.3 pydantic_core==2.50.4 diffusers==0.35.2 importlib-metadata zipp safetensors \
    huggingface-hub==0.36.0 packaging pyyaml regex requests urllib3 idna certifi charset-normalizer tqdm pillow
fi
rm -rf wheel
"$python" -m zipfile -e "$wheel" wheel

emulated() {
  env -u DPA_LIBRARY qemu-aarch64 -cpu max -L root -E PYTHONPATH="$here/wheel:$here/site" root/usr/bin/python3.11 "$@"
}
emulated -m dpa doctor --json >doctor.json || { cat doctor.json; exit 1; }
emulated "$use" doctor.json
echo "works under emulation: $(basename "$wheel")"
