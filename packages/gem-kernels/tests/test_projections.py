"""Parts of packed projections: reference and kernels against formulas in float64, and what users pass."""

import pytest
import torch
from gem_kernels import Among, Turn, gated_heads, jagged_attention, rotary_heads, sigmoid_gate
from gem_kernels.nn import PMA, NormLinear
from gem_kernels.projections import gates, key_value, side_by_side, triton
from gem_kernels.testing import loop_rope, offsets_of, poisoned, relative_error
from gem_kernels.tiling import Tile

EPS = 1e-3
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def small_launches(monkeypatch, device):
    """In the interpreter, few rows span several tiles, and several tiles a program; a GPU runs the real launches."""
    if device.type == "cpu":
        real = triton.tile
        monkeypatch.setattr(triton, "tile", lambda h, d, b: Tile(bm=4, bn=real(h, d, b).bn))
        monkeypatch.setattr(gates, "PARTS", 3)
        monkeypatch.setattr(gates, "COLUMNS", 16)
        monkeypatch.setattr(gates, "ELEMENTS", 64)


def normal(*shape, seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype).requires_grad_()


def norm_by_hand(x, weight):
    return x if weight is None else x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def compare(got, expected, leaves, wide, dtype):
    """Outputs and gradients; `expected` are of the same numbers in float64."""
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype
        assert a.shape == b.shape
        assert relative_error(a, b) < TOLERANCE[dtype]
    cotangents = [normal(*a.shape, seed=50 + i, dtype=dtype, device=a.device).detach() for i, a in enumerate(got)]
    with poisoned():
        gradients = torch.autograd.grad(got, leaves, cotangents)
    references = torch.autograd.grad(expected, wide, [c.double() for c in cotangents])
    for x, a, b in zip(leaves, gradients, references, strict=True):
        assert a.dtype == x.dtype
        assert relative_error(a, b) < 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("rows", "hidden", "heads", "dim", "normed"),
    [(9, 24, 2, 16, True), (30, 40, 3, 6, True), (7, 16, 2, 8, False), (5, 8, 2, 0, False), (0, 8, 1, 4, True)],
)
def test_gate_and_heads_are_the_formula(rows, hidden, heads, dim, normed, dtype, backend, device):
    packed = normal(rows, 2 * hidden + heads * dim, seed=rows, dtype=dtype, device=device)
    weight = normal(dim, seed=2, dtype=torch.float32, device=device) if normed else None
    bias = normal(packed.shape[1], seed=3, dtype=torch.float32, device=device)
    leaves = [packed, bias] + ([weight] if normed else [])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    gate, up, rest = (wide[0] + wide[1] - wide[1].detach()).split((hidden, hidden, heads * dim), dim=1)
    heads_ = torch.stack([rest[:, h * dim : (h + 1) * dim] for h in range(heads)], dim=1)
    expected = (gate / (1 + torch.exp(-gate)) * up, norm_by_hand(heads_, wide[2] if normed else None))
    with poisoned():
        got = gated_heads(packed, hidden, heads, weight, bias=bias, eps=EPS, backend=backend)
    compare(got, expected, leaves, wide, dtype)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("readers", [1, 2])
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "slots", "turns", "normed"),
    [
        (9, 2, 16, 2, 1, True), (21, 3, 6, 2, 2, True), (13, 4, 8, 1, 1, True), (6, 2, 4, 1, 2, False),
        (5, 2, 3, 2, 0, True),
    ],
)  # fmt: skip
def test_queries_keys_and_values_are_the_formula(
    rows, heads, dim, slots, turns, normed, readers, dtype, backend, device
):
    packed = normal(rows, (slots + 1) * heads * dim, seed=rows, dtype=dtype, device=device)
    weights = [normal(dim, seed=7 + i, dtype=torch.float32, device=device) if normed else None for i in range(slots)]
    places = [torch.arange(rows, 0, -1, device=device), torch.rand(rows, device=device) * 9][:turns]
    bias = normal(packed.shape[1], seed=3, dtype=torch.float32, device=device) if turns != 2 else None
    leaves = [packed, *(w for w in (bias, *weights) if w is not None)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    parts = [
        torch.stack([part[:, h * dim : (h + 1) * dim] for h in range(heads)], dim=1)
        for part in (wide[0] if bias is None else wide[0] + wide[1] - wide[1].detach()).split(heads * dim, dim=1)
    ]
    expected = []
    for i, part in enumerate(parts[:-1]):
        x = norm_by_hand(part, wide[len(wide) - slots + i] if normed else None)
        edges = {0: (), 1: ((0, heads),), 2: ((0, heads // 2), (heads // 2, heads))}[turns]
        turned = [loop_rope(x[:, a:b], p, base) for (a, b), p, base in zip(edges, places, (1e4, 1e2), strict=False)]
        expected.append(torch.cat(turned, dim=1) if turned else x)
    expected.append(parts[-1])
    expected += expected[-2:] if readers == 2 else []
    given = [Turn(positions=p, base=b) for p, b in zip(places, (1e4, 1e2), strict=False)]
    with poisoned():
        got = rotary_heads(packed, heads, weights, turns=given, readers=readers, bias=bias, eps=EPS, backend=backend)
    compare(got, tuple(expected), leaves, wide, dtype)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("readers", [1, 2])
def test_other_queries_stand_among_those_of_the_rows(readers, dtype, backend, device):
    """Packed rows of 3 samples, two others before each: q is the two put together by hand, k and v are as ever."""
    lengths, heads, dim = [5, 0, 9], 3, 6
    packed = normal(sum(lengths), 3 * heads * dim, seed=1, dtype=dtype, device=device)
    rows = normal(2 * len(lengths), heads, dim, seed=2, dtype=dtype, device=device)
    weights = [normal(dim, seed=7 + i, dtype=torch.float32, device=device) for i in range(2)]
    bias = normal(packed.shape[1], seed=3, dtype=torch.float32, device=device)
    turns = [Turn(positions=torch.rand(sum(lengths), device=device) * 9)]
    options = {"turns": turns, "readers": readers, "bias": bias, "eps": EPS}
    order = [(kind, i) for b, n in enumerate(lengths) for kind, i in [(1, 2 * b), (1, 2 * b + 1)] + [
        (0, sum(lengths[:b]) + j) for j in range(n)
    ]]  # fmt: skip
    places, others = (
        torch.tensor([order.index((kind, i)) for i in range(n)], device=device)
        for kind, n in ((0, sum(lengths)), (1, len(rows)))
    )
    leaves = [packed, rows, bias, *weights]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    q, *expected = rotary_heads(
        wide[0], heads, wide[3:], turns=turns, readers=readers, bias=wide[2], eps=EPS, backend="reference"
    )  # tested above
    expected = [torch.stack([wide[1][i] if kind else q[i] for kind, i in order]), *expected]
    with poisoned():
        got = rotary_heads(
            packed, heads, weights, among=Among(rows=rows, places=places, others=others), backend=backend, **options
        )
    compare(got, tuple(expected), leaves, wide, dtype)
    for change, says in (
        ({"rows": rows[:1]}, r"among.others must be \[1\] int64"),
        ({"rows": rows[:, :1]}, r"among.rows must be \[N, 3, 6\]"),
        ({"places": places[1:]}, r"among.places must be \[14\] int64"),
        ({"places": places.int()}, r"among.places must be \[14\] int64"),
    ):
        wrong = Among(**({"rows": rows, "places": places, "others": others} | change))
        with pytest.raises(ValueError, match=says):
            rotary_heads(packed, heads, weights, among=wrong, **options)
    with pytest.raises(ValueError, match="none beside one weight"):
        rotary_heads(packed[:, : 2 * heads * dim], heads, weights[:1], among=Among(
            rows=rows, places=places, others=others
        ))  # fmt: skip


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", [(3, 7, 24), (29, 16), (6,), (2, 3, 2, 10), (0, 3, 8)])
def test_a_sigmoid_gate_is_the_formula(shape, biased, dtype, backend, device):
    x, logits = (normal(*shape, seed=s, dtype=dtype, device=device) for s in (1, 2))
    bias = normal(shape[-1], seed=3, dtype=torch.float32, device=device)
    leaves = [x, logits, *([bias] if biased else [])]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    held = wide[1] + (wide[2] - wide[2].detach() if biased else 0)
    with poisoned():
        got = sigmoid_gate(x, logits, bias=bias if biased else None, backend=backend)
    compare((got,), (wide[0] / (1 + torch.exp(-held)),), leaves, wide, dtype)


def test_a_gates_gradient_may_be_part_of_a_wider_one(device):
    x, logits = (normal(5, 3, 16, seed=s, dtype=torch.float32, device=device) for s in (1, 2))
    found = [torch.cat((x, sigmoid_gate(x, logits, backend=b), x), dim=1) for b in ("triton", "reference")]
    probe = torch.randn(5, 9, 16, device=device)
    for a, b in zip(*(torch.autograd.grad((y * probe).sum(), (x, logits)) for y in found), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_rows_of_a_wider_matrix_are_read_where_they_are(device):
    wide = normal(6, 40, seed=1, dtype=torch.float32, device=device)
    packed = wide[:, 4:36]
    for call in (
        lambda x, b: gated_heads(x, 8, 2, backend=b),
        lambda x, b: rotary_heads(x, 4, [None], turns=[Turn(positions=torch.arange(6, device=device))], backend=b),
    ):
        for a, b in zip(call(packed, "triton"), call(packed.contiguous(), "reference"), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_values_are_not_copied(device):
    packed = normal(5, 24, seed=1, dtype=torch.float32, device=device)
    *_, v = rotary_heads(packed, 2, [None, None], backend="triton")
    assert v.data_ptr() == packed[:, 16:].data_ptr()


def test_keys_and_values_are_views_and_so_are_their_gradients(device):
    packed = normal(5, 24, seed=1, dtype=torch.float32, device=device)
    k, v = key_value(packed, 2)
    assert side_by_side(k, v)
    assert torch.equal(torch.stack((k, v), dim=1).flatten(1), packed)
    both = torch.randn(5, 2, 2, 6, device=device)
    for dk, dv, copied in (
        (*both.unbind(1), False), (both[:, 0].contiguous(), both[:, 1], True), (*both.flip(1).unbind(1), False)
    ):  # fmt: skip
        (gradient,) = torch.autograd.grad(key_value(packed, 2), packed, (dk, dv))
        assert torch.equal(gradient, torch.stack((dk, dv), dim=1).flatten(1))
        assert (gradient.untyped_storage().data_ptr() != dk.untyped_storage().data_ptr()) == copied
    (gradient,) = torch.autograd.grad(key_value(packed, 2)[0].sum(), packed)
    assert torch.equal(gradient, torch.tensor([1.0, 0.0], device=device).repeat_interleave(12).expand(5, 24))
    with pytest.raises(ValueError, match="a multiple of 10"):
        key_value(packed, 5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("queries", "longest"), [(200, 150), (40, 150), (200, 50)])
def test_gradients_of_packed_keys_and_values_are_those_of_copies(queries, longest):
    lengths = [longest, 0, 7, 64 if longest > 64 else 1]
    packed = normal(sum(lengths), 4 * 128, seed=1, dtype=torch.bfloat16, device="cuda")
    q = normal(queries, 2, 128, seed=2, dtype=torch.bfloat16, device="cuda")
    at = offsets_of(lengths, "cuda")
    found = []
    for copied in (False, True):
        k, v = (x.clone() if copied else x for x in key_value(packed, 2))
        out = jagged_attention(q, k, v, None, at, queries, longest)
        upstream = normal(*out.shape, seed=3, dtype=torch.bfloat16, device="cuda").detach()
        found.append(torch.autograd.grad(out, (packed, q), upstream))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_modules_add_a_residual_in_the_norm(norm, device):
    torch.manual_seed(0)
    x, more = (torch.randn(6, 8, device=device, requires_grad=True) for _ in range(2))
    layer, pool = NormLinear(8, 5, norm=norm, device=device), PMA(8, 3, 2, pre_norm=True, device=device)
    offsets = torch.tensor([0, 4, 6], device=device)
    for call in (layer, lambda *a: pool(a[0], offsets, 4, *a[1:])):
        got, total = call(x, more)
        expected = call(x + more)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(total, x + more)
        weights = [torch.randn_like(t) for t in (got, total)]
        ours = torch.autograd.grad((got, total), (x, more), weights)
        theirs = torch.autograd.grad((expected, x + more), (x, more), weights)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_mistakes_are_named():
    packed = torch.zeros(3, 24)
    for call, says in (
        (lambda: gated_heads(packed, 8, 3), r"must be \[T, 16 \+ a multiple of 3\]"),
        (lambda: gated_heads(packed, 0, 3), "hidden must be at least 1"),
        (lambda: gated_heads(packed, 8, 2, torch.ones(3)), r"floating \[4\]"),
        (lambda: gated_heads(packed, 8, 2, eps=0.0), "eps must be positive"),
        (lambda: gated_heads(packed, 8, 2, bias=torch.ones(3)), r"bias must be floating \[24\]"),
        (lambda: rotary_heads(packed, 2, []), "expected 1 or 2 weights"),
        (lambda: rotary_heads(packed, 2, [None, torch.ones(3)]), r"weights\[1\] must be floating \[4\]"),
        (lambda: rotary_heads(packed, 4, [None, None], turns=[Turn(positions=torch.ones(2))]), r"positions \[3\]"),
        (lambda: rotary_heads(packed[:, :18], 2, [None, None], turns=[Turn(positions=torch.ones(3))]), "even head"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
    with pytest.raises(ValueError, match=r"logits must be like x, \(3, 24\)"):
        sigmoid_gate(packed, packed[:2])
    with pytest.raises(TypeError, match="one floating dtype"):
        sigmoid_gate(packed, packed.half())
    with pytest.raises(TypeError, match="int64"):
        gated_heads(packed.long(), 8, 2)


@pytest.mark.parametrize("readers", [1, 2])
def test_compiled_without_a_graph_break(readers, device):
    positions = torch.arange(6, device=device)

    def both(packed, weight, other, bias):
        h, q = gated_heads(packed, 8, 2, weight, bias=bias, backend="triton")
        h = h.view(6, 2, 4)
        turns = [Turn(positions=positions)]
        stand = Among(rows=h[:2], places=positions + 2, others=positions[:2])
        given = {"turns": turns, "readers": readers, "among": stand, "bias": bias, "backend": "triton"}
        parts = rotary_heads(packed, 2, [weight, other], **given)
        return h.sum() + q.square().sum() + sum((i + 1) * p.square().sum() for i, p in enumerate(parts))

    shapes = ((6, 24), (4,), (4,), (24,))
    leaves = [normal(*shape, seed=i, dtype=torch.float32, device=device) for i, shape in enumerate(shapes)]
    expected = torch.autograd.grad(both(*leaves), leaves)
    torch._dynamo.reset()
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True, dynamic=True)
    got = torch.autograd.grad(compiled(*leaves), leaves)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
