"""Which problems the Hopper kernels take, and what to build of them without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gem_kernels.dispatch import Problem
from gem_kernels.gdpa.activations import POLYNOMIALS
from gem_kernels.hopper import HEAD_DIMS
from gem_kernels.tiling import CompileCase, Tile

DTYPES = (torch.bfloat16, torch.float16)


def applies(problem: Problem) -> tuple[bool, str]:
    """Half precision, head dimension 32, 64, 96 or 128 (computed as 64 or 128).

    The kernels are written for multiples of 8, and tested at them; unasked they take those that models were trained
    with (docs/notes/hopper-attention.md).
    """
    if problem.dtype not in DTYPES:
        return False, f"the Hopper kernels take bfloat16 and float16; got {problem.dtype}"
    if problem.head_dim % 32 or not 32 <= problem.head_dim <= 128:
        return False, f"the Hopper kernels take head dimensions from 32 to 128 in steps of 32; got {problem.head_dim}"
    return True, "warp-specialised Gluon kernels for compute capability 9"


def _head_descriptor(rows: int, columns: int) -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout.get_default_for([rows, 1, columns], gl.bfloat16)
    return f"tensordesc<bf16[{rows}, 1, {columns}],{layout!r}>"


def _statistics() -> str:
    from triton.experimental.gluon import language as gl

    return f"tensordesc<fp32[64],{gl.NVMMASharedLayout.get_default_for([64], gl.float32)!r}>"


def _case(
    name: str, kernel: Any, descriptors: dict[str, str], constants: dict[str, Any], registers: int | None = None,
    *, defined: bool = False, no_special: bool = False,
) -> CompileCase:  # fmt: skip
    from triton.experimental.gluon._runtime import GluonASTSource

    floats = ("lse_ptr", "delta_ptr")
    ints = ("tiles_ptr", "count_ptr", "cursor_ptr", "own_ptr", "records_ptr")
    types: dict[str, str] = {}
    divisible = []
    for argument in kernel.arg_names:
        if argument in constants:
            types[argument] = "constexpr"
        elif argument in descriptors:
            types[argument] = descriptors[argument]
        elif argument.endswith("_ptr"):
            types[argument] = "*i32" if argument in ints else "*fp32" if argument in floats else "*bf16"
            divisible.append(argument)
        elif argument in ("bias_batch", "bias_head", "bias_row"):
            types[argument] = "i32"
        elif argument.endswith(("stride", "o_row")):
            types[argument] = "i32"
            divisible.append(argument)
        else:
            types[argument] = "fp32" if argument.endswith("scale") else "i32"
    source: Callable[..., Any] = GluonASTSource
    return CompileCase(
        name=name, kernel=kernel, signature=types, constants=constants,
        tile=Tile(bm=64, bn=128, warps=4, registers=registers), divisible=tuple(divisible), arch=(90,), source=source,
        defined=defined, no_special=no_special,
    )  # fmt: skip


def compile_cases(act: str) -> list[CompileCase]:
    """Every configuration that `launch` picks, for one activation ("softmax" for jagged attention)."""
    from gem_kernels.hopper import launch

    op = "jfa" if act == "softmax" else f"gdpa {act}"
    cases = []
    no_special = act in POLYNOMIALS
    for dim in HEAD_DIMS:
        row = _head_descriptor(64, dim)
        for name, config in launch.FORWARD.items():
            if config.halves and act != "softmax":  # nobody chooses it
                continue
            step = _head_descriptor(config.step, dim)
            descriptors = {
                "k_desc": step,
                "v_desc": step,
                **dict.fromkeys(("q_desc", "o_desc", "k_short", "v_short"), row),
            }
            masks = {"": (False, False)}
            if config is launch.FORWARD["3x128-lean"]:
                masks |= {" causal": (False, True), " window": (True, True)}
            for mask, (left, right) in masks.items():
                cases.append(_case(
                    f"{op} hopper forward d{dim} {name}{mask}", launch.forward_kernel, descriptors,
                    config.constants(dim, group=1, act=act, left=left, right=right),
                    defined=True, no_special=no_special,
                ))  # fmt: skip
            if act == "softmax" and dim == 128 and config is launch.FORWARD["3x128"]:  # scores of two products
                cases.append(_case(
                    f"{op} hopper forward d96 {name}", launch.forward_kernel, descriptors,
                    config.constants(96, group=1, act=act), defined=True,
                ))  # fmt: skip
            if act == "softmax" and config is launch.FORWARD["3x64"]:
                for mask, right in {"": False, " causal": True}.items():
                    cases.append(_case(
                        f"{op} hopper forward d{dim} {name}{mask} bias", launch.forward_kernel, descriptors,
                        config.constants(dim, group=1, act=act, right=right, bias=2), defined=True,
                    ))  # fmt: skip
        cases += _backward_cases(op, act, dim)
    return cases


def _backward_cases(op: str, act: str, dim: int) -> list[CompileCase]:
    from gem_kernels.hopper import launch_backward

    rows = _head_descriptor(64, dim)
    loads = {**dict.fromkeys(("q_desc", "k_desc", "v_desc", "do_desc"), rows), "rows_desc": _statistics()}
    stores = {**dict.fromkeys(("dq_desc", "dk_desc", "dv_desc"), rows), "ds_desc": _head_descriptor(64, 64)}
    cases = []
    for mask, (left, right) in {"": (False, False), " causal": (False, True), " window": (True, True)}.items():
        for name, way in launch_backward.BACKWARD.items():
            kernel = launch_backward.kernel_of(way)
            cases.append(_case(
                f"{op} hopper backward d{dim} {name}{mask}", kernel, {**loads, **stores},
                way.constants(dim, group=1, act=act, left=left, right=right),
                registers=None if way.own is None else 128, defined=True, no_special=act in POLYNOMIALS,
            ))  # fmt: skip
        if act == "softmax" and not (left and right):
            way = launch_backward.BACKWARD["stream"]
            cases.append(_case(
                f"{op} hopper backward d{dim} stream{mask} bias", launch_backward.backward_kernel, {**loads, **stores},
                way.constants(dim, group=1, act=act, left=left, right=right, bias=2), defined=True,
            ))  # fmt: skip
        if act == "softmax":  # the same kernel for every activation
            cases.append(_case(
                f"hopper dq d{dim}{mask}", launch_backward.query_gradient_kernel, {**stores, "k_desc": rows},
                launch_backward.query_gradient_constants(dim, group=1, left=left, right=right),
            ))  # fmt: skip
    return cases
