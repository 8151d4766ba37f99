import pytest
import torch
from gem_model.pooling import SeedPooling


def test_seed_pooling_formula():
    torch.manual_seed(0)
    m = SeedPooling(8, seeds=6, queries=3, heads=2)
    for p in m.parameters():
        torch.nn.init.normal_(p, std=0.4)
    m = m.double()
    lengths = [4, 0, 5]
    offsets = torch.tensor([0, 4, 4, 9])
    s = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    out = m(s, offsets, 5)
    assert out.shape == (3, 3, 8)
    a = m.mix.weight.view(3, 6, 2)  # [q, s, r]
    b = m.dims.weight.view(2, 8, 8)  # [r, out, in]
    for sample, events in enumerate(s.split(lengths)):
        kv = m.read.kv(events).view(-1, 2, 2, 4)  # [n, k or v, heads, D]
        z = torch.zeros(6, 8, dtype=torch.float64)
        if len(events):
            p = torch.softmax(torch.einsum("shd,nhd->hsn", m.read.queries, kv[:, 0]) / 2.0, dim=-1)
            z = torch.einsum("hsn,nhd->shd", p, kv[:, 1]).flatten(1) @ m.read.out.weight.T
        z = m.norm(z)
        expected = sum(a_r @ z @ b_r.T for a_r, b_r in zip(a.unbind(2), b, strict=True))
        torch.testing.assert_close(out[sample], expected)
        if len(events):
            leaves = (s, *m.parameters())
            ours = torch.autograd.grad(out[sample].square().sum(), leaves, retain_graph=True)
            theirs = torch.autograd.grad(expected.square().sum(), leaves, retain_graph=True)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other)


def test_more_seeds_than_events_and_back():
    """Any number of seeds and tokens; each sample reads its own events only."""
    torch.manual_seed(0)
    m = SeedPooling(8, seeds=12, queries=1, heads=2)
    torch.nn.init.normal_(m.mix.weight)
    s, offsets = torch.randn(5, 8, requires_grad=True), torch.tensor([0, 2, 5])
    out = m(s, offsets, 3)
    (grad,) = torch.autograd.grad(out[0].square().sum(), s)
    assert (grad[:2].abs().sum(1) > 0).all()
    assert (grad[2:] == 0).all()


@pytest.mark.parametrize("recent", [0, 2])
def test_a_float32_stream_takes_a_16_bit_residual(recent):
    torch.manual_seed(0)
    pooling = SeedPooling(16, 5, 2, 2)
    for p in pooling.parameters():
        torch.nn.init.normal_(p)
    s, more, offsets = torch.randn(9, 16), torch.randn(9, 16).bfloat16(), torch.tensor([0, 4, 4, 9])
    found = pooling(s, offsets, 5, more, None, recent)
    want = pooling(s + more, offsets, 5, None, None, recent)
    torch.testing.assert_close(found[0], want[0] if recent else want)
    torch.testing.assert_close(found[1], s + more)
