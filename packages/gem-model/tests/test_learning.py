"""The model learns: it can memorise, and it can find what only the candidate's match in the history tells."""

import dataclasses

import pytest
import torch
from gem_model import GEM, ModelInputs, Source, Table, preset
from gem_model.testing import RandomBatch, RandomIds, RandomSequence, example_inputs, random_batch


def train(model, batches, steps, lr=3e-3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    for step in range(steps):
        batch = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("attention", ["softmax", "gdpa"])
def test_memorises_a_small_random_dataset(attention):
    inputs = example_inputs()
    torch.manual_seed(0)
    model = GEM(preset("tiny", attention=attention), inputs)
    batch = random_batch(inputs, 32)
    assert train(model, [batch], 120, lr=1e-2) < 0.05


def match_inputs():
    return ModelInputs(
        tables=(Table(name="item", rows=20, dim=16), Table(name="rating", rows=2, dim=16)),
        sources=(Source(name="events", ids=(("item", "item"), ("rating", "rating")), max_len=6),),
        sparse=(("item", "item"),),
        tasks=("like",),
    )


def match_batch(size, seed):
    """The label is how the user rated the very same item before: one of six random events holds it."""
    g = torch.Generator().manual_seed(seed)
    items = torch.rand(size, 20, generator=g).argsort(dim=1)[:, :6]
    ratings = torch.randint(0, 2, (size, 6), generator=g)
    which = torch.randint(0, 6, (size, 1), generator=g)
    offsets = torch.arange(size + 1)
    return RandomBatch(
        sequences={
            "events": RandomSequence(
                ids={"item": items.flatten(), "rating": ratings.flatten()},
                floats={},
                time=torch.arange(6).repeat(size) * 60,
                offsets=offsets * 6,
                max_len=6,
            )
        },
        sparse={"item": RandomIds(values=items.gather(1, which)[:, 0], offsets=offsets)},
        dense=torch.zeros(size, 0),
        time=torch.full((size,), 1000),
        labels=ratings.gather(1, which).float(),
        label_mask=torch.ones(size, 1, dtype=torch.bool),
        weights=torch.ones(size),
    )


def test_finds_the_candidate_in_the_history():
    """Neither the candidate nor the history alone says anything; only attention from one to the other does."""
    torch.manual_seed(0)
    model = GEM(preset("tiny", width=32, layers=2), match_inputs())
    train(model, [match_batch(128, seed) for seed in range(100)], 100)
    model.eval()
    test = match_batch(2000, 10_000)
    with torch.no_grad():
        accuracy = ((model(test) > 0) == (test.labels > 0.5)).float().mean().item()
    assert accuracy > 0.95
    shuffled = dataclasses.replace(
        test, sparse={"item": RandomIds(values=test.sparse["item"].values.roll(1), offsets=test.sparse["item"].offsets)}
    )
    with torch.no_grad():
        blind = ((model(shuffled) > 0) == (test.labels > 0.5)).float().mean().item()
    assert blind < 0.75  # another candidate: the same history no longer tells
