"""The list of the Hopper backward: every row in one tile of its kind, a sequence's queries behind its keys."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
import torch

SCRIPT = """
import numpy as np, torch
from gem_kernels.hopper import backward_tiles
rng = np.random.default_rng(4)
for batch, heads, kv_heads, consumers, lag in ((1, 1, 1, 1, 2), (7, 2, 1, 2, 0), (16, 4, 4, 2, 1), (20, 4, 2, 3, 2)):
    q, k = (rng.integers(0, 700, batch) * (rng.random(batch) > 0.2) for _ in range(2))
    at_q, at_k = (torch.from_numpy(np.concatenate([[0], np.cumsum(x)])) for x in (q, k))
    offsets = at_q.to(DEVICE), at_k.to(DEVICE, torch.int32)
    built = backward_tiles.build(
        *offsets, int(at_q[-1]), int(at_k[-1]), heads, kv_heads, consumers, programs=3, lag=lag
    )
    assert int(built.cursor) == 0 and len(built.told) == batch * kv_heads and not built.told.any()
    n = int(built.count)
    assert n <= len(built.table)
    seen = {0: torch.zeros(kv_heads, int(at_k[-1])), 1: torch.zeros(heads, int(at_q[-1]))}
    last_of_keys, work = {}, []
    for place, (start, rows, other_start, other_len, head, kind, b, first) in enumerate(built.table[:n].tolist()):
        own, other, at, at_other = (q, k, at_q, at_k) if kind else (k, q, at_k, at_q)
        assert 0 < rows <= 64 * consumers and start == at[b] + 64 * first and start + rows <= at[b + 1]
        assert rows % 64 == 0 or start + rows == at[b + 1]
        assert (other_start, other_len) == (at_other[b], other[b])
        seen[kind][head, start : start + rows] += 1
        if kind == 0:
            last_of_keys[b] = place
            work.append(-(-q[b] // 64) * -(-k[b] // 64))
        elif k[b]:  # behind all its keys, and `lag` tiles of keys for each program, or all there are
            between = [p for p, x in enumerate(built.table[:place, 5].tolist()) if x == 0 and p > last_of_keys[b]]
            left = int((built.table[place:n, 5] == 0).sum())
            assert len(between) >= 3 * lag or left == 0
            assert (built.table[place:n, 6][built.table[place:n, 5] == 0] != b).all()
    assert all((x == 1).all() for x in seen.values())
    assert work == sorted(work, reverse=True)
"""


def _run(device: str, **env: str) -> None:
    script = SCRIPT.replace("DEVICE", repr(device))
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(
    version("triton").startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
    reason="the interpreter of triton 3.6 needs numpy < 2.4",
)
def test_the_list_in_the_interpreter() -> None:
    _run("cpu", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_the_list_on_the_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    _run("cuda", TRITON_INTERPRET="0")
