"""Block attention: the list of blocks, packed projections and their gradient, every rotary form; kernels against
float64 formulas, in the interpreter or on a GPU.
"""

import pytest
import torch
from gem_kernels import Rope, block_attention, block_attention_packed, dispatch, jagged
from gem_kernels.block_attention import blocks
from gem_kernels.testing import (
    loop_attention,
    loop_blocks,
    loop_rope,
    offsets_of,
    poisoned,
    random_heads,
    relative_error,
)

LENGTHS = [0, 1, 15, 16, 17, 65, 0, 64, 130, 0]
HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
BACKENDS = ["triton", pytest.param("hopper", marks=HOPPER)]
TURNS = ("none", "counted", "given", "values")
FORMS = [("triton", dim, act, turn) for dim in (64, 128) for act in (None, "gelu_tanh") for turn in TURNS] + [
    pytest.param("hopper", dim, act, turn, marks=HOPPER)  # each is two kernels to build
    for dim, act, turn in (
        (64, None, "counted"),
        (128, None, "counted"),
        (128, None, "none"),
        (128, "gelu_tanh", "given"),
        (64, "gelu_tanh", "values"),
        (64, None, "none"),
    )
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def formula(q, k, v, offsets, block, activation, rope):
    """Block by block in float64, turned by complex multiplication."""
    if rope is not None:
        positions = jagged.positions(offsets, q.shape[0]) if rope.positions is None else rope.positions
        q, k = loop_rope(q, positions, rope.base), loop_rope(k, positions, rope.base)
        v = loop_rope(v, positions, rope.base) if rope.values else v
    cut = loop_blocks(offsets, block)
    return loop_attention(q, k, v, cut, cut, activation=activation)[0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "lengths", [[], [0], [0, 0, 0], [64], LENGTHS, [1] * 100, [0, 300] * 40, [5000, 0, 3]], ids=len
)
def test_the_list_of_blocks(device, lengths, dtype):
    offsets = offsets_of(lengths, device, dtype)
    for block in (16, 64):
        got = blocks.offsets(offsets, sum(lengths), block)
        assert got.dtype == torch.int64
        assert torch.equal(got, jagged.block_offsets(offsets, sum(lengths), block))


def ropes(total, device):
    positions = torch.rand(total, generator=torch.Generator().manual_seed(9)).to(device) * 3000
    return {
        "none": None,
        "counted": Rope(base=100.0),
        "given": Rope(base=1e4, positions=positions),
        "values": Rope(base=50.0, values=True),
    }


@pytest.mark.parametrize(("backend", "dim", "activation", "turn"), FORMS)
def test_against_the_formula(device, backend, dim, activation, turn):
    hopper = backend == "hopper"
    dtype = torch.bfloat16 if hopper else torch.float32
    lengths = [1, 63, 64, 65, 0, 127, 128, 129, 3, *[200] * 300] if hopper else [0, 1, 65]
    total, heads = sum(lengths), 3 if hopper else 1
    offsets = offsets_of(lengths, device)
    qkv = random_heads(total, 3 * heads, dim, device=device, dtype=dtype, seed=1)
    dout = random_heads(total, heads, dim, device=device, dtype=dtype, seed=2)
    rope = ropes(total, device)[turn]
    few = [*range(9), *range(len(lengths))[-3:]] if hopper else range(len(lengths))  # the first and the last tiles
    sample = torch.cat([torch.arange(int(offsets[i]), int(offsets[i + 1])) for i in few])  # the formula takes its time
    exact = qkv.cpu()[sample].double().requires_grad_()
    exact_rope = rope
    if rope is not None and rope.positions is not None:
        exact_rope = Rope(base=rope.base, positions=rope.positions.cpu()[sample], values=rope.values)
    cut = offsets_of([lengths[i] for i in few])
    expected = formula(*exact.chunk(3, 1), cut, 64, activation, exact_rope)
    gradient = torch.autograd.grad(expected, exact, dout.cpu()[sample].double())[0]

    packed = qkv.clone().requires_grad_()
    apart = qkv.clone().requires_grad_()
    with poisoned():
        a = block_attention_packed(packed, offsets, activation=activation, rope=rope, backend=backend)
        b = block_attention(*apart.chunk(3, 1), offsets, activation=activation, rope=rope, backend=backend)
        da = torch.autograd.grad(a, packed, dout)[0]
        db = torch.autograd.grad(b, apart, dout)[0]
    assert torch.equal(a, b)
    assert torch.equal(da, db)
    assert a.isfinite().all()
    assert da.isfinite().all()
    tolerance = max(TOLERANCE[dtype], 5e-4 if turn == "given" else 0.0)  # an angle of 3000 is exact to 1e-4 in float32
    assert relative_error(a.cpu()[sample], expected) < tolerance
    assert relative_error(da.cpu()[sample], gradient) < 2 * tolerance


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_neighbour_is_not_seen(device, backend):
    """Rows past a block's end are the next sequence's, and may hold anything."""
    lengths, dtype = [70, 5, 64, 33], torch.float16
    offsets = offsets_of(lengths, device)
    qkv = random_heads(sum(lengths), 3, 64, device=device, dtype=dtype)
    dout = random_heads(sum(lengths), 1, 64, device=device, dtype=dtype, seed=1)
    rows = torch.zeros(sum(lengths), dtype=torch.bool, device=device)
    rows[70:75] = True
    bad = torch.where(rows[:, None, None], float("nan"), qkv)
    results = []
    for x in (qkv, bad):
        for rope in (None, 10.0):
            leaf = x.clone().requires_grad_()
            out = block_attention_packed(leaf, offsets, rope=rope, backend=backend)
            results.append((out[~rows], torch.autograd.grad(out, leaf, dout)[0][~rows]))
    for clean, poisonous in zip(results[:2], results[2:], strict=True):
        for a, b in zip(clean, poisonous, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_are_equal_bit_by_bit(device, backend):
    offsets = offsets_of(LENGTHS, device)
    qkv = random_heads(sum(LENGTHS), 6, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    runs = []
    for _ in range(3):
        out = block_attention_packed(qkv, offsets, rope=10.0, backend=backend)
        runs.append((out, torch.autograd.grad(out.square().sum(), qkv)[0]))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_packed_with_fewer_key_heads(device, kv_heads):
    offsets = offsets_of([20, 0, 17], device)
    qkv = random_heads(37, 6, 24, device=device, requires_grad=True)
    sizes = [2, 2, 2] if kv_heads is None else [4, 1, 1]
    got = block_attention_packed(qkv, offsets, kv_heads=kv_heads, block=16, rope=5.0, backend="triton")
    expected = block_attention(*qkv.split(sizes, 1), offsets, block=16, rope=5.0, backend="reference")
    assert relative_error(got, expected) < 2e-6
    a, b = (torch.autograd.grad(x.sin().sum(), qkv)[0] for x in (got, expected))
    assert relative_error(a, b) < 5e-6
    other = block_attention_packed(qkv, offsets, kv_heads=kv_heads, block=16, rope=5.0, backend="reference")
    assert torch.equal(other, expected)


def test_gradients_of_the_reference():
    qkv = random_heads(9, 3, 4, dtype=torch.float64, requires_grad=True)
    offsets = offsets_of([5, 0, 4])
    rope = Rope(base=9.0, values=True)
    assert torch.autograd.gradcheck(lambda x: block_attention_packed(x, offsets, block=16, rope=rope), (qkv,))


def test_opcheck(device):
    offsets = offsets_of([3, 20], device)
    qkv = random_heads(23, 3, 16, device=device, requires_grad=True)
    dout = random_heads(23, 1, 16, device=device)
    ops = torch.ops.gem_kernels
    cut = blocks.offsets(offsets, 23, 16)
    tail = (16, 0.25, None, 10.0, False, "triton")
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, arguments in (
        (ops.block_list, (offsets, 23, 16)),
        (ops.block_attention_packed, (qkv, 1, cut, None, *tail)),
        (ops.block_attention_packed_backward, (dout, qkv.detach(), 1, cut, None, *tail)),
    ):
        torch.library.opcheck(op, arguments, test_utils=checks)


def test_compiles_without_a_graph_break(device):
    def model(qkv, offsets):
        return block_attention_packed(qkv * 2, offsets, rope=10.0, backend="triton") + 1

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in ([33, 2], [5, 40, 0]):
        qkv = random_heads(sum(lengths), 3, 16, device=device, requires_grad=True)
        offsets = offsets_of(lengths, device)
        got, expected = compiled(qkv, offsets), model(qkv, offsets)
        assert torch.equal(got, expected)
        a, b = (torch.autograd.grad(x.square().sum(), qkv)[0] for x in (got, expected))
        assert relative_error(a, b) < 1e-6


def test_what_the_hopper_kernels_refuse():
    from gem_kernels.block_attention import hopper

    def say(dtype=torch.bfloat16, dim=64, features=("block:64",)):
        problem = dispatch.Problem(
            op="block_attention", device=torch.device("cuda"), dtype=dtype, head_dim=dim, features=frozenset(features)
        )
        return hopper.applies(problem)

    assert say()[0]
    assert say(torch.float16, 128, ("block:64", "rope", "activation:silu"))[0]
    for expected, refused in (
        ("bfloat16 and float16; got torch.float32", say(torch.float32)),
        ("head dimensions 64 and 128; got 32", say(dim=32)),
        ("as many key heads", say(features=("block:64", "grouped"))),
        ("blocks of 64", say(features=("block:32",))),
    ):
        assert not refused[0]
        assert expected in refused[1]


def test_errors():
    x, offsets = random_heads(4, 4, 8), offsets_of([4])
    with pytest.raises(ValueError, match="kv_heads must be given unless the heads of qkv are a multiple of 3; got 4"):
        block_attention_packed(x, offsets)
    with pytest.raises(ValueError, match="kv_heads must leave query heads of the 4 of qkv; got 2"):
        block_attention_packed(x, offsets, kv_heads=2)
    with pytest.raises(ValueError, match="block must be 16, 32, 64 or 128; got 48"):
        block_attention_packed(x, offsets, kv_heads=1, block=48)
    with pytest.raises(ValueError, match=r"positions must be \[4\]"):
        block_attention_packed(x, offsets, kv_heads=1, rope=Rope(positions=torch.zeros(3)), backend="reference")


@pytest.mark.parametrize("own", [[], [0, 0], [5, 0, 64, 65, 300, 0], [70] * 90], ids=len)
def test_records_of_blocks_with_another_side(device, own):
    """Row, rows, place on the diagonal, and the other side's span; then only empty ones."""
    other = [(7 * n + i) % 90 for i, n in enumerate(own)]
    mine, theirs = offsets_of(own, device, torch.int32), offsets_of(other, device)
    got = blocks.records(mine, theirs, sum(own), 64)
    expected = []
    for b, n in enumerate(own):
        for first in range(0, n, 64):
            place = first + other[b] - n
            expected.append([int(mine[b]) + first, min(64, n - first), place, int(theirs[b]), other[b]])
    assert got.shape == (sum(own) // 64 + len(own), 8)
    assert got[: len(expected), :5].tolist() == expected
    assert not got[len(expected) :, 1].any()
