"""Q, K and V of jagged attention to E4M3 and scales, as the forward reads them, and back, in one pass; Gluon on Hopper.

Q has a scale for every row. K and V have one for each block of 128 keys that begins at a multiple of 128 from the
sequence's start; V is written transposed, [D, 128] for each block, behind its sequence's end 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gem_lowprec.tiles import _larger, _powers

ROWS = gl.constexpr(128)


@gluon.jit
def _tile(x_ptr, start, first, length, head, row, column, R: gl.constexpr, D: gl.constexpr):
    """Rows first.. of one head as float32, 0 behind the sequence's end."""
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, R))
    c = gl.arange(0, D, gl.SliceLayout(0, R))
    at = x_ptr + ((start + r).to(gl.int64) * row)[:, None] + (head * column + c)[None, :]
    return gl.load(at, mask=(r < length)[:, None], other=0.0).to(gl.float32)


@gluon.jit
def _largest(x):
    return gl.reduce(gl.reduce(gl.abs(x), 1, _larger), 0, _larger)


@gluon.jit
def _store_rows(data, to_ptr, start, first, length, head, heads, R: gl.constexpr, D: gl.constexpr):
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, R))
    c = gl.arange(0, D, gl.SliceLayout(0, R))
    at = to_ptr + ((start + r).to(gl.int64) * (heads * D))[:, None] + (head * D + c)[None, :]
    gl.store(at, data.to(gl.float8e4nv).to(gl.uint8, bitcast=True), mask=(r < length)[:, None])


@gluon.jit
def _queries(
    q_ptr, to_ptr, scale_ptr, start, first, length, head, heads, row, column,
    D: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [4, 1], [1, 0])
    x = _tile(q_ptr, start, first, length, head, row, column, R, D)
    scale, inverse = _powers(gl.reduce(gl.abs(x), 1, _larger), THRESHOLD, EMAX)
    _store_rows(x * inverse[:, None], to_ptr, start, first, length, head, heads, R, D)
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, R))
    gl.store(scale_ptr + (start + r).to(gl.int64) * heads + head, scale, mask=r < length)


@gluon.jit
def _keys(
    k_ptr, to_ptr, scale_ptr, start, first, length, head, heads, row, column,
    D: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr,
):  # fmt: skip
    """`scale_ptr`: where this block's scale goes."""
    R: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [4, 1], [1, 0])
    x = _tile(k_ptr, start, first, length, head, row, column, R, D)
    scale, inverse = _powers(_largest(x), THRESHOLD, EMAX)
    _store_rows(x * inverse, to_ptr, start, first, length, head, heads, R, D)
    gl.store(scale_ptr, scale)


@gluon.constexpr_function
def _turned(dim):
    """The layout of V^T [dim, 128] in which a thread holds 16 keys of 8 columns, as in V's."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        lane_bases=[[8, 0], [16, 0], [0, 16], [0, 32], [0, 64]],
        warp_bases=[[32, 0], [64 if dim == 128 else 0, 0]],
        block_bases=[],
        shape=[dim, 128],
    )


@gluon.jit
def _values(
    v_ptr, to_ptr, log_ptr, start, first, length, head, row, column,
    D: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """`to_ptr`, `log_ptr`: where this block of V^T and log2 of its scale go.

    A thread holds 16 keys x 8 columns: the bytes of a line of V^T that lie side by side, whatever their order.
    """
    L: gl.constexpr = gl.BlockedLayout([16, 8], [8, 4], [1, 4], [1, 0])
    T: gl.constexpr = _turned(D)
    x = _tile(v_ptr, start, first, length, head, row, column, L, D)
    amax = _largest(x)
    scale, inverse = _powers(gl.maximum(amax, LEAST), THRESHOLD, EMAX)  # LEAST: see `quantise.LEAST`
    power = (scale.to(gl.int32, bitcast=True) >> 23) - 127
    gl.store(log_ptr, gl.where(amax == amax, power.to(gl.float32), amax))
    z = (x * inverse).reshape([8, 2, 4, 2, D]).permute((0, 2, 1, 3, 4)).reshape([ROWS, D]).permute((1, 0))
    data = gl.convert_layout(z, T).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    d = gl.arange(0, D, gl.SliceLayout(1, T))
    s = gl.arange(0, ROWS, gl.SliceLayout(0, T))
    gl.store(to_ptr + (d * ROWS)[:, None] + s[None, :], data)


@gluon.jit(do_not_specialize=["blocks", "heads", "kv_heads"])
def quantise_kernel(
    q_ptr, k_ptr, v_ptr, q_offsets, k_offsets, qd_ptr, qs_ptr, kd_ptr, vd_ptr, kvs_ptr, blocks, heads, kv_heads,
    q_row, q_head, k_row, k_head, v_row, v_head,
    D: gl.constexpr, THRESHOLD: gl.constexpr, EMAX: gl.constexpr, LEAST: gl.constexpr,
):  # fmt: skip
    """One block of 128 rows of one head of Q, K or V for each program of four warps."""
    b = gl.program_id(0) // blocks
    j = gl.program_id(0) - b * blocks
    y = gl.program_id(1)
    offsets = q_offsets
    if y >= heads:
        offsets = k_offsets
    start = gl.load(offsets + b).to(gl.int32)
    length = gl.load(offsets + b + 1).to(gl.int32) - start
    first = j * ROWS
    if first < length:
        if y < heads:
            _queries(q_ptr, qd_ptr, qs_ptr, start, first, length, y, heads, q_row, q_head, D, THRESHOLD, EMAX)
        else:
            head = (y - heads) % kv_heads
            block = (start // ROWS + b + j).to(gl.int64) * kv_heads + head
            if y < heads + kv_heads:
                _keys(
                    k_ptr, kd_ptr, kvs_ptr + block * 2, start, first, length, head, kv_heads, k_row, k_head,
                    D, THRESHOLD, EMAX,
                )  # fmt: skip
            else:
                _values(
                    v_ptr, vd_ptr + block * (D * ROWS), kvs_ptr + block * 2 + 1, start, first, length, head,
                    v_row, v_head, D, THRESHOLD, EMAX, LEAST,
                )  # fmt: skip


@gluon.jit
def _rows_back(data_ptr, to_ptr, scale, start, first, length, head, heads, R: gl.constexpr, D: gl.constexpr):
    """`scale`: of each row, or of all of them."""
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, R))
    c = gl.arange(0, D, gl.SliceLayout(0, R))
    at = ((start + r).to(gl.int64) * (heads * D))[:, None] + (head * D + c)[None, :]
    data = gl.load(data_ptr + at, mask=(r < length)[:, None], other=0)
    x = data.to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale
    gl.store(to_ptr + at, x.to(to_ptr.dtype.element_ty), mask=(r < length)[:, None])


@gluon.jit
def _values_back(data_ptr, to_ptr, scale, start, first, length, head, heads, D: gl.constexpr):
    """`data_ptr`: where this block of V^T is."""
    L: gl.constexpr = gl.BlockedLayout([16, 8], [8, 4], [1, 4], [1, 0])
    T: gl.constexpr = _turned(D)
    d = gl.arange(0, D, gl.SliceLayout(1, T))
    s = gl.arange(0, ROWS, gl.SliceLayout(0, T))
    z = gl.load(data_ptr + (d * ROWS)[:, None] + s[None, :]).to(gl.float8e4nv, bitcast=True).to(gl.float32) * scale
    z = z.permute((1, 0)).reshape([8, 4, 2, 2, D]).permute((0, 2, 1, 3, 4)).reshape([ROWS, D])
    v = gl.convert_layout(z, L).to(to_ptr.dtype.element_ty)
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    c = gl.arange(0, D, gl.SliceLayout(0, L))
    at = ((start + r).to(gl.int64) * (heads * D))[:, None] + (head * D + c)[None, :]
    gl.store(to_ptr + at, v, mask=(r < length)[:, None])


@gluon.jit(do_not_specialize=["blocks", "heads", "kv_heads"])
def dequantise_kernel(
    qd_ptr, qs_ptr, kd_ptr, vd_ptr, kvs_ptr, q_offsets, k_offsets, q_ptr, k_ptr, v_ptr, blocks, heads, kv_heads,
    D: gl.constexpr,
):  # fmt: skip
    """The way back, into contiguous Q, K and V; one block of 128 rows of one head for each program of four warps."""
    R: gl.constexpr = gl.BlockedLayout([1, 16], [512 // D, D // 16], [4, 1], [1, 0])
    b = gl.program_id(0) // blocks
    j = gl.program_id(0) - b * blocks
    y = gl.program_id(1)
    offsets = q_offsets
    if y >= heads:
        offsets = k_offsets
    start = gl.load(offsets + b).to(gl.int32)
    length = gl.load(offsets + b + 1).to(gl.int32) - start
    first = j * ROWS
    if first < length:
        if y < heads:
            r = gl.minimum(first + gl.arange(0, ROWS, gl.SliceLayout(1, R)), length - 1)
            scales = gl.load(qs_ptr + (start + r).to(gl.int64) * heads + y)
            _rows_back(qd_ptr, q_ptr, scales[:, None], start, first, length, y, heads, R, D)
        else:
            head = (y - heads) % kv_heads
            block = (start // ROWS + b + j).to(gl.int64) * kv_heads + head
            if y < heads + kv_heads:
                _rows_back(kd_ptr, k_ptr, gl.load(kvs_ptr + block * 2), start, first, length, head, kv_heads, R, D)
            else:
                scale = gl.exp2(gl.load(kvs_ptr + block * 2 + 1))
                _values_back(vd_ptr + block * (D * ROWS), v_ptr, scale, start, first, length, head, kv_heads, D)
