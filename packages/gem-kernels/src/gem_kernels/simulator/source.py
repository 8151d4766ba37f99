"""Kernels as Python functions: what Triton's compiler would read is run by Python instead, in other globals.

The text of a kernel stays what it is but for a few things: numbers that are assigned to plain variables become values,
as Triton makes tensors of them; `range` counts in values; functions become generators, which stop where others may go
on; and, if a test asks for it, some text is replaced by other text.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Generator, Mapping
from types import CodeType, GeneratorType, ModuleType
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.runtime.jit import JITFunction

from gem_kernels.simulator.language import Language
from gem_kernels.simulator.machine import Machine
from gem_kernels.simulator.values import assigned

Changes = Mapping[Any, tuple[str, str]]


class _Values(ast.NodeTransformer):
    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Assign(node.targets, _applied("__assigned__", node.value)), node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        value = self.visit(node.value)
        return ast.copy_location(ast.Assign([node.target], _applied("__constant__", value)), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        call = ast.Call(ast.Name("__call__", ast.Load()), [node.func, *node.args], node.keywords)
        return ast.copy_location(ast.YieldFrom(call), node)


def _applied(name: str, value: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [value], [])


def called(f: Callable[..., Any], *args: Any, **options: Any) -> Generator[None, None, Any]:
    """A call out of a kernel: what it calls may stop, and others go on meanwhile."""
    result = f(*args, **options)
    if isinstance(result, GeneratorType):
        result = yield from result
    return result


def constant(x: Any) -> Any:
    """The Python object in a constexpr, or the object itself."""
    return constant(x.value) if isinstance(x, (tl.constexpr, gl.constexpr)) else x


def is_kernel(x: Any) -> bool:
    """Whether x is a function of Triton or Gluon."""
    if isinstance(x, JITFunction):
        return True
    return type(x).__name__ == "InterpretedFunction"  # whose module needs NumPy, which kernels do not


@functools.cache
def _names() -> frozenset[str]:
    """What the simulator has of `tl` and `gl`."""
    return frozenset(dir(Language(Machine(0, 1), (1, 1, 1))))


def instead(module: ModuleType, text: str, other: str) -> dict[Any, tuple[str, str]]:
    """For `changes`: every kernel of a module in whose source `text` is, with `other` in its place. Raises ValueError
    if it is in none.
    """
    kernels = [x for x in vars(module).values() if is_kernel(x) and x.fn.__module__ == module.__name__]
    found = {x: (text, other) for x in kernels if text in inspect.getsource(x.fn)}
    if not found:
        raise ValueError(f"{text!r} is in no kernel of {module.__name__}")
    return found


@functools.cache
def knows(kernel: Any) -> bool:
    """Whether the simulator has all of `tl` and `gl` that a kernel uses, and the functions that it calls."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("tl", "gl"):
            if node.attr not in _names():
                return False
        elif isinstance(node, ast.Name):
            other = kernel.fn.__globals__.get(node.id)
            if is_kernel(other) and other is not kernel and not knows(other):
                return False
    return True


@functools.cache
def _code(kernel: Any, change: tuple[str, str] | None) -> CodeType:
    """The function of a kernel, rewritten."""
    lines, first = inspect.getsourcelines(kernel.fn)
    text = textwrap.dedent("".join(lines))
    if change is not None:
        if text.count(change[0]) == 0:
            raise ValueError(f"{change[0]!r} is not in {kernel.fn.__name__}")
        text = text.replace(*change)
    tree = ast.parse(text)
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list, function.returns = [], None
    for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
        argument.annotation = None
    tree = _Values().visit(tree)
    ast.fix_missing_locations(tree)
    ast.increment_lineno(tree, first - 1)
    return compile(tree, inspect.getfile(kernel.fn), "exec")


class Library:
    """The functions of one launch, made when they are first called. `changes`: replaced text, by kernel."""

    def __init__(self, language: Language, changes: Changes) -> None:
        self.language, self.changes = language, changes
        self.made: dict[int, Callable[..., Any]] = {}
        self.globals: dict[int, dict[str, Any]] = {}
        known: list[tuple[Any, Any]] = [
            (gl, language), (tl, language), (hopper.mbarrier, language.mbarrier), (hopper.tma, language.tma),
            (hopper.fence_async_shared, language.fence_async_shared),
            (hopper.warpgroup_mma, language.warpgroup_mma),
            (hopper.warpgroup_mma_wait, language._products_wait),
        ]  # fmt: skip
        self.known = {id(real): simulated for real, simulated in known}

    def function(self, kernel: Any) -> Callable[..., Any]:
        """A kernel, or a helper of kernels, to be called."""
        key = id(kernel)
        if key not in self.made:
            local: dict[str, Any] = {}
            exec(_code(kernel, self.changes.get(kernel)), self._globals(kernel.fn), local)
            self.made[key] = local[kernel.fn.__name__]
        return self.made[key]

    def _globals(self, fn: Any) -> dict[str, Any]:
        real = fn.__globals__
        if id(real) not in self.globals:
            made = {name: self._stand_in(x) for name, x in real.items()}
            made |= {
                "range": self.language.range, "__assigned__": assigned, "__constant__": constant, "__call__": called,
                "__kernel__": True,
            }  # fmt: skip
            self.globals[id(real)] = made
        return self.globals[id(real)]

    def _stand_in(self, x: Any) -> Any:
        if id(x) in self.known:
            return self.known[id(x)]
        if is_kernel(x):
            return _Later(self, x)
        return constant(x)


class _Later:
    """A helper, made when it is called."""

    def __init__(self, library: Library, kernel: Any) -> None:
        self.library, self.kernel, self.__name__ = library, kernel, kernel.fn.__name__

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.library.function(self.kernel)(*args, **options)
