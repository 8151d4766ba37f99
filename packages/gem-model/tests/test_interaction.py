"""Wukong against its formula, written out in float64."""

import torch
from gem_model.interaction import FactorizationMachine, TokenMix, Wukong


def randomised(module):
    torch.manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return module.double()


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def fmb(m, x):
    """By way of the whole Gram matrix X X^T, which the module avoids."""
    gram = torch.einsum("bnd,bmd->bnm", x, x)
    flat = torch.einsum("bnm,mk->bnk", gram, m.compress).reshape(x.shape[0], -1)
    hidden = torch.relu(
        torch.einsum("bi,hi->bh", layer_norm(flat, m.norm.weight, m.norm.bias), m.mlp[0].weight) + m.mlp[0].bias
    )
    return (torch.einsum("bh,oh->bo", hidden, m.linear.weight) + m.linear.bias).reshape(x.shape[0], m.n_out, m.width)


def gradients(f, *tensors):
    return torch.autograd.grad((f * torch.linspace(-1, 1, f.numel(), dtype=f.dtype).view_as(f)).sum(), tensors)


def test_factorisation_machine_block():
    m = randomised(FactorizationMachine(n_in=7, n_out=3, width=6, rank=4, hidden=10))
    x = torch.randn(5, 7, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(m(x), fmb(m, x))
    leaves = (x, m.compress, m.linear.weight)
    for ours, theirs in zip(gradients(m(x), *leaves), gradients(fmb(m, x), *leaves), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_token_mix_is_linear_over_tokens():
    m = randomised(TokenMix(5, 3))
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(m(x), torch.einsum("mn,bnd->bmd", m.weight, x))


def test_wukong_layer():
    m = randomised(Wukong(7, 5, 6, n_fm=3, rank=4, hidden=10))
    x = torch.randn(4, 7, 6, dtype=torch.float64, requires_grad=True)

    def formula(x):
        lcb = torch.einsum("mn,bnd->bmd", m.lcb.weight, x)
        proj = torch.einsum("mn,bnd->bmd", m.proj.weight, x)
        return layer_norm(torch.cat((fmb(m.fmb, x), lcb), 1) + proj, m.norm.weight, m.norm.bias)

    out = m(x)
    assert out.shape == (4, 5, 6)
    torch.testing.assert_close(out, formula(x))
    for ours, theirs in zip(gradients(out, x, m.lcb.weight), gradients(formula(x), x, m.lcb.weight), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_interaction_is_second_order_in_the_tokens():
    """Before its norm and MLP, the block sees products: doubling X quadruples X (X^T Y) ... and cubes with X itself."""
    m = randomised(FactorizationMachine(n_in=4, n_out=2, width=3, rank=2, hidden=5))
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    seen = []
    m.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    m(x)
    m(2 * x)
    torch.testing.assert_close(seen[1], 4 * seen[0])
