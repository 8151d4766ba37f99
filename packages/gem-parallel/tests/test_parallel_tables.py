from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from gem_parallel import init_tables
from gem_parallel.sparse import initial as tables
from gem_parallel.testing import SmallModel
from hypothesis import given, settings
from hypothesis import strategies as st


def expected(seed: int, name: str, rows: int, cols: int, bound: float) -> np.ndarray:
    """The documented formula in unsigned 64-bit arithmetic."""
    key = np.uint64(int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest(), "little"))

    def mix(x):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    with np.errstate(over="ignore"):
        bits = mix(mix(np.arange(rows * cols, dtype=np.uint64) ^ key) + key) >> np.uint64(40)
    odd = 2 * bits.astype(np.int64) - ((1 << 24) - 1)
    return (odd.astype(np.float32) * np.float32(bound / (1 << 24))).reshape(rows, cols)


def test_values_follow_the_formula():
    model = SmallModel(device="cpu")
    filled = init_tables(model, seed=7)
    assert sorted(filled) == [
        "bags.embedding_bags.context.weight",
        "bags.embedding_bags.user.weight",
        "sequences.embeddings.action.weight",
        "sequences.embeddings.item.weight",
    ]
    for name in filled:
        table = model.get_parameter(name).detach().numpy()
        want = expected(7, name.split(".")[-2], *table.shape, 1 / np.sqrt(len(table)))
        np.testing.assert_array_equal(table, want)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 50), st.integers(0, 8), st.integers(1, 40), st.integers(1, 8), st.integers(-(2**63), 2**63 - 1))
def test_a_block_is_a_slice_of_the_table(row, col, height, width, key):
    cols = col + width + 3
    whole = torch.full((row + height + 2, cols), torch.nan)
    tables._fill(whole, 0, 0, cols, key, 0.5)
    block = torch.full((height, width), torch.nan)
    tables._fill(block, row, col, cols, key, 0.5)
    assert torch.equal(block, whole[row : row + height, col : col + width])


def test_chunks_do_not_show(monkeypatch):
    whole = torch.full((100, 6), torch.nan)
    tables._fill(whole, 0, 0, 6, 123, 1.0)
    monkeypatch.setattr(tables, "_CHUNK", 50)
    chunked = torch.full((100, 6), torch.nan)
    tables._fill(chunked, 0, 0, 6, 123, 1.0)
    assert torch.equal(whole, chunked)


def test_values_are_uniform_and_tables_differ():
    first, second = torch.empty(20000, 8), torch.empty(20000, 8)
    tables._fill(first, 0, 0, 8, tables._key(0, "a"), 1.0)
    tables._fill(second, 0, 0, 8, tables._key(0, "b"), 1.0)
    assert first.abs().max() < 1
    counts = torch.histc(first, bins=64, min=-1, max=1)
    mean = first.numel() / 64
    # chi-square with 63 degrees of freedom: 5 standard deviations above its mean
    assert ((counts - mean).square() / mean).sum() < 63 + 5 * np.sqrt(2 * 63)
    for a, b in ((first, second), (first[:, 0], first[:, 1]), (first[:-1], first[1:])):
        correlation = (a * b).mean() / (1 / 3)
        assert correlation.abs() < 5 / np.sqrt(a.numel())


def test_std_and_seed():
    model = SmallModel(device="cpu", rows={"item": 4000, "action": 10, "user": 41, "context": 23})
    init_tables(model, seed=1, std=0.02)
    weight = model.sequences.embeddings["item"].weight.detach().clone()
    assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    init_tables(model, seed=2, std=0.02)
    assert not torch.equal(weight, model.sequences.embeddings["item"].weight)
