"""Products whose operand backward kernels write again: gradients against float64, and what is not kept."""

import itertools

import pytest
import torch
from gem_kernels import Among, LateProduct, Turn, gated_heads, norm_rows, norm_rows_twice, rotary_heads
from gem_kernels.late import side_by_side
from gem_kernels.norms import placed
from gem_kernels.norms import triton as norm_kernels
from gem_kernels.projections import gates
from gem_kernels.projections import triton as projection_kernels
from gem_kernels.sequences import triton as sequence_kernels
from gem_kernels.testing import offsets_of, poisoned, relative_error
from gem_kernels.tiling import Tile

LENGTHS = [3, 0, 17, 1, 9]
ROWS, WIDTH, OUT, OTHERS = sum(LENGTHS), 24, 10, 2 * len(LENGTHS)
EPS, BARE_EPS = 1e-3, 0.02
RUNS = [("reference", torch.bfloat16), ("triton", torch.float32)]
RUNS += [("triton", torch.bfloat16)] if torch.cuda.is_available() else []  # the interpreter takes its time
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def small_launches(monkeypatch, device):
    if device.type == "cpu":
        real = projection_kernels.tile
        monkeypatch.setattr(norm_kernels, "PARTS", 3)
        monkeypatch.setattr(gates, "PARTS", 3)
        monkeypatch.setattr(gates, "COLUMNS", 16)
        monkeypatch.setattr(gates, "ELEMENTS", 64)
        monkeypatch.setattr(placed, "_tile", lambda width, backward: Tile(bm=4, bn=32))
        monkeypatch.setattr(projection_kernels, "tile", lambda h, d, b: Tile(bm=4, bn=real(h, d, b).bn))
        monkeypatch.setattr(sequence_kernels, "tile", lambda width: Tile(bm=8, bn=16))


def normal(*shape, seed, dtype, device):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype).requires_grad_()


def saved_bytes(make):
    """What `make` returns, and the storages that autograd keeps for it."""
    kept = {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        return make(), list(kept.values())


def shared(some, others):
    """Whether some are in the memory of others; all of them are alive."""
    first, second = ({t.untyped_storage().data_ptr() for t in tensors} for tensors in (some, others))
    return first & second


def compare(got, expected, leaves, wide, dtype):
    for a, b in zip(got, expected, strict=True):
        assert relative_error(a, b) < TOLERANCE[dtype]
    probes = [normal(*a.shape, seed=50 + i, dtype=dtype, device=a.device).detach() for i, a in enumerate(got)]
    for _ in range(2):  # a graph that is kept serves again
        with poisoned():
            found = torch.autograd.grad(got, leaves, probes, retain_graph=True)
        wanted = torch.autograd.grad(expected, wide, [p.double() for p in probes], retain_graph=True)
        for leaf, a, b in zip(leaves, found, wanted, strict=True):
            assert a.dtype == leaf.dtype
            assert relative_error(a, b) < TOLERANCE[dtype]


def normed(total, weight, bias, kind, eps):
    centred = total - total.mean(-1, keepdim=True) if kind == "layer" else total
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return y * weight + (0 if bias is None else bias)


@pytest.mark.parametrize(("backend", "dtype"), RUNS)
@pytest.mark.parametrize("sums", ["alone", "residual", "placed", "twice"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_product_of_normed_rows(kind, sums, dtype, backend, device):
    where = {"dtype": dtype, "device": device}
    x, weight = normal(ROWS, WIDTH, seed=1, **where), normal(WIDTH, seed=4, dtype=torch.float32, device=device)
    bias = normal(WIDTH, seed=5, dtype=torch.float32, device=device) if kind == "layer" else None
    w, b = normal(OUT, WIDTH, seed=6, **where), normal(OUT, seed=7, **where)
    amid = sums in ("placed", "twice")
    residual = None if sums == "alone" else normal(ROWS + OTHERS * amid, WIDTH, seed=2, **where)
    residual_bias = None if sums == "alone" else normal(WIDTH, seed=3, dtype=torch.float32, device=device)
    ahead = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)) + 1
    places = torch.arange(ROWS) + 2 * ahead
    nobody = torch.tensor(sorted(set(range(ROWS + OTHERS)) - set(places.tolist())), device=device)
    leaves = [t for t in (x, residual, residual_bias, weight, bias, w, b) if t is not None]
    wide = {id(t): t.detach().double().requires_grad_() for t in leaves}
    at = [None if t is None else wide[id(t)] for t in (x, residual, residual_bias, weight, bias, w, b)]
    total = at[0]
    if residual is not None:
        more = at[1] + at[2] - at[2].detach()
        total = at[0] + (more[places.to(device)] if amid else more)
    y = normed(total, at[3], at[4], kind, EPS)
    latest = torch.stack([torch.cat([s.flip(0)[:4], s.new_zeros(4, WIDTH)])[:4] for s in total.split(LENGTHS)])
    expected = [y @ at[5].t() + at[6], total, latest]

    late = LateProduct(w)
    given = {
        "kind": kind, "eps": EPS, "residual": residual, "residual_bias": residual_bias, "product": late,
        "offsets": offsets_of(LENGTHS, device), "recent": 4, "backend": backend,
    }  # fmt: skip
    if amid:
        given |= {"places": places.to(device), "others": nobody}

    def make():
        with poisoned():
            if sums == "twice":
                y, *rest = norm_rows_twice(x, weight, bias, bare_eps=BARE_EPS, **given)
            else:
                y, *rest = norm_rows(x, weight, bias, **given)
        make.rows = [y]
        return late(y, b), *rest

    got, kept = saved_bytes(make)
    assert late.taken
    assert not shared(make.rows, kept)
    if sums == "twice":
        *got, bare = got
        assert (bare is None) == (backend == "reference")
        if bare is not None:
            got, expected = [*got, bare], [*expected, normed(total, 1, None, "layer", BARE_EPS)]
    compare(got, expected, leaves, list(wide.values()), dtype)


@pytest.mark.parametrize(("backend", "dtype"), RUNS)
@pytest.mark.parametrize(
    ("rows", "hidden", "heads", "dim"), [(9, 24, 2, 16), (30, 40, 3, 6), (5, 8, 2, 0), (0, 8, 1, 4)]
)
def test_a_product_of_a_gate(rows, hidden, heads, dim, dtype, backend, device):
    packed = normal(rows, 2 * hidden + heads * dim, seed=rows, dtype=dtype, device=device)
    weight = normal(dim, seed=2, dtype=torch.float32, device=device) if dim else None
    bias = normal(packed.shape[1], seed=3, dtype=torch.float32, device=device)
    w = normal(OUT, hidden, seed=4, dtype=dtype, device=device)
    leaves = [packed, bias, w] + ([] if weight is None else [weight])
    wide = [x.detach().double().requires_grad_() for x in leaves]
    gate, up, rest = (wide[0] + wide[1] - wide[1].detach()).split((hidden, hidden, heads * dim), dim=1)
    q = rest.unflatten(1, (heads, dim))
    if weight is not None:
        q = q / (q.square().mean(-1, keepdim=True) + EPS).sqrt() * wide[3]
    expected = [(gate / (1 + torch.exp(-gate)) * up) @ wide[2].t(), q]
    late = LateProduct(w)

    def make():
        with poisoned():
            h, q = gated_heads(packed, hidden, heads, weight, bias=bias, eps=EPS, product=late, backend=backend)
        make.rows = [h]
        return [late(h), q]

    got, kept = saved_bytes(make)
    assert late.taken
    assert rows == 0 or not shared(make.rows, kept)
    compare(got, expected, leaves, wide, dtype)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("used", [used for used in itertools.product((True, False), repeat=2) if any(used)])
def test_a_gate_has_the_bits_of_an_ordinary_product(used, backend, device):
    """Whichever of its results send something back."""
    shapes = [(9, 40), (8,), (5, 16)]
    x, weight, w = (normal(*s, seed=i, dtype=torch.float32, device=device) for i, s in enumerate(shapes))
    found = []
    for product in (LateProduct(w), None):
        h, q = gated_heads(x, 16, 1, weight, product=product, backend=backend)
        made = [t for t, u in zip(((product or LateProduct(w))(h), q), used, strict=True) if u]
        found.append(torch.autograd.grad([t.sum() for t in made], [x, w], allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_weight_without_gradient_costs_none(device):
    x, w = normal(9, 16, seed=1, dtype=torch.float32, device=device), torch.randn(5, 16, device=device)
    late = LateProduct(w)
    y, *_ = norm_rows(x, kind="rms", eps=EPS, product=late)
    late(y).sum().backward()
    assert not late.waits
    assert x.grad is not None


def test_where_a_mode_looks_on_it_is_an_ordinary_product(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            return op(*args, **(kwargs or {}))

    x, w = (
        normal(9, 16, seed=1, dtype=torch.float32, device=device),
        normal(5, 16, seed=2, dtype=torch.float32, device=device),
    )
    late = LateProduct(w)
    with Looks():
        y, *_ = norm_rows(x, kind="rms", eps=EPS, product=late)
        out = late(y)
    assert not late.taken
    out.sum().backward()
    assert w.grad is not None


@pytest.mark.parametrize(("backend", "dtype"), RUNS)
@pytest.mark.parametrize(
    ("rows", "hidden", "heads", "dim", "late"),
    [(9, 24, 2, 16, True), (20, 40, 3, 6, False), (5, 8, 2, 0, True), (0, 8, 1, 4, False)],
)
def test_a_gate_of_small_rows(rows, hidden, heads, dim, dtype, backend, late, device):
    """Results as ever; gradients as those of gate and up rounded by hand, and of heads as ever."""
    packed = normal(rows, 2 * hidden + heads * dim, seed=rows, dtype=dtype, device=device)
    with torch.no_grad():
        packed[:1] *= 1e-3
        packed[1:2] *= 30
        packed[2:3, : 2 * hidden] = 0
    weight = normal(dim, seed=2, dtype=torch.float32, device=device) if dim else None
    bias = normal(packed.shape[1], seed=3, dtype=torch.float32, device=device)
    w = normal(OUT, hidden, seed=4, dtype=dtype, device=device)
    product = LateProduct(w) if late else None

    def make():
        with poisoned():
            h, q = gated_heads(
                packed, hidden, heads, weight, bias=bias, eps=EPS, product=product, small=True, backend=backend
            )
        make.rows = [packed, h] if late else [packed]
        return [h @ w.t() if product is None else product(h), q], h

    (got, h), kept = saved_bytes(make)
    ordinary = gated_heads(packed, hidden, heads, weight, bias=bias, eps=EPS, backend=backend)
    assert torch.equal(h, ordinary[0])
    assert torch.equal(got[1], ordinary[1])
    assert rows == 0 or not shared(make.rows, kept)
    exact = packed.detach().double()
    parts = exact[:, : 2 * hidden].view(rows, 2, hidden)
    columns = gates._gate_tile(hidden, False).bn if backend == "triton" else hidden
    sizes = [piece.abs().amax(-1, keepdim=True) for piece in parts.split(columns, dim=2)]
    powers = [torch.exp2(7 - torch.floor(torch.log2(size.clamp(min=1e-30)))) for size in sizes]
    rounded = [
        (piece * power).to(torch.float8_e4m3fn).double() / power
        for piece, power in zip(parts.split(columns, dim=2), powers, strict=True)
    ]
    wide = [
        torch.cat((torch.cat(rounded, dim=2).view(rows, 2 * hidden), exact[:, 2 * hidden :]), dim=1).requires_grad_(),
        *(t.detach().double().requires_grad_() for t in (bias, w, *([] if weight is None else [weight]))),
    ]
    gate, up, rest = (wide[0] + wide[1] - wide[1].detach()).split((hidden, hidden, heads * dim), dim=1)
    q = rest.unflatten(1, (heads, dim))
    if weight is not None:
        q = q / (q.square().mean(-1, keepdim=True) + EPS).sqrt() * wide[3]
    h_kept = gate / (1 + torch.exp(-gate)) * up if late else h.detach().double()
    reads = (gate / (1 + torch.exp(-gate)) * up) @ wide[2].detach().t() + (h_kept.detach() @ wide[2].t())
    leaves = [packed, bias, w] + ([] if weight is None else [weight])
    probes = [normal(*a.shape, seed=50 + i, dtype=dtype, device=a.device).detach() for i, a in enumerate(got)]
    with poisoned():
        found = torch.autograd.grad(got, leaves, probes)
    wanted = torch.autograd.grad([reads, q], wide, [p.double() for p in probes])
    for leaf, a, b in zip(leaves, found, wanted, strict=True):
        assert a.dtype == leaf.dtype
        assert relative_error(a, b) < TOLERANCE[dtype]


@pytest.mark.parametrize(("backend", "dtype"), RUNS)
@pytest.mark.parametrize(
    ("turns", "normed", "amid"), [(1, True, True), (2, True, False), (0, True, True), (1, False, True)]
)
def test_queries_and_keys_stand_for_what_they_were_made_of(turns, normed, amid, dtype, backend, device):
    """A late product of normed rows in two parts, q and k beside v: neither the rows nor [q || k] are kept."""
    heads, dim, count = 3, 6, 4
    where = {"dtype": dtype, "device": device}
    x, w = normal(ROWS, WIDTH, seed=1, **where), normal(3 * heads * dim, WIDTH, seed=2, **where)
    bias, gain = (normal(n, seed=n, dtype=torch.float32, device=device) for n in (3 * heads * dim, WIDTH))
    rows = normal(count, heads, dim, seed=4, **where)
    weights = [normal(dim, seed=7 + i, dtype=torch.float32, device=device) for i in range(2)] if normed else [None] * 2
    with torch.no_grad():
        for weight in weights if normed else ():
            weight.mul_(0.2).add_(1)
    given = [Turn(positions=torch.rand(ROWS, device=device) * 9, base=b) for b in (1e4, 1e2)][:turns]
    order = torch.randperm(ROWS + count, generator=torch.Generator().manual_seed(0)).to(device)
    options = {"turns": given, "eps": EPS}
    leaves = [x, w, bias, gain, *([rows] if amid else []), *(weights if normed else [])]
    wide = {id(t): t.detach().double().requires_grad_() for t in leaves}
    at = [None if t is None else wide.get(id(t)) for t in (x, w, bias, gain, rows, *weights)]
    packed = normal_rows(at[0], at[3]) @ at[1].t() + at[2]
    among = Among(rows=at[4], places=order[:ROWS], others=order[ROWS:]) if amid else None
    expected = rotary_heads(packed, heads, at[5:], among=among, backend="reference", **options)
    among = Among(rows=rows, places=order[:ROWS], others=order[ROWS:]) if amid else None
    late = LateProduct(w)

    def make():
        with poisoned():
            y, *_ = norm_rows(x, gain, kind="rms", eps=EPS, product=late, backend=backend)
            qk, v = late.parts(y, (2 * heads * dim, heads * dim), bias.detach().to(dtype))
            make.rows = [y, qk]
            return rotary_heads(qk, heads, weights, among=among, bias=bias, values=v, backend=backend, **options)

    got, kept = saved_bytes(make)
    if backend == "triton":
        assert not shared(make.rows, kept)
    compare(got, expected, leaves, list(wide.values()), dtype)
    with pytest.raises(ValueError, match="stand beside q and k"):
        rotary_heads(x, 1, [None, None], values=x)


def normal_rows(x, gain):
    return normed(x, gain, None, "rms", EPS)


def test_parts_that_lie_side_by_side_are_not_copied(device):
    whole = torch.randn(5, 12, device=device)
    one = side_by_side(whole.split((4, 2, 6), dim=1))
    assert one.data_ptr() == whole.data_ptr()
    assert torch.equal(one, whole)
    for parts in ((whole[:, 4:], whole[:, :4]), (whole[:, :4], whole[:, 5:]), (whole[:, :4], whole[:, 4:].clone())):
        assert torch.equal(side_by_side(parts), torch.cat(parts, dim=1))
    ragged = whole[:, :8].split((4, 4), dim=1)
    assert torch.equal(side_by_side((ragged[0], ragged[1], whole[:, 8:])), whole)
