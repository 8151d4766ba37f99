"""C[M, N] = A[M, K] B[N, K]^T of E4M3 operands with scales per 128 of K, on Hopper: one persistent, warp-specialised
Gluon kernel.

    C[m, n] = sum over blocks j of 128 along K: sa[m, j] sb[n or n / 128, j] * (sum over k in j: A[m, k] B[n, k])

Hopper's FP8 tensor cores accumulate with about 14 bits, so the sum over a block leaves them after 128 elements, is
scaled there, and joins a float32 sum in registers ("promotion", DeepSeek-V3 technical report, section 3.3.2).

One warp loads by TMA; NC consumer warpgroups own RM blocks of 64 rows and RN blocks of 128 columns each. While one
consumer scales and adds, the tensor cores work for another.

Shapes: A [M, K] and B [N, K] with K contiguous; the scales of rows are float32 [ceil(K / 128), pitch], rows contiguous,
so that TMA loads them with the operands; a weight's block scales are float32 [ceil(N / 128), ceil(K / 128)].
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

ROWS = gl.constexpr(64)  # of C in one warpgroup MMA
COLS = gl.constexpr(128)  # of C in one warpgroup MMA, and of a weight's scale block
DEPTH = gl.constexpr(128)  # elements of K that share a scale


@gluon.jit
def _tile(t, m_tiles, n_tiles, k_blocks, splits):
    """Tile t: its place (m, n), its part of K (split, first block, number of blocks). Neighbours share rows of A."""
    tiles = m_tiles * n_tiles
    split = t // tiles
    place = t - split * tiles
    m = place // n_tiles
    first = split * k_blocks // splits
    return m, place - m * n_tiles, split, first, (split + 1) * k_blocks // splits - first


@gluon.jit
def _loader(
    descs, buffers, full, empty, sizes, pitch_a, pitch_b,
    NC: gl.constexpr, RM: gl.constexpr, RN: gl.constexpr, STAGES: gl.constexpr, B_ROWS: gl.constexpr,
):  # fmt: skip
    """Keeps the ring of operands and scales full."""
    a_desc, b_desc, sa_desc, sb_desc = descs
    a_buf, b_buf, sa_buf, sb_buf = buffers
    m_tiles, n_tiles, k_blocks, splits = sizes
    AM: gl.constexpr = NC * RM
    nbytes: gl.constexpr = AM * (a_desc.block_type.nbytes + sa_desc.block_type.nbytes) + RN * (
        b_desc.block_type.nbytes + (sb_desc.block_type.nbytes if B_ROWS else 0)
    )
    step = 0
    for t in range(gl.program_id(0), m_tiles * n_tiles * splits, gl.num_programs(0)):
        m, n, _split, first, count = _tile(t, m_tiles, n_tiles, k_blocks, splits)
        for i in range(first, first + count):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, nbytes)
            for r in gl.static_range(AM):
                row = (m * AM + r) * ROWS
                tma.async_copy_global_to_shared(a_desc, [row, i * DEPTH], bar, a_buf.index(s * AM + r))
                tma.async_copy_global_to_shared(sa_desc, [i * pitch_a + row], bar, sa_buf.index(s * AM + r))
            for c in gl.static_range(RN):
                col = (n * RN + c) * COLS
                tma.async_copy_global_to_shared(b_desc, [col, i * DEPTH], bar, b_buf.index(s * RN + c))
                if B_ROWS:
                    tma.async_copy_global_to_shared(sb_desc, [i * pitch_b + col], bar, sb_buf.index(s * RN + c))
            step += 1


@gluon.jit
def _promote(acc, part, sa, sb, B_ROWS: gl.constexpr, PIN: gl.constexpr):
    """acc + part * scales; sb is one number for the block, or one for each column."""
    if B_ROWS:
        acc += part * sa[:, None] * sb[None, :]
    else:
        acc += part * (sa * sb)[:, None]
    if PIN:
        acc = gl.inline_asm_elementwise("// $0", "=f,0", [acc], gl.float32, is_pure=False, pack=1)
    return acc


@gluon.jit
def _store(
    acc, c_buf, out, row, col, split, M, N,
    L: gl.constexpr, HAS_BIAS: gl.constexpr, BY_TMA: gl.constexpr,
):  # fmt: skip
    """One block of C, to `split`'s plane: half precision through shared memory by TMA, float32 straight."""
    c_desc, c_ptr, bias_ptr = out
    if HAS_BIAS:
        n = col + gl.arange(0, COLS, gl.SliceLayout(0, L))
        acc = acc + gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)[None, :]
    if BY_TMA:
        c_buf.store(acc.to(c_ptr.dtype.element_ty))
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [row, col], c_buf)
    else:
        r = row + gl.arange(0, ROWS, gl.SliceLayout(1, L))
        n = col + gl.arange(0, COLS, gl.SliceLayout(0, L))
        to = c_ptr + ((split * M + r).to(gl.int64) * N)[:, None] + n[None, :]
        gl.store(to, acc.to(c_ptr.dtype.element_ty), mask=(r < M)[:, None] & (n < N)[None, :])


@gluon.jit
def _consumer(
    W: gl.constexpr, buffers, c_buf, out, sb_ptr, sb_row, sb_col, full, empty, sizes, M, N,
    NC: gl.constexpr, RM: gl.constexpr, RN: gl.constexpr, STAGES: gl.constexpr, CB: gl.constexpr,
    B_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, BY_TMA: gl.constexpr,
):  # fmt: skip
    """Products of one warpgroup's rows; it has one block of C, or two side by side (RN) or one under the other (RM)."""
    a_buf, b_buf, sa_buf, sb_buf = buffers
    m_tiles, n_tiles, k_blocks, splits = sizes
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    AM: gl.constexpr = NC * RM
    BLOCKS: gl.constexpr = RM * RN
    gl.static_assert(BLOCKS == 1 or BLOCKS == 2)
    step = 0
    part = gl.zeros([ROWS, COLS], gl.float32, L)  # one set of registers for all products:
    for t in range(gl.program_id(0), m_tiles * n_tiles * splits, gl.num_programs(0)):
        m, n, split, first, count = _tile(t, m_tiles, n_tiles, k_blocks, splits)
        acc0 = gl.zeros([ROWS, COLS], gl.float32, L)
        if BLOCKS == 2:
            acc1 = gl.zeros([ROWS, COLS], gl.float32, L)
        for i in range(first, first + count):
            s = step % STAGES
            at = n * RN * sb_row + i * sb_col
            at1 = at
            if RN == 2:
                at1 = gl.minimum(n * RN + 1, gl.cdiv(N, COLS) - 1) * sb_row + i * sb_col
            if not B_ROWS:  # on their way while the tensor cores work
                w0 = gl.load(sb_ptr + at)
                w1 = w0
                if RN == 2:
                    w1 = gl.load(sb_ptr + at1)
            mbarrier.wait(full.index(s), (step // STAGES) & 1)
            a0 = a_buf.index(s * AM + W * RM)
            b0 = b_buf.index(s * RN).permute((1, 0))
            part = warpgroup_mma(a0, b0, part, use_acc=False, is_async=True)
            sa0 = sa_buf.index(s * AM + W * RM).load(gl.SliceLayout(1, L))
            if B_ROWS:
                w0 = sb_buf.index(s * RN).load(gl.SliceLayout(0, L))
            part = warpgroup_mma_wait(0, deps=(part,))
            if BLOCKS == 1:
                mbarrier.arrive(empty.index(s), count=1)
            acc0 = _promote(acc0, part, sa0, w0, B_ROWS, BLOCKS == 2)
            if BLOCKS == 2:
                a1 = a_buf.index(s * AM + W * RM + RM - 1)
                b1 = b_buf.index(s * RN + RN - 1).permute((1, 0))
                part = warpgroup_mma(a1, b1, part, use_acc=False, is_async=True)
                if RM == 2:
                    sa0 = sa_buf.index(s * AM + W * RM + 1).load(gl.SliceLayout(1, L))
                if B_ROWS:
                    w1 = sb_buf.index(s * RN + RN - 1).load(gl.SliceLayout(0, L))
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(empty.index(s), count=1)
                acc1 = _promote(acc1, part, sa0, w1, B_ROWS, BLOCKS == 2)
            step += 1
        row = (m * AM + W * RM) * ROWS
        col = n * RN * COLS
        if BY_TMA:
            tma.store_wait(CB - 1 if BLOCKS == 1 else CB - 2 if CB > 1 else 0)
        _store(acc0, c_buf.index(W * CB), out, row, col, split, M, N, L, HAS_BIAS, BY_TMA)
        if BLOCKS == 2:
            if BY_TMA and CB == 1:
                tma.store_wait(0)
            row1 = row + (ROWS if RM == 2 else 0)
            col1 = col + (COLS if RN == 2 else 0)
            _store(acc1, c_buf.index(W * CB + CB - 1), out, row1, col1, split, M, N, L, HAS_BIAS, BY_TMA)
    if BY_TMA:
        tma.store_wait(0)


# Nothing is built anew for another number of tokens or another pitch.
@gluon.jit(do_not_specialize=["M", "k_blocks", "splits", "pitch_a", "pitch_b", "sb_row", "sb_col"])
def gemm_kernel(
    a_desc, b_desc, sa_desc, sb_desc, c_desc, c_ptr, sb_ptr, bias_ptr, M, N, k_blocks, splits,
    pitch_a, pitch_b, sb_row, sb_col,
    NC: gl.constexpr, RM: gl.constexpr, RN: gl.constexpr, STAGES: gl.constexpr, CB: gl.constexpr,
    B_ROWS: gl.constexpr, HAS_BIAS: gl.constexpr, BY_TMA: gl.constexpr,
    REGS: gl.constexpr, LOADER_REGS: gl.constexpr,
):  # fmt: skip
    """The product; B_ROWS: B has a scale for each row and block of K as A has, else for each 128 x 128."""
    AM: gl.constexpr = NC * RM
    a_buf = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * AM, ROWS, DEPTH], a_desc.layout)
    b_buf = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * RN, COLS, DEPTH], b_desc.layout)
    sa_buf = gl.allocate_shared_memory(gl.float32, [STAGES * AM, ROWS], sa_desc.layout)
    sb_buf = gl.allocate_shared_memory(gl.float32, [STAGES * RN if B_ROWS else 1, COLS], sb_desc.layout)
    c_buf = gl.allocate_shared_memory(
        c_ptr.dtype.element_ty if BY_TMA else gl.bfloat16, [NC * CB if BY_TMA else 1, ROWS, COLS], c_desc.layout
    )
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    gl.static_assert(NC == 2 or NC == 3)
    sizes = (gl.cdiv(M, AM * ROWS), gl.cdiv(N, RN * COLS), k_blocks, splits)
    buffers = (a_buf, b_buf, sa_buf, sb_buf)
    descs = (a_desc, b_desc, sa_desc, sb_desc)
    out = (c_desc, c_ptr, bias_ptr)
    if NC == 2:
        gl.warp_specialize(
            [
                (_consumer, (0, buffers, c_buf, out, sb_ptr, sb_row, sb_col, full, empty, sizes, M, N,
                             NC, RM, RN, STAGES, CB, B_ROWS, HAS_BIAS, BY_TMA)),
                (_consumer, (1, buffers, c_buf, out, sb_ptr, sb_row, sb_col, full, empty, sizes, M, N,
                             NC, RM, RN, STAGES, CB, B_ROWS, HAS_BIAS, BY_TMA)),
                (_loader, (descs, buffers, full, empty, sizes, pitch_a, pitch_b, NC, RM, RN, STAGES, B_ROWS)),
            ],
            [4, 1],
            [REGS, LOADER_REGS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, buffers, c_buf, out, sb_ptr, sb_row, sb_col, full, empty, sizes, M, N,
                             NC, RM, RN, STAGES, CB, B_ROWS, HAS_BIAS, BY_TMA)),
                (_consumer, (1, buffers, c_buf, out, sb_ptr, sb_row, sb_col, full, empty, sizes, M, N,
                             NC, RM, RN, STAGES, CB, B_ROWS, HAS_BIAS, BY_TMA)),
                (_consumer, (2, buffers, c_buf, out, sb_ptr, sb_row, sb_col, full, empty, sizes, M, N,
                             NC, RM, RN, STAGES, CB, B_ROWS, HAS_BIAS, BY_TMA)),
                (_loader, (descs, buffers, full, empty, sizes, pitch_a, pitch_b, NC, RM, RN, STAGES, B_ROWS)),
            ],
            [4, 4, 1],
            [REGS, REGS, LOADER_REGS],
        )  # fmt: skip
