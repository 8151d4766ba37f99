#!/usr/bin/env bash
# Which part of the copy engines does what it should on two cards (CARDS=n: on n): small steps first, each in processes
# and with a time limit of its own, then training without and with each way to copy. Prints as it goes, and at the end
# how every step ended. About five minutes when nothing hangs; a step that does ends after some 15 s, with who waits.
#   OUT=results bash tools/sm_free.sh
#   OUT=results REHEARSE=1 bash tools/sm_free.sh    the same on two processes of a CPU, small, with files for windows
# Expected, with torch 2.13 or before: "race, zeroed late" fails (torch's "[FATAL] ... failed to receive signal"), and
# everything else ends in "equal". Where it does not fail, windows that are zeroed late are not why training hung. Where
# "gathers, held" hangs and "gathers" does not, hosts wait for more than their own cards (docs/notes/parallel.md).
set -u
cd "$(dirname "$0")"
out=$(realpath "${OUT:-.}") python=${PYTHON:-python3} cards=${CARDS:-2}
mkdir -p "$out"
export PYTHONPATH=$PWD:${PYTHONPATH:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} TORCH_SYMM_MEM_DISABLE_MULTICAST=${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}
device="--device cuda" small="" model="--device cuda --model large --batch 256" tiny="--device cuda --model tiny --batch 64"
if [ -n "${REHEARSE:-}" ]; then
  device="--device cpu" small="--mib 1 --width 64 --layers 1 --steps 2"
  model="--device cpu --model tiny --batch 8" tiny=$model
fi
noise='symbolic_trace|^W[0-9]{4}|UserWarning|FutureWarning|return func|warnings.warn'
ended=()

step() { # seconds name command...
  local limit=$1 name=$2 began=$SECONDS
  shift 2
  echo "== $name, at most $limit s"
  timeout -k 3 "$limit" "$python" -m torch.distributed.run --standalone --nproc_per_node "$cards" "$@" 2>&1 |
    grep --line-buffered -vE "$noise" | tee "$out/$(echo "$name" | tr -c 'a-z0-9\n' '-').txt"
  local result=${PIPESTATUS[0]}
  ended+=("$name: status $result after $((SECONDS - began)) s$([ "$result" = 124 ] && echo ' (HUNG)')")
  return "$result"
}

windows() { # seconds name arguments...
  local limit=$1 name=$2
  shift 2
  step "$limit" "$name" -m gem_parallel.bench windows $device $small --step "$@"
}

rows() { # seconds name of-a-row model... -- rows...; what hangs is passed over at the next try
  local limit=$1 name=$2 row=$3 first=$SECONDS
  shift 3
  step "$limit" "$name" scaling_cards.py --row-seconds "$row" --seconds "$limit" --out "$out/$name.json" "$@" && return
  for _ in 1 2; do
    local left=$((limit - SECONDS + first))
    [ "$left" -gt 15 ] || return
    step "$left" "$name, again" scaling_cards.py --row-seconds "$row" --seconds "$left" --out "$out/$name.json" --resume "$@" && return
  done
}

if [ -z "${REHEARSE:-}" ]; then # what holds up a host while its card waits: on one card
  timeout -k 3 75 "$python" -m gem_parallel.bench held 2>&1 | tee "$out/held.txt"
  ended+=("held: status ${PIPESTATUS[0]}")
fi
windows 75 "make" make
windows 75 "race, zeroed before" race --zeroed before
windows 75 "race, zeroed late" race --zeroed late
windows 75 "gathers, read, streams" gathers
windows 75 "gathers, read, kernels" gathers --barriers kernels
windows 75 "gathers, held, streams" gathers --held
windows 75 "gathers, held, kernels" gathers --barriers kernels --held
windows 75 "gathers, written, kernels" gathers --copies written --barriers kernels
windows 75 "stack, read, streams" stack
windows 75 "stack, written, kernels" stack --copies written --barriers kernels
windows 75 "stack, written, kernels, reduced" stack --copies written --barriers kernels --reduce
rows 120 tiny 25 $tiny --only balanced "+ SM-free" "SM-free, kernels" "SM-free, written" "SM-free, reduced"
rows 180 large 45 $model --only balanced "+ SM-free" "SM-free, written" "SM-free, reduced" "SM-free, kernels"
printf '%s\n' "" "${ended[@]}"
