"""What users may get wrong, and what they are told."""

import pytest
import torch
from gem_kernels import (
    block_attention,
    gated_heads,
    gdpa,
    jagged_attention,
    jagged_split,
    jagged_to_padded,
    most_recent,
    norm_linear,
    rms_norm,
    rope,
    rotary_heads,
    rote,
)
from gem_kernels.testing import check_offsets, offsets_of, random_heads

X = random_heads(6, 4, 8)
OFFSETS = offsets_of([4, 2])


def attend(q=X, k=X, v=X, q_offsets=OFFSETS, k_offsets=OFFSETS, max_q=4, max_k=4, **options):
    return jagged_attention(q, k, v, q_offsets, k_offsets, max_q, max_k, **options)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": X[0]}, ValueError, r"q must be \[T, H, D\]; got \(4, 8\)"),
        ({"q": X.int()}, TypeError, "q must be float16.*got torch.int32"),
        ({"k": X.double()}, TypeError, "share a dtype; q is torch.float32, k is torch.float64"),
        ({"v": X.to("meta")}, ValueError, "share a device; q is on cpu, v is on meta"),
        ({"v": X[:5]}, ValueError, "k and v must have one shape"),
        ({"k": X[:, :3], "v": X[:, :3]}, ValueError, "must divide that of query heads; got 3 and 4"),
        ({"k": X[..., :4], "v": X[..., :4]}, ValueError, "same head dimension; got 8 and 4"),
        ({"q": None}, TypeError, "q must be a tensor; got NoneType"),
        ({"k_offsets": [0, 4, 6]}, TypeError, "k_offsets must be a tensor; got list"),
        ({"q_offsets": OFFSETS.float()}, TypeError, "q_offsets must be int32 or int64; got torch.float32"),
        ({"k_offsets": OFFSETS[None]}, ValueError, r"k_offsets must be \[B \+ 1\]; got \(1, 3\)"),
        ({"k_offsets": OFFSETS.to("meta")}, ValueError, "k_offsets must be on cpu with the values; it is on meta"),
        ({"k_offsets": offsets_of([4, 1])}, ValueError, "from 0 to the number of tokens, 6; it runs from 0 to 5"),
        ({"k_offsets": torch.tensor([1, 4, 6])}, ValueError, "it runs from 1 to 6"),
        ({"k_offsets": torch.tensor([0, 8, 6])}, ValueError, "must not decrease; one sequence has length -2"),
        ({"q_offsets": offsets_of([6]), "max_q": 6}, ValueError, "must hold as many sequences; got 1 and 2"),
        ({"max_k": 3}, ValueError, "k_offsets holds a sequence of length 4, longer than the maximal length given, 3"),
        ({"max_q": 3}, ValueError, "q_offsets holds a sequence of length 4"),
        ({"q": X[..., :0], "k": X[..., :0], "v": X[..., :0]}, ValueError, "head dimension must be at least 1; q is"),
        ({"max_k": -1}, ValueError, "max_k must be at least 0; got -1"),
        ({"max_k": 4.0}, TypeError, "max_k must be an int; got float"),
        ({"max_q": 4.0}, TypeError, "max_q must be an int; got float"),
        ({"max_q": torch.tensor(4)}, TypeError, "max_q must be an int; got Tensor"),
        ({"scale": "1"}, TypeError, "scale must be a number; got str"),
        ({"scale": torch.tensor(1.0)}, TypeError, "scale must be a number; got Tensor"),
        ({"scale": float("nan")}, ValueError, "scale must be finite; got nan"),
        ({"q_offsets": None}, ValueError, "number of learned queries, 6; got 4"),
        ({"window": (1, 2, 3)}, ValueError, r"window must be \(left, right\)"),
        ({"window": 3}, ValueError, r"window must be \(left, right\); got 3"),
        ({"window": (1.5, 0)}, TypeError, r"window sides must be ints or None; got \(1.5, 0\)"),
        ({"window": (-2, 1)}, ValueError, "window sides must be non-negative, or -1 or None"),
        ({"bias": torch.zeros(2, 4, 4, 3)}, ValueError, r"bias must be \[2 or 1, 4 or 1, 4, 4\].*got \(2, 4, 4, 3\)"),
        ({"bias": torch.zeros(4, 4)}, ValueError, r"got \(4, 4\)"),
        ({"bias": torch.ones(1, 1, 4, 4).bool()}, TypeError, "bias must be a floating tensor; got torch.bool"),
        ({"bias": torch.zeros(1, 1, 4, 4, device="meta")}, ValueError, "bias must be on cpu"),
    ],
)
def test_attention_names_what_is_wrong(change, error, message):
    with pytest.raises(error, match=message):
        attend(**change)


def test_gdpa_block_and_rotary_name_what_is_wrong():
    with pytest.raises(ValueError, match="unknown activation 'tanh'; expected one of identity"):
        gdpa(X, X, X, OFFSETS, OFFSETS, 4, 4, activation="tanh")
    with pytest.raises(ValueError, match="longer than the maximal length given, 3"):
        gdpa(X, X, X, OFFSETS, OFFSETS, 4, 3)
    with pytest.raises(ValueError, match="block must be 16, 32, 64 or 128; got 48"):
        block_attention(X, X, X, OFFSETS, block=48)
    with pytest.raises(ValueError, match="as many tokens; got 6 and 5"):
        block_attention(X, X[:5], X[:5], OFFSETS)
    with pytest.raises(TypeError, match="out_scale must be a number; got NoneType"):
        gdpa(X, X, X, OFFSETS, OFFSETS, 4, 4, out_scale=None)
    with pytest.raises(TypeError, match="rope, if it is no Rope, must be a number; got tuple"):
        block_attention(X, X, X, OFFSETS, rope=(X, X))
    with pytest.raises(ValueError, match="even head dimension; got 7"):
        rope(X[..., :7], OFFSETS)
    with pytest.raises(ValueError, match="even head dimension; got 7"):
        block_attention(X[..., :7], X[..., :7], X[..., :7], OFFSETS, rope=10.0)
    with pytest.raises(ValueError, match="either offsets or positions"):
        rope(X, None)
    with pytest.raises(ValueError, match=r"positions must be \[6\].*got \(5,\)"):
        rope(X, OFFSETS, positions=torch.zeros(5))
    with pytest.raises(ValueError, match="base must be positive; got 0"):
        rope(X, OFFSETS, base=0.0)
    with pytest.raises(ValueError, match="t_scale must be positive; got 0"):
        rote(X, torch.zeros(6), t_scale=0.0)


def test_norms_projections_and_sequences_name_what_is_wrong():
    x = X.flatten(1)
    with pytest.raises(TypeError, match="eps must be a number; got str"):
        rms_norm(x, eps="1e-6")
    with pytest.raises(ValueError, match="eps must be positive; got 0"):
        norm_linear(x, x[0], x, eps=0.0)
    with pytest.raises(ValueError, match="heads must be at least 1; got 0"):
        gated_heads(x, 4, 0)
    with pytest.raises(TypeError, match="hidden must be an int; got float"):
        gated_heads(x, 4.0, 2)
    with pytest.raises(TypeError, match="heads must be an int; got tuple"):
        rotary_heads(x, (2, 2), (None, None))
    with pytest.raises(TypeError, match="turns must be a sequence of Turn; got int"):
        rotary_heads(x, 2, (None, None), turns=1)
    with pytest.raises(TypeError, match="k must be an int; got float"):
        most_recent(x, OFFSETS, 2.5)
    with pytest.raises(TypeError, match="longest must be an int; got float"):
        jagged_to_padded(x, OFFSETS, 4.0)
    with pytest.raises(ValueError, match="a_total must be from 0 to the number of tokens, 6; got 7"):
        jagged_split(x, OFFSETS, OFFSETS, 7)


def test_offsets_can_be_checked_by_hand():
    check_offsets("offsets", OFFSETS, 6, 4)
    with pytest.raises(ValueError, match="longer than the maximal length given, 3"):
        check_offsets("offsets", OFFSETS, 6, 3)


@pytest.mark.gpu
def test_a_gpu_checks_values_only_when_asked():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    x, offsets = X.cuda(), OFFSETS.cuda()
    with pytest.raises(ValueError, match="longer than the maximal length given, 3"):
        attend(x, x, x, offsets, offsets, 3, 3, validate=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(x, x, x, offsets, offsets, 4, 4)
        gdpa(x, x, x, offsets, offsets, 4, 4)
        block_attention(x, x, x, offsets, rope=10.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
