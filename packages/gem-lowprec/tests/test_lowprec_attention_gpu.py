"""FP8 attention on a Hopper card: the quantiser bit for bit, the forward against its emulation and against float64."""

from __future__ import annotations

import pytest
import torch
from gem_kernels import jagged_attention
from gem_kernels.testing import poisoned
from gem_lowprec import low_precision_attention
from gem_lowprec.attention import launch
from gem_lowprec.attention.operands import Operands, key_blocks, quantise, quantise_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
# query lengths, key lengths, query heads, key heads, head dimension
CASES = [
    ((300, 0, 1, 64, 65, 127, 128, 129, 700), (257, 5, 1, 64, 65, 127, 0, 129, 1000), 4, 4, 128),
    ((512, 33, 900), (512, 33, 900), 4, 2, 128),
    ((200, 1000), (130, 3000), 2, 2, 128),
    ((300, 70, 64), (257, 100, 128), 4, 1, 64),
    ((5,), (0,), 4, 4, 128),
]
RUNS = [*((case, launch.Config()) for case in CASES), (CASES[0], launch.Config(stages=4))]


def offsets(lengths):
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


def inputs(case, dtype=torch.bfloat16):
    """Q, K, V as slices of a packed projection where their heads allow it; sizes that differ by row."""
    q_lengths, k_lengths, heads, kv_heads, dim = case
    torch.manual_seed(sum(q_lengths) + dim)
    q = torch.randn(sum(q_lengths), heads + 1, dim, device="cuda")[:, 1:]
    kv = torch.randn(sum(k_lengths), 2 * kv_heads, dim, device="cuda")
    k, v = kv.to(dtype).split(kv_heads, dim=1)
    v = v * torch.exp2(torch.randint(-6, 6, (sum(k_lengths), 1, 1), device="cuda")).to(dtype)
    q = (q * torch.rand(sum(q_lengths), 1, 1, device="cuda")).to(dtype)
    return (q, k, v), offsets(q_lengths), offsets(k_lengths), max(q_lengths), max(k_lengths)


def relative(got, expected):
    return float((got.detach().double() - expected).norm() / expected.norm().clamp(min=1e-30))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_operands_are_the_reference_s_bit_for_bit(case, dtype):
    tensors, q_offsets, k_offsets, max_q, max_k = inputs(case, dtype)
    with poisoned():
        got = quantise(*tensors, q_offsets, k_offsets, max_q, max_k)
    expected = quantise_reference(*tensors, q_offsets, k_offsets)
    for dtype_back in (torch.bfloat16, torch.float32):  # by a kernel, and by torch
        for back, right in zip(got.dequantize(dtype_back), expected.dequantize(torch.float32), strict=True):
            assert torch.equal(back.float(), right)
    used = torch.unique(key_blocks(k_offsets, tensors[1].shape[0])[0])
    for name in ("q", "q_scale", "k"):
        assert same(getattr(got, name), getattr(expected, name)), name
    for name in ("v", "kv_scale"):
        assert same(getattr(got, name)[used], getattr(expected, name)[used]), name


@pytest.mark.parametrize(("case", "config"), RUNS, ids=str)
def test_forward(case, config):
    tensors, q_offsets, k_offsets, max_q, max_k = inputs(case)
    made = quantise_reference(*tensors, q_offsets, k_offsets)
    scale = case[4] ** -0.5
    with poisoned():
        out, lse = launch.forward(made, scale, config=config)
    again = launch.forward(made, scale, config=config)
    assert same(out, again[0])
    assert same(lse, again[1])
    exact, exact_lse = jagged_attention(
        *(x.double() for x in made.dequantize(torch.float32)), q_offsets, k_offsets, max_q, max_k, return_lse=True
    )
    emulated, _ = low_precision_attention(
        *(x.double() for x in tensors), q_offsets, k_offsets, max_q, max_k, return_lse=True, backend="emulated"
    )
    seen = torch.isfinite(exact_lse)
    assert torch.equal(torch.isneginf(lse), ~seen)
    assert not out[~seen].any()
    if seen.any():
        assert ((lse - exact_lse).abs() / (1 + exact_lse.abs()))[seen].max() < 2e-3
    assert relative(out, exact) < 0.04  # of P in E4M3
    assert relative(out, emulated) < 0.02  # the tensor cores' sums, BF16, and a P that rounds the other way


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_the_emulation(case):
    tensors, q_offsets, k_offsets, max_q, max_k = inputs(case)
    found = []
    for backend, kind in (("native", torch.bfloat16), ("emulated", torch.float64)):
        leaves = [x.detach().to(kind).requires_grad_() for x in tensors]
        out, _lse = low_precision_attention(
            *leaves, q_offsets, k_offsets, max_q, max_k, return_lse=True, backend=backend
        )
        torch.manual_seed(1)
        grad = torch.randn(out.shape, device="cuda", dtype=torch.float64).bfloat16()
        found.append((out, *torch.autograd.grad(out, leaves, grad.to(kind))))
    for got, expected in zip(*found, strict=True):
        assert relative(got, expected.detach()) < 0.02


def test_it_is_what_a_layer_gets_unasked_and_can_be_captured():
    tensors, q_offsets, k_offsets, max_q, max_k = inputs(CASES[1])
    run = lambda: low_precision_attention(*tensors, q_offsets, k_offsets, max_q, max_k)  # noqa: E731
    expected = run()
    assert isinstance(quantise(*tensors, q_offsets, k_offsets, max_q, max_k), Operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    graph.replay()
    torch.cuda.synchronize()
    assert same(out, expected)


def test_it_compiles_whole():
    tensors, q_offsets, k_offsets, max_q, max_k = inputs(CASES[1])
    leaves = [x.detach().requires_grad_() for x in tensors]

    def run(q, k, v):
        return low_precision_attention(q, k, v, q_offsets, k_offsets, max_q, max_k)

    results = []
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        out = call(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
    for eager, compiled in zip(*results, strict=True):
        assert same(eager, compiled)
