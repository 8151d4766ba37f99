"""The plain PyTorch operators against formulas that loop over sequences in float64, and gradcheck."""

import re

import pytest
import torch
from gem_kernels import block_attention, gdpa, jagged_attention, rope, rote
from gem_kernels.gdpa import activations
from gem_kernels.gdpa.activations import ACTIVATIONS, POLYNOMIALS, formula, resolve
from gem_kernels.testing import (
    loop_attention,
    loop_blocks,
    loop_rope,
    offsets_of,
    poisoned,
    random_heads,
    relative_error,
)

Q_LENGTHS, K_LENGTHS = [3, 0, 7, 0, 1, 5], [4, 2, 3, 0, 6, 5]
MASKS = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"window": (None, 0)},
    {"window": (1, -1)},
    {"causal": True, "window": (2, 5)},
]


def problem(heads=4, kv_heads=2, dim=6, q_lengths=Q_LENGTHS, k_lengths=K_LENGTHS, dtype=torch.float64, shared=False):
    rows = 3 if shared else sum(q_lengths)
    q = random_heads(rows, heads, dim, dtype=dtype, seed=1, requires_grad=True)
    k = random_heads(sum(k_lengths), kv_heads, dim, dtype=dtype, seed=2, requires_grad=True)
    v = random_heads(sum(k_lengths), kv_heads, dim, dtype=dtype, seed=3, requires_grad=True)
    q_offsets = None if shared else offsets_of(q_lengths)
    return (q, k, v), (q_offsets, offsets_of(k_lengths, dtype=torch.int32 if shared else torch.int64))


def sizes(shared):
    return (3 if shared else 9, 8)  # maxima that no sequence reaches


def agree(got, expected, inputs, seed=9):
    """Outputs and gradients of two differentiable results agree to float64's precision."""
    grads = []
    for out in (got, expected):
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        grads.append(torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True))
    assert relative_error(got, expected) < 1e-12
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) < 1e-11


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_softmax_is_the_formula(mask, shared):
    tensors, offsets = problem(shared=shared)
    with poisoned():
        out, lse = jagged_attention(*tensors, *offsets, *sizes(shared), return_lse=True, **mask)
    expected, expected_lse = loop_attention(*tensors, *offsets, **mask)
    agree(out, expected, tensors)
    finite = expected_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite)
    assert (lse[~finite] == -torch.inf).all()
    agree(lse[finite], expected_lse[finite], tensors[:2])


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("heads", [1, 4])
def test_bias_and_its_gradient(batch, heads):
    tensors, offsets = problem()
    bias = torch.randn(batch, heads, *sizes(False), dtype=torch.float64, requires_grad=True)
    out = jagged_attention(*tensors, *offsets, *sizes(False), bias=bias, causal=True, scale=0.7)
    expected, _ = loop_attention(*tensors, *offsets, bias=bias, causal=True, scale=0.7)
    agree(out, expected, (*tensors, bias))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gdpa_is_the_formula(activation):
    tensors, offsets = problem()
    out = gdpa(*tensors, *offsets, *sizes(False), activation=activation, out_scale=0.25)
    expected, _ = loop_attention(*tensors, *offsets, activation=activation.removesuffix("_poly"), out_scale=0.25)
    agree(out, expected, tensors)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_gdpa_masks(mask, shared):
    tensors, offsets = problem(shared=shared)
    out = gdpa(*tensors, *offsets, *sizes(shared), scale=0.5, **mask)
    expected, _ = loop_attention(*tensors, *offsets, activation="silu", scale=0.5, **mask)
    agree(out, expected, tensors)


def test_hstu_is_a_member():
    """SiLU(Q K^T) V / N over a padded batch with a causal mask: HSTU's formula (Zhai et al., 2024, equation 2)."""
    lengths, heads, dim, longest = [5, 1, 8], 2, 4, 8
    offsets = offsets_of(lengths)
    rows = [random_heads(sum(lengths), heads, dim, dtype=torch.float64, seed=n, requires_grad=True) for n in (1, 2, 3)]
    keep = torch.arange(longest) < torch.tensor(lengths)[:, None]
    q, k, v = (
        torch.zeros(3, longest, heads, dim, dtype=torch.float64).masked_scatter(keep[..., None, None], x) for x in rows
    )
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k)
    weights = scores * torch.sigmoid(scores) / longest * torch.ones(longest, longest).tril()
    expected = torch.einsum("bhnm,bmhd->bnhd", weights, v)[keep]
    out = gdpa(*rows, offsets, offsets, longest, longest, scale=1.0, out_scale=1 / longest, causal=True)
    agree(out, expected, rows)


@pytest.mark.parametrize("shared", [False, True])
def test_gdpa_adds_a_residual(shared):
    tensors, offsets = problem(shared=shared)
    residual = random_heads(18 if shared else 16, 4, 6, dtype=torch.float64, seed=4, requires_grad=True)
    out = gdpa(*tensors, *offsets, *sizes(shared), out_scale=0.5, causal=True, residual=residual)
    expected, _ = loop_attention(*tensors, *offsets, activation="silu", out_scale=0.5, causal=True)
    agree(out, expected + residual, (*tensors, residual))
    for wrong in (residual[1:], residual.float(), residual[:, :2]):
        with pytest.raises(ValueError, match="residual must be as the output"):
            gdpa(*tensors, *offsets, *sizes(shared), residual=wrong)


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials_stay_within_their_stated_errors(name):
    stated = POLYNOMIALS[name]
    x = torch.linspace(-stated.bound, stated.bound, 100_001, dtype=torch.float64, requires_grad=True)
    errors = []
    for dtype in (torch.float64, torch.float32):
        y, exact = formula(name)(x.to(dtype)).double(), ACTIVATIONS[name.split("_")[0]](x)
        slopes = [torch.autograd.grad(z.sum(), x)[0] for z in (y, exact)]
        errors.append(((y - exact).abs().max().item(), (slopes[0] - slopes[1]).abs().max().item()))
    assert errors[0][0] <= 1.05 * stated.error
    assert errors[1][0] <= 1.05 * stated.error
    assert 0.9 * stated.slope_error <= errors[1][1] <= 1.05 * stated.slope_error
    assert formula(name)(torch.zeros(1)).item() == 0.0


def test_a_polynomial_is_used_within_a_bound_only():
    activations._announce_exact.cache_clear()
    assert [resolve("silu_poly", b) for b in (1.0, 2.0, 2.1, 6.0)] == [f"silu_poly{r}" for r in (2, 2, 4, 6)]
    assert [resolve("gelu_poly", b) for b in (0.1, 4.0)] == ["gelu_poly2", "gelu_poly4"]
    assert resolve("silu", 1.0) == "silu"
    with pytest.warns(UserWarning, match="silu_poly is computed exactly.*as large as 6.5, and its widest.*covers 6"):
        assert resolve("silu_poly", 6.5) == "silu"
    with pytest.warns(UserWarning, match="gelu_poly is computed exactly.*no score_bound was given"):
        assert resolve("gelu_poly", None) == "gelu"
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="score_bound must be a positive number"):
            resolve("silu_poly", wrong)
    with pytest.raises(ValueError, match="unknown activation 'silu_poly4'"):
        resolve("silu_poly4", 1.0)


@pytest.mark.parametrize("name", ["silu_poly", "gelu_poly"])
def test_gdpa_by_polynomial_is_gdpa(name):
    tensors, offsets = problem()
    largest = (tensors[0].abs().amax() * tensors[1].abs().amax() * tensors[0].shape[2]).item()
    options = {"scale": 3.9 / largest, "out_scale": 0.5}
    got = gdpa(*tensors, *offsets, *sizes(False), activation=name, score_bound=3.9, **options)
    exact = gdpa(*tensors, *offsets, *sizes(False), activation=name.split("_")[0], **options)
    assert 0 < (got - exact).abs().max() < 1e-3
    for a, b in zip(*(torch.autograd.grad(x.sum(), tensors) for x in (got, exact)), strict=True):
        assert (a - b).abs().max() < 1e-2 * b.abs().max()


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("base", [None, 100.0])
def test_block_attention_is_attention_of_blocks(activation, base):
    lengths = [0, 1, 15, 16, 17, 40, 0]
    q, k, v = (random_heads(sum(lengths), h, 4, dtype=torch.float64, seed=h, requires_grad=True) for h in (4, 2, 2))
    offsets = offsets_of(lengths)
    out = block_attention(q, k, v, offsets, block=16, activation=activation, rope=base)
    places = torch.cat([torch.arange(n) for n in lengths])
    turned = (loop_rope(x, places, base) if base else x for x in (q, k))
    blocks = loop_blocks(offsets, 16)
    expected, _ = loop_attention(*turned, v, blocks, blocks, activation=activation)
    agree(out, expected, (q, k, v))


def test_rope_and_rote():
    lengths = [3, 0, 9]
    x = random_heads(12, 2, 8, dtype=torch.float64, requires_grad=True)
    places = torch.cat([torch.arange(n) for n in lengths])
    agree(rope(x, offsets_of(lengths), base=50.0), loop_rope(x, places, 50.0), (x,))
    elapsed = torch.rand(12, dtype=torch.float64) * 1e6
    agree(rote(x, elapsed, t_scale=60.0), loop_rope(x, torch.log(1 + elapsed / 60.0), 10000.0), (x,))


def test_gradcheck():
    tensors, offsets = problem(heads=2, kv_heads=1, dim=2, q_lengths=[2, 0, 3], k_lengths=[3, 1, 2])
    bias = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def softmax(q, k, v, bias):
        return jagged_attention(q, k, v, *offsets, 3, 3, bias=bias, window=(1, 1), return_lse=False)

    assert torch.autograd.gradcheck(softmax, (*tensors, bias))
    for activation in (*ACTIVATIONS, *POLYNOMIALS):
        public, bound = re.fullmatch(r"(\D*)(\d?)", activation).groups()
        assert torch.autograd.gradcheck(
            lambda q, k, v, a=public, b=bound: gdpa(
                q, k, v, *offsets, 3, 3, activation=a, scale=0.3, causal=True, score_bound=float(b) if b else None
            ),
            tensors,
        )
    assert torch.autograd.gradgradcheck(lambda q, k, v: gdpa(q, k, v, *offsets, 3, 3), tensors)


def test_empty_batches():
    for q_lengths, k_lengths in (([], []), ([0, 0], [0, 0]), ([2, 1], [0, 0]), ([0, 0], [2, 1])):
        tensors, offsets = problem(q_lengths=q_lengths, k_lengths=k_lengths)
        out, lse = jagged_attention(*tensors, *offsets, 4, 4, return_lse=True)
        assert out.shape == tensors[0].shape
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        assert (gdpa(*tensors, *offsets, 4, 4) == 0).all()
        for grad in torch.autograd.grad(out.sum(), tensors):
            assert (grad == 0).all()
        assert rope(tensors[0], offsets[0]).shape == tensors[0].shape
    q = random_heads(0, 2, 4)
    assert block_attention(q, q, q, offsets_of([0, 0]), rope=10.0).shape == (0, 2, 4)
    assert block_attention(q, q, q, offsets_of([]), rope=10.0).shape == (0, 2, 4)


def test_one_tensor_as_query_key_and_value():
    x = random_heads(8, 2, 4, dtype=torch.float64, requires_grad=True)
    offsets = offsets_of([5, 3])
    out = jagged_attention(x, x, x, offsets, offsets, 5, 5)
    expected, _ = loop_attention(x, x, x, offsets, offsets)
    agree(out, expected, (x,))


def test_half_precision_is_computed_in_float32():
    tensors, offsets = problem(dtype=torch.bfloat16)
    out, lse = jagged_attention(*tensors, *offsets, *sizes(False), return_lse=True)
    expected, _ = loop_attention(*tensors, *offsets)
    assert out.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert relative_error(out, expected) < 2**-8


def test_autocast_does_not_lower_the_precision():
    tensors, offsets = problem(dtype=torch.float32)
    for op in (jagged_attention, gdpa):
        expected = op(*tensors, *offsets, *sizes(False))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(op(*tensors, *offsets, *sizes(False)), expected)


def test_extreme_scores():
    q, k, v = (random_heads(6, 1, 4, dtype=torch.float32, seed=i) for i in range(3))
    offsets = offsets_of([4, 2])
    for level in (-1e4, 1e4):
        bias = torch.full((1, 1, 4, 4), level)
        out = jagged_attention(q, k, v, offsets, offsets, 4, 4, bias=bias)
        expected, _ = loop_attention(q, k, v, offsets, offsets, bias=bias)
        assert relative_error(out, expected) < 1e-3  # float32 holds level + score to about 1e-3


def test_compiles_without_a_graph_break():
    tensors, offsets = problem(dtype=torch.float32)

    def model(q, k, v, q_offsets, k_offsets):
        out = jagged_attention(q, k, v, q_offsets, k_offsets, 9, 8, causal=True)
        return out + rope(gdpa(q, k, v, q_offsets, k_offsets, 9, 8), q_offsets)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    got, expected = compiled(*tensors, *offsets), model(*tensors, *offsets)
    assert relative_error(got, expected) < 1e-6
    for a, b in zip(torch.autograd.grad(got.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True):
        assert relative_error(a, b) < 1e-5
