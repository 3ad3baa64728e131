#!/bin/sh
# Builds and runs the C++ tests against the installed dpa: run.sh PYTHON
# GoogleTest is the system's package. It is installed where that is possible; elsewhere the C++ tests are skipped.
set -eu
python=$1
here=$(dirname "$0")
bin=$(dirname "$python")

have_googletest() { [ -f /usr/include/gtest/gtest.h ] || [ -n "${GTest_DIR:-}" ]; }
if ! have_googletest && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "installing GoogleTest (libgtest-dev)"
  { apt-get -qq update && apt-get -qq -y install libgtest-dev; } >/dev/null 2>&1 || true
fi
if ! have_googletest; then
  echo "C++ tests skipped: GoogleTest is not here and cannot be installed (Debian: apt-get install libgtest-dev)"
  exit 0
fi
PATH=$(cd "$bin" && pwd):$PATH
export PATH
dpa=$(python -c 'import dpa; print(dpa.library_path().parent)')
folder=$PWD/build/test-cpp
models=$folder/models policies=$folder/policies
mkdir -p "$folder"
# What the programs read is made while they compile. PyTorch's compiler needs to try no vector instructions for it.
export TORCHINDUCTOR_VEC_ISA_OK=1 TORCHINDUCTOR_COMPILE_THREADS=1 AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL=O0
{
  python "$here/make_models.py" "$models"
  [ -n "${SANITIZE_FLAGS:-}" ] || python "$here/make_policies.py" "$policies"
} >"$folder/made.log" 2>&1 &
made=$!
trap 'kill $made 2>/dev/null || true' EXIT
build=build/test-cpp${SANITIZE_FLAGS:+-sanitize}
cmake -S "$here" -B "$build" -G Ninja -Ddpa_DIR="$dpa/cmake/dpa" -DDPA_MODELS="$models" \
  -DPython_EXECUTABLE="$(command -v python)" -DCMAKE_CXX_FLAGS="${SANITIZE_FLAGS:-}" >"$build.log" 2>&1 ||
  { cat "$build.log"; exit 1; }
cmake --build "$build"
wait "$made" || { cat "$folder/made.log"; exit 1; }
trap - EXIT
ctest --test-dir "$build" --output-on-failure --parallel "$(nproc)"
[ -z "${SANITIZE_FLAGS:-}" ] || exit 0
sh "$here/aarch64.sh" "$models/unets.bin"

# The robot example, a project of its own, built and run by the very lines of docs/deploy.md; then on every exported policy:
# the same actions as in Python, and some cycles.
python - docs/deploy.md "$policies/float32.pt" >build/robot.sh <<'EOF'
import re
import sys

page, policy = sys.argv[1:]
(block,) = re.findall(r"^```sh\n([^`]*docs/robot-cpp[^`]*)^```", open(page).read(), re.M)
print(block.replace("policy.pt", policy))
EOF
rm -f build/robot/CMakeCache.txt # of a build with another generator, perhaps
sh -e build/robot.sh
check_robot() { # POLICY HZ CYCLES [short]: the counts, the notes of each cycle, the ages
  echo "robot: $(basename "$1") at $2 Hz" >build/robot.out
  DPA_CHECK=$1.data DPA_STEPS=build/robot.csv build/robot/robot "$1" "$2" "$3" >>build/robot.out || { cat build/robot.out; exit 1; }
  cat build/robot.out
  python "$here/check_robot.py" build/robot.out build/robot.csv "$3" "$2" ${4:-}
}
for policy in "$policies"/*.pt "$policies"/*.pt2; do
  case $policy in */late-*) continue ;; esac
  check_robot "$policy" 100 20
done
# Policies whose first actions are for the past, and no numbers: the program sends none of them.
for policy in "$policies"/late-*.pt; do
  echo "robot: $(basename "$policy")"
  build/robot/robot "$policy" 200 100
done
# Faster than the policies are: cycles are late in the one, and without an action in the other.
check_robot "$policies/float32.pt" 1000000 20
check_robot "$policies/continuing.pt" 1000000 2000 short
echo "robot: a file that is cut short"
damaged=build/test-cpp/damaged.pt
head -c -1 "$policies/float32.pt" >"$damaged"
cp "$policies/float32.pt.json" "$damaged.json"
if build/robot/robot "$damaged" 20 1; then
  exit 1
fi
# Manifests that lack what the program needs, or are of another version: status 1 and one line, before any crash.
for policy in "$policies"/damaged/*.pt; do
  status=0
  build/robot/robot "$policy" 1000 3 >/dev/null 2>build/robot.err || status=$?
  echo "robot: the manifest of $(basename "$policy"): $(cat build/robot.err)"
  [ "$status" = 1 ] && [ "$(wc -l <build/robot.err)" = 1 ] || exit 1
done
