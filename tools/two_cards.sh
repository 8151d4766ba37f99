#!/usr/bin/env bash
# What only two cards can show of gem-parallel, in under five minutes: collectives beside a matrix product, FSDP's ladder,
# every layout against one process, and training through copy engines. Prints as it goes; OUT takes the JSON files.
#   OUT=results bash tools/two_cards.sh
set -u
cd "$(dirname "$0")/../packages/gem-parallel"
out=${OUT:-.}
ranks="torchrun --standalone --nproc_per_node ${CARDS:-2}"
status=0
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}

step() { # seconds name command...
  local limit=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" || { echo "== $name FAILED ($?)"; status=1; }
  echo "== $name took until second $SECONDS"
}

step 60 windows python3 -m pytest -q -m gpu -p no:cacheprovider tests/test_parallel_comm.py -k "window or two_cards"
step 70 collectives $ranks -m gem_parallel.bench comm --parts collectives --out "$out/comm.json"
step 60 ladder $ranks -m gem_parallel.bench comm --parts ladder --out "$out/ladder.json"
step 40 "ladder, NCCL's zero-CTA policy" env NCCL_CTA_POLICY=2 $ranks -m gem_parallel.bench comm --parts ladder \
  --steps 5 --out "$out/ladder-zero-cta.json"
step 60 layouts $ranks -m gem_parallel.selfcheck --device cuda --steps 10
exit $status
