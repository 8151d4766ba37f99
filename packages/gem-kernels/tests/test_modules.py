"""The modules: shapes, gradients everywhere, and agreement with the operators they wrap."""

import pytest
import torch
from gem_kernels.nn import GDPA, PMA, JaggedAttention, LayerNorm, NormLinear, RMSNorm
from gem_kernels.rotary import rote_positions
from gem_kernels.testing import loop_attention, loop_rope, offsets_of, relative_error

LENGTHS, CONTEXT = [5, 0, 3], [2, 4, 0]
OFFSETS, CONTEXT_OFFSETS = offsets_of(LENGTHS), offsets_of(CONTEXT)


def tokens(rows, width=16, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def all_parameters_learn(module, out):
    out.square().sum().backward()
    for name, p in module.named_parameters():
        assert p.grad is not None, name
        assert p.grad.abs().sum() > 0, name


def test_rms_norm():
    norm = RMSNorm(16, eps=1e-3).double()
    norm.weight.data.uniform_(0.5, 2)
    x = tokens(4)
    expected = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-3) * norm.weight
    assert relative_error(norm(x), expected) < 1e-14
    half = RMSNorm(16)(x.bfloat16())
    assert half.dtype == torch.bfloat16


def test_layer_norm():
    norm = LayerNorm(16, eps=1e-3).double()
    torch.nn.init.uniform_(norm.weight)
    torch.nn.init.uniform_(norm.bias)
    x = tokens(4)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-3) * norm.weight + norm.bias
    assert relative_error(norm(x), expected) < 1e-14
    assert LayerNorm(16)(x.bfloat16()).dtype == torch.bfloat16
    assert isinstance(norm, torch.nn.LayerNorm)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norm_linear_is_a_norm_and_a_linear(norm):
    module = NormLinear(16, 3, norm=norm).double()
    x = tokens(4)
    normed = x - x.mean(-1, keepdim=True) if norm == "layer" else x
    normed = normed / torch.sqrt(normed.square().mean(-1, keepdim=True) + 1e-6)
    assert relative_error(module(x), normed @ module.linear.weight.T + module.linear.bias) < 1e-12
    assert set(module.state_dict()) >= {"norm.weight", "linear.weight", "linear.bias"}
    with pytest.raises(ValueError, match="norm must be"):
        NormLinear(4, 4, norm="batch")


def test_self_attention_is_the_formula():
    torch.manual_seed(0)
    module = JaggedAttention(16, 4, kv_heads=2, rope_base=100.0, causal=True).double()
    x = tokens(8)
    q, k, v = (x @ module.qkv.weight.T).unflatten(-1, (-1, 4)).split([4, 2, 2], dim=1)
    places = torch.cat([torch.arange(n) for n in LENGTHS])
    q, k = (loop_rope(y, places, 100.0) for y in (q, k))
    expected = loop_attention(q, k, v, OFFSETS, OFFSETS, causal=True)[0].flatten(1) @ module.out.weight.T
    out = module(x, OFFSETS, 5)
    assert relative_error(out, expected) < 1e-12
    all_parameters_learn(module, out)


def test_positions_replace_counting():
    torch.manual_seed(0)
    module = JaggedAttention(16, 4, rope_base=100.0).double()
    x = tokens(8)
    counted = torch.cat([torch.arange(n) for n in LENGTHS])
    assert torch.equal(module(x, OFFSETS, 5), module(x, OFFSETS, 5, positions=counted))
    elapsed = rote_positions(torch.rand(8) * 1000, 60.0)
    assert not torch.allclose(module(x, OFFSETS, 5), module(x, OFFSETS, 5, positions=elapsed))


@pytest.mark.parametrize("kind", [JaggedAttention, GDPA])
def test_cross_attention(kind):
    torch.manual_seed(0)
    module = kind(16, 2, context_dim=12, head_dim=4, out_dim=6, pre_norm=True, qk_norm=True, bias=True).double()
    x, context = tokens(8), tokens(6, 12)
    out = module(x, OFFSETS, 5, context, CONTEXT_OFFSETS, 4)
    assert out.shape == (8, 6)
    assert torch.equal(out[5:], module.out.bias.expand(3, 6))  # the last sample has no context
    all_parameters_learn(module, out)
    with pytest.raises(ValueError, match="needs context"):
        module(x, OFFSETS, 5)
    with pytest.raises(ValueError, match="attends to itself"):
        kind(16, 2).double()(x, OFFSETS, 5, context, CONTEXT_OFFSETS, 4)


def test_bias_reaches_the_scores():
    torch.manual_seed(0)
    module = JaggedAttention(16, 4).double()
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    out = module(tokens(8), OFFSETS, 5, bias=bias)
    assert torch.autograd.grad(out.square().sum(), bias)[0].abs().sum() > 0
    with pytest.raises(ValueError, match="GDPA takes no bias"):
        GDPA(16, 4).double()(tokens(8), OFFSETS, 5, bias=bias)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_pma_pools_every_sequence(activation):
    torch.manual_seed(0)
    module = PMA(16, 3, 4, activation=activation, pre_norm=True, out_dim=8, out_scale=0.5, bias=True).double()
    x = tokens(8)
    out = module(x, OFFSETS, 5)
    assert out.shape == (3, 3, 8)
    k, v = module.kv(x).unflatten(-1, (-1, 4)).split(4, dim=1)
    scale = 0.5 if activation else 1.0
    expected = loop_attention(module.queries, k, v, None, OFFSETS, activation=activation, out_scale=scale)[0]
    expected = (expected.flatten(1) @ module.out.weight.T + module.out.bias).view(3, 3, 8)
    assert relative_error(out, expected) < 1e-12
    assert torch.equal(out[1], module.out.bias.expand(3, 8))
    all_parameters_learn(module, out)


def test_widths_that_do_not_fit():
    with pytest.raises(ValueError, match=r"heads must divide dim.*dim 16 and 3 heads"):
        JaggedAttention(16, 3)
    with pytest.raises(ValueError, match="kv_heads must divide heads; got 3 and 4"):
        JaggedAttention(16, 4, kv_heads=3)
    with pytest.raises(ValueError, match="unknown activation"):
        GDPA(16, 4, activation="tanh")
    with pytest.raises(ValueError, match="unknown activation"):
        PMA(16, 2, 4, activation="tanh")
