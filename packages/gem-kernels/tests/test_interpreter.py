"""The interpreter's bfloat16 against torch's, and the compile check in a process that compiles."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from gem_kernels import compile_check, interpreter
from gem_kernels.dispatch import interpreting
from gem_kernels.tiling import CompileCase, Tile


def test_rounding_is_torchs():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4028235e38, 1e-45, 1.00390625, 1.01171875])
    x = torch.cat([bits.view(torch.float32), special])
    expected = x.bfloat16()
    got = torch.from_numpy(interpreter.narrow(x.numpy()).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(got.isnan(), expected.isnan())
    keep = ~expected.isnan()
    assert torch.equal(got[keep].view(torch.int16), expected[keep].view(torch.int16))
    assert torch.equal(torch.from_numpy(interpreter.widen(interpreter.narrow(x.numpy())))[keep], expected[keep].float())


@triton.jit
def _arithmetic(a_ptr, b_ptr, product_ptr, dot_ptr, less_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a, b = tl.load(a_ptr + at), tl.load(b_ptr + at)
    tl.store(product_ptr + at, a * b + a)
    tl.store(dot_ptr + at, tl.dot(a, b))
    tl.store(less_ptr + at, (a < b).to(tl.int32))


@pytest.mark.skipif(not interpreting(), reason="tests the interpreter (TRITON_INTERPRET=1)")
def test_bfloat16_arithmetic():
    interpreter.install()
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    product, dot = torch.empty_like(a), torch.empty(16, 16)
    less = torch.empty(16, 16, dtype=torch.int32)
    _arithmetic[(1,)](a, b, product, dot, less, N=16)
    assert torch.equal(product, a * b + a)
    torch.testing.assert_close(dot, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(less.bool(), a < b)


def test_compile_check_builds_without_a_gpu():
    """In a fresh process: in this one, kernels may be interpreted."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "gem_kernels.compile_check", "--arch", "90", "--match", "gdpa forward bf16 d64"]
    result = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "wgmma" in result.stdout
    assert "spilled     0 B" in result.stdout
    assert "all built" in result.stdout


def test_compile_check_of_no_kernel_is_a_mistake(monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    other = CompileCase(name="some kernel", kernel=None, signature={}, constants={}, tile=Tile(bm=64, bn=64))
    monkeypatch.setattr(compile_check, "cases", lambda: iter([other]))
    with pytest.raises(SystemExit, match="2"):
        compile_check.main(["--match", "no such kernel"])
    assert "no kernel's name contains 'no such kernel'" in capsys.readouterr().err


def test_compile_check_refuses_to_interpret(monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(SystemExit):
        compile_check.main([])
    assert "interprets kernels instead of compiling" in capsys.readouterr().err
