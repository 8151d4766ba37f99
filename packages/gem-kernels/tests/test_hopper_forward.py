"""The Hopper forward on a Hopper GPU: configurations, masks and head dimensions against float64, awkward lengths."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch._dynamo.testing
from gem_kernels import dispatch, gdpa, jagged_attention
from gem_kernels.gdpa.activations import ACTIVATIONS, POLYNOMIALS, formula
from gem_kernels.testing import offsets_of, poisoned, relative_error

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

LQ = [1, 63, 64, 65, 127, 128, 129, 0, 200, 0, 0, 500, 33, 193, 1, 640, 64, 900, 1200]
LK = [1, 129, 128, 127, 65, 64, 63, 100, 0, 0, 5, 700, 257, 256, 1000, 640, 900, 64, 130]
FORWARD = ["3x128", "3x128-lean", "3x128-halves", "3x64", "3x64-halves", "3x64-once"]
MASKS = {"causal": (-1, 0), "left": (100, -1), "window": (130, 5), "narrow": (3, 2), "ahead": (-1, 70), "self": (0, 0)}
SHARED = 70  # learned queries


def dense(q, k, v, lq, lk, scale, act, left=-1, right=-1, bias=None):
    """O and LSE sequence by sequence; float64 in, float64 out. Key heads are repeated; q may be shared."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outs, lses, a, c = [], [], 0, 0
    for b, (x, y) in enumerate(zip(lq, lk, strict=True)):
        rows = q if q.shape[0] == SHARED else q[a : a + x]
        s = torch.einsum("qhd,khd->hqk", rows, k[c : c + y]) * scale
        if bias is not None:
            s = s + bias[b % bias.shape[0], :, :x, :y]
        distance = torch.arange(y, device=q.device) - (torch.arange(x, device=q.device)[:, None] + y - x)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        if bias is not None:
            hidden = hidden | bias[b % bias.shape[0], :, :x, :y].isneginf()
        if act == "softmax":
            s = s.masked_fill(hidden, float("-inf"))
            p = s.softmax(-1).masked_fill(hidden, 0.0).nan_to_num(0.0)
        else:
            p = formula(act)(s).masked_fill(hidden, 0.0)
        outs.append(torch.einsum("hqk,khd->qhd", p, v[c : c + y]))
        lses.append(torch.logsumexp(s, -1).T)
        a, c = a + x, c + y
    return torch.cat(outs), torch.cat(lses)


def problem(dim=128, dtype=torch.bfloat16, lq=LQ, lk=LK, heads=3, kv_heads=None, seed=0, rows=None):
    torch.manual_seed(seed)
    shapes = ((sum(lq) if rows is None else rows, heads), *((sum(lk), kv_heads or heads),) * 2)
    q, k, v = (torch.randn(*shape, dim, device="cuda", dtype=dtype) for shape in shapes)
    return q, k, v, offsets_of(lq, "cuda"), offsets_of(lk, "cuda")


def check(got, got_lse, out, lse, tolerance=5e-3):
    assert relative_error(got, out) < tolerance
    if got_lse is not None:
        assert torch.equal(got_lse.isneginf(), lse.isneginf())
        assert (got_lse.double() - lse).nan_to_num(0, 0, 0).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "mask"), [("3x128", (-1, -1)), ("3x64", (-1, -1)), ("3x128-lean", (-1, 0))])
@pytest.mark.parametrize("dim", [96, 128])
def test_a_residual_is_added(name, mask, dim):
    """Every place where O is stored: whole blocks, last blocks, queries that see no key, no keys at all."""
    from gem_kernels.hopper import launch

    q, k, v, cq, ck = problem(dim)
    residual = torch.randn_like(q)
    expected, _ = dense(q.double(), k.double(), v.double(), LQ, LK, dim**-0.5, "silu", *mask)
    options = {"act": "silu", "out_scale": 0.5, "left": mask[0], "right": mask[1], "config": launch.FORWARD[name]}
    for few in (k, k[:0]):
        offsets, wanted = (ck, expected * 0.5 + residual.double()) if few is k else (ck * 0, residual.double())
        with poisoned():
            got, _ = launch.forward(
                q, few, v[: len(few)], cq, offsets, max(LQ), max(LK), dim**-0.5, residual=residual, **options
            )
        check(got, None, wanted, None)


def fitting(name, lk=LK):
    """Lengths of keys that the configuration takes."""
    return [min(n, 64) for n in lk] if name == "3x64-once" else lk


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("act", ["softmax", "silu"])
@pytest.mark.parametrize("name", FORWARD)
def test_configurations(name, act, dim):
    from gem_kernels.hopper import launch

    assert set(FORWARD) == set(launch.FORWARD)
    lk = fitting(name)
    q, k, v, cq, ck = problem(dim, lk=lk)
    expected, lse = dense(q.double(), k.double(), v.double(), LQ, lk, dim**-0.5, act)
    args = (q, k, v, cq, ck, max(LQ), max(lk), dim**-0.5)
    options = {"act": act, "out_scale": 1.0, "config": launch.FORWARD[name]}
    with poisoned():
        got, got_lse = launch.forward(*args, **options)
    check(got, got_lse if act == "softmax" else None, expected, lse)
    for _ in range(3):
        assert torch.equal(got, launch.forward(*args, **options)[0])


@pytest.mark.parametrize("name", FORWARD)
def test_maxima_that_grow_and_scores_far_from_0(name):
    """From step to step by more and by less than what a configuration may leave to the weights."""
    from gem_kernels.hopper import launch

    lk = fitting(name)
    q, k, v, cq, ck = problem(lk=lk)
    for spread, level in ((0.3, 0.0), (3.0, 0.0), (0.1, -100.0), (0.1, 100.0)):
        x, y = q.clone(), k * spread
        x[..., 0], y[..., 0] = 1.0, level
        expected, lse = dense(x.double(), y.double(), v.double(), LQ, lk, 1.0, "softmax")
        config = launch.FORWARD[name]
        with poisoned():
            got = launch.forward(
                x, y, v, cq, ck, max(LQ), max(lk), 1.0, act="softmax", out_scale=1.0, config=config
            )  # fmt: skip
        check(*got, expected, lse, 8e-3)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("act", ["softmax", "silu"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_and_grouped_heads(mask, act, kv_heads):
    left, right = MASKS[mask]
    q, k, v, cq, ck = problem(heads=4, kv_heads=kv_heads)
    expected, lse = dense(q.double(), k.double(), v.double(), LQ, LK, 0.1, act, left, right)
    where = (cq, ck, max(LQ), max(LK))
    with poisoned():
        if act == "softmax":
            got, got_lse = jagged_attention(
                q, k, v, *where, scale=0.1, window=(left, right), return_lse=True, backend="hopper"
            )
        else:
            got, got_lse = (
                gdpa(q, k, v, *where, activation=act, scale=0.1, window=(left, right), backend="hopper"),
                None,
            )
    check(got, got_lse, expected, lse)


@pytest.mark.parametrize("name", ["silu_poly2", "silu_poly6", "gelu_poly4"])
def test_polynomial_activations(name):
    q, k, v, cq, ck = problem(64)
    bound = POLYNOMIALS[name].bound
    scale = bound / (q.float().norm(dim=-1).max() * k.float().norm(dim=-1).max()).item()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected, _ = dense(*wide, LQ, LK, scale, name)
    activation = name.rstrip("0123456789")
    with poisoned():
        got = gdpa(
            *leaves, cq, ck, max(LQ), max(LK), activation=activation, scale=scale, score_bound=bound, backend="hopper"
        )
    check(got, None, expected, None)
    dout = torch.randn_like(got)
    pairs = zip(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(expected, wide, dout.double()), strict=True)
    assert all(relative_error(g, e) < 1e-2 for g, e in pairs)


@pytest.mark.parametrize("act", ["softmax", "silu"])
@pytest.mark.parametrize("mask", [None, "causal", "window"])
def test_learned_queries(mask, act):
    from gem_kernels.hopper import launch

    left, right = MASKS[mask] if mask else (-1, -1)
    q, k, v, _, ck = problem(rows=SHARED)
    expected, lse = dense(q.double(), k.double(), v.double(), [SHARED] * len(LK), LK, 0.1, act, left, right)
    with poisoned():
        got, got_lse = launch.forward(
            q, k, v, None, ck, SHARED, max(LK), 0.1, act=act, out_scale=1.0, left=left, right=right
        )
    check(got, got_lse if act == "softmax" else None, expected, lse)


@pytest.mark.parametrize("dim", [16, 24, 32, 40, 48, 56, 72, 96, 112])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_other_head_dimensions(mask, dim):
    """The kernels themselves: `support.applies` lets fewer through."""
    from gem_kernels.hopper import launch

    left, right = MASKS[mask] if mask else (-1, -1)
    q, k, v, cq, ck = problem(dim)
    expected, lse = dense(q.double(), k.double(), v.double(), LQ, LK, dim**-0.5, "softmax", left, right)
    options = {"act": "softmax", "out_scale": 1.0, "left": left, "right": right}
    with poisoned():
        got, got_lse = launch.forward(q, k, v, cq, ck, max(LQ), max(LK), dim**-0.5, **options)
    check(got, got_lse, expected, lse)


@pytest.mark.parametrize("dim", [16, 24, 32, 40, 64])
def test_many_sequences_of_up_to_8(dim):
    """Both passes, as an operator would launch them."""
    from gem_kernels.hopper import launch, launch_backward

    lengths = torch.randint(0, 9, (400,), generator=torch.Generator().manual_seed(3)).tolist()
    q, k, v, cq, ck = problem(dim, lq=lengths, lk=lengths, heads=2)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    expected, lse = dense(*wide, lengths, lengths, dim**-0.5, "softmax")
    where, options = (cq, ck, 8, 8, dim**-0.5), {"act": "softmax", "out_scale": 1.0}
    dout = torch.randn_like(q)
    with poisoned():
        out, out_lse = launch.forward(q, k, v, *where, **options)
        config = launch_backward.choose_backward(8, 8)
        grads = launch_backward.backward(dout, None, q, k, v, out, out_lse, *where, config=config, **options)
    check(out, out_lse, expected, lse)
    wanted = torch.autograd.grad(expected, wide, dout.double())
    assert all(relative_error(g, e) < 1e-2 for g, e in zip(grads, wanted, strict=True))


@pytest.mark.parametrize("dim", [96, 128])
@pytest.mark.parametrize("act", ["softmax", "gelu"])
def test_gradients_with_masks_and_grouped_heads(act, dim):
    """Both passes by what the operators choose, the gradient of LSE too."""
    lq, lk = [130, 0, 70, 5], [130, 40, 20, 0]
    q, k, v, cq, ck = problem(dim, lq=lq, lk=lk, heads=4, kv_heads=2)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected, lse = dense(*wide, lq, lk, 0.1, act, -1, 0)
    dout = torch.randn(expected.shape, device="cuda", dtype=torch.bfloat16)
    if act == "softmax":
        got, got_lse = jagged_attention(
            *leaves, cq, ck, 130, 130, scale=0.1, causal=True, return_lse=True, backend="hopper"
        )
        loss = (got * dout).sum() + got_lse[:64].sum()
        wanted = (expected * dout.double()).sum() + lse[:64].sum()
    else:
        got = gdpa(*leaves, cq, ck, 130, 130, scale=0.1, causal=True, activation=act, backend="hopper")
        loss, wanted = (got * dout).sum(), (expected * dout.double()).sum()
    pairs = zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(wanted, wide), strict=True)
    assert all(relative_error(g, e) < 1e-2 for g, e in pairs)


@pytest.mark.parametrize(
    ("dim", "batch", "heads", "dtype", "extra", "mask"),
    [
        (128, 1, 4, torch.bfloat16, 0, (-1, -1)),
        (64, len(LQ), 1, torch.bfloat16, 4, (-1, 0)),  # wider than the longest sequence
        (128, len(LQ), 4, torch.float32, 1, (700, -1)),  # rows of an odd length
        (96, 1, 1, torch.float16, 0, (-1, -1)),
    ],
)
def test_bias(dim, batch, heads, dtype, extra, mask):
    """With masks and grouped heads, both passes; what no query and key has is NaN."""
    q, k, v, cq, ck = problem(dim, heads=4, kv_heads=2)
    sizes = max(LQ) + extra, max(LK) + extra
    bias = torch.randn(batch, heads, *sizes, device="cuda").to(dtype)
    bias[:, :, 3, 5:90] = float("-inf")
    if batch == len(LQ):
        bias[3, :, 2] = float("-inf")  # a row that sees no key
        for b, (x, y) in enumerate(zip(LQ, LK, strict=True)):
            bias[b, :, x:] = float("nan")
            bias[b, :, :, y:] = float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v, bias)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected, lse = dense(*wide[:3], LQ, LK, dim**-0.5, "softmax", *mask, bias=wide[3])
    with poisoned():
        got, got_lse = jagged_attention(
            *leaves[:3], cq, ck, *sizes, bias=bias, window=mask, return_lse=True, backend="hopper"
        )
    check(got.detach(), got_lse.detach(), expected, lse)
    dout = torch.randn(expected.shape, device="cuda", dtype=q.dtype)
    grads, wanted = torch.autograd.grad(got, leaves, dout), torch.autograd.grad(expected, wide, dout.double())
    assert all(relative_error(g, e) < 1e-2 for g, e in zip(grads, wanted, strict=True))


def test_gradient_of_a_shared_bias_in_several_windows_of_the_workspace():
    from gem_kernels.hopper import launch, launch_backward

    torch.manual_seed(2)
    lengths = torch.randint(0, 300, (60,)).tolist()
    longest = max(lengths)
    q, k, v, cq, _ = problem(lq=lengths, lk=lengths, heads=2)
    bias = torch.randn(1, 2, longest, longest, device="cuda", dtype=torch.bfloat16)
    where, options = (cq, cq, longest, longest, 128**-0.5), {"act": "softmax", "out_scale": 1.0, "bias": bias}
    out, lse = launch.forward(q, k, v, *where, **options)
    dout = torch.randn_like(q)
    wide = [x.double().requires_grad_() for x in (q, k, v, bias)]
    expected, _ = dense(*wide[:3], lengths, lengths, 128**-0.5, "softmax", bias=wide[3])
    wanted = torch.autograd.grad(expected, wide, dout.double())
    found = []
    for workspace in (None, 1 << 20):
        config = dataclasses.replace(launch_backward.BACKWARD["stream"], workspace=workspace)
        with poisoned():
            dbias = torch.empty_like(bias)
            grads = launch_backward.backward(
                dout, None, q, k, v, out, lse, *where, config=config, bias_grad=dbias, **options
            )  # fmt: skip
        found.append((*grads, dbias))
        assert all(relative_error(g, e) < 1e-2 for g, e in zip(found[-1], wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_bias_of_learned_queries():
    q, k, v, _, ck = problem(heads=2, rows=SHARED)
    bias = torch.randn(len(LK), 2, SHARED, max(LK), device="cuda", dtype=torch.bfloat16)
    wide = (x.double() for x in (q, k, v))
    expected, lse = dense(*wide, [SHARED] * len(LK), LK, 0.1, "softmax", -1, 0, bias.double())
    with poisoned():
        got = jagged_attention(
            q, k, v, None, ck, SHARED, max(LK), scale=0.1, bias=bias, causal=True, return_lse=True, backend="hopper"
        )
    check(*got, expected, lse)


@pytest.mark.parametrize("act", ["softmax", "silu"])
def test_many_tiles_for_every_program(act):
    """Far more tiles than programs and all lengths different; one list of tiles serves launch after launch."""
    from gem_kernels.hopper import launch, tiles

    torch.manual_seed(5)
    lq, lk = (torch.randint(0, 700, (300,)).tolist() for _ in range(2))
    for name, config in launch.FORWARD.items():
        fit = fitting(name, lk)
        q, k, v, cq, ck = problem(lq=lq, lk=fit, heads=4)
        out, lse = dense(q.double(), k.double(), v.double(), lq, fit, 128**-0.5, act)
        taken = tiles.build(cq, ck, q.shape[0], 4, config.shape)
        for _ in range(2):
            with poisoned():
                got, got_lse = launch.forward(
                    q, k, v, cq, ck, 700, max(fit), 128**-0.5, act=act, out_scale=1.0, config=config, tiles=taken
                )
            check(got, got_lse if act == "softmax" else None, out, lse)
            assert taken.cursor.item() == 0


def test_strided_heads_and_float16():
    lengths = [70, 300, 5]
    torch.manual_seed(1)
    packed = torch.randn(sum(lengths), 2, 3, 128, device="cuda", dtype=torch.float16)
    q, k, v = packed.unbind(2)
    offsets = offsets_of(lengths, "cuda", torch.int32)
    got, got_lse = jagged_attention(q, k, v, offsets, offsets, 300, 300, return_lse=True, backend="hopper")
    check(got, got_lse, *dense(q.double(), k.double(), v.double(), lengths, lengths, 128**-0.5, "softmax"), 2e-3)


def test_a_cuda_graph_replays_with_other_lengths():
    total = 900
    q, k, v, cq, _ = problem(lq=[500, 400, 0], lk=[500, 400, 0])

    def run():
        out = jagged_attention(q, k, v, cq, cq, total, total, causal=True, backend="hopper")
        return out + gdpa(q, k, v, cq, cq, total, total, backend="hopper")

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for lengths in ([500, 400, 0], [1, 890, 9], [900, 0, 0], [0, 433, 467]):
        cq.copy_(offsets_of(lengths, "cuda"))
        graph.replay()
        assert torch.equal(out, run())


def test_other_lengths_compile_nothing_new():
    from gem_kernels.hopper import launch, tiles

    def compiled():
        kernels = (launch.forward_kernel, tiles.build_tiles)
        return [len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()]

    def run(lengths):
        q, k, v, cq, _ = problem(lq=lengths, lk=lengths, heads=4)
        longest = max(lengths)
        jagged_attention(q, k, v, cq, cq, longest, longest, causal=True, scale=0.1, backend="hopper")

    run([500, 3, 64])
    before = compiled()
    assert min(before) > 0
    for lengths in ([1, 1, 1], [16, 128, 0], [700, 2, 33]):
        run(lengths)
    assert compiled() == before


def test_compiles_without_a_graph_break_for_all_lengths():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def model(q, k, v, offsets, longest):
        return jagged_attention(q * 2, k, v, offsets, offsets, longest, longest, causal=True, scale=0.1) * 3

    fast = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    # Five heads: the compiler takes sizes that are equal at first (heads and offsets, say) to be one symbol.
    for lengths in ([130, 40, 6], [7, 90], [33, 65, 12, 4]):
        q, k, v, cq, _ = problem(lq=lengths, lk=lengths, heads=5)
        assert torch.equal(fast(q, k, v, cq, max(lengths)), model(q, k, v, cq, max(lengths)))
        counts.append(counter.frame_count)
    assert counts[1:] == counts[:1] * 2  # the first call may take two: the compiler starts over once for floats


def test_one_tensor_as_query_key_and_value_and_expanded_heads():
    x, _, _, cq, _ = problem(lq=[130, 5], lk=[130, 5], heads=4)
    out, lse = dense(*(x.double(),) * 3, [130, 5], [130, 5], 0.1, "softmax", -1, 0)
    where = (cq, cq, 130, 130)
    got, got_lse = jagged_attention(x, x, x, *where, causal=True, scale=0.1, return_lse=True, backend="hopper")
    check(got, got_lse, out, lse)
    shared = x[:, :1].expand(-1, 4, -1)  # a head stride of 0, which TMA cannot follow
    out, lse = dense(*(shared.double(),) * 3, [130, 5], [130, 5], 0.1, "softmax", -1, 0)
    got, got_lse = jagged_attention(
        shared, shared, shared, *where, causal=True, scale=0.1, return_lse=True, backend="hopper"
    )
    check(got, got_lse, out, lse)


@pytest.mark.parametrize("act", ["softmax", "silu"])
def test_rows_more_than_2_to_the_31_elements_apart(act):
    lengths, dim = [20, 13], 64
    offsets = offsets_of(lengths, "cuda")
    stride = 2**31 // 32 + 64
    buffer = torch.empty(32 * stride + dim, dtype=torch.bfloat16, device="cuda")
    far = buffer.as_strided((33, 1, dim), (stride, dim, 1))
    near = torch.randn(33, 1, dim, dtype=torch.bfloat16, device="cuda")
    far.copy_(near)

    def run(x):
        if act == "softmax":
            return jagged_attention(x, x, x, offsets, offsets, 20, 20, backend="hopper")
        return gdpa(x, x, x, offsets, offsets, 20, 20, activation=act, backend="hopper")

    assert torch.equal(run(far), run(near))


def test_opcheck():
    q, k, v, cq, ck = problem(lq=[70, 0, 5], lk=[3, 130, 9])
    ops = torch.ops.gem_kernels
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, arguments in (
        (ops.jagged_attention, (q, k, v, cq, ck, None, 70, 130, 0.1, -1, 0, "hopper")),
        (ops.gdpa, (q, k, v, cq, ck, None, 70, 130, "silu", 0.1, 1.0, -1, -1, "hopper")),
    ):
        torch.library.opcheck(op, arguments, test_utils=checks)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [32, 96, 128])
def test_dispatch_prefers_it(dtype, dim):
    q = torch.empty(1, 1, dim, device="cuda", dtype=dtype)
    for features in (("causal", "window", "grouped"), ("return_lse", "shared_q"), ()):
        assert dispatch.why("jagged_attention", q, features=features).backend == "hopper"
    for activation in ACTIVATIONS:
        assert dispatch.why("gdpa", q, features=(f"activation:{activation}",)).backend == "hopper"
    assert dispatch.why("jagged_attention", q, features=("bias",)).backend == "hopper"
