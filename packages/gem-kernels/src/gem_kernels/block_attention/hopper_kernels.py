"""Block attention on Hopper: persistent Gluon kernels that keep the memory busy.

A program owns no tile for long: it walks the (block, head) pairs, whose Q, K, V (and dO) come whole by TMA into one of
SLOTS sets of buffers and whose results leave by TMA from the same buffers. One warpgroup computes; what hides its time
is that several programs share an SM, and that with SLOTS > 1 the next pair is on its way meanwhile.

The rotary embedding turns register tiles: pairs of columns lie in one thread in the layout of the tensor cores'
results, which is also that of their left operand. ROPE 1 counts positions from the block's start, which the scores
cannot tell from the sequence's start as they depend on differences alone; the angles are below 64 and one
special-function instruction is exact to 4e-6. ROPE 2 reads positions, and takes whole turns off first.

Only a sequence's last block has rows that are not its own; they are zeroed before use and not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gem_kernels.hopper.activations import activate, activate_with_grad

BLOCK = gl.constexpr(64)


@gluon.jit
def _cos(x):
    """By one instruction, and not out of a loop: a table in registers would cost more than it saves."""
    return gl.inline_asm_elementwise("cos.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _sin(x):
    return gl.inline_asm_elementwise("sin.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _positions(positions_ptr, start, length, ROPE: gl.constexpr, L: gl.constexpr):
    """Float32 positions of the block's rows."""
    r = gl.arange(0, BLOCK, L)
    if ROPE == 2:
        p = gl.load(positions_ptr + start + r, mask=r < length, other=0.0)
    else:
        # Opaque, so that the angles of all pairs are not kept in registers over the whole loop.
        p = gl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [r.to(gl.float32)], dtype=gl.float32, is_pure=False, pack=1
        )
    return p


@gluon.jit
def _turns(positions_ptr, start, length, D: gl.constexpr, ROPE: gl.constexpr, LOG2_BASE: gl.constexpr, L: gl.constexpr):
    """cos and sin of position * base^(-2 i / D), [BLOCK, D / 2]."""
    p = _positions(positions_ptr, start, length, ROPE, gl.SliceLayout(1, L))
    i = gl.arange(0, D // 2, gl.SliceLayout(0, L)).to(gl.float32)
    angle = p[:, None] * gl.exp2(i * (-2.0 * LOG2_BASE / D))[None, :]
    if ROPE == 2:  # whole turns off in two steps, as 2 pi is no float
        whole = gl.floor(angle * 0.15915494309189535 + 0.5)
        angle = gl.fma(whole, -6.2831854820251465, angle)
        angle = gl.fma(whole, 1.7484556000744883e-07, angle)
    return _cos(angle), _sin(angle)


@gluon.jit
def _halves(x, D: gl.constexpr):
    """The even and the odd columns of a tile [BLOCK, D]."""
    return gl.split(gl.reshape(x, [BLOCK, D // 2, 2]))


@gluon.jit
def _rotated(even, odd, cos, sin, D: gl.constexpr, L: gl.constexpr):
    """The tile in layout L whose pairs of columns are turned."""
    return gl.convert_layout(gl.reshape(gl.join(even * cos - odd * sin, even * sin + odd * cos), [BLOCK, D]), L)


@gluon.jit
def _turn_back(x, positions_ptr, start, length, D: gl.constexpr, ROPE: gl.constexpr, LOG2_BASE: gl.constexpr,
               AL: gl.constexpr):  # fmt: skip
    """The gradient of the rotation: a float32 tile [BLOCK, D], turned the other way."""
    even, odd = _halves(x, D)
    half: gl.constexpr = even.type.layout
    cos, sin = _turns(positions_ptr, start, length, D, ROPE, LOG2_BASE, half)
    return _rotated(even, odd, cos, -sin, D, AL)


@gluon.jit
def _turn_buffers(bufs, positions_ptr, start, length, D: gl.constexpr, ROPE: gl.constexpr, LOG2_BASE: gl.constexpr,
                  AL: gl.constexpr):  # fmt: skip
    """Turn the rows of some buffers in place, and zero those that are not the block's."""
    inside = (gl.arange(0, BLOCK, gl.SliceLayout(1, AL)) < length)[:, None]
    x = bufs[0].load(AL)
    even, odd = _halves(x.to(gl.float32), D)
    half: gl.constexpr = even.type.layout
    cos, sin = _turns(positions_ptr, start, length, D, ROPE, LOG2_BASE, half)
    bufs[0].store(gl.where(inside, _rotated(even, odd, cos, sin, D, AL), 0.0).to(x.dtype))
    for n in gl.static_range(1, len(bufs)):
        even, odd = _halves(bufs[n].load(AL).to(gl.float32), D)
        bufs[n].store(gl.where(inside, _rotated(even, odd, cos, sin, D, AL), 0.0).to(x.dtype))


@gluon.jit
def _zero_rest(bufs, length, AL: gl.constexpr):
    """Zero the rows of some buffers that are not the block's."""
    if length < BLOCK:
        inside = (gl.arange(0, BLOCK, gl.SliceLayout(1, AL)) < length)[:, None]
        for n in gl.static_range(len(bufs)):
            x = bufs[n].load(AL)
            bufs[n].store(gl.where(inside, x, 0.0).to(x.dtype))


@gluon.jit
def _prepare(q, k, v, positions_ptr, start, length, D: gl.constexpr, ROPE: gl.constexpr, VALUES: gl.constexpr,
             LOG2_BASE: gl.constexpr, AL: gl.constexpr):  # fmt: skip
    """Q, K and V as the products take them."""
    if ROPE == 0:
        _zero_rest((q, k, v), length, AL)
    elif VALUES:
        _turn_buffers((q, k, v), positions_ptr, start, length, D, ROPE, LOG2_BASE, AL)
    else:
        _turn_buffers((q, k), positions_ptr, start, length, D, ROPE, LOG2_BASE, AL)
        _zero_rest((v,), length, AL)


@gluon.jit
def _pair(blocks_ptr, tile, tiles, HEADS: gl.constexpr):
    """The first row of a tile's block, its length and its head; length 0 past the last."""
    block = tile // HEADS
    inside = tile < tiles
    start = gl.load(blocks_ptr + block, mask=inside, other=0)
    end = gl.load(blocks_ptr + block + 1, mask=inside, other=0)
    return start.to(gl.int32), (end - start).to(gl.int32), tile % HEADS


@gluon.jit
def _put(x, desc, ptr, row_stride, buf, start, length, head, D: gl.constexpr, AL: gl.constexpr):
    """A whole block leaves by TMA from `buf`, a short one by masked stores."""
    y = x.to(ptr.dtype.element_ty)
    if length == BLOCK:
        buf.store(y)
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [start, head * D], buf)
    else:
        r = gl.arange(0, BLOCK, gl.SliceLayout(1, AL))
        c = gl.arange(0, D, gl.SliceLayout(0, AL))
        base = ptr + start.to(gl.int64) * row_stride + head * D
        gl.store(base + (r * row_stride)[:, None] + c[None, :], y, mask=(r < length)[:, None])


@gluon.jit
def _softmax(s, inside, scale):
    """Rows of softmax; `scale` has log2(e) as a factor, and a row that is all masked does not occur."""
    s = gl.where(inside, s * scale, float("-inf"))
    p = gl.exp2(s - gl.max(s, 1)[:, None])
    return p, gl.sum(p, 1)


@gluon.jit
def _load(descs, bufs, full, slot, start, length, head, D: gl.constexpr):
    """Ask for the tensors of a pair, if it has rows."""
    some = length > 0
    barrier = full.index(slot)
    mbarrier.expect(barrier, len(descs) * descs[0].block_type.nbytes, pred=some)
    for n in gl.static_range(len(descs)):
        tma.async_copy_global_to_shared(descs[n], [start, head * D], barrier, bufs[n].index(slot), pred=some)


@gluon.jit
def _ring(desc, SLOTS: gl.constexpr, D: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [SLOTS, BLOCK, D], desc.layout)


@gluon.jit
def _begin(descs, bufs, blocks_ptr, tiles, D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr):
    """The slots' barriers, their first pairs asked for; the first pair, and how many this program has."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(SLOTS):
        mbarrier.init(full.index(s), count=1)
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    for s in gl.static_range(SLOTS):
        start, length, head = _pair(blocks_ptr, first + s * programs, tiles, HEADS)
        _load(descs, bufs, full, s, start, length, head, D)
    return full, _pair(blocks_ptr, first, tiles, HEADS), (tiles - first + programs - 1) // programs


@gluon.jit(do_not_specialize=["tiles"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, o_ptr, o_row, blocks_ptr, positions_ptr, tiles, scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, ACT: gl.constexpr,
    ROPE: gl.constexpr, VALUES: gl.constexpr, LOG2_BASE: gl.constexpr,
):  # fmt: skip
    """O = softmax(scale R(Q) R(K)^T) V of every block; for softmax `scale` has log2(e) as a factor."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    PL: gl.constexpr = gl.DotOperandLayout(0, AL, 2)
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    descs = (q_desc, k_desc, v_desc)
    bufs = (_ring(q_desc, SLOTS, D), _ring(k_desc, SLOTS, D), _ring(v_desc, SLOTS, D))
    full, pair, count = _begin(descs, bufs, blocks_ptr, tiles, D, HEADS, SLOTS)
    start, length, head = pair
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    for i in range(count):
        tile = first + i * programs
        slot = i % SLOTS
        start2, length2, head2 = _pair(blocks_ptr, tile + programs, tiles, HEADS)  # now, so that nothing waits for it
        start1, length1, head1 = _pair(blocks_ptr, tile + SLOTS * programs, tiles, HEADS)
        if length > 0:
            q, k, v = bufs[0].index(slot), bufs[1].index(slot), bufs[2].index(slot)
            mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
            _prepare(q, k, v, positions_ptr, start, length, D, ROPE, VALUES, LOG2_BASE, AL)
            fence_async_shared()
            S = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([BLOCK, BLOCK], gl.float32, SL), use_acc=False)
            inside = (gl.arange(0, BLOCK, gl.SliceLayout(0, SL)) < length)[None, :]
            if ACT == "softmax":
                p, total = _softmax(S, inside, scale)
            else:
                p = activate(S * scale, ACT)  # columns past the end are 0, and so is their activation
            P = gl.convert_layout(p.to(dtype), PL)
            out = warpgroup_mma(P, v, gl.zeros([BLOCK, D], gl.float32, AL), use_acc=False)
            if ACT == "softmax":
                out = out * gl.convert_layout(1.0 / total, gl.SliceLayout(1, AL))[:, None]
            _put(out, o_desc, o_ptr, o_row, q, start, length, head, D, AL)
            tma.store_wait(0)
            _load(descs, bufs, full, slot, start1, length1, head1, D)
        start, length, head = start2, length2, head2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles"])
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, dq_ptr, dk_ptr, dv_ptr, g_row,
    blocks_ptr, positions_ptr, tiles, inner_scale, scale,
    D: gl.constexpr, HEADS: gl.constexpr, SLOTS: gl.constexpr, ACT: gl.constexpr,
    ROPE: gl.constexpr, VALUES: gl.constexpr, LOG2_BASE: gl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of every block; `inner_scale` is `scale`, with log2(e) as a factor for softmax."""
    SL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    AL: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dtype: gl.constexpr = dq_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], dtype)
    p_buf = gl.allocate_shared_memory(dtype, [BLOCK, BLOCK], SHARED)  # P, then dS
    descs = (q_desc, k_desc, v_desc, do_desc)
    bufs = (_ring(q_desc, SLOTS, D), _ring(k_desc, SLOTS, D), _ring(v_desc, SLOTS, D), _ring(do_desc, SLOTS, D))
    full, pair, count = _begin(descs, bufs, blocks_ptr, tiles, D, HEADS, SLOTS)
    start, length, head = pair
    programs = gl.num_programs(0)
    first = gl.program_id(0)
    for i in range(count):
        tile = first + i * programs
        slot = i % SLOTS
        start2, length2, head2 = _pair(blocks_ptr, tile + programs, tiles, HEADS)  # now, so that nothing waits for it
        start1, length1, head1 = _pair(blocks_ptr, tile + SLOTS * programs, tiles, HEADS)
        if length > 0:
            q, k, v, do = bufs[0].index(slot), bufs[1].index(slot), bufs[2].index(slot), bufs[3].index(slot)
            mbarrier.wait(full.index(slot), (i // SLOTS) & 1)
            _prepare(q, k, v, positions_ptr, start, length, D, ROPE, VALUES, LOG2_BASE, AL)
            _zero_rest((do,), length, AL)
            fence_async_shared()
            none = gl.zeros([BLOCK, BLOCK], gl.float32, SL)
            S = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
            dP = warpgroup_mma(do, v.permute((1, 0)), none, use_acc=False, is_async=True)
            S, dP = warpgroup_mma_wait(0, deps=(S, dP))
            column = gl.arange(0, BLOCK, gl.SliceLayout(0, SL)) < length
            # Rows past the end are 0 in Q and dO, which leaves nothing of them in any product.
            if ACT == "softmax":
                p, total = _softmax(S, column[None, :], inner_scale)
                p = p * (1.0 / total)[:, None]
                ds = p * (dP - gl.sum(p * dP, 1)[:, None])
            else:
                p, slope = activate_with_grad(S * inner_scale, ACT)
                ds = slope * dP
            none = gl.zeros([BLOCK, D], gl.float32, AL)
            p_buf.store(p.to(dtype))
            fence_async_shared()
            dV = warpgroup_mma(p_buf.permute((1, 0)), do, none, use_acc=False)
            p_buf.store(ds.to(dtype))
            if VALUES and ROPE > 0:
                dV = _turn_back(dV, positions_ptr, start, length, D, ROPE, LOG2_BASE, AL)
            _put(dV, dv_desc, dv_ptr, g_row, v, start, length, head, D, AL)
            fence_async_shared()
            dK = warpgroup_mma(p_buf.permute((1, 0)), q, none, use_acc=False) * scale
            if ROPE > 0:
                dK = _turn_back(dK, positions_ptr, start, length, D, ROPE, LOG2_BASE, AL)
            _put(dK, dk_desc, dk_ptr, g_row, do, start, length, head, D, AL)
            dQ = warpgroup_mma(p_buf, k, none, use_acc=False) * scale
            if ROPE > 0:
                dQ = _turn_back(dQ, positions_ptr, start, length, D, ROPE, LOG2_BASE, AL)
            _put(dQ, dq_desc, dq_ptr, g_row, q, start, length, head, D, AL)
            tma.store_wait(0)
            _load(descs, bufs, full, slot, start1, length1, head1, D)
        start, length, head = start2, length2, head2
    tma.store_wait(0)
