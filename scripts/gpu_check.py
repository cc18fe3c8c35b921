#!/usr/bin/env bash
# Everything that only a GPU can show, compiled for it in the tree $1 with the python $2:
# each step's log, a summary at the end, and exit code 1 if any of them failed.
#
# GPU_STEPS   which steps, in this order: build selftest tests bench memcheck racecheck
#             kernels (all by default)
# GPU_LIMIT   seconds that every step may take, in place of its own limit
# GPU_BENCH_ARGS  options for python -m benchmarks.gpu
# OUT         folder for the log and the results (build/gpu-check by default)
set -uo pipefail
cd "$(dirname "$0")/.."
tree=$1
python=$2
all="build selftest tests bench memcheck racecheck kernels"
steps=${GPU_STEPS:-$all}
out=${OUT:-build/gpu-check}
root=$PWD

for step in $steps; do
  if [[ " $all " != *" $step "* ]]; then
    echo "GPU_STEPS must name steps of \"$all\", but names \"$step\"." >&2
    exit 2
  fi
done
"$python" - <<'PY' || exit 1
import sys
import torch
if not torch.cuda.is_available():
    sys.exit(f"gpu-check must see a GPU, but torch {torch.__version__} sees none.")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability())
PY
num_gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
commit=$(git describe --always --dirty 2>/dev/null || true)

# An interpreter that lacks a test tool gets it; one that has them all needs no index.
tools="hypothesis optree psutil pytest pytest_timeout numpy pybind11 ninja setuptools"
missing() {
  "$python" -c 'import sys
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if not find_spec(name)])' $tools
}
if [ -n "$(missing)" ]; then
  "$python" -m pip install -q $(missing | tr _ -) || true
fi
if [ -n "$(missing)" ]; then
  echo "$python must be able to import $tools, but lacks: $(missing). Install them, or" \
    "install them elsewhere with pip install --target and put that on PYTHONPATH." >&2
  exit 1
fi

mkdir -p "$out"
out=$(cd "$out" && pwd)
log=$out/gpu-check.log
: >"$log"
scripts/copy_tree "$tree" || exit 1
cd "$tree" || exit 1

# compute-sanitizer is with CUDA, or in a wheel beside torch's.
sanitizer() {
  command -v compute-sanitizer && return
  local home
  home=${CUDA_HOME:-/usr/local/cuda}
  [ -x "$home/bin/compute-sanitizer" ] && echo "$home/bin/compute-sanitizer" && return
  "$python" -c 'import glob, nvidia, sys
found = [x for p in nvidia.__path__ for x in glob.glob(f"{p}/*/bin/compute-sanitizer")]
print(found[0]) if found else sys.exit(1)' 2>/dev/null
}

# Wherever they are: a test that needs a GPU has the mark.
marked() { grep -l 'mark[.]cuda' tests/test_*.py; }

under_sanitizer() {
  local tool=$1 found
  shift
  if ! found=$(sanitizer); then
    echo "compute-sanitizer must be in PATH, in CUDA_HOME/bin, or in a wheel, but is" \
      "nowhere. Install it: $python -m pip install nvidia-cuda-sanitizer-api"
    return 1
  fi
  # Without torch's cache every tensor is an allocation, whose end the tool knows.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$found" --tool "$tool" --error-exitcode 86 \
    --target-processes application-only --print-limit 20 "$@" \
    "$python" -m pytest -q --timeout 0 -m "cuda and kernel" $(marked)
}

run_build() { FORCE_CUDA=1 "$python" setup.py -q build_ext --inplace; }
run_selftest() { "$python" -m pyparallel; }
run_tests() {
  local chosen=cuda
  [ "$num_gpus" -ge 2 ] || chosen="cuda and not two_gpus"
  PYPARALLEL_NO_SKIP=1 "$python" -m pytest -q --durations=5 -m "$chosen" $(marked)
}
run_bench() {
  "$python" -u -m benchmarks.gpu --out "$out" --json "$out/gpu.json" \
    --commit "$commit" ${GPU_BENCH_ARGS:-}
}
run_memcheck() { under_sanitizer memcheck; }
run_racecheck() { under_sanitizer racecheck; }
run_kernels() { "$python" scripts/check_kernels.py --python "$python"; }
declare -A limits=([build]=600 [selftest]=60 [tests]=420 [bench]=400 [memcheck]=240
  [racecheck]=240 [kernels]=120)
export PYPARALLEL_BACKEND=native PYPARALLEL_REQUIRE_CUDA=1
export -f sanitizer marked under_sanitizer run_build run_selftest run_tests run_bench \
  run_memcheck run_racecheck run_kernels
export python out commit num_gpus

failed=0
summary=()
note() { summary+=("$(printf '%-10s %-8s %5s s  %s' "$1" "$2" "$3" "$4")"); }
for step in $steps; do
  limit=${GPU_LIMIT:-${limits[$step]}}
  printf '\n=== %s (at most %s s)\n' "$step" "$limit" | tee -a "$log"
  before=$SECONDS
  timeout -k 10 "$limit" bash -uo pipefail -c "run_$step" 2>&1 | tee -a "$log"
  code=${PIPESTATUS[0]}
  last=$(grep -v '^ *$' "$log" | tail -n 1 | cut -c1-160)
  verdict=passed
  if [ "$code" != 0 ]; then
    failed=1 verdict=FAILED
    # What a step that was stopped said last is anything.
    [ "$code" = 124 ] || [ "$code" = 137 ] && last="stopped after $limit s: $last"
  fi
  note "$step" "$verdict" $((SECONDS - before)) "$last"
  if [ "$step" = build ] && [ "$code" != 0 ]; then
    for step in ${steps#*build}; do
      note "$step" "not run" 0 "there is no build to run it on"
    done
    break
  fi
done
{
  printf '\n=== summary (log and results: %s)\n' "$out"
  printf '%s\n' "${summary[@]}"
  [ "$num_gpus" -ge 2 ] || echo "tests for two GPUs are left out: this machine has one"
} | tee -a "$log"
cd "$root" || exit 1
exit "$failed"
