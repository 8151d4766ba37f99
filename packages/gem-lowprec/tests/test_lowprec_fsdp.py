"""Quantised all-gathers with two processes: the same training bit for bit, half the bytes, plain checkpoints."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gem_lowprec import (
    FP8_128X128,
    MXFP8_SQUARE,
    Gathers,
    Products,
    QTensor,
    QuantizedWeight,
    QuantSpec,
    Recipe,
    Rule,
    convert,
    low_precision_linear,
    quantize,
    quantize_gathers,
)
from gem_lowprec.testing import SentBytes, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BLOCK, SQUARE = Rule(forward="fp8_block", dgrad="fp8_block"), Rule(forward="mxfp8_square", dgrad="mxfp8_square")
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(
    rule: Rule, mesh: DeviceMesh, policy: MixedPrecisionPolicy, *, quantised: bool, seed: int = 0
) -> tuple[nn.Module, Gathers | None]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(130, 256), nn.GELU()), nn.Sequential(nn.Linear(256, 512), nn.GELU()), nn.Linear(512, 2)
    )
    convert(model, Recipe(name="test", rules=(rule,)))
    for unit in model:
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, quantize_gathers(model) if quantised else None


def train(model: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Losses, gradient norms and the final shards."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    g = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(steps):
        x = torch.randn(24, 130, generator=g)
        loss = (model(x).float() - x[:, :2]).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.detach(), norm.full_tensor()]
    return seen + [p.to_local().detach().clone() for p in model.parameters()]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def same_training(folder: Path) -> None:
    flat = init_device_mesh("cpu", (2,))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    plain = MixedPrecisionPolicy()
    for rule, mesh, policy in ((BLOCK, flat, plain), (SQUARE, grid, BF16)):
        outcomes = []
        for quantised in (False, True):
            model, gathers = build(rule, mesh, policy, quantised=quantised)
            outcomes.append(train(model))
            if gathers is not None:
                assert [r.payload for r in gathers.rows] == [FP8_128X128 if rule is BLOCK else MXFP8_SQUARE] * 2
                assert 0.5 < gathers.ratio <= 0.53
        assert all(x.isfinite().all() for x in outcomes[0])
        assert equal(*outcomes), (rule, mesh, policy)
        # The comparison sees the format: training on unquantised weights ends elsewhere.
    other = build(Rule(wgrad_every=9), grid, BF16, quantised=False)[0]
    assert not equal(train(other), outcomes[0])


def weights_travel_once_and_small(mesh: DeviceMesh) -> None:
    seen: list[Any] = []
    for rule in (BLOCK, SQUARE):
        model, gathers = build(rule, mesh, BF16, quantised=True)
        assert gathers is not None
        with torch.no_grad():
            model(torch.randn(8, 130))
        for index in (0, 1):
            hook = model[index][0].register_forward_pre_hook(lambda layer, args: seen.append(layer.weight))
            with SentBytes() as wire, torch.no_grad():
                model[index](torch.randn(8, model[index][0].in_features))
            hook.remove()
            bias = 2 * model[index][0].bias.to_local().numel()
            assert wire.sent == gathers.rows[index].nbytes + bias
            assert wire.sent <= 0.53 * (gathers.rows[index].bf16_nbytes + bias)
            model[index].reshard()
        assert all(isinstance(w, QuantizedWeight) and w.dtype == torch.bfloat16 for w in seen)
        # The gathered bits are those of quantising the whole weight.
        weight = model[1][0].weight.full_tensor().to(torch.bfloat16)
        model[1].unshard()
        gathered, whole = model[1][0].weight, quantize(weight, gathers.rows[1].payload)
        assert torch.equal(gathered.quantized.data.view(torch.uint8), whole.data.view(torch.uint8))
        assert torch.equal(gathered.quantized.scale.view(torch.uint8), whole.scale.view(torch.uint8))
        assert torch.equal(gathered + 0, whole.dequantize())  # any other operation sees the values
        with pytest.raises(RuntimeError, match="only the shards"), torch.no_grad():
            gathered.mul_(2)
        model[1].reshard()


def masters_are_saved(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    mesh = init_device_mesh("cpu", (2,))
    model, _ = build(BLOCK, mesh, MixedPrecisionPolicy(), quantised=True)
    train(model, 2)
    state = model.state_dict()
    plain = build(BLOCK, mesh, MixedPrecisionPolicy(), quantised=False, seed=1)[0]
    assert list(state) == list(plain.state_dict())
    assert all(type(t._local_tensor) is torch.Tensor for t in state.values())
    buffer = io.BytesIO()
    torch.save(model[0][0].weight._local_tensor, buffer)
    buffer.seek(0)
    assert type(torch.load(buffer, weights_only=True)) is torch.Tensor
    assert torch.equal(copy.deepcopy(model[0][0].weight).to_local(), model[0][0].weight.to_local())

    saved = model[1][0].weight.full_tensor().detach().clone()
    state = {k: copy.deepcopy(v) for k, v in state.items()}
    dcp.save({"model": state}, checkpoint_id=folder / "checkpoint")
    restored, _ = build(BLOCK, mesh, MixedPrecisionPolicy(), quantised=True, seed=2)
    for other in (plain, restored):  # what was saved loads with and without quantised gathers
        target = {"model": other.state_dict()}
        dcp.load(target, checkpoint_id=folder / "checkpoint")
        other.load_state_dict(target["model"])
    outcome = train(model)
    assert equal(train(plain), outcome)
    assert equal(train(restored), outcome)
    assigned = build(BLOCK, mesh, MixedPrecisionPolicy(), quantised=True, seed=3)[0]
    assigned(torch.randn(4, 130)).sum().backward()
    assigned.load_state_dict(state, assign=True)
    assigned[1].unshard()
    weight = assigned[1][0].weight
    assert isinstance(weight, QuantizedWeight)  # still quantised after the assignment, and the new values
    assert torch.equal(weight + 0, quantize(saved, FP8_128X128).dequantize())


def small_gathers_where_they_fit(folder: Path) -> None:
    weights_travel_once_and_small(mesh := init_device_mesh("cpu", (2,)))
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def told(rule: Rule, out: int = 256, mesh: DeviceMesh = mesh, tie: bool = False, run: bool = False) -> str:
        model = nn.Sequential(nn.Linear(256, out), nn.Linear(out, out))
        if tie:
            model[1].weight = model[0].weight
        convert(model, Recipe(name="test", rules=(rule,)))
        fully_shard(model, mesh=mesh)
        gathers = quantize_gathers(model)
        assert gathers.rows[0].payload is None
        assert gathers.ratio == 1.0
        if run:  # gathered as it is, and works
            model(torch.randn(4, 256)).sum().backward()
        assert gathers.rows[0].why in str(gathers)
        return gathers.rows[0].why

    assert told(BLOCK, 384) == "384 rows over 2 ranks are not whole blocks of 128"
    assert told(SQUARE, 160, run=True) == "160 rows over 2 ranks are not whole blocks of 32"
    assert told(Rule(forward="mxfp8", dgrad="mxfp8")) == "forward mxfp8 has no square blocks"
    assert "dgrad bf16 wants the weight otherwise" in told(Rule(forward="fp8_block"))
    assert "Hadamard" in told(
        Rule(forward="mxfp8_square", dgrad="mxfp8_square", hadamard=32, hadamard_in=("forward", "dgrad"))
    )
    assert told(BLOCK, tie=True) == "other modules share the weight"
    assert told(BLOCK, mesh=grid) == "one rank holds all rows, nothing is gathered"


@pytest.mark.parametrize("check", [same_training, small_gathers_where_they_fit, masters_are_saved])
def test_two_processes(check: Any, tmp_path: Path) -> None:
    run_ranks(__file__, check.__name__, tmp_path)


def test_models_that_are_not_ready_are_refused() -> None:
    model = nn.Sequential(nn.Linear(256, 256))
    with pytest.raises(ValueError, match="call fully_shard before"):
        quantize_gathers(model)


def test_a_quantised_weight_is_its_values_to_everyone_else() -> None:
    x = torch.randn(256, 128)
    q = quantize(x, FP8_128X128)
    weight = nn.Parameter(QuantizedWeight(q))
    assert isinstance(weight, QuantizedWeight)
    assert weight.shape == x.shape
    out = nn.functional.linear(torch.ones(3, 128), weight)
    torch.testing.assert_close(out, q.dequantize().sum(1).expand(3, -1), rtol=1e-4, atol=1e-4)
    out.sum().backward()
    assert torch.equal(weight.grad, torch.full_like(x, 3.0))
    assert torch.equal(weight[3:5], q.dequantize()[3:5])


@pytest.mark.parametrize(("precision", "spec"), [("fp8_block", FP8_128X128), ("mxfp8_square", MXFP8_SQUARE)])
def test_layers_take_a_quantised_weight_as_it_is(precision: str, spec: QuantSpec) -> None:
    """No product quantises it again, and outputs and gradients are those of the weight that it was made from."""
    products = Products(forward=precision, dgrad=precision)
    weight, x = torch.randn(256, 130), torch.randn(20, 130)
    outcomes, quantised = [], []
    for w in (nn.Parameter(weight), nn.Parameter(QuantizedWeight(quantize(weight, spec)))):
        roles: list[tuple[str, str]] = []
        leaf = x.clone().requires_grad_()

        def observe(product: str, role: str, value: torch.Tensor, q: QTensor, roles: Any = roles) -> None:
            roles.append((product, role))

        out = low_precision_linear(leaf, w, products=products, observer=observe)
        out.square().sum().backward()
        outcomes.append((out.detach(), leaf.grad, w.grad))
        quantised.append(roles)
    assert quantised[0] == [("forward", "input"), ("forward", "weight"), ("dgrad", "grad_output"), ("dgrad", "weight")]
    assert quantised[1] == [("forward", "input"), ("dgrad", "grad_output")]
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
    # A product in another format has only the values to start from.
    other = low_precision_linear(x, w, products=Products(forward="mxfp8"))
    assert torch.equal(other, low_precision_linear(x, w.quantized.dequantize(), products=Products(forward="mxfp8")))
