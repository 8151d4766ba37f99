#!/usr/bin/env bash
# Checks the system on a machine with CUDA devices, where no CI runs: `bash tools/gpu_check.sh OUT [all|kernels|recipe]`.
# Kernel tests on the card, equality of the sharded model with plain PyTorch, and the ml100k recipe on one and (where there are two)
# on two devices, in fp32 with one loss curve. Logs and run folders go to OUT. Needs the packages importable, nothing installed.
set -uo pipefail
out=${1:?usage: gpu_check.sh OUT [all|kernels|recipe]}; what=${2:-all}
mkdir -p "$out"
devices=$(python3 -c 'import torch; print(torch.cuda.device_count())')
failed=0
step() { # step NAME COMMAND...: run, keep the log, show its end and the time
  local name=$1 began=$SECONDS; shift
  "$@" >"$out/$name.log" 2>&1 || { failed=1; echo "FAILED $name"; }
  tail -n "${LINES_SHOWN:-6}" "$out/$name.log"; echo "== $name: $((SECONDS - began)) s"
}
if [ "$what" != recipe ]; then
  step kernels python3 -m pytest -q -p no:cacheprovider packages/gem-kernels/tests -n 8
fi
if [ "$what" != kernels ]; then
  step doctor python3 -m gem_train doctor
  step selfcheck-1 python3 -m gem_parallel.selfcheck --device cuda
  LINES_SHOWN=30 step ml100k-bf16 python3 -m gem_train run ml100k --out "$out/ml100k-bf16"
  fp32="run ml100k --set train.precision=fp32 --set data.batch_size=512"
  LINES_SHOWN=4 step ml100k-1 python3 -m gem_train $fp32 --out "$out/ml100k-1"
  if [ "$devices" -ge 2 ]; then
    step selfcheck-2 torchrun --standalone --nproc_per_node 2 -m gem_parallel.selfcheck --device cuda
    LINES_SHOWN=30 step ml100k-2 torchrun --standalone --nproc_per_node 2 -m gem_train $fp32 --out "$out/ml100k-2"
    LINES_SHOWN=30 step compare python3 tools/compare_runs.py "$out/ml100k-1" "$out/ml100k-2" --tolerance 1e-2
  fi
fi
exit $failed
