"""Activation memory on a card."""

from __future__ import annotations

import pytest
import torch
from gem_parallel import MemoryConfig
from gem_parallel.comm.payload import Fp8Payload
from gem_parallel.memory.mx4 import Mx4Quantiser
from gem_parallel.memory.quantise import Fp8Quantiser
from gem_parallel.memory.regions import MEASURED_STEPS, Regions
from gem_parallel.memory.testing import WIDTH, stack

on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize(
    "config",
    [
        MemoryConfig(policy="full"),
        MemoryConfig(policy="uniform", budget=0.85, recompute_min_kib=16),
        MemoryConfig(policy="regions", budget=0.5, engine="operators"),
        MemoryConfig(offload_min_mib=0.1),
        MemoryConfig(policy="regions", budget=0.5, engine="operators", offload_min_mib=0.1),
    ],
    ids=["full", "results", "operators", "offload", "both"],
)
def test_on_a_card_gradients_and_random_numbers_are_the_unchecked_ones(config):
    plain, model = stack().cuda(), stack().cuda()
    regions = Regions(model, ["0", "1", "2"], config)
    x = torch.randn(64, 48, WIDTH, device="cuda")
    for seed in range(MEASURED_STEPS + 3):
        got = []
        for net in (plain, model):
            if net is model:
                regions.begin()
            mine = x.clone().requires_grad_()
            torch.manual_seed(seed)
            y = net(mine)
            net.zero_grad()
            y.square().mean().backward()
            numbers = torch.rand(1, device="cuda")
            got.append([y.detach(), mine.grad, numbers, *(p.grad.clone() for p in net.parameters())])
        names = ("output", "input", "numbers", *(name for name, _ in plain.named_parameters()))
        wrong = {n: float((a - b).abs().max() / a.abs().max()) for n, a, b in zip(names, *got, strict=True)}
        assert not {n: error for n, error in wrong.items() if error}, f"step {seed}\n{regions.plan}"


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize(("shape", "block"), [((7, 5, 64), 0), ((7, 5, 64), 32), ((3, 10_001), 0), ((513, 33), 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_card_the_fused_quantiser_is_the_plain_one(shape, block, dtype):
    x = (torch.randn(shape, device="cuda") * 3).to(dtype)
    x[0] = 0
    x[1, 2:4] = float("inf")
    fused, plain = Fp8Quantiser(block, fused=True), Fp8Quantiser(block, fused=False)
    got, want = fused.pack(x), plain.pack(x)
    known = want.scale.isfinite()
    assert torch.equal(got.scale[known], want.scale[known])
    torch.testing.assert_close(fused.unpack(got), plain.unpack(want), rtol=0, atol=0, equal_nan=True)
    payload, shard = Fp8Payload(), torch.randn(1000, device="cuda").to(dtype)
    packed, on_host = (torch.empty(payload.nbytes(1000, dtype), dtype=torch.uint8, device=d) for d in ("cuda", "cpu"))
    payload.pack(shard, packed)
    payload.pack(shard.cpu(), on_host)
    back, wanted = torch.full_like(shard, float("nan")), torch.empty_like(shard, device="cpu")
    payload.unpack(packed, back)
    payload.unpack(on_host, wanted)
    torch.testing.assert_close(back.cpu(), wanted, rtol=1e-2, atol=0)  # the host may divide otherwise in the last place


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("shape", [(7, 5, 64), (3, 10_001), (513, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_card_four_bits_are_the_plain_ones(shape, dtype):
    x = (torch.randn(shape, device="cuda") * 3).to(dtype)
    x[0] = 0
    x[1, 2:4] = float("inf")
    fused, plain = Mx4Quantiser(fused=True), Mx4Quantiser(fused=False)
    got, want = fused.pack(x), plain.pack(x)
    assert torch.equal(got.scale, want.scale)
    torch.testing.assert_close(fused.unpack(got), plain.unpack(want), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("fused", [False, True])
def test_on_a_card_quantised_activations_take_less_and_nothing_leaks(fused):
    plain, model = stack(dropout=0.0).cuda(), stack(dropout=0.0).cuda()
    config = MemoryConfig(policy="keep", quantise="fp8", quantise_min_kib=16)
    regions = Regions(model, ["0", "1", "2"], config, quantiser=Fp8Quantiser(fused=fused))
    x = torch.randn(256, 64, WIDTH, device="cuda", requires_grad=True)
    kept, allocated = [], []
    for step in range(120):
        for net in (plain, model):
            regions.begin()
            before = torch.cuda.memory_allocated()
            y = net(x).square().mean()
            if step == 100:
                kept.append(torch.cuda.memory_allocated() - before)
            net.zero_grad(set_to_none=False)
            y.backward()
        del y
        if step in (20, 119):
            allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] <= allocated[0]
    assert kept[1] < 0.75 * kept[0]
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert (a.grad - b.grad).norm() <= 0.05 * a.grad.norm() + 1e-6
