"""Hopper Gluon kernels on a CPU, with races and deadlocks found: Gluon has no interpreter.

    with simulating(seed=1, processors=3):
        out, lse = gem_kernels.jagged_attention.hopper.forward(...)    # CPU tensors; the host's own code launches

A kernel's Python function is run with other globals. Partitions of a program, copies and products happen in an order
that is drawn from `seed`: another seed is another order, the same seed the same. Whatever the order, every access is
checked against all those before that it must come after (`order`), so that most races show in any of them.

Checked: bounds of pointers, descriptors, buffers and shared memory; shared memory that is read and was not written;
accesses to shared memory that no barrier, wait or fence puts in order, between partitions, copies and products; global
memory that two programs of a launch touch and one of them writes; barriers' counts, bytes and phases; registers of a
product before its wait; deadlock; copies under way at the end; 32-bit overflow. `faults.KINDS` names them.

Not checked: layouts, and so everything that depends on which thread holds what (the compiler puts barriers between the
warps of one partition); registers; the precision of FP8 products on a GPU; what a launch leaves for the next one.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from gem_kernels import interpreter
from gem_kernels.simulator.faults import KINDS, Fault
from gem_kernels.simulator.language import Language
from gem_kernels.simulator.machine import Machine, Partition, Program, Steps
from gem_kernels.simulator.memory import Descriptor, Memory
from gem_kernels.simulator.source import Changes, Library, called, instead, knows
from gem_kernels.simulator.values import TYPES, Value, value

__all__ = ["KINDS", "Fault", "Simulation", "instead", "simulating"]


@dataclass
class Simulation:
    """What is simulated and how: `seed` of the first launch (each launch counts one up), `resident` programs side by
    side, `changes` to kernels ({kernel: (text, other text)}). `launches`: the kernels that have run, with programs and
    draws.
    """

    seed: int = 0
    resident: int = 4
    changes: Changes = field(default_factory=dict)
    launches: list[tuple[str, int, int]] = field(default_factory=list)

    def launch(self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Run a kernel's programs to the end; raises `Fault`."""
        grid = tuple(int(n) for n in (*grid, 1, 1, 1)[:3])
        machine = Machine(self.seed + 1009 * len(self.launches), self.resident)
        language = Language(machine, grid)
        function = Library(language, self.changes).function(kernel)
        named = dict(zip(kernel.arg_names, arguments, strict=False))
        named |= {name: x for name, x in options.items() if name in kernel.arg_names}
        memories: dict[int, Memory] = {}
        constants = {name for name, kind in kernel.fn.__annotations__.items() if "constexpr" in str(kind)}
        given = {name: x if name in constants else _argument(x, memories) for name, x in named.items()}

        def one(number: int, place: tuple[int, ...]) -> tuple[Partition, Steps]:
            program = Program(machine, place, number)
            partition = Partition(machine, program, "default", {})

            def steps() -> Steps:
                yield from called(function, **given)
                program.end(partition)

            return partition, steps()

        places = itertools.product(*(range(n) for n in reversed(grid)))
        machine.run(one(n, tuple(reversed(p))) for n, p in enumerate(places))
        self.launches.append((kernel.fn.__name__, grid[0] * grid[1] * grid[2], machine.draws))


def _argument(x: Any, memories: dict[int, Memory]) -> Any:
    """What a kernel gets for an argument of the host."""
    if isinstance(x, TensorDescriptor):
        return Descriptor(x, _memory(x.base, memories))
    if isinstance(x, Tensor):
        import triton.language as tl

        return Value(x.storage_offset() * x.element_size(), tl.pointer_type(TYPES[x.dtype]), _memory(x, memories))
    return None if x is None else value(x)


def _memory(x: Tensor, memories: dict[int, Memory]) -> Memory:
    key = x.untyped_storage().data_ptr()
    if key not in memories or x.numel() == 0:
        memories[key] = Memory(x)
    return memories[key]


@contextlib.contextmanager
def simulating(
    *, seed: int = 0, processors: int = 3, resident: int = 4, changes: Changes | None = None
) -> Iterator[Simulation]:  # fmt: skip
    """Launches of Gluon kernels are simulated, on CPU tensors, and the host is told of a Hopper GPU with `processors`
    multiprocessors. Triton's interpreter must be on (TRITON_INTERPRET=1): plain Triton kernels are simulated like the
    others, or interpreted where they use what the simulator does not have.
    """
    from triton.runtime.interpreter import InterpretedFunction  # needs NumPy

    from gem_kernels.hopper import first_call

    simulation = Simulation(seed=seed, resident=resident, changes=changes or {})
    interpreted = InterpretedFunction.run

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if warmup:
            return
        if knows(kernel):
            simulation.launch(kernel, grid, arguments, options)
        else:
            interpreter.install()
            interpreted(kernel, *arguments, grid=grid, warmup=warmup, **options)

    properties = SimpleNamespace(multi_processor_count=processors, total_memory=1 << 24, major=9, minor=0)
    nothing = contextlib.nullcontext()
    _forget()
    with (
        mock.patch.object(GluonJITFunction, "run", run),
        mock.patch.object(InterpretedFunction, "run", run),
        mock.patch.object(first_call, "_build"),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch.cuda, "device", return_value=nothing),
    ):
        try:
            yield simulation
        finally:
            _forget()


def _forget() -> None:
    """Forget what modules know of devices."""
    for name, module in list(sys.modules.items()):
        if name.startswith("gem_"):
            for known in ("programs", "memory", "_processors", "_programs"):
                clear = getattr(getattr(module, known, None), "cache_clear", None)
                if clear is not None:
                    clear()
