#!/usr/bin/env bash
# Checks the system on a machine with CUDA devices, where no CI runs: `bash tools/gpu_check.sh OUT`.
# Kernel tests on the card, equality of the sharded model with plain PyTorch, and the ml100k recipe on one and (where there are two)
# on two devices, in fp32 with one loss curve. Logs and run folders go to OUT. Needs the packages importable, nothing installed.
set -uo pipefail
out=${1:?usage: gpu_check.sh OUT}
mkdir -p "$out"
devices=$(python3 -c 'import torch; print(torch.cuda.device_count())')
failed=0
step() { # step LINES NAME COMMAND...: run, keep the log, show its last lines and the time
  local lines=$1 name=$2 began=$SECONDS; shift 2
  "$@" >"$out/$name.log" 2>&1 || { failed=1; echo "FAILED $name"; }
  tail -n "$lines" "$out/$name.log"; echo "== $name: $((SECONDS - began)) s"
}
# The kernels' tests run beside the one-device recipe where a second device is free.
CUDA_VISIBLE_DEVICES=$((devices >= 2 ? 1 : 0)) timeout 400 python3 -m pytest -q -p no:cacheprovider -n 12 packages/gem-kernels/tests \
  >"$out/kernels.log" 2>&1 &
kernels=$!
[ "$devices" -ge 2 ] || wait $kernels
step 12 doctor python3 -m gem_train doctor
step 3 selfcheck-1 python3 -m gem_parallel.selfcheck --device cuda
step 24 ml100k-bf16 python3 -m gem_train run ml100k --out "$out/ml100k-bf16"
step 3 ml100k-1 python3 -m gem_train run ml100k --set train.precision=fp32 --out "$out/ml100k-1"
wait $kernels || { failed=1; echo "FAILED kernels"; }
tail -n 12 "$out/kernels.log"
if [ "$devices" -ge 2 ]; then
  step 3 selfcheck-2 torchrun --standalone --nproc_per_node 2 -m gem_parallel.selfcheck --device cuda
  step 24 ml100k-2 torchrun --standalone --nproc_per_node 2 -m gem_train run ml100k --set train.precision=fp32 --out "$out/ml100k-2"
  step 12 compare python3 tools/compare_runs.py "$out/ml100k-1" "$out/ml100k-2" --tolerance 1e-2
fi
exit $failed
