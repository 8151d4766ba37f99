"""RMSNorm or LayerNorm and block-wise FP8 in one pass over x: read the rows once, write E4M3 and scales.

    n = (x - mean) / sqrt(variance + eps) * gain + bias       mean = 0 and bias = 0 for an RMS norm
    Q(n) with one scale for each row and 128 features

The normalised rows themselves are never written. What the backward pass needs of them is in x and two numbers a row:
`quantize_both(x, norm=...)` makes Q(n^T) of those when the weight's gradient wants it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from gem_kernels.checks import check_number
from gem_kernels.tiling import CompileCase, Tile, launch
from torch import Tensor

from gem_lowprec.formats import E4M3, ScaleMode
from gem_lowprec.kernels import DTYPES, _scale_of, hardware, threshold
from gem_lowprec.orientations import BLOCK, Norm, _scaled, normalised, scale_constants
from gem_lowprec.quantize import FP8_1X128, QTensor, QuantSpec

WIDEST = 8192
# Norms that the kernel by hand is faster at, by whether there is a bias and by width: rows of a warp, steps and warps
# of a program (docs/notes/lowprec.md, "Norms that write FP8").
BY_HAND = {
    (True, 512): (4, 4, 1), (False, 512): (2, 1, 1), (False, 1024): (2, 1, 1), (False, 2048): (1, 1, 1),
}  # fmt: skip
# Norms that `norms_warps` is faster at, likewise, and which of its ways it is.
CHOSEN = {
    (True, 1024): "2 rows ahead", (True, 2048): "1 row ahead", (True, 4096): "1 row", (False, 4096): "1 row",
}  # fmt: skip
ELEMENTS, WARPS = 2048, 2  # of a program: rows stay inside a warp or two, and enough programs share an SM


@triton.jit(do_not_specialize=["rows", "pitch"])
def _norm_rows(
    x_ptr, gain_ptr, bias_ptr, data_ptr, scale_ptr, mean_ptr, rstd_ptr, rows, cols, x_row, data_row, pitch, eps,
    TR: tl.constexpr, TK: tl.constexpr, B: tl.constexpr, LIMIT: tl.constexpr, THRESHOLD: tl.constexpr,
    EMAX: tl.constexpr, SCALE: tl.constexpr, NORM: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """TR whole rows per program; TK is the width, rounded up to a power of two."""
    r = tl.program_id(0) * TR + tl.arange(0, TR)
    c = tl.arange(0, TK)
    r64 = r.to(tl.int64)
    inside = (r[:, None] < rows) & (c[None, :] < cols)
    x = tl.load(x_ptr + r64[:, None] * x_row + c[None, :], mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(gain_ptr + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
    mean = tl.zeros([TR, 1], tl.float32)
    bias = tl.zeros([1, TK], tl.float32)
    centred = x
    if NORM == 2:
        mean = (tl.sum(x, 1) / cols)[:, None]
        bias = tl.load(bias_ptr + c, mask=c < cols, other=0.0).to(tl.float32)[None, :]
        centred = tl.where(inside, x - mean, 0.0)
        tl.store(mean_ptr + r, tl.reshape(mean, [TR]), mask=r < rows)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / cols + eps)
    tl.store(rstd_ptr + r, rstd, mask=r < rows)
    y = normalised(x, mean, rstd[:, None], gain, bias, NORM)
    y = tl.where(inside, y, 0.0)

    y = tl.reshape(y, [TR, TK // B, B])
    size = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale, code = _scale_of(tl.max(size, 2), LIMIT, THRESHOLD, EMAX, SCALE)  # [TR, TK / B]
    data = tl.reshape(_scaled(y, scale[:, :, None], code[:, :, None], SCALE, HARDWARE), [TR, TK])
    tl.store(data_ptr + r64[:, None] * data_row + c[None, :], data, mask=(r[:, None] < rows) & (c[None, :] < data_row))
    b = tl.arange(0, TK // B)
    to = scale_ptr + b.to(tl.int64)[None, :] * pitch + r[:, None]
    tl.store(to, scale, mask=(r[:, None] < rows) & (b[None, :] < tl.cdiv(cols, B)))


def _constants(cols: int, spec: QuantSpec, *, layer: bool, hardware: bool) -> tuple[dict[str, Any], Tile]:
    width = max(BLOCK, triton.next_power_of_2(cols))
    height = max(1, ELEMENTS // width)
    constants = {
        "TR": height, "TK": width, "B": BLOCK, **scale_constants(spec), "NORM": 2 if layer else 1, "HARDWARE": hardware,
    }  # fmt: skip
    return constants, Tile(bm=height, bn=width, warps=max(WARPS, height * width // 1024))


def norm_quantize(
    x: Tensor, gain: Tensor, bias: Tensor | None = None, *, eps: float = 1e-6, spec: QuantSpec = FP8_1X128
) -> tuple[QTensor, Norm]:  # fmt: skip
    """Q(norm(x)) along the features and what the norm found: a layer norm with `bias` given, else an RMS norm.

    x [R, C] float32, bfloat16 or float16, C up to 8192; gain and bias [C]. The normalised rows are quantised from
    float32: they are not rounded to the dtype of x in between, as those that a norm has written are. On CUDA or in
    Triton's interpreter. Raises ValueError or TypeError for what does not fit.
    """
    if spec.element is not E4M3 or spec.block != (1, BLOCK) or spec.scale == "e8m0":
        raise ValueError(f"norm_quantize takes E4M3 in blocks of 1 x 128 with float32 scales, got {spec}")
    if x.ndim != 2 or not 1 <= x.shape[1] <= WIDEST:
        raise ValueError(f"norm_quantize expects rows of 1 to {WIDEST} features, got shape {list(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"norm_quantize reads float32, bfloat16 and float16; got {x.dtype}")
    rows, cols = x.shape
    if gain.shape != (cols,) or (bias is not None and bias.shape != (cols,)):
        raise ValueError(
            f"gain and bias must be [{cols}], got {[list(t.shape) for t in (gain, bias) if t is not None]}"
        )
    check_number("eps", eps, positive=True)
    if any(t.device != x.device for t in (gain, bias) if t is not None):
        raise ValueError(f"gain and bias must be on {x.device} with x, got {gain.device}")
    x = x.detach() if x.stride(1) == 1 else x.detach().contiguous()
    gain = gain.detach().contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    line, pitch = -(-cols // 16) * 16, -(-rows // 4) * 4
    data = x.new_empty((rows, line), dtype=torch.uint8)
    scale = x.new_empty((-(-cols // BLOCK), pitch), dtype=torch.float32)
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = None if bias is None else torch.empty_like(rstd)
    halves = x.element_size() == 2  # what the kernel by hand has been seen right with
    ours = (bias is not None, cols)
    if (ours in BY_HAND or ours in CHOSEN) and halves and hardware(x.device) and spec.scale == "pow2":
        shift, centre = (gain, rstd) if bias is None else (bias, mean)
        _by_hand(
            x, (x, gain, shift, data, scale, centre, rstd, rows, x.stride(0), pitch, eps), bias is not None, spec.mode
        )
    else:
        constants, tile = _constants(cols, spec, layer=bias is not None, hardware=hardware(x.device))
        arguments = (
            x, gain, gain if bias is None else bias, data, scale, rstd if mean is None else mean, rstd, rows, cols,
            x.stride(0), line, pitch, eps,
        )  # fmt: skip
        launch(_norm_rows, -(-rows // tile.bm), x.device, tile, *arguments, **constants)
    q = QTensor(
        data=data.view(E4M3.dtype)[:, :cols], scale=scale[:, :rows].t(), spec=spec, dim=-1, shape=x.shape, dtype=x.dtype
    )  # fmt: skip
    return q, Norm(gain=gain, bias=bias, rstd=rstd, mean=mean)


def _hand_constants(layer: bool, cols: int, mode: ScaleMode) -> dict[str, Any]:
    rows, steps, warps = BY_HAND[layer, cols]
    return {
        "RW": rows, "TK": cols, "STEPS": steps, "WARPS": warps, "NORM": 2 if layer else 1,
        "THRESHOLD": threshold(E4M3, mode), "EMAX": E4M3.emax,
    }  # fmt: skip


def _by_hand(x: Tensor, arguments: tuple[Any, ...], layer: bool, mode: ScaleMode) -> None:
    """The same by a Gluon kernel."""
    from gem_lowprec import norms_warps
    from gem_lowprec.tiles import norm_kernel

    if name := CHOSEN.get((layer, x.shape[1])):
        norms_warps.run(x, arguments, layer, mode, norms_warps.WAYS[layer, x.shape[1]][name])
        return
    constants = _hand_constants(layer, x.shape[1], mode)
    warps = constants["WARPS"]
    programs = -(-x.shape[0] // (warps * constants["RW"] * constants["STEPS"]))
    if programs:
        with torch.cuda.device_of(x):
            norm_kernel[(programs,)](*arguments, **constants, num_warps=warps)


def compile_cases() -> list[CompileCase]:
    """What `compile_check` builds without a GPU."""
    from triton.experimental.gluon._runtime import GluonASTSource

    from gem_lowprec import norms_warps
    from gem_lowprec.tiles import norm_kernel

    cases = []

    def add(name: str, kernel: Any, constants: dict[str, Any], tile: Tile, *, by_hand: bool) -> None:
        types = {n: "constexpr" if n in constants else "i32" for n in kernel.arg_names}
        types |= dict.fromkeys(("gain_ptr", "bias_ptr", "scale_ptr", "mean_ptr", "rstd_ptr"), "*fp32")
        types |= {"x_ptr": "*bf16", "data_ptr": "*u8", "eps": "fp32"}
        cases.append(
            CompileCase(
                name=f"norm to fp8 {name}", kernel=kernel, signature=types, constants=constants, tile=tile, arch=(90,),
                source=GluonASTSource if by_hand else None,
                divisible=tuple(n for n in kernel.arg_names if n.endswith(("_ptr", "x_row", "cols", "data_row"))),
            )
        )  # fmt: skip

    for cols, layer in ((512, True), (1024, False), (768, True)):
        name = f"{'layer' if layer else 'rms'} {cols}"
        if (layer, cols) in BY_HAND:
            constants = _hand_constants(layer, cols, FP8_1X128.mode)
            add(name, norm_kernel, constants, Tile(bm=1, bn=cols, warps=constants["WARPS"]), by_hand=True)
        else:
            constants, tile = _constants(cols, FP8_1X128, layer=layer, hardware=True)
            add(name, _norm_rows, constants, tile, by_hand=False)
    for (layer, cols), ways in norms_warps.WAYS.items():
        for name, way in ways.items():
            add(
                f"{'layer' if layer else 'rms'} {cols} {name}", norms_warps.norm_kernel,
                norms_warps.constants(layer, cols, FP8_1X128.mode, way),
                Tile(bm=way.rows, bn=cols, warps=way.warps, registers=way.registers), by_hand=True,
            )  # fmt: skip
    return cases
