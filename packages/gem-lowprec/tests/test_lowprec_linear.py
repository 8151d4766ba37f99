"""The linear layer against an emulation written with numpy and ml_dtypes in float64, and its behaviour as a module."""

from __future__ import annotations

import math
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from gem_lowprec import LowPrecisionLinear, Products, engine, gemm, hadamard, low_precision_linear, random_signs
from gem_lowprec.linear import Clock
from torch import nn

QUANTISED = ["mxfp8", "mxfp8_square", "fp8_block", "fp8_row"]
GEOMETRY = {  # (rows, k) of the two operands of a product, by what the second operand is; None is all
    "mxfp8": {"weight": ((1, 32), (1, 32)), "input": ((1, 32), (1, 32))},
    "mxfp8_square": {"weight": ((32, 32), (32, 32)), "input": ((32, 32), (32, 32))},
    "fp8_block": {"weight": ((1, 128), (128, 128)), "input": ((1, 128), (128, 128))},
    "fp8_row": {"weight": ((1, None), (1, None)), "input": ((1, None), (1, None))},
}


def emulate_operand(x: np.ndarray, block: tuple[int, int | None]) -> np.ndarray:
    out = np.full(x.shape, np.nan)
    br, bk = block[0], block[1] or x.shape[1]
    for i in range(0, x.shape[0], br):
        for j in range(0, x.shape[1], bk):
            part = x[i : i + br, j : j + bk]
            amax = np.abs(part).max()
            scale = 2.0 ** math.ceil(math.log2(amax / 448))
            code = np.clip((part / scale).astype(np.float32), -448, 448).astype(ml_dtypes.float8_e4m3fn)
            out[i : i + br, j : j + bk] = code.astype(np.float64) * scale
    return out


def emulate(a: torch.Tensor, b: torch.Tensor, precision: str, second: str) -> torch.Tensor:
    """a b^T with both operands quantised, in float64."""
    a64, b64 = a.detach().double().numpy(), b.detach().double().numpy()
    if precision != "bf16":
        block_a, block_b = GEOMETRY[precision][second]
        a64, b64 = emulate_operand(a64, block_a), emulate_operand(b64, block_b)
    return torch.from_numpy(a64 @ b64.T)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float32 accumulation, far below the quantisation error of about 3%."""
    assert actual.isfinite().all()
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < 2e-6, error


@pytest.mark.parametrize("precision", QUANTISED)
@pytest.mark.parametrize(("tokens", "k", "n"), [(64, 128, 256), (37, 150, 70), (1, 33, 5)])
def test_the_three_products_against_the_emulation(precision, tokens, k, n):
    x = torch.randn(tokens, k, requires_grad=True)
    w = (torch.randn(n, k) * 0.1).requires_grad_()
    b = torch.randn(n, requires_grad=True)
    g = torch.randn(tokens, n) * 1e-3
    y = low_precision_linear(x, w, b, products=Products(forward=precision, dgrad=precision, wgrad=precision))
    y.backward(g)
    close(y, emulate(x, w, precision, "weight") + b.detach().double())
    close(x.grad, emulate(g, w.t(), precision, "weight"))
    close(w.grad, emulate(g.t(), x.t(), precision, "input"))
    close(b.grad, g.double().sum(0))


@pytest.mark.parametrize("forward", ["bf16", "mxfp8"])
@pytest.mark.parametrize("dgrad", ["bf16", "fp8_row"])
@pytest.mark.parametrize("wgrad", ["bf16", "fp8_block"])
def test_each_product_has_its_own_precision(forward, dgrad, wgrad):
    x, w = torch.randn(40, 96, requires_grad=True), torch.randn(48, 96, requires_grad=True)
    g = torch.randn(40, 48)
    y = low_precision_linear(x, w, products=Products(forward=forward, dgrad=dgrad, wgrad=wgrad))
    y.backward(g)
    close(y, emulate(x, w, forward, "weight"))
    close(x.grad, emulate(g, w.t(), dgrad, "weight"))
    close(w.grad, emulate(g.t(), x.t(), wgrad, "input"))


def test_unquantised_passes_gradcheck_in_float64():
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *t: low_precision_linear(*t, products=Products()), (x, w, b))
    y = low_precision_linear(x, w, b, products=Products())
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w, b))


@pytest.mark.parametrize("precision", QUANTISED)
def test_bfloat16_and_leading_dimensions(precision):
    layer = LowPrecisionLinear(64, 96, products=Products(forward=precision, dgrad=precision, wgrad=precision))
    layer.to(torch.bfloat16)
    x = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    assert y.shape == (2, 5, 96)
    y.sum().backward()
    assert {y.dtype, x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype} == {torch.bfloat16}
    expected = emulate(x.flatten(0, 1), layer.weight, precision, "weight") + layer.bias.detach().double()
    assert (y.flatten(0, 1).double() - expected).norm() / expected.norm() < 2.0**-8


@pytest.mark.parametrize("precision", ["bf16", *QUANTISED])
def test_autocast_sets_the_output_and_never_the_accumulation(precision):
    x, w = torch.randn(33, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = low_precision_linear(x, w, products=Products(forward=precision, dgrad=precision, wgrad=precision))
        y.float().square().sum().backward()
    assert y.dtype == torch.bfloat16
    assert w.grad.dtype == x.grad.dtype == torch.float32
    expected = emulate(x.bfloat16(), w, precision, "weight")
    if precision != "bf16":  # only the output was rounded to BF16, half an ulp at most
        assert ((y.double() - expected).abs() <= expected.abs() * 2.0**-8 + 1e-5).all()


def test_compiled_gives_the_same_numbers():
    products = Products(forward="mxfp8", dgrad="fp8_block", wgrad="mxfp8", hadamard=32, stochastic=True)
    layer = LowPrecisionLinear(64, 96, products=products)
    x = torch.randn(33, 64)
    expected = layer(x)
    expected.square().mean().backward()
    gradient = layer.weight.grad.clone()
    layer.zero_grad()
    actual = torch.compile(layer, backend="aot_eager")(x)
    actual.square().mean().backward()
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(layer.weight.grad, gradient)


def test_empty_batch():
    layer = LowPrecisionLinear(64, 32, products=Products(forward="mxfp8", dgrad="mxfp8", wgrad="mxfp8"))
    x = torch.zeros(0, 64, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == (0, 64)
    assert (layer.weight.grad == 0).all()
    assert (layer.bias.grad == 0).all()


@pytest.mark.parametrize("precision", QUANTISED)
def test_emulation_is_announced_once(precision):
    x, w = torch.randn(5, 7), torch.randn(3, 7)
    gemm._announce.cache_clear()
    runs = engine(precision, "cpu")
    assert runs.name == "emulated"
    with pytest.warns(UserWarning, match="emulated") as caught:
        low_precision_linear(x, w, products=Products(forward=precision))
    assert [str(c.message) for c in caught] == [f"{precision} is emulated on cpu: {runs.why}"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low_precision_linear(x, w, products=Products(forward=precision))
        low_precision_linear(x, w, products=Products())


def test_weight_gradient_skipped_and_every_n_steps():
    x = torch.randn(8, 32, requires_grad=True)
    for step in range(5):
        layer = LowPrecisionLinear(32, 16, products=Products(forward="mxfp8", wgrad_every=2))
        layer.clock.step = step
        layer(x).sum().backward()
        assert (layer.weight.grad is None) == (step % 2 == 1)
        assert layer.bias.grad is not None
    layer = LowPrecisionLinear(32, 16, products=Products(wgrad="skip"))
    layer(x).sum().backward()
    assert layer.weight.grad is None


def gradients(products: Products, step: int = 0, micro: int = 0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=g, requires_grad=True)
    w = torch.randn(64, 64, generator=g, requires_grad=True)
    clock = Clock(step=step, micro=micro)
    y = low_precision_linear(x, w, products=products, clock=clock, seed=seed)
    clock.step = 10**6  # the backward pass belongs to the step of its forward pass
    y.backward(torch.randn(64, 64, generator=g))
    return x.grad, w.grad


def test_stochastic_gradients_are_reproducible_and_unbiased():
    products = Products(dgrad="mxfp8", wgrad="mxfp8", stochastic=True)
    first = gradients(products, step=3)
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(products, step=3), strict=True))
    for other in ({"step": 4}, {"step": 3, "micro": 1}, {"step": 3, "seed": 1}):
        assert not any(torch.equal(a, b) for a, b in zip(first, gradients(products, **other), strict=True))
    # Their mean is the product of the unrounded gradient with the rounded other operand: far closer than one draw.
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 64, generator=g), torch.randn(64, 64, generator=g)
    gradient = torch.randn(64, 64, generator=g)
    q = torch.from_numpy(emulate_operand(w.t().double().numpy(), (1, 32)))
    expected = gradient.double() @ q.t()
    draws = torch.stack([gradients(products, step=s)[0].double() for s in range(100)])
    one = (draws[0] - expected).norm()
    assert (draws.mean(0) - expected).norm() < 0.13 * one
    assert x.shape == w.shape


def test_hadamard_in_the_weight_gradient():
    products = Products(wgrad="mxfp8", hadamard=32)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=g)
    torch.randn(64, 64, generator=g)
    gradient = torch.randn(64, 64, generator=g)
    _, actual = gradients(products, step=2, seed=9)
    signs = random_signs(64, 9, step=2)
    close(actual, emulate(hadamard(gradient.t(), signs), hadamard(x.t(), signs), "mxfp8", "input"))
    exact = gradient.double().t() @ x.double()
    assert (actual - exact).norm() / exact.norm() < 0.06


def test_state_dict_moves_both_ways():
    plain, low = nn.Linear(40, 24), LowPrecisionLinear(40, 24, products=Products(forward="mxfp8"))
    assert list(plain.state_dict()) == list(low.state_dict()) == ["weight", "bias"]
    low.load_state_dict(plain.state_dict())
    again = nn.Linear(40, 24)
    again.load_state_dict(low.state_dict())
    assert torch.equal(again.weight, plain.weight)
    assert torch.equal(again.bias, plain.bias)
    x = torch.randn(4, 40)
    torch.testing.assert_close(low(x), plain(x), rtol=0.2, atol=0.1)
    assert "forward=mxfp8" in repr(low)


def test_from_linear_shares_parameters():
    plain = nn.Linear(40, 24, bias=False).eval()
    low = LowPrecisionLinear.from_linear(plain, Products())
    assert low.weight is plain.weight
    assert low.bias is None
    assert not low.training


def test_errors():
    for name in ("forward", "dgrad", "wgrad"):
        with pytest.raises(ValueError, match=f"{name} must be one of bf16, mxfp8.*got 'fp7'"):
            Products(**{name: "fp7"})
    with pytest.raises(ValueError, match="got 'skip'"):
        Products(forward="skip")
    with pytest.raises(ValueError, match=r"wgrad_every.*got 0"):
        Products(wgrad_every=0)
    with pytest.raises(ValueError, match="power of two, got 24"):
        Products(hadamard=24)
    with pytest.raises(ValueError, match="'backward'"):
        Products(hadamard_in=("backward",))
    with pytest.raises(ValueError, match=r"\[4, 5\] and \[3, 6\]"):
        low_precision_linear(torch.ones(4, 5), torch.ones(3, 6), products=Products())
    with pytest.raises(ValueError, match="'fp7'"):
        engine("fp7", "cpu")


def train(products: Products | None) -> float:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    student = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4))
    if products is not None:
        for i in (0, 2):
            student[i] = LowPrecisionLinear.from_linear(student[i], products)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    losses = []
    for _ in range(120):
        x = torch.randn(96, 64)
        target = teacher(x).detach() + 0.2 * torch.randn(96, 4)
        loss = nn.functional.mse_loss(student(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.5 * losses[-1]
    return sum(losses[-20:]) / 20


def test_training_a_small_network_stays_with_float32():
    reference = train(None)
    for products in (
        Products(forward="mxfp8", dgrad="mxfp8", wgrad="mxfp8"),
        Products(forward="mxfp8", dgrad="mxfp8", wgrad="mxfp8", hadamard=32, stochastic=True),
        Products(forward="fp8_row", dgrad="fp8_row"),
    ):
        assert abs(train(products) / reference - 1) < 0.03
