"""Attention whose operands come from its projection, without a GPU: the list of blocks in Triton's interpreter, and the
way of operands and gradients through the module with the kernels' specifications in their places.
"""

from __future__ import annotations

import copy
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from gem_kernels.nn import JaggedAttention
from gem_kernels.norms import rms_norm
from gem_kernels.rotary import rope
from gem_lowprec import Recipe, Rule, attention, block_gemm, convert, gemm, products
from gem_lowprec.attention import emulated, layer, projected, projection
from gem_lowprec.attention.operands import key_blocks, quantise_reference
from gem_lowprec.linear import LowPrecisionLinear
from gem_lowprec.norm_linear import LowPrecisionNormLinear
from gem_lowprec.orientations import quantize_both
from torch import nn

convert_module = sys.modules["gem_lowprec.convert"]  # the function has taken its name
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="test_lowprec_projected_gpu.py has it on a card"
)
LENGTHS = (130, 0, 1, 128, 257, 64)
BLOCK = {"forward": "fp8_block", "dgrad": "fp8_block", "wgrad": "fp8_block"}


def offsets(lengths=LENGTHS, dtype=torch.int64):
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lengths", [LENGTHS, (0, 0, 5), (1000, 129), (3,) * 40, (0, 0)])
def test_blocks_of_tokens(lengths, dtype, monkeypatch):
    monkeypatch.setattr(projection, "CHUNK", 16)
    starts = offsets(lengths, dtype)
    blocks = projection.list_blocks(starts, sum(lengths))
    expected = []
    for b, length in enumerate(lengths):
        start = int(starts[b])
        for j in range(-(-length // 128)):
            expected.append([start + 128 * j, min(128, length - 128 * j), start // 128 + b + j, 128 * j])
    assert int(blocks.count) == len(expected)
    assert blocks.table[: len(expected)].tolist() == expected
    number, _place = key_blocks(starts, sum(lengths))
    assert [row[2] for row in expected] == torch.unique_consecutive(number).tolist()


@pytest.fixture
def specified(monkeypatch):
    """Block-wise products and FP8 attention are native, and run by their specifications in float64."""

    def exact(a: Any, b: Any, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
        return (y if bias is None else y + bias.double()).to(dtype)

    def project(x, weight, bias, starts, max_len, *, heads, kv_heads, dtype, between):
        packed = exact(x, weight, torch.float32, bias)
        q, k, v = packed.unflatten(1, (-1, 128)).split([heads, kv_heads, kv_heads], 1)
        if between.gains is not None:
            q, k = (rms_norm(part, gain, eps=between.eps) for part, gain in zip((q, k), between.gains, strict=True))
        if between.base is not None:
            q, k = (rope(part, starts, base=between.base) for part in (q, k))
        made = quantise_reference(q, k, v, starts, starts)
        return replace(made, longest=max_len, dtype=dtype), packed.to(dtype)

    def of(made, scale):
        problem = emulated.Problem(
            q_offsets=made.q_offsets, k_offsets=made.k_offsets, max_q=made.longest, max_k=made.longest, scale=scale,
            left=-1, right=-1, precision="fp8",
        )  # fmt: skip
        return *made.dequantize(torch.float32), problem

    def forward(made, scale):
        out, lse = emulated.forward(*of(made, scale))
        return out.to(made.dtype), lse

    def forward_with_rows(made, scale):
        out, lse = forward(made, scale)
        row = quantize_both(out.flatten(1), col=False).row
        return out, lse, row.data.view(torch.uint8), row.scale.t()

    def backward(dout, dlse, found, q_offsets, k_offsets, max_q, max_k, scale):
        out, lse, q, q_scale, k, v, kv_scale = found
        q, k, v = (x.view(torch.float8_e4m3fn) for x in (q, k, v))
        made = projected.Operands(
            q=q, q_scale=q_scale, k=k, v=v, kv_scale=kv_scale, q_offsets=q_offsets, k_offsets=k_offsets,
            longest=max_q, dtype=out.dtype,
        )  # fmt: skip
        *tensors, problem = of(made, scale)
        return emulated.backward(dout, dlse, *tensors, out, lse, problem)

    def start() -> None:
        runs = gemm.Engine(name="native", why="a test")
        for module in (gemm, products):
            monkeypatch.setattr(module, "engine", lambda precision, device: runs)
        monkeypatch.setattr(gemm, "_no_block_kernel", lambda device: None)
        monkeypatch.setattr(block_gemm, "block_matmul", exact)
        for module in (attention, layer):
            monkeypatch.setattr(module, "attention_engine", lambda *_, **__: runs)
        monkeypatch.setattr(projected, "project", project)
        monkeypatch.setattr(projected, "forward", forward)
        monkeypatch.setattr(projected, "forward_with_rows", forward_with_rows)
        monkeypatch.setattr(projected, "_backward", backward)

    return start


def step(module: torch.nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = module(leaf, offsets(), max(LENGTHS))
    return [y.detach(), *torch.autograd.grad(y, (leaf, *module.parameters()), g)]


@pytest.mark.parametrize("out_in_fp8", [True, False])
@pytest.mark.parametrize(
    "between",
    [
        {"kv_heads": 1}, {"kv_heads": 1, "qk_norm": True, "rope_base": 1e4}, {"rope_base": 1e3}, {"qk_norm": True},
        {"qk_norm": True, "rope_base": 1e4},
    ],
)  # fmt: skip
def test_a_module_gives_what_its_parts_give(specified, between, out_in_fp8):
    torch.manual_seed(0)
    module = JaggedAttention(160, 2, head_dim=128, pre_norm=out_in_fp8, bias=True, **between)
    for norm in (module.q_norm, module.k_norm) if "qk_norm" in between else ():
        nn.init.normal_(norm.weight, mean=1.0, std=0.3)
    rules = (Rule(**BLOCK),) if out_in_fp8 else (Rule(pattern="qkv*", **BLOCK),)
    convert(module, Recipe(name="block", rules=rules, attention="fp8", fuse_norms=False))  # which wants a card
    assert isinstance(module.out, LowPrecisionLinear) == out_in_fp8
    x, g = torch.randn(sum(LENGTHS), 160), torch.randn(sum(LENGTHS), 160)
    assert not module.writes_operands(x)
    expected = step(module, x, g)
    specified()
    assert module.writes_operands(x)
    calls: list[str] = []
    for name in ("project", "forward", "forward_with_rows"):
        own = getattr(projected, name)
        setattr(projected, name, lambda *a, own=own, name=name, **k: (calls.append(name), own(*a, **k))[1])
    found = step(module, x, g)
    assert calls == ["project", "forward_with_rows" if out_in_fp8 else "forward"]
    for got, right in zip(found, expected, strict=True):
        assert (got - right).norm() < 5e-3 * right.norm()  # a sum in float64, and a code that rounds the other way


def test_what_stands_between_is_left_to_the_separate_pass(specified):
    specified()
    x = torch.randn(5, 160)
    for options, word in (({"context_dim": 8}, "two projections"), ({"head_dim": 64}, "64 dims")):
        module = JaggedAttention(160, 2, **{"head_dim": 128, **options})
        done = convert(nn.ModuleList([module]), Recipe(name="block", rules=(Rule(**BLOCK),), attention="fp8"))
        assert word in done.attention[0].why
        assert word in module.pass_between()
        assert not module.writes_operands(x)
    module = JaggedAttention(160, 2, head_dim=128)
    done = convert(module, Recipe(name="block", rules=(Rule(**BLOCK),), attention="fp8"))
    assert "its projection writes q, k and v in FP8" in done.table()
    assert module.writes_operands(x)
    hooked = copy.deepcopy(module)
    hooked.qkv.register_forward_hook(lambda *_: None)
    assert not hooked.writes_operands(x)
    module.qkv.observer = lambda *_: None
    assert not module.writes_operands(x)


def test_a_norm_that_cannot_write_fp8_keeps_the_projection_from_writing_operands(specified):
    """On a CPU it cannot, as for more than 8192 features on a card."""
    module = JaggedAttention(160, 2, head_dim=128, pre_norm=True)
    convert(module, Recipe(name="block", rules=(Rule(**BLOCK),), attention="fp8", fuse_norms=True, fallback=False))
    specified()
    x = torch.randn(5, 160)
    assert isinstance(module.qkv, LowPrecisionNormLinear)
    assert not module.qkv.takes_fp8(x)
    assert not module.writes_operands(x)


def test_a_projection_that_writes_operands_is_converted_though_it_gains_nothing_alone(specified, monkeypatch):
    monkeypatch.setattr(convert_module, "_no_gain", lambda *_: ("it would be slower", 0))
    recipe = Recipe(name="block", rules=(Rule(**BLOCK),), attention="fp8")
    build = lambda **options: nn.ModuleList([JaggedAttention(160, 2, head_dim=128, **options)])  # noqa: E731
    with pytest.warns(UserWarning, match="2 of 2"):
        assert not any(r.converted for r in convert(build(), recipe).rows)  # attention does not run natively
    specified()
    for options in ({}, {"pre_norm": True}):
        with pytest.warns(UserWarning, match="1 of 2"):
            done = convert(build(**options), recipe)
        assert {r.name: r.converted for r in done.rows} == {r.name: "qkv" in r.name for r in done.rows}
    with pytest.warns(UserWarning, match="2 of 2"):
        assert not any(r.converted for r in convert(build(), Recipe(name="x", rules=(Rule(**BLOCK),))).rows)


def test_the_projection_that_is_not_written_says_so():
    weight = torch.randn(6, 4)
    y = products.unwritten(3, weight, torch.bfloat16)
    assert y.shape == (3, 6)
    assert y.isnan().all()
