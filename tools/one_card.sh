#!/usr/bin/env bash
# What one card can show of gem-parallel's activation memory, in under five minutes; run it with nothing else on the host.
# Correctness first, then memory against step time: a stack of blocks, GEM's preset "large" at two batches, compiled regions.
#   OUT=results bash tools/one_card.sh
#   REHEARSE=1 bash tools/one_card.sh      the same commands on a CPU, small
set -u
cd "$(dirname "$0")"
out=$(realpath "${OUT:-.}")
export PYTHONPATH=$PWD:${PYTHONPATH:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
bench="python3 -m gem_parallel.bench memory"
stack="--batch 32" model="gem_memory:large" first=256 second=1024 compiled="--batch 8"
if [ -n "${REHEARSE:-}" ]; then
  stack="--batch 2 --workload gem_parallel.bench.stack:small_workload --min-kib 4 --steps 1"
  model="gem_memory:tiny" first=8 second=16 compiled=$stack
fi
status=0

step() { # seconds name command...
  local limit=$1 name=$2
  shift 2
  echo "== $name"
  timeout "$limit" "$@" || { echo "== $name FAILED ($?)"; status=1; }
  echo "== $name: until second $SECONDS"
}

step 60 tests python3 -m pytest -q -m gpu -p no:cacheprovider ../packages/gem-parallel/tests/test_parallel_memory.py \
  ../packages/gem-parallel/tests/test_parallel_comm.py -k "card"
step 40 stack $bench $stack --out "$out/memory-stack.json"
step 70 large $bench --workload $model --batch $first --steps 3 --budgets 0.3 0.6 --out "$out/memory-large.json"
step 40 "large, a batch of $second" $bench --workload $model --batch $second --steps 2 --budgets 0.6 --only fp8 regions \
  --out "$out/memory-large-$second.json"
step 80 "compiled regions" $bench $compiled --engines compile --steps 3 --budgets 0.5 --out "$out/memory-compiled.json"
exit $status
