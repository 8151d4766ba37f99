"""Jagged helpers: loops over sequences in float64, gradients, what users pass."""

import pytest
import torch
from gem_kernels import jagged_add, jagged_concat, jagged_split, jagged_to_padded, most_recent, padded_to_jagged
from gem_kernels.sequences import triton
from gem_kernels.testing import offsets_of, poisoned, relative_error
from gem_kernels.tiling import Tile

BACKENDS = ["reference", "triton"]
A, B = [3, 0, 17, 1, 0, 20, 0], [0, 5, 16, 0, 0, 9, 2]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    if device.type == "cpu":
        monkeypatch.setattr(triton, "tile", lambda width: Tile(bm=8, bn=16))
        monkeypatch.setattr(triton, "sum_tile", lambda width: Tile(bm=8, bn=16))


def normal(*shape, seed=0, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype).requires_grad_()


def parts(values, lengths):
    return values.split(lengths)


def loop_recent(values, lengths, k):
    return torch.stack([
        torch.cat([x.flip(0)[:k], x.new_zeros(k, *x.shape[1:])])[:k] for x in parts(values, lengths)
    ])  # fmt: skip


def loop_concat(a, b, a_lengths, b_lengths):
    pairs = zip(parts(a, a_lengths), parts(b, b_lengths), strict=True)
    return torch.cat([x for pair in pairs for x in pair])


def loop_split(values, a_lengths, b_lengths):
    both = [x.split(list(n)) for x, n in zip(
        parts(values, [i + j for i, j in zip(a_lengths, b_lengths, strict=True)]),
        zip(a_lengths, b_lengths, strict=True), strict=True,
    )]  # fmt: skip
    return torch.cat([x for x, _ in both]), torch.cat([x for _, x in both])


def loop_add(values, bias, lengths):
    return torch.cat([x + bias[i] for i, x in enumerate(parts(values, lengths))])


def loop_padded(values, lengths, longest):
    return torch.stack([
        torch.cat([x[:longest], x.new_zeros(max(0, longest - len(x)), *x.shape[1:])]) for x in parts(values, lengths)
    ])  # fmt: skip


def loop_jagged(padded, lengths):
    rows = zip(padded, lengths, strict=True)
    return torch.cat([torch.cat([x[:n], x.new_zeros(max(0, n - len(x)), *x.shape[1:])]) for x, n in rows])


def compare(op, expected_op, leaves, tolerance):
    """Results and gradients on poisoned memory; tolerance 0 for what only copies."""
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    with poisoned():
        got = op(*leaves)
    expected = expected_op(*doubles)
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == leaves[0].dtype
        assert relative_error(a, b) <= tolerance
    cotangents = [normal(*x.shape, seed=9 + i, device=x.device, dtype=x.dtype).detach() for i, x in enumerate(got)]
    with poisoned():
        gradients = torch.autograd.grad(got, leaves, cotangents)
    for x, a, b in zip(
        leaves, gradients, torch.autograd.grad(expected, doubles, [c.double() for c in cotangents]), strict=True
    ):
        assert a.dtype == x.dtype
        assert relative_error(a, b) <= tolerance


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("trailing", [(), (16,), (3, 7)])
def test_shapes(device, trailing, backend):
    a, b = normal(sum(A), *trailing, seed=1, device=device), normal(sum(B), *trailing, seed=2, device=device)
    bias = normal(len(A), *trailing, seed=3, device=device)
    at, bt = offsets_of(A, device, torch.int32), offsets_of(B, device)
    compare(lambda x: most_recent(x, at, 4, backend=backend), lambda x: loop_recent(x, A, 4), (a,), 0)
    compare(
        lambda x, y: jagged_concat(x, y, at, bt, backend=backend)[0], lambda x, y: loop_concat(x, y, A, B), (a, b), 0
    )
    both = normal(sum(A) + sum(B), *trailing, seed=4, device=device)
    compare(lambda x: jagged_split(x, at, bt, sum(A), backend=backend), lambda x: loop_split(x, A, B), (both,), 0)
    compare(lambda x, y: jagged_add(x, y, at, backend=backend), lambda x, y: loop_add(x, y, A), (a, bias), 1e-6)
    for longest in (20, 25, 3):  # as long as the longest sequence, longer, too short
        compare(
            lambda x, n=longest: jagged_to_padded(x, at, n, backend=backend),
            lambda x, n=longest: loop_padded(x, A, n), (a,), 0,
        )  # fmt: skip
        padded = normal(len(A), longest, *trailing, seed=5, device=device)
        compare(lambda x: padded_to_jagged(x, at, sum(A), backend=backend), lambda x: loop_jagged(x, A), (padded,), 0)


LENGTHS = [[], [0], [1], [0, 0, 0], [9], [7, 8, 9], [0, 8, 0, 16], [1] * 20]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_around_the_tiles(device, lengths, backend):
    other = lengths[::-1]
    a, b = normal(sum(lengths), 5, seed=1, device=device), normal(sum(other), 5, seed=2, device=device)
    at, bt = offsets_of(lengths, device), offsets_of(other, device)
    out, offsets = jagged_concat(a, b, at, bt, backend=backend)
    assert torch.equal(offsets, offsets_of([i + j for i, j in zip(lengths, other, strict=True)], device))
    back = jagged_split(out, at, bt, a.shape[0], backend=backend)
    assert torch.equal(back[0], a)
    assert torch.equal(back[1], b)
    if not lengths:
        assert most_recent(a, at, 3, backend=backend).shape == (0, 3, 5)
        assert jagged_to_padded(a, at, 3, backend=backend).shape == (0, 3, 5)
        assert padded_to_jagged(a.new_zeros(0, 3, 5), at, 0, backend=backend).shape == (0, 5)
        return
    compare(
        lambda x, y: jagged_concat(x, y, at, bt, backend=backend)[0],
        lambda x, y: loop_concat(x, y, lengths, other), (a, b), 0,
    )  # fmt: skip
    for k in (1, 8, 12):
        compare(
            lambda x, k=k: most_recent(x, at, k, backend=backend), lambda x, k=k: loop_recent(x, lengths, k), (a,), 0
        )
        padded = normal(len(lengths), k, 5, seed=4, device=device)
        compare(
            lambda x, k=k: jagged_to_padded(x, at, k, backend=backend),
            lambda x, k=k: loop_padded(x, lengths, k),
            (a,),
            0,
        )
        compare(
            lambda x: padded_to_jagged(x, at, len(a), backend=backend), lambda x: loop_jagged(x, lengths), (padded,), 0
        )
    bias = normal(len(lengths), 5, seed=3, device=device)
    compare(lambda x, y: jagged_add(x, y, at, backend=backend), lambda x, y: loop_add(x, y, lengths), (a, bias), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    a = normal(sum(A), 24, seed=1, device=device, dtype=dtype)
    at = offsets_of(A, device)
    compare(lambda x: most_recent(x, at, 4, backend="triton"), lambda x: loop_recent(x, A, 4), (a,), 0)
    bias = normal(len(A), 24, seed=3, device=device)  # float32: a master copy
    compare(lambda x, y: jagged_add(x, y, at, backend="triton"), lambda x, y: loop_add(x, y, A), (a, bias), 8e-3)


def test_strided_views_are_read_as_they_are(device):
    wide = normal(sum(A) + sum(B), 40, device=device)
    at, bt = offsets_of(A, device), offsets_of(B, device)

    def run(backend):
        a, b = wide[: sum(A), 3:24], wide[sum(A) :, 11:32]
        both, offsets = jagged_concat(a, b, at, bt, backend=backend)
        halves = jagged_split(wide[:, 7:28], at, bt, sum(A), backend=backend)
        recent = most_recent(wide[:, ::2], offsets, 5, backend=backend)
        added = jagged_add(a, wide[: len(A), 1:22], at, backend=backend)
        outs = (both, *halves, recent, added)
        expanded = torch.autograd.grad([x.sum() for x in outs], wide, retain_graph=True)
        transposed = recent.transpose(0, 1).square().sum() + sum(x.square().sum() for x in outs)
        return *outs, *expanded, *torch.autograd.grad(transposed, wide)

    for a, b in zip(run("triton"), run("reference"), strict=True):
        assert relative_error(a, b) < 1e-6


def test_runs_are_equal_bit_by_bit(device):
    values, bias = normal(sum(A), 40, device=device), normal(len(A), 40, device=device)
    at = offsets_of(A, device)
    runs = [
        torch.autograd.grad(jagged_add(values, bias, at, backend="triton").square().sum(), (values, bias))
        for _ in range(2)
    ]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_gradients_of_the_references():
    lengths, other = [2, 0, 3], [1, 2, 0]
    at, bt = offsets_of(lengths), offsets_of(other)
    a, b, bias = (torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (5, 3, 3))
    both = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    for op, leaves in (
        (lambda x: most_recent(x, at, 2), (a,)),
        (lambda x, y: jagged_concat(x, y, at, bt)[0], (a, b)),
        (lambda x: jagged_split(x, at, bt, 5), (both,)),
        (lambda x, y: jagged_add(x, y, at), (a, bias)),
    ):
        assert torch.autograd.gradcheck(op, leaves)


def test_opcheck(device):
    a, b, both, bias = (normal(n, 6, seed=n, device=device) for n in (5, 3, 8, 3))
    at, offsets = offsets_of([2, 0, 3], device), offsets_of([3, 2, 3], device)
    ops = torch.ops.gem_kernels
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    recent = torch.randn(3, 4, 6, device=device)
    for op, arguments in (
        (ops.most_recent, (a, at, 4, "triton")),
        (ops.most_recent_backward, (recent, at, 5, "triton")),
        (ops.jagged_concat, (a, b, at, offsets, "triton")),
        (ops.jagged_split, (both, at, offsets, 5, "triton")),
        (ops.jagged_add, (a, bias, at, "triton")),
        (ops.jagged_to_padded, (a, at, 4, "triton")),
        (ops.padded_to_jagged, (recent.clone().requires_grad_(), at, 5, "triton")),
        (ops.segment_sum, (a.detach(), at, torch.float32, "triton")),
    ):
        torch.library.opcheck(op, arguments, test_utils=checks)


def test_compiles_without_a_graph_break(device):
    def model(a, b, bias, at, bt):
        both, offsets = jagged_concat(jagged_add(a, bias, at, backend="triton"), b, at, bt, backend="triton")
        first, second = jagged_split(both * 2, at, bt, a.shape[0], backend="triton")
        return first.sum() + second.square().sum() + most_recent(both, offsets, 3, backend="triton").square().sum()

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths, other in ((A, B), ([4, 0, 2], [5, 1, 0])):
        leaves = [normal(n, 6, seed=n, device=device) for n in (sum(lengths), sum(other), len(lengths))]
        where = offsets_of(lengths, device), offsets_of(other, device)
        got, expected = compiled(*leaves, *where), model(*leaves, *where)
        assert relative_error(got, expected) < 1e-6
        for x, y in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
            assert relative_error(x, y) < 1e-6


def test_errors():
    x, at = torch.ones(3, 4), offsets_of([1, 2])
    for match, error, make in (
        ("k must be at least 1; got 0", ValueError, lambda: most_recent(x, at, 0)),
        ("offsets must run from 0 to the number of tokens, 2", ValueError, lambda: most_recent(x[:2], at, 1)),
        ("values must be float16", TypeError, lambda: most_recent(x.long(), at, 1)),
        ("values must be a tensor; got list", TypeError, lambda: most_recent([1.0], at, 1)),
        (r"one element for a token; got \(3, 0\)", ValueError, lambda: most_recent(x[:, :0], at, 1)),
        ("agree in dtype, device", ValueError, lambda: jagged_concat(x, x[:, :2], at, at)),
        ("as many sequences; got 2 and 1", ValueError, lambda: jagged_concat(x, x, at, offsets_of([3]))),
        ("b_offsets must run", ValueError, lambda: jagged_split(x, at, at, 3)),
        ("a_total must be from 0 to the number of tokens, 3; got 4", ValueError, lambda: jagged_split(x, at, at, 4)),
        ("longest must be at least 1; got 0", ValueError, lambda: jagged_to_padded(x, at, 0)),
        (r"padded must be \[B, L, ...\]", ValueError, lambda: padded_to_jagged(x, at, 3)),
        ("total must be at least 0; got -1", ValueError, lambda: padded_to_jagged(x[:2, None], at, -1)),
        ("offsets must run", ValueError, lambda: padded_to_jagged(x[:2, None], at, 4)),
        (r"bias must be \(2, 4\)", ValueError, lambda: jagged_add(x, x, at)),
    ):
        with pytest.raises(error, match=match):
            make()
