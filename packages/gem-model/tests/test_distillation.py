from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from gem_model import GEM, preset
from gem_model.config import Teacher
from gem_model.testing import example_inputs, random_batch


def taught_inputs():
    """A teacher's prediction in column 3 of the dense features; the history of `ratings` shows what it said then."""
    inputs = example_inputs(dense=5)
    ratings, views = inputs.sources
    ratings = replace(ratings, floats=(*ratings.floats, ("said", 1)))
    return replace(inputs, sources=(ratings, views), dense_columns=(("vector", 3), ("said", 1)))


def with_said(batch, said):
    dense = batch.dense.clone()
    dense[:, 3] = said
    return replace(batch, dense=dense)


def student(**changes):
    torch.manual_seed(4)
    teachers = (Teacher(task="buy", column="said", weight=0.7),)
    return GEM(preset("tiny", teachers=teachers, evidence_heads=2, **changes), taught_inputs())


def test_the_auxiliary_loss_is_the_equation():
    model = student()
    for p in model.distillation.parameters():
        torch.nn.init.normal_(p, std=0.4)
    batch = random_batch(taught_inputs(), 9, seed=1)
    said = torch.tensor([0.1, 0.9, 0.5, float("nan"), 0.0, 1.0, 0.3, -1.0, 0.2])
    batch = with_said(batch, said)
    caught = []
    model.distillation.register_forward_pre_hook(lambda _m, args: caught.append(args[0].detach().double()))
    model(batch)
    w = {n: p.detach().double() for n, p in model.distillation.named_parameters()}
    w = {n.replace("buy said", "b"): p for n, p in w.items()}
    x = caught[0].flatten(1)
    x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    x = x * w["norm.weight"] + w["norm.bias"]
    s = F.gelu(x @ w["hidden.b.weight"].T + w["hidden.b.bias"]) @ w["out.b.weight"].T + w["out.b.bias"]
    known = torch.tensor([True, True, True, False, True, True, True, False, True])
    t = said.nan_to_num(0.5).clamp(1e-6, 1 - 1e-6).double()[:, None]
    z = (t / (1 - t)).log()
    up = z @ w["adapters.b.up.weight"].T + w["adapters.b.up.bias"]
    a = z + F.silu(up) @ w["adapters.b.down.weight"].T + w["adapters.b.down.bias"]

    def mean_log_loss(logit, target, mask):
        p = torch.sigmoid(logit[:, 0])
        losses = -(target * p.log() + (1 - target) * (1 - p).log())
        weight = batch.weights.double() * mask
        return (losses.nan_to_num(0.0) * weight).sum() / weight.sum()

    y = batch.labels[:, 1].double()
    expected = 0.7 * mean_log_loss(s, torch.sigmoid(a[:, 0]), known)
    expected = expected + mean_log_loss(a, torch.where(batch.label_mask[:, 1], y, 0.0), known & batch.label_mask[:, 1])
    torch.testing.assert_close(model.auxiliary.double(), expected, rtol=1e-4, atol=1e-5)
    total = model.loss(model(batch), batch)
    plain = GEM.loss(model.eval(), model(batch), batch)
    assert total.item() == pytest.approx(plain.item() + expected.item(), rel=1e-3)
    assert model.auxiliary is None  # nothing of it in evaluation


def test_what_a_teacher_says_is_no_feature():
    model = student().eval()
    batch = random_batch(taught_inputs(), 6, seed=2)
    told = model(with_said(batch, 0.2))
    torch.testing.assert_close(model(with_said(batch, 0.9)), told)
    torch.testing.assert_close(model(with_said(batch, float("nan"))), told)
    events = batch.sequences["ratings"]
    other = replace(events, floats={**events.floats, "said": torch.rand_like(events.floats["said"])})
    changed = replace(batch, sequences={**batch.sequences, "ratings": other})
    torch.testing.assert_close(model(changed), told)


def test_the_student_follows_the_adapter_and_not_the_other_way_round():
    model = student()
    batch = with_said(random_batch(taught_inputs(), 8, seed=3), 0.3)
    model(batch)
    adapter = list(model.distillation.adapters["buy said"].parameters())
    followed = torch.autograd.grad(model.auxiliary, adapter, retain_graph=True)
    unlabelled = replace(batch, label_mask=torch.zeros_like(batch.label_mask))
    model(unlabelled)
    for gradient in torch.autograd.grad(model.auxiliary, adapter, retain_graph=True):
        assert (gradient == 0).all()
    assert any((g != 0).any() for g in followed)
    trunk = torch.autograd.grad(model.auxiliary, list(model.layers.parameters()), allow_unused=True)
    assert any(g is not None and (g != 0).any() for g in trunk)


def test_a_biased_teacher_helps_where_labels_are_few():
    """Labels follow a hidden direction, which the teacher knows but is far too sure of; every tenth label is known."""
    inputs = taught_inputs()
    direction = torch.tensor([1.5, -1.0, 0.0, 0.0, 0.5])

    def sample(seed, count):
        batch = random_batch(inputs, count, seed=seed)
        score = batch.dense @ direction
        generator = torch.Generator().manual_seed(seed)
        y = (torch.rand(count, generator=generator) < torch.sigmoid(score)).float()
        labels = torch.stack((batch.labels[:, 0], y), dim=1)
        mask = torch.zeros_like(batch.label_mask)
        mask[::10, 1] = True
        batch = replace(batch, labels=labels, label_mask=mask, weights=torch.ones(count))
        return with_said(batch, torch.sigmoid(6.0 * score + 2.0)), torch.sigmoid(score)

    train, _ = sample(0, 400)
    test, truth = sample(1, 800)

    def agreement(model):
        """Rank correlation of the student's logits with the true probabilities, after training."""
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(60):
            optimizer.zero_grad()
            model.loss(model(train), train).backward()
            optimizer.step()
        with torch.no_grad():
            logits = model.eval()(test)[:, 1]
        ranks = [t.argsort().argsort().double() for t in (logits, truth)]
        return torch.corrcoef(torch.stack(ranks))[0, 1].item()

    alone = student()
    alone.distillation = None
    torch.manual_seed(4)
    assert agreement(student()) > agreement(alone) + 0.03


@pytest.mark.parametrize(
    ("teacher", "told"),
    [
        (Teacher(task="bye", column="said"), "of task 'bye', which is none of"),
        (Teacher(task="buy", column="vector"), "no dense column of one number; those are"),
    ],
)
def test_a_teacher_that_is_not_there_is_refused(teacher, told):
    with pytest.raises(ValueError, match=told):
        GEM(preset("tiny", teachers=(teacher,)), taught_inputs())
    with pytest.raises(ValueError, match="must be positive"):
        Teacher(task="buy", column="said", weight=0.0)
