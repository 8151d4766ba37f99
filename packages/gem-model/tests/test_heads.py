import math

import pytest
import torch
from gem_model.heads import log_loss, rate_logits


def test_loss_against_the_formula():
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3, generator=g, requires_grad=True)
    labels = torch.randint(0, 2, (40, 3), generator=g).float()
    mask = torch.rand(40, 3, generator=g) < 0.5
    weights = torch.rand(40, generator=g)
    weights[5] = 0.0
    per_task = []
    for k in range(3):
        total = norm = 0.0
        for b in range(40):
            if mask[b, k]:
                p = 1.0 / (1.0 + math.exp(-logits[b, k].item()))
                total -= weights[b].item() * math.log(p if labels[b, k] else 1.0 - p)
                norm += weights[b].item()
        per_task.append(total / norm)
    labels[~mask] = float("nan")  # unknown labels may hold anything
    loss = log_loss(logits, labels, mask, weights)
    assert loss.item() == pytest.approx(sum(per_task) / 3, rel=1e-5)
    loss.backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[5] == 0).all()


def test_tasks_without_labels_do_not_count():
    logits = torch.zeros(4, 2, requires_grad=True)
    mask = torch.tensor([[True, False]] * 4)
    loss = log_loss(logits, torch.ones(4, 2), mask, torch.ones(4))
    assert loss.item() == pytest.approx(math.log(2.0))
    nothing = log_loss(logits, torch.ones(4, 2), torch.zeros(4, 2, dtype=torch.bool), torch.ones(4))
    nothing.backward()
    assert nothing.item() == 0.0
    assert (logits.grad == 0).all()


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4], [-1e4]])
    assert log_loss(logits, torch.tensor([[0.0], [0.0]]), torch.ones(2, 1, dtype=torch.bool), torch.ones(2)) == 5000.0


def test_rate_logits():
    assert rate_logits([0.5, 0.9], ["a", "b"]) == pytest.approx([0.0, math.log(9.0)])
    with pytest.raises(ValueError, match=r"each task of \['a'\], got \[0.0\]"):
        rate_logits([0.0], ["a"])
