"""The Triton kernels against the float64 reference, in the interpreter where there is no GPU."""

import importlib

import pytest
import torch
from gem_kernels import block_attention, gdpa, jagged_attention, rope, rote
from gem_kernels.gdpa.activations import ACTIVATIONS, POLYNOMIALS
from gem_kernels.testing import offsets_of, poisoned, random_heads, relative_error
from gem_kernels.tiling import Tile

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EDGES = [1, 0, 31, 32, 33, 0, 65]  # around one and two tiles of 32
MASKS = [{}, {"causal": True}, {"window": (40, 5)}, {"window": (3, None)}, {"window": (None, 40)}]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch, device):
    """In the interpreter, tiles small enough that short sequences span several; a GPU runs the real ones."""
    if device.type == "cpu":
        for op, size in (("jagged_attention", 32), ("gdpa", 32), ("rotary", 16)):
            module = importlib.import_module(f"gem_kernels.{op}.triton")
            monkeypatch.setattr(module, "tile", lambda *_args, size=size: Tile(bm=size, bn=size))


def heads(rows, n, dim, seed, device, dtype=torch.float32):
    return random_heads(rows, n, dim, seed=seed, device=device, dtype=dtype, requires_grad=True)


def problem(
    device, *, q_lengths=EDGES, k_lengths=None, heads_q=2, heads_k=1, dim=16, dtype=torch.float32, shared=False
):
    k_lengths = q_lengths[::-1] if k_lengths is None else k_lengths
    q = heads(5 if shared else sum(q_lengths), heads_q, dim, 1, device, dtype)
    k, v = (heads(sum(k_lengths), heads_k, dim, seed, device, dtype) for seed in (2, 3))
    offsets = (None if shared else offsets_of(q_lengths, device, torch.int32), offsets_of(k_lengths, device))
    return (q, k, v), (*offsets, 5 if shared else max(q_lengths, default=0) + 3, max(k_lengths, default=0) + 2)


def compare(op, tensors, tolerance=None):
    """Triton's outputs and gradients, on poisoned memory, against the reference in float64."""
    tolerance = tolerance or TOLERANCE[tensors[0].dtype]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    with poisoned():
        got = op(*tensors, backend="triton")
    expected = op(*doubles, backend="reference")
    got, expected = (x if isinstance(x, tuple) else (x,) for x in (got, expected))
    losses = []
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        finite = b.isfinite()
        assert torch.equal(a[~finite].double(), b[~finite])
        assert relative_error(a[finite], b[finite]) < tolerance
        weight = torch.randn(b.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64).to(b.device)
        losses.append([(x[finite].double() * weight[finite]).sum() for x in (a, b)])
    with poisoned():
        gradients = torch.autograd.grad(sum(loss[0] for loss in losses), tensors)
    for a, b in zip(gradients, torch.autograd.grad(sum(loss[1] for loss in losses), doubles), strict=True):
        assert a.isfinite().all()
        assert relative_error(a, b) < 2 * tolerance


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_softmax(device, mask, shared):
    tensors, sizes = problem(device, shared=shared)
    compare(
        lambda q, k, v, backend: jagged_attention(q, k, v, *sizes, **mask, return_lse=True, backend=backend), tensors
    )


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("mask", MASKS[1:4], ids=str)
def test_gdpa_masks(device, mask, shared):
    tensors, sizes = problem(device, shared=shared)
    compare(lambda q, k, v, backend: gdpa(q, k, v, *sizes, **mask, out_scale=0.3, backend=backend), tensors)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations(device, activation):
    tensors, sizes = problem(device, q_lengths=[33, 0, 5])
    compare(lambda q, k, v, backend: gdpa(q, k, v, *sizes, activation=activation, scale=0.6, backend=backend), tensors)


@pytest.mark.parametrize("shared", [False, True])
def test_residual(device, shared):
    tensors, sizes = problem(device, q_lengths=[33, 0, 5], shared=shared)
    out = gdpa(*tensors, *sizes, backend="triton")
    residual = torch.randn_like(out).requires_grad_()

    def op(q, k, v, added, backend):
        return gdpa(q, k, v, *sizes, out_scale=0.3, residual=added, backend=backend)

    compare(op, (*tensors, residual))


@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomial_activations(device, name):
    tensors, sizes = problem(device, q_lengths=[33, 0, 5])
    bound = POLYNOMIALS[name].bound
    scale = bound / (tensors[0].abs().max() * tensors[1].abs().max() * 16).item()

    def op(q, k, v, backend):
        activation = name.rstrip("0123456789")
        return gdpa(q, k, v, *sizes, activation=activation, scale=scale, score_bound=bound, backend=backend)

    compare(op, tensors)


@pytest.mark.parametrize("lengths", [[1], [63, 64, 65], [127], [128], [129, 1]], ids=str)
@pytest.mark.parametrize("op", [jagged_attention, gdpa])
def test_lengths_around_the_tiles(device, op, lengths):
    tensors, sizes = problem(device, q_lengths=lengths, heads_q=1)
    compare(lambda q, k, v, backend: op(q, k, v, *sizes, causal=True, backend=backend), tensors)


@pytest.mark.parametrize("dim", [1, 24, 32, 48, 64, 96, 128, 192, 256])
def test_head_dimensions(device, dim):
    tensors, sizes = problem(device, q_lengths=[35, 3], heads_q=1, dim=dim)
    compare(lambda q, k, v, backend: jagged_attention(q, k, v, *sizes, backend=backend), tensors)
    compare(lambda q, k, v, backend: gdpa(q, k, v, *sizes, backend=backend), tensors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(device, dtype):
    tensors, sizes = problem(device, q_lengths=[40, 0, 17], dtype=dtype, dim=32)
    compare(lambda q, k, v, backend: jagged_attention(q, k, v, *sizes, causal=True, backend=backend), tensors)
    compare(lambda q, k, v, backend: gdpa(q, k, v, *sizes, activation="gelu_poly", backend=backend), tensors)
    offsets = offsets_of([40, 0, 17], device)
    compare(lambda q, k, v, backend: block_attention(q, k, v, offsets, block=16, rope=1e2, backend=backend), tensors)
    compare(lambda x, backend: rope(x, offsets, backend=backend), tensors[:1])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bias_heads", [1, 2])
@pytest.mark.parametrize("bias_batch", [1, 3])
def test_bias(device, bias_batch, bias_heads, shared):
    tensors, sizes = problem(device, q_lengths=[34, 0, 9], shared=shared)
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(bias_batch, bias_heads, *sizes[2:], generator=generator).to(device).requires_grad_()

    def op(q, k, v, bias, backend):
        return jagged_attention(q, k, v, *sizes, bias=bias, window=(30, 30), backend=backend)

    compare(op, (*tensors, bias))


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # padded rows overflow; nothing of them may be kept
@pytest.mark.parametrize("level", [-3e4, 300.0])
def test_bias_in_padding_does_no_harm(device, level):
    """A bias whose exponential overflows float32, in rows and columns that no query and no key has."""
    tensors, sizes = problem(device, q_lengths=[34, 9])
    bias = torch.full((1, 1, *sizes[2:]), level, device=device)
    bias[:, :, :34, :34] = 0.0
    compare(lambda q, k, v, backend: jagged_attention(q, k, v, *sizes, bias=bias.to(q.dtype), backend=backend), tensors)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("level", [-200.0, 200.0])
def test_extreme_scores(device, level):
    tensors, sizes = problem(device, q_lengths=[34, 9])
    bias = torch.full((1, 1, *sizes[2:]), level, device=device)
    compare(
        lambda q, k, v, backend: jagged_attention(
            q, k, v, *sizes, bias=bias.to(q.dtype), return_lse=True, backend=backend
        ),
        tensors,
        tolerance=1e-4,  # float32 holds a score of 200 to 1e-5
    )


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("base", [None, 100.0])
@pytest.mark.parametrize("block", [16, 64])
def test_block_attention(device, activation, base, block):
    lengths = [0, 1, 15, 16, 17, 65, 0]
    q, k, v = (heads(sum(lengths), n, 24, n, device) for n in (4, 2, 2))
    offsets = offsets_of(lengths, device)
    compare(
        lambda q, k, v, backend: block_attention(
            q, k, v, offsets, block=block, activation=activation, rope=base, backend=backend
        ),
        (q, k, v),
    )


def test_rotary(device):
    x = heads(37, 3, 24, 1, device)
    offsets = offsets_of([20, 0, 17], device)
    compare(lambda x, backend: rope(x, offsets, base=50.0, backend=backend), (x,))
    for size in (3.0, 1e3, 1e5):  # an angle of 1e5 is rounded to 4e-3 in float32, in the reference too
        places = torch.rand(37, generator=torch.Generator().manual_seed(2)).to(device) * size - size / 2
        got, expected = (rope(x, None, positions=places, base=50.0, backend=b) for b in ("triton", "reference"))
        assert relative_error(got, expected) < max(2e-6, 1e-7 * size)
    elapsed = torch.rand(37, generator=torch.Generator().manual_seed(1)).to(device) * 1e6
    compare(lambda x, backend: rote(x, elapsed, t_scale=60.0, backend=backend), (x,))


EMPTY = [([], []), ([0, 0], [0, 0]), ([2, 1], [0, 0]), ([0, 0], [2, 1])]


@pytest.mark.parametrize(("q_lengths", "k_lengths"), EMPTY)
def test_empty(device, q_lengths, k_lengths):
    for shared in (False, True):
        tensors, sizes = problem(device, q_lengths=q_lengths, k_lengths=k_lengths, shared=shared)
        compare(lambda q, k, v, backend: jagged_attention(q, k, v, *sizes, return_lse=True, backend=backend), tensors)  # noqa: B023
        compare(lambda q, k, v, backend: gdpa(q, k, v, *sizes, backend=backend), tensors)  # noqa: B023
    x = heads(sum(q_lengths), 2, 16, 1, device)
    offsets = offsets_of(q_lengths, device)
    compare(lambda x, backend: block_attention(x, x, x, offsets, rope=10.0, backend=backend), (x,))
    compare(lambda x, backend: rope(x, offsets, backend=backend), (x,))


def test_strided_views_are_taken_as_they_are(device):
    """Packed q, k, v, odd row strides, and a gradient that is an expanded or a wide-strided view."""
    lengths = [33, 4]
    packed = heads(37, 5, 21, 1, device)
    offsets = offsets_of(lengths, device)

    def split(packed):
        q, k, v = packed[:, :, :20].split([3, 1, 1], dim=1)
        assert q.stride() == (105, 21, 1)
        return q, k, v

    for op in (
        lambda x, backend: jagged_attention(*split(x), offsets, offsets, 33, 33, backend=backend),
        lambda x, backend: gdpa(*split(x), offsets, offsets, 33, 33, backend=backend),
        lambda x, backend: block_attention(*split(x), offsets, rope=10.0, backend=backend),
        lambda x, backend: rope(split(x)[0], offsets, backend=backend),
    ):
        results = []
        for backend in ("triton", "reference"):
            expanded = op(packed, backend=backend).sum()
            wide = torch.zeros(37, 3, 50, device=device)
            wide_loss = torch.autograd.grad(op(packed, backend=backend), packed, wide[:, :, 7:27].add_(1.5))[0]
            results.append((torch.autograd.grad(expanded, packed)[0], wide_loss))
        for a, b in zip(*results, strict=True):
            assert relative_error(a, b) < 1e-5


def test_one_tensor_as_query_key_and_value(device):
    x = heads(40, 2, 16, 1, device)
    offsets = offsets_of([35, 5], device)
    compare(lambda x, backend: jagged_attention(x, x, x, offsets, offsets, 35, 35, backend=backend), (x,))
    compare(lambda x, backend: gdpa(x, x, x, offsets, offsets, 35, 35, backend=backend), (x,))


def test_runs_are_equal_bit_by_bit(device):
    tensors, sizes = problem(device, q_lengths=[40, 3, 33], dtype=torch.bfloat16)
    bias = torch.randn(1, 1, *sizes[2:], device=device).requires_grad_()
    runs = []
    for _ in range(2):
        out = jagged_attention(*tensors, *sizes, bias=bias, backend="triton")
        acted = gdpa(*tensors, *sizes, backend="triton")
        runs.append([out, acted, *torch.autograd.grad(out.sum() + acted.sum(), (*tensors, bias))])
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_opcheck(device):
    (q, k, v), (q_offsets, k_offsets, max_q, max_k) = problem(device, q_lengths=[3, 0, 2])
    bias = torch.randn(1, 2, max_q, max_k, device=device, requires_grad=True)
    ops = torch.ops.gem_kernels
    tail = (max_q, max_k, 0.25, -1, 0, "triton")
    out, lse = ops.jagged_attention(q, k, v, q_offsets, k_offsets, bias, *tail)
    d = torch.randn_like(out)
    still = [x.detach() for x in (q, k, v, out, lse)]
    blocks = offsets_of([3, 2], device)
    positions = torch.rand(5, device=device)
    acted = (max_q, max_k, "silu", 0.25, 0.5, -1, 0, "triton")
    x = heads(5, 2, 16, 1, device)
    stills = [y.detach() for y in (x, x.clone(), x.clone())]
    for op, arguments in (
        (ops.jagged_attention, (q, k, v, q_offsets, k_offsets, bias, *tail)),
        (
            ops.jagged_attention_backward,
            (d, torch.randn_like(lse), *still, q_offsets, k_offsets, bias.detach(), True, *tail),
        ),
        (ops.gdpa, (q, k, v, q_offsets, k_offsets, None, *acted)),
        (ops.gdpa, (q, k, v, q_offsets, k_offsets, torch.randn_like(q).requires_grad_(), *acted)),
        (ops.gdpa_backward, (d, *still[:3], q_offsets, k_offsets, *acted)),
        (ops.block_attention, (x, x.clone(), x.clone(), blocks, positions, 16, 0.25, None, 10.0, True, "triton")),
        (ops.block_attention_backward, (d, *stills, blocks, None, 16, 0.25, "silu", 10.0, False, "triton")),
        (ops.rotary, (x, positions, 10.0, False, "triton")),
    ):
        torch.library.opcheck(op, arguments, test_utils=OPCHECKS)


def test_compiles_without_a_graph_break(device):
    def model(q, k, v, q_offsets, k_offsets, max_q, max_k):
        out = jagged_attention(q, k, v, q_offsets, k_offsets, max_q, max_k, causal=True, backend="triton")
        acted = gdpa(q, k, v, q_offsets, k_offsets, max_q, max_k, backend="triton")
        out = out + rope(acted, q_offsets, backend="triton")
        return out + block_attention(q, q, q, q_offsets, backend="triton", rope=10.0)

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([33, 2], [5, 40]):
        tensors, sizes = problem(device, q_lengths=lengths)
        got, expected = compiled(*tensors, *sizes), model(*tensors, *sizes)
        assert torch.equal(got, expected)
        for a, b in zip(
            torch.autograd.grad(got.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
        ):
            assert relative_error(a, b) < 1e-6
