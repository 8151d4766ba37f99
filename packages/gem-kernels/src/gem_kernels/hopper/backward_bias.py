"""The bias of a block of 64 keys x 64 queries as the Hopper backward needs it: turned, since scores are S^T there."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_kernels.hopper.backward_block import BLOCK

LOG2E = gl.constexpr(1.4426950408889634)
# S^T in pairs of queries: [keys, pairs], to every thread the pairs of which it holds the scores.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[8, 0], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)


@gluon.jit
def bias_at(bias, where, BIAS: gl.constexpr):
    """A bias (pointer and strides of sequences, heads and rows, in units of BIAS numbers) from (sequence, head, query,
    key) on: a pointer, and the stride of rows, which are those of queries.
    """
    ptr, batch, heads, row = bias
    sequence, head, query, key = where
    if BIAS == 2:
        ptr = ptr.to(gl.pointer_type(gl.int32))
    at = sequence.to(gl.int64) * batch + head.to(gl.int64) * heads + query.to(gl.int64) * row
    return ptr + at + key // BIAS, row


@gluon.jit
def load_bias(place, query, q_left, k_left, SL: gl.constexpr, BIAS: gl.constexpr):
    """The bias of queries `query`.. of the place, `q_left` of them there, and its keys, `k_left` of them there: to be
    read by `bias_of`, later, so that it comes while products are under way.

    In pairs (BIAS 2): rows of the bias are those of queries, where a thread needs two queries of a key. So it loads two
    keys of a query, eight rows of 16 bytes in a warp, and `movmatrix` turns blocks of 8 x 8 in registers.
    """
    ptr, row = place
    # Read here: addresses computed from it ahead of every loop would cost registers all along.
    step = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(row)], gl.int32, False, 1)
    ptr += query.to(gl.int64) * step
    if BIAS == 2:
        r = gl.arange(0, BLOCK, gl.SliceLayout(1, PAIRS))[:, None]
        c = gl.arange(0, BLOCK // 2, gl.SliceLayout(0, PAIRS))[None, :]
        q = (c // 4) * 8 + r % 8
        pair = (r // 8) * 4 + c % 4
        loaded = gl.load(ptr + (q * step + pair), mask=(q < q_left) & (2 * pair < k_left), other=0)
    else:
        key = gl.arange(0, BLOCK, gl.SliceLayout(1, SL))[:, None]
        q = gl.arange(0, BLOCK, gl.SliceLayout(0, SL))[None, :]
        loaded = gl.load(ptr + (q * step + key), mask=(q < q_left) & (key < k_left), other=0.0)
    return loaded


@gluon.jit
def biased(S, scale, loaded, HALF: gl.constexpr, SL: gl.constexpr, BIAS: gl.constexpr):
    """Scores in base 2: S^T, of which `scale` holds log2(e), with what `load_bias` found, in pairs of type HALF."""
    if BIAS == 2:
        loaded = gl.inline_asm_elementwise(
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [loaded], gl.int32, False, 1
        )
        if HALF.is_bf16():
            low = (loaded << 16).to(gl.float32, bitcast=True)
            high = (loaded & -65536).to(gl.float32, bitcast=True)
        else:
            low = loaded.to(gl.int16).to(HALF, bitcast=True).to(gl.float32)
            high = (loaded >> 16).to(gl.int16).to(HALF, bitcast=True).to(gl.float32)
        b = gl.convert_layout(gl.join(low, high).reshape([BLOCK, BLOCK]), SL, True)
    else:
        b = loaded.to(gl.float32)
    return S * scale + b * LOG2E
