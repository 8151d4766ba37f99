"""The tower against loops over samples, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from gem_kernels import most_recent, rotary_heads
from gem_kernels.nn import RMSNorm
from gem_model import preset
from gem_model.history import ROPE_BASE, ROTE_BASE, History, place_events
from gem_model.interformer import Tower
from gem_model.projection import folded
from gem_model.sequence import HistoryAttention, PersonalisedFFN
from gem_model.testing import RandomSequence

LENGTHS = [4, 0, 7, 1]
OFFSETS = torch.tensor([0, 4, 4, 11, 12])


def history(width, seed=0):
    g = torch.Generator().manual_seed(seed)
    rank = torch.cat([torch.arange(n, 0, -1) for n in LENGTHS])
    return History(
        tokens=torch.randn(12, width, generator=g, dtype=torch.float64, requires_grad=True),
        offsets=OFFSETS,
        max_len=7,
        rank=rank,
        age=torch.rand(12, generator=g) * 9,
    )


def randomised(module):
    torch.manual_seed(1)
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return module.double()


def norm_linear(m, x):
    n = F.layer_norm(x, x.shape[-1:], m.norm.weight, m.norm.bias, m.norm.eps)
    return n @ m.linear.weight.T + m.linear.bias


def rotated(x, place, base):
    """Pairs of dims as complex numbers, times exp(i place base^(-2j / D)). x [L, H, D], place [L]."""
    dim = x.shape[-1]
    angle = place.double()[:, None, None] * base ** (-torch.arange(0, dim, 2).double() / dim)
    return torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle)
    ).flatten(-2)


def head_norm(x, norm):
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def weights(q, k, activation, mask):
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    if activation is not None:
        return activation(scores) * mask
    return scores.masked_fill(~mask, -math.inf).softmax(-1)


@pytest.mark.parametrize("rotary", ["none", "position", "time", "both"])
@pytest.mark.parametrize(
    "mask", [{}, {"window": 2}, {"causal": True}, {"causal": True, "window": 1}, {"window": 2, "qk_norm": True}]
)
@pytest.mark.parametrize("attention", ["softmax", "gdpa"])
def test_history_attention(rotary, mask, attention):
    config = preset("tiny", rotary=rotary, attention=attention, **mask)
    m = randomised(HistoryAttention(config, events_attend=True))
    h, heads = history(config.width), config.heads
    cls = torch.randn(4, 3, config.width, dtype=torch.float64, requires_grad=True)
    after, told = m(h, cls)
    events = after.settled().tokens

    act = F.silu if attention == "gdpa" else None
    expected_events, expected_cls = [], []
    for b, (start, n) in enumerate(zip(OFFSETS.tolist(), LENGTHS, strict=False)):
        rows = slice(start, start + n)
        x = h.tokens[rows]
        q, k, v = norm_linear(m.qkv, x).unflatten(1, (3, heads, -1)).unbind(1)

        if config.qk_norm:
            q, k = head_norm(q, m.norms.q), head_norm(k, m.norms.k)

        def rotate(t, rows=rows):
            if rotary == "position":
                return rotated(t, h.rank[rows], ROPE_BASE)
            if rotary == "time":
                return rotated(t, h.age[rows], ROTE_BASE)
            if rotary == "both":
                return torch.cat(
                    (rotated(t[:, :1], h.rank[rows], ROPE_BASE), rotated(t[:, 1:], h.age[rows], ROTE_BASE)), 1
                )
            return t

        q, k = rotate(q), rotate(k)
        i, j = torch.arange(n)[:, None], torch.arange(n)[None]
        reach = config.window if config.window is not None else n
        visible = ((i - j).abs() <= reach) & ((j <= i) if config.causal else torch.ones(n, n, dtype=torch.bool))
        q_cls = norm_linear(m.cls_q, cls[b]).unflatten(1, (heads, -1))
        if config.qk_norm:
            q_cls = head_norm(q_cls, m.norms.q)
        everything = torch.ones(3, n, dtype=torch.bool)

        def read(q, visible, k=k, v=v):
            o = torch.einsum("hqk,khd->qhd", weights(q, k, act, visible), v).flatten(1) if len(k) else q.flatten(1) * 0
            if m.out_norm is not None:
                o = F.layer_norm(o, o.shape[-1:], m.out_norm.weight, m.out_norm.bias)
            return o @ m.out.weight.T + m.out.bias

        expected_events.append(x + read(q, visible))
        expected_cls.append(cls[b] + read(q_cls, everything))
    expected_events, expected_cls = torch.cat(expected_events), torch.stack(expected_cls)
    torch.testing.assert_close(events, expected_events, atol=1e-5, rtol=1e-5)  # the angles are float32
    torch.testing.assert_close(told, expected_cls, atol=1e-5, rtol=1e-5)
    probe = torch.randn_like(events), torch.randn_like(told)
    leaves = (h.tokens, cls, m.qkv.linear.weight)
    ours = torch.autograd.grad((events * probe[0]).sum() + (told * probe[1]).sum(), leaves)
    theirs = torch.autograd.grad((expected_events * probe[0]).sum() + (expected_cls * probe[1]).sum(), leaves)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_skipped_layer_leaves_the_events_alone():
    config = preset("tiny")
    m = randomised(HistoryAttention(config, events_attend=False))
    h = history(config.width)
    cls = torch.randn(4, 2, config.width, dtype=torch.float64)
    after, told = m(h, cls)
    assert after.settled().tokens is h.tokens
    assert (told - cls).abs().min() > 0


@pytest.mark.parametrize("qk_norm", [False, True])
def test_personalised_ffn(qk_norm):
    config = preset("tiny", activation="gelu", qk_norm=qk_norm)
    m = randomised(PersonalisedFFN(config))
    h = history(config.width)
    x_sum = torch.randn(4, config.n_sum, config.width, dtype=torch.float64, requires_grad=True)
    gate, up, q = norm_linear(m.up, h.tokens).split(m.splits, dim=1)
    expected = h.tokens + (F.silu(gate) * up) @ m.down.weight.T + m.down.bias
    personal = []
    for b, (start, n) in enumerate(zip(OFFSETS.tolist(), LENGTHS, strict=False)):
        kv = (m.mix.weight @ x_sum[b]) @ m.kv.weight.T + m.kv.bias  # [P, 2 d]
        k, v = kv.unflatten(1, (2, config.heads, -1)).unbind(1)
        query = q[start : start + n].unflatten(1, (config.heads, -1))
        if qk_norm:
            query, k = head_norm(query, m.norms.q), head_norm(k, m.norms.k)
        hidden = F.gelu(torch.einsum("qhd,phd->hqp", query, k) / math.sqrt(config.head_dim))
        personal.append(torch.einsum("hqp,phd->qhd", hidden, v).flatten(1))
    expected = expected + torch.cat(personal) @ m.out.weight.T + m.out.bias
    tokens = m(h, x_sum).settled().tokens
    torch.testing.assert_close(tokens, expected)
    probe, leaves = torch.randn_like(tokens), (h.tokens, x_sum, *m.parameters())
    ours = torch.autograd.grad((tokens * probe).sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad((expected * probe).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)
    other = x_sum.detach().clone()
    other[2] += 1.0
    changed = (m(h, other).more != m(h, x_sum).more).any(dim=1)
    assert changed.tolist() == [False] * 4 + [True] * 7 + [False]


def test_qk_norm_bounds_the_scores():
    """However large the projections grow, sqrt(D) bounds |q k| / sqrt(D): where a polynomial activation is exact."""
    config = preset("tiny", qk_norm=True)
    norms = HistoryAttention(config, events_attend=True).norms
    projected = 1000.0 * torch.randn(50, 3 * 2 * config.head_dim)
    q, k, _ = rotary_heads(projected, 2, norms.weights)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
    assert 0.5 * math.sqrt(config.head_dim) < scores.abs().max() <= math.sqrt(config.head_dim) * 1.0001


def test_most_recent_events():
    s = torch.arange(12.0)[:, None].requires_grad_()
    out = most_recent(s, OFFSETS, 3)[..., 0]
    assert out.tolist() == [[3, 2, 1], [0, 0, 0], [10, 9, 8], [11, 0, 0]]
    out.sum().backward()
    assert s.grad[:, 0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1]


def test_places_of_events():
    sequence = RandomSequence(
        ids={}, floats={}, time=torch.tensor([100, 150, 150, 40, 190]), offsets=torch.tensor([0, 3, 3, 5]), max_len=3
    )
    rank, age, gap = place_events(sequence, torch.tensor([160, 7, 250]), 10.0)
    assert rank.tolist() == [3, 2, 1, 2, 1]
    seconds = torch.tensor([60.0, 10, 10, 210, 60])
    torch.testing.assert_close(age, torch.log(1 + seconds / 10))
    torch.testing.assert_close(gap, torch.log(1 + torch.tensor([0.0, 50, 0, 0, 150]) / 10))


def test_places_of_no_events():
    none = RandomSequence(
        ids={}, floats={}, time=torch.zeros(0, dtype=torch.int64), offsets=torch.tensor([0, 0, 0]), max_len=0
    )
    assert [t.shape for t in place_events(none, torch.tensor([5, 6]), 1.0)] == [(0,)] * 3


def rows_twice(self, x, residual, residual_bias, offsets, recent, places, others, bare_eps, product=None):
    """What `norm_rows_twice` is, of plain operators: where no kernel runs, the model norms the rows once more."""
    found = self.rows(x, residual, residual_bias, offsets, recent, places, others, product)
    return *found, F.layer_norm(found[1], found[1].shape[1:], eps=bare_eps)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("attention", ["softmax", "gdpa"])
def test_cls_tokens_ask_among_the_events_as_beside_them(attention, bare, monkeypatch):
    """A whole tower with pooling by seeds, twice, so that what is added is settled where it lies among CLS tokens."""
    config = preset("tiny", attention=attention, qk_norm=True, pma_seeds=5, pma_queries=2, recent=2)
    towers = [randomised(Tower(config, config.width, last=i == 1)) for i in range(2)]
    used = []
    if bare:
        monkeypatch.setattr(RMSNorm, "rows_twice", rows_twice)
        monkeypatch.setattr("gem_model.history.folded", lambda *a: used.append(1) or folded(*a))
    h = history(config.width)
    cls = torch.randn(4, 3, config.width, dtype=torch.float64, requires_grad=True)
    x_sum = torch.randn(4, config.n_sum, config.width, dtype=torch.float64, requires_grad=True)
    leaves = [h.tokens, cls, x_sum, *(p for t in towers for p in t.parameters())]

    def run():
        now, tokens, sums = h, cls, []
        for tower in towers:
            now, tokens, s_sum = tower(now, tokens, x_sum)
            sums.append(s_sum)
        outs = [now.tokens, tokens, *sums]
        probes = [torch.cos(torch.arange(o.numel(), dtype=torch.float64)).view(o.shape) for o in outs]
        return outs, torch.autograd.grad(outs, leaves, probes)

    assert towers[0].sequence.attention.together
    seen, found = run()
    assert bool(used) == bare
    monkeypatch.setattr(HistoryAttention, "together", False)
    wanted, gradients = run()
    torch.testing.assert_close(seen, wanted)
    torch.testing.assert_close(found, gradients)


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("seeds", [0, 5])
@pytest.mark.parametrize("attention", ["softmax", "gdpa"])
def test_what_backward_kernels_write_is_not_kept(attention, seeds, bare, monkeypatch):
    """The normed rows of each projection and the gate's product; the gradients are the same."""
    config = preset("tiny", attention=attention, qk_norm=True, pma_seeds=seeds, pma_queries=2, recent=2)
    towers = [randomised(Tower(config, config.width, last=i == 1)) for i in range(2)]
    if bare:
        monkeypatch.setattr(RMSNorm, "rows_twice", rows_twice)
    h = history(config.width)
    cls = torch.randn(4, 3, config.width, dtype=torch.float64, requires_grad=True)
    x_sum = torch.randn(4, config.n_sum, config.width, dtype=torch.float64, requires_grad=True)
    leaves = [h.tokens, cls, x_sum, *(p for t in towers for p in t.parameters())]

    def run(inside):
        kept = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        now, tokens, sums = h, cls, []
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for tower in towers:
                tower.inside = inside
                now, tokens, s_sum = tower(now, tokens, x_sum)
                sums.append(s_sum)
        outs = [now.tokens, tokens, *sums]
        probes = [torch.cos(torch.arange(o.numel(), dtype=torch.float64)).view(o.shape) for o in outs]
        for _ in range(2):
            found = torch.autograd.grad(outs, leaves, probes, retain_graph=True)
        return outs, found, sum(t.untyped_storage().nbytes() for t in kept.values())

    outs, gradients, whole = run("none")
    seen, found, kept = run("exact")
    torch.testing.assert_close(seen, outs, rtol=0, atol=0)
    torch.testing.assert_close(found, gradients)
    rows = 12 * 8 * (config.ff_hidden + config.width * (2 + bool(seeds)))  # of one layer
    assert kept <= whole - 2 * rows + (bare and bool(seeds)) * 12 * 8 * config.width
    seen, found, less = run("fp8")
    torch.testing.assert_close(seen, outs, rtol=0, atol=0)
    far = torch.cat([(a - b).flatten() for a, b in zip(found, gradients, strict=True)])
    assert 1e-5 < far.norm() / torch.cat([g.flatten() for g in gradients]).norm() < 0.05
    packed = 12 * (8 * (2 * config.ff_hidden + config.width) - 2 * config.ff_hidden - 8 * config.heads - 2)
    assert less <= kept - 2 * packed  # where numbers take eight bytes


def test_only_plain_layers_have_late_products():
    """One that is watched is called as it is."""
    config = preset("tiny")
    tower = randomised(Tower(config, config.width))
    tower.inside = "exact"
    called = []
    for linear in (tower.sequence.ffn.down, tower.sequence.attention.qkv.linear):
        linear.register_forward_hook(lambda *_: called.append(1))
    h = history(config.width)
    tower(h, *(torch.randn(4, n, config.width, dtype=torch.float64) for n in (3, config.n_sum)))
    assert len(called) == 2
