"""Projected heads: every backend against a float64 formula, forward and backward, over poisoned memory; the Hopper
kernel in the simulator in orders drawn from seeds, and what is broken on purpose found there.
"""

from __future__ import annotations

import pytest
import torch
from gem_kernels import Among, Turn, dispatch, project_rotary
from gem_kernels.project_rotary import hopper, hopper_kernels
from gem_kernels.simulator import Fault, instead, simulating
from gem_kernels.testing import poisoned, relative_error

EPS = 1e-3
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SIMULATED = pytest.mark.skipif(not dispatch.interpreting(), reason="plain Triton kernels run in its interpreter here")


def turned(x, positions, base):
    """[T, H, D] with the pairs of its heads turned, in float64."""
    dim = x.shape[2]
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    angle = (positions.double()[:, None] * frequency)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1).flatten(2)


def formula(x, weight, bias, gains, rows, *, heads, turns, places, others):
    packed = x @ weight.T + (0 if bias is None else bias)
    *parts, v = packed.unflatten(1, (len(gains) + 1, heads, -1)).unbind(1)
    made = []
    for part, gain in zip(parts, gains, strict=True):
        y = part if gain is None else part / (part.square().mean(-1, keepdim=True) + EPS).sqrt() * gain
        if len(turns) == 1:
            y = turned(y, *turns[0])
        elif turns:
            halves = y.split((heads // 2, heads - heads // 2), 1)
            y = torch.cat([turned(h, *t) for h, t in zip(halves, turns, strict=True)], 1)
        made.append(y)
    if places is not None:
        whole = made[0].new_zeros(x.shape[0] + rows.shape[0], *made[0].shape[1:])
        made[0] = whole.index_copy(0, places, made[0]).index_copy(0, others, rows)
    return (*made, v)


def check(
    tokens, k, heads, dim, *, dtype, backend, parts=2, turns=1, among=0, biased=True, normed=True, readers=1, seed=0,
    device="cpu", error=1e-2,
):  # fmt: skip
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, dtype).requires_grad_()

    outputs = (parts + 1) * heads * dim
    x, weight = normal(tokens, k), (normal(outputs, k).detach() / k**0.5).requires_grad_()
    bias = normal(outputs) if biased else None
    gains = [(1 + 0.3 * normal(dim).detach()).requires_grad_() if normed else None for _ in range(parts)]
    rows = normal(among, heads, dim) if among else None
    order = torch.randperm(tokens + among, generator=draw).to(device)
    places, others = (order[:tokens], order[tokens:]) if among else (None, None)
    where = [
        torch.randint(0, 2000, (tokens,), generator=draw).to(device),
        (torch.rand(tokens, generator=draw) * 15).to(device),
    ]
    given = [Turn(positions=p, base=b) for p, b in zip(where, (1e4, 1e2), strict=True)][:turns]
    leaves = [t for t in (x, weight, bias, *gains, rows) if t is not None]
    exact = {id(t): t.detach().double().requires_grad_() for t in leaves}
    wide = [None if t is None else exact[id(t)] for t in (x, weight, bias, *gains, rows)]
    expected = formula(
        *wide[:3], wide[3:-1], wide[-1], heads=heads, turns=[(t.positions, t.base) for t in given], places=places,
        others=others,
    )  # fmt: skip
    with poisoned():
        got = project_rotary(
            x, weight, heads, gains, turns=given, readers=readers, bias=bias, eps=EPS, backend=backend,
            among=Among(rows=rows, places=places, others=others) if among else None,
        )  # fmt: skip
    expected = (*expected, *(expected[-2:] if readers == 2 else ()))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < error
    probes = [torch.randn(e.shape, generator=draw, dtype=torch.float64).to(device, dtype) for e in expected]
    with poisoned():
        found = torch.autograd.grad(got, leaves, probes)
    wanted = torch.autograd.grad(expected, [exact[id(t)] for t in leaves], [p.double() for p in probes])
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < 2 * error
    return *got, *found


WAYS = [
    {"turns": 1, "among": 9},
    {"turns": 2, "among": 0, "readers": 2, "biased": False},
    {"turns": 0, "among": 5, "normed": False},
    {"turns": 1, "parts": 1},
]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_the_separate_way(device, how, backend):
    check(37, 40, 2, 16, dtype=torch.float32, device=device, backend=backend, error=1e-4, **how)


@pytest.fixture
def on_hopper(monkeypatch):
    """Its kernel is what this backend has, in the simulator."""
    monkeypatch.setitem(dispatch._BACKENDS, "hopper", lambda problem: hopper.applies(problem))
    for cache in (dispatch._choose, dispatch._name):
        cache.cache_clear()
    yield
    monkeypatch.undo()
    for cache in (dispatch._choose, dispatch._name):
        cache.cache_clear()


SHAPES = [(200, 64, 2, 128), (451, 192, 2, 64), (1, 128, 2, 128), (130, 128, 2, 64)]


@SIMULATED
@pytest.mark.parametrize("seed", range(4))
def test_in_the_simulator(on_hopper, seed):
    with simulating(seed=seed, processors=(7, 3, 20, 5)[seed]):
        check(*SHAPES[seed], dtype=torch.bfloat16, backend="hopper", seed=seed, **WAYS[seed])


BROKEN = {
    "a row over another's": ("mask=inside[:, None]", "mask=(inside | True)[:, None]", {"bounds", "race"}),
    "a part before its buffer is read": (
        "    tma.store_wait(0)  # copies",
        "    tma.store_wait(2)  # copies",
        {"race"},
    ),
    "the last parts not waited for": (
        "HALF, out, W, n, OUT)\n    tma.store_wait(0)",
        "HALF, out, W, n, OUT)",
        {"unfinished"},
    ),
}


@SIMULATED
@pytest.mark.parametrize("name", list(BROKEN))
def test_what_is_broken_is_reported(name):
    text, other, kinds = BROKEN[name]
    x, weight = torch.randn(300, 64).bfloat16(), torch.randn(768, 64).bfloat16()
    seats = torch.arange(300).roll(64)  # row 64, of the second program, goes first
    found = None
    for seed in range(12):
        try:
            with simulating(seed=seed, processors=12, changes=instead(hopper_kernels, text, other)):
                hopper.forward(x, weight, None, [None, None], 2, [], [], seats, 10, EPS)
        except Fault as fault:
            found = fault
            break
    assert found is not None, "nothing was reported"
    assert found.kind in kinds, found


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
class TestHopper:
    @pytest.mark.parametrize("how", WAYS)
    @pytest.mark.parametrize("backend", ["hopper", "triton"])
    @pytest.mark.parametrize("shape", [(70, 512, 4, 128), (40_001, 512, 4, 128), (8_191, 256, 8, 64), (1, 64, 2, 128)])
    def test_both_passes(self, shape, backend, how):
        runs = [
            check(*shape, dtype=torch.bfloat16, device="cuda", backend=backend, error=6e-3, **how) for _ in range(2)
        ]
        for a, b in zip(*runs, strict=True):
            assert torch.equal(a, b)


def test_errors():
    x, weight = torch.ones(3, 8), torch.ones(12, 8)
    for match, error, make in (
        (r"x must be \[T, K\]", ValueError, lambda: project_rotary(x, weight[:, :7], 1, [None, None])),
        ("of one floating dtype", TypeError, lambda: project_rotary(x, weight.double(), 1, [None, None])),
        ("a multiple of 9 rows; got 12", ValueError, lambda: project_rotary(x, weight, 3, [None, None])),
    ):
        with pytest.raises(error, match=match):
            make()
