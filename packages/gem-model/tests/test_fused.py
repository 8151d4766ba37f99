"""Towers whose projections are made with what reads them, beside the same apart."""

import copy

import pytest
import torch
import torch.nn.functional as F
from gem_kernels.nn import RMSNorm
from gem_kernels.testing import relative_error
from gem_model import preset
from gem_model.history import History
from gem_model.interformer import Tower
from gem_model.sequence import HistoryAttention, PersonalisedFFN


def randomised(tower, std):
    torch.manual_seed(1)
    for p in tower.parameters():
        torch.nn.init.normal_(p, std=std) if p.dim() > 1 else torch.nn.init.normal_(p, 1.0, 0.1)
    return tower


def history(lengths, width, **where):
    total = sum(lengths)
    draw = torch.Generator().manual_seed(0)
    return History(
        tokens=torch.randn(total, width, generator=draw, dtype=torch.float64).to(**where).requires_grad_(),
        offsets=torch.tensor([0, *lengths]).cumsum(0).to(where.get("device", "cpu")),
        max_len=max(lengths),
        rank=torch.cat([torch.arange(n, 0, -1) for n in lengths]).to(where.get("device", "cpu")),
        age=(torch.rand(total, generator=draw) * 9).to(where.get("device", "cpu")),
    )


def run(towers, fused, leaves, monkeypatch):
    """Results and gradients of towers one behind the other."""
    for kind in (PersonalisedFFN, HistoryAttention):
        monkeypatch.setattr(kind, "fused", fused)
    now, cls, x_sum, sums = *leaves, []
    for tower in towers:
        now, cls, s_sum = tower(now, cls, x_sum)
        sums.append(s_sum)
    outs = [now.settled().tokens, cls, *sums]
    probes = [torch.cos(torch.arange(o.numel(), device=o.device)).view(o.shape).to(o.dtype) for o in outs]
    wanted = [leaves[0].tokens, *leaves[1:], *(p for t in towers for p in t.parameters())]
    return outs, torch.autograd.grad(outs, wanted, probes, allow_unused=True, materialize_grads=True)


def rows_twice(self, x, residual, residual_bias, offsets, recent, places, others, bare_eps, product=None):
    """What `norm_rows_twice` is, of plain operators."""
    found = self.rows(x, residual, residual_bias, offsets, recent, places, others, product)
    return *found, F.layer_norm(found[1], found[1].shape[1:], eps=bare_eps)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("personal", [0, 6])
def test_the_same_in_float64(personal, bare, monkeypatch):
    config = preset("tiny", qk_norm=True, pma_seeds=5, pma_queries=2, recent=2, pffn_tokens=personal)
    towers = [randomised(Tower(config, config.width, last=i == 1), 0.3).double() for i in range(2)]
    if bare:
        monkeypatch.setattr(RMSNorm, "rows_twice", rows_twice)
    draw = torch.Generator().manual_seed(2)
    leaves = (
        history([4, 0, 7, 1], config.width),
        *(
            torch.randn(4, n, config.width, generator=draw, dtype=torch.float64).requires_grad_()
            for n in (3, config.n_sum)
        ),
    )
    called = []
    for kind in (PersonalisedFFN, HistoryAttention):
        way = kind._fused
        monkeypatch.setattr(kind, "_fused", lambda self, *a, way=way: called.append(type(self)) or way(self, *a))
    apart = run(towers, False, leaves, monkeypatch)
    assert not called
    together = run(towers, True, leaves, monkeypatch)
    assert called.count(PersonalisedFFN) == called.count(HistoryAttention) == 2
    torch.testing.assert_close(together, apart)


def test_what_is_watched_is_apart(monkeypatch):
    """A plan of what is kept knows operators apart, and so does torch.compile."""
    config = preset("tiny")
    tower = randomised(Tower(config, config.width), 0.3).double()
    for kind in (PersonalisedFFN, HistoryAttention):
        monkeypatch.setattr(kind, "_fused", lambda self, *a: pytest.fail("made together"))
    leaves = (
        history([4, 0, 7, 1], config.width),
        *(torch.randn(4, n, config.width, dtype=torch.float64).requires_grad_() for n in (3, config.n_sum)),
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        run([tower], True, leaves, monkeypatch)


@pytest.mark.gpu
def test_on_a_card(monkeypatch):
    """BF16 at the width of "large", against float64, as close as apart; and the same bits again."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = preset("large", layers=2, recent=4)
    wide = [randomised(Tower(config, config.width, last=i == 1), 0.03).double() for i in range(2)]
    lengths = [700, 1, 0, 64, 1300, 333]
    draw = torch.Generator().manual_seed(2)
    given = [torch.randn(6, n, config.width, generator=draw, dtype=torch.float64) for n in (8, config.n_sum)]

    def leaves(**where):
        return history(lengths, config.width, **where), *(t.to(**where).requires_grad_() for t in given)

    exact = run(wide, False, leaves(), monkeypatch)
    towers = [copy.deepcopy(t).to("cuda", torch.bfloat16) for t in wide]
    inputs = leaves(device="cuda", dtype=torch.bfloat16)
    found = {fused: run(towers, fused, inputs, monkeypatch) for fused in (False, True)}
    for a, b, c in zip(*(outs + list(grads) for outs, grads in (exact, found[False], found[True])), strict=True):
        apart, together = relative_error(b, a), relative_error(c, a)
        assert together < max(1.5 * apart, 0.02), (tuple(a.shape), apart, together)
    again = run(towers, True, inputs, monkeypatch)
    for a, b in zip([*again[0], *again[1]], [*found[True][0], *found[True][1]], strict=True):
        assert torch.equal(a, b)
