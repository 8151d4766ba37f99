"""What a step's device time goes to: every kernel by kind, by the part of the model that asked for it, and by name.

A kernel belongs to the innermost operator that launched it, and to the innermost module inside whose forward pass that
operator ran; a kernel of the backward pass to the module of the operator whose gradient it computes (autograd's
sequence number). On a CPU the operators' own time is shown instead. Bytes are what the operators' tensors hold (what
they read, once), FLOPs those of matrix products from their shapes: two for each multiply-add.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.profiler import record_function

MODULE = "gem.module "  # before a module's name, in annotations
BACKWARD = "autograd::engine::evaluate_function: "
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_addmm_activation")
KINDS = (  # of operators: kind, and how their names begin
    ("matrix products", PRODUCTS),
    ("norms", ("gem_kernels::norm", "_Summed", "aten::native_layer_norm", "aten::_fused_rms_norm")),
    ("parts of projections", ("gem_kernels::gated", "gem_kernels::rotary", "_Gated", "_Rotary")),
    ("attention", ("gem_kernels::jagged_attention", "gem_kernels::block", "aten::_scaled_dot", "torch_attn::")),
    ("GDPA", ("gem_kernels::gdpa",)),
    ("other kernels of ours", ("gem_kernels::", "gem_lowprec::")),
    ("optimizer", ("aten::_fused_adam", "aten::_foreach_", "aten::linalg_vector_norm")),
    ("tables", ("fbgemm::", "aten::embedding", "split_embedding")),
    ("copies and casts", ("aten::copy_", "aten::cat", "aten::_to_copy", "aten::clone", "aten::stack", "aten::fill_")),
    ("reductions", ("aten::sum", "aten::mean")),
    ("gathers", ("aten::index", "aten::gather", "aten::segment", "aten::_segment", "aten::scatter", "aten::sort")),
)  # fmt: skip
SIZES = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8, "long int": 8, "long": 8, "int": 4, "bool": 1}


@dataclass(kw_only=True)
class Row:
    """Kernels that belong together."""

    name: str
    seconds: float = 0.0
    count: int = 0
    bytes: float = 0.0
    flops: float = 0.0


@contextlib.contextmanager
def marked(model: nn.Module, depth: int = 6) -> Iterator[None]:
    """Within the block every module down to `depth` names annotates its forward pass in traces; compiled ones don't."""
    stacks: list[Any] = []

    def enter(name: str) -> Any:
        def hook(_module: nn.Module, _args: Any) -> None:
            stacks.append(record_function(MODULE + name))
            stacks[-1].__enter__()

        return hook

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        stacks.pop().__exit__(None, None, None)

    handles = []
    compiled = tuple(f"{name}." for name, m in model.named_modules() if m._compiled_call_impl is not None)
    for name, module in model.named_modules():
        if name and name.count(".") < depth and not f"{name}.".startswith(compiled):
            handles += [module.register_forward_pre_hook(enter(name)), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tables(trace: dict[str, Any], *, cuda: bool) -> dict[str, Any]:
    """Rows by kind, by part of the model and by kernel of a trace of one step, longest first, and the gaps' seconds."""
    by_kind, by_part, by_kernel = (defaultdict[str, Row](lambda: Row(name="")) for _ in range(3))
    spans = []
    seen: set[int] = set()
    for kernel, operator, module, backward in _kernels(trace, cuda=cuda):
        seconds = kernel["own" if not cuda else "dur"] / 1e6
        kind = kind_of(kernel["name"], operator["name"] if operator else "")
        part = re.sub(r"(?<=layers\.)\d+", "*", module or "(no module)")
        first = operator is not None and id(operator) not in seen
        if operator is not None:
            seen.add(id(operator))
        size, flops = (_bytes(operator), _flops(operator)) if first and operator else (0.0, 0.0)
        way = "backward" if backward else "forward"
        asked = operator["name"] if operator else ""
        for rows, name in (
            (by_kind, f"{kind}, {way}"),
            (by_part, f"{part}, {way}"),
            (by_kernel, f"{_short(kernel['name'])} <- {asked}"),
        ):
            row = rows[name]
            row.name = name
            row.seconds += seconds
            row.count += 1
            row.bytes += size
            row.flops += flops
        spans.append((kernel["ts"], kernel["ts"] + kernel["dur"]))
    return {
        "kinds": _sorted(by_kind.values()),
        "parts": _sorted(by_part.values()),
        "kernels": _sorted(by_kernel.values()),
        "kernels_s": sum(row.seconds for row in by_kind.values()),
        "gaps_s": _gaps(spans) if cuda else 0.0,
    }


def kind_of(kernel: str, operator: str) -> str:
    """What a kernel does, by the operator that launched it, or by its own name where there is none."""
    if kernel.startswith("triton_"):  # of Inductor
        return "compiled element-wise" if kernel.startswith("triton_poi") else "compiled with reductions"
    for kind, begins in KINDS:
        if operator.startswith(begins):
            return kind
    if not operator:
        return "copies and casts" if kernel.lower().startswith(("memcpy", "memset")) else "other"
    return "element-wise"


def render(found: dict[str, Any], top: int = 25) -> str:
    """The tables for a terminal."""
    total = found["kernels_s"]
    lines = [f"Kernels of one traced step: {total * 1e3:.2f} ms, and {found['gaps_s'] * 1e3:.2f} ms between them"]
    for title, key, count in (("kind", "kinds", 40), ("part of the model", "parts", 40), ("kernel", "kernels", top)):
        lines += ["", f"  {title:<78}{'ms':>9}{'share':>8}{'count':>7}{'GB/s':>7}{'TFLOP/s':>9}"]
        for row in found[key][:count]:
            s = row["seconds"] or math.inf
            rates = [f"{row[k] / s / unit:.0f}" if row[k] else "" for k, unit in (("bytes", 1e9), ("flops", 1e12))]
            share = row["seconds"] / total if total else 0.0
            lines.append(
                f"  {row['name'][:77]:<78}{row['seconds'] * 1e3:>9.2f}{share:>8.1%}{row['count']:>7}"
                f"{rates[0]:>7}{rates[1]:>9}"
            )
    return "\n".join(lines)


def _kernels(trace: dict[str, Any], *, cuda: bool) -> Iterator[tuple[Any, Any, str | None, bool]]:
    """(kernel, operator, module's name, whether of the backward pass)."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    by_thread: dict[Any, list[Any]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            by_thread[event["tid"]].append(event)
    launched: dict[int, tuple[Any, str | None, Any]] = {}  # by correlation: operator, module, autograd's node
    modules: dict[int, str] = {}  # by sequence number: the module that the forward operator ran in
    own: list[tuple[Any, str | None, Any]] = []
    for found in by_thread.values():
        found.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_: list[Any] = []
        for event in found:
            while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"]:
                open_.pop()
            if event["cat"] in ("cuda_runtime", "cuda_driver"):
                correlation = event.get("args", {}).get("correlation")
                if correlation is not None:
                    launched[correlation] = _context(open_)
                continue
            if event["cat"] == "cpu_op":
                for outer in reversed(open_):
                    if outer["cat"] == "cpu_op":
                        outer["own"] = outer.get("own", outer["dur"]) - event["dur"]
                        break
                event.setdefault("own", event["dur"])
            open_.append(event)
            operator, module, node = _context(open_)
            number = event.get("args", {}).get("Sequence number")
            if event["cat"] == "cpu_op" and number is not None and node is None and module is not None:
                modules.setdefault(number, module)
            if not cuda and event["cat"] == "cpu_op" and not event["name"].startswith(BACKWARD):
                own.append((event, module, node))
    if cuda:
        for event in events:
            if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
                operator, module, node = launched.get(event.get("args", {}).get("correlation"), (None, None, None))
                yield event, operator, _module(module, node, modules), node is not None
    else:
        for event, module, node in own:
            yield event, event, _module(module, node, modules), node is not None


def _context(open_: Sequence[Any]) -> tuple[Any, str | None, Any]:
    """The innermost operator, module and node of autograd's backward pass that are under way."""
    operator = module = node = None
    for event in reversed(open_):
        name = event["name"]
        if event["cat"] == "cpu_op":
            if name.startswith(BACKWARD):
                node = node or event
            else:
                operator = operator or event
        elif module is None and name.startswith(MODULE):
            module = name.removeprefix(MODULE)
    return operator, module, node


def _module(module: str | None, node: Any, modules: dict[int, str]) -> str | None:
    if node is None:
        return module
    return modules.get(node.get("args", {}).get("Sequence number", -1), module)


def _dims(operator: Any) -> list[list[int]]:
    return [d for d in operator.get("args", {}).get("Input Dims", []) if isinstance(d, list)]


def _bytes(operator: Any) -> float:
    arguments = operator.get("args", {})
    total = 0.0
    for dims, kind in zip(arguments.get("Input Dims", []), arguments.get("Input type", []), strict=False):
        if isinstance(dims, list) and all(isinstance(n, int) for n in dims) and kind in SIZES and dims:
            total += math.prod(dims) * SIZES[kind]
    return total


def _flops(operator: Any) -> float:
    if operator["name"] not in PRODUCTS:
        return 0.0
    matrices = [d for d in _dims(operator) if len(d) >= 2 and all(isinstance(n, int) for n in d)]
    if len(matrices) < 2:
        return 0.0
    a, b = matrices[-2:] if "add" in operator["name"] else matrices[:2]
    return 2.0 * math.prod(a) * b[-1]


def _short(name: str) -> str:
    """A kernel's name without template arguments and return type."""
    name = re.sub(r"^void ", "", name)
    functor = re.search(r"(\w+)(?:Functor|_kernel_cuda|_kernel_impl)", name)
    head = re.split(r"[<(]", name, maxsplit=1)[0].rsplit("::", 1)[-1]
    return f"{head}[{functor.group(1)}]" if functor and functor.group(1) not in head else head


def _sorted(rows: Any) -> list[dict[str, Any]]:
    return sorted((vars(row).copy() for row in rows), key=lambda row: -row["seconds"])


def _gaps(spans: list[tuple[float, float]]) -> float:
    """Seconds between the first begin and the last end in which no span is open."""
    gaps, reach = 0.0, None
    for begin, end in sorted(spans):
        gaps += max(0.0, begin - reach) if reach is not None else 0.0
        reach = end if reach is None else max(reach, end)
    return gaps / 1e6
