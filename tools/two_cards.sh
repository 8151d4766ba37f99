#!/usr/bin/env bash
# What only two cards can show of gem-parallel, in under five minutes: windows that cards read from one another, collectives
# beside a matrix product, FSDP's ladder, every layout against one process. Prints as it goes; OUT takes the JSON files.
#   OUT=results bash tools/two_cards.sh
#   REHEARSE=1 bash tools/two_cards.sh      the same commands on two processes of a CPU, small
set -u
cd "$(dirname "$0")/../packages/gem-parallel"
out=${OUT:-.}
ranks="torchrun --standalone --nproc_per_node ${CARDS:-2}"
device=cuda small="" ladder=""
if [ -n "${REHEARSE:-}" ]; then
  device=cpu small="--mib 1 --repeats 2" ladder="--layers 1 --width 64 --length 16"
fi
status=0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}

step() { # seconds name command...
  local limit=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" || { echo "== $name FAILED ($?)"; status=1; }
  echo "== $name: until second $SECONDS"
}

step 60 windows python3 -m pytest -q -m gpu -p no:cacheprovider tests/test_parallel_comm.py -k "window or two_cards"
step 70 collectives $ranks -m gem_parallel.bench comm --device $device --parts collectives $small --out "$out/comm.json"
step 60 ladder $ranks -m gem_parallel.bench comm --device $device --parts ladder $ladder --out "$out/ladder.json"
step 40 "ladder, NCCL's zero-CTA policy" env NCCL_CTA_POLICY=2 $ranks -m gem_parallel.bench comm --device $device \
  --parts ladder --steps 5 $ladder --out "$out/ladder-zero-cta.json"
step 60 layouts $ranks -m gem_parallel.selfcheck --device $device --steps 10
exit $status
