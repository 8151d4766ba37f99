"""The FP8 kernels of Hopper in gem-kernels' simulator: against the references in PyTorch, and races."""

from __future__ import annotations

import os

import pytest
import torch
from gem_kernels import jagged_attention
from gem_kernels.simulator import Fault, instead, language, simulating
from gem_kernels.testing import offsets_of, poisoned, relative_error
from gem_lowprec import FP8_1X128, FP8_128X128, block_matmul, gemm, hopper, norms, orientations, quantize
from gem_lowprec.attention import forward_kernel, launch, steps
from gem_lowprec.attention.operands import _dequantise_native, _quantise_native, key_blocks, quantise_reference
from gem_lowprec.attention.projection import Between, project
from gem_lowprec.block_gemm import CONFIGS
from gem_lowprec.products import Plan, Products
from gem_lowprec.weight import QuantizedWeight

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the other tests have it on a card")

# lengths of queries and keys, heads of queries and keys, head dimension
CASES = [
    ((70, 0, 1, 64, 130), (130, 5, 1, 64, 0), 2, 2, 128),
    ((300, 70), (257, 100), 2, 1, 64),
    ((8, 3, 1, 5, 8, 2, 7), (8, 3, 1, 5, 8, 2, 7), 2, 2, 128),
]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def inputs(case, seed=0):
    q_lengths, k_lengths, heads, kv_heads, dim = case
    generator = torch.Generator().manual_seed(seed)
    shapes = ((sum(q_lengths), heads), (sum(k_lengths), kv_heads), (sum(k_lengths), kv_heads))
    tensors = [torch.randn(*shape, dim, generator=generator).bfloat16() for shape in shapes]
    return tensors, offsets_of(q_lengths), offsets_of(k_lengths)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operands_and_the_way_back(case):
    tensors, q_offsets, k_offsets = inputs(case)
    with simulating(seed=1), poisoned():
        got = _quantise_native(*tensors, q_offsets, k_offsets, max(case[0]), max(case[1]))
        back = _dequantise_native(got.q, got, torch.bfloat16)
    expected = quantise_reference(*tensors, q_offsets, k_offsets)
    used = torch.unique(key_blocks(k_offsets, tensors[1].shape[0])[0])
    for name in ("q", "q_scale", "k"):
        assert same(getattr(got, name), getattr(expected, name)), name
    for name in ("v", "kv_scale"):
        assert same(getattr(got, name)[used], getattr(expected, name)[used]), name
    for x, right in zip(back, expected.dequantize(torch.float32), strict=True):
        assert torch.equal(x.float(), right)


@pytest.fixture
def scaled_where_needed(monkeypatch):
    """The simulator is told what the assembly of `steps._rescaled` does."""
    known = language.Language.inline_asm_elementwise

    def run(self, text, types, arguments, *others, **named):
        if "vote.sync.any.pred" in text:
            return arguments[0] * self.exp2(arguments[1])
        return known(self, text, types, arguments, *others, **named)

    monkeypatch.setattr(language.Language, "inline_asm_elementwise", run)


@pytest.mark.usefixtures("scaled_where_needed")
@pytest.mark.parametrize(
    ("case", "config"),
    [*((case, launch.Config()) for case in CASES), (CASES[1], launch.Config(stages=4))],
    ids=str,
)
def test_attention(case, config):
    tensors, q_offsets, k_offsets = inputs(case)
    made = quantise_reference(*tensors, q_offsets, k_offsets)
    with simulating(seed=2, processors=2), poisoned():
        out, lse = launch.forward(made, 0.1, config=config)
        rows = launch.forward_with_rows(made, 0.1, config=config) if case[4] == 128 else None
    exact, exact_lse = jagged_attention(
        *(x.double() for x in made.dequantize(torch.float32)), q_offsets, k_offsets, max(case[0]), max(case[1]),
        scale=0.1, return_lse=True, backend="reference",
    )  # fmt: skip
    seen = torch.isfinite(exact_lse)
    assert torch.equal(torch.isneginf(lse), ~seen)
    assert ((lse - exact_lse).abs() / (1 + exact_lse.abs()))[seen].max() < 2e-3
    assert relative_error(out, exact) < 0.04  # P has three bits
    if rows is not None:
        assert same(rows[0], out)
        scales = rows[3][:, : out.shape[0]].T[..., None]
        again = rows[2].view(torch.float8_e4m3fn).view(out.shape).float() * scales
        assert relative_error(again, out) < 0.04


@pytest.mark.parametrize("between", [None, Between(gains=(torch.ones(128), torch.full((128,), 2.0)), base=50.0)])
def test_projection_into_operands(between):
    lengths, heads, kv_heads = (70, 0, 1, 130, 64), 2, 1
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(rows, 200, generator=generator) for rows in (sum(lengths), (heads + 2 * kv_heads) * 128))
    qx, qw, starts = quantize(x, FP8_1X128), quantize(w, FP8_128X128), offsets_of(lengths)
    with simulating(seed=3, processors=3), poisoned():
        made, raw = project(
            qx, qw, None, starts, 130, heads=heads, kv_heads=kv_heads, dtype=torch.bfloat16, between=between
        )
    product = (qx.dequantize(torch.float64) @ qw.dequantize(torch.float64).T).unflatten(1, (-1, 128))
    q, k, v = product.split([heads, kv_heads, kv_heads], 1)
    if between is not None:
        written = product[:, : heads + kv_heads].flatten(1)
        assert relative_error(raw[:, : written.shape[1]], written) < 5e-3
        place = torch.cat([torch.arange(n) for n in lengths]).double()
        angle = place[:, None] * 50.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(
                    (torch.nn.functional.rms_norm(y, (128,), eps=1e-6) * gain).unflatten(-1, (64, 2)).contiguous()
                )
                * turn
            ).flatten(-2)
            for y, gain in ((q, 1.0), (k, 2.0))
        )
    for got, right in zip(made.dequantize(torch.float32), (q, k, v), strict=True):
        assert relative_error(got, right) < 0.04


@pytest.fixture
def card(monkeypatch):
    """Every tensor says that it is on a GPU, as the product wants it."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("name", list(CONFIGS))
@pytest.mark.parametrize("splits", [1, 2])
def test_product(name, splits):
    generator = torch.Generator().manual_seed(4)
    a = quantize(torch.randn(197, 300, generator=generator), FP8_1X128)
    b = quantize(torch.randn(264, 300, generator=generator), FP8_128X128)
    bias = torch.randn(264, generator=generator).bfloat16()
    with simulating(seed=4, processors=2), poisoned():
        got = block_matmul(a, b, torch.bfloat16, bias, config=CONFIGS[name], splits=splits)
    assert relative_error(got, a.dequantize(torch.float64) @ b.dequantize(torch.float64).T + bias.double()) < 5e-3


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("name", ["forward", "dgrad"])
def test_products_of_a_weight_that_arrives_quantised(monkeypatch, name):
    monkeypatch.setattr(gemm, "_no_block_kernel", lambda _device: None)
    generator = torch.Generator().manual_seed(10)
    weight = QuantizedWeight(quantize(torch.randn(264, 300, generator=generator).bfloat16(), FP8_128X128))
    a = quantize(torch.randn(70, 300 if name == "forward" else 264, generator=generator), FP8_1X128)
    products = Products(forward="fp8_block", dgrad="fp8_block", wgrad="fp8_block")
    plan = Plan(products=products, dtype=torch.bfloat16, seed=0, stream=0, step=0, micro=0)
    with simulating(seed=10, processors=2), poisoned():
        operand = gemm.Operand(value=a.data, role="input", quantized=a)
        got = plan.run(name, operand, plan.weight(name, weight), torch.float32)
    w = weight.quantized.dequantize(torch.float64)
    assert relative_error(got, a.dequantize(torch.float64) @ (w.T if name == "forward" else w)) < 5e-4


@pytest.mark.usefixtures("card")
def test_product_with_a_scale_for_every_row_of_both():
    generator = torch.Generator().manual_seed(5)
    a, b = (quantize(torch.randn(rows, 300, generator=generator), FP8_1X128) for rows in (70, 135))
    with simulating(seed=5, processors=2), poisoned():
        got = block_matmul(a, b, torch.float32, splits=1)
    assert relative_error(got, a.dequantize(torch.float64) @ b.dequantize(torch.float64).T) < 5e-4


@pytest.mark.parametrize(("row", "col"), [(True, True), (False, True)])
@pytest.mark.parametrize("spec", [FP8_1X128, FP8_128X128], ids=str)
def test_quantisers_by_hand(monkeypatch, spec, row, col):
    monkeypatch.setattr(orientations, "hardware", lambda _device: True)
    x = torch.randn(200, 272, generator=torch.Generator().manual_seed(6)).bfloat16()
    with simulating(seed=6), poisoned():
        got = orientations.quantize_both(x, spec, row=row, col=col, sums=True)
    for made, right in ((got.row, quantize(x, spec)), (got.col, quantize(x.T.contiguous(), spec))):
        if made is not None:
            assert same(made.data, right.data)
            assert torch.equal(made.scale, right.scale)
    assert relative_error(got.sums, x.double().sum(0)) < 1e-5


@pytest.mark.parametrize("layer", [False, True])
def test_norms_by_hand(monkeypatch, layer):
    monkeypatch.setattr(norms, "hardware", lambda _device: True)
    columns = next(cols for kind, cols in norms.BY_HAND if kind == layer)
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(37, columns, generator=generator).bfloat16()
    gain, bias = (torch.randn(columns, generator=generator).bfloat16() for _ in range(2))
    with simulating(seed=7), poisoned():
        got, _norm = norms.norm_quantize(x, gain, bias if layer else None)
    y = x.double()
    y = (y - y.mean(1, keepdim=True)) if layer else y
    y = y / (y.square().mean(1, keepdim=True) + 1e-6).sqrt() * gain.double() + (bias.double() if layer else 0)
    assert relative_error(got.dequantize(torch.float64), y) < 0.04


SUMS = "sums = partial(p) + partial(p1)"
WAIT, GIVE_BACK = "acc = warpgroup_mma_wait(0, deps=(acc,))", "mbarrier.arrive(empty.index(s), count=1)"
STORE, SIGNAL = "pairs.index(s).store(pair)", "mbarrier.arrive(full, count=1)"
BROKEN = {
    "given back too early": (
        steps, [(f"{SUMS}\n    {WAIT}\n    {GIVE_BACK}", f"{SUMS}\n    {GIVE_BACK}\n    {WAIT}")], {"race"},
    ),
    "scales told before they are there": (
        forward_kernel, [(f"    {STORE}\n", ""), (SIGNAL, f"{SIGNAL}\n    {STORE}")], {"race", "uninitialised"},
    ),
    "barriers of blocks, not of consumers": (
        forward_kernel, [("TURNS=True", "TURNS=False"), ("slot = (tile % QS) * 3 + W", "slot = (tile % QS) * 3 + w")],
        {"barrier", "race"},
    ),
}  # fmt: skip


@pytest.mark.usefixtures("scaled_where_needed")
@pytest.mark.parametrize("name", list(BROKEN))
def test_what_is_broken_is_reported(name):
    module, texts, kinds = BROKEN[name]
    changes = {kernel: change for one in texts for kernel, change in instead(module, *one).items()}
    lengths = (3,) * 24 if name == "barriers of blocks, not of consumers" else (700,) * 2
    tensors, q_offsets, k_offsets = inputs((lengths, lengths, 1, 1, 128))
    made = quantise_reference(*tensors, q_offsets, k_offsets)
    with simulating(seed=8, processors=1, changes=changes), pytest.raises(Fault) as found:
        launch.forward(made, 0.1)
    assert found.value.kind in kinds


@pytest.mark.usefixtures("card")
def test_a_broken_product_is_reported():
    a, b = quantize(torch.randn(197, 700), FP8_1X128), quantize(torch.randn(264, 700), FP8_128X128)
    changes = instead(hopper, "((step // STAGES) & 1) ^ 1", "(step // STAGES) & 1")
    with simulating(seed=9, changes=changes), pytest.raises(Fault) as found:
        block_matmul(a, b, torch.bfloat16)
    assert found.value.kind == "deadlock"
