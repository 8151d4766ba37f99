"""Which problems the Hopper kernels take, and what to build of them without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gem_kernels.dispatch import Problem
from gem_kernels.hopper import HEAD_DIMS
from gem_kernels.tiling import CompileCase, Tile

DTYPES = (torch.bfloat16, torch.float16)
_REFUSED = {
    "bias": "a bias",
    "causal": "causal masks",
    "window": "windows",
    "grouped": "fewer key heads than query heads",
}


def applies(problem: Problem) -> tuple[bool, str]:
    """Half precision, head dimension 64 or 128, no mask, no bias, as many key heads as query heads."""
    if problem.dtype not in DTYPES:
        return False, f"the Hopper kernels take bfloat16 and float16; got {problem.dtype}"
    if problem.head_dim not in HEAD_DIMS:
        return False, f"the Hopper kernels take head dimensions 64 and 128; got {problem.head_dim}"
    refused = [what for feature, what in _REFUSED.items() if feature in problem.features]
    if refused:
        return False, f"the Hopper kernels do not take {', '.join(refused)}"
    return True, "forward by warp-specialised Gluon kernels for compute capability 9, backward by the portable ones"


def _descriptor(rows: int, columns: int, dtype: str = "bf16") -> str:
    from triton.experimental.gluon import language as gl

    element = {"bf16": gl.bfloat16, "fp32": gl.float32}[dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], element)
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"


def _statistics() -> str:
    from triton.experimental.gluon import language as gl

    return f"tensordesc<fp32[64],{gl.NVMMASharedLayout.get_default_for([64], gl.float32)!r}>"


def _case(
    name: str, kernel: Any, descriptors: dict[str, str], constants: dict[str, Any], registers: int | None = None
) -> CompileCase:
    from triton.experimental.gluon._runtime import GluonASTSource

    floats = ("lse_ptr", "delta_ptr")
    types: dict[str, str] = {}
    divisible = []
    for argument in kernel.arg_names:
        if argument in constants:
            types[argument] = "constexpr"
        elif argument in descriptors:
            types[argument] = descriptors[argument]
        elif argument in ("tiles_ptr", "count_ptr") or argument in floats or argument.endswith("_ptr"):
            types[argument] = (
                "*i32" if argument in ("tiles_ptr", "count_ptr") else "*fp32" if argument in floats else "*bf16"
            )
            divisible.append(argument)
        elif argument.endswith("stride"):
            types[argument] = "i64"
            divisible.append(argument)
        else:
            types[argument] = "fp32" if argument.endswith("scale") else "i32"
    source: Callable[..., Any] = GluonASTSource
    return CompileCase(
        name=name, kernel=kernel, signature=types, constants=constants,
        tile=Tile(bm=64, bn=128, warps=4, registers=registers), divisible=tuple(divisible), arch=(90,), source=source,
    )  # fmt: skip


def compile_cases(act: str) -> list[CompileCase]:
    """Every configuration that `launch` picks, for one activation ("softmax" for jagged attention)."""
    from gem_kernels.hopper import launch, launch_backward

    op = "jfa" if act == "softmax" else f"gdpa {act}"
    cases = []
    for dim in HEAD_DIMS:
        row = _descriptor(64, dim)
        for name, config in launch.FORWARD.items():
            step = _descriptor(config.step, dim)
            cases.append(_case(
                f"{op} hopper forward d{dim} {name}", launch.forward_kernel,
                {"q_desc": row, "k_desc": step, "v_desc": step, "o_desc": row},
                config.constants(dim, group=1, act=act),
            ))  # fmt: skip
        rows, block = _descriptor(64, dim), _descriptor(64, 64)
        loads = {**dict.fromkeys(("q_desc", "k_desc", "v_desc", "do_desc"), rows), "rows_desc": _statistics()}
        stores = dict.fromkeys(("dq_desc", "dk_desc", "dv_desc"), rows)
        for name, way in launch_backward.BACKWARD.items():
            kernel = launch_backward.backward_kernel if way.own is None else launch_backward.short_backward_kernel
            cases.append(_case(
                f"{op} hopper backward d{dim} {name}", kernel, {**loads, **stores, "ds_desc": block},
                way.constants(dim, act), registers=None if way.own is None else 128,
            ))  # fmt: skip
        if act == "softmax":  # the same kernel for every activation
            cases.append(_case(
                f"hopper dq d{dim}", launch_backward.query_gradient_kernel,
                {**stores, "k_desc": rows, "ds_desc": block}, {"D": dim, **launch_backward.QUERY_GRADIENT},
            ))  # fmt: skip
    return cases
