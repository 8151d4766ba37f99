#!/usr/bin/env bash
# Variants of the kernels that memory should bound, on one Hopper card in about two minutes: their tests, then each in
# turns with the kernel that runs, then a profile. `OUT=folder bash tools/memory_bound.sh` from the root of a checkout.
# Predictions: docs/notes/norms.md and docs/notes/lowprec.md, "Counted bounds".
set -u
OUT=${OUT:-out/memory-bound}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
commit=${GEM_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}
kernels=packages/gem-kernels/tests lowprec=packages/gem-lowprec/tests

timeout 40 "$python" -m pytest -v -n 8 -p no:cacheprovider \
    "$kernels/test_norms.py" "$kernels/test_norm_linear.py" "$lowprec/test_lowprec_norms_warps.py" \
    "$lowprec/test_lowprec_sums.py" -k "one_warp or many or stays or card" > "$OUT/tests.txt" 2>&1
grep FAILED "$OUT/tests.txt" | head -20
tail -n 2 "$OUT/tests.txt"

timeout 40 "$python" -m gem_kernels.bench norms --variant triton --pass backward --peer copy --peer fill \
    --rounds 3 --rep 15 --jobs 6 --case layer-swish-512 --case layer-384 --case layer-512 --case layer-residual-512 \
    --case rms-256 --case rms-512 --case most-recent-256 --commit "$commit" --out "$OUT/norms.json" 2>&1 | tee "$OUT/norms.txt" | tail -n 50

timeout 35 "$python" -m gem_lowprec.bench layer-norm rms-norm quantize-65536 --rounds 3 --rep 12 --jobs 6 --seconds 30 \
    --commit "$commit" --out "$OUT/lowprec.json" 2>&1 | tee "$OUT/lowprec.txt" | tail -n 35

timeout 30 "$python" -m gem_kernels.bench norms --variant hopper --pass forward --peer parts --peer torch.compile \
    --peer copy --rounds 3 --rep 12 --jobs 3 --case norm-linear-256-1024 --case norm-linear-256-512 \
    --case norm-linear-256-256 --commit "$commit" --out "$OUT/resident.json" 2>&1 | tee "$OUT/resident.txt" | tail -n 14

cat > "$OUT/profiled.py" <<'PY'
import torch
from gem_kernels.norms import triton

x, dy = (torch.randn(2**18, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
w, b = torch.ones(512, device="cuda"), torch.zeros(512, device="cuda")
for swish in (False, True):
    triton.backward(dy, None, x, w, b, "layer", 1e-6, swish)
    triton.backward(dy, None, x, w, b, "layer", 1e-6, swish, triton.alone(512, extra=int(swish)))
torch.cuda.synchronize()
PY
timeout 20 ncu --section SpeedOfLight --section WarpStateStats --section SchedulerStats \
    --section MemoryWorkloadAnalysis -k regex:backward_kernel "$python" "$OUT/profiled.py" > "$OUT/ncu.txt" 2>&1
grep -E "backward_kernel|Duration|Throughput|Issue|Eligible|stall|Stall" "$OUT/ncu.txt" | head -60
exit 0
