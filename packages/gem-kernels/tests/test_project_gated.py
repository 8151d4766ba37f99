"""Gated projections: every backend against a float64 formula, forward and backward, over poisoned memory; the Hopper
kernels in the simulator in orders drawn from seeds, and what is broken on purpose found there.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gem_kernels import dispatch
from gem_kernels.project_gated import GatedDown, hopper, hopper_backward, hopper_forward, hopper_tiles, project_gated
from gem_kernels.simulator import Fault, instead, simulating
from gem_kernels.testing import poisoned, relative_error

EPS = 1e-3
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
SIMULATED = pytest.mark.skipif(not dispatch.interpreting(), reason="plain Triton kernels run in its interpreter here")
NAMES = ("x", "weight", "gain", "bias", "down", "told", "other")


def operands(rows, k, hidden, heads, dim, out, *, seed=0, dtype=torch.float64, device="cpu"):
    """x, W, the norm's weight, b, W_down, told and its weight."""
    draw = torch.Generator().manual_seed(seed)
    outputs = 2 * hidden + heads * dim
    shapes = [(rows, k), (outputs, k), (dim,), (outputs,), (out, hidden), (rows, 128), (out, 128)]
    made = [torch.randn(*s, generator=draw, dtype=torch.float64) for s in shapes]
    scales = (1, k**-0.5, 0.3, 1, hidden**-0.5, 1, 128**-0.5)
    made = [t * s for t, s in zip(made, scales, strict=True)]
    made[2] += 1
    return [t.to(device=device, dtype=dtype).requires_grad_() for t in made]


def formula(x, weight, gain, bias, down, told, other, *, hidden, heads, biased, normed, behind):
    packed = x @ weight.T + (bias if biased else 0)
    gate, up, q = packed.split((hidden, hidden, packed.shape[1] - 2 * hidden), dim=1)
    q = q.unflatten(1, (heads, -1)) if q.shape[1] else q.reshape(q.shape[0], heads, 0)
    if normed and q.shape[2]:
        q = q / (q.square().mean(-1, keepdim=True) + EPS).sqrt() * gain
    y = (F.silu(gate) * up) @ down.T
    return (y + told @ other.T if behind else y), q


def run(tensors, *, hidden, heads, biased, normed, behind, backend, again=False):
    x, weight, gain, bias, down, told, other = tensors
    last = GatedDown(again=again)
    h, q = project_gated(
        x, weight, hidden, heads, gain if normed else None, bias=bias if biased else None, eps=EPS, down=last,
        backend=backend,
    )  # fmt: skip
    assert last.taken == (backend != "reference")
    y = last(h, down, None, told if behind else None, other if behind else None)
    return y, q


def check(rows, k, hidden, heads, dim, out, *, dtype, device="cpu", seed=0, error=1e-2, **how):
    tensors = operands(rows, k, hidden, heads, dim, out, seed=seed, dtype=dtype, device=device)
    backend, again = how.pop("backend"), how.pop("again", False)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    with poisoned():
        got = run(tensors, hidden=hidden, heads=heads, backend=backend, again=again, **how)
    expected = formula(*exact, hidden=hidden, heads=heads, **how)
    draw = torch.Generator().manual_seed(seed + 1)
    given = [torch.randn(e.shape, generator=draw, dtype=torch.float64).to(device, dtype) for e in expected]
    for name, a, b in zip(("y", "q"), got, expected, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, b) < error, name
    with poisoned():
        gradients = torch.autograd.grad(got, tensors, given, allow_unused=True)
    wanted = torch.autograd.grad(expected, exact, [g.double() for g in given], allow_unused=True)
    for name, a, b in zip(NAMES, gradients, wanted, strict=True):
        assert (a is None or a.numel() == 0) == (b is None or b.numel() == 0), name
        if a is not None and b is not None:
            assert a.dtype == dtype
            assert relative_error(a, b) < 2 * error, (name, relative_error(a, b))
    return got, gradients


WAYS = [
    {"biased": True, "normed": True, "behind": True},
    {"biased": False, "normed": False, "behind": False, "again": True},
    {"biased": True, "normed": True, "behind": True, "again": True},
]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(("rows", "dim"), [(37, 24), (5, 0), (0, 16)])
def test_the_separate_way(device, how, rows, dim):
    check(rows, 40, 48, 2, dim, 24, dtype=torch.float32, device=device, error=1e-5, backend="triton", **how)


@pytest.mark.parametrize("how", WAYS[:2])
def test_the_reference(how):
    check(7, 5, 6, 2, 4, 3, dtype=torch.float64, error=1e-12, backend="reference", **how)


def simulated(monkeypatch, *shape, seed, processors, how, forward=None, backward=None, changes=None):
    """Through the operator, on Hopper's kernels in the simulator."""
    applies = dispatch._BACKENDS["hopper"]
    monkeypatch.setitem(dispatch._BACKENDS, "hopper", lambda problem: hopper.applies(problem))
    dispatch._choose.cache_clear()
    dispatch._name.cache_clear()
    if forward:
        monkeypatch.setitem(hopper.FORWARD, "usual", hopper.Forward(slots=forward[0], out=forward[1]))
    if backward:
        slots, sets, ahead = backward
        monkeypatch.setitem(hopper.BACKWARD, "usual", hopper.Backward(slots=slots, sets=sets, ahead=ahead))
    try:
        with simulating(seed=seed, processors=processors, changes=changes):
            return check(*shape, dtype=torch.bfloat16, seed=seed, backend="hopper", **how)
    finally:
        monkeypatch.setitem(dispatch._BACKENDS, "hopper", applies)
        dispatch._choose.cache_clear()
        dispatch._name.cache_clear()


SHAPES = [
    (200, 64, 128, 1, 128, 128),  # K of one step
    (451, 128, 128, 2, 64, 192),  # two programs for a column of tiles
    (3, 192, 256, 2, 128, 64),  # steps that the ring does not hold evenly, programs without tiles
    (65, 128, 128, 1, 0, 128),  # nothing behind the gates
    (0, 64, 128, 1, 128, 128),
]


@SIMULATED
@pytest.mark.parametrize("seed", range(6))
def test_in_the_simulator(monkeypatch, seed):
    simulated(monkeypatch, *SHAPES[seed % 5], seed=seed, processors=(3, 5, 2)[seed % 3], how=WAYS[seed % 3])


@SIMULATED
@pytest.mark.parametrize(("forward", "backward"), [((6, 3), (8, 2, 0)), ((10, 1), (4, 4, 1))])
def test_other_rings_in_the_simulator(monkeypatch, forward, backward):
    shape = (330, 192, 128, 1, 128, 128)
    simulated(monkeypatch, *shape, seed=4, processors=2, how=WAYS[0], forward=forward, backward=backward)


# What is broken on purpose: a kernel's text and what stands there instead, the pass, and what may be reported.
SEES = "mbarrier.wait(there.index(number % (2 * NC * SETS)), (number // (2 * NC * SETS)) & 1)"
BROKEN = {
    "a part before the buffer is read": (hopper_tiles, "tma.store_wait(OUT - 1)", "pass", "forward", {"race"}),
    "a part that is not fenced": (hopper_tiles, "    fence_async_shared()", "    pass", "forward", {"proxy"}),
    "rows that are not waited for": (
        hopper_tiles, "mbarrier.wait(full.index(step % PHASES), (step // PHASES) & 1)", "pass", "forward",
        {"race", "uninitialised"},
    ),
    "barriers of slots, not of consumers": (
        hopper_tiles, "step % PHASES", "step % SLOTS", "forward", {"barrier", "deadlock", "race"}
    ),
    "a slot given back too early": (
        hopper_tiles, "warpgroup_mma_wait(1, deps=(acc,))", "warpgroup_mma_wait(2, deps=(acc,))", "forward", {"race"}
    ),
    "q's weight over the gates'": (hopper_forward, "mbarrier.wait(released, 0)", "pass", "forward", {"race"}),
    "gate and up that are not waited for": (hopper_backward, SEES, "pass", "backward", {"race", "uninitialised"}),
    "a set given back while it leaves": (
        hopper_backward, "tma.store_wait(3 if AGAIN else 2)", "pass", "backward", {"race"}
    ),
    "gradients that are not fenced": (
        hopper_backward, "    fence_async_shared()", "    pass", "backward", {"proxy"}
    ),
    "the last parts not waited for": (hopper_forward, "    tma.store_wait(0)", "    pass", "forward", {"unfinished"}),
}  # fmt: skip


@SIMULATED
@pytest.mark.parametrize("name", list(BROKEN))
def test_what_is_broken_is_reported(name):
    module, text, other, direction, kinds = BROKEN[name]
    changes = instead(module, text, other)
    x, weight, _gain, bias, *_ = (t.detach() for t in operands(640, 192, 128, 1, 128, 8, dtype=torch.bfloat16))
    packed = x.new_zeros(640, 384)
    found = None
    for seed in range(12):
        try:
            with simulating(seed=seed, processors=2, changes=changes), poisoned():
                if direction == "forward":
                    hopper.forward(x, weight, bias, None, 128, 1, EPS)
                else:
                    down = torch.randn(192, 256).bfloat16()
                    hopper.backward(x, down, packed, torch.empty_like(packed), None, 128)
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
    @pytest.mark.parametrize(
        "shape",
        [*SHAPES, (70, 512, 1024, 4, 128, 512), (40_001, 512, 1024, 4, 128, 512), (8_191, 256, 512, 4, 64, 256)],
    )
    def test_both_passes(self, shape, backend, how):
        runs = [
            check(*shape, dtype=torch.bfloat16, device="cuda", backend=backend, error=6e-3, **how) for _ in range(2)
        ]
        for a, b in zip(*((*y, *g) for y, g in runs), strict=True):
            assert a is b is None or torch.equal(a, b)

    def test_many_times(self):
        """What comes late is rare: the bits are the same every time."""
        x, weight, gain, bias, *_ = (
            t.detach() for t in operands(2**17, 512, 1024, 4, 128, 512, dtype=torch.bfloat16, device="cuda")
        )
        down = torch.randn(512, 1536, device="cuda").bfloat16()
        first = hopper.forward(x, weight, bias, gain, 1024, 4, EPS)
        packed, dpacked = first[0], torch.zeros_like(first[0])
        rest, _ = hopper.backward(x, down, packed, dpacked, None, 1024)
        kept = dpacked.clone()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(200):
            for a, b in zip(first, hopper.forward(x, weight, bias, gain, 1024, 4, EPS), strict=True):
                wrong += (a != b).any()
            again, _ = hopper.backward(x, down, packed, dpacked, None, 1024)
            wrong += (again != rest).any() + (dpacked != kept).any()
        assert not wrong


def test_which_problems_hopper_takes():
    def asked(k, *features, dtype=torch.bfloat16):
        problem = dispatch.Problem(
            op="project_gated", device=torch.device("cuda"), dtype=dtype, head_dim=k, features=frozenset(features)
        )
        return hopper.applies(problem)

    assert asked(512, "hidden:1024", "head:128", "behind:512")[0]
    for k, features, dtype, says in (
        (512, (), torch.float32, "bfloat16 and float16"),
        (576, (), torch.bfloat16, "up to 512; got 576"),
        (72, (), torch.bfloat16, "steps of 64"),
        (512, ("head:96",), torch.bfloat16, "heads of 64 and 128; got 96"),
        (512, ("hidden:192",), torch.bfloat16, "steps of 128; got hidden 192"),
    ):
        able, reason = asked(k, *features, dtype=dtype)
        assert not able
        assert says in reason


def test_errors():
    x, weight = torch.ones(3, 8), torch.ones(12, 8)
    for match, error, make in (
        (r"x must be \[T, K\] and weight \[N, K\]", ValueError, lambda: project_gated(x, weight[:, :7], 4, 1)),
        ("x and weight must be of one floating dtype", TypeError, lambda: project_gated(x, weight.double(), 4, 1)),
        (r"weight must have 14 \+ a multiple of 1 rows; got 12", ValueError, lambda: project_gated(x, weight, 7, 1)),
        (r"gain must be floating \[4\]", ValueError, lambda: project_gated(x, weight, 4, 1, torch.ones(3))),
        (r"bias must be floating \[12\]", ValueError, lambda: project_gated(x, weight, 4, 1, bias=torch.ones(3))),
        ("hidden must be at least 1", ValueError, lambda: project_gated(x, weight, 0, 1)),
        ("told and its weight", ValueError, lambda: GatedDown()(x, weight[:, :3], told=x)),
    ):
        with pytest.raises(error, match=match):
            make()


def test_h_is_multiplied_once(device):
    x, weight, _, _, down, *_ = operands(5, 16, 8, 1, 4, 6, dtype=torch.float32, device=device)
    last = GatedDown()
    h, _ = project_gated(x, weight, 8, 1, down=last, backend="triton")
    last(h, down)
    with pytest.raises(ValueError, match="multiplied already"):
        last(h, down)


def test_compiled_it_is_the_reference():
    x, weight, gain, bias, down, *_ = operands(5, 16, 8, 1, 4, 6, dtype=torch.float32)

    def both(*t):
        last = GatedDown()
        h, q = project_gated(t[0], t[1], 8, 1, t[2], bias=t[3], down=last)
        return last(h, t[4]), q

    given = (x, weight, gain, bias, down)
    for a, b in zip(torch.compile(both, backend="aot_eager")(*given), both(*given), strict=True):
        assert relative_error(a, b) < 1e-6
