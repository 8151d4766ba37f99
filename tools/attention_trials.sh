#!/usr/bin/env bash
# Variants of the Hopper forward that nobody chooses yet, on one card: `OUT=folder bash tools/attention_trials.sh`, about three minutes.
# Each is compared with float64 before it is timed, in turn with what runs by default and FlashAttention-3, with the SMs' clock under
# each; then the same on inputs of one number, which need little power. Predictions: docs/notes/hopper-attention.md.
set -uo pipefail
: "${OUT:?where the results go}"
BUDGET=${BUDGET:-240} # seconds of all of it; what is not begun by then is named
began=$SECONDS
bench() { # bench NAME ARGUMENTS...
  local name=$1 left=$((BUDGET - SECONDS + began)); shift
  if [ "$left" -lt 15 ]; then echo "not run: $name"; return; fi
  PYTHONUNBUFFERED=1 timeout -k 2 "$left" "${PYTHON:-python3}" -m gem_kernels.bench "$@" --trials --clock --pass forward --peer fa3 \
    --skip triton --skip "hopper 3x" --skip "hopper s" --rep ${REP:-15} --rounds 3 --out "$OUT/$name.json" >"$OUT/$name.log" 2>&1 || echo "FAILED $name ($?)"
  grep -v "relative error" "$OUT/$name.log" | cut -c1-210
  grep -h "NOT TIMED\|wrong" "$OUT/$name.log" | cut -c1-300
  echo "== $name after $((SECONDS - began)) s"
}
nvidia-smi --query-gpu=name,clocks.max.sm,clocks.applications.graphics,power.limit --format=csv || echo "no nvidia-smi"
bench attention attention --case self-half-1024 --case self-half-512 --case half-4096-window --case half-4096-window-128 \
  --case half-4096-window-64 --case self-lognormal --case self-full-1024 --case self-full-1152 --case self-half-4096
bench gdpa gdpa --activation silu --case half-4096-window --case self-half-512 --case self-full-1024 --case self-half-1024 \
  --case half-4096-window-64
bench constant attention --constant --case self-full-1024 --case self-half-1024 --case self-half-512
