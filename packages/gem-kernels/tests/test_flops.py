"""FLOPs and bytes against counting one by one."""

import numpy as np
import pytest
from gem_kernels import flops
from gem_kernels.testing import seen
from hypothesis import given, settings
from hypothesis import strategies as st

side = st.one_of(st.none(), st.integers(-1, 12))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.tuples(side, side)),
)
def test_pairs_are_those_that_attention_sees(lengths, causal, window):
    q, k = [a for a, _ in lengths], [b for _, b in lengths]
    expected = [int(seen(a, b, causal, window).sum()) for a, b in lengths]
    assert flops.pairs(q, k, causal=causal, window=window).tolist() == expected


def test_attention_counts_two_products_forward_and_five_backward():
    lengths = np.array([3, 0, 5])
    cost = flops.attention(lengths, heads=4, head_dim=8, kv_heads=2)
    pairs = 9 + 25
    assert cost.forward_flops == 2 * 2 * pairs * 8 * 4
    assert cost.backward_flops == 5 * 2 * pairs * 8 * 4
    q, kv, lse = 8 * 4 * 8 * 2, 2 * 8 * 2 * 8 * 2, 8 * 4 * 4
    assert cost.forward_bytes == q + kv + q + lse
    assert cost.backward_bytes == (q + kv + q + q + lse) + (q + kv)


def test_learned_queries_are_read_once():
    plain = flops.gdpa([4, 4, 4], [7, 0, 2], heads=2, head_dim=16)
    shared = flops.gdpa([4, 4, 4], [7, 0, 2], heads=2, head_dim=16, shared_q=True)
    assert shared.forward_flops == plain.forward_flops == 4 * 16 * 2 * 4 * 9
    assert plain.forward_bytes - shared.forward_bytes == 8 * 2 * 16 * 2


def test_blocks():
    cost = flops.block_attention([0, 64, 65, 130], heads=1, head_dim=4)
    assert cost.forward_flops == 4 * 4 * (64**2 + 64**2 + 1 + 2 * 64**2 + 4)
    assert cost.forward_bytes == 4 * 259 * 4 * 2
    assert cost.backward_bytes == 7 * 259 * 4 * 2


def test_norms_read_and_write_every_tensor_once():
    plain = flops.norm(10, 8)
    assert (plain.forward_flops, plain.backward_flops) == (0, 0)
    assert plain.forward_bytes == (80 + 80) * 2 + 8 * 4  # x, y; weight
    assert plain.backward_bytes == (80 + 80 + 80) * 2 + (8 + 8) * 4  # x, dy, dx; weight and its gradient
    full = flops.norm(10, 8, layer=True, residual=True, element_size=4, weight_size=2)
    assert full.forward_bytes == 4 * 80 * 4 + 2 * 8 * 2
    assert full.backward_bytes == 4 * 80 * 4 + 4 * 8 * 2
    assert flops.norm(10, 8, weight=False).forward_bytes == 320
    with pytest.raises(ValueError, match="must not be negative; got -1 and 8"):
        flops.norm(-1, 8)


def test_jagged_helpers_move_rows():
    recent = flops.most_recent([2, 0, 7], k=3, width=4)
    assert recent.forward_bytes == (5 + 9) * 8  # 2 + 0 + 3 rows read, 3 sequences of 3 written
    assert recent.backward_bytes == (5 + 9) * 8  # 9 rows of values
    joined = flops.jagged_concat([2, 0], [1, 3], width=4, element_size=4)
    assert joined.forward_bytes == joined.backward_bytes == 2 * 6 * 16
    added = flops.jagged_add([2, 0, 7], width=4, bias_size=4)
    assert added.forward_bytes == 2 * 9 * 8 + 3 * 16
    assert added.backward_bytes == 9 * 8 + 3 * 16


def test_dense_and_jagged():
    dense = flops.to_dense([2, 0, 7], longest=5, width=4)
    assert dense.forward_bytes == (7 + 15) * 8  # 2 + 0 + 5 rows read, all places written
    assert dense.backward_bytes == 2 * 7 * 8


def test_rotary_and_positions():
    assert flops.rotary(10, heads=3, head_dim=8).forward_bytes == 2 * 10 * 24 * 2 + 40
    counted, given = (flops.block_attention([10], heads=2, head_dim=8, positions=p) for p in (False, True))
    assert given.forward_bytes - counted.forward_bytes == 40
    assert given.backward_bytes - counted.backward_bytes == 40
    assert given.forward_flops == counted.forward_flops


def test_norm_linear():
    cost = flops.norm_linear(100, 8, 4)
    assert (cost.forward_flops, cost.backward_flops) == (2 * 3200, 4 * 3200)
    assert cost.forward_bytes == (800 + 400 + 32 + 8) * 2
    assert cost.backward_bytes == (800 + 800 + 400 + 2 * (32 + 8)) * 2  # x, dx, dy; weight, gain and their gradients


def test_errors():
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        flops.pairs([3, -1])
    with pytest.raises(ValueError, match="as many sequences; got 1 and 2"):
        flops.pairs([3], [1, 2])
    with pytest.raises(ValueError, match="window sides"):
        flops.pairs([3], window=(-2, 0))
