"""Low-precision attention, emulated: against attention written down anew in float64, sequence by sequence."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from gem_kernels import jagged_attention
from gem_kernels.nn import JaggedAttention
from gem_lowprec import MXFP8, Recipe, attention_engine, convert, low_precision_attention, quantize
from gem_lowprec.attention import _say, operands
from gem_lowprec.attention.layer import LowPrecisionJaggedAttention
from gem_lowprec.attention.operands import BLOCK, ORDER, key_blocks, quantise, quantise_reference
from torch import nn

Q_LENGTHS, K_LENGTHS = (3, 0, 130, 64, 1, 257), (5, 7, 300, 0, 1, 129)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def problem(heads=4, kv_heads=2, dim=64, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(7)
    sizes = ((sum(Q_LENGTHS), heads), (sum(K_LENGTHS), kv_heads), (sum(K_LENGTHS), kv_heads))
    tensors = [torch.randn(*size, dim, generator=generator).to(dtype) for size in sizes]
    return [x.requires_grad_(grad) for x in tensors], offsets(Q_LENGTHS), offsets(K_LENGTHS)


def attend(tensors, q_offsets, k_offsets, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return low_precision_attention(*tensors, q_offsets, k_offsets, max(Q_LENGTHS), max(K_LENGTHS), **options)


def relative(got, expected):
    return float((got.detach().double() - expected).norm() / expected.detach().norm())


def power(amax):
    """The smallest power of two that 448 of it reach."""
    return 2.0 ** math.ceil(math.log2(amax / 448)) if amax else 1.0


def e4m3(x):
    return x.float().to(torch.float8_e4m3fn).double()


def one_head_fp8(q, k, v, scale):
    """O and LSE of one head of one sequence, float64."""
    q = torch.stack([e4m3(row / power(float(row.abs().max()))) * power(float(row.abs().max())) for row in q])
    parts = range(0, len(k), BLOCK)
    k, v = (torch.cat([e4m3(p / power(float(p.abs().max()))) * power(float(p.abs().max())) for p in
                       (x[i : i + BLOCK] for i in parts)]) for x in (k, v))  # fmt: skip
    s = scale * (q @ k.t()) / math.log(2)
    most = s.amax(-1, keepdim=True).ceil()
    p = torch.exp2(s - most)
    out = (e4m3(p * 256) / 256) @ v / p.sum(-1, keepdim=True)
    return out, torch.logsumexp(s * math.log(2), -1)


def test_fp8_is_what_it_says():
    tensors, q_offsets, k_offsets = problem(grad=False)
    q, k, v = (x.double() for x in tensors)
    out, lse = attend(tensors, q_offsets, k_offsets, return_lse=True)
    for b, (lq, lk) in enumerate(zip(Q_LENGTHS, K_LENGTHS, strict=True)):
        own, other = slice(int(q_offsets[b]), int(q_offsets[b]) + lq), slice(int(k_offsets[b]), int(k_offsets[b]) + lk)
        for h in range(4):
            if lq == 0:
                continue
            if lk == 0:
                assert not out[own, h].any()
                assert torch.isneginf(lse[own, h]).all()
                continue
            o, expected = one_head_fp8(q[own, h], k[other, h // 2], v[other, h // 2], 1 / 8)
            assert relative(out[own, h], o) < 2e-3  # a P may round the other way
            assert (lse[own, h] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
@pytest.mark.parametrize("mask", [{}, {"causal": True}, {"window": (20, 3)}], ids=["full", "causal", "window"])
def test_it_is_near_attention_and_so_are_its_gradients(precision, mask):
    tensors, q_offsets, k_offsets = problem()
    out, lse = attend(tensors, q_offsets, k_offsets, precision=precision, return_lse=True, **mask)
    exact, exact_lse = jagged_attention(
        *tensors, q_offsets, k_offsets, max(Q_LENGTHS), max(K_LENGTHS), return_lse=True, **mask
    )
    seen = torch.isfinite(exact_lse)
    assert torch.equal(torch.isfinite(lse), seen)
    assert relative(out, exact.double()) < 0.08
    assert (lse - exact_lse)[seen].abs().max() < 0.2
    grads = torch.randn_like(out), torch.randn_like(lse).masked_fill(~seen, 0.0)
    got = torch.autograd.grad((out, lse), tensors, grads)
    for mine, right in zip(got, torch.autograd.grad((exact, exact_lse), tensors, grads), strict=True):
        assert relative(mine, right.double()) < 0.1


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_learned_queries(precision):
    (_, k, v), _, k_offsets = problem()
    q = torch.randn(7, 4, 64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = low_precision_attention(q, k, v, None, k_offsets, 7, max(K_LENGTHS), precision=precision)
    exact = jagged_attention(q, k, v, None, k_offsets, 7, max(K_LENGTHS))
    assert relative(out, exact.double()) < 0.08
    grad = torch.randn_like(out)
    for mine, right in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(exact, (q, k, v), grad), strict=True
    ):
        assert relative(mine, right.double()) < 0.12


def test_every_product_of_mxfp8_sees_mx_operands():
    """One sequence, one head: the two passes by hand, each operand rounded along its contraction."""
    q, k, v = (torch.randn(n, 1, 64, requires_grad=True) for n in (70, 90, 90))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = low_precision_attention(q, k, v, offsets([70]), offsets([90]), 70, 90, precision="mxfp8")
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, k, v), grad)

    def mx(x, dim):
        return quantize(x.float(), MXFP8, dim, backend="reference").dequantize(torch.float64)

    qd, kd, vd, g = (x.detach()[:, 0].double() for x in (q, k, v, grad))
    s = mx(qd, 1) @ mx(kd, 1).t() / 8
    p = torch.exp(s - s.amax(1, keepdim=True))
    o = mx(p, 1) @ mx(vd, 0) / p.sum(1, keepdim=True)
    p = p / p.sum(1, keepdim=True)
    ds = p * (mx(g, 1) @ mx(vd, 1).t() - (g * o).sum(1, keepdim=True)) / 8
    expected = (mx(ds, 1) @ mx(kd, 0), mx(ds, 0).t() @ mx(qd, 0), mx(p, 0).t() @ mx(g, 0))
    assert relative(out[:, 0].detach(), o) < 2e-3
    for mine, right in zip(got, expected, strict=True):
        assert relative(mine[:, 0], right) < 5e-3  # float32 against float64: an element may round the other way


def test_operands_come_back():
    tensors, q_offsets, k_offsets = problem(grad=False)
    made = quantise(*tensors, q_offsets, k_offsets, max(Q_LENGTHS), max(K_LENGTHS))
    for x, back in zip(tensors, made.dequantize(), strict=True):
        assert x.shape == back.shape
        assert 0.02 < relative(back, x.double()) < 0.03  # E4M3 has three digits behind the first
    numbers, place = key_blocks(k_offsets, sum(K_LENGTHS))
    starts = numbers[place == 0]
    assert len(set(starts.tolist())) == sum(-(-n // BLOCK) for n in K_LENGTHS)  # no two blocks share a number
    assert int(numbers.max()) < made.v.shape[0]
    assert sorted(ORDER) == list(range(16))


def test_zero_and_non_finite_blocks():
    tensors, q_offsets, k_offsets = problem(grad=False)
    q, k, v = (x.clone() for x in tensors)
    q[0], v[:5] = 0.0, 0.0
    v[20, 0, 0], k[400, 1, 3] = math.nan, math.inf
    made = quantise_reference(q, k, v, q_offsets, k_offsets)
    qd, kd, vd = made.dequantize()
    assert not qd[0].any()
    assert not vd[:5].any()
    numbers, _ = key_blocks(k_offsets, sum(K_LENGTHS))
    assert vd[numbers == numbers[20], 0].isnan().all()
    assert kd[numbers == numbers[400], 1].isnan().all()
    assert torch.isfinite(vd[:, 1]).all()
    assert made.kv_scale[0, 0, 1] == math.ceil(math.log2(operands.LEAST / 448))


def test_what_it_does_not_take():
    tensors, q_offsets, k_offsets = problem(grad=False)
    with pytest.raises(ValueError, match="fp9"):
        attend(tensors, q_offsets, k_offsets, precision="fp9")
    with pytest.raises(ValueError, match="fast"):
        attend(tensors, q_offsets, k_offsets, backend="fast")
    with pytest.raises(RuntimeError, match="cannot run natively"):
        attend(tensors, q_offsets, k_offsets, backend="native")
    assert attention_engine("fp8", tensors[0]).name == "emulated"
    _say.cache_clear()
    with pytest.warns(UserWarning, match="emulated"):
        low_precision_attention(*tensors, q_offsets, k_offsets, max(Q_LENGTHS), max(K_LENGTHS))


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_a_converted_module_attends_in_low_precision(precision):
    torch.manual_seed(0)
    model = nn.ModuleDict({"plain": JaggedAttention(64, 2), "heads": JaggedAttention(64, 2), "other": nn.Linear(64, 8)})
    before = copy.deepcopy(model)
    keys = list(model.state_dict())
    done = convert(model, Recipe(name="attention", attention=precision))
    assert [(r.name, r.precision, r.engine) for r in done.attention] == [
        ("plain", precision, "emulated"), ("heads", "bf16", "-")
    ]  # fmt: skip
    assert type(model["plain"]) is LowPrecisionJaggedAttention
    assert type(model["heads"]) is JaggedAttention  # kept, as heads are
    assert list(model.state_dict()) == keys
    assert "plain" in done.table().split("attention", 2)[2]
    x, at = torch.randn(sum(K_LENGTHS), 64, requires_grad=True), offsets(K_LENGTHS)
    got, exact = (m["plain"](x, at, max(K_LENGTHS)) for m in (model, before))
    assert 1e-3 < relative(got, exact.detach().double()) < 0.08
    again = model["plain"](x, at, max(K_LENGTHS), bias=torch.zeros(1, 1, max(K_LENGTHS), max(K_LENGTHS)))
    assert relative(again, exact.detach().double()) < 1e-5  # a bias is for BF16's kernel
    parameters = (x, *model["plain"].parameters())
    grads = torch.autograd.grad(got.sum(), parameters)
    for g, right in zip(grads, torch.autograd.grad(exact.sum(), (x, *before["plain"].parameters())), strict=True):
        assert relative(g, right.double()) < 0.15


def test_nothing_attends_differently_unasked():
    model = nn.Sequential(JaggedAttention(64, 2))
    done = convert(model, "mxfp8")
    assert type(model[0]) is JaggedAttention
    assert [r.engine for r in done.attention] == ["-"]
    assert "heads " not in done.table()
    with pytest.raises(ValueError, match="fp4"):
        Recipe(name="x", attention="fp4")
