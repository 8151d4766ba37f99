#!/usr/bin/env bash
# What one host's cards can show of gem-parallel: activation memory, collectives, layouts, and how the preset "large"
# scales on 1, 2, 4, 8 of them as far as there are so many. Prints as it goes; OUT takes the JSON files. Under ten
# minutes; run it with nothing else on the host. Then `python tools/parallel_curves.py`.
#   OUT=results bash tools/cards.sh
#   REHEARSE=1 bash tools/cards.sh      the same on two and four processes of a CPU, small
set -u
cd "$(dirname "$0")"
out=$(realpath "${OUT:-.}")
export PYTHONPATH=$PWD:${PYTHONPATH:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
more="" cards=$(nvidia-smi -L 2>/dev/null | wc -l)
if [ -n "${REHEARSE:-}" ]; then
  more=--rehearse cards=4
fi
status=0

stages() { # seconds cards stages...
  local limit=$1 count=$2
  shift 2
  timeout "$limit" torchrun --standalone --nproc_per_node "$count" cards.py --out "$out" $more --stages "$@" || status=1
  echo "== $count cards, $*: until second $SECONDS"
}

if [ "$cards" -eq 1 ]; then
  stages 120 1 tests memory
else
  stages 240 2 tests memory comm scaling
  for count in 4 8; do
    [ "$count" -le "$cards" ] && stages 150 "$count" comm scaling
  done
fi
exit $status
