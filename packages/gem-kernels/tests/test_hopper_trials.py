"""Variants of the Hopper forward that nobody chooses yet: right in the simulator in two orders of events, and on a card
with many tiles for every program.
"""

from __future__ import annotations

import pytest
import torch
from gem_kernels.bench import cases, prebuild, trials
from gem_kernels.gdpa.activations import formula
from gem_kernels.hopper import launch, window_across, window_rolling
from gem_kernels.simulator import simulating
from gem_kernels.testing import offsets_of, poisoned, relative_error
from gem_kernels.tiling import dispatch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
simulated = pytest.mark.skipif(not dispatch.interpreting(), reason="plain Triton kernels run in its interpreter here")
ERROR = 8e-3  # of bfloat16 results, relative
LQ, LK = [1, 0, 65, 200, 64, 30, 0], [3, 5, 130, 320, 64, 0, 0]  # two short steps, one, none; 192 rows and more
WINDOWED = [1, 0, 65, 330, 64]


def dense(q, k, v, lq, lk, act, left=None):
    """O and LSE, sequence by sequence, in float64."""
    outs, lses, a, c = [], [], 0, 0
    for x, y in zip(lq, lk, strict=True):
        own, keys, values = (z.double() for z in (q[a : a + x], k[c : c + y], v[c : c + y]))
        s = torch.einsum("qhd,khd->hqk", own, keys) * q.shape[2] ** -0.5
        hidden = torch.zeros(x, y, dtype=torch.bool, device=q.device)
        if left is not None:
            distance = torch.arange(x, device=q.device)[:, None] - torch.arange(y, device=q.device)[None, :]
            hidden = (distance < 0) | (distance > left)
        if act == "softmax":
            lse = torch.logsumexp(s.masked_fill(hidden, float("-inf")), -1)
            p = torch.exp(s.masked_fill(hidden, float("-inf")) - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
            lses.append(lse.T)
        else:
            p = formula(act)(s).masked_fill(hidden, 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", p, values))
        a, c = a + x, c + y
    return torch.cat(outs), torch.cat(lses) if lses else None


def inputs(rows_q, rows_k, heads, dim, seed, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    sizes = (rows_q, rows_k, rows_k)
    return [torch.randn(n, heads, dim, generator=generator, device=device).bfloat16() for n in sizes]


def agree(out, lse, expected, logs):
    assert relative_error(out, expected) < ERROR
    if logs is not None:
        assert torch.equal(lse.isneginf(), logs.isneginf())
        assert (lse.double() - logs)[~logs.isneginf()].abs().max() < 1e-3


def whole(name, act, lq, lk, heads, dim, seed, device="cpu"):
    """O, LSE and what they should be."""
    q, k, v = inputs(sum(lq), sum(lk), heads, dim, seed, device)
    where = offsets_of(lq, device), offsets_of(lk, device), max(lq), max(lk)
    config = launch.TRIALS[name]
    got = launch.forward(q, k, v, *where, dim**-0.5, act=act, out_scale=1.0, config=config)
    return *got, *dense(q, k, v, lq, lk, act)


def windowed(kind, act, lengths, left, heads, dim, seed, device="cpu"):
    q, k, v = inputs(sum(lengths), sum(lengths), heads, dim, seed, device)
    offsets = offsets_of(lengths, device)
    if kind == "rolling":
        got = window_rolling.forward(q, k, v, offsets, dim**-0.5, left, act=act)
    else:
        got = window_across.forward(q, k, v, offsets, dim**-0.5, left, act=act, across=kind == "across")
    return *got, *dense(q, k, v, lengths, lengths, act, left)


@simulated
@pytest.mark.parametrize("name", launch.TRIALS)
def test_configurations_in_the_simulator(name):
    act = "silu" if name.endswith("late") else "softmax"
    for seed, dim in ((0, 64), (1, 128)):
        with simulating(seed=seed, processors=2), poisoned():
            agree(*whole(name, act, LQ, LK, 1, dim, seed))


@simulated
@pytest.mark.parametrize("kind", trials.WINDOWS)
@pytest.mark.parametrize(("act", "left", "dim"), [("softmax", 256, 64), ("silu", 100, 128)])
def test_windows_in_the_simulator(act, left, dim, kind):
    for seed, processors in ((0, 2), (1, 5)):  # runs of several tiles, and of one or none
        with simulating(seed=seed, processors=processors), poisoned():
            agree(*windowed(kind, act, WINDOWED, left, 2, dim, seed))


def test_every_trial_is_in_the_benchmark():
    assert {f"trial {name}" for name in launch.TRIALS} == set(trials.names(cases.case("self-half-512"), None))
    assert trials.names(cases.case("half-4096-window"), "silu") == [f"trial window {x}" for x in trials.WINDOWS]
    for name in ("half-1024-causal", "half-1024-bias", "half-1024-d96"):
        assert not trials.names(cases.case(name), None)
    built = {variant for _, _, variant in prebuild.tasks(["self-half-512"], [None], lambda _: True, ("fa3",), True)}
    assert {f"trial {name}" for name in launch.TRIALS} <= built


def test_trials_take_no_masks_where_they_cannot():
    assert not launch.TRIALS["3x128-halves"].fits(512, masked=True)
    assert not launch.TRIALS["3x64-halves"].fits(512, bias=True)
    assert launch.TRIALS["3x128-halves"].fits(512)
    assert launch.TRIALS["3x128-near"].fits(512, masked=True)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("act", ["softmax", "silu"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("name", launch.TRIALS)
def test_configurations(name, dim, act):
    lengths = torch.randint(0, 513, (300,), generator=torch.Generator().manual_seed(dim)).tolist()
    with poisoned():
        agree(*whole(name, act, LQ + lengths, LK + lengths, 4, dim, 0, "cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("act", ["softmax", "silu"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", trials.WINDOWS)
def test_windows(kind, dim, act):
    lengths = torch.randint(0, 1025, (150,), generator=torch.Generator().manual_seed(dim)).tolist()
    for left in (1, 64, 100, 256):
        with poisoned():
            agree(*windowed(kind, act, WINDOWED + lengths, left, 4, dim, 0, "cuda"))
