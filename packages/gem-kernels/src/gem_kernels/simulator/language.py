"""What stands for `gl`, `mbarrier`, `tma` and the warpgroup products while a kernel is simulated."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gem_kernels.simulator import functions as tiles
from gem_kernels.simulator.faults import Fault, place
from gem_kernels.simulator.functions import ASSEMBLY, full, larger, per_number
from gem_kernels.simulator.machine import Barrier, Machine, Partition, Steps
from gem_kernels.simulator.memory import NEVER, Descriptor, View, Writer, offsets, spread
from gem_kernels.simulator.order import Access, Clock, join
from gem_kernels.simulator.values import FLOATS, Layout, Unusable, Value, assigned, binary, is_float, value

TYPES = (
    "int1", "int8", "uint8", "int16", "int32", "uint32", "int64", "float16", "bfloat16", "float32", "float8e4nv",
    "float8e5", "pointer_type", "dtype",
)  # fmt: skip
LAYOUTS = (
    "SliceLayout", "BlockedLayout", "NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout",
    "SwizzledSharedLayout", "DistributedLinearLayout",
)  # fmt: skip


class Accumulator(Unusable):
    """What an asynchronous product gives: registers that nobody may read before a wait."""

    def __init__(self, shape: tuple[int, ...], number: int) -> None:
        because = Fault("pending", "the registers of a product are used before a wait for it")
        super().__init__(shape, tl.float32, because)
        self.number = number
        self.result: Tensor | None = None


class Language:
    """The names of `triton.experimental.gluon.language`, and those of `mbarrier`, `tma` and the products."""

    def __init__(self, machine: Machine, grid: tuple[int, ...]) -> None:
        self.machine = machine
        for name in TYPES:
            setattr(self, name, getattr(tl, name))
        for name in LAYOUTS:
            setattr(self, name, Layout)
        self.PropagateNan = tl.PropagateNan
        self.cast: Any = lambda x, dtype, bitcast=False: value(x).to(dtype, bitcast=bitcast)
        self.cumsum: Any = lambda x, axis: Value(x.data.cumsum(axis), x.dtype)
        self.exp, self.sqrt = per_number(torch.exp), per_number(torch.sqrt)
        self.constexpr = lambda x: x
        self.static_range: Any = lambda *limits: range(*(int(n) for n in limits))
        self.range = tiles.count
        self.static_assert, self.to_tensor = tiles.static_assert, assigned
        self.debug_barrier: Any = lambda: None  # the threads of a partition are one here
        self.program_id: Any = lambda axis: Value(machine.current.program.place[int(axis)], tl.int32)
        self.num_programs: Any = lambda axis: Value(grid[int(axis)], tl.int32)
        self.arange: Any = lambda a, b, _layout=None: Value(torch.arange(int(a), int(b)), tl.int32)
        self.zeros: Any = lambda shape, dtype, layout=None: full(shape, 0, dtype)
        self.full = full
        self.zeros_like: Any = lambda x: Value(torch.zeros_like(x.data), x.dtype)
        self.full_like: Any = lambda x, y: Value(torch.full_like(x.data, value(y).data), x.dtype)
        self.where, self.sum, self.max = tiles.where, tiles.total, tiles.top
        self.reduce, self.join = tiles.reduce, tiles.join
        self.maximum, self.minimum = larger("maximum"), larger("minimum")
        self.exp2, self.log2, self.rsqrt = per_number(torch.exp2), per_number(torch.log2), per_number(torch.rsqrt)
        self.floor, self.ceil, self.abs = per_number(torch.floor), per_number(torch.ceil), per_number(torch.abs)
        self.fma: Any = lambda a, b, c: binary("add", binary("mul", a, b), c)
        self.cdiv: Any = lambda a, b: binary("floordiv", binary("sub", binary("add", a, b), 1), b)
        self.convert_layout: Any = lambda x, *_a, **_o: x
        self.multiple_of: Any = lambda x, *_a: x
        self.reshape: Any = lambda x, shape: x.reshape(shape)
        self.permute: Any = lambda x, order: x.permute(order)
        self.split: Any = lambda x: (x[..., 0], x[..., 1])
        self.mbarrier = SimpleNamespace(
            MBarrierLayout=Layout, init=self._init, expect=self._expect, arrive=self._arrive, wait=self._wait
        )
        self.tma = SimpleNamespace(
            async_copy_global_to_shared=self._load_box, async_copy_shared_to_global=self._store_box,
            store_wait=self._store_wait,
        )  # fmt: skip

    @property
    def here(self) -> Partition:
        """Whose turn it is."""
        partition: Partition = self.machine.current
        return partition

    # Global memory.

    def _lanes(self, pointer: Value, mask: Any, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Byte offsets of the lanes that are not masked, and which these are."""
        at = torch.as_tensor(pointer.data, dtype=torch.int64).broadcast_to(shape).reshape(-1)
        lanes = torch.ones(at.shape, dtype=torch.bool) if mask is None else spread(mask, shape, tl.int1).bool()
        return at[lanes], lanes

    def load(self, pointer: Value, mask: Any = None, other: Any = None) -> Value:
        """Numbers; those of masked lanes are `other`, or nothing that may be used."""
        dtype = pointer.dtype.element_ty
        shape = torch.broadcast_shapes(pointer.shape, value(mask).shape if mask is not None else ())
        at, lanes = self._lanes(pointer, mask, shape)
        pointer.memory.check(at, dtype.primitive_bitwidth // 8, "a load")
        pointer.memory.note(at, dtype.primitive_bitwidth // 8, self.here.writer(), writes=False)
        # Without `other`, what masked lanes get is undefined.
        rest = other if other is not None else float("nan") if is_float(dtype) else -1
        data = spread(rest, shape, dtype).clone()
        data[lanes] = pointer.memory.gather(at, dtype)
        return Value(data.reshape(shape) if shape else data.item(), dtype)

    def store(self, pointer: Value, x: Any, mask: Any = None) -> None:
        """To the lanes that are not masked."""
        dtype = pointer.dtype.element_ty
        shape = torch.broadcast_shapes(pointer.shape, value(x).shape, value(mask).shape if mask is not None else ())
        at, lanes = self._lanes(pointer, mask, shape)
        pointer.memory.check(at, dtype.primitive_bitwidth // 8, "a store")
        pointer.memory.note(at, dtype.primitive_bitwidth // 8, self.here.writer(), writes=True)
        pointer.memory.scatter(at, spread(x, shape, dtype)[lanes], dtype)

    def inline_asm_elementwise(self, text: str, _types: str, arguments: Sequence[Any], *_a: Any, **_o: Any) -> Any:
        """Assembly of which it is known what it does."""
        short = " ".join(text.split())
        if short in ASSEMBLY:
            return ASSEMBLY[short](value(arguments[0]))
        if re.search(r"@first atom\.global\.add\.u32 old, \[\$1\], 1;", short):
            return self._add_one(arguments[0])
        raise Fault("unsupported", f"assembly {short!r}")

    def _add_one(self, pointer: Value) -> Generator[None, None, Value]:
        yield
        at, memory = int(pointer.data), pointer.memory
        memory.check(offsets(pointer), 4, "an atomic addition")
        n = int(memory.written[at // memory.unit])
        if n >= 0:
            raise Fault("race", f"a counter is added to after it was written by {memory.writers[n]}")
        memory.atomics[at] = (self.here.program.number, self.here.axis)
        cell = memory.flat(torch.int32)[at // 4 : at // 4 + 1]
        old = int(cell)
        cell += 1
        return Value(old, tl.int32)

    # Shared memory.

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[Any], _layout: Any = None) -> View:
        """A buffer that nobody has written."""
        sizes = [int(n) for n in shape]
        size = torch.Size(sizes).numel() * (dtype.primitive_bitwidth // 8)
        name = place().split(" < ")[0]
        return View.of(self.here.program.allocate(f"shared memory {sizes} of {name}", size, self), dtype, sizes)

    def touch(self, view: View, *, writes: bool) -> Steps:
        """The current partition's threads load or store."""
        yield
        self._access(view, writes, True, self.here.axis, self.here.clock[self.here.axis])

    def _access(self, view: View, writes: bool, threads: bool, axis: int, moment: int) -> None:
        """Check and remember an access of the current partition, or of something that it begins."""
        if not writes and not view.is_written:
            raise view.unwritten()
        who = self.here
        access = Access(axis, moment, writes, threads, view.first, view.last, who.name, place())
        view.buffer.history.add(access, who.clock)

    def fence_async_shared(self, cluster: bool = False) -> Steps:
        """What this partition has stored, or knows to be stored, is seen by copies and products."""
        for buffer in self.here.program.buffers:
            buffer.history.fence(self.here.clock)
        yield

    # Barriers.

    def _barrier(self, view: View) -> Barrier:
        found = self.here.program.barriers.get((id(view.buffer), view.first))
        if found is None:
            raise Fault("uninitialised", f"a barrier at byte {view.first} of {view.buffer.name} is used before init")
        return found

    def _init(self, view: View, count: int) -> None:
        key = (id(view.buffer), view.first)
        if key in self.here.program.barriers:
            raise Fault("barrier", f"the barrier at byte {view.first} of {view.buffer.name} is initialised again")
        short = view.buffer.name.rsplit(" ", 1)[-1]
        name = f"barrier {view.first // 8} of {short} ({view.buffer.name.split(' of ')[-1]})"
        self.here.program.barriers[key] = Barrier(name, self.machine.axis(), int(count))

    def _expect(self, view: View, size: Any, pred: Any = True) -> Steps:
        yield
        if pred:
            barrier = self._barrier(view)
            barrier.expect(int(size))
            barrier.arrive(self.here.tell(), 1)

    def _arrive(self, view: View, *, count: Any = 1, pred: Any = True) -> Steps:
        yield
        if pred:
            self._barrier(view).arrive(self.here.tell(), int(count))

    def _wait(self, view: View, phase: Any, pred: Any = True, deps: Any = ()) -> Steps:
        if not pred:
            return
        barrier, parity, here = self._barrier(view), int(phase), self.here
        where = place()
        barrier.waiting.append((here, parity))
        yield from here.wait(
            lambda: barrier.passed(parity), lambda: f"waits for {barrier}, parity {parity}, at {where}"
        )
        barrier.waiting.remove((here, parity))
        known = here.clock.get(barrier.axis, 0)
        if 0 < barrier.finished <= known:
            raise Fault("barrier", f"a wait for parity {parity} of {barrier} passes on a phase already seen")
        if known < barrier.finished - 1:
            why = f"with {known} phases known before: had it come earlier, it had passed two phases too early"
            raise Fault("barrier", f"a wait for parity {parity} of {barrier} passes {why}")
        join(here.clock, barrier.released)

    # Copies and products.

    def _load_box(self, desc: Descriptor, coordinates: Any, barrier_view: View, view: View, pred: Any = True) -> Steps:
        yield
        if not pred:
            return
        barrier, here = self._barrier(barrier_view), self.here
        self._check_box(desc, view)
        self._access(view, True, False, barrier.axis, barrier.finished + 1)
        view.tensor.view(torch.uint8).fill_(255)  # whatever is there from now on
        view.buffer.written[view.first : view.last] = True
        writer, at = here.writer(), [int(c) for c in coordinates]

        def act() -> None:
            view.write(desc.load(at, writer).view(view.shape))
            barrier.complete(desc.block_type.nbytes)

        self.machine.begin(here, act, here.program.loads, 0)

    def _check_box(self, desc: Descriptor, view: View) -> None:
        if torch.Size(view.shape).numel() != torch.Size(desc.block).numel() or view.dtype != desc.dtype:
            raise Fault("bounds", f"a box {desc.block} of {desc.dtype} and a buffer {view.shape} of {view.dtype}")
        if (view.buffer.offset + view.first) % 128:
            raise Fault("bounds", f"a box at byte {view.buffer.offset + view.first}, which is no multiple of 128")

    def _store_box(self, desc: Descriptor, coordinates: Any, view: View) -> Steps:
        yield
        here = self.here
        self._check_box(desc, view)
        here.stores_made += 1
        self._access(view, False, False, here.stores_axis, here.stores_made)
        at, seen = [int(c) for c in coordinates], here.writer()
        # A wait says that shared memory has been read; that the result is in memory is known at the end of the launch.
        never = Writer(seen.program, self.machine.axis(), NEVER, seen.clock, seen.who, seen.where)
        desc.claim(at, never)
        self.machine.begin(here, lambda: desc.store(at, view.tensor.clone()), here.stores, here.stores_made)

    def _store_wait(self, pendings: Any) -> Steps:
        here = self.here
        yield
        up_to = here.stores_made - int(pendings)
        here.settle(here.stores, up_to)
        here.clock[here.stores_axis] = max(up_to, here.clock.get(here.stores_axis, 0))

    def warpgroup_mma(
        self, a: Any, b: View, acc: Any, *, use_acc: Any = True, is_async: Any = False, **_o: Any
    ) -> Generator[None, None, Value]:
        """A product that reads shared memory until somebody has waited for it."""
        here = self.here
        here.products_made += 1
        number = here.products_made
        for view in (x for x in (a, b) if isinstance(x, View)):
            self._access(view, False, False, here.products_axis, number)
        shape = (a.shape[0], b.shape[1])
        if a.shape[1] != b.shape[0] or acc.shape != shape:
            raise Fault("unsupported", f"a product of {a.shape}, {b.shape} and {acc.shape}")
        result = Accumulator(shape, number)
        left = None if isinstance(a, View) else a.data.to(FLOATS[a.dtype])
        start = None if not use_acc else acc if isinstance(acc, Accumulator) else acc.data

        def act() -> None:
            x = a.tensor if left is None else left
            product = x.float() @ b.tensor.float()
            if isinstance(start, Accumulator):
                assert start.result is not None
                product = start.result + product
            elif start is not None:
                product = start + product
            result.result = product

        self.machine.begin(here, act, here.products, number)
        yield
        if not is_async:
            waited: Value = yield from self._products_wait(0, (result,))
            return waited
        return result

    def _products_wait(self, num_outstanding: Any = 0, deps: Any = None) -> Generator[None, None, Any]:
        here = self.here
        yield
        up_to = here.products_made - int(num_outstanding)
        here.settle(here.products, up_to)
        here.clock[here.products_axis] = max(up_to, here.clock.get(here.products_axis, 0))
        out = []
        for x in deps:
            if isinstance(x, Accumulator) and x.result is not None and x.number <= up_to:
                x = Value(x.result, tl.float32)
            out.append(x)
        return out[0] if len(out) == 1 else tuple(out)

    # Partitions.

    def warp_specialize(self, partitions: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> Steps:
        """The first function runs here, the others beside it; this ends when all have ended."""
        if not len(partitions) - 1 == len(warps) == len(registers):
            raise Fault("unsupported", f"{len(partitions)} partitions, {len(warps)} numbers of warps")
        here, running, ended = self.here, set[str](), Clock()
        known = here.tell()

        def steps(one: Partition, f: Callable[..., Any], arguments: Any) -> Steps:
            yield from f(*arguments)
            if one.products:
                raise Fault("unfinished", f"{one.name} ends with products under way", "the end")
            join(ended, one.clock)
            running.remove(one.name)

        for n, (f, arguments) in enumerate(partitions[1:], 1):
            one = Partition(self.machine, here.program, f"{f.__name__} {n}", known)
            running.add(one.name)
            self.machine.start(one, steps(one, f, arguments))
        f, arguments = partitions[0]
        yield from f(*arguments)
        yield from here.wait(lambda: not running, lambda: f"has ended and waits for {sorted(running)}")
        join(here.clock, ended)
