"""Triton quantisers: the reference's bits for every format, layout and kind of value; built for GPUs without one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from gem_kernels.testing import poisoned
from gem_lowprec import (
    E2M1,
    E5M2,
    FP8_1X128,
    FP8_128X128,
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP8,
    MXFP8_E5M2,
    MXFP8_SQUARE,
    QTensor,
    QuantSpec,
    Randoms,
    ScaleMode,
    quantize,
)

SPECS = [
    MXFP8, MXFP8_E5M2, MXFP8_SQUARE, MXFP4, FP8_1X128, FP8_128X128, FP8_ROW,
    MXFP4.with_(name="mxfp4_square", block=(32, 32)),
    FP8_1X128.with_(name="float32_1x128", scale="float32"),
    FP8_ROW.with_(name="float32_row", scale="float32"), FP8_ROW.with_(name="pow2_row_e5m2", scale="pow2", element=E5M2),
    FP8_ROW.with_(name="mx_row", scale="e8m0"),
]  # fmt: skip
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def values(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    """Many binades, rows of zeros, subnormals and the largest numbers, exact ties, an infinity and a NaN."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g) * torch.exp2(torch.randn(rows, cols, generator=g) * 6)
    ties = torch.randint(-16, 17, (cols,), generator=g) + 0.5  # halfway between E4M3's integers where above 8
    if rows > 8:
        x[:6] = torch.stack((torch.zeros(cols), x[1] * 1e-42, x[2] * 1e-30, x[3] * 1e34, ties, -ties / 1024))
        x[-1, 3], x[-2, cols // 2] = float("inf"), float("nan")
    return x


def same(a: QTensor, b: QTensor) -> bool:
    """Equal bit for bit, but for the sign of a NaN."""

    def bits(t: torch.Tensor) -> torch.Tensor:
        code = t.cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)
        return torch.where(t.cpu().float().flatten().isnan(), 0x7F, code) if t.element_size() == 1 else code

    return (
        a.data.shape == b.data.shape
        and a.scale.shape == b.scale.shape
        and (a.scale.dtype, a.data.dtype, a.dim, a.shape) == (b.scale.dtype, b.data.dtype, b.dim, b.shape)
        and torch.equal(bits(a.data), bits(b.data))
        and torch.equal(bits(a.scale), bits(b.scale))
    )


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("shape", "dim", "dtype"), [
    ((70, 300), -1, torch.float32), ((70, 300), 0, torch.bfloat16), ((1, 1), -1, torch.float16),
    ((33, 129), -1, torch.bfloat16),
])  # fmt: skip
def test_the_references_bits(spec: QuantSpec, shape: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    x = values(*shape).to(dtype)
    with poisoned():
        got = quantize(x.to(DEVICE), spec, dim, backend="triton")
    assert same(got, quantize(x, spec, dim))


@pytest.mark.parametrize("spec", [MXFP8, MXFP8_E5M2, MXFP4, FP8_128X128, FP8_ROW], ids=str)
@pytest.mark.parametrize("dim", [-1, -2])
def test_stochastic_rounding_uses_the_same_words(spec: QuantSpec, dim: int) -> None:
    x = values(34, 140, seed=1)
    for randoms in (Randoms(seed=(1 << 63) + 7, stream=(1 << 32) - 1, step=1, offset=(1 << 40) + 3), Randoms(seed=1)):
        got = quantize(x.to(DEVICE), spec, dim, randoms=randoms, backend="triton")
        assert same(got, quantize(x, spec, dim, randoms=randoms))
    plain = torch.randn(8, 64)
    assert not same(
        quantize(plain.to(DEVICE), spec, dim, randoms=randoms, backend="triton"), quantize(plain, spec, dim)
    )


@pytest.mark.parametrize("mode", list(ScaleMode))
def test_every_scale_mode(mode: ScaleMode) -> None:
    x = values(16, 96, seed=2)
    # Mantissas at and next to the places where the modes change their mind.
    x[6:10, ::32] = torch.tensor([1.0, 1.75, 1.75 + 2**-23, 1.9375])[:, None] * 2.0**9
    for element_spec in (MXFP8, MXFP8_E5M2, MXFP4):
        spec = element_spec.with_(mode=mode)
        assert same(quantize(x.to(DEVICE), spec, backend="triton"), quantize(x, spec))


def test_every_float16_through_the_rounding() -> None:
    """All 2^16 codes of float16 in one row without a maximum to scale by: scale 1 for E4M3's range."""
    codes = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = codes[codes.isfinite() & (codes.abs() <= 448)].float().reshape(1, -1)
    spec = FP8_ROW.with_(name="mx_row", scale="e8m0")
    assert same(quantize(x.to(DEVICE), spec, backend="triton"), quantize(x, spec))
    spec, x = spec.with_(element=E2M1), x[x.abs() <= 6].reshape(1, -1)
    assert same(quantize(x.to(DEVICE), spec, backend="triton"), quantize(x, spec))


def test_other_shapes_and_strides() -> None:
    x = values(12, 256).reshape(3, 4, 256).to(DEVICE)
    assert same(quantize(x, MXFP8, backend="triton"), quantize(x.cpu(), MXFP8))
    assert same(quantize(x[..., :255], MXFP4, backend="triton"), quantize(x[..., :255].cpu(), MXFP4))
    assert same(quantize(x, MXFP4, 1, backend="triton"), quantize(x.cpu(), MXFP4, 1))
    assert same(quantize(x, FP8_ROW, 1, backend="triton"), quantize(x.cpu(), FP8_ROW, 1))
    strided = values(64, 200).to(DEVICE)[::2, 3:190:3]
    assert same(quantize(strided, MXFP8_SQUARE, backend="triton"), quantize(strided.cpu(), MXFP8_SQUARE))
    for shape in ((0, 64), (64, 0), (0, 0)):
        for spec in (MXFP8, FP8_ROW):
            assert same(quantize(torch.empty(shape, device=DEVICE), spec, backend="triton"),
                        quantize(torch.empty(shape), spec))  # fmt: skip


def test_what_the_kernels_do_not_do_is_refused() -> None:
    x = torch.randn(8, 64, device=DEVICE)
    for bad, spec, why in (
        (x, FP8_TENSOR, "span several rows"),
        (x, MXFP8.with_(block=(1, 48)), "powers of two"),
        (x[None], MXFP8_SQUARE, "matrices"),
        (x.double(), MXFP8, "float64"),
    ):
        with pytest.raises(ValueError, match=why):
            quantize(bad, spec, backend="triton")
    with pytest.raises(ValueError, match="'cuda'"):
        quantize(x, MXFP8, backend="cuda")


BUILD = r"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gem_kernels.compile_check import build
from gem_lowprec.kernels import compile_cases

for case in compile_cases():
    if case.name in ("quantize mxfp8_square", "quantize fp8_row stochastic"):
        for arch in case.arch:
            line = build(case, arch)
            source = ASTSource(fn=case.kernel, signature=dict(case.signature), constexprs=dict(case.constants))
            ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32)).asm["ptx"]
            print(arch, "spilled     0 B" in line, "cvt.rn.satfinite.e4m3x2" in ptx, "div.full" in ptx, ".ftz" in ptx)
"""


def test_kernels_build_without_a_gpu() -> None:
    """With the hardware's conversion where rounding is to nearest, without divisions and flushed subnormals."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", BUILD], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        f"{arch} True {nearest} False False" for nearest in (True, False) for arch in (90, 100)
    ]
