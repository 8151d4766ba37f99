"""Which backend runs an operator, and why.

An explicit argument wins (and raises where it cannot run), then the first registered backend that applies to the
tensors at hand, then the reference. A backend is a module `gem_kernels.<operator>.<backend>`. It is imported only when
something may run on it, and offers

    applies(problem: Problem) -> tuple[bool, str]     # can it run this, and the reason
    forward(...), backward(...)                       # called by the custom operators in <operator>/__init__.py
    compile_cases() -> list[CompileCase]              # optional: what `compile_check` builds without a GPU
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

OPERATORS = (
    "jagged_attention",
    "gdpa",
    "block_attention",
    "rotary",
    "norms",
    "norm_linear",
    "projections",
    "project_gated",
    "project_rotary",
    "sequences",
)
REFERENCE = "reference"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a backend must know to say whether it can run.

    `features` names what is asked for beyond the plain case: "bias", "causal", "window", "shared_q" (learned
    queries), "grouped" (fewer key heads than query heads), "rope", "return_lse", "activation:<name>", "block:<size>",
    "norm:<kind>", "residual", "swish". Where there are no heads, `head_dim` is the width of a row.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    head_dim: int
    features: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and what was said about every backend that was considered."""

    backend: str
    reasons: dict[str, str]

    def __str__(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())


def interpreting() -> bool:
    """Whether Triton kernels run in its CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def module(op: str, backend: str) -> ModuleType:
    """The module that implements `op` on `backend`."""
    return importlib.import_module(f"gem_kernels.{op}.{backend}")


def _find(op: str, backend: str) -> tuple[ModuleType | None, str]:
    name = f"gem_kernels.{op}.{backend}"
    if importlib.util.find_spec(name) is None:
        return None, f"there is no module {name}"
    try:
        return importlib.import_module(name), ""
    except ImportError as error:
        return None, f"{name} cannot be imported: {error}"


def _reference_applies(problem: Problem) -> tuple[bool, str]:
    return True, "plain PyTorch runs everywhere"


def _triton_applies(problem: Problem) -> tuple[bool, str]:
    if problem.device.type != "cuda" and not (problem.device.type == "cpu" and interpreting()):
        return False, f"Triton needs a GPU (or TRITON_INTERPRET=1); the tensors are on {problem.device}"
    implementation, missing = _find(problem.op, "triton")
    return implementation.applies(problem) if implementation else (False, missing)


def _hopper_applies(problem: Problem) -> tuple[bool, str]:
    if problem.device.type != "cuda":
        return False, f"needs a Hopper GPU; the tensors are on {problem.device}"
    capability = torch.cuda.get_device_capability(problem.device)
    if capability[0] != 9:
        return False, f"needs compute capability 9.x; {problem.device} has {capability[0]}.{capability[1]}"
    implementation, missing = _find(problem.op, "hopper")
    return implementation.applies(problem) if implementation else (False, missing)


Applies = Callable[[Problem], tuple[bool, str]]
_BACKENDS: dict[str, Applies] = {"hopper": _hopper_applies, "triton": _triton_applies, REFERENCE: _reference_applies}


def register(name: str, applies: Applies) -> None:
    """Add a backend, preferred over those present; its modules are `gem_kernels.<operator>.<name>`."""
    if name in _BACKENDS:
        raise ValueError(f"the backend {name!r} is already registered")
    others = dict(_BACKENDS)
    _BACKENDS.clear()
    _BACKENDS.update({name: applies}, **others)
    _choose.cache_clear()
    _name.cache_clear()


def backends() -> tuple[str, ...]:
    """The names of the registered backends, most preferred first."""
    return tuple(_BACKENDS)


def why(op: str, q: Tensor, backend: str | None = None, features: Iterable[str] = ()) -> Choice:
    """Which backend runs `op` on tensors like `q` [T, H, D], and what every backend considered had to say.

    Raises ValueError for an unknown operator or backend, RuntimeError for a backend asked for by name that cannot run.
    """
    if op not in OPERATORS:
        raise ValueError(f"unknown operator {op!r}; expected one of {', '.join(OPERATORS)}")
    problem = Problem(op=op, device=q.device, dtype=q.dtype, head_dim=q.shape[-1], features=frozenset(features))
    return _choose(problem, backend, interpreting())


@functools.lru_cache(maxsize=1024)
def _choose(problem: Problem, backend: str | None, interpret: bool) -> Choice:
    if backend is not None:
        if backend not in _BACKENDS:
            raise ValueError(f"unknown backend {backend!r}; expected one of {', '.join(_BACKENDS)} or None")
        able, reason = _BACKENDS[backend](problem)
        if not able:
            raise RuntimeError(f"the backend {backend!r} was asked for and cannot run {problem.op}: {reason}")
        return Choice(backend, {backend: f"asked for; {reason}"})
    reasons: dict[str, str] = {}
    for name, applies in _BACKENDS.items():
        if name == "triton" and problem.device.type == "cpu":  # the interpreter is for whoever asks for it by name
            reasons[name] = "the tensors are on the CPU; the interpreter runs only when asked for by name"
            continue
        able, reasons[name] = applies(problem)
        if able:
            if name == REFERENCE and problem.device.type == "cuda":
                warnings.warn(f"{problem.op} falls back to plain PyTorch: {reasons}", stacklevel=3)
            return Choice(name, reasons)
    raise AssertionError("the reference always applies")


@torch.compiler.assume_constant_result
def _constant(
    op: str, device: str, dtype: torch.dtype, head_dim: int, features: tuple[str, ...], backend: str | None
) -> str:
    problem = Problem(op=op, device=torch.device(device), dtype=dtype, head_dim=head_dim, features=frozenset(features))
    return _choose(problem, backend, interpreting()).backend


def choose(op: str, q: Tensor, backend: str | None, features: tuple[str, ...]) -> str:
    """`why(...).backend`, for the operators: also under torch.compile, where the answer is a constant of the graph."""
    if torch.compiler.is_compiling():
        # Kernels are built per head dimension: this makes a number of what may be symbolic.
        head_dim = len(range(q.shape[-1]))
        return _constant(op, str(q.device), q.dtype, head_dim, features, backend)
    return _name(op, q.device, q.dtype, q.shape[-1], features, backend, interpreting())


@functools.lru_cache(maxsize=1024)
def _name(
    op: str, device: torch.device, dtype: torch.dtype, head_dim: int, features: tuple[str, ...], backend: str | None,
    interpret: bool,
) -> str:  # fmt: skip
    """`choose`, asked again and again: describing the problem takes the host longer than finding it in a cache."""
    problem = Problem(op=op, device=device, dtype=dtype, head_dim=head_dim, features=frozenset(features))
    return _choose(problem, backend, interpret).backend
