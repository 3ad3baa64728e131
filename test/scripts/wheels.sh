#!/bin/sh
# Installs wheels, one after another, beside other packages into new environments, and runs what a user runs first:
# wheels.sh [--allow-missing] "WHEEL..." [CASE...]. A case is a Python version and what to install; an environment takes 3 to 8 GB
# while it is there. Ends with a table: a line for each wheel in each environment, and one for each case whose Python is not here,
# which fails unless --allow-missing is given.
set -eu
allowed=
[ "$1" != --allow-missing ] || { allowed=yes; shift; }
wheels=$(realpath $1)
here=$(dirname "$(realpath "$0")")
shift
[ $# -gt 0 ] || set -- "3.11 torch==2.9.*" "3.11 lerobot==0.4.4" "3.12 lerobot[diffusion]==0.6.1" "3.11 torch==2.15.*"
folder=$(mktemp -d)
trap 'cat "$folder/table" "$folder/missing"; rm -rf "$folder"' EXIT
cd "$folder"
echo "wheel | beside | doctor | pip check | a policy" >table
: >missing
clean() { env -u DPA_LIBRARY -u PYTHONPATH PATH="$folder/venv/bin:$PATH" "$@"; }
set -f # a version such as 2.9.* names no files

for each in "$@"; do
  python=python${each%% *}
  packages=${each#* }
  "$python" --version >/dev/null 2>&1 || { echo "not run, no $python: $packages" >>missing; continue; }
  rm -rf venv
  "$python" -m venv venv
  pip="venv/bin/pip --disable-pip-version-check"
  $pip install -q --no-compile --no-cache-dir $packages diffusers
  $pip check >before || true
  before=$($pip list --format=freeze)
  for wheel in $wheels; do
    $pip install -q --no-compile "$wheel"
    $pip check >after || true
    diff before after
    # The wheel changes no version of what was there.
    $pip list --format=freeze >list
    echo "$before" | grep -v '^pip=' | grep -vxFf list && { echo "the wheel replaced these"; exit 1; }
    # The first import builds the ops for a torch that the wheel has none for; before it doctor would miss them.
    clean python -c 'import dpa'
    clean dpa doctor --json >doctor.json || { cat doctor.json; exit 1; }
    clean python "$here/first_use.py" doctor.json >log 2>&1 || { cat log; exit 1; }
    cat log
    echo "$(basename "$wheel" | cut -d - -f 2) | $packages | clean | as before | $(tail -n 1 log)" >>table
    $pip uninstall -q --yes torch-dpa
  done
done
[ -n "$allowed" ] || ! [ -s missing ]
