"""The Hopper kernels for windows on a Hopper GPU: against float64 on awkward lengths, twice the same bits."""

from __future__ import annotations

import pytest
import torch
from gem_kernels.testing import offsets_of, poisoned, relative_error

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
gpu = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]

LQ = [1, 63, 64, 65, 127, 128, 129, 0, 200, 0, 0, 500, 33, 193, 1, 640, 64, 900]
LK = [1, 129, 128, 127, 65, 64, 63, 100, 0, 0, 5, 700, 257, 256, 1000, 640, 900, 64]


def dense(q, k, v, lq, lk, left, right):
    """O and LSE sequence by sequence; float64 in, float64 out. A query that sees no key: 0 and -inf."""
    outs, lses, a, c = [], [], 0, 0
    for x, y in zip(lq, lk, strict=True):
        s = torch.einsum("qhd,khd->hqk", q[a : a + x], k[c : c + y]) * q.shape[2] ** -0.5
        distance = torch.arange(y, device=q.device)[None, :] - torch.arange(x, device=q.device)[:, None] - (y - x)
        seen = (distance >= -left) & (distance <= right)
        lse = torch.logsumexp(s.masked_fill(~seen, float("-inf")), -1)
        p = torch.exp(s - lse.masked_fill(lse.isneginf(), 0.0)[..., None]) * seen
        outs.append(torch.einsum("hqk,khd->qhd", p, v[c : c + y]))
        lses.append(lse.T)
        a, c = a + x, c + y
    return torch.cat(outs), torch.cat(lses)


def problem(dim, lq=LQ, lk=LK, heads=2, dtype=torch.bfloat16):
    torch.manual_seed(0)
    tensors = [torch.randn(n, heads, dim, device="cuda", dtype=dtype) for n in (sum(lq), sum(lk), sum(lk), sum(lq))]
    return *tensors, offsets_of(lq, "cuda"), offsets_of(lk, "cuda", torch.int32)


@pytest.mark.parametrize("dim", [64, 128])
class TestKernels:
    pytestmark = gpu

    def test_both_passes(self, dim):
        for sides in ((64, 0), (10, 5), (0, 0), (255, 200), (0, 130)):  # numbers, for which nothing is built anew
            self.check(dim, sides)

    def check(self, dim, sides):
        from gem_kernels.jagged_attention import window

        q, k, v, dout, cq, ck = problem(dim)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        expected, lse = dense(*leaves, LQ, LK, *sides)
        dlse = torch.randn_like(lse).masked_fill_(lse.isneginf(), 0.0)
        loss = (expected * dout.double()).sum() + (lse.masked_fill(lse.isneginf(), 0.0) * dlse).sum()
        gradients = torch.autograd.grad(loss, leaves)
        runs = []
        for _ in range(2):
            with poisoned():
                got, got_lse = window.forward(q, k, v, cq, ck, dim**-0.5, *sides)
                grads = window.backward(dout, dlse.float(), q, k, v, got, got_lse, cq, ck, dim**-0.5, *sides)
            runs.append((got, got_lse, *grads))
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        with poisoned():
            again, again_lse = window.forward(q, k, v, cq, ck, dim**-0.5, *sides, ahead=True)
        assert relative_error(again, expected) < 5e-3
        assert (again_lse.double() - lse).nan_to_num(0, 0, 0).abs().max() < 1e-4
        assert relative_error(got, expected) < 5e-3
        assert torch.equal(got_lse.isneginf(), lse.isneginf())
        assert (got_lse.double() - lse).nan_to_num(0, 0, 0).abs().max() < 1e-4
        for a, b in zip(grads, gradients, strict=True):
            assert relative_error(a, b) < 1e-2


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float16), (128, torch.bfloat16)])
class TestPast:
    """Self-attention over the past: the forward of any window and that of this one, all gradients in one pass."""

    pytestmark = gpu

    def test_both_passes(self, dim, dtype):
        for left in (64, 130, 0, 10, 63, 65, 300):
            self.check(dim, dtype, left)

    def check(self, dim, dtype, left):
        from gem_kernels.jagged_attention import window, window_past

        generator = torch.Generator().manual_seed(left)
        drawn = torch.randint(0, 700, (60,), generator=generator).tolist()
        lengths = LQ + drawn
        q, k, v, dout, offsets, _ = problem(dim, lengths, lengths, heads=4, dtype=dtype)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        expected, lse = dense(*leaves, lengths, lengths, left, 0)
        dlse = torch.randn_like(lse)
        gradients = torch.autograd.grad((expected * dout.double()).sum() + (lse * dlse).sum(), leaves)
        where = offsets, offsets, dim**-0.5, left, 0
        bound = 1e-3 if dtype == torch.float16 else 5e-3
        with poisoned():
            plain = window.forward(q, k, v, *where, ahead=False)
            ahead = window.forward(q, k, v, *where, ahead=True)
            own = window_past.forward(q, k, v, offsets, dim**-0.5, left, act="softmax")
            runs = [window.backward(dout, dlse.float(), q, k, v, *own, *where) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        for got, got_lse in (plain, ahead, own):
            assert relative_error(got, expected) < bound
            assert (got_lse.double() - lse).abs().max() < 1e-4
        for a, b in zip(runs[0], gradients, strict=True):
            assert relative_error(a, b) < 2 * bound


class TestManyTiles:
    pytestmark = gpu

    @pytest.mark.parametrize(("dim", "dtype", "bound"), [(64, torch.float16, 1e-3), (128, torch.bfloat16, 5e-3)])
    def test_programs_walk_many_tiles(self, dim, dtype, bound):
        """Tiles of very different and of no work follow each other in every program, at odd rows."""
        from gem_kernels.jagged_attention import window

        lq = [int(x) for x in torch.randint(0, 400, (301,), generator=torch.Generator().manual_seed(1))]
        lk = [n if i % 3 else n // 7 for i, n in enumerate(lq)]
        q, k, v, dout, cq, ck = problem(dim, lq, lk, heads=4, dtype=dtype)
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        expected, _ = dense(*leaves, lq, lk, 100, 3)
        with poisoned():
            out, lse = window.forward(q, k, v, cq, ck, dim**-0.5, 100, 3)
            grads = window.backward(dout, None, q, k, v, out, lse, cq, ck, dim**-0.5, 100, 3)
        assert relative_error(out, expected) < bound
        for a, b in zip(grads, torch.autograd.grad(expected, leaves, dout.double()), strict=True):
            assert relative_error(a, b) < 2 * bound

    @pytest.mark.parametrize(("dim", "scale"), [(128, -0.1), (64, -0.07), (96, 0.1)])
    def test_the_operator_is_right_whichever_it_picks(self, dim, scale):
        """With scales of both signs; the portable kernels take 96 (`window.takes`)."""
        from gem_kernels import jagged_attention, why

        q, k, v, dout, cq, ck = problem(dim)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        assert why("jagged_attention", q, None, ("window",)).backend == "hopper"
        where = cq, ck, max(LQ), max(LK)
        got = jagged_attention(*leaves, *where, scale=scale, window=(64, 2))
        expected = jagged_attention(*exact, *where, scale=scale, window=(64, 2), backend="reference")
        assert relative_error(got, expected) < 5e-3
        wanted = torch.autograd.grad(expected, exact, dout.double())
        for a, b in zip(torch.autograd.grad(got, leaves, dout), wanted, strict=True):
            assert relative_error(a, b) < 1e-2


@pytest.mark.parametrize("backend", ["hopper", "triton"])
class TestLong:
    pytestmark = gpu

    def test_a_sequence_of_32768(self, backend):
        """Between short ones, against float64 by spans of queries and the keys that they see."""
        from gem_kernels import jagged_attention

        left, lengths = 200, [70, 32_768, 3]
        q, k, v, dout, offsets, _ = problem(128, lengths, lengths, heads=1)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = jagged_attention(*leaves, offsets, offsets, 32_768, 32_768, window=(left, 0), backend=backend)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        spans, begin = [], 0
        for n in lengths:
            for a in range(0, n, 1024):
                b, c = min(a + 1024, n), max(a - left, 0)
                rows, keys = slice(begin + a, begin + b), slice(begin + c, begin + b)
                spans.append(dense(exact[0][rows], exact[1][keys], exact[2][keys], [b - a], [b - c], left, 0)[0])
            begin += n
        expected = torch.cat(spans)
        assert relative_error(out, expected) < 5e-3
        wanted = torch.autograd.grad(expected, exact, dout.double())
        for got, right in zip(torch.autograd.grad(out, leaves, dout), wanted, strict=True):
            assert relative_error(got, right) < 1e-2


def test_whose_past_it_is():
    from gem_kernels.jagged_attention import window

    offsets = torch.tensor([0, 3, 4])
    assert window.of_the_past(offsets, offsets, 0)
    assert window.of_the_past(offsets, offsets[:], 0)
    assert not window.of_the_past(offsets, offsets.clone(), 0)
    assert not window.of_the_past(offsets, offsets[:2], 0)
    assert not window.of_the_past(offsets, offsets, 1)


def test_which_problems():
    from gem_kernels.jagged_attention import window

    q, offsets = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.tensor([0, 4])
    assert window.takes(q, q, offsets, 64, 2)
    assert window.takes(q[..., :64], q[..., :64], offsets, 0, 64)
    for sides in ((-1, 0), (512, 0), (-1, -1)):
        assert not window.takes(q, q, offsets, *sides)
    assert not window.takes(q, q, None, 64, 0)
    assert not window.takes(q, q[:, :1], offsets, 64, 0)
    assert not window.takes(q[..., :96], q[..., :96], offsets, 64, 0)
