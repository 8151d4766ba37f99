"""The Hopper kernels in the simulator, against float64: every family, forward and backward, in orders drawn from seeds;
and that the simulator finds what is broken on purpose.
"""

from __future__ import annotations

import random

import pytest
import torch
from gem_kernels import dispatch
from gem_kernels.block_attention import hopper as block_hopper
from gem_kernels.block_attention.reference import attention as block_reference
from gem_kernels.gdpa.activations import formula
from gem_kernels.hopper import (
    backward_keys,
    consumers,
    exchange,
    forward,
    launch,
    launch_backward,
    loaders,
    once,
    query_gradient,
    short_backward,
)
from gem_kernels.jagged_attention import window as windows
from gem_kernels.norm_linear import hopper as norm_hopper
from gem_kernels.norm_linear import hopper_kernels as norm_kernels
from gem_kernels.simulator import Fault, instead, simulating
from gem_kernels.testing import loop_blocks, offsets_of, poisoned, relative_error

pytestmark = pytest.mark.skipif(not dispatch.interpreting(), reason="plain Triton kernels run in its interpreter here")

LQ, LK = [1, 0, 65, 130, 64, 30, 0], [3, 5, 130, 200, 64, 0, 0]
SHORT = [8, 1, 0, 3, 64, 17, 2, 0, 63, 5]
RACES = {"race", "uninitialised"}
ANY = {"barrier", "deadlock", *RACES}
ERROR = 8e-3  # of bfloat16 results, relative


def dense(q, k, v, lq, lk, scale, act, left=-1, right=-1, bias=None):
    """O and LSE sequence by sequence, from the definitions; `lq` None: q serves every sequence."""
    outs, lses, a, c = [], [], 0, 0
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for b, y in enumerate(lk):
        x = q.shape[0] if lq is None else lq[b]
        own = q if lq is None else q[a : a + x]
        s = torch.einsum("qhd,khd->hqk", own, k[c : c + y]) * scale
        if bias is not None:
            s = s + bias[b % bias.shape[0], :, :x, :y]
        distance = torch.arange(y)[None, :] - torch.arange(x)[:, None] - (y - x)
        seen = torch.ones(x, y, dtype=torch.bool)
        seen = seen & (distance >= -left) if left >= 0 else seen
        seen = seen & (distance <= right) if right >= 0 else seen
        lse = torch.logsumexp(s.masked_fill(~seen, float("-inf")), -1)
        if act == "softmax":
            p = torch.where(seen, torch.exp(s - lse.masked_fill(lse.isneginf(), 0.0)[..., None]), 0.0)
        else:
            p = torch.where(seen, formula(act)(s), 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", p, v[c : c + y]))
        lses.append(lse.T)
        a, c = a + x, c + y
    return torch.cat(outs), torch.cat(lses)


def numbers(lq, lk, heads, kv_heads, dim, seed):
    """q, k, v, dout in bfloat16 and offsets; `lq` an int: shared queries."""
    generator = torch.Generator().manual_seed(seed)
    rows_q = lq if isinstance(lq, int) else sum(lq)
    rows_o = lq * len(lk) if isinstance(lq, int) else rows_q
    shapes = ((rows_q, heads), (sum(lk), kv_heads), (sum(lk), kv_heads), (rows_o, heads))
    made = [torch.randn(*shape, dim, generator=generator).bfloat16() for shape in shapes]
    return *made, None if isinstance(lq, int) else offsets_of(lq), offsets_of(lk)


def agree(got, expected, error=ERROR):
    for name, one in expected.items():
        assert relative_error(got[name], one) < error, (name, relative_error(got[name], one))


def check(
    *, lq=LQ, lk=LK, heads=(1, 1), dim=64, act="softmax", left=-1, right=-1, config=None, way=None, seed=0, shared=0,
    bias=None, processors=2, changes=None, backward=True, residual=False,
):  # fmt: skip
    """One problem, both passes, in the simulator and in float64."""
    q, k, v, dout, qo, ko = numbers(shared or lq, lk, *heads, dim, seed)
    max_q, max_k, scale = shared or max(lq), max(lk), dim**-0.5
    where = {"left": left, "right": right}
    extra = {"bias": bias}
    more = dout * 2 if residual else None
    lists = None if shared else lq
    with simulating(seed=seed, processors=processors, changes=changes) as simulation, poisoned():
        out, lse = launch.forward(
            q, k, v, qo, ko, max_q, max_k, scale, act=act, out_scale=1.0, **where, **extra, residual=more,
            config=None if config is None else launch.FORWARD[config],
        )  # fmt: skip
        if backward:
            soft = act == "softmax"
            dbias = None if bias is None else torch.empty_like(bias)
            got = launch_backward.backward(
                dout, None, q, k, v, out if soft else None, lse if soft else None, qo, ko, max_q, max_k, scale, act=act,
                out_scale=1.0, **where, **extra, bias_grad=dbias, config=launch_backward.BACKWARD[way or "stream"],
            )  # fmt: skip
    leaves = [x.double().requires_grad_() for x in (q, k, v, *(() if bias is None else (bias,)))]
    expected, logs = dense(*leaves[:3], lists, lk, scale, act, left, right, leaves[3] if bias is not None else None)
    agree({"out": out}, {"out": expected + (more.double() if residual else 0)})
    if act == "softmax":
        known = ~logs.isneginf()
        assert torch.equal(lse.isneginf(), ~known)
        assert (lse.double() - logs)[known].abs().max() < 1e-3
    if backward:
        grads = torch.autograd.grad((expected * dout.double()).sum(), leaves)
        agree(dict(zip("qkvb", (*got, dbias), strict=False)), dict(zip("qkvb", grads, strict=False)))
    return simulation


@pytest.mark.parametrize("config", list(launch.FORWARD))
def test_forward(config: str) -> None:
    once = launch.FORWARD[config].once
    check(config=config, lk=[min(n, 64) for n in LK] if once else LK, backward=False, seed=1)


@pytest.mark.parametrize("way", list(launch_backward.BACKWARD))
@pytest.mark.parametrize("act", ["softmax", "silu"])
def test_backward(way: str, act: str) -> None:
    lq = [min(n, 64) for n in LQ] if way == "short-queries" else LQ
    lk = [min(n, 64) for n in LK] if way == "short-keys" else LK
    check(lq=lq, lk=lk, way=way, act=act, seed=2)


CAUSAL = {"left": -1, "right": 0}
CASES = {
    "causal": {**CAUSAL, "heads": (2, 1), "lq": LQ[:4], "lk": LK[:4]},
    "window": {"left": 30, "right": 20},
    "window, silu": {"left": 10, "right": -1, "act": "silu", "lq": LQ[:4], "lk": LK[:4]},
    "causal, relu2": {**CAUSAL, "act": "relu2", "lq": LQ[:4], "lk": LK[:4]},
    "grouped": {"heads": (4, 2), "lq": LQ[:3], "lk": LK[:3]},
    "head dimension 32": {"dim": 32, "lq": LQ[:3], "lk": LK[:3]},
    "head dimension 96": {"dim": 96, "lq": LQ[:3], "lk": LK[:3]},
    "head dimension 128": {"dim": 128, "lq": LQ[:4], "lk": LK[:4]},
    "polynomial": {"act": "silu_poly4", "lq": LQ[2:4], "lk": LK[2:4]},
    "gelu": {"act": "gelu", "lq": LQ[2:4], "lk": LK[2:4]},
    "residual": {"act": "silu", "residual": True, "lq": LQ[:3], "lk": LK[:3]},
    "shared queries": {"shared": 70, "lk": [3, 0, 130, 64]},
    "shared queries, causal": {"shared": 5, "lk": [3, 0, 130, 64], **CAUSAL},
    "short keys, grouped, causal": {"way": "short-keys", "heads": (4, 2), "lk": SHORT[:7], **CAUSAL},
    "short keys, window, silu": {"way": "short-keys", "lk": SHORT[:7], "left": 10, "right": 5, "act": "silu"},
    "short queries, window": {"way": "short-queries", "lq": SHORT[:7], "left": 70, "right": 20},
    "short queries, head dimension 128": {"way": "short-queries", "lq": SHORT[:7], "dim": 128},
    "shared and short queries": {"way": "short-queries", "shared": 4, "lk": [3, 0, 130, 64, 16]},
}


@pytest.mark.parametrize("name", list(CASES))
def test_both_passes(name: str) -> None:
    check(**CASES[name], seed=3)


@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 2), (4, 2)])
def test_bias_and_its_gradient(shape: tuple[int, int]) -> None:
    lq, lk = [1, 0, 65, 30], [3, 5, 130, 64]
    bias = torch.randn(len(lq) if shape[0] > 1 else 1, shape[1], 65, 130, generator=torch.Generator().manual_seed(0))
    check(lq=lq, lk=lk, bias=bias.bfloat16(), heads=(2, 2), seed=4)


def test_bias_of_an_odd_width() -> None:
    bias = torch.randn(1, 1, 65, 131, generator=torch.Generator().manual_seed(0)).bfloat16()[..., :130]
    check(lq=[1, 0, 65], lk=[3, 5, 130], bias=bias, seed=4, **CAUSAL)


@pytest.mark.parametrize(("left", "right"), [(20, 0), (70, 0), (10, 5), (0, 0)])
def test_narrow_windows(left: int, right: int) -> None:
    lq = [1, 0, 65, 130, 64, 30]
    q, k, v, dout, offsets, _ = numbers(lq, lq, 2, 2, 64, 5)
    with simulating(seed=5, processors=1), poisoned():
        out, lse = windows.forward(q, k, v, offsets, offsets, 0.125, left, right)
        got = windows.backward(dout, None, q, k, v, out, lse, offsets, offsets, 0.125, left, right)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected, logs = dense(*leaves, lq, lq, 0.125, "softmax", left, right)
    agree({"out": out, "lse": lse}, {"out": expected, "lse": logs})
    grads = torch.autograd.grad((expected * dout.double()).sum(), leaves)
    agree(dict(zip("qkv", got, strict=True)), dict(zip("qkv", grads, strict=True)))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("act", "base", "values"), [(None, None, False), (None, 1e4, False), ("silu", 1e4, True)])
def test_block_attention(dim: int, act: str | None, base: float | None, values: bool) -> None:
    lengths = [1, 0, 64, 65, 130]
    q, k, v, dout, offsets, _ = numbers(lengths, lengths, 2, 2, dim, 6)
    blocks = loop_blocks(offsets, 64)
    positions = torch.cat([torch.arange(n) for n in lengths])
    grads = [torch.empty_like(q) for _ in range(3)]
    with simulating(seed=6, processors=1), poisoned():
        out = torch.empty_like(q)
        shared = (blocks, positions if values else None, 64, 0.1, act, base, values)
        block_hopper.forward(q, k, v, out, *shared)
        block_hopper.backward(dout, q, k, v, *grads, *shared)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    turned = None if base is None else positions
    expected = block_reference(
        *leaves, offsets, block=64, scale=0.1, activation=act, positions=turned, base=base or 1e4, values=values
    )
    agree({"out": out}, {"out": expected}, 1e-2)
    wanted = torch.autograd.grad((expected * dout.double()).sum(), leaves)
    agree(dict(zip("qkv", grads, strict=True)), dict(zip("qkv", wanted, strict=True)), 1e-2)


NORMS = {"wide": norm_hopper.WIDE, "slim": norm_hopper.SLIM, "resident": norm_hopper.RESIDENT[2]}


@pytest.mark.parametrize("name", list(NORMS))
@pytest.mark.parametrize("before", [True, False])
def test_projection_and_norm(name: str, before: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    columns = {"wide": 264, "slim": 72, "resident": 264}[name] if before else {"slim": 72}.get(name, 200)
    x = torch.randn(500, 104, generator=generator).bfloat16()
    weight = torch.randn(columns, 104, generator=generator).bfloat16()
    gain, bias = (torch.randn(n, generator=generator).bfloat16() for n in (104 if before else columns, columns))
    with simulating(seed=7, processors=2), poisoned():
        run = norm_hopper.forward if before else norm_hopper.forward_after
        got = run(x, *((gain, weight) if before else (weight, gain)), bias, 1e-6, config=NORMS[name])
    x, weight, gain, bias = (y.double() for y in (x, weight, gain, bias))
    if before:
        expected = torch.nn.functional.rms_norm(x, (104,), gain, 1e-6) @ weight.T + bias
    else:
        expected = torch.nn.functional.rms_norm(x @ weight.T + bias, (columns,), gain, 1e-6)
    agree({"y": got}, {"y": expected})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_many_short_histories(seed: int) -> None:
    """More tiles than programs, sequences without anything, one to sixteen events: the kernels picked unasked."""
    draw = random.Random(seed)
    most, batch = draw.choice([8, 16, 70]), draw.choice([8, 20])
    lq, lk = ([draw.choice([0, 1, most, draw.randint(1, most)]) for _ in range(batch)] for _ in range(2))
    kind = draw.choice(["self", "cross", "shared"])
    lq, lk = [*(lk if kind == "self" else lq), most], [*lk, most]
    shared = 4 if kind == "shared" else 0
    found = launch_backward.choose_backward(shared or most, most)
    way = next(name for name, config in launch_backward.BACKWARD.items() if config is found)
    act, dim, programs = draw.choice(["softmax", "silu"]), draw.choice([64, 128]), draw.choice([1, 2, 3])
    check(lq=lq, lk=lk, shared=shared, act=act, dim=dim, way=way, processors=programs, seed=seed)


# What is broken on purpose: texts of kernels and what stands there instead, what runs it, and what may be reported.
BYTES = "q_desc.block_type.nbytes"
WAIT_K = "mbarrier.wait(k_empty.index(s), phase ^ 1)"
ONCE = {"lq": SHORT, "lk": SHORT, "config": "3x64-once", "backward": False}
LONG = {"config": "3x64", "backward": False}
STREAM = {"way": "stream"}
BROKEN = {
    "a wait for values left out": ([(once, "mbarrier.wait(v_full.index(s), phase)", "pass")], ONCE, RACES),
    "a wait for keys left out": ([(consumers, "mbarrier.wait(k_full.index(s), phase)", "pass")], LONG, RACES),
    "a fence left out": ([(consumers, "fence_async_shared()", "pass")], LONG, {"proxy"}),
    "a fence of a last block left out": (
        [(short_backward, "    fence_async_shared()  #", "    if rows >= BLOCK:\n        fence_async_shared()  #")],
        {"way": "short-keys", "lk": SHORT, "lq": SHORT}, {"proxy"},
    ),
    "a stage too few": ([(loaders, "s = step % KS", "s = step % (KS - 1)")], LONG, ANY),
    "the other parity": ([(loaders, WAIT_K, WAIT_K.replace(" ^ 1", ""))], LONG, {"deadlock"}),
    "a parity that is a phase behind": (
        [(query_gradient, "phase = (step // KS) & 1", "phase = (step // KS + 1) & 1")], STREAM, ANY
    ),
    "barriers of blocks, not of consumers": (
        [(consumers, "slot = (tile % QS) * NC + W", "slot = (tile % QS) * NC + w"), (loaders, "(turn + w) % NC", "w")],
        {**ONCE, "lq": 20 * [3], "lk": 20 * [3], "processors": 1}, {"barrier"},
    ),
    "a store not waited for": (
        [(backward_keys, "    tma.store_wait(0)\n    out", "    out")], STREAM, {"race"}
    ),
    "the last stores not waited for": (
        [(query_gradient, "mine, D, DIM)\n    tma.store_wait(0)", "mine, D, DIM)")], STREAM, {"unfinished"}
    ),
    "a product not waited for": ([(once, "S = warpgroup_mma_wait(0, deps=(S,))", "pass")], ONCE, {"pending"}),
    "a slot given back too early": (
        [(norm_kernels, "warpgroup_mma_wait(1, deps=(acc,))", "warpgroup_mma_wait(2, deps=(acc,))")], None, {"race"}
    ),
    "bytes that do not come": ([(loaders, f"expect(full, {BYTES})", f"expect(full, 2 * {BYTES})")], ONCE, {"deadlock"}),
    "bytes that were not expected": (
        [(loaders, f"expect(full, {BYTES})", f"expect(full, {BYTES} // 2)")], ONCE, {"barrier"}
    ),
    "an arrival too many": (
        [(loaders, "arrive(record_empty.index(r), count=1)", "arrive(record_empty.index(r), count=2)")],
        ONCE, {"barrier", "race"},
    ),
    "rows of the next sequence": (
        [(consumers, "inside = (r < rows)[:, None]", "inside = (r >= 0)[:, None]")], ONCE, {"race", "bounds"}
    ),
    "statistics of the next sequence": ([(consumers, "lse, mask=r < rows)", "lse)")], ONCE, {"race", "bounds"}),
    "barriers not initialised": (
        [(forward, "mbarrier.init(q_full.index(i), count=1)", "pass")], ONCE, {"uninitialised"}
    ),
    "too much shared memory": (
        [(forward, "[QS * NC, BLOCK, 1, D]", "[8 * QS * NC, BLOCK, 1, D]")], ONCE, {"bounds"}
    ),
    "a cursor set back too early": ([(exchange, "taken == total - 1", "taken >= 0")], ONCE, {"race"}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BROKEN))
def test_what_is_broken_is_reported(name: str) -> None:
    texts, problem, kinds = BROKEN[name]
    changes = {kernel: change for one in texts for kernel, change in instead(*one).items()}
    found = None
    for seed in range(12):
        try:
            if problem is None:
                x, weight = torch.randn(300, 320).bfloat16(), torch.randn(264, 320).bfloat16()
                with simulating(seed=seed, processors=2, changes=changes):
                    norm_hopper.forward(x, x[0], weight, None, 1e-6)
            else:
                check(**{"lq": LQ[:4], "lk": LK[:4], **problem}, seed=seed, changes=changes)
        except Fault as fault:
            found = fault
            break
    assert found is not None, "nothing was reported"
    assert found.kind in kinds, found
    assert ".py:" in str(found) or found.kind == "unfinished"


def test_a_seed_is_an_order() -> None:
    first, again, other = (check(**ONCE, seed=seed).launches for seed in (5, 5, 6))
    assert first == again
    assert first != other
