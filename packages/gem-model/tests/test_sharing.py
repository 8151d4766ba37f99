"""Samples of one request share a history: the same logits and gradients as with a history for each."""

from dataclasses import dataclass, replace

import pytest
import torch
from gem_model import GEM, baselines, batch_flops, preset
from gem_model.sharing import Requests
from gem_model.testing import RandomBatch, example_inputs, random_batch
from torch import Tensor

OF = torch.tensor([2, 0, 2, 4, 1, 2, 0, 4, 4])  # of five requests; nobody is of the fourth


@dataclass(frozen=True, kw_only=True)
class Shared(RandomBatch):
    """A batch with fewer histories than samples."""

    requests: Tensor


def batches(inputs, of):
    """The same samples with shared histories, and with one each."""
    histories = random_batch(inputs, int(of.max()) + 1, seed=1)
    samples = replace(random_batch(inputs, len(of), seed=2), time=histories.time[of])
    each = replace(samples, sequences=histories.select(of).sequences)
    return Shared(**{**vars(samples), "sequences": histories.sequences, "requests": of}), each


@pytest.mark.parametrize(
    "changes",
    [
        {"pffn_tokens": 0, "evidence_heads": 2, "affinity_heads": 2, "reader": (8,)},
        {"sequence_layer": "hstu", "pma_seeds": 6, "self_attention_every": 2},
        {"pffn_tokens": 0, "window": 3, "qk_norm": True},
        {"pffn_tokens": 0, "attention": "gdpa", "block": 16},
    ],
)
def test_sharing_changes_nothing_where_events_are_told_nothing(changes):
    torch.manual_seed(0)
    inputs = example_inputs()
    model = GEM(preset("tiny", layers=2, **changes), inputs)
    shared, each = batches(inputs, OF)
    found = []
    for batch in (shared, each):
        model.zero_grad()
        logits = model(batch)
        model.loss(logits, batch).backward()
        found.append((logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_events_are_told_the_mean_of_their_requests_samples():
    torch.manual_seed(0)
    inputs = example_inputs()
    model = GEM(preset("tiny", layers=2), inputs)
    shared, each = batches(inputs, torch.tensor([3, 1, 0, 2]))  # a sample each
    torch.testing.assert_close(model(shared), model(each))
    shared, each = batches(inputs, OF)
    assert not torch.allclose(model(shared), model(each), rtol=1e-3)  # told of all, not of each
    twice = torch.tensor([0, 1, 2, 0, 1, 2])
    shared, each = batches(inputs, twice)
    first = {k: v[:3].repeat(2, *[1] * (v.dim() - 1)) for k, v in vars(each).items() if isinstance(v, Tensor)}
    alike = {"sparse": each.select([0, 1, 2, 0, 1, 2]).sparse, **{k: v for k, v in first.items() if k != "requests"}}
    torch.testing.assert_close(model(replace(shared, **alike)), model(replace(each, **alike)))


def test_requests_are_those_of_a_loop():
    requests, x = Requests.number(OF, 5), torch.randn(9, 3, 2, dtype=torch.float64)
    mean = requests.mean(x.float())
    for r in range(5):
        mine = [b for b in range(9) if OF[b] == r]
        assert requests.order[requests.offsets[r] : requests.offsets[r + 1]].tolist() == mine
        torch.testing.assert_close(mean[r].double(), x[mine].mean(0) if mine else torch.zeros(3, 2).double())
    torch.testing.assert_close(requests.each(mean), mean[OF])
    torch.testing.assert_close(x[requests.order][requests.back], x)
    assert requests.first(torch.arange(9))[[0, 1, 2, 4]].tolist() == [1, 4, 0, 3]


def test_flops_of_shared_histories():
    inputs = example_inputs()
    config = preset("tiny", evidence_heads=2, pma_seeds=3)
    lengths, each = {"ratings": [3, 8], "views": [2, 0]}, {"ratings": [8, 3, 8], "views": [0, 2, 0]}
    alone = batch_flops(config, inputs, lengths)
    assert batch_flops(config, inputs, lengths, requests=[0, 1]) == alone
    shared, apart = batch_flops(config, inputs, lengths, requests=[1, 0, 1]), batch_flops(config, inputs, each)
    assert alone < shared < apart
    plain = preset("tiny", pffn_tokens=0, pma_queries=0)
    d, events = plain.width, 8  # what an event of the second history costs once, and not again for the third sample
    saved = events * (2 * inputs.sources[0].event_width(8) * d + 3 * 2 * d * plain.ff_hidden + 4 * 2 * d * d)
    saved += 4 * d * events**2
    assert batch_flops(plain, inputs, each) - batch_flops(plain, inputs, lengths, requests=[1, 0, 1]) == saved
    with pytest.raises(ValueError, match="expected one number of histories for 2 samples"):
        batch_flops(config, inputs, lengths, requests=[0, 1], batch_size=3)


def test_baselines_say_that_they_share_nothing():
    inputs = example_inputs()
    shared, _ = batches(inputs, OF)
    with pytest.raises(ValueError, match="a history for each sample"):
        baselines.build("din", {}, inputs)(shared)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "changes",
    [
        {"evidence_heads": 2, "affinity_heads": 2},
        {"sequence_layer": "hstu", "pma_seeds": 6},
        {"block": 16, "dense_buckets": 5},
        {"window": 3, "causal": True},
    ],
)
def test_a_card_says_what_a_cpu_says(changes):
    """Float32 within 2e-3, bfloat16 within a twentieth, with and without shared histories; every gradient is finite."""
    torch.manual_seed(0)
    inputs = example_inputs()
    config, both = preset("tiny", width=64, layers=2, **changes), batches(inputs, OF)
    model, cpu = GEM(config, inputs, device="cuda"), GEM(config, inputs)
    model.load_state_dict(cpu.state_dict())
    want = [cpu(batch) for batch in both]
    for batch, logits in zip(both, want, strict=True):
        there = batch.to("cuda")
        torch.testing.assert_close(model(there).cpu(), logits, rtol=2e-3, atol=2e-3)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            low = model(there)
        torch.testing.assert_close(low.cpu(), logits, rtol=0.05, atol=0.05)
        model.zero_grad()
        model.loss(low, there).backward()
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())
