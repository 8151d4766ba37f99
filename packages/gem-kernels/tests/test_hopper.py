"""The Hopper kernels on a Hopper GPU: against float64 on awkward lengths, every configuration, twice the same bits."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from gem_kernels import dispatch, gdpa, jagged_attention
from gem_kernels.gdpa.activations import ACTIVATIONS, POLYNOMIALS, formula
from gem_kernels.testing import offsets_of, poisoned, relative_error

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

LQ = [1, 63, 64, 65, 127, 128, 129, 0, 200, 0, 0, 500, 33, 193, 1, 640, 64, 900]
LK = [1, 129, 128, 127, 65, 64, 63, 100, 0, 0, 5, 700, 257, 256, 1000, 640, 900, 64]
BACKWARD = ["stream", "short-keys", "short-queries"]  # the first for sequences of any length


def dense(q, k, v, lq, lk, scale, act, left=-1, right=-1):
    """O and LSE sequence by sequence; float64 in, float64 out. A query that sees no key: 0 and -inf."""
    outs, lses, a, c = [], [], 0, 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for x, y in zip(lq, lk, strict=True):
        s = torch.einsum("qhd,khd->hqk", q[a : a + x], k[c : c + y]) * scale
        distance = torch.arange(y, device=q.device)[None, :] - torch.arange(x, device=q.device)[:, None] - (y - x)
        seen = torch.ones_like(distance, dtype=torch.bool)
        if left >= 0:
            seen &= distance >= -left
        if right >= 0:
            seen &= distance <= right
        lse = torch.logsumexp(s.masked_fill(~seen, float("-inf")), -1)
        if act == "softmax":
            p = torch.exp(s - lse.masked_fill(lse.isneginf(), 0.0)[..., None]) * seen
        else:
            p = formula(act)(s) * seen
        outs.append(torch.einsum("hqk,khd->qhd", p, v[c : c + y]))
        lses.append(lse.T)
        a, c = a + x, c + y
    return torch.cat(outs), torch.cat(lses)


def problem(dim=128, dtype=torch.bfloat16, lq=LQ, lk=LK, heads=3, seed=0, kv_heads=None):
    torch.manual_seed(seed)
    shapes = ((sum(lq), heads), (sum(lk), kv_heads or heads), (sum(lk), kv_heads or heads), (sum(lq), heads))
    q, k, v, dout = (torch.randn(*shape, dim, device="cuda", dtype=dtype) for shape in shapes)
    return q, k, v, dout, offsets_of(lq, "cuda"), offsets_of(lk, "cuda")


def fitting(name):
    """Awkward lengths that the configuration takes: at most 64 keys, or queries, for those that keep them."""
    lq = [min(n, 64) for n in LQ] if name == "short-queries" else LQ
    lk = [min(n, 64) for n in LK] if name == "short-keys" else LK
    return lq, lk


CAUSAL, NONE = (-1, 0), (-1, -1)
CASES = [  # configuration, activation, head dimension, (query, key) heads, mask
    *((name, act, dim, (3, 3), NONE) for name in BACKWARD for act in ("softmax", "silu") for dim in (64, 128)),
    *(("stream", "softmax", 128, (3, 3), mask) for mask in (CAUSAL, (100, -1), (70, 30), (0, 0), (-1, 200))),
    *(("stream", "softmax", 64, (3, 3), mask) for mask in (CAUSAL, (200, -1), (10, 150))),
    *(("stream", act, dim, (3, 3), CAUSAL) for act in ("silu", "gelu") for dim in (64, 128)),
    ("stream", "relu2", 128, (2, 2), (100, 20)),
    ("stream", "softmax", 128, (4, 2), NONE),
    ("stream", "softmax", 128, (4, 1), CAUSAL),
    ("stream", "softmax", 64, (4, 1), (64, 64)),
    ("stream", "silu", 128, (4, 2), (50, 0)),
    *(("stream", "softmax", dim, (2, 2), NONE) for dim in (16, 40, 96, 112)),
    ("stream", "softmax", 96, (2, 2), CAUSAL),
    ("stream", "softmax", 32, (4, 2), (30, 30)),
    ("stream", "silu", 96, (2, 2), CAUSAL),
    ("short-keys", "softmax", 128, (4, 2), CAUSAL),
    ("short-keys", "softmax", 40, (3, 3), NONE),
    ("short-keys", "silu", 96, (3, 3), (10, 5)),
    ("short-queries", "softmax", 128, (3, 3), CAUSAL),
    ("short-queries", "softmax", 64, (3, 3), (100, 20)),
    ("short-queries", "silu", 96, (3, 3), (30, -1)),
]


@pytest.mark.parametrize(("name", "act", "dim", "heads", "mask"), CASES)
def test_backward(name, act, dim, heads, mask):
    from gem_kernels.hopper import launch_backward

    assert set(BACKWARD) == set(launch_backward.BACKWARD)
    lq, lk = fitting(name)
    left, right = mask
    q, k, v, dout, cq, ck = problem(dim, lq=lq, lk=lk, heads=heads[0], kv_heads=heads[1])
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, lq, lk, dim**-0.5, act, left, right)
    dlse = torch.randn(lse.shape, device="cuda") if act == "softmax" else None
    loss = (out * dout.double()).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isneginf(), 0.0) * dlse.double()).sum()
    expected = torch.autograd.grad(loss, leaves)
    args = (dout, dlse, q, k, v, out.detach().to(q.dtype), lse.detach().float(), cq, ck, max(lq), max(lk), dim**-0.5)
    options = {"act": act, "out_scale": 1.0, "left": left, "right": right, "config": launch_backward.BACKWARD[name]}
    with poisoned():
        got = launch_backward.backward(*args, **options)
    assert all(relative_error(g, e) < 8e-3 for g, e in zip(got, expected, strict=True))
    for _ in range(3):
        with poisoned():
            again = launch_backward.backward(*args, **options)
        assert all(torch.equal(a, g) for a, g in zip(again, got, strict=True))


def many(lq, lk, act, dim=128, mask=NONE):
    """A problem of many sequences and its float64 results."""
    q, k, v, dout, cq, ck = problem(dim, lq=lq, lk=lk, heads=4)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, lq, lk, dim**-0.5, act, *mask)
    saved = (out.detach().to(q.dtype), lse.detach().float())
    return (
        (q, k, v, dout),
        (cq, ck, max(lq), max(lk), dim**-0.5),
        saved,
        torch.autograd.grad(out, leaves, dout.double()),
    )


@pytest.mark.parametrize(
    ("name", "act", "dim", "mask"),
    [
        *((name, act, 128, NONE) for name in BACKWARD for act in ("softmax", "silu")),
        *(("stream", act, dim, CAUSAL) for act in ("softmax", "silu") for dim in (64, 128)),
        ("stream", "softmax", 128, (100, 30)),
        ("stream", "softmax", 64, NONE),
    ],
)
def test_many_tiles_backward(name, act, dim, mask):
    """The same for many tiles of each program; once more with a workspace that holds a few sequences only."""
    from gem_kernels.hopper import launch_backward

    torch.manual_seed(5)
    lq = torch.randint(0, 65 if name == "short-queries" else 700, (300,)).tolist()
    lk = torch.randint(0, 65 if name == "short-keys" else 700, (300,)).tolist()
    if mask != NONE:
        lk = [n if i % 3 else m for i, (n, m) in enumerate(zip(lq, lk, strict=True))]
    (q, k, v, dout), where, saved, expected = many(lq, lk, act, dim, mask)
    configs = [launch_backward.BACKWARD[name]]
    if name == "stream":
        configs.append(dataclasses.replace(configs[0], workspace=50 << 20))
    options = {"act": act, "out_scale": 1.0, "left": mask[0], "right": mask[1]}
    results = []
    for config in configs:
        with poisoned():
            grads = launch_backward.backward(dout, None, q, k, v, *saved, *where, config=config, **options)
        assert all(relative_error(g, e) < 8e-3 for g, e in zip(grads, expected, strict=True))
        results.append(grads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("name", "mask"),
    [("stream", NONE), ("stream", CAUSAL), ("short-keys", NONE)],
)
def test_replay_of_a_graph_with_other_lengths(name, mask):
    from gem_kernels.hopper import launch_backward

    first, second = [300, 0, 640, 61, 1, 200], [0, 640, 129, 63, 300, 70]
    first_k, second_k = first, second
    if name == "short-keys":
        first_k, second_k = [64, 0, 64, 61, 1, 60], [0, 64, 60, 63, 3, 60]
    assert (sum(first), sum(first_k)) == (sum(second), sum(second_k))  # totals are part of a graph
    q, k, v, dout, cq, ck = problem(lq=first, lk=first_k, heads=2)
    config = launch_backward.BACKWARD[name]
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], device="cuda")
    where = (cq, ck, 640, max(first_k + second_k), 0.1)
    options = {"act": "softmax", "out_scale": 1.0, "left": mask[0], "right": mask[1], "config": config}

    def run():
        return launch_backward.backward(dout, None, q, k, v, out, lse, *where, **options)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = run()
    for lq, lk in ((first, first_k), (second, second_k), (first, first_k)):
        cq.copy_(offsets_of(lq))
        ck.copy_(offsets_of(lk))
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        expected, expected_lse = dense(*leaves, lq, lk, 0.1, "softmax", *mask)
        out.copy_(expected.detach())
        lse.copy_(expected_lse.detach())
        wanted = torch.autograd.grad(expected, leaves, dout.double())
        for x in grads:
            x.fill_(float("nan"))
        graph.replay()
        assert all(relative_error(g, e) < 8e-3 for g, e in zip(grads, wanted, strict=True))


COMPUTED = sorted({act.removesuffix("_poly") for act in ACTIVATIONS} | set(POLYNOMIALS))  # by kernels


@pytest.mark.parametrize("act", COMPUTED)
def test_every_activation_and_out_scale(act):
    from gem_kernels.hopper import launch_backward

    q, k, v, _, cq, ck = problem()
    bound = POLYNOMIALS[act].bound if act in POLYNOMIALS else None
    scale = 0.2 if bound is None else bound / float(q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max())
    wide = [x.double().detach().requires_grad_() for x in (q, k, v)]
    expected = 0.25 * dense(*wide, LQ, LK, scale, act)[0]
    options = {"activation": act.rstrip("0123456789") if bound else act, "score_bound": bound, "out_scale": 0.25}
    got = gdpa(q, k, v, cq, ck, max(LQ), max(LK), scale=scale, backend="hopper", **options)
    assert relative_error(got, expected) < 5e-3
    name = BACKWARD[COMPUTED.index(act) % len(BACKWARD)]  # they share the activations: one kernel to build for each
    lq, lk = fitting(name)
    q, k, v, dout, cq, ck = problem(lq=lq, lk=lk)
    wide = [x.double().detach().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(0.25 * dense(*wide, lq, lk, scale, act)[0], wide, dout.double())
    grads = launch_backward.backward(
        dout, None, q, k, v, None, None, cq, ck, max(lq), max(lk), scale,
        act=act, out_scale=0.25, config=launch_backward.BACKWARD[name],
    )  # fmt: skip
    assert all(relative_error(g, e) < 1e-2 for g, e in zip(grads, wanted, strict=True))


@pytest.mark.parametrize(
    ("dtype", "act", "name", "causal"),
    [
        *((torch.bfloat16, act, name, False) for act in ("softmax", "silu") for name in BACKWARD),
        (torch.bfloat16, "softmax", "stream", True),
        (torch.bfloat16, "silu", "stream", True),
        (torch.float16, "softmax", "stream", False),
        (torch.float16, "silu", "short-keys", False),
    ],
)
def test_public_operators_differentiate_with_it(monkeypatch, dtype, act, name, causal):
    from gem_kernels.hopper import launch_backward

    ran = []
    backward = launch_backward.backward

    def noted(*args, config, **options):
        ran.append(config)
        return backward(*args, config=config, **options)

    monkeypatch.setattr(launch_backward, "backward", noted)
    lq, lk = fitting(name)
    q, k, v, dout, cq, ck = problem(dtype=dtype, lq=lq, lk=lk)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide = [x.double().detach().requires_grad_() for x in (q, k, v)]
    expected = dense(*wide, lq, lk, 0.1, act, *(CAUSAL if causal else NONE))[0]
    where = (cq, ck, max(lq), max(lk))
    if act == "softmax":
        got = jagged_attention(*leaves, *where, scale=0.1, causal=causal)
    else:
        got = gdpa(*leaves, *where, activation=act, scale=0.1, causal=causal)
    grads = torch.autograd.grad(got, leaves, dout)
    wanted = torch.autograd.grad(expected, wide, dout.double())
    assert ran == [launch_backward.BACKWARD[name]]
    assert all(relative_error(g, e) < 8e-3 for g, e in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_scale_of_any_sign(scale):
    q, k, v, dout, cq, ck = problem()
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    wide = [x.double().detach().requires_grad_() for x in (q, k, v)]
    expected = dense(*wide, LQ, LK, scale, "softmax")[0]
    got = jagged_attention(*leaves, cq, ck, max(LQ), max(LK), scale=scale, backend="hopper")
    assert relative_error(got, expected) < 5e-3
    grads = torch.autograd.grad(got, leaves, dout)
    wanted = torch.autograd.grad(expected, wide, dout.double())
    assert all(relative_error(g, e) < 1e-2 for g, e in zip(grads, wanted, strict=True))


def test_float16_and_packed_views():
    lq = lk = [70, 300, 5]
    torch.manual_seed(1)
    packed = torch.randn(sum(lq), 3, 2, 128, device="cuda", dtype=torch.float16)
    packed.requires_grad_()
    q, k, v = packed.unbind(1)
    offsets = offsets_of(lq, "cuda", torch.int32)
    got, lse = jagged_attention(q, k, v, offsets, offsets, 300, 300, return_lse=True, backend="hopper")
    dout = torch.randn(sum(lq), 2, 128, device="cuda", dtype=torch.float16).transpose(0, 1).contiguous().transpose(0, 1)
    (grad,) = torch.autograd.grad(got, packed, dout)
    wide = packed.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(dense(*wide.unbind(1), lq, lk, 128**-0.5, "softmax")[0], wide, dout.double())
    assert relative_error(grad, wanted) < 2e-3
    expected, expected_lse = dense(q.double(), k.double(), v.double(), lq, lk, 128**-0.5, "softmax")
    assert relative_error(got, expected) < 2e-3
    assert relative_error(lse, expected_lse) < 1e-5


@pytest.mark.parametrize("mask", [NONE, (100, 0)])
@pytest.mark.parametrize("queries", [64, 70])
def test_learned_queries(queries, mask):
    from gem_kernels.hopper import launch_backward

    lk = [1, 200, 0, 77, 640]
    torch.manual_seed(2)
    q = torch.randn(queries, 2, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(sum(lk), 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ck = offsets_of(lk, "cuda")
    where = (None, ck, queries, max(lk))
    out, lse = jagged_attention(q, k, v, *where, return_lse=True, window=mask, backend="hopper")
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected = dense(wide[0].repeat(len(lk), 1, 1), *wide[1:], [queries] * len(lk), lk, 128**-0.5, "softmax", *mask)[0]
    dout = torch.randn_like(out)
    assert relative_error(out, expected) < 5e-3
    wanted = torch.autograd.grad(expected, wide, dout.double())
    for config in launch_backward.BACKWARD.values():
        if not config.fits(queries, max(lk)):
            continue
        grads = launch_backward.backward(
            dout, None, q, k, v, out, lse, *where, 128**-0.5,
            act="softmax", out_scale=1.0, left=mask[0], right=mask[1], config=config,
        )  # fmt: skip
        assert all(relative_error(g, e) < 1e-2 for g, e in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("shift", [-60.0, 60.0])
def test_extreme_logits(shift):
    q, k, v, _, cq, ck = problem(lq=[130, 64], lk=[200, 65], heads=1)
    q[..., 0], k[..., 0] = 8.0, shift * math.sqrt(128) / 8.0
    out, lse = jagged_attention(q, k, v, cq, ck, 130, 200, return_lse=True, backend="hopper")
    expected, expected_lse = dense(q.double(), k.double(), v.double(), [130, 64], [200, 65], 128**-0.5, "softmax")
    assert relative_error(out, expected) < 5e-3
    assert relative_error(lse, expected_lse) < 1e-5


def test_nothing_waits_for_the_device():
    q, k, v, dout, cq, ck = problem()
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def step():
        out = jagged_attention(*leaves, cq, ck, max(LQ), max(LK), backend="hopper")
        return torch.autograd.grad(out, leaves, dout)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dispatch_prefers_it():
    q = torch.empty(1, 1, 128, device="cuda", dtype=torch.bfloat16)
    assert dispatch.why("jagged_attention", q).backend == "hopper"
    assert dispatch.why("gdpa", q, features=("activation:silu",)).backend == "hopper"
