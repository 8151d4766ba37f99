"""Interaction experts against their formulas, and what makes them a group that can be spread over ranks."""

import math

import pytest
import torch
from gem_model import preset
from gem_model.config import EXPERTS
from gem_model.dhen import DHEN, KINDS, AttentionExpert, CrossExpert, WukongExpert

CONFIG = preset("tiny", experts=("wukong", "dcn", "attention", "dcn"), cross_rank=5)
N, D = 9, CONFIG.width


def randomised(module):
    torch.manual_seed(0)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return module.double()


def tokens():
    return torch.randn(3, N, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)


def layer_norm(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias


def same_with_gradients(ours, theirs, *leaves):
    torch.testing.assert_close(ours, theirs)
    probe = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((y * probe).sum(), leaves) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_cross_expert():
    """Written with the whole matrix U V in R^{N d x N d}."""
    m, x = randomised(CrossExpert(N, CONFIG)), tokens()
    flat = layer_norm(x, m.norm).flatten(1)
    crossed = flat * (flat @ (m.up.weight @ m.down.weight).T + m.up.bias)
    expected = torch.einsum("mn,bnd->bmd", m.mix.weight, crossed.view(3, N, D))
    same_with_gradients(m(x), expected, x, m.up.weight, m.down.weight)


def test_attention_expert():
    m, x = randomised(AttentionExpert(N, CONFIG)), tokens()
    qkv = layer_norm(x, m.qkv.norm) @ m.qkv.linear.weight.T + m.qkv.linear.bias
    q, k, v = qkv.view(3, N, 3, CONFIG.heads, -1).permute(2, 0, 3, 1, 4)
    p = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(CONFIG.head_dim), dim=-1)
    seen = (p @ v).transpose(1, 2).flatten(2) @ m.out.weight.T + m.out.bias
    same_with_gradients(m(x), torch.einsum("mn,bnd->bmd", m.mix.weight, seen), x, m.out.weight, m.qkv.linear.weight)


def test_wukong_expert():
    m, x = randomised(WukongExpert(N, CONFIG)), tokens()
    products = torch.einsum("bnd,bmd,mk->bnk", x, x, m.fmb.compress).flatten(1)
    hidden = torch.relu(layer_norm(products, m.fmb.norm) @ m.fmb.mlp[0].weight.T + m.fmb.mlp[0].bias)
    fmb = (hidden @ m.fmb.linear.weight.T + m.fmb.linear.bias).view(3, -1, D)
    expected = torch.cat((fmb, torch.einsum("mn,bnd->bmd", m.lcb.weight, x)), dim=1)
    same_with_gradients(m(x), expected, x, m.fmb.compress, m.lcb.weight)


def test_dhen_adds_its_experts():
    m, x = randomised(DHEN(N, CONFIG)), tokens()
    assert m(x).shape == (3, CONFIG.n_tokens, D)
    total = sum(expert(x) for expert in m.ensemble.experts) + torch.einsum("mn,bnd->bmd", m.proj.weight, x)
    same_with_gradients(m(x), layer_norm(total, m.norm), x)
    with torch.no_grad():
        whole = m(x)
        for p in m.ensemble.experts[2].parameters():
            p.zero_()
        assert (m(x) - whole).abs().max() > 1e-3


def test_kinds_are_those_of_the_configuration():
    assert tuple(KINDS) == EXPERTS


def with_experts(*experts):
    """A whole GEM and its roles; imported here, because the ranks below need not wait for TorchRec."""
    from gem_model import GEM
    from gem_model.roles import roles
    from gem_model.testing import example_inputs

    model = GEM(preset("tiny", experts=experts, layers=2), example_inputs())
    return model, roles(model)


def test_roles_name_the_experts():
    model, found = with_experts("wukong", "attention")
    experts = [name for name, role in found.items() if role == "expert"]
    prefixes = [f"layers.{i}.interaction.ensemble.experts.{j}." for i in range(2) for j in range(2)]
    assert {name[: len(prefixes[0])] for name in experts} == set(prefixes)
    assert len(experts) == sum(len(list(model.get_submodule(prefix[:-1]).parameters())) for prefix in prefixes)
    assert found["layers.0.interaction.proj.weight"] == found["layers.1.interaction.norm.weight"] == "dense"
    assert sum(role == "table" for role in found.values()) == 4


def test_ensembles_are_what_the_expert_axis_looks_for():
    expert = pytest.importorskip("gem_parallel.dense.expert")
    model, found = with_experts("wukong", "dcn")
    names = [f"layers.{i}.interaction.ensemble" for i in range(2)]
    assert expert.find_ensembles(model, found) == names


def spread(runtime):
    """One of two ranks: half of the experts, half of the samples; gradients of the mean over all samples."""
    from gem_parallel.dense import expert

    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    m = randomised(DHEN(N, CONFIG))
    wrapper = torch.nn.Sequential(m)
    expert.spread_experts(wrapper, ["0.ensemble"], mesh)
    x = torch.randn(8, N, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    mine = x[4 * runtime.rank : 4 * runtime.rank + 4].clone().requires_grad_()
    y = wrapper(mine)
    y.square().mean().backward()
    grads = {n: p.grad for n, p in m.named_parameters() if "experts" in n}
    return y.detach(), mine.grad, grads


def test_experts_spread_over_two_ranks_equal_one(tmp_path):
    ranks = pytest.importorskip("gem_parallel.testing")
    results = ranks.run_ranks(2, __file__, "spread", tmp_path)
    torch.manual_seed(0)
    m = randomised(DHEN(N, CONFIG))
    x = torch.randn(8, N, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64).requires_grad_()
    y = m(x)
    y.square().mean().backward()
    torch.testing.assert_close(torch.cat([r[0] for r in results]), y.detach())
    torch.testing.assert_close(torch.cat([r[1] for r in results]) / 2, x.grad)  # each rank's mean is of half as many
    held = [set(r[2]) for r in results]
    assert all(held)
    assert not held[0] & held[1]
    for name, grad in (results[0][2] | results[1][2]).items():
        torch.testing.assert_close(grad, m.get_parameter(name).grad, msg=name)
