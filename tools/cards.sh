#!/usr/bin/env bash
# What one host's cards can show of gem-parallel: collectives, and how the preset "large" scales on 1, 2, 4, 8 of them as
# far as there are so many. Prints as it goes; OUT takes the JSON files, a file for every
# row as it is measured. In BUDGET seconds, of which the largest number of cards gets half of what is left, the next one
# half of the rest, and so on; rows there is no time for are said. Run it with nothing else on the host. Then
# `python tools/parallel_curves.py OUT/scaling-*.json`.
#   OUT=results bash tools/cards.sh
#   OUT=results BUDGET=300 WORLDS="8 2" ROWS="plain balanced SM-free" bash tools/cards.sh
#   OUT=results MORE="tests memory" bash tools/cards.sh       activation memory and its tests as well, first
#   OUT=results COMM="layouts collectives" bash tools/cards.sh     every layout against one process, too (a minute)
#   OUT=results REHEARSE=1 bash tools/cards.sh                the same on four and two processes of a CPU, small
# A row that hangs ends its processes; they begin again behind it, at most three times.
set -u
cd "$(dirname "$0")"
out=$(realpath "${OUT:-.}") budget=${BUDGET:-540} python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=$PWD:${PYTHONPATH:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
more="" cards=$(nvidia-smi -L 2>/dev/null | wc -l)
if [ -n "${REHEARSE:-}" ]; then
  more=--rehearse cards=4
fi
status=0

stages() { # seconds cards arguments...
  local limit=$1 count=$2
  shift 2
  timeout -k 5 "$limit" "$python" -m torch.distributed.run --standalone --nproc_per_node "$count" \
    cards.py --out "$out" $more "$@"
  local result=$?
  echo "== $count cards, $*: status $result, until second $SECONDS"
  return $result
}

scale() { # seconds cards
  local end=$((SECONDS + $1)) count=$2 resume="" left
  for _ in 1 2 3 4; do
    left=$((end - SECONDS))
    [ "$left" -gt 20 ] || break
    stages "$left" "$count" --stages scaling --seconds $((left - 8)) ${ROWS:+--rows $ROWS} $resume && return 0
    resume=--resume
  done
  return 1
}

if [ -n "${MORE:-}" ] || [ "$cards" -eq 1 ]; then
  stages 240 $((cards > 1 ? 2 : 1)) --stages ${MORE:-tests memory} || status=1
fi
worlds=""
for count in ${WORLDS:-8 4 2}; do
  [ "$cards" -gt 1 ] && [ "$count" -le "$cards" ] && worlds="$worlds $count"
done
set -- $worlds
while [ $# -gt 0 ]; do
  stages 90 "$1" --stages comm --parts ${COMM:-collectives} --limit 80 || status=1
  left=$((budget - SECONDS))
  scale $(($# > 1 ? left / 2 : left)) "$1" || status=1
  shift
done
exit $status
