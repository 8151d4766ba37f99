import numpy as np
import pytest
import torch
from gem_model import GEM, TowerConfig, batch_flops, preset
from gem_model.flops import unit_flops, visible_pairs
from gem_model.sequence import HistoryAttention
from gem_model.testing import example_inputs, random_batch
from torch.utils.flop_counter import FlopCounterMode


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layers": 3, "self_attention_every": 2, "attention": "gdpa", "width": 24},
        {"pma_queries": 0, "recent": 0, "pffn_tokens": 0, "ff_mult": 1.5},
        {"experts": ("wukong",), "layers": 2},
        {"experts": ("dcn", "attention", "dcn"), "cross_rank": 5, "layers": 2},
        {"pma_seeds": 7, "pma_queries": 3},
        {"layers": 2, "towers": (TowerConfig(source="views", width=12, heads=1, layers=1),)},
        {"layers": 2, "towers": tuple(TowerConfig(source=s, layers=1) for s in ("ratings", "views"))},
        {"n_sum": 3, "interaction_rank": 5, "interaction_hidden": 2, "n_dense": 3},
        {"evidence_heads": 3, "towers": (TowerConfig(source="views", layers=0),)},
        {"sequence_layer": "hstu", "layers": 3, "self_attention_every": 2},
        {"dense_buckets": 4},
        {"evidence_heads": 3, "evidence_dim": 9, "evidence_values": 2, "reader": (7, 5), "affinity_heads": 2},
    ],
)
def test_flops_are_those_that_torch_counts(changes):
    """With equal lengths the plain PyTorch reference pads nothing, so torch counts exactly the useful FLOPs."""
    inputs = example_inputs()
    config = preset("tiny", **changes)
    model = GEM(config, inputs)
    lengths = {"ratings": [6] * 5, "views": [4] * 5}
    batch = random_batch(inputs, 5, lengths=lengths)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batch)
    assert batch_flops(config, inputs, lengths) == counter.get_total_flops()
    counted = counter.get_flop_counts()
    for unit, flops in unit_flops(config, inputs, lengths).items():
        if unit.startswith("layers"):
            assert flops == sum(counted[f"GEM.{unit}"].values()), unit


def test_training_is_three_forward_passes(monkeypatch):
    """Backward costs two forward passes, save for the gradients of inputs that need none: the first linear maps'.

    Where CLS tokens ask among the events, one product for their few rows is made again rather than a gradient copied.
    """
    monkeypatch.setattr(HistoryAttention, "together", False)
    inputs = example_inputs()
    config = preset("tiny", layers=2)
    model = GEM(config, inputs)
    lengths = {"ratings": [8] * 4, "views": [6] * 4}
    batch = random_batch(inputs, 4, lengths=lengths)
    with FlopCounterMode(display=False) as counter:
        model.loss(model(batch), batch).backward()
    ratio = counter.get_total_flops() / batch_flops(config, inputs, lengths)
    assert 2.95 < ratio <= 3.0


def test_flops_count_events_not_padding():
    inputs = example_inputs()
    config = preset("tiny")
    several = {"ratings": np.array([3, 0, 9]), "views": torch.tensor([1, 6, 0])}
    one_by_one = sum(batch_flops(config, inputs, {k: [int(v[i])] for k, v in several.items()}) for i in range(3))
    assert batch_flops(config, inputs, several) == one_by_one


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 20])
@pytest.mark.parametrize("length", [0, 1, 2, 5, 12])
def test_visible_pairs(length, causal, window):
    reach = length if window is None else window
    pairs = sum(abs(i - j) <= reach and (j <= i or not causal) for i in range(length) for j in range(length))
    assert visible_pairs(length, causal=causal, window=window) == pairs


@pytest.mark.parametrize("length", [0, 1, 15, 16, 33])
def test_visible_pairs_of_blocks(length):
    pairs = sum(i // 16 == j // 16 for i in range(length) for j in range(length))
    assert visible_pairs(length, causal=False, window=None, block=16) == pairs


def test_what_does_not_fit_is_named():
    inputs = example_inputs()
    with pytest.raises(ValueError, match=r"expected lengths of the sources \['ratings', 'views'\], got \['ratings'\]"):
        batch_flops(preset("tiny"), inputs, {"ratings": [1]})
    with pytest.raises(ValueError, match=r"one number of samples, got \[1, 2\]"):
        batch_flops(preset("tiny"), inputs, {"ratings": [1], "views": [1, 2]})
