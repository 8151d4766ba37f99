from __future__ import annotations

import numpy as np
import pytest
from gem_data.sorting import order_of
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 2), st.integers(-(10**6), 10**6)), max_size=60),
    keys=st.integers(1, 3),
    wide=st.booleans(),
    stable=st.booleans(),
)
def test_the_order_is_that_of_tuples(rows, keys, wide, stable):
    columns = [np.array([r[k] for r in rows], np.int64) for k in range(keys)]
    if wide:  # too wide to be packed into one number
        columns = [c * 2**40 for c in columns]
    order = order_of(columns, stable=stable)
    assert sorted(order.tolist()) == list(range(len(rows)))
    of = [tuple(c[i] for c in columns) for i in order.tolist()]
    assert of == sorted(of)
    if stable:
        assert order.tolist() == sorted(range(len(rows)), key=lambda i: tuple(c[i] for c in columns))


@pytest.mark.parametrize("low", [-(2**63), 2**63 - 2])
def test_the_ends_of_the_range(low):
    values = np.array([low + 1, low, 0, low], np.int64)
    assert values[order_of([values], stable=True)].tolist() == sorted(values.tolist())
