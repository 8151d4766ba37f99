"""Self-attention through a window over the past on Hopper: right in the simulator in two orders of events and against
float64 on a card, taken by the public operators, and which problems are not for it.
"""

from __future__ import annotations

import pytest
import torch
from gem_kernels import dispatch as choosing
from gem_kernels import gdpa, jagged_attention
from gem_kernels.gdpa.activations import ACTIVATIONS, POLYNOMIALS, formula
from gem_kernels.jagged_attention import window_past
from gem_kernels.simulator import simulating
from gem_kernels.testing import offsets_of, poisoned, relative_error
from gem_kernels.tiling import dispatch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
simulated = pytest.mark.skipif(not dispatch.interpreting(), reason="plain Triton kernels run in its interpreter here")
on_card = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
LENGTHS = [1, 0, 65, 330, 64]
ERROR = {torch.bfloat16: 8e-3, torch.float16: 2e-3}  # of results, relative
FORMULAS = [*(x for x in ACTIVATIONS if not x.endswith("_poly")), *POLYNOMIALS]


def dense(q, k, v, lengths, act, left, scale):
    """O and LSE, sequence by sequence; float64 in, float64 out."""
    outs, lses = [], []
    for own, keys, values in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        s = torch.einsum("qhd,khd->hqk", own, keys) * scale
        distance = torch.arange(len(own), device=q.device)[:, None] - torch.arange(len(own), device=q.device)[None, :]
        hidden = (distance < 0) | (distance > left)
        if act == "softmax":
            s = s.masked_fill(hidden, float("-inf"))
            p = s.softmax(-1)
            lses.append(torch.logsumexp(s, -1).T)
        else:
            p = formula(act)(s).masked_fill(hidden, 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", p, values))
    return torch.cat(outs), torch.cat(lses) if lses else None


def inputs(lengths, heads, dim, seed, *, device="cpu", dtype=torch.bfloat16):
    """Q, K, V and dO."""
    generator = torch.Generator(device).manual_seed(seed)
    shape = sum(lengths), heads, dim
    return [torch.randn(*shape, generator=generator, device=device).to(dtype) for _ in range(4)]


def check(act, lengths, left, tensors, *, across=None, scale=0.1, out_scale=1.0):
    q, k, v, _ = tensors
    expected, logs = dense(*(x.double() for x in (q, k, v)), lengths, act, left, scale)
    with poisoned():
        out, lse = window_past.forward(
            q, k, v, offsets_of(lengths, q.device), scale, left, act=act, out_scale=out_scale, across=across
        )
    assert relative_error(out, out_scale * expected) < ERROR[q.dtype]
    if logs is not None:
        assert (lse.double() - logs).abs().max() < 1e-3


@simulated
@pytest.mark.parametrize("across", [True, False])
@pytest.mark.parametrize(("act", "left", "dim"), [("softmax", 256, 64), ("silu", 100, 128), ("softmax", 0, 128)])
def test_in_the_simulator(act, left, dim, across):
    for seed, processors in ((0, 1), (1, 4)):  # many tiles for a program, and one or none
        with simulating(seed=seed, processors=processors):
            check(act, LENGTHS, left, inputs(LENGTHS, 1, dim, seed), across=across)


@simulated
@pytest.mark.parametrize("act", FORMULAS)
def test_activations_in_the_simulator(act):
    lengths = [70, 3]
    with simulating(processors=1):
        check(act, lengths, 20, inputs(lengths, 1, 64, 2), scale=-0.07, out_scale=-0.5)


@pytest.fixture
def on_hopper(monkeypatch):
    """The operators choose as on a Hopper GPU."""
    monkeypatch.setattr(choosing, "choose", lambda *_: "hopper")


def launched(simulation):
    return {name for name, _, _ in simulation.launches}


@simulated
@pytest.mark.parametrize(("scale", "left", "kernel"), [(0.1, 70, "past_kernel"), (-0.1, 40, "forward_kernel")])
def test_jagged_attention_takes_wide_ones_and_its_backward_follows(on_hopper, scale, left, kernel):
    lengths = [65, 0, 90]
    *leaves, dout = inputs(lengths, 1, 128, 3)
    leaves = [x.requires_grad_() for x in leaves]
    offsets = offsets_of(lengths)
    with simulating(processors=2) as simulation, poisoned():
        out, lse = jagged_attention(
            *leaves, offsets, offsets, 90, 90, scale=scale, window=(left, 0), return_lse=True
        )  # fmt: skip
        assert launched(simulation) & {"forward_kernel", "past_kernel"} == {kernel}
        grads = torch.autograd.grad((out, lse), leaves, (dout, torch.ones_like(lse)))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected, logs = dense(*exact, lengths, "softmax", left, scale)
    wanted = torch.autograd.grad((expected * dout.double()).sum() + logs.sum(), exact)
    for a, b in zip((out, lse, *grads), (expected, logs, *wanted), strict=True):
        assert relative_error(a, b) < 1e-2


@simulated
@pytest.mark.parametrize("dim", [64, 128])
def test_gdpa_takes_it_and_its_backward_follows(on_hopper, dim):
    lengths, left = [65, 0, 90], 40
    *leaves, dout = inputs(lengths, 1, dim, 4)
    leaves = [x.requires_grad_() for x in leaves]
    offsets = offsets_of(lengths)
    options = {"activation": "hardswish", "scale": 0.1, "out_scale": 0.25}
    with simulating(processors=2) as simulation, poisoned():
        out = gdpa(*leaves, offsets, offsets, 90, 90, window=(left, 0), **options)
        assert "past_kernel" in launched(simulation)
        assert not {"forward_kernel"} & launched(simulation)
        grads = torch.autograd.grad(out, leaves, dout)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    expected = 0.25 * dense(*exact, lengths, "hardswish", left, 0.1)[0]
    wanted = torch.autograd.grad(expected, exact, dout.double())
    for a, b in zip((out, *grads), (expected, *wanted), strict=True):
        assert relative_error(a, b) < 1e-2


@simulated
def test_gdpa_with_a_residual_goes_on_as_before(on_hopper):
    q, k, v, residual = inputs([70], 1, 64, 5)
    offsets = offsets_of([70])
    with simulating(processors=1) as simulation, poisoned():
        out = gdpa(q, k, v, offsets, offsets, 70, 70, scale=0.1, window=(20, 0), residual=residual)
    assert "past_kernel" not in launched(simulation)
    expected, _ = dense(*(x.double() for x in (q, k, v)), [70], "silu", 20, 0.1)
    assert relative_error(out, expected + residual.double()) < 8e-3


def test_which_problems():
    q, offsets = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.tensor([0, 4])

    def takes(q=q, k=q, q_offsets=offsets, k_offsets=offsets, left=64, right=0, act="silu"):
        return window_past.takes(q, k, q_offsets, k_offsets, left, right, act)

    short = q[..., :64]
    assert takes()
    assert takes(k_offsets=offsets[:], left=511)
    assert takes(act="softmax", left=65)
    assert not takes(act="softmax")
    assert takes(short, short)
    assert not takes(short, short, left=200, act="softmax")
    for left, right in ((-1, 0), (64, 1), (64, -1), (512, 0)):
        assert not takes(left=left, right=right)
    assert not takes(k_offsets=offsets.clone())
    assert not takes(q_offsets=None)
    assert not takes(k=q[:, :1])
    assert not takes(q[..., :96], q[..., :96])
    assert not takes(k=torch.cat((q, q)))


class TestOnACard:
    pytestmark = on_card

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("act", ["softmax", "silu"])
    @pytest.mark.parametrize("dim", [64, 128])
    @pytest.mark.parametrize("across", [True, False])
    def test_many_tiles(self, across, dim, act, dtype):
        drawn = torch.randint(0, 1025, (150,), generator=torch.Generator().manual_seed(dim)).tolist()
        lengths = LENGTHS + drawn
        tensors = inputs(lengths, 4, dim, 0, device="cuda", dtype=dtype)
        for left in (0, 1, 64, 100, 256, 511):
            check(act, lengths, left, tensors, across=across)

    @pytest.mark.parametrize("dim", [64, 128])
    @pytest.mark.parametrize("act", FORMULAS)
    def test_activations(self, act, dim):
        drawn = torch.randint(0, 500, (60,), generator=torch.Generator().manual_seed(dim)).tolist()
        lengths = LENGTHS + drawn
        tensors = inputs(lengths, 2, dim, 1, device="cuda")
        for left in (40, 200):
            check(act, lengths, left, tensors, scale=-0.08, out_scale=-0.5)

    def test_the_same_bits_twice(self):
        lengths = torch.randint(0, 1025, (150,), generator=torch.Generator().manual_seed(3)).tolist()
        q, k, v, _ = inputs(lengths, 4, 128, 2, device="cuda")
        for left in (64, 256):
            runs = [
                window_past.forward(q, k, v, offsets_of(lengths, "cuda"), 0.1, left, act="softmax") for _ in range(4)
            ]
            assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))

    @pytest.mark.parametrize("act", ["softmax", "silu", "gelu", "silu_poly"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("dim", [64, 128])
    def test_gradients_of_the_operators(self, dim, dtype, act):
        drawn = torch.randint(0, 700, (60,), generator=torch.Generator().manual_seed(dim)).tolist()
        lengths = LENGTHS + drawn
        *leaves, dout = inputs(lengths, 2, dim, 6, device="cuda", dtype=dtype)
        leaves = [x.requires_grad_() for x in leaves]
        offsets = offsets_of(lengths, "cuda")
        where = *leaves, offsets, offsets, max(lengths), max(lengths)
        for left in (64, 200):
            exact = [x.detach().double().requires_grad_() for x in leaves]
            if act == "softmax":
                got = jagged_attention(*where, scale=0.07, window=(left, 0), return_lse=True)
                expected = dense(*exact, lengths, act, left, 0.07)
            else:
                bounded = {"score_bound": 4.0} if act == "silu_poly" else {}
                got = (gdpa(*where, activation=act, scale=0.07, out_scale=0.1, window=(left, 0), **bounded),)
                known = "silu_poly4" if bounded else act
                expected = (0.1 * dense(*exact, lengths, known, left, 0.07)[0],)
            douts = [dout, *(torch.randn_like(x) for x in got[1:])]
            grads = torch.autograd.grad(got, leaves, douts)
            wanted = torch.autograd.grad(expected, exact, [x.double() for x in douts])
            for a, b in zip(got, expected, strict=True):
                assert relative_error(a, b) < ERROR[dtype]
            for a, b in zip(grads, wanted, strict=True):
                assert relative_error(a, b) < 1e-2
