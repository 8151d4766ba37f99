"""What the Hopper backend says without a GPU: which problems it takes, what it would compile, and that the
benchmark's gate closes.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from gem_kernels.bench import cases, suite
from gem_kernels.dispatch import Problem
from gem_kernels.hopper import support
from gem_kernels.jagged_attention import jagged_attention


def problem(*features: str, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> Problem:
    return Problem(
        op="jagged_attention", device=torch.device("cuda"), dtype=dtype, head_dim=head_dim, features=frozenset(features)
    )


def test_what_it_takes() -> None:
    assert support.applies(problem())[0]
    assert support.applies(problem("shared_q", "return_lse", dtype=torch.float16, head_dim=64))[0]


@pytest.mark.parametrize(
    ("refused", "because"),
    [
        (problem("bias"), "bias"),
        (problem("causal"), "causal"),
        (problem("window"), "window"),
        (problem("grouped"), "key heads"),
        (problem(dtype=torch.float32), "float32"),
        (problem(head_dim=96), "96"),
    ],
)
def test_what_it_refuses_and_why(refused: Problem, because: str) -> None:
    able, reason = support.applies(refused)
    assert not able
    assert because in reason


@pytest.mark.slow
def test_kernels_build_for_hopper_without_a_gpu() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    for match in ("gdpa silu hopper forward d64 3x64-across-6", "jfa hopper backward d64 fused"):
        command = [sys.executable, "-m", "gem_kernels.compile_check", "--arch", "90", "--match", match]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "wgmma.mma_async.bf16" in done.stdout


def test_case_names_are_checked() -> None:
    assert cases.case("self-half-512").q.max() <= 512
    with pytest.raises(ValueError, match="unknown case 'nope'"):
        cases.case("nope")


def small() -> suite.Problem:
    torch.manual_seed(0)
    return suite.Problem.make(
        cases.Case("small", np.array([5, 0, 40]), np.array([7, 3, 40])), None, torch.device("cpu")
    )


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, p: suite.Problem) -> torch.Tensor:
    return jagged_attention(q, k, v, *p.where, backend="reference")


def test_the_gate_lets_a_right_kernel_through() -> None:
    p = small()
    variant = suite._by_autograd(lambda *x: attend(*x, p), (p.q, p.k, p.v), p.dout)
    errors = suite.gate(p, {"right": variant}, ("forward", "backward"))
    assert set(errors) == {("right", "forward"), ("right", "backward")}
    assert max(errors.values()) < suite.TOLERANCE


@pytest.mark.parametrize("spoil", [lambda x: x * 1.02, lambda x: x.index_fill(0, torch.tensor([6]), float("nan"))])
def test_the_gate_stops_a_wrong_kernel(spoil) -> None:  # type: ignore[no-untyped-def]
    p = small()
    variant = suite._by_autograd(lambda *x: spoil(attend(*x, p)), (p.q, p.k, p.v), p.dout)
    with pytest.raises(RuntimeError, match="wrong forward is wrong"):
        suite.gate(p, {"wrong": variant}, ("forward",))
