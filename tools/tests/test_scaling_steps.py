"""Rows of the scaling on cards, and who has which samples."""

import argparse

import numpy as np
import pytest
from scaling_steps import Bench, table


@pytest.mark.parametrize("world", [2, 4, 8])
def test_rows_have_names_of_their_own_and_divide_the_world(world):
    rows = table(world, [1, 4])
    names = [row.name for row in rows]
    assert len(set(names)) == len(names)
    assert "balanced, SMs, 4 parts" in names
    for row in rows:
        assert world % (row.config.shard_group or world) == 0
        assert world % row.config.table_copies == 0
        assert row.replayed == (row.graphs and row.config.experts == 1)


@pytest.mark.parametrize("balanced", [False, True])
def test_every_sample_is_in_one_part_of_one_rank(balanced):
    bench = Bench(argparse.Namespace(model="tiny", batch=16, parts=[1, 3]), 4)
    dealt = bench.deal(16, 3, balanced)
    assert [part.shape for part in dealt] == [(4, 16)] * 3
    own = np.arange(8 * 3 * 16).reshape(8, 3, 16)
    for number, part in enumerate(dealt):
        assert np.array_equal(np.sort(part, axis=None), own[:4, number].flatten())
        if not balanced:
            assert np.array_equal(part, own[:4, number])  # as in any other world
    (strong,) = bench.deal(4, 1, balanced, strong=True)
    assert np.array_equal(np.sort(strong, axis=None), own[0, 0])
    assert bench.work(dealt, 1) >= 1
    if balanced:
        assert bench.work(dealt, 1) < bench.work(bench.deal(16, 3, False), 1)
